//! `swapoff` in steps: each step ends where it would wait for the device, and the next one continues
//! there.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{CallReady, CallWait, Error, Step, SwapError, SwapOperation};
use bindery_hosted::{Machine, SwapFile, SwapService};

use super::fixture::{Swapping, device, with_device};
use super::pending_reads::{until_ready, with_shared};
use crate::support::{GIB, MIB, audit};

type A = X86_64<4>;
type P = Machine<A>;

const AT: u64 = GIB;
/// Two mappings, with a gap between them.
const GAP: u64 = 4 * MIB;
const PAGES: u64 = 8;

/// Runs `scenario` with pages of two mappings on a stopped device that serves nothing by itself.
fn with_private(scenario: impl for<'m> FnOnce(&Swapping<'_, 'm, A>, &'static SwapFile)) {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        for at in [AT, AT + GAP] {
            swapping.map(at, PAGES);
            swapping.fill(at, PAGES);
            swapping.served(device, || swapping.page_out(at, PAGES));
        }
        assert_eq!(swapping.taken(), 2 * PAGES);
        swapping.memory.stop_swapping_to(&swapping.area);
        scenario(swapping, device);
        // The fixture removes the area.
        swapping.memory.resume_swapping_to(&swapping.area);
    });
}

/// Takes the steps up to the end. Returns the number of waits.
fn finish<'s, 'm: 's>(
    swapping: &Swapping<'s, 'm, A>,
    device: &SwapFile,
    polls: bool,
    mut step: impl FnMut(Option<CallReady<'m, P>>) -> Result<Step<'s, 'm, P>, Error>,
) -> Result<u64, Error> {
    let (mut ready, mut waits) = (None, 0);
    while let Step::Blocked(wait) = step(ready.take())? {
        assert!(wait.is_for_storage());
        ready = Some(until_ready(swapping, device, wait, polls));
        waits += 1;
    }
    assert!(matches!(step(None), Ok(Step::Done)), "nothing follows the end");
    Ok(waits)
}

/// The wait of a step.
#[track_caller]
fn blocked<'s, 'm>(step: Result<Step<'s, 'm, P>, Error>) -> CallWait<'s, 'm, P> {
    match step {
        Ok(Step::Blocked(wait)) => wait,
        other => panic!("the page is on the device: {other:?}"),
    }
}

#[test]
fn a_space_reads_each_page_once() {
    for polls in [true, false] {
        with_private(|swapping, device| {
            let Swapping { memory, space, area, .. } = *swapping;
            let mut call = space.begin_swap_in_area(&area);
            assert_eq!(device.waiting(), 0, "nothing is read before the first step");
            let step = |ready| call.step(space, ready);
            assert_eq!(finish(swapping, device, polls, step), Ok(2 * PAGES), "{polls}");
            assert_eq!(device.counts().pages_read, 2 * PAGES, "{polls}");
            assert_eq!(swapping.taken(), 0);
            audit(swapping.machine, memory, &[space]);
            swapping.assert_filled(AT, PAGES, AT);
            swapping.assert_filled(AT + GAP, PAGES, AT + GAP);
        });
    }
}

#[test]
fn objects_read_each_page_once() {
    for polls in [true, false] {
        with_shared(|swapping, device, object| {
            let Swapping { memory, space, area, .. } = *swapping;
            memory.stop_swapping_to(&area);
            let pages = object.swapped_pages();
            let mut call = memory.begin_swap_in_objects(&area);
            assert_eq!(device.waiting(), 0, "nothing is read before the first step");
            let step = |ready| call.step(ready);
            assert_eq!(finish(swapping, device, polls, step), Ok(pages), "{polls}");
            assert_eq!(device.counts().pages_read, pages, "{polls}");
            assert_eq!((object.swapped_pages(), swapping.taken()), (0, 0));
            audit(swapping.machine, memory, &[space]);
            memory.resume_swapping_to(&area);
        });
    }
}

/// A page that another thread unmaps, and a mapping that it unmaps as a whole.
#[test]
fn unmapped_pages_are_passed() {
    with_private(|swapping, device| {
        let Swapping { space, area, .. } = *swapping;
        let mut call = space.begin_swap_in_area(&area);
        let wait = blocked(call.step(space, None));
        space.munmap(VirtAddr(AT), 4096).unwrap();
        let ready = until_ready(swapping, device, wait, true);
        let wait = blocked(call.step(space, Some(ready)));
        space.munmap(VirtAddr(AT), PAGES * 4096).unwrap();
        let ready = until_ready(swapping, device, wait, true);
        let mut first = Some(ready);
        let step = |ready: Option<_>| call.step(space, ready.or_else(|| first.take()));
        assert_eq!(finish(swapping, device, true, step), Ok(PAGES));
        swapping.assert_filled(AT + GAP, PAGES, AT + GAP);
        assert_eq!(swapping.taken(), 0);
    });
}

/// Neither the call nor its wait leaves a read, a lock or a page.
#[test]
fn a_dropped_call_leaves_its_pages() {
    for polls in [false, true] {
        with_private(|swapping, device| {
            let Swapping { memory, space, area, .. } = *swapping;
            let mut call = space.begin_swap_in_area(&area);
            let mut wait = blocked(call.step(space, None));
            if polls {
                let _ = wait.poll();
            }
            drop((wait, call));
            assert_eq!(device.waiting(), usize::from(polls));
            swapping.served(device, || {
                assert_eq!(memory.swap_off(&area), Err(SwapError::InUse));
                swapping.assert_filled(AT, PAGES, AT);
                swapping.assert_filled(AT + GAP, PAGES, AT + GAP);
            });
            audit(swapping.machine, memory, &[space]);
        });
    }
}

#[test]
fn a_signal_or_an_error_ends_it() {
    with_private(|swapping, device| {
        let Swapping { machine, memory, space, area, .. } = *swapping;
        machine.signal_after(Some(0));
        let mut call = space.begin_swap_in_area(&area);
        assert!(matches!(call.step(space, None), Err(Error::Interrupted)));
        assert!(matches!(call.step(space, None), Ok(Step::Done)), "the call is over");
        machine.signal_after(None);

        device.fail(|request| request.operation() == SwapOperation::Read);
        let mut call = space.begin_swap_in_area(&area);
        let wait = blocked(call.step(space, None));
        let failed = until_ready(swapping, device, wait, true);
        let step = call.step(space, Some(failed));
        assert!(matches!(step, Err(Error::Fault(VirtAddr(AT)))), "{step:?}");
        device.fail(|_| false);
        assert_eq!(memory.swap_off(&area), Err(SwapError::InUse));
        swapping.served(device, || assert_eq!(space.swap_in_area(&area), Ok(())));
        swapping.assert_filled(AT, PAGES, AT);
        assert_eq!(swapping.taken(), 0);
    });
}

/// An error of the device, and an object whose last handle is dropped during the call.
#[test]
fn objects_with_errors_or_gone_end_it() {
    with_shared(|swapping, device, object| {
        let Swapping { memory, space, area, .. } = *swapping;
        memory.stop_swapping_to(&area);
        device.fail(|request| request.operation() == SwapOperation::Read);
        let mut call = memory.begin_swap_in_objects(&area);
        let wait = blocked(call.step(None));
        let failed = until_ready(swapping, device, wait, true);
        assert!(matches!(call.step(Some(failed)), Err(Error::InputOutput)));
        assert!(matches!(call.step(None), Ok(Step::Done)), "the call is over");
        device.fail(|_| false);

        let mut call = memory.begin_swap_in_objects(&area);
        let wait = blocked(call.step(None));
        space.munmap(VirtAddr(AT), object.size()).unwrap();
        let pages = object.swapped_pages();
        drop(object);
        let ready = until_ready(swapping, device, wait, true);
        // The call holds the object, and therefore brings its pages back.
        let mut first = Some(ready);
        let step = |ready: Option<_>| call.step(ready.or_else(|| first.take()));
        assert_eq!(finish(swapping, device, true, step), Ok(pages - 1));
        drop(call);
        assert_eq!(swapping.taken(), 0);
        memory.resume_swapping_to(&area);
    });
}
