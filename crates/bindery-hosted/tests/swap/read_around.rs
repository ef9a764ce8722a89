//! Read-around of a fault on a page in swap, on a device that is not synchronous.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use bindery::addr::{Order, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Advice, SizeMode, SwapOperation};
use bindery_hosted::{Program, SwapFile, SwapService, Walk};

use super::fixture::{Swapping, device, with_device, with_swap};
use crate::support::{GIB, MIB, audit};

type Amd64 = X86_64<4>;

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const BYTES: u64 = 64 * MIB;

/// Pages in swap from [`AT`] on, with windows of at most eight pages.
fn with_pages<A: Walk>(
    pages: u64,
    service: SwapService,
    scenario: impl FnOnce(&Swapping<'_, '_, A>, &'static SwapFile),
) {
    let device = device(4096, service);
    with_device::<A>(BYTES, 0, device, |swapping| {
        swapping.map(AT, pages);
        swapping.fill(AT, pages);
        swapping.served(device, || swapping.page_out(AT, pages));
        assert_eq!(swapping.swapped(AT, pages), pages);
        swapping.memory.set_page_cluster(3);
        scenario(swapping, device);
    });
}

/// The number of pages that were read around, the number of these that were later needed, and the
/// number of major faults.
fn events<A: Walk>(swapping: &Swapping<'_, '_, A>) -> (u64, u64, u64) {
    let events = swapping.memory.events();
    (events.swap_read_around, events.swap_read_around_hits, events.major_faults)
}

/// Sequential access uses windows of 1, 2, 4, 8, 8, ... pages, each started by a fault that reads.
fn pages_in_order_are_read_ahead<A: Walk>() {
    with_pages::<A>(63, SwapService::AtOnce, |swapping, device| {
        swapping.assert_filled(AT, 3, AT);
        assert_eq!(events(swapping), (1, 1, 2), "0, and 1 with 2");
        swapping.assert_filled(AT + 3 * PAGE, 4, AT + 3);
        assert_eq!(events(swapping), (4, 4, 3), "3 with 4 to 6");
        swapping.assert_filled(AT + 7 * PAGE, 56, AT + 7);
        assert_eq!(events(swapping), (53, 53, 10), "and windows of eight");
        assert_eq!(device.counts().pages_read, 63, "each is read once");
        assert_eq!(swapping.taken(), 0);
    });
}

fn pages_in_falling_order_are_read_ahead<A: Walk>() {
    with_pages::<A>(64, SwapService::AtOnce, |swapping, _| {
        for page in (0..64).rev() {
            swapping.assert_filled(AT + page * PAGE, 1, AT + page);
        }
        let (around, hits, major) = events(swapping);
        assert_eq!(around, hits);
        assert_eq!(hits + major, 64);
        assert!(major <= 12, "{major} faults read");
    });
}

/// Accesses to pages that are far apart predict nothing about their neighbors.
fn pages_far_from_each_other_are_read_alone<A: Walk>() {
    with_pages::<A>(512, SwapService::AtOnce, |swapping, device| {
        for page in [10, 100, 200, 300, 400] {
            swapping.assert_filled(AT + page * PAGE, 1, AT + page);
        }
        assert_eq!((events(swapping), device.counts().pages_read), ((0, 0, 5), 5));
        swapping.memory.set_page_cluster(0);
        swapping.assert_filled(AT + 401 * PAGE, 20, AT + 401);
        assert_eq!(events(swapping), (0, 0, 25), "it is turned off");
    });
}

/// Pages read around another page are unmapped in the cache. They are dropped with their entries or
/// when memory is short, without another write.
fn pages_that_nobody_wants_are_dropped<A: Walk>() {
    with_pages::<A>(64, SwapService::AtOnce, |swapping, device| {
        swapping.assert_filled(AT, 4, AT);
        let (around, hits, _) = events(swapping);
        assert_eq!((around, hits), (4, 1), "4, 5 and 6 are in the cache");
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.space.discard(VirtAddr(AT + 4 * PAGE), PAGE).unwrap();
        assert_eq!(swapping.taken(), 59);
        let (free, written) = (swapping.memory.free_frame_count(), device.counts().pages_written);
        assert!(swapping.memory.reclaim(2).freed >= 2);
        assert!(swapping.memory.free_frame_count() >= free + 2);
        assert_eq!(device.counts().pages_written, written, "clean pages were written");
        swapping.space.munmap(VirtAddr(AT), 64 * PAGE).unwrap();
        assert_eq!(swapping.taken(), 0);
    });
}

/// A fault on a page that is already being read around another page waits for the device and reads
/// nothing.
#[test]
fn a_fault_waits_for_a_read_around_page() {
    with_pages::<Amd64>(16, SwapService::InOrder, |swapping, device| {
        let (machine, memory) = (swapping.machine, swapping.memory);
        let load = |cpu: u16, pages: [u64; 2]| {
            machine.on_cpu(Cpu(cpu), || {
                let program = Program::new(machine, swapping.space);
                pages.map(|page| program.load(VirtAddr(AT + page * PAGE)))
            })
        };
        thread::scope(|scope| {
            let first = scope.spawn(|| load(1, [4, 5]));
            device.wait_for_request();
            assert!(device.serve_one(memory), "page 4");
            while device.waiting() < 2 {
                thread::yield_now();
            }
            let second = scope.spawn(|| load(2, [6, 6]));
            while !(first.is_finished() && second.is_finished()) {
                device.serve_one(memory);
            }
            assert_eq!(first.join().unwrap(), [Ok(AT + 4), Ok(AT + 5)]);
            assert_eq!(second.join().unwrap(), [Ok(AT + 6); 2]);
        });
        assert_eq!((events(swapping), device.counts().pages_read), ((1, 1, 2), 3));
    });
}

/// An unreadable page in a window is not an error, because its own fault retries the read.
fn an_error_around_is_no_error<A: Walk>() {
    with_pages::<A>(16, SwapService::AtOnce, |swapping, device| {
        swapping.assert_filled(AT, 1, AT);
        let failing = Arc::new(AtomicBool::new(true));
        let fails = Arc::clone(&failing);
        device.fail(move |request| {
            let is_read = request.operation() == SwapOperation::Read;
            is_read && request.slot() == 2 && fails.load(Relaxed)
        });
        swapping.assert_filled(AT + PAGE, 1, AT + 1);
        assert_eq!(events(swapping).0, 1);
        assert_eq!(swapping.memory.events().swap_read_errors, 1);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        assert_eq!(swapping.taken(), 14);
        failing.store(false, Relaxed);
        swapping.assert_filled(AT, 16, AT);
    });
}

/// Large folios are not extended by read-around, and compressed memory needs no readahead.
#[test]
fn compressed_memory_and_large_folios_are_read_alone() {
    with_swap::<Amd64>(0, 4096, |swapping| {
        swapping.memory.set_page_cluster(3);
        swapping.map(AT, 64);
        swapping.fill(AT, 64);
        swapping.page_out(AT, 64);
        swapping.assert_filled(AT, 64, AT);
        assert_eq!(events(swapping), (0, 0, 64));
    });
    let device = device(4096, SwapService::AtOnce);
    with_device::<Amd64>(BYTES, 4, device, |swapping| {
        swapping.memory.set_page_cluster(3);
        swapping.map(AT, 64);
        swapping.fill(AT, 64);
        swapping.page_out(AT, 64);
        swapping.assert_filled(AT, 64, AT);
        assert_eq!(events(swapping), (0, 0, 4));
        // A page of a run without its first page is swapped in alone, as a single page.
        swapping.page_out(AT, 16);
        swapping.space.madvise(VirtAddr(AT), PAGE, Advice::DontNeed).unwrap();
        swapping.assert_filled(AT + PAGE, 15, AT + 1);
        assert_eq!(events(swapping).0, 0);
        swapping.memory.folio_policy().set(Order(4), SizeMode::Never);
        swapping.page_out(AT, 64);
        swapping.assert_filled(AT + PAGE, 63, AT + 1);
        assert!(events(swapping).0 > 0);
    });
}

/// A child and its parent each find pages that the other has read.
fn both_sides_of_a_fork_find_pages_that_were_read_around<A: Walk>() {
    with_pages::<A>(64, SwapService::Shuffled(7, Duration::from_micros(20)), |swapping, device| {
        let child = swapping.space.fork().unwrap();
        let theirs = Program::new(swapping.machine, &child);
        swapping.served(device, || {
            for page in 0..64 {
                assert_eq!(theirs.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
                swapping.assert_filled(AT + page * PAGE, 1, AT + page);
            }
        });
        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        assert_eq!(device.counts().pages_read, 64);
        assert_eq!(swapping.taken(), 0);
    });
}

/// Reads of read-around folios are still in flight when the area is turned off.
fn swapoff_waits_for_pages_that_are_read_around<A: Walk>() {
    with_pages::<A>(64, SwapService::Shuffled(3, Duration::from_micros(50)), |swapping, device| {
        swapping.served(device, || swapping.assert_filled(AT, 4, AT));
        swapping.memory.stop_swapping_to(&swapping.area);
        swapping.served(device, || {
            swapping.space.swap_in_area(&swapping.area).unwrap();
            assert_eq!(swapping.taken(), 0);
        });
        swapping.memory.resume_swapping_to(&swapping.area);
        swapping.assert_filled(AT, 64, AT);
    });
}

on_every_architecture! {
    in_order => pages_in_order_are_read_ahead;
    falling => pages_in_falling_order_are_read_ahead;
    far => pages_far_from_each_other_are_read_alone;
    dropped => pages_that_nobody_wants_are_dropped;
    error => an_error_around_is_no_error;
    fork => both_sides_of_a_fork_find_pages_that_were_read_around;
    off => swapoff_waits_for_pages_that_are_read_around;
}
