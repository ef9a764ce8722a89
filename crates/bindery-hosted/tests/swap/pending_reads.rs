//! Reads of shared memory that stop where they would wait for a swap device and continue later.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    Accounting, CallPoll, CallReady, CallWait, Error, Object, PendingRead, Sealing, Sharing, Step,
    SwapOperation,
};
use bindery_hosted::{Machine, SwapFile, SwapService};

use super::fixture::{Swapping, device, with_device};
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit};

pub type A = X86_64<4>;
pub type P = Machine<A>;

pub const AT: u64 = GIB;
pub const PAGES: u64 = 8;
pub const LENGTH: usize = PAGES as usize * 4096;

/// Shared memory that is on a device, which serves nothing by itself.
pub fn with_shared(
    scenario: impl for<'m> FnOnce(&Swapping<'_, 'm, A>, &'static SwapFile, Object<'m, P>),
) {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        let object = swapping
            .memory
            .shared_memory(LENGTH as u64, Sealing::Allowed, Accounting::PerPage)
            .unwrap();
        map(swapping.space, &object, AT, LENGTH as u64, Sharing::Shared).unwrap();
        swapping.fill(AT, PAGES);
        swapping.served(device, || swapping.page_out(AT, PAGES));
        assert_eq!(object.swapped_pages(), PAGES);
        scenario(swapping, device, object);
        swapping.space.munmap(VirtAddr(AT), LENGTH as u64).unwrap();
    });
}

/// Waits without a thread or, if needed, in another thread.
pub fn until_ready<'m>(
    swapping: &Swapping<'_, 'm, A>,
    device: &SwapFile,
    mut wait: CallWait<'_, 'm, P>,
    polls: bool,
) -> CallReady<'m, P> {
    if polls {
        loop {
            match wait.poll() {
                CallPoll::Ready(ready) => return ready,
                CallPoll::Pending(_) => assert!(device.serve_one(swapping.memory)),
                CallPoll::NeedsThread => break,
            }
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

#[test]
fn each_page_of_a_read_is_read_once() {
    for polls in [true, false] {
        with_shared(|swapping, device, object| {
            let faults = swapping.memory.events().major_faults;
            let mut into = vec![0; LENGTH];
            let mut read = PendingRead::new(&object, 0, LENGTH).unwrap();
            let (mut ready, mut waits) = (None, 0);
            while let Step::Blocked(wait) = read.step(ready.take(), &mut into).unwrap() {
                assert!(wait.is_for_storage());
                ready = Some(until_ready(swapping, device, wait, polls));
                waits += 1;
            }
            assert_eq!((read.moved(), waits), (LENGTH, PAGES));
            for (page, bytes) in (0..).zip(into.chunks(4096)) {
                assert_eq!(bytes[..8], (AT + page).to_le_bytes());
            }
            assert_eq!((device.counts().reads, device.counts().pages_read), (PAGES, PAGES));
            assert_eq!(swapping.memory.events().major_faults, faults, "a read is no fault");
            audit(swapping.machine, swapping.memory, &[swapping.space]);
        });
    }
}

#[test]
fn a_dropped_read_leaves_the_page_in_swap() {
    with_shared(|swapping, device, object| {
        let mut read = PendingRead::new(&object, 0, 4).unwrap();
        let Ok(Step::Blocked(wait)) = read.step(None, &mut [0; 4]) else { panic!("a device") };
        drop(wait);
        drop(read);
        assert_eq!((device.waiting(), object.swapped_pages()), (0, PAGES));
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
    });
}

#[test]
fn lost_content_ends_a_read() {
    for polls in [true, false] {
        with_shared(|swapping, device, object| {
            device.fail(|request| request.operation() == SwapOperation::Read);
            let mut into = [0; 10];
            let mut read = PendingRead::new(&object, 0, 10).unwrap();
            let Ok(Step::Blocked(wait)) = read.step(None, &mut into) else { panic!("a device") };
            let ready = until_ready(swapping, device, wait, polls);
            let end = read.step(Some(ready), &mut into).map(drop);
            assert_eq!(end, Err(Error::InputOutput));
            device.fail(|_| false);
            swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
        });
    }
}
