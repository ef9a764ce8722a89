//! Faults that do not wait: another thread waits for the device, or the wait is abandoned.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::{Cpu, Platform};
use bindery::testing::lock_folio;
use bindery::{
    Access, AddressSpace, FaultError, FaultPoll, FaultReady, FaultWait, MapRequest, Resolved,
    Sharing, SwapOperation, TriedFault,
};
use bindery_hosted::{Machine, SwapFile, SwapService};

use super::fixture::{Swapping, device, with_device, with_little_memory};
use crate::support::objects::use_object_order;
use crate::support::{GIB, MIB, audit, fixed};

type A = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<A>>;

const AT: u64 = GIB;
const PAGES: u64 = 64;

fn attempt<'s, 'm>(
    space: &'s Space<'m>,
    access: Access,
) -> Result<TriedFault<'s, 'm, Machine<A>>, FaultError> {
    space.try_fault(VirtAddr(AT), access, KeyRights::ALL)
}

#[track_caller]
fn blocked<'s, 'm>(space: &'s Space<'m>, access: Access) -> FaultWait<'s, 'm, Machine<A>> {
    match attempt(space, access) {
        Ok(TriedFault::Blocked(wait)) => wait,
        other => panic!("it does not wait: {other:?}"),
    }
}

#[track_caller]
fn resolved(space: &Space<'_>, access: Access) -> Resolved {
    match attempt(space, access) {
        Ok(TriedFault::Resolved(resolved)) => resolved,
        other => panic!("it waits: {other:?}"),
    }
}

/// Pages on a device that serves nothing by itself.
fn with_pages(sharing: Sharing, scenario: impl FnOnce(&Swapping<'_, '_, A>, &'static SwapFile)) {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 4, device, |swapping| {
        use_object_order(swapping.memory, 4);
        let request = MapRequest { sharing, ..fixed(AT, PAGES * 4096) };
        swapping.space.mmap(&request).unwrap();
        swapping.fill(AT, PAGES);
        swapping.served(device, || swapping.page_out(AT, PAGES));
        scenario(swapping, device);
    });
}

/// Waits on another thread and serves the device.
fn wait_elsewhere<'m>(
    swapping: &Swapping<'_, 'm, A>,
    device: &SwapFile,
    wait: FaultWait<'_, 'm, Machine<A>>,
) -> Result<FaultReady<'m, Machine<A>>, FaultError> {
    thread::scope(|scope| {
        let waits = scope.spawn(|| swapping.machine.on_cpu(Cpu(1), || wait.wait()));
        while !waits.is_finished() {
            device.serve_one(swapping.memory);
            thread::yield_now();
        }
        waits.join().unwrap()
    })
}

#[test]
fn another_thread_waits_for_the_device() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        for access in [Access::Read, Access::Write] {
            with_pages(sharing, |swapping, device| {
                let before = swapping.memory.events().major_faults;
                let wait = blocked(swapping.space, access);
                assert!(wait.is_for_storage());
                let ready = wait_elsewhere(swapping, device, wait).unwrap();
                let _ = resolved(swapping.space, access);
                drop(ready);
                assert_eq!((device.counts().reads, device.counts().pages_read), (1, 16));
                assert_eq!(swapping.memory.events().major_faults, before + 1);
                assert_eq!(swapping.program.load(VirtAddr(AT)), Ok(AT));
                audit(swapping.machine, swapping.memory, &[swapping.space]);
            });
        }
    }
}

#[test]
fn a_wait_that_is_given_up_leaves_nothing() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        with_pages(sharing, |swapping, device| {
            for _ in 0..3 {
                // Nothing completes requests.
                drop(blocked(swapping.space, Access::Read));
                audit(swapping.machine, swapping.memory, &[swapping.space]);
            }
            assert_eq!(device.counts().reads, 0);
            swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
            swapping.space.munmap(VirtAddr(AT), PAGES * 4096).unwrap();
            assert_eq!(swapping.taken(), 0);
        });
    }
}

#[test]
fn a_polled_wait_needs_no_thread() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        for access in [Access::Read, Access::Write] {
            with_pages(sharing, |swapping, device| {
                let (space, memory) = (swapping.space, swapping.memory);
                let before = memory.events().major_faults;
                let mut wait = blocked(space, access);
                assert_eq!(device.waiting(), 0, "only a poll begins the read");
                let Ok(FaultPoll::Pending(parked)) = wait.poll() else { panic!("it is read") };
                assert!(!parked.has_changed());
                assert_eq!(device.waiting(), 1);
                // No request has completed yet.
                assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
                assert_eq!(device.waiting(), 1);
                let Ok(FaultPoll::Pending(parked)) = wait.poll() else { panic!("it is read") };
                device.serve_one(memory);
                assert!(parked.has_changed());
                let Ok(FaultPoll::Ready(ready)) = wait.poll() else { panic!("it was read") };
                // Reclaim does not evict the awaited page.
                memory.reclaim(1000);
                let _ = resolved(space, access);
                drop((ready, wait));
                assert_eq!((device.counts().reads, device.counts().pages_read), (1, 16));
                assert_eq!(memory.events().major_faults, before + 1);
                assert_eq!(swapping.program.load(VirtAddr(AT)), Ok(AT));
                audit(swapping.machine, memory, &[space]);
            });
        }
    }
}

#[test]
fn a_dropped_poll_leaves_its_read_to_others() {
    with_pages(Sharing::Private, |swapping, device| {
        let (space, memory) = (swapping.space, swapping.memory);
        let (mut first, mut second) = (blocked(space, Access::Read), blocked(space, Access::Read));
        assert!(matches!(first.poll(), Ok(FaultPoll::Pending(_))));
        // The second wait finds the read in flight.
        assert!(matches!(second.poll(), Ok(FaultPoll::Pending(_))));
        drop(first);
        assert_eq!(device.waiting(), 1);
        device.serve_one(memory);
        assert!(matches!(second.poll(), Ok(FaultPoll::Ready(_))));
        drop(second);
        let _ = resolved(space, Access::Read);
        // A wait for a read in flight may be passed to a thread.
        let mut third = space.try_fault(VirtAddr(AT + 32 * 4096), Access::Read, KeyRights::ALL);
        let Ok(TriedFault::Blocked(wait)) = &mut third else { panic!("it is in swap") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        let Ok(TriedFault::Blocked(wait)) = third else { panic!("it is in swap") };
        drop(wait_elsewhere(swapping, device, wait).unwrap());
        assert_eq!(device.counts().reads, 2);
        audit(swapping.machine, memory, &[space]);
    });
}

#[test]
fn a_failed_poll_is_for_a_thread() {
    with_pages(Sharing::Private, |swapping, device| {
        let (space, memory) = (swapping.space, swapping.memory);
        device.fail(|request| request.operation() == SwapOperation::Read);
        let mut wait = blocked(space, Access::Read);
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        device.serve_one(memory);
        assert!(matches!(wait.poll(), Ok(FaultPoll::NeedsThread)));
        let result = wait_elsewhere(swapping, device, wait).map(|_| ());
        assert_eq!(result, Err(FaultError::Bus));
        device.fail(|_| false);
        audit(swapping.machine, memory, &[space]);
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
    });
}

#[test]
fn a_task_waits_for_a_threads_folio() {
    with_pages(Sharing::Private, |swapping, device| {
        let (space, memory) = (swapping.space, swapping.memory);
        let child = space.fork().unwrap();
        swapping.served(device, || space.fault(VirtAddr(AT), Access::Read).unwrap());
        let unlock = lock_folio(space, VirtAddr(AT));
        let (mut wait, mut dropped) =
            (blocked(&child, Access::Read), blocked(&child, Access::Read));
        for wait in [&mut wait, &mut dropped] {
            let Ok(FaultPoll::Pending(on)) = wait.poll() else { panic!("a thread has the lock") };
            assert!(!on.has_changed());
        }
        drop(dropped);
        thread::scope(|scope| {
            let sleeps = scope.spawn(|| {
                swapping.machine.on_cpu(Cpu(1), || {
                    let Ok(FaultPoll::Pending(on)) = wait.poll() else { return };
                    swapping.machine.park(on.word(), on.expected());
                });
            });
            while swapping.machine.parked_threads() == 0 && !sleeps.is_finished() {
                thread::yield_now();
            }
            unlock();
        });
        let Ok(FaultPoll::Ready(ready)) = wait.poll() else { panic!("the lock is free") };
        let _ = resolved(&child, Access::Read);
        drop((ready, wait));
        assert_eq!(device.counts().reads, 1);
        audit(swapping.machine, memory, &[space, &child]);
    });
}

#[test]
fn a_poll_keeps_a_locked_folio() {
    with_pages(Sharing::Private, |swapping, device| {
        let (space, memory) = (swapping.space, swapping.memory);
        let child = space.fork().unwrap();
        swapping.served(device, || space.fault(VirtAddr(AT), Access::Read).unwrap());
        let unlock = lock_folio(space, VirtAddr(AT));
        let mut wait = blocked(&child, Access::Read);
        let Ok(FaultPoll::Pending(on)) = wait.poll() else { panic!("a thread has the lock") };
        // Without the reference of the wait, nothing would keep the folio for its waker.
        for space in [space, &child] {
            space.munmap(VirtAddr(AT), PAGES * 4096).unwrap();
        }
        unlock();
        assert!(on.has_changed());
        let free = || {
            memory.trim();
            memory.free_frame_count()
        };
        let before = free();
        drop(wait);
        assert!(free() > before, "the wait has had the only reference");
        audit(swapping.machine, memory, &[space, &child]);
    });
}

/// More polls than the device's request limit: the excess polls wait for a free request or defer to
/// a thread.
#[test]
fn polls_share_the_requests_of_a_device() {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        let (space, memory) = (swapping.space, swapping.memory);
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.served(device, || swapping.page_out(AT, PAGES));
        let at = |page: u64| VirtAddr(AT + page * 4096);
        let mut waits: Vec<_> = (0..PAGES)
            .map(|page| match space.try_fault(at(page), Access::Read, KeyRights::ALL) {
                Ok(TriedFault::Blocked(wait)) => (page, wait),
                tried => panic!("the page is on the device: {tried:?}"),
            })
            .collect();
        let mut rounds = 0;
        while !waits.is_empty() {
            waits.retain_mut(|(page, wait)| match wait.poll().unwrap() {
                FaultPoll::Ready(_ready) => {
                    let tried = space.try_fault(at(*page), Access::Read, KeyRights::ALL);
                    assert!(matches!(tried, Ok(TriedFault::Resolved(_))), "{tried:?}");
                    false
                }
                FaultPoll::Pending(_) => true,
                // No request is free. A task would ask a thread; this test polls again.
                FaultPoll::NeedsThread => true,
            });
            device.serve_one(memory);
            rounds += 1;
            assert!(rounds < 1000, "{} waits do not end", waits.len());
        }
        swapping.assert_filled(AT, PAGES, AT);
        audit(swapping.machine, memory, &[space]);
    });
}

/// Waits beyond the device's request limit are queued. Queued waits hold no requests, so other
/// calls continue.
#[test]
fn waits_in_a_queue_hold_nothing() {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.served(device, || swapping.page_out(AT, PAGES));
        let tried = (0..PAGES).map(|page| {
            let at = VirtAddr(AT + page * 4096);
            swapping.space.try_fault(at, Access::Read, KeyRights::ALL).unwrap()
        });
        let waits: Vec<_> = tried.collect();
        // Other calls find requests and locks free.
        swapping.map(AT + MIB, PAGES);
        swapping.fill(AT + MIB, PAGES);
        swapping.served(device, || {
            swapping.page_out(AT + MIB, PAGES);
            swapping.memory.wait_for_swap_writes().unwrap();
            swapping.assert_filled(AT, 1, AT);
        });
        swapping.served(device, || {
            for tried in waits {
                let TriedFault::Blocked(wait) = tried else { panic!("the page is on the device") };
                assert!(wait.is_for_storage() && wait.wait().is_ok());
            }
        });
        swapping.assert_filled(AT, PAGES, AT);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

/// The mapping is removed while another thread waits.
#[test]
fn the_next_attempt_maps_no_unmapped_page() {
    with_pages(Sharing::Private, |swapping, device| {
        let wait = blocked(swapping.space, Access::Read);
        swapping.space.munmap(VirtAddr(AT), PAGES * 4096).unwrap();
        let ready = wait_elsewhere(swapping, device, wait);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        // The mutex is needed to verify that no mapping grows down to the address.
        let wait = blocked(swapping.space, Access::Read);
        assert!(!wait.is_for_storage());
        assert_eq!(wait.wait().err(), Some(FaultError::NotMapped));
        drop(ready);
    });
}

#[test]
fn the_first_write_of_a_mapping_waits_once() {
    with_little_memory::<A>(64 * MIB, 0, 64, |swapping| {
        swapping.space.mmap(&fixed(AT, PAGES * 4096)).unwrap();
        assert_eq!(resolved(swapping.space, Access::Read), Resolved::ZeroPage);
        let wait = blocked(swapping.space, Access::Write);
        assert!(!wait.is_for_storage());
        drop(wait.wait().unwrap());
        let next = VirtAddr(AT + 4096);
        let tried = swapping.space.try_fault(next, Access::Write, KeyRights::ALL);
        assert!(matches!(tried, Ok(TriedFault::Resolved(Resolved::New(_)))), "{tried:?}");
        let beyond = VirtAddr(u64::MAX - 4095);
        let tried = swapping.space.try_fault(beyond, Access::Read, KeyRights::ALL);
        assert!(matches!(tried, Err(FaultError::NotMapped)));
        let tried = swapping.space.try_fault(next, Access::Execute, KeyRights::ALL);
        assert!(matches!(tried, Err(FaultError::Protection)), "{tried:?}");
    });
}

#[test]
fn memory_that_is_short_is_waited_for() {
    with_little_memory::<A>(16 * MIB, 0, 4096, |swapping| {
        let length = 8 * MIB;
        swapping.space.mmap(&fixed(AT + MIB, length)).unwrap();
        swapping.fill(AT + MIB, length / 4096);
        swapping.space.mmap(&fixed(AT, PAGES * 4096)).unwrap();
        drop(blocked(swapping.space, Access::Write).wait().unwrap());
        let at = VirtAddr(AT + 4096);
        swapping.memory.fail_allocations_after(Some(0));
        let tried = swapping.space.try_fault(at, Access::Write, KeyRights::ALL).unwrap();
        let TriedFault::Blocked(wait) = tried else { panic!("a page without memory") };
        assert_eq!(wait.wait().err(), Some(FaultError::OutOfMemory));
        swapping.memory.fail_allocations_after(None);
        let tried = swapping.space.try_fault(at, Access::Write, KeyRights::ALL);
        assert!(matches!(tried, Ok(TriedFault::Resolved(Resolved::New(_)))), "{tried:?}");
    });
}
