//! Failures while shared memory is swapped out and in: allocations, a full store, a full device. No
//! data is lost, nothing leaks, and a failed call has changed nothing.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{Advice, Error, FaultError, SwapError, testing};
use bindery_hosted::Walk;

use super::shared::{AT, ORDERS, PAGE, Shared, with_shared};
use crate::support::objects::Chance;

type X86 = X86_64<4>;

const PAGES: u64 = 12;
/// The size of the object.
const ALL: u64 = 48;

/// Fills the pages with incompressible data.
fn scramble<A: Walk>(shared: &Shared<'_, '_, A>) -> Vec<Vec<u8>> {
    let mut chance = Chance::new(0x5eed, (0, 1));
    let contents = (0..PAGES).map(|page| {
        let bytes: Vec<u8> = (0..PAGE).map(|_| chance.below(256) as u8).collect();
        assert_eq!(shared.object.write(page * PAGE, &bytes), Ok(bytes.len()));
        bytes
    });
    contents.collect()
}

#[track_caller]
fn assert_holds<A: Walk>(shared: &Shared<'_, '_, A>, contents: &[Vec<u8>]) {
    for (page, content) in (0..).zip(contents) {
        let mut found = vec![0; PAGE as usize];
        assert_eq!(shared.object.read(page * PAGE, &mut found), Ok(found.len()));
        assert!(found == *content, "page {page}");
    }
}

/// Runs the scenario repeatedly, each time with one more successful allocation, until none fails.
fn at_each_point(scenario: impl Fn(&Shared<'_, '_, X86>, &dyn Fn(&mut dyn FnMut()))) {
    for order in [0, 4] {
        for all in [false, true] {
            for point in 0.. {
                let failed = std::cell::Cell::new(false);
                with_shared::<X86>(order, ALL, |shared| {
                    let memory = shared.swapping.memory;
                    scenario(shared, &|work| {
                        if all {
                            memory.fail_allocations_after(Some(point));
                        } else {
                            testing::fail_one_allocation(memory, Some(point));
                        }
                        work();
                        failed.set(testing::failed_allocations(memory) > 0);
                        memory.fail_allocations_after(None);
                        shared.audit();
                    });
                });
                if !failed.get() {
                    break;
                }
            }
        }
    }
}

#[test]
fn allocations_fail_while_pages_go_out() {
    at_each_point(|shared, fail| {
        let contents = scramble(shared);
        fail(&mut || shared.page_out(0, ALL));
        assert_holds(shared, &contents);
        shared.swapping.assert_filled(AT + PAGES * PAGE, ALL - PAGES, AT + PAGES);
        shared.page_out(0, ALL);
        shared.assert_has(0, ALL);
        assert_holds(shared, &contents);
    });
}

#[test]
fn allocations_fail_while_pages_come_back() {
    at_each_point(|shared, fail| {
        let contents = scramble(shared);
        shared.page_out(0, ALL);
        fail(&mut || {
            for page in [0, 1, 17, 30] {
                let found = shared.swapping.program.load(VirtAddr(AT + page * PAGE));
                assert!(matches!(found, Ok(_) | Err(FaultError::OutOfMemory)), "{found:?}");
            }
            let read = shared.object.read(25 * PAGE, &mut [0; 8]);
            assert!(matches!(read, Ok(8) | Err(Error::OutOfMemory)), "{read:?}");
        });
        assert_holds(shared, &contents);
    });
}

#[test]
fn an_unreadable_cut_page_changes_nothing() {
    at_each_point(|shared, fail| {
        let contents = scramble(shared);
        shared.page_out(0, ALL);
        let taken = shared.swapping.taken();
        let mut cut = Ok(());
        fail(&mut || {
            cut = shared.object.set_size(10 * PAGE + 8);
            let punched = shared.object.punch_hole(3 * PAGE + 8, 16);
            assert!(matches!(punched, Ok(()) | Err(Error::OutOfMemory)), "{punched:?}");
            if punched.is_ok() {
                shared.object.write(3 * PAGE + 8, &contents[3][8..24]).unwrap();
            }
        });
        if cut.is_err() {
            assert_eq!(shared.object.size(), ALL * PAGE);
            assert!(shared.swapping.taken() > taken - ALL && shared.swapping.taken() > 0);
            assert_holds(shared, &contents);
        } else {
            assert_holds(shared, &contents[..10]);
            assert_eq!(shared.object.size(), 10 * PAGE + 8);
        }
    });
}

#[test]
fn allocations_fail_during_swapoff() {
    at_each_point(|shared, fail| {
        let (memory, area) = (shared.swapping.memory, shared.swapping.area);
        let contents = scramble(shared);
        shared.page_out(0, ALL);
        memory.stop_swapping_to(&area);
        fail(&mut || {
            let result = memory.swap_in_objects(&area);
            assert!(matches!(result, Ok(()) | Err(Error::OutOfMemory)), "{result:?}");
            if result.is_err() {
                assert_eq!(memory.swap_off(&area), Err(SwapError::InUse));
            }
        });
        memory.resume_swapping_to(&area);
        assert_holds(shared, &contents);
        shared.page_out(0, ALL);
        assert_holds(shared, &contents);
    });
}

/// When the store is full, the folios stay in the swap cache, where all accesses find them.
fn a_full_store_keeps_the_pages<A: Walk>() {
    for order in ORDERS {
        for limit in [0, 1, 17] {
            with_shared::<A>(order, 512, |shared| {
                shared.swapping.memory.set_compressed_limit(limit);
                let contents = scramble(shared);
                shared.page_out(0, 512);
                shared.audit();
                assert_holds(shared, &contents);
                shared.swapping.assert_filled(AT + PAGES * PAGE, 512 - PAGES, AT + PAGES);
                shared.page_out(0, 512);
                // Removes folios in the cache partly.
                shared.object.punch_hole(5 * PAGE, 9 * PAGE).unwrap();
                shared.audit();
                assert_holds(shared, &contents[..5]);
                shared.page_out(0, 512);
                shared.object.set_size(20 * PAGE).unwrap();
                shared.audit();
                assert_holds(shared, &contents[..5]);
                assert_eq!(shared.read(6), 0);
            });
        }
    }
}

/// With fewer slots than pages, pages without a slot stay in memory.
fn a_full_device_keeps_the_rest<A: Walk>() {
    for order in [0, 4] {
        with_shared::<A>(order, 1024, |shared| {
            let memory = shared.swapping.memory;
            let taken: u64 = 4096 - 512;
            let private = 8 * AT;
            shared.swapping.space.mmap(&crate::support::fixed(private, taken * PAGE)).unwrap();
            crate::support::use_order(memory, 0);
            shared.swapping.fill(private, taken);
            let space = shared.swapping.space;
            space.madvise(VirtAddr(private), taken * PAGE, Advice::PageOut).unwrap();
            assert_eq!(shared.swapping.taken(), taken);
            shared.page_out(0, 1024);
            assert_eq!(shared.object.swapped_pages(), 512);
            assert_eq!(shared.object.resident_pages(), 512);
            shared.audit();
            shared.swapping.assert_filled(AT, 1024, AT);
            space.munmap(VirtAddr(private), taken * PAGE).unwrap();
        });
    }
}

/// A fatal signal ends `swapoff` between two runs.
fn swapoff_can_be_interrupted<A: Walk>() {
    with_shared::<A>(0, 64, |shared| {
        let (memory, area) = (shared.swapping.memory, shared.swapping.area);
        shared.page_out(0, 64);
        memory.stop_swapping_to(&area);
        shared.swapping.machine.fatal_signal_after(Some(3));
        assert_eq!(memory.swap_in_objects(&area), Err(Error::Interrupted));
        shared.swapping.machine.fatal_signal_after(None);
        let back = 64 - shared.object.swapped_pages();
        assert!(back > 0 && back < 64, "{back} pages are back");
        shared.audit();
        assert_eq!(memory.swap_in_objects(&area), Ok(()));
        memory.resume_swapping_to(&area);
        shared.assert_has(64, 0);
    });
}

on_every_architecture! {
    full_store => a_full_store_keeps_the_pages;
    full_device => a_full_device_keeps_the_rest;
    interrupted => swapoff_can_be_interrupted;
}
