//! Faults that do not wait: a device reads on another thread, or the wait is given up.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, FaultError, FaultReady, FaultWait, MapRequest, Resolved, Sharing,
    TriedFault,
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

/// Pages that are on a device, which serves nothing by itself.
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

/// Waits on another thread, and serves the device.
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
                // Nothing serves the device.
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

/// More waits than the device has requests lie in a queue: they hold none, so others go on.
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
        // Others find requests and locks free.
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

/// The mapping goes while another thread waits.
#[test]
fn an_unmapped_page_is_not_mapped_by_the_next_attempt() {
    with_pages(Sharing::Private, |swapping, device| {
        let wait = blocked(swapping.space, Access::Read);
        swapping.space.munmap(VirtAddr(AT), PAGES * 4096).unwrap();
        let ready = wait_elsewhere(swapping, device, wait);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        // The mutex says that no mapping grows there.
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
