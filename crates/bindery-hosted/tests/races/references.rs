//! References by frame number: a CPU that knows only frame numbers takes references to the folios
//! that it finds there, while other CPUs map, touch, fork, unmap, collapse, split, pin, truncate
//! and punch.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread;

use bindery::addr::{Frame, Order, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, CollapseLimits, FileAccess, MapObject, MapRequest, Memory,
    Object, PinTime, Protection, Sharing, testing,
};
use bindery_hosted::{Config, Machine, Program, Walk};

use crate::support::objects::{Chance, PAGE, memfd, use_object_order};
use crate::support::{self, GIB, MIB, READ_WRITE, audit, fixed, memory_with, options, use_order};

const AT: u64 = GIB;
const SPAN: u64 = 8 * MIB;
const OBJECT: u64 = 4 * MIB;
const WORKERS: u16 = 2;
const STEPS: u32 = 6_000;

/// Changes the use of frames. Most operations fail for some reason, which is acceptable.
fn change<'m, A: Walk>(
    machine: &Machine<A>,
    space: &AddressSpace<'m, Machine<A>>,
    object: &Object<'m, Machine<A>>,
    chance: &mut Chance,
) {
    let (at, length) = (chance.page(), (chance.below(600) + 1) * PAGE);
    match chance.below(12) {
        0 => _ = space.mmap(&fixed(at.0, length)),
        1 => {
            let request = MapRequest { sharing: Sharing::Shared, ..fixed(at.0, length) };
            let offset = chance.below(OBJECT / PAGE) * PAGE;
            let access = FileAccess::READ | FileAccess::WRITE;
            _ = space.mmap_object(&request, &MapObject { object, offset, access });
        }
        2 => _ = space.munmap(at, length),
        3 => _ = space.madvise(at, length, Advice::DontNeed),
        4 => {
            _ = space.mprotect(at, length, Protection::empty());
            _ = space.mprotect(at, length, READ_WRITE);
        }
        5 => {
            _ = space.collapse_some(at, 1, &CollapseLimits::default());
            _ = space.madvise(at, length, Advice::Collapse);
        }
        6 => _ = space.split_folio(at, Order(chance.below(4) as u8)),
        7 => _ = object.punch_hole(chance.below(OBJECT), chance.below(OBJECT / 2) + 1),
        8 => {
            // A pinned page outlives its mapping and its index entry in the object.
            let pin = space.pin(at, 16, Access::Write, PinTime::Long);
            _ = space.munmap(at, length);
            _ = object.set_size(chance.below(2 * OBJECT));
            drop(pin);
        }
        9 => {
            let Ok(child) = space.fork() else { return };
            let program = Program::new(machine, &child);
            (0..8).for_each(|number| _ = program.store(chance.page(), number));
        }
        _ => {
            let program = Program::new(machine, space);
            (0..8).for_each(|number| _ = program.store(chance.page(), number));
        }
    }
}

/// Takes references until the other CPUs are done and counts the successful attempts. A held folio
/// retains its frames.
fn walk<A: Walk>(
    memory: &Memory<Machine<A>>,
    (first, count): (Frame, u32),
    mut chance: Chance,
    working: &AtomicU32,
) -> u64 {
    let mut held = 0;
    while working.load(Relaxed) > 0 {
        let frame = Frame(first.0 + chance.below(u64::from(count)) as u32);
        let folio = |frame| testing::with_reference(memory, frame, |head, pages| (head, pages));
        let got = testing::with_reference(memory, frame, |head, pages| {
            assert!((head.0..head.0 + pages).contains(&frame.0), "{frame:?} is not in the folio");
            for page in [0, pages / 2, pages - 1] {
                let again = folio(Frame(head.0 + page));
                assert_eq!(again, Some((head, pages)), "the folio was freed or cut");
            }
        });
        held += u64::from(got.is_some());
    }
    held
}

fn scenario<A: Walk>(seed: u64, order: u8) -> u64 {
    // Uses little memory, so that frames are soon reused.
    let config = Config { memory: 24 * MIB, cpus: WORKERS + 1, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_object_order(&memory, order);
    use_order(&memory, order);
    let held = AtomicU64::new(0);
    {
        let object = memfd(&memory, OBJECT);
        let space = AddressSpace::new(&memory, options()).unwrap();
        let working = AtomicU32::new(u32::from(WORKERS));
        let chance =
            |cpu: u16| Chance::new((seed + 1) * 7919 + u64::from(cpu) * 104_729, (AT, SPAN));
        thread::scope(|scope| {
            let (machine, memory, space, object) = (&machine, &memory, &space, &object);
            let (working, held) = (&working, &held);
            for cpu in 0..WORKERS {
                scope.spawn(move || {
                    machine.on_cpu(Cpu(cpu), || {
                        let mut chance = chance(cpu);
                        (0..STEPS).for_each(|_| change(machine, space, object, &mut chance));
                        working.fetch_sub(1, Relaxed);
                    });
                });
            }
            scope.spawn(move || {
                machine.on_cpu(Cpu(WORKERS), || {
                    held.store(walk(memory, machine.frames(), chance(WORKERS), working), Relaxed);
                });
            });
        });
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.commitment().committed(), 0, "seed {seed}");
    held.into_inner()
}

#[test]
fn references_by_frame_number_hold_only_folios() {
    let mut held = 0;
    for seed in 0..12 {
        let order = [0, 4, 9][seed as usize % 3];
        held += match seed % 4 {
            0 | 1 => scenario::<AArch64>(seed, order),
            2 => scenario::<Riscv64<3>>(seed, order),
            _ => scenario::<X86_64<4>>(seed, order),
        };
    }
    assert!(held > 10_000, "only {held} references were taken");
    println!("{held} references by number");
}

#[test]
fn a_pinned_unmapped_page_has_no_owner() {
    let (machine, memory) = support::strict::<X86_64<4>>(16 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let object = memfd(&memory, OBJECT);
    space.mmap(&fixed(AT, 2 * PAGE)).unwrap();
    let access = FileAccess::READ | FileAccess::WRITE;
    let shared = MapRequest { sharing: Sharing::Shared, ..fixed(AT + MIB, PAGE) };
    space.mmap_object(&shared, &MapObject { object: &object, offset: 0, access }).unwrap();
    let pin = |at| {
        Program::new(&machine, &space).store(VirtAddr(at), 1).unwrap();
        space.pin(VirtAddr(at), 1, Access::Write, PinTime::Long).unwrap()
    };
    let (anonymous, of_object) = (pin(AT), pin(AT + MIB));
    let unmapped = [anonymous.first(), of_object.first()];
    space.munmap(VirtAddr(AT), 2 * PAGE).unwrap();
    object.set_size(0).unwrap();
    // The auditor checks the owner of unmapped folios.
    audit(&machine, &memory, &[&space]);
    for frame in unmapped {
        assert!(testing::with_reference(&memory, frame, |_, _| ()).is_some(), "the pin keeps it");
    }
    drop((anonymous, of_object));
    for frame in unmapped {
        assert!(testing::with_reference(&memory, frame, |_, _| ()).is_none(), "nobody has it");
    }
    audit(&machine, &memory, &[&space]);
}
