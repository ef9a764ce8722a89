//! Moves that release their locks between two pieces, concurrent with calls that look for the
//! pages: a truncation, a sync, and a program on another CPU. That CPU's TLB is flushed for both
//! ranges only at the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, MapObject, MapRequest, Memory, Place,
    Remap, Sealing, Sharing,
};
use bindery_hosted::{Config, Machine, MemoryFiles, Program, Walk};

use crate::support::kernel::Finished;
use crate::support::measured::{Measured, measured};
use crate::support::waiting;
use crate::support::{GIB, KIB, MIB, READ_WRITE, audit, memory_with, options};

on_every_architecture! {
    a_sync_beside_a_move_saves_all_stores => saved_on_the_way;
    a_truncation_finds_all_pages_of_moving_mappings => truncated_on_the_way;
    a_hole_in_a_moved_table_reaches_everywhere => punched_on_the_way;
}

/// Five tables; neither end is at a table edge, and the two addresses are not congruent.
const SIZE: u64 = 9 * MIB;
const PLACES: [u64; 2] = [GIB + 64 * KIB, 2 * GIB + 192 * KIB];
const MOVES: usize = 24;

fn stamp(page: u64) -> u64 {
    page ^ 0x5eed_0000
}

fn truncated_on_the_way<A: Walk>() {
    let config = Config { memory: 64 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let object = memory.shared_memory(SIZE, Sealing::Allowed, Accounting::PerPage).unwrap();
    let access = FileAccess::READ | FileAccess::WRITE;
    for sharing in [Sharing::Shared, Sharing::Private] {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let request = MapRequest {
            length: SIZE,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(PLACES[0])),
            sharing,
            ..MapRequest::default()
        };
        space.mmap_object(&request, &MapObject { object: &object, offset: 0, access }).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let _finished = Finished(&over);
            scope.spawn(|| machine.on_cpu(Cpu(1), || touch_until(&machine, &space, &over)));
            scope.spawn(|| {
                machine.on_cpu(Cpu(2), || {
                    while !over.load(Relaxed) {
                        object.set_size(0).unwrap();
                        object.set_size(SIZE).unwrap();
                        thread::yield_now();
                    }
                });
            });
            machine.on_cpu(Cpu(0), || {
                for round in 0..MOVES {
                    space.madvise(VirtAddr(PLACES[round % 2]), SIZE, Advice::PopulateWrite).ok();
                    let (from, to) = (PLACES[round % 2], PLACES[(round + 1) % 2]);
                    let to = Remap::To(VirtAddr(to));
                    space.mremap(VirtAddr(from), SIZE, SIZE, to).unwrap();
                }
            });
        });
        audit(&machine, &memory, &[&space]);
        // No page beyond the end stays mapped, whatever its address at the truncation.
        object.set_size(0).unwrap();
        assert_eq!(object.resident_pages(), 0);
        let program = Program::new(&machine, &space);
        for page in 0..SIZE / PAGE_SIZE {
            let at = VirtAddr(PLACES[MOVES % 2] + page * PAGE_SIZE);
            assert!(program.load(at).is_err(), "{at:?} of {sharing:?} is still mapped");
        }
        object.set_size(SIZE).unwrap();
        drop(space);
    }
    drop(object);
    audit(&machine, &memory, &[]);
}

/// Whole tables move between edges that move by leaves, so the move has several pieces. At each
/// point where the mover holds no table, another CPU punches a hole of one page into the first
/// table, then loads from the old address through its TLB. By then the page has no owner.
fn punched_on_the_way<A: Walk>() {
    const PIECE: u64 = 2 * MIB;
    const EDGE: u64 = 64 * KIB;
    const FROM: u64 = 2 * GIB - PIECE - EDGE;
    const TO: u64 = 4 * GIB - PIECE - EDGE;
    const LENGTH: u64 = 2 * (PIECE + EDGE);
    const HOLE: u64 = EDGE;
    for step in 0.. {
        let (machine, memory) = measured::<A>(32 * MIB);
        let object = memory.shared_memory(LENGTH, Sealing::Allowed, Accounting::PerPage).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let request = MapRequest {
            length: LENGTH,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(FROM)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        space.mmap_object(&request, &MapObject { object: &object, offset: 0, access }).unwrap();
        let load = || machine.load_user(space.root(), VirtAddr(FROM + HOLE), |_| Err(()));
        let points = meet(
            (&machine, &memory),
            step,
            || {
                space.enter();
                for offset in [0, HOLE, HOLE + PIECE, HOLE + 2 * PIECE] {
                    space.fault(VirtAddr(FROM + offset), Access::Write).unwrap();
                }
                load().unwrap();
            },
            || object.punch_hole(HOLE, PAGE_SIZE).unwrap(),
            || assert!(load().is_err(), "the hole is still mapped at the old place"),
            || {
                let to = Remap::To(VirtAddr(TO));
                space.mremap(VirtAddr(FROM), LENGTH, LENGTH, to).unwrap();
            },
        );
        machine.assert_clean();
        if points <= step {
            assert!(step > 4, "the mover has {step} points");
            return;
        }
    }
}

/// Runs `moves` on CPU 0. The points of `moves` at which it holds no table are counted, and their
/// number is returned. CPU 1 runs `prepare` before the move begins. At point `step`, it runs `call`
/// and then `after`. The mover continues when both have returned or when `call` waits for the
/// mover.
fn meet<A: Walk>(
    (machine, memory): (&Machine<A>, &Memory<Measured<A>>),
    step: u64,
    prepare: impl FnOnce() + Send,
    call: impl Fn() + Send,
    after: impl Fn() + Send,
    moves: impl FnOnce(),
) -> u64 {
    let (ask, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let (ready, is_ready) = mpsc::channel();
    let points = Arc::new(AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(move || {
            machine.on_cpu(Cpu(1), || {
                prepare();
                ready.send(()).unwrap();
                while asked.recv().is_ok() {
                    let waits = answer.clone();
                    waiting::told(move || waits.send(()).unwrap_or(()), &call);
                    after();
                    let _ = answer.send(());
                }
            });
        });
        is_ready.recv().unwrap();
        let passed = Arc::clone(&points);
        let hook = Box::new(move || {
            if passed.fetch_add(1, Relaxed) == step {
                ask.send(()).unwrap();
                answers.recv().unwrap();
            }
        });
        machine.on_cpu(Cpu(0), || memory.platform().with_hook(hook, moves));
    });
    points.load(Relaxed)
}

/// A program that touches both ranges. It may read only a page's own stamp or zero.
fn touch_until<A: Walk>(
    machine: &Machine<A>,
    space: &AddressSpace<'_, Machine<A>>,
    over: &AtomicBool,
) {
    let program = Program::new(machine, space);
    let mut number = 1_u64;
    while !over.load(Relaxed) {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let page = (number >> 33) % (SIZE / PAGE_SIZE);
        let at = VirtAddr(PLACES[(number >> 63) as usize] + page * PAGE_SIZE);
        if number >> 62 & 1 == 0 {
            // Fails while the mapping is elsewhere or the file is short.
            let _ = program.store(at, stamp(page));
        } else if let Ok(found) = program.load(at) {
            assert!(found == 0 || found == stamp(page), "{at:?} shows {found:#x}");
        }
    }
}

/// At each point where the mover holds no table, another CPU saves the file, then stores at the old
/// address through its TLB. The next sync saves every stored value.
fn saved_on_the_way<A: Walk>() {
    const PAGES: [u64; 4] = [0, 1, 600, 1100];
    for step in 0.. {
        let (machine, memory) = measured::<A>(32 * MIB);
        let files = MemoryFiles::new();
        let file = memory.file(&files, 1, SIZE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let request = MapRequest {
            length: SIZE,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(PLACES[0])),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        space.mmap_object(&request, &MapObject { object: &file, offset: 0, access }).unwrap();
        let places = PAGES.map(|page| VirtAddr(PLACES[0] + page * PAGE_SIZE));
        let store = |at, value| machine.store_user(space.root(), at, value, |_| Err(()));
        let points = meet(
            (&machine, &memory),
            step,
            || {
                space.enter();
                for at in places {
                    space.fault(at, Access::Write).unwrap();
                    store(at, 1).unwrap();
                }
            },
            || file.sync(0, u64::MAX).unwrap(),
            || {
                // Fails if the TLB no longer has the page.
                let _stored = places.map(|at| store(at, 2));
            },
            || {
                let to = Remap::To(VirtAddr(PLACES[1]));
                space.mremap(VirtAddr(PLACES[0]), SIZE, SIZE, to).unwrap();
            },
        );
        file.sync(0, u64::MAX).unwrap();
        let mut content = vec![0; SIZE as usize];
        file.read(0, &mut content).unwrap();
        let differs = content.iter().zip(&files.content(1)).position(|(one, other)| one != other);
        assert_eq!(differs, None, "at point {step}, a byte was stored and not saved");
        machine.assert_clean();
        let most = memory.platform().take_most();
        assert!(most.entries <= 1024 && most.bytes <= 64 * KIB, "{most:?}");
        assert!(most.tables <= 512, "{most:?}");
        if points <= step {
            assert!(step > 8, "the mover has {step} points");
            return;
        }
    }
}
