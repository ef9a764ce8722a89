//! A device that tolerates changes of pages while it writes them: no access waits for its writes.

use std::thread;
use std::time::Duration;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, Accounting, PinTime, Sealing, Sharing, SwapOperation};
use bindery_hosted::{Program, SwapFile, SwapService, Walk};

use super::fixture::{Swapping, with_device};
use crate::support::objects::use_object_order;
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit};

type Amd64 = X86_64<4>;

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const BYTES: u64 = 64 * MIB;
const SLOTS: u64 = 4096;
/// The maximum number of small folios in flight on the device.
const PAGES: u64 = 32;

fn device(slots: u64, service: SwapService) -> &'static SwapFile {
    let device = SwapFile::new(slots, service).expect("a temporary file").without_stable_pages();
    Box::leak(Box::new(device))
}

/// Runs `scenario` with [`PAGES`] pages from [`AT`] on under writeback, none of them completed.
fn with_writes<A: Walk>(
    order: u8,
    slots: u64,
    scenario: impl FnOnce(&Swapping<'_, '_, A>, &'static SwapFile),
) {
    let device = device(slots, SwapService::InOrder);
    with_device::<A>(BYTES, order, device, |swapping| {
        swapping.map(AT, 512);
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, 512);
        assert!(device.waiting() > 0 && device.counts().writes == 0);
        scenario(swapping, device);
    });
}

/// Completes all pending requests and makes the core process the completions.
fn serve_all<A: Walk>(swapping: &Swapping<'_, '_, A>, device: &SwapFile) {
    while device.serve_one(swapping.memory) {}
    swapping.memory.wait_for_swap_writes().unwrap();
}

/// Loads and stores while the requests are pending. The slots stay allocated until the device
/// completes; then the pages are swapped out like all others, with their current content.
fn an_access_does_not_wait<A: Walk>() {
    for order in [0, 4, 9] {
        with_writes::<A>(order, SLOTS, |swapping, device| {
            let taken = swapping.taken();
            swapping.assert_filled(AT, PAGES / 2, AT);
            for page in 0..PAGES {
                swapping.program.store(VirtAddr(AT + page * PAGE), 2 * AT + page).unwrap();
            }
            swapping.assert_filled(AT, PAGES, 2 * AT);
            assert_eq!((device.counts().writes, swapping.taken()), (0, taken), "order {order}");
            swapping.page_out(AT, PAGES);
            assert_eq!(swapping.swapped(AT, PAGES), 0, "the device still has them");
            serve_all(swapping, device);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            assert_eq!((device.counts().reads, swapping.taken()), (0, 0));
            swapping.page_out(AT, 512);
            serve_all(swapping, device);
            assert_eq!(swapping.swapped(AT, PAGES), PAGES);
            swapping.served(device, || swapping.assert_filled(AT, PAGES, 2 * AT));
        });
    }
}

/// The old write and a new write never use the same slot at the same time.
fn a_slot_is_reused_when_the_old_write_is_done<A: Walk>() {
    with_writes::<A>(4, 32, |swapping, device| {
        swapping.fill(AT, PAGES);
        assert_eq!(swapping.taken(), 32);
        let other = AT + 64 * PAGE;
        swapping.fill(other, 16);
        swapping.page_out(other, 16);
        assert_eq!(swapping.swapped(other, 16), 0, "the device still has the slots");
        serve_all(swapping, device);
        swapping.page_out(other, 16);
        assert_eq!(swapping.swapped(other, 16), 16);
        serve_all(swapping, device);
        swapping.served(device, || swapping.assert_filled(other, 16, other));
    });
}

/// Pages that were swapped in and pages that were not are unmapped before the device completes.
fn what_is_unmapped_meanwhile_is_free_afterwards<A: Walk>() {
    for order in [0, 4] {
        with_writes::<A>(order, SLOTS, |swapping, device| {
            let free = swapping.memory.free_frame_count();
            swapping.fill(AT, 3);
            swapping.space.munmap(VirtAddr(AT + PAGE), 20 * PAGE).unwrap();
            assert!(swapping.taken() >= PAGES);
            serve_all(swapping, device);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            assert!(swapping.memory.free_frame_count() > free);
            swapping.served(device, || {
                swapping.assert_filled(AT, 1, AT);
                swapping.assert_filled(AT + 21 * PAGE, PAGES - 21, AT + 21);
            });
            assert_eq!(swapping.taken(), 0);
        });
    }
}

/// The cache holds the pages for the child, which releases its slots before the device completes.
fn what_a_child_unmaps_meanwhile_is_free_afterwards<A: Walk>() {
    for order in [0, 4] {
        with_writes::<A>(order, SLOTS, |swapping, device| {
            let child = swapping.space.fork().unwrap();
            swapping.assert_filled(AT, PAGES, AT);
            child.munmap(VirtAddr(AT + PAGE), 30 * PAGE).unwrap();
            assert_eq!(swapping.taken(), PAGES, "the device still has the slots");
            serve_all(swapping, device);
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            assert_eq!((swapping.taken(), swapping.memory.swap_usage().cached), (2, 2));
            swapping.fill(AT, PAGES);
            let theirs = Program::new(swapping.machine, &child);
            assert_eq!(theirs.load(VirtAddr(AT + 31 * PAGE)), Ok(AT + 31));
        });
    }
}

/// Parent and child share the slots. The first of them to fault reuses the folio, and the other
/// finds it in the cache, before or after the device completes.
fn both_sides_of_a_fork_find_the_folio<A: Walk>() {
    for order in [0, 4, 9] {
        for parent_first in [false, true] {
            for served in [false, true] {
                with_writes::<A>(order, SLOTS, |swapping, device| {
                    let child = swapping.space.fork().unwrap();
                    let theirs = Program::new(swapping.machine, &child);
                    let (first, second) = match parent_first {
                        true => (&swapping.program, &theirs),
                        false => (&theirs, &swapping.program),
                    };
                    for page in 0..PAGES {
                        let at = VirtAddr(AT + page * PAGE);
                        assert_eq!(first.load(at), Ok(AT + page));
                        first.store(at, 1).unwrap();
                    }
                    if served {
                        serve_all(swapping, device);
                        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
                    }
                    for page in 0..PAGES {
                        let at = VirtAddr(AT + page * PAGE);
                        assert_eq!(second.load(at), Ok(AT + page));
                        second.store(at, 2).unwrap();
                        assert_eq!((first.load(at), second.load(at)), (Ok(1), Ok(2)));
                    }
                    serve_all(swapping, device);
                    assert_eq!((device.counts().reads, swapping.taken()), (0, 0));
                    audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
                });
            }
        }
    }
}

/// When the device completes, the folio has been swapped in for one side of a fork. The cache keeps
/// the folio for the other side, and it is swapped out again to the same slots.
#[test]
fn a_folio_kept_by_the_cache_is_rewritten() {
    for order in [4, 0] {
        with_writes::<Amd64>(order, SLOTS, |swapping, device| {
            let child = swapping.space.fork().unwrap();
            swapping.assert_filled(AT, PAGES, AT);
            swapping.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap();
            assert_eq!(swapping.memory.swap_usage().cached, PAGES);
            let requests = device.waiting();
            thread::scope(|scope| {
                let reclaim = || swapping.machine.on_cpu(Cpu(1), || swapping.memory.reclaim(1024));
                let reclaim = scope.spawn(reclaim);
                thread::sleep(Duration::from_millis(5));
                assert_eq!(device.waiting(), requests, "a slot has two requests");
                while !reclaim.is_finished() {
                    device.serve_one(swapping.memory);
                }
            });
            swapping.served(device, || {
                for _ in 0..4 {
                    swapping.memory.reclaim(1024);
                }
            });
            assert_eq!(device.counts().pages_written, 2 * PAGES);
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            let theirs = Program::new(swapping.machine, &child);
            swapping.served(device, || {
                for page in 0..PAGES {
                    assert_eq!(theirs.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
                }
            });
        });
    }
}

/// The content that the device could not write is no longer needed.
fn an_error_of_a_write_that_is_not_wanted_is_none<A: Walk>() {
    for order in [0, 4, 9] {
        with_writes::<A>(order, SLOTS, |swapping, device| {
            device.fail(|request| request.operation() == SwapOperation::Write);
            swapping.fill(AT, PAGES / 2);
            serve_all(swapping, device);
            assert!(swapping.memory.events().swap_write_errors > 0);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            swapping.assert_filled(AT, PAGES, AT);
            assert_eq!((device.counts().reads, swapping.taken()), (0, 0));
        });
    }
}

/// Word-filled pages are recorded in their slots instead of being written; they are swapped in with
/// the other pages.
#[test]
fn word_filled_pages_come_back_with_others() {
    let device = device(SLOTS, SwapService::InOrder);
    with_device::<Amd64>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 16);
        swapping.space.write_user(VirtAddr(AT), &[0x55; 4 * 4096]).unwrap();
        swapping.fill(AT + 8 * PAGE, 1);
        swapping.page_out(AT, 16);
        assert_eq!((device.waiting(), swapping.swapped(AT, 16)), (1, 16));
        assert_eq!(swapping.program.load(VirtAddr(AT + 8)), Ok(0x5555_5555_5555_5555));
        assert_eq!(swapping.swapped(AT, 16), 0);
        serve_all(swapping, device);
        swapping.assert_filled(AT + 8 * PAGE, 1, AT + 8 * PAGE);
        assert_eq!(swapping.program.load(VirtAddr(AT + 12 * PAGE)), Ok(0));
    });
}

#[test]
fn a_pin_does_not_wait() {
    with_writes::<Amd64>(4, SLOTS, |swapping, device| {
        let pinned = swapping.space.pin(VirtAddr(AT), 1, Access::Write, PinTime::Short).unwrap();
        assert_eq!(device.counts().writes, 0);
        serve_all(swapping, device);
        swapping.page_out(AT, 16);
        assert_eq!(swapping.swapped(AT, 16), 0, "a pinned folio went out");
        drop(pinned);
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
    });
}

/// The area is removed once the device has released the reused folios.
#[test]
fn swapoff_waits_for_the_device() {
    with_writes::<Amd64>(4, SLOTS, |swapping, device| {
        swapping.memory.stop_swapping_to(&swapping.area);
        swapping.space.swap_in_area(&swapping.area).unwrap();
        assert_eq!((device.counts().writes, swapping.swapped(AT, PAGES)), (0, 0));
        thread::scope(|scope| {
            let off = scope.spawn(|| {
                swapping.machine.on_cpu(Cpu(1), || swapping.memory.swap_off(&swapping.area))
            });
            thread::sleep(Duration::from_millis(5));
            assert!(!off.is_finished(), "the device still has slots");
            while device.serve_one(swapping.memory) {}
            assert_eq!(off.join().unwrap(), Ok(()));
        });
        swapping.assert_filled(AT, PAGES, AT);
        // The fixture wants an area at the end.
        assert_eq!(swapping.memory.swap_on_device(device, 0), Ok(swapping.area));
    });
}

/// Accesses shared memory by an address and by a call.
fn shared_memory_does_not_wait<A: Walk>() {
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::InOrder);
        with_device::<A>(BYTES, order, device, |swapping| {
            let memory = swapping.memory;
            use_object_order(memory, order);
            let object = memory.shared_memory(512 * PAGE, Sealing::Allowed, Accounting::PerPage);
            let object = object.unwrap();
            map(swapping.space, &object, AT, 512 * PAGE, Sharing::Shared).unwrap();
            swapping.fill(AT, PAGES);
            swapping.page_out(AT, 512);
            assert!(device.waiting() > 0 && object.swapped_pages() >= PAGES);
            swapping.program.store(VirtAddr(AT + 3 * PAGE), 7).unwrap();
            object.write(5 * PAGE, &8u64.to_le_bytes()).unwrap();
            object.punch_hole(8 * PAGE, 16 * PAGE).unwrap();
            assert_eq!((device.counts().writes, device.counts().reads), (0, 0));
            serve_all(swapping, device);
            audit(swapping.machine, memory, &[swapping.space]);
            let load = |page: u64| swapping.program.load(VirtAddr(AT + page * PAGE));
            swapping.served(device, || {
                assert_eq!([3, 5, 9].map(load), [Ok(7), Ok(8), Ok(0)]);
                swapping.assert_filled(AT, 3, AT);
                swapping.assert_filled(AT + 24 * PAGE, PAGES - 24, AT + 24);
            });
            assert_eq!(object.swapped_pages(), swapping.taken());
            swapping.space.munmap(VirtAddr(AT), 512 * PAGE).unwrap();
        });
    }
}

/// A page under read has no owner until it is present.
#[test]
fn an_access_waits_for_a_read_around_page() {
    with_writes::<Amd64>(0, SLOTS, |swapping, device| {
        serve_all(swapping, device);
        swapping.memory.set_page_cluster(3);
        let load = |cpu: u16, page: u64| {
            swapping.machine.on_cpu(Cpu(cpu), || {
                let program = Program::new(swapping.machine, swapping.space);
                program.load(VirtAddr(AT + page * PAGE))
            })
        };
        thread::scope(|scope| {
            let serve = |load: thread::ScopedJoinHandle<'_, _>| {
                while !load.is_finished() {
                    device.serve_one(swapping.memory);
                }
                load.join().unwrap()
            };
            assert_eq!(serve(scope.spawn(|| load(1, 4))), Ok(AT + 4));
            let wanted = scope.spawn(|| load(1, 5));
            while device.waiting() < 2 {
                thread::yield_now();
            }
            let around = scope.spawn(|| load(2, 6));
            thread::sleep(Duration::from_millis(5));
            assert!(!around.is_finished(), "the page is not read yet");
            assert_eq!((serve(wanted), serve(around)), (Ok(AT + 5), Ok(AT + 6)));
        });
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
    });
}

on_every_architecture! {
    access => an_access_does_not_wait;
    reuse => a_slot_is_reused_when_the_old_write_is_done;
    unmapped => what_is_unmapped_meanwhile_is_free_afterwards;
    child => what_a_child_unmaps_meanwhile_is_free_afterwards;
    forks => both_sides_of_a_fork_find_the_folio;
    errors => an_error_of_a_write_that_is_not_wanted_is_none;
    shared => shared_memory_does_not_wait;
}
