//! An asynchronous device: folios under writeback, and calls that need them.

use std::thread;
use std::time::Duration;

use bindery::addr::{Order, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, Error, MapRequest, PinTime, Sharing, SizeMode, SwapError};
use bindery_hosted::{Program, SwapFile, SwapService, Walk};

use super::fixture::{Swapping, device, with_device};
use crate::support::{GIB, MIB, audit, fixed};

const AT: u64 = GIB;
const BYTES: u64 = 64 * MIB;
const SLOTS: u64 = 4096;

type Amd64 = X86_64<4>;

/// Completes all pending requests and makes the core process the completions.
fn serve_all<A: Walk>(swapping: &Swapping<'_, '_, A>, device: &SwapFile) {
    while device.serve_one(swapping.memory) {}
    swapping.memory.wait_for_swap_writes().unwrap();
}

fn pages_go_to_a_device_and_come_back<A: Walk>() {
    let shuffled = SwapService::Shuffled(7, Duration::from_micros(50));
    for service in [SwapService::AtOnce, SwapService::InOrder, shuffled] {
        for order in [0, 4, 9] {
            let device = device(SLOTS, service);
            with_device::<A>(BYTES, order, device, |swapping| {
                swapping.map(AT, 1024);
                swapping.fill(AT, 1024);
                let free = swapping.memory.free_frame_count();
                swapping.served(device, || {
                    swapping.page_out(AT, 1024);
                    swapping.memory.wait_for_swap_writes().unwrap();
                    assert_eq!(swapping.swapped(AT, 1024), 1024);
                    audit(swapping.machine, swapping.memory, &[swapping.space]);
                    assert!(swapping.memory.free_frame_count() >= free + 1024);
                    assert_eq!(device.counts().pages_written, 1024);
                    swapping.assert_filled(AT, 1024, AT);
                });
                assert_eq!(device.counts().pages_read, 1024);
                assert!(device.counts().reads <= 1024 >> order, "a folio came back in parts");
                assert_eq!(swapping.taken(), 0);
            });
        }
    }
}

/// Of a folio with raw pages and word-filled pages, only the raw pages reach the device.
fn filled_pages_never_reach_the_device<A: Walk>() {
    let device = device(SLOTS, SwapService::AtOnce);
    with_device::<A>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 32);
        for page in 0..32 {
            swapping.program.store(VirtAddr(AT + page * 4096), 0).unwrap();
        }
        for page in [0, 1, 2, 7, 15] {
            swapping.program.store(VirtAddr(AT + page * 4096 + 64), page + 1).unwrap();
        }
        let pattern = [0x55; 4096];
        swapping.space.write_user(VirtAddr(AT + 9 * 4096), &pattern).unwrap();
        swapping.page_out(AT, 32);
        assert_eq!(swapping.swapped(AT, 32), 32);
        let counts = device.counts();
        assert_eq!((counts.writes, counts.pages_written), (3, 5), "0 to 2, 7, and 15");
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        for page in 0..32 {
            let expected = if [0, 1, 2, 7, 15].contains(&page) { page + 1 } else { 0 };
            let at = VirtAddr(AT + page * 4096 + 64);
            let expected = if page == 9 { 0x5555_5555_5555_5555 } else { expected };
            assert_eq!(swapping.program.load(at), Ok(expected), "page {page}");
        }
        assert_eq!((device.counts().reads, device.counts().pages_read), (3, 5));
    });
}

/// A huge leaf's folio is swapped out as a unit, for private and for shared memory: one entry, one
/// run of slots, one request.
fn a_huge_folio_is_one_run<A: Walk>() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        let device = device(SLOTS, SwapService::AtOnce);
        with_device::<A>(BYTES, 9, device, |swapping| {
            swapping.memory.shared_folio_policy().set(Order(9), SizeMode::Always);
            let request = MapRequest { sharing, ..fixed(AT, 1024 * 4096) };
            swapping.space.mmap(&request).unwrap();
            swapping.fill(AT, 1024);
            let before = swapping.space.counts();
            swapping.page_out(AT, 1024);
            let cost = swapping.space.counts() - before;
            // Writes the leaf and, for shared memory, frees the deposited table.
            assert!(cost.entries_written <= 4, "{cost:?}");
            let counts = device.counts();
            assert_eq!((counts.writes, counts.pages_written, swapping.taken()), (2, 1024, 1024));
            swapping.assert_filled(AT, 1024, AT);
            assert_eq!((device.counts().reads, device.counts().pages_read), (2, 1024));
            swapping.space.munmap(VirtAddr(AT), 1024 * 4096).unwrap();
        });
    }
}

/// A fault finds the folio under writeback and waits for the device without reading.
#[test]
fn a_fault_waits_for_the_write() {
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::InOrder);
        with_device::<Amd64>(BYTES, order, device, |swapping| {
            swapping.map(AT, 512);
            swapping.fill(AT, 32);
            swapping.page_out(AT, 512);
            assert!(device.waiting() > 0 && device.counts().writes == 0);
            thread::scope(|scope| {
                let faults = [Access::Read, Access::Write].map(|access| {
                    let cpu = Cpu(1 + u16::from(access == Access::Write));
                    scope.spawn(move || {
                        swapping.machine.on_cpu(cpu, || {
                            swapping.space.fault(VirtAddr(AT), access).unwrap();
                            Program::new(swapping.machine, swapping.space).load(VirtAddr(AT))
                        })
                    })
                });
                thread::sleep(Duration::from_millis(5));
                assert!(faults.iter().all(|fault| !fault.is_finished()), "nobody waits");
                while faults.iter().any(|fault| !fault.is_finished()) {
                    device.serve_one(swapping.memory);
                    thread::yield_now();
                }
                faults.into_iter().for_each(|fault| assert_eq!(fault.join().unwrap(), Ok(AT)));
            });
            assert_eq!(device.counts().reads, 0, "the folio was in memory");
        });
    }
}

/// Two threads that need the same page read it once.
#[test]
fn two_faults_at_once_read_a_run_once() {
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::InOrder);
        with_device::<Amd64>(BYTES, order, device, |swapping| {
            swapping.map(AT, 512);
            swapping.fill(AT, 512);
            swapping.served(device, || swapping.page_out(AT, 512));
            thread::scope(|scope| {
                for cpu in [1, 2] {
                    scope.spawn(move || {
                        swapping.machine.on_cpu(Cpu(cpu), || {
                            let program = Program::new(swapping.machine, swapping.space);
                            // Accesses a different page of the folio if it has several.
                            let page = u64::from(cpu - 1) * 3 % (1 << order);
                            let at = AT + page * 4096;
                            assert_eq!(program.load(VirtAddr(at)), Ok(AT + page));
                        });
                    });
                }
                device.wait_for_request();
                thread::sleep(Duration::from_millis(2));
                assert_eq!(device.waiting(), 1, "the folio is being read already");
                device.serve_one(swapping.memory);
            });
            assert_eq!(device.counts().pages_read, 1 << order);
        });
    }
}

/// 1. A folio is under writeback; the parent forks.
/// 2. The write completes, and the slots have two references.
/// 3. Parent and child read and write their own pages.
#[test]
fn a_fork_finds_folios_under_writeback() {
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::InOrder);
        with_device::<Amd64>(BYTES, order, device, |swapping| {
            // The maximum number of small folios in flight.
            let pages = 32;
            swapping.map(AT, 512);
            swapping.fill(AT, pages);
            swapping.page_out(AT, 512);
            let child = swapping.space.fork().unwrap();
            serve_all(swapping, device);
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            swapping.served(device, || {
                let theirs = Program::new(swapping.machine, &child);
                for page in 0..pages {
                    let at = VirtAddr(AT + page * 4096);
                    theirs.store(at, 1).unwrap();
                    assert_eq!(swapping.program.load(at), Ok(AT + page));
                    assert_eq!(theirs.load(at), Ok(1));
                }
            });
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        });
    }
}

/// The entries are removed during the write, and the slots are not reused until the write
/// completes.
#[test]
fn a_slot_is_reused_after_its_write() {
    let device = device(16, SwapService::InOrder);
    with_device::<Amd64>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 32);
        swapping.fill(AT, 32);
        swapping.page_out(AT, 16);
        swapping.space.munmap(VirtAddr(AT), 16 * 4096).unwrap();
        assert_eq!((device.waiting(), swapping.taken()), (1, 16));
        let other = AT + 16 * 4096;
        swapping.page_out(other, 16);
        assert_eq!(swapping.swapped(other, 16), 0, "the device still has the slots");
        serve_all(swapping, device);
        assert_eq!(swapping.taken(), 0);
        swapping.page_out(other, 16);
        assert_eq!(swapping.swapped(other, 16), 16);
        serve_all(swapping, device);
        swapping.served(device, || swapping.assert_filled(other, 16, AT + 16));
    });
}

/// When the request table is full, the writer waits for the device, in whatever order it completes
/// requests.
#[test]
fn more_folios_than_requests_go_out() {
    let device = device(SLOTS, SwapService::Shuffled(3, Duration::from_micros(20)));
    with_device::<Amd64>(BYTES, 0, device, |swapping| {
        swapping.map(AT, 600);
        swapping.fill(AT, 600);
        swapping.served(device, || {
            swapping.page_out(AT, 600);
            swapping.assert_filled(AT, 600, AT);
        });
        assert_eq!(device.counts().pages_written, 600);
        assert_eq!(swapping.taken(), 0);
    });
}

/// The last step of `swapoff` waits for requests in flight, unless the caller is killed.
#[test]
fn swapoff_waits_for_the_device_interruptibly() {
    let device = device(SLOTS, SwapService::InOrder);
    with_device::<Amd64>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 64);
        swapping.fill(AT, 64);
        swapping.page_out(AT, 64);
        swapping.space.munmap(VirtAddr(AT), 64 * 4096).unwrap();
        assert_eq!(device.waiting(), 4);
        swapping.machine.fatal_signal_after(Some(0));
        assert_eq!(swapping.memory.swap_off(&swapping.area), Err(SwapError::Interrupted));
        assert_eq!(swapping.memory.wait_for_swap_writes(), Err(Error::Interrupted));
        swapping.machine.fatal_signal_after(None);
        assert_eq!(swapping.taken(), 64);
        thread::scope(|scope| {
            let off = scope.spawn(|| {
                swapping.machine.on_cpu(Cpu(1), || swapping.memory.swap_off(&swapping.area))
            });
            thread::sleep(Duration::from_millis(5));
            assert!(!off.is_finished(), "the device still has folios");
            while device.serve_one(swapping.memory) {}
            assert_eq!(off.join().unwrap(), Ok(()));
        });
        // The fixture needs an area at the end.
        assert_eq!(swapping.memory.swap_on_device(device, 0), Ok(swapping.area));
    });
}

/// Pages are swapped in one space at a time, from a slow device.
#[test]
fn swapoff_brings_everything_back() {
    let device = device(SLOTS, SwapService::Shuffled(5, Duration::from_micros(100)));
    with_device::<Amd64>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 256);
        swapping.fill(AT, 256);
        swapping.served(device, || {
            swapping.page_out(AT, 256);
            swapping.memory.stop_swapping_to(&swapping.area);
            swapping.space.swap_in_area(&swapping.area).unwrap();
            assert_eq!((swapping.taken(), swapping.swapped(AT, 256)), (0, 0));
        });
        swapping.assert_filled(AT, 256, AT);
    });
}

/// Reclaim waits for the device if pages in flight suffice.
#[test]
fn reclaim_frees_what_the_device_has_written() {
    for service in [SwapService::AtOnce, SwapService::Shuffled(1, Duration::from_micros(30))] {
        for order in [0, 4] {
            let pages = 32 * MIB / 4096;
            let device = device(2 * pages, service);
            with_device::<Amd64>(16 * MIB, order, device, |swapping| {
                swapping.map(AT, pages);
                swapping.served(device, || {
                    swapping.fill(AT, pages);
                    swapping.assert_filled(AT, pages, AT);
                });
                assert!(swapping.taken() >= pages / 2);
                audit(swapping.machine, swapping.memory, &[swapping.space]);
                let counts = device.counts();
                assert!(counts.pages_written >= pages / 2 && counts.pages_read >= pages / 2);
            });
        }
    }
}

/// A folio that a driver uses is not swapped out, nor is one that is being swapped in for a driver.
#[test]
fn a_pin_waits_for_the_write() {
    let device = device(SLOTS, SwapService::InOrder);
    with_device::<Amd64>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        swapping.page_out(AT, 16);
        swapping.served(device, || {
            let pinned = swapping.space.pin(VirtAddr(AT), 1, Access::Write, PinTime::Short);
            swapping.page_out(AT, 16);
            assert_eq!(swapping.swapped(AT, 16), 0, "a pinned folio went out");
            drop(pinned);
            swapping.assert_filled(AT, 16, AT);
        });
    });
}

/// A write to a device allocates nothing, so the last frame need not be free.
#[test]
fn pages_reach_a_device_without_free_frames() {
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::AtOnce);
        with_device::<Amd64>(BYTES, order, device, |swapping| {
            swapping.map(AT, 512);
            swapping.fill(AT, 512);
            swapping.memory.fail_allocations_after(Some(0));
            swapping.page_out(AT, 512);
            swapping.memory.fail_allocations_after(None);
            assert_eq!((swapping.swapped(AT, 512), device.counts().pages_written), (512, 512));
            swapping.assert_filled(AT, 512, AT);
        });
    }
}

/// Shared memory is swapped out to the device as well, and accesses wait for the write.
#[test]
fn shared_memory_goes_to_a_device() {
    let device = device(SLOTS, SwapService::Shuffled(2, Duration::from_micros(30)));
    with_device::<Amd64>(BYTES, 0, device, |swapping| {
        swapping.memory.shared_folio_policy().set(Order(4), SizeMode::Always);
        let request = MapRequest { sharing: Sharing::Shared, ..fixed(AT, 256 * 4096) };
        swapping.space.mmap(&request).unwrap();
        swapping.fill(AT, 256);
        swapping.served(device, || {
            swapping.page_out(AT, 256);
            swapping.assert_filled(AT, 128, AT);
            swapping.page_out(AT, 256);
            swapping.memory.wait_for_swap_writes().unwrap();
            assert_eq!(swapping.taken(), 256);
            swapping.assert_filled(AT, 256, AT);
        });
        assert!(device.counts().pages_read >= 256 && swapping.taken() == 0);
    });
}

on_every_architecture! {
    to_a_device => pages_go_to_a_device_and_come_back;
    huge => a_huge_folio_is_one_run;
    filled => filled_pages_never_reach_the_device;
}
