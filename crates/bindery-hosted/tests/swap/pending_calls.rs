//! Calls that stop where they would wait for a swap device, and continue later.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    CallPoll, CallReady, CallWait, Error, LockPages, PendingProtect, Populate, ProtectFrom,
    Protection, Step, SwapOperation,
};
use bindery_hosted::{Machine, SwapFile, SwapService};

use super::fixture::{Swapping, device, with_device};
use crate::support::{GIB, MIB, audit};

type A = X86_64<4>;

const AT: u64 = GIB;
const PAGES: u64 = 16;
const LENGTH: u64 = PAGES * 4096;

/// Pages on a device that completes nothing by itself, and an `mlock` of these pages.
fn with_mlock(scenario: impl FnOnce(&Swapping<'_, '_, A>, &'static SwapFile, Populate)) {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.served(device, || swapping.page_out(AT, PAGES));
        let call = swapping.space.begin_mlock(VirtAddr(AT), LENGTH, LockPages::Now).unwrap();
        assert_eq!(device.counts().reads, 0, "nothing is read before the first step");
        scenario(swapping, device, call);
    });
}

/// Waits without a thread if possible, and otherwise in another one.
fn until_ready<'m>(
    swapping: &Swapping<'_, 'm, A>,
    device: &SwapFile,
    mut wait: CallWait<'_, 'm, Machine<A>>,
) -> CallReady<'m, Machine<A>> {
    loop {
        match wait.poll() {
            CallPoll::Ready(ready) => return ready,
            CallPoll::Pending(_) => assert!(device.serve_one(swapping.memory)),
            CallPoll::NeedsThread => break,
        }
    }
    thread::scope(|scope| {
        let waits = scope.spawn(|| swapping.machine.on_cpu(Cpu(1), || wait.wait()));
        while !waits.is_finished() {
            device.serve_one(swapping.memory);
            thread::yield_now();
        }
        waits.join().unwrap()
    })
}

fn finish(
    swapping: &Swapping<'_, '_, A>,
    device: &SwapFile,
    mut call: Populate,
) -> Result<u64, Error> {
    let (mut ready, mut waits) = (None, 0);
    while let Step::Blocked(wait) = call.step(swapping.space, ready.take())? {
        assert!(wait.is_for_storage());
        ready = Some(until_ready(swapping, device, wait));
        waits += 1;
    }
    assert!(call.remaining().is_empty());
    Ok(waits)
}

#[test]
fn each_page_is_read_once() {
    with_mlock(|swapping, device, call| {
        let before = swapping.memory.events().major_faults;
        assert_eq!(finish(swapping, device, call), Ok(PAGES));
        assert_eq!((device.counts().reads, device.counts().pages_read), (PAGES, PAGES));
        assert_eq!(swapping.memory.events().major_faults, before + PAGES);
        swapping.assert_filled(AT, PAGES, AT);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

#[test]
fn a_call_that_is_dropped_leaves_nothing() {
    for polls in [false, true] {
        with_mlock(|swapping, device, mut call| {
            let Ok(Step::Blocked(mut wait)) = call.step(swapping.space, None) else {
                panic!("the page is on the device")
            };
            if polls {
                assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            }
            drop((wait, call));
            assert_eq!(device.waiting(), usize::from(polls));
            // A fault finds the read in progress, or starts one.
            swapping.served(device, || assert_eq!(swapping.program.load(VirtAddr(AT)), Ok(AT)));
            assert_eq!(device.counts().reads, 1);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            swapping.space.munmap(VirtAddr(AT), LENGTH).unwrap();
            assert_eq!(swapping.taken(), 0);
        });
    }
}

#[test]
fn an_error_of_the_device_ends_the_call() {
    with_mlock(|swapping, device, mut call| {
        device.fail(|request| request.operation() == SwapOperation::Read);
        let Ok(Step::Blocked(wait)) = call.step(swapping.space, None) else {
            panic!("the page is on the device")
        };
        let failed = until_ready(swapping, device, wait);
        let step = call.step(swapping.space, Some(failed)).map(|_| ());
        assert_eq!(step, Err(Error::Fault(VirtAddr(AT))));
        device.fail(|_| false);
        // The range is locked, as after a blocking call.
        assert_eq!(swapping.space.usage().locked, PAGES);
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

#[test]
fn a_range_that_is_unmapped_meanwhile_is_passed() {
    with_mlock(|swapping, device, mut call| {
        let Ok(Step::Blocked(mut wait)) = call.step(swapping.space, None) else {
            panic!("the page is on the device")
        };
        assert!(matches!(wait.poll(), CallPoll::Pending(_)));
        swapping.space.munmap(VirtAddr(AT), LENGTH / 2).unwrap();
        let ready = until_ready(swapping, device, wait);
        let Ok(Step::Blocked(next)) = call.step(swapping.space, Some(ready)) else {
            panic!("the second half is on the device")
        };
        assert_eq!(call.remaining().start(), VirtAddr(AT + LENGTH / 2));
        drop(next);
        assert_eq!(finish(swapping, device, call), Ok(PAGES / 2));
        assert_eq!(device.counts().reads, 1 + PAGES / 2);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

/// The call rechecks the mapping after the wait.
#[test]
fn a_mapping_changed_during_waits_is_reexamined() {
    with_mlock(|swapping, device, mut call| {
        let Ok(Step::Blocked(wait)) = call.step(swapping.space, None) else { panic!("a device") };
        swapping.space.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
        let ready = until_ready(swapping, device, wait);
        swapping.space.mprotect(VirtAddr(AT), LENGTH, Protection::READ).unwrap();
        let mut ready = Some(ready);
        while let Step::Blocked(wait) = call.step(swapping.space, ready.take()).unwrap() {
            ready = Some(until_ready(swapping, device, wait));
        }
        assert!(call.remaining().is_empty());
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

/// Pages on a device, locked while no access was allowed, and an `mprotect` of `pages` pages from
/// the first of them on that allows all access.
fn with_mprotect(
    pages: u64,
    scenario: impl FnOnce(&Swapping<'_, '_, A>, &'static SwapFile, PendingProtect),
) {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.served(device, || swapping.page_out(AT, PAGES));
        let space = swapping.space;
        space.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
        let locked = space.mlock(VirtAddr(AT), LENGTH, LockPages::Now);
        assert_eq!(locked, Err(Error::Fault(VirtAddr(AT))));
        assert_eq!(space.usage().locked, PAGES);
        let (from, all) =
            (ProtectFrom::Address(VirtAddr(AT)), Protection::READ | Protection::WRITE);
        let call = space.begin_mprotect(from, pages * 4096, all, None);
        assert_eq!(device.counts().reads, 0, "nothing is read before the first step");
        scenario(swapping, device, call);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

/// The result of the call and the number of its waits.
fn finish_mprotect(
    swapping: &Swapping<'_, '_, A>,
    device: &SwapFile,
    mut call: PendingProtect,
) -> (Result<(), Error>, u64) {
    let (mut ready, mut waits) = (None, 0);
    loop {
        match call.step(swapping.space, ready.take()) {
            Ok(Step::Blocked(wait)) => ready = Some(until_ready(swapping, device, wait)),
            Ok(Step::Done) => return (Ok(()), waits),
            Err(error) => return (Err(error), waits),
        }
        waits += 1;
    }
}

#[test]
fn mprotect_reads_locked_pages_in_steps() {
    with_mprotect(PAGES, |swapping, device, call| {
        assert_eq!(finish_mprotect(swapping, device, call), (Ok(()), PAGES));
        assert_eq!((device.counts().reads, device.counts().pages_read), (PAGES, PAGES));
        let before = swapping.machine.statistics().faults;
        swapping.assert_filled(AT, PAGES, AT);
        swapping.fill(AT, PAGES);
        assert_eq!(swapping.machine.statistics().faults, before, "all pages are writable");
    });
}

#[test]
fn mprotect_fails_after_its_steps() {
    with_mprotect(PAGES + 1, |swapping, device, call| {
        let hole = Err(Error::NotMapped(VirtAddr(AT + LENGTH)));
        assert_eq!(finish_mprotect(swapping, device, call), (hole, PAGES));
        swapping.assert_filled(AT, PAGES, AT);
    });
}

/// The call does not read a part that another thread unlocks, nor a part without write permission.
#[test]
fn mprotect_passes_over_unlocked_pages() {
    with_mprotect(PAGES, |swapping, device, mut call| {
        let Ok(Step::Blocked(wait)) = call.step(swapping.space, None) else { panic!("a device") };
        swapping.space.munlock(VirtAddr(AT + 4096), 7 * 4096).unwrap();
        let from = VirtAddr(AT + 12 * 4096);
        swapping.space.mprotect(from, 4 * 4096, Protection::READ).unwrap();
        let mut ready = Some(until_ready(swapping, device, wait));
        let mut waits = 1;
        while let Step::Blocked(wait) = call.step(swapping.space, ready.take()).unwrap() {
            ready = Some(until_ready(swapping, device, wait));
            waits += 1;
        }
        assert_eq!((waits, device.counts().pages_read), (5, 5));
    });
}

#[test]
fn a_dropped_mprotect_stays_set() {
    with_mprotect(PAGES, |swapping, device, mut call| {
        drop(call.step(swapping.space, None));
        drop(call);
        assert_eq!(device.counts().reads, 0);
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
        swapping.served(device, || swapping.fill(AT, PAGES));
    });
}
