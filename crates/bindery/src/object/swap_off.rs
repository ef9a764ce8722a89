//! The objects' part of `swapoff(2)`: swaps in the pages that they have in an area.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::Memory;
use crate::collections::page_tree::SwappedRun;
use crate::error::Error;
use crate::interrupt;
use crate::platform::Platform;
use crate::swap::SwapArea;
use crate::vma::MappingFlags;

use super::swap_in::swap_in;
use super::wait::Stop;
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
    let mut last: Option<Object<'_, P>> = None;
    let after = |last: &Option<Object<'_, P>>| {
        let last = last.as_ref().map(Object::state);
        let next = Registry::of(memory).next_held(last);
        // SAFETY: 1. `next_held` has made the caller a holder.
        next.map(|state| unsafe { Object::of_holder(memory, state) })
    };
    while let Some(object) = after(&last) {
        swap_in_area(&object, area)?;
        last = Some(object);
    }
    Ok(())
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
    let (memory, object) = (object.memory, object.state());
    let orders = object.orders(memory, MappingFlags::empty());
    let mut from = 0;
    // The folio that a device has read is held until the index has it.
    let mut _kept = None;
    while let Some(run) = next_in_area(memory, object, from, area) {
        interrupt::check_any(memory.platform())?;
        memory.retry(|| {
            let bring = |_: &_| swap_in(memory, object, run.page, orders);
            match object.invalidate_lock.with_read(memory.platform(), bring) {
                Ok(_) => Ok(()),
                Err(Stop::Failed(failure)) => Err(failure),
                Err(Stop::Wait(wait)) => {
                    _kept = wait.wait(memory, None)?;
                    Ok(())
                }
            }
        })?;
        from = run.page;
    }
    Ok(())
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
