//! Long work on large memory: other threads run in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, Growth, MapObject, MapRequest, Memory,
    Object, Sealing, Sharing,
};

use super::interposed::{Interposed, Moment, interposed};
use crate::support::{GIB, MIB, fixed, options};

const AT: VirtAddr = VirtAddr(GIB);
const PAGES: u64 = 4096;

/// An object with all pages written, some of which are in swap.
fn filled<'m>(
    memory: &'m Memory<Interposed>,
    space: &AddressSpace<'m, Interposed>,
    in_swap: u64,
) -> Object<'m, Interposed> {
    let size = PAGES * PAGE_SIZE;
    let object = memory.shared_memory(size, Sealing::Allowed, Accounting::PerPage).unwrap();
    let access = FileAccess::READ | FileAccess::WRITE;
    let source = MapObject { object: &object, offset: 0, access };
    space
        .mmap_object(&MapRequest { sharing: Sharing::Shared, ..fixed(AT.0, size) }, &source)
        .unwrap();
    for page in 0..PAGES {
        space.fault(VirtAddr(AT.0 + page * PAGE_SIZE), Access::Write).unwrap();
    }
    space.madvise(AT, in_swap * PAGE_SIZE, Advice::PageOut).unwrap();
    assert_eq!((object.resident_pages(), object.swapped_pages()), (PAGES - in_swap, in_swap));
    object
}

/// The number of times that other threads may run during `work`.
fn pauses(memory: &Memory<Interposed>, work: impl FnOnce()) -> u64 {
    let pauses = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&pauses);
    memory.platform().at(Moment::Pause, move || {
        seen.fetch_add(1, Relaxed);
    });
    work();
    pauses.load(Relaxed)
}

#[test]
fn other_threads_run_while_shared_memory_ends() {
    for in_swap in [0, PAGES] {
        let (_machine, memory) = interposed(64 * MIB);
        memory.swap_on(PAGES, 0).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let object = filled(&memory, &space, in_swap);
        drop(object);
        let count = pauses(&memory, || space.munmap(AT, PAGES * PAGE_SIZE).unwrap());
        // Other threads may also run between the unmapped tables.
        let least = PAGES / 256 + PAGES / 512;
        assert!(count >= least, "the last mapping: {count} pauses, {in_swap} in swap");

        let object = filled(&memory, &space, in_swap);
        space.munmap(AT, PAGES * PAGE_SIZE).unwrap();
        let count = pauses(&memory, || drop(object));
        assert!(count >= PAGES / 256, "the last handle: {count} pauses, {in_swap} in swap");
    }
}

#[test]
fn other_threads_run_while_shared_memory_is_allocated() {
    let (_machine, memory) = interposed(64 * MIB);
    let object = memory.shared_memory(0, Sealing::Allowed, Accounting::PerPage).unwrap();
    let allocate = || object.allocate(0, PAGES * PAGE_SIZE, Growth::Allowed).unwrap();
    let count = pauses(&memory, allocate);
    assert!(count >= PAGES / 256, "{count} pauses");
}

#[test]
fn other_threads_run_while_shared_memory_is_cut() {
    let (_machine, memory) = interposed(64 * MIB);
    memory.swap_on(PAGES, 0).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let object = filled(&memory, &space, PAGES / 2);
    let count = pauses(&memory, || object.punch_hole(0, PAGES / 4 * PAGE_SIZE).unwrap());
    assert!(count >= PAGES / 4 / 256, "{count} pauses for a hole");
    let count = pauses(&memory, || object.set_size(0).unwrap());
    assert!(count >= PAGES * 3 / 4 / 256, "{count} pauses for a truncation");
}

/// The first fork has entries to flush; the second finds all entries write-protected.
#[test]
fn other_threads_run_while_a_fork_copies() {
    const TABLES: u64 = 200;
    let (_machine, memory) = interposed(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, TABLES * 2 * MIB)).unwrap();
    for table in 0..TABLES {
        space.fault(VirtAddr(AT.0 + table * 2 * MIB), Access::Write).unwrap();
    }
    for number in ["first", "second"] {
        let mut child = None;
        let flushes = space.counts().invalidations;
        let count = pauses(&memory, || child = Some(space.fork().unwrap()));
        let flushes = space.counts().invalidations - flushes;
        assert!(count >= TABLES / 64, "{count} pauses in the {number} fork");
        assert!(flushes <= TABLES.div_ceil(64), "{flushes} flushes in the {number} fork");
        drop(child);
    }
}
