//! Reclaim: memory is short, and pages are swapped out and in.

use std::thread;
use std::time::Duration;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{AddressSpace, Advice, FaultError};
use bindery_hosted::{Program, SwapService, Walk};

use super::fixture::{device, with_device, with_little_memory};
use crate::support::{GIB, MIB, audit, fixed, options, strict, use_order};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
/// The memory of the machine.
const BYTES: u64 = 16 * MIB;

/// A program that uses twice the memory of the machine; compressed memory may occupy half of that
/// memory.
fn a_working_set_of_twice_the_memory_fits<A: Walk>(order: u8) {
    with_little_memory::<A>(BYTES, order, BYTES / PAGE * 4, |swapping| {
        let pages = 2 * BYTES / PAGE;
        swapping.space.mmap(&fixed(AT, pages * PAGE)).unwrap();
        // A page with one word compresses well.
        swapping.fill(AT, pages);
        assert!(swapping.taken() > pages / 2);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.assert_filled(AT, pages, AT);
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..pages {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = (state >> 33) % pages;
            let at = VirtAddr(AT + page * PAGE);
            assert_eq!(swapping.program.load(at), Ok(AT + page), "page {page}");
            swapping.program.store(at, AT + page).unwrap();
        }
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

fn base_pages<A: Walk>() {
    a_working_set_of_twice_the_memory_fits::<A>(0);
}

fn folios<A: Walk>() {
    a_working_set_of_twice_the_memory_fits::<A>(4);
}

/// Pages that a family shares are swapped out as well, and all of the family's processes find them
/// again.
fn shared_pages_go_out_and_come_back<A: Walk>() {
    for order in [0, 4] {
        with_little_memory::<A>(BYTES, order, BYTES / PAGE * 4, |swapping| {
            let shared = BYTES / PAGE / 2;
            swapping.space.mmap(&fixed(AT, shared * PAGE)).unwrap();
            swapping.fill(AT, shared);
            let children: Vec<_> = (0..3).map(|_| swapping.space.fork().unwrap()).collect();
            let more = 2 * AT;
            swapping.space.mmap(&fixed(more, BYTES + BYTES / 2)).unwrap();
            swapping.fill(more, (BYTES + BYTES / 2) / PAGE);
            let spaces: Vec<_> = core::iter::once(swapping.space).chain(children.iter()).collect();
            audit(swapping.machine, swapping.memory, &spaces);
            let gone = swapping.swapped(AT, shared);
            assert!(gone > shared / 4, "of {shared} shared pages {gone} went out, order {order}");
            for (number, child) in children.iter().enumerate() {
                let theirs = Program::new(swapping.machine, child);
                for page in 0..shared {
                    let at = VirtAddr(AT + page * PAGE);
                    assert_eq!(theirs.load(at), Ok(AT + page), "page {page} of child {number}");
                    if page % 3 == number as u64 {
                        theirs.store(at, number as u64).unwrap();
                    }
                }
            }
            swapping.assert_filled(AT, shared, AT);
            swapping.assert_filled(more, (BYTES + BYTES / 2) / PAGE, more);
            audit(swapping.machine, swapping.memory, &spaces);
        });
    }
}

#[test]
fn hot_pages_stay() {
    with_little_memory::<X86_64<4>>(BYTES, 0, 1 << 14, |swapping| {
        let pages = 2 * BYTES / PAGE;
        swapping.space.mmap(&fixed(AT, pages * PAGE)).unwrap();
        let hot = 256;
        let mut missing = 0;
        for page in 0..pages {
            swapping.program.store(VirtAddr(AT + page * PAGE), page).unwrap();
            if page % 64 == 0 {
                missing += swapping.swapped(AT, hot);
                for page in 0..hot {
                    swapping.program.load(VirtAddr(AT + page * PAGE)).unwrap();
                }
            }
        }
        assert!(missing < hot, "{missing} pages of the hot set had to come back");
    });
}

/// Folios that are far apart, alternately of two address spaces. For 32 folios, each address space
/// is flushed once.
fn one_flush_for_each_space_and_batch<A: Walk>() {
    with_little_memory::<A>(4 * BYTES, 0, 1 << 14, |swapping| {
        const FOLIOS: u64 = 96;
        let other = AddressSpace::new(swapping.memory, options()).unwrap();
        let theirs = Program::new(swapping.machine, &other);
        let spaces = [(swapping.space, &swapping.program), (&other, &theirs)];
        let places = || (0..FOLIOS).map(|folio| VirtAddr(AT + folio * 2 * MIB));
        for (space, _) in spaces {
            space.mmap(&fixed(AT, FOLIOS * 2 * MIB)).unwrap();
        }
        for at in places() {
            spaces.iter().for_each(|(_, program)| program.store(at, at.0).unwrap());
        }
        for (space, _) in spaces {
            space.madvise(VirtAddr(AT), FOLIOS * 2 * MIB, Advice::Cold).unwrap();
        }
        let invalidations = || spaces.map(|(space, _)| space.counts().invalidations);
        let before = invalidations();
        let freed = swapping.memory.reclaim(2 * FOLIOS).freed;
        assert!(freed >= FOLIOS, "{freed} pages of words were freed");
        let batches = (2 * FOLIOS).div_ceil(32);
        for (before, after) in before.into_iter().zip(invalidations()) {
            assert!(after > before, "nothing was flushed");
            assert!(after - before <= batches, "{} flushes", after - before);
        }
        audit(swapping.machine, swapping.memory, &[swapping.space, &other]);
        for at in places() {
            spaces.iter().for_each(|(_, program)| assert_eq!(program.load(at), Ok(at.0)));
        }
    });
}

/// Dropped folios share the flush.
#[test]
fn lazily_freed_folios_share_one_flush() {
    with_little_memory::<X86_64<4>>(BYTES, 0, 1 << 12, |swapping| {
        let places = || (0..24).map(|folio| VirtAddr(AT + folio * 2 * MIB));
        swapping.space.mmap(&fixed(AT, 48 * MIB)).unwrap();
        places().for_each(|at| swapping.program.store(at, 7).unwrap());
        swapping.space.madvise(VirtAddr(AT), 48 * MIB, Advice::Free).unwrap();
        swapping.program.store(VirtAddr(AT), 8).unwrap();
        let before = swapping.space.counts().invalidations;
        assert!(swapping.memory.reclaim(23).freed >= 23);
        assert_eq!(swapping.space.counts().invalidations - before, 1);
        assert_eq!(swapping.program.load(VirtAddr(AT)), Ok(8), "it was written again");
        for at in places().skip(1) {
            assert_eq!(swapping.program.load(at), Ok(0));
        }
    });
}

/// Hot pages get colder with the turns of the clock, not with examinations of their neighbors.
#[test]
fn a_folio_is_examined_once_in_a_turn() {
    with_little_memory::<X86_64<4>>(BYTES, 0, 1 << 12, |swapping| {
        swapping.space.mmap(&fixed(AT, 2 * MIB)).unwrap();
        swapping.fill(AT, 512);
        for _ in 0..3 {
            // A page is evicted after all have been examined.
            assert_eq!(swapping.memory.reclaim(1).freed, 1);
            swapping.assert_filled(AT, 512, AT);
        }
        // The folios are hot. The first scan finds them used, the second makes them cold, the third
        // evicts.
        let frames = swapping.memory.total_frames();
        let done = swapping.memory.reclaim(256);
        assert!(done.freed >= 256);
        assert!(done.scanned > frames, "{} of {frames} frames are no turn", done.scanned);
    });
}

/// A thread writes continuously. Its pages would suffice, but none of them is freed for the call.
#[test]
fn another_threads_writes_do_not_hold_reclaim() {
    let device = device(4096, SwapService::InOrder);
    with_device::<X86_64<4>>(BYTES, 4, device, |swapping| {
        let (lazy, folio) = (VirtAddr(2 * AT), 16 * PAGE);
        for (at, pages) in [(AT, 1024), (lazy.0, 64)] {
            swapping.map(at, pages);
            swapping.fill(at, pages);
        }
        swapping.space.madvise(lazy, 64 * PAGE, Advice::Free).unwrap();
        device.fail(|_| true);
        swapping.page_out(AT, 64);
        thread::scope(|scope| {
            let reclaim = scope
                .spawn(|| swapping.machine.on_cpu(Cpu(1), || swapping.memory.reclaim(32).freed));
            let mut folios = 4..64;
            while !reclaim.is_finished() && !folios.is_empty() {
                if swapping.machine.parked_threads() > 0 {
                    device.serve_one(swapping.memory);
                    swapping.page_out(AT + folio * folios.next().unwrap(), 16);
                }
                thread::sleep(Duration::from_millis(5));
            }
            let is_held = !reclaim.is_finished();
            device.fail(|_| false);
            while !reclaim.is_finished() {
                device.serve_one(swapping.memory);
            }
            let freed = reclaim.join().unwrap();
            assert!(!is_held && freed >= 32, "{freed} pages freed; waits: {is_held}");
        });
    });
}

#[test]
fn without_swap_memory_runs_out_as_before() {
    let (machine, memory) = strict::<X86_64<4>>(BYTES);
    use_order(&memory, 0);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    space.mmap(&fixed(AT, 32 * MIB)).unwrap();
    let full = (0..32 * MIB / PAGE)
        .find(|page| program.store(VirtAddr(AT + page * PAGE), 1) == Err(FaultError::OutOfMemory));
    assert!(full.is_some());
    audit(&machine, &memory, &[&space]);
}

on_every_architecture! {
    twice_the_memory => base_pages;
    twice_the_memory_in_folios => folios;
    shared => shared_pages_go_out_and_come_back;
    flushes => one_flush_for_each_space_and_batch;
}
