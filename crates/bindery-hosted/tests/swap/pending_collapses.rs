//! Collapses that stop where they would wait for a swap device, and continue later.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, Level, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Advice, CallPoll, CallReady, CallWait, Error, Inspection, MapRequest, PendingMadvise, Sharing,
    Step, SwapOperation,
};
use bindery_hosted::{Machine, SwapFile, SwapService};

use super::fixture::{Swapping, device, with_device};
use crate::support::{GIB, MIB, audit, fixed};

type A = X86_64<4>;
type P = Machine<A>;

const AT: u64 = GIB;
const SPAN: u64 = 512;
const PAGE: u64 = 4096;
/// The pages that are on the device, from the second one on.
const OUT: u64 = 6;

/// Two spans, the second one without pages, and a device that completes nothing by itself. Some
/// pages of the first span are on it.
fn with_pages_out(
    sharing: Sharing,
    scenario: impl FnOnce(&Swapping<'_, '_, A>, &'static SwapFile),
) {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        let request = MapRequest { sharing, ..fixed(AT, 2 * SPAN * PAGE) };
        swapping.space.mmap(&request).unwrap();
        swapping.fill(AT, SPAN);
        swapping.served(device, || swapping.page_out(AT + PAGE, OUT));
        assert_eq!(device.counts().reads, 0);
        scenario(swapping, device);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

impl<'m> Swapping<'_, 'm, A> {
    fn collapse(&self, spans: u64) -> PendingMadvise<'m, P> {
        let length = spans * SPAN * PAGE;
        let rights = KeyRights::ALL;
        self.space.begin_madvise(VirtAddr(AT), length, Advice::Collapse, rights).unwrap()
    }

    fn is_huge(&self) -> bool {
        let found = self.space.inspect(VirtAddr(AT));
        matches!(found, Inspection::Page { level, .. } if level == Level::PMD)
    }
}

#[track_caller]
fn blocked<'s, 'm>(step: Result<Step<'s, 'm, P>, Error>) -> CallWait<'s, 'm, P> {
    match step {
        Ok(Step::Blocked(wait)) => wait,
        other => panic!("it does not wait: {other:?}"),
    }
}

/// Polls, while the test serves the device.
fn polled<'m>(
    swapping: &Swapping<'_, 'm, A>,
    device: &SwapFile,
    mut wait: CallWait<'_, 'm, P>,
) -> CallReady<'m, P> {
    assert!(wait.is_for_storage());
    loop {
        match wait.poll() {
            CallPoll::Ready(ready) => return ready,
            CallPoll::Pending(_) => assert!(device.serve_one(swapping.memory)),
            // After a failed read, a thread finds the error.
            CallPoll::NeedsThread => break,
        }
    }
    waited(swapping, device, wait)
}

/// Waits in another thread.
fn waited<'m>(
    swapping: &Swapping<'_, 'm, A>,
    device: &SwapFile,
    wait: CallWait<'_, 'm, P>,
) -> CallReady<'m, P> {
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
fn each_page_on_the_device_is_read_once() {
    let ways =
        [Sharing::Private, Sharing::Shared].map(|sharing| [(sharing, false), (sharing, true)]);
    for (sharing, in_thread) in ways.into_iter().flatten() {
        with_pages_out(sharing, |swapping, device| {
            let mut call = swapping.collapse(1);
            assert_eq!(device.counts().reads, 0, "nothing is read before the first step");
            let (mut ready, mut steps) = (None, 0);
            while let Ok(Step::Blocked(wait)) = call.step(swapping.space, ready.take()) {
                assert!(!swapping.is_huge());
                ready = Some(if in_thread {
                    waited(swapping, device, wait)
                } else {
                    polled(swapping, device, wait)
                });
                steps += 1;
            }
            assert!(swapping.is_huge());
            assert_eq!(device.counts().pages_read, OUT, "{sharing:?}");
            assert!((1..=OUT).contains(&steps), "{steps} waits");
            assert!(matches!(call.step(swapping.space, None), Ok(Step::Done)));
            swapping.assert_filled(AT, SPAN, AT);
            assert_eq!(swapping.taken(), 0);
        });
    }
}

#[test]
fn a_collapse_that_is_dropped_leaves_the_pages() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        with_pages_out(sharing, |swapping, device| {
            let mut call = swapping.collapse(1);
            let mut wait = blocked(call.step(swapping.space, None));
            assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            drop((wait, call));
            assert_eq!(device.waiting(), 1, "the device reads on");
            swapping.served(device, || swapping.assert_filled(AT, SPAN, AT));
            assert!(!swapping.is_huge());
        });
    }
}

#[test]
fn a_dropped_wait_is_begun_again() {
    with_pages_out(Sharing::Private, |swapping, device| {
        let mut call = swapping.collapse(1);
        for _ in 0..3 {
            drop(blocked(call.step(swapping.space, None)));
        }
        assert_eq!((device.counts().reads, device.waiting()), (0, 0));
        let mut ready = None;
        while let Ok(Step::Blocked(wait)) = call.step(swapping.space, ready.take()) {
            ready = Some(polled(swapping, device, wait));
        }
        assert!(swapping.is_huge());
        assert_eq!(device.counts().pages_read, OUT);
    });
}

#[test]
fn an_error_of_the_device_ends_its_span() {
    for (sharing, end) in [(Sharing::Private, 1), (Sharing::Shared, 1)] {
        with_pages_out(sharing, |swapping, device| {
            let mut call = swapping.collapse(end);
            device.fail(|request| request.operation() == SwapOperation::Read);
            let wait = blocked(call.step(swapping.space, None));
            let failed = polled(swapping, device, wait);
            let step = call.step(swapping.space, Some(failed)).map(drop);
            assert!(step.is_err(), "{step:?}");
            device.fail(|_| false);
            assert!(matches!(call.step(swapping.space, None), Ok(Step::Done)));
            assert!(!swapping.is_huge());
            swapping.served(device, || swapping.assert_filled(AT, SPAN, AT));
        });
    }
}

#[test]
fn empty_spans_are_passed_and_reported() {
    with_pages_out(Sharing::Private, |swapping, device| {
        let mut call = swapping.collapse(2);
        let mut ready = None;
        let end = loop {
            match call.step(swapping.space, ready.take()) {
                Ok(Step::Blocked(wait)) => ready = Some(polled(swapping, device, wait)),
                end => break end.map(drop),
            }
        };
        assert_eq!(end, Err(Error::Invalid));
        assert!(swapping.is_huge(), "the span before is collapsed");
    });
}

#[test]
fn a_span_unmapped_meanwhile_is_a_hole() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        with_pages_out(sharing, |swapping, device| {
            let mut call = swapping.collapse(1);
            let mut wait = blocked(call.step(swapping.space, None));
            assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            swapping.space.munmap(VirtAddr(AT), SPAN * PAGE).unwrap();
            let mut ready = Some(polled(swapping, device, wait));
            let end = loop {
                match call.step(swapping.space, ready.take()) {
                    Ok(Step::Blocked(wait)) => ready = Some(polled(swapping, device, wait)),
                    end => break end.map(drop),
                }
            };
            // The object of shared memory is collapsed, though no mapping is left to show it.
            let expected = match sharing {
                Sharing::Private => Err(Error::NotMapped(VirtAddr(AT))),
                Sharing::Shared => Ok(()),
            };
            assert_eq!(end, expected);
            swapping.space.munmap(VirtAddr(AT), 2 * SPAN * PAGE).unwrap();
        });
    }
}

#[test]
fn a_killed_thread_ends_the_collapse() {
    with_pages_out(Sharing::Private, |swapping, device| {
        let mut call = swapping.collapse(1);
        let wait = blocked(call.step(swapping.space, None));
        let ready = polled(swapping, device, wait);
        swapping.machine.kill(Cpu(2));
        let step =
            swapping.machine.on_cpu(Cpu(2), || call.step(swapping.space, Some(ready)).map(drop));
        assert_eq!(step, Err(Error::Interrupted));
        swapping.served(device, || swapping.assert_filled(AT, SPAN, AT));
        assert!(!swapping.is_huge());
    });
}
