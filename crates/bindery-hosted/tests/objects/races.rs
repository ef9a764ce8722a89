//! Operations of an address space concurrent with changes of its objects. A walk of the reverse map
//! finds every entry, or no TLB has the page.
//!
//! `BINDERY_DEEPER` makes each race twenty times as long.

use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    AddressSpace, Advice, Inspection, MapRequest, Memory, Object, Pager, Place, Protection,
    ReadBuffer, Sharing,
};
use bindery_hosted::{Config, Machine, MemoryFiles, Program};

use crate::support::kernel::{Finished, rounds};
use crate::support::objects::{PAGE, memfd};
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, memory_with, options};

type A = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<A>>;

const AT: u64 = GIB;
/// The number of repetitions of a race; a multiple of 64, so that each delay occurs equally often.
const ROUNDS: u64 = 640;
/// The repetitions of a race that creates a thousand mappings first.
const LONG_ROUNDS: u64 = 128;

fn fixture(cpus: u16) -> (Machine<A>, Memory<Machine<A>>) {
    memory_with::<A>(Config { memory: 96 * MIB, cpus, ..Config::default() })
}

/// Runs `there` on another CPU, and `here` `delay` loop iterations after both are ready.
fn at_once<T>(
    machine: &Machine<A>,
    delay: u64,
    here: impl FnOnce() -> T,
    there: impl FnOnce() + Send,
) -> T {
    let go = AtomicBool::new(false);
    let go = &go;
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            machine.on_cpu(Cpu(1), || {
                while !go.load(Relaxed) {
                    hint::spin_loop();
                }
                (0..delay).for_each(|_| hint::spin_loop());
                there();
            });
        });
        go.store(true, Relaxed);
        let result = here();
        other.join().unwrap();
        result
    })
}

/// Pages so far apart that a walk over them takes a while.
const CHUNK: u64 = 128 * MIB;
const CHUNKS: u64 = 64;

fn chunk(number: u64) -> VirtAddr {
    VirtAddr(AT + number * CHUNK)
}

#[test]
fn a_truncated_prot_none_page_leaves_every_tlb() {
    const OBJECT: u64 = 64 * PAGE;
    const MORE: u64 = CHUNKS * CHUNK;
    let (machine, memory) = fixture(2);
    let object = memfd(&memory, OBJECT);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    // Maps memory behind the object, so that the call continues for a while after the object's
    // pages, under other locks.
    space.mmap(&fixed(AT + OBJECT, MORE)).unwrap();
    for number in 1..CHUNKS {
        program.store(chunk(number), 1).unwrap();
    }
    map(&space, &object, AT, OBJECT, Sharing::Shared).unwrap();
    (0..rounds(ROUNDS)).for_each(|round| {
        object.set_size(OBJECT).unwrap();
        space.mprotect(VirtAddr(AT), OBJECT + MORE, READ_WRITE).unwrap();
        for page in 0..OBJECT / PAGE {
            program.store(VirtAddr(AT + page * PAGE), 1).unwrap();
        }
        let hide = || space.mprotect(VirtAddr(AT), OBJECT + MORE, Protection::empty()).unwrap();
        at_once(&machine, round % 64 * 20, hide, || object.set_size(0).unwrap());
        machine.assert_clean();
    });
    audit(&machine, &memory, &[&space]);
}

/// A mapping whose entries `fork` copies.
fn copied_mapping<'m>(
    memory: &'m Memory<Machine<A>>,
    machine: &Machine<A>,
    object: &Object<'m, Machine<A>>,
    sharing: Sharing,
) -> Space<'m> {
    let space = AddressSpace::new(memory, options()).unwrap();
    map(&space, object, AT, CHUNKS * CHUNK, sharing).unwrap();
    match sharing {
        Sharing::Private => Program::new(machine, &space).store(VirtAddr(AT), 1).unwrap(),
        Sharing::Shared => space.madvise(VirtAddr(AT), PAGE, Advice::GuardInstall).unwrap(),
    }
    space
}

fn fork_against_truncation(sharing: Sharing) {
    let (machine, memory) = fixture(2);
    let object = memfd(&memory, CHUNKS * CHUNK);
    let space = copied_mapping(&memory, &machine, &object, sharing);
    let program = Program::new(&machine, &space);
    (0..rounds(ROUNDS)).for_each(|round| {
        object.set_size(CHUNKS * CHUNK).unwrap();
        for number in 1..CHUNKS {
            program.load(chunk(number)).unwrap();
        }
        let fork = || space.fork().unwrap();
        let child = at_once(&machine, round % 64 * 100, fork, || object.set_size(PAGE).unwrap());
        for number in 1..CHUNKS {
            let found = child.inspect(chunk(number));
            assert!(!matches!(found, Inspection::Page { .. }), "round {round}: {found:?}");
        }
    });
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_child_maps_nothing_its_object_has_lost() {
    fork_against_truncation(Sharing::Private);
    fork_against_truncation(Sharing::Shared);
}

/// The storage's first word of a page.
fn stored(files: &MemoryFiles, page: u64) -> u64 {
    let mut bytes = vec![0; PAGE as usize];
    ReadBuffer::over(&mut bytes, |into| files.read(1, page, into)).unwrap();
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

#[test]
fn a_childs_write_during_a_save_is_saved() {
    let files = MemoryFiles::new();
    let (machine, memory) = fixture(2);
    let object = memory.file(&files, 1, CHUNKS * CHUNK).unwrap();
    let space = copied_mapping(&memory, &machine, &object, Sharing::Shared);
    let program = Program::new(&machine, &space);
    (0..rounds(ROUNDS)).for_each(|round| {
        for number in 1..CHUNKS {
            program.store(chunk(number), round).unwrap();
        }
        let fork = || space.fork().unwrap();
        let save = || object.sync(0, u64::MAX).unwrap();
        let child = at_once(&machine, round % 64 * 100, fork, save);
        for number in 1..CHUNKS {
            Program::new(&machine, &child).store(chunk(number), round + 1_000_000).unwrap();
        }
        object.sync(0, u64::MAX).unwrap();
        for number in 1..CHUNKS {
            assert_eq!(stored(&files, number * CHUNK / PAGE), round + 1_000_000, "round {round}");
        }
    });
    audit(&machine, &memory, &[&space]);
}

/// One CPU writes to the first page of a file mapping, another saves the file continuously, and
/// `takes_away` makes the page inaccessible. Then the storage and memory have the same content.
fn saved_while_it_goes(length: u64, extra: impl Fn(&Space<'_>), takes_away: impl Fn(&Space<'_>)) {
    let files = MemoryFiles::new();
    let (machine, memory) = fixture(3);
    let object = memory.file(&files, 1, length).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let mut value = 0;
    (0..rounds(LONG_ROUNDS)).for_each(|round| {
        space.munmap(VirtAddr(AT), GIB).unwrap();
        map(&space, &object, AT, length, Sharing::Shared).unwrap();
        extra(&space);
        let (over, stores) = (AtomicBool::new(false), AtomicU64::new(0));
        value = thread::scope(|scope| {
            let _finished = Finished(&over);
            let writer = scope.spawn(|| {
                machine.on_cpu(Cpu(1), || {
                    let program = Program::new(&machine, &space);
                    let mut next = value;
                    while program.store(VirtAddr(AT), next + 1).is_ok() {
                        next += 1;
                        stores.fetch_add(1, Relaxed);
                    }
                    next
                })
            });
            scope.spawn(|| {
                machine.on_cpu(Cpu(2), || {
                    while !over.load(Relaxed) {
                        object.sync(0, PAGE).unwrap();
                    }
                });
            });
            while stores.load(Relaxed) < 10 {
                thread::yield_now();
            }
            takes_away(&space);
            writer.join().unwrap()
        });
        object.sync(0, PAGE).unwrap();
        let mut cached = [0; 8];
        object.read(0, &mut cached).unwrap();
        let cached = u64::from_le_bytes(cached);
        assert_eq!((cached, stored(&files, 0)), (value, value), "round {round}");
    });
    audit(&machine, &memory, &[&space]);
}

/// A thousand mappings behind the file's, which are unmapped together with it.
fn crowd(space: &Space<'_>) {
    for page in 1..=1000 {
        let protection = if page % 2 == 0 { READ_WRITE } else { Protection::READ };
        let request = MapRequest { protection, ..fixed(AT + page * PAGE, PAGE) };
        space.mmap(&request).unwrap();
    }
}

#[test]
fn what_was_written_before_an_unmapping_is_saved() {
    saved_while_it_goes(PAGE, crowd, |space| {
        space.munmap(VirtAddr(AT), 1001 * PAGE).unwrap();
    });
}

#[test]
fn writes_before_a_replacing_mapping_are_saved() {
    saved_while_it_goes(PAGE, crowd, |space| {
        let place = Place::Fixed(VirtAddr(AT));
        let length = 1001 * PAGE;
        let request = MapRequest { length, place, ..MapRequest::default() };
        space.mmap(&request).unwrap();
    });
}

#[test]
fn writes_before_a_cut_beginning_are_saved() {
    saved_while_it_goes(8 * MIB, |_| (), |space| space.munmap(VirtAddr(AT), 2 * MIB).unwrap());
}

#[test]
fn writes_before_prot_none_are_saved() {
    saved_while_it_goes(PAGE, crowd, |space| {
        space.mprotect(VirtAddr(AT), 1001 * PAGE, Protection::empty()).unwrap();
    });
}

#[test]
fn writes_before_a_guard_are_saved() {
    saved_while_it_goes(
        8 * MIB,
        |_| (),
        |space| {
            space.madvise(VirtAddr(AT), 4 * MIB, Advice::GuardInstall).unwrap();
        },
    );
}
