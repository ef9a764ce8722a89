//! The objects' part of `swapoff(2)`: swaps in the pages that they have in an area.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::ptr::NonNull;

use crate::Memory;
use crate::collections::page_tree::SwappedRun;
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;
use crate::swap::SwapArea;
use crate::vma::MappingFlags;

use super::polled_wait::{ObjectWait, PolledWait};
use super::read_steps::PageReady;
use super::swap_in::swap_in;
use super::wait::{Stop, Wait};
use super::{Object, ObjectState, Registry};

impl<P: Platform> Memory<P> {
    /// Swaps in all pages that shared memory has in the swap area, run by run, so that
    /// [`Memory::swap_off`] can remove the area; [`AddressSpace::swap_in_area`] does the same for
    /// the pages of address spaces. Call [`Memory::stop_swapping_to`] first. No lock is held
    /// between runs, so all other calls and faults proceed during the call.
    ///
    /// [`AddressSpace::swap_in_area`]: crate::AddressSpace::swap_in_area
    ///
    /// Context: may sleep. Complexity: linear in the objects and in the runs that they have in
    /// swap.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::InputOutput`] if the area has lost a page, which stays
    /// lost; [`Error::Interrupted`] for a signal. Pages swapped in before the error stay in memory,
    /// and the area and all objects remain usable.
    pub fn swap_in_objects(&self, area: &SwapArea) -> Result<(), Error> {
        swap_in_all(self, area.number)
    }
}

fn swap_in_all<P: Platform>(memory: &Memory<P>, area: u8) -> Result<(), Error> {
    let mut last = None;
    while let Some(object) = next_object(memory, last.as_ref()) {
        swap_in_area(&object, area)?;
        last = Some(object);
    }
    Ok(())
}

/// The object after `last` in the registry, or the first one.
fn next_object<'m, P: Platform>(
    memory: &'m Memory<P>,
    last: Option<&Object<'m, P>>,
) -> Option<Object<'m, P>> {
    let next = Registry::of(memory).next_held(last.map(Object::state));
    // SAFETY: 1. `next_held` has made the caller a holder.
    next.map(|state| unsafe { Object::of_holder(memory, state) })
}

impl<'m, P: Platform> Object<'m, P> {
    /// Makes a handle for a caller that is a holder.
    ///
    /// # Safety
    /// 1. The caller is a holder and passes its hold to the handle.
    pub(super) unsafe fn of_holder(memory: &'m Memory<P>, state: NonNull<ObjectState>) -> Self {
        Self {
            memory,
            state,
            pattern: super::ReadPattern::Unknown,
            pager: core::marker::PhantomData,
        }
    }
}

/// The pages that one object has in the area.
fn swap_in_area<P: Platform>(object: &Object<'_, P>, area: u8) -> Result<(), Error> {
    let memory = object.memory;
    let mut from = 0;
    // The folio that a device has read is held until the index has it.
    let mut _kept = None;
    while let Some(run) = next_in_area(memory, object.state(), from, area) {
        interrupt::check_any(memory.platform())?;
        memory.retry(|| {
            if let Some(wait) = swap_in_run(object, run)? {
                _kept = wait.wait(memory, None)?;
            }
            Ok(())
        })?;
        from = run.page;
    }
    Ok(())
}

/// Swaps in pages of the run, or returns the event to wait for before the next attempt.
fn swap_in_run<P: Platform>(
    object: &Object<'_, P>,
    run: SwappedRun,
) -> Result<Option<Wait>, Failure> {
    let (memory, state) = (object.memory, object.state());
    let orders = state.orders(memory, MappingFlags::empty());
    let bring = |_: &_| swap_in(memory, state, run.page, orders);
    match state.invalidate_lock.with_read(memory.platform(), bring) {
        Ok(_) => Ok(None),
        Err(Stop::Failed(failure)) => Err(failure),
        Err(Stop::Wait(wait)) => Ok(Some(wait)),
    }
}

/// The swap-in of all objects in steps.
pub(crate) struct ObjectSwapIn<'m, P: Platform> {
    memory: &'m Memory<P>,
    area: u8,
    next: NextObject<'m, P>,
}

/// The next object of an [`ObjectSwapIn`].
enum NextObject<'m, P: Platform> {
    /// The object after this one, or the first one.
    After(Option<Object<'m, P>>),
    /// The rest of this object, from a page on.
    Within(Object<'m, P>, u64),
    Over,
}

impl<'m, P: Platform> ObjectSwapIn<'m, P> {
    pub(crate) fn new(memory: &'m Memory<P>, area: u8) -> Self {
        Self { memory, area, next: NextObject::After(None) }
    }

    /// Swaps in pages up to the first that has to be waited for. `ready` is the end of the last
    /// wait. No step after an error does anything.
    ///
    /// # Errors
    /// As [`Memory::swap_in_objects`].
    pub(crate) fn step(
        &mut self,
        ready: Option<PageReady<'m, P>>,
    ) -> Result<Option<ObjectWait<'m, P>>, Error> {
        let memory = self.memory;
        let next = core::mem::replace(&mut self.next, NextObject::Over);
        // The folio that was waited for is kept until the end of this step.
        let _kept = match ready {
            Some(Err(Failure::Refused(error))) => return Err(error),
            // This step reclaims.
            Some(Err(Failure::NoMemory)) | None => None,
            Some(Ok(kept)) => kept,
        };
        let (mut object, mut from) = match next {
            NextObject::After(last) => (next_object(memory, last.as_ref()), 0),
            NextObject::Within(object, from) => (Some(object), from),
            NextObject::Over => (None, 0),
        };
        while let Some(current) = object {
            while let Some(run) = next_in_area(memory, current.state(), from, self.area) {
                interrupt::check_any(memory.platform())?;
                from = run.page;
                if let Some(wait) = memory.retry(|| swap_in_run(&current, run))? {
                    let wait = PolledWait::of_call(memory, wait);
                    let wait = ObjectWait::new(current.clone(), wait, from);
                    self.next = NextObject::Within(current, from);
                    return Ok(Some(wait));
                }
            }
            object = next_object(memory, Some(&current));
            from = 0;
        }
        Ok(None)
    }
}

impl<P: Platform> fmt::Debug for ObjectSwapIn<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectSwapIn").field("area", &self.area).finish_non_exhaustive()
    }
}

/// The first run of pages at or after `from` that is in the area.
fn next_in_area<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    mut from: u64,
    area: u8,
) -> Option<SwappedRun> {
    if object.pages.swapped() == 0 {
        return None;
    }
    loop {
        let platform = memory.platform();
        let run = object.pages.look(platform, |index| index.next_swapped(from, u64::MAX))?;
        if run.first.area == area {
            return Some(run);
        }
        from = run.page + u64::from(run.count);
    }
}
