//! Failures in the middle of swap: allocations, a full store, a full device. No data is lost, and
//! nothing leaks.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{Advice, Error, FaultError, SwapError, testing};
use bindery_hosted::Walk;

use super::fixture::{Swapping, with_swap};
use crate::support::objects::Chance;
use crate::support::{GIB, MIB, audit, fixed, strict};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 48;
const ORDERS: [u8; 3] = [0, 4, 9];

/// Selects the allocations that fail, from a number on.
#[derive(Clone, Copy, Debug)]
enum Failing {
    One,
    All,
}

impl Failing {
    /// Makes allocations fail during `work`. Returns whether one did.
    fn during<A: Walk>(
        self,
        swapping: &Swapping<'_, '_, A>,
        point: u64,
        work: impl FnOnce(),
    ) -> bool {
        let memory = swapping.memory;
        match self {
            Self::One => testing::fail_one_allocation(memory, Some(point)),
            Self::All => memory.fail_allocations_after(Some(point)),
        }
        work();
        let failed = testing::failed_allocations(memory) > 0;
        memory.fail_allocations_after(None);
        failed
    }
}

/// Maps the pages, and fills them with incompressible data.
fn scramble<A: Walk>(swapping: &Swapping<'_, '_, A>) -> Vec<Vec<u8>> {
    swapping.space.mmap(&fixed(AT, 512 * PAGE)).unwrap();
    let mut chance = Chance::new(0x5eed, (0, 1));
    let contents = (0..PAGES).map(|page| {
        let bytes: Vec<u8> = (0..PAGE).map(|_| chance.below(256) as u8).collect();
        swapping.space.write_user(VirtAddr(AT + page * PAGE), &bytes).unwrap();
        bytes
    });
    contents.collect()
}

#[track_caller]
fn assert_holds<A: Walk>(swapping: &Swapping<'_, '_, A>, contents: &[Vec<u8>]) {
    for (page, content) in (0..).zip(contents) {
        let mut found = vec![0; PAGE as usize];
        swapping.space.read_user(VirtAddr(AT + page * PAGE), &mut found).unwrap();
        assert!(found == *content, "page {page}");
    }
}

fn page_out<A: Walk>(swapping: &Swapping<'_, '_, A>) -> Result<(), Error> {
    swapping.space.madvise(VirtAddr(AT), 512 * PAGE, Advice::PageOut)
}

/// Runs the scenario repeatedly, each time with one more successful allocation, until none fails.
fn at_each_point<A: Walk>(scenario: impl Fn(&Swapping<'_, '_, A>, &dyn Fn(&mut dyn FnMut()))) {
    for order in ORDERS {
        for failing in [Failing::One, Failing::All] {
            for point in 0.. {
                let failed = std::cell::Cell::new(false);
                with_swap::<A>(order, 4096, |swapping| {
                    scenario(swapping, &|work| {
                        failed.set(failing.during(swapping, point, work));
                        audit(swapping.machine, swapping.memory, &[swapping.space]);
                    });
                });
                if !failed.get() {
                    break;
                }
            }
        }
    }
}

fn allocations_fail_while_pages_go_out<A: Walk>() {
    at_each_point::<A>(|swapping, fail| {
        let contents = scramble(swapping);
        fail(&mut || page_out(swapping).unwrap());
        assert_holds(swapping, &contents);
        page_out(swapping).unwrap();
        assert_eq!(swapping.swapped(AT, PAGES), PAGES);
        assert_holds(swapping, &contents);
    });
}

fn allocations_fail_while_pages_come_back<A: Walk>() {
    at_each_point::<A>(|swapping, fail| {
        let contents = scramble(swapping);
        page_out(swapping).unwrap();
        fail(&mut || {
            for page in 0..PAGES {
                let found = swapping.program.load(VirtAddr(AT + page * PAGE));
                assert!(matches!(found, Ok(_) | Err(FaultError::OutOfMemory)), "{found:?}");
            }
        });
        assert_holds(swapping, &contents);
    });
}

fn allocations_fail_during_swapoff<A: Walk>() {
    at_each_point::<A>(|swapping, fail| {
        let contents = scramble(swapping);
        page_out(swapping).unwrap();
        swapping.memory.stop_swapping_to(&swapping.area);
        fail(&mut || {
            let result = swapping.space.swap_in_area(&swapping.area);
            assert!(matches!(result, Ok(()) | Err(Error::OutOfMemory)), "{result:?}");
            if result.is_err() {
                assert_eq!(swapping.memory.swap_off(&swapping.area), Err(SwapError::InUse));
            }
        });
        swapping.memory.resume_swapping_to(&swapping.area);
        assert_holds(swapping, &contents);
        page_out(swapping).unwrap();
        assert_eq!(swapping.swapped(AT, PAGES), PAGES);
        assert_holds(swapping, &contents);
    });
}

/// Reclaim finds no frame to store pages in, not even in its reserve, so no page is swapped out and
/// none is lost. With a single free frame, reclaim makes progress.
#[test]
fn an_empty_reserve_keeps_the_pages() {
    with_swap::<X86_64<4>>(0, 4096, |swapping| {
        let contents = scramble(swapping);
        let memory = swapping.memory;
        swapping.space.madvise(VirtAddr(AT), 512 * PAGE, Advice::Cold).unwrap();
        memory.fail_allocations_after(Some(0));
        assert_eq!(memory.reclaim(8).freed, 0);
        assert!(testing::failed_allocations(memory) > 0, "nobody asked for a frame");
        memory.fail_allocations_after(None);
        audit(swapping.machine, memory, &[swapping.space]);
        assert_holds(swapping, &contents);
        swapping.space.madvise(VirtAddr(AT), 512 * PAGE, Advice::Cold).unwrap();
        assert!(memory.reclaim(8).freed >= 8);
        assert_holds(swapping, &contents);
    });
}

/// When the store is full, pages stay in memory, in the swap cache, and entries find them there.
fn a_full_store_keeps_the_pages<A: Walk>() {
    for order in ORDERS {
        for limit in [0, 1, 17] {
            with_swap::<A>(order, 4096, |swapping| {
                swapping.memory.set_compressed_limit(limit);
                let contents = scramble(swapping);
                page_out(swapping).unwrap();
                assert!(swapping.memory.compressed_usage().frames_used <= limit);
                audit(swapping.machine, swapping.memory, &[swapping.space]);
                let child = swapping.space.fork().unwrap();
                assert_holds(swapping, &contents);
                audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
                drop(child);
                swapping.space.munmap(VirtAddr(AT), 40 * PAGE).unwrap();
                audit(swapping.machine, swapping.memory, &[swapping.space]);
            });
        }
    }
}

/// As above, but the pages are never touched again; unmapping frees the folios and their slots.
fn pages_that_could_not_be_stored_are_unmapped<A: Walk>() {
    for order in ORDERS {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.memory.set_compressed_limit(0);
            let _ = scramble(swapping);
            page_out(swapping).unwrap();
            swapping.space.munmap(VirtAddr(AT), 7 * PAGE).unwrap();
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            swapping.space.munmap(VirtAddr(AT), 512 * PAGE).unwrap();
            assert_eq!(swapping.taken(), 0);
        });
    }
}

#[test]
fn an_area_that_cannot_be_had_leaves_nothing() {
    let (machine, memory) = strict::<X86_64<4>>(32 * MIB);
    memory.trim();
    let free = memory.free_frame_count();
    let mut refused = 0;
    for point in 0.. {
        testing::fail_one_allocation(&memory, Some(point));
        let area = memory.swap_on(2000, 0);
        let failed = testing::failed_allocations(&memory);
        testing::fail_one_allocation(&memory, None);
        match area {
            Ok(area) => memory.swap_off(&area).unwrap(),
            Err(error) => {
                assert_eq!(error, SwapError::OutOfMemory);
                refused += 1;
            }
        }
        audit(&machine, &memory, &[]);
        memory.trim();
        assert_eq!(memory.free_frame_count(), free, "allocation {point} failed");
        if failed == 0 {
            break;
        }
    }
    assert!(refused > 0);
}

on_every_architecture! {
    out => allocations_fail_while_pages_go_out;
    back => allocations_fail_while_pages_come_back;
    swapoff => allocations_fail_during_swapoff;
    full_store => a_full_store_keeps_the_pages;
    unmapped => pages_that_could_not_be_stored_are_unmapped;
}
