//! The swap-in of `swapoff(2)` in steps: of one address space, and of all objects.

use crate::Memory;
use crate::addr::VirtAddr;
use crate::error::{Error, Failure};
use crate::object::ObjectSwapIn;
use crate::platform::Platform;
use crate::swap::SwapArea;

use super::steps::{CallReady, CallWait, Step};
use super::swap_off::SwapInWait;
use crate::space::AddressSpace;

/// The pages of an address space that have yet to be swapped in from an area
/// ([`AddressSpace::begin_swap_in_area`]). Each step looks up the mappings and the pages again. A
/// mapping that another thread unmaps between two steps is not an error.
///
/// The value holds no lock and no reference. Dropping it ends the call; the pages that were swapped
/// in stay in memory.
///
/// ```
/// use bindery::{AddressSpace, Error, Memory, Platform, Step, SwapArea};
///
/// /// The first half of `swapoff(2)`; another thread does the waiting.
/// fn empty<'m, P: Platform>(
///     memory: &'m Memory<P>, spaces: &[AddressSpace<'m, P>], area: &SwapArea,
/// ) -> Result<(), Error> {
///     memory.stop_swapping_to(area);
///     for space in spaces {
///         let (mut call, mut ready) = (space.begin_swap_in_area(area), None);
///         // On another thread, or polled, in a kernel that needs this call.
///         while let Step::Blocked(wait) = call.step(space, ready.take())? {
///             ready = Some(wait.wait());
///         }
///     }
///     let (mut call, mut ready) = (memory.begin_swap_in_objects(area), None);
///     while let Step::Blocked(wait) = call.step(ready.take())? {
///         ready = Some(wait.wait());
///     }
///     Ok(())
/// }
/// ```
///
/// # Context
/// Context: may sleep.
#[derive(Debug)]
#[must_use = "the pages are swapped in by its steps"]
pub struct PendingSwapIn {
    area: u8,
    /// The page for which the last step had to wait. No page below it is in the area. `None` after
    /// the end.
    at: Option<VirtAddr>,
}

impl PendingSwapIn {
    /// Swaps in pages until none is left in the area or a page has to be waited for. `space` is the
    /// same at each step, and `ready` is the end of the wait that the last step returned. Without
    /// `ready`, the page is treated as if no wait had taken place. After the end, does nothing.
    ///
    /// Stops for the mutex of the address space before the first page, and sleeps for other locks.
    /// Reclaims if memory is short, but waits for no device. Complexity: as
    /// [`AddressSpace::swap_in_area`] of the pages that the step swaps in, plus one look at the
    /// entries from the last page to the next one in the area.
    ///
    /// # Errors
    /// As [`AddressSpace::swap_in_area`].
    pub fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let mut ready = ready;
        if self.at.is_some()
            && let Some(wait) = space.wait_for_mutex(&mut ready)
        {
            return Ok(Step::Blocked(wait));
        }
        let Some(mut at) = self.at.take() else { return Ok(Step::Done) };
        // The folio that was waited for is kept until the end of this step.
        let _kept = match ready.and_then(CallReady::of_object) {
            Some(Ok(kept)) => kept,
            Some(Err(Failure::Refused(Error::Interrupted))) => return Err(Error::Interrupted),
            Some(Err(Failure::Refused(_))) => return Err(Error::Fault(at)),
            // This step reclaims.
            Some(Err(Failure::NoMemory)) | None => None,
        };
        let Some(wait) = SwapInWait::next_in_area(space, self.area, &mut at)? else {
            return Ok(Step::Done);
        };
        self.at = Some(at);
        Ok(Step::Blocked(CallWait::for_swap_in(wait)))
    }
}

/// The pages of shared memory that have yet to be swapped in from an area
/// ([`Memory::begin_swap_in_objects`]). Each step looks up the pages again.
///
/// The value holds a handle to one object, but no lock. Dropping it ends the call; the pages that
/// were swapped in stay in memory.
///
/// [`PendingSwapIn`] has an example.
///
/// # Context
/// Context: may sleep. The drop may also sleep, like that of an [`Object`](crate::Object).
#[derive(Debug)]
#[must_use = "the pages are swapped in by its steps"]
pub struct PendingObjectSwapIn<'m, P: Platform>(ObjectSwapIn<'m, P>);

impl<'m, P: Platform> PendingObjectSwapIn<'m, P> {
    /// Swaps in pages until none is left in the area or a page has to be waited for. `ready` is the
    /// end of the wait that the last step returned. Without `ready`, the page is treated as if no
    /// wait had taken place. After the end, does nothing.
    ///
    /// Sleeps for locks, and reclaims if memory is short, but waits for no device. Complexity: as
    /// [`Memory::swap_in_objects`] of the pages that the step swaps in.
    ///
    /// # Errors
    /// As [`Memory::swap_in_objects`].
    pub fn step(&mut self, ready: Option<CallReady<'m, P>>) -> Result<Step<'m, 'm, P>, Error> {
        let wait = self.0.step(ready.and_then(CallReady::of_object))?;
        Ok(wait.map_or(Step::Done, |wait| Step::Blocked(CallWait::for_object(wait))))
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// As [`AddressSpace::swap_in_area`], for a caller that must not block while the device reads.
    /// The steps of the result swap the pages in.
    ///
    /// Context: any. Complexity: constant.
    pub fn begin_swap_in_area(&self, area: &SwapArea) -> PendingSwapIn {
        PendingSwapIn { area: area.number, at: Some(VirtAddr(0)) }
    }
}

impl<P: Platform> Memory<P> {
    /// As [`Memory::swap_in_objects`], for a caller that must not block while the device reads. The
    /// steps of the result swap the pages in.
    ///
    /// Context: any. Complexity: constant.
    pub fn begin_swap_in_objects(&self, area: &SwapArea) -> PendingObjectSwapIn<'_, P> {
        PendingObjectSwapIn(ObjectSwapIn::new(self, area.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call may continue in another thread.
    fn _moves<P: Platform>(space: PendingSwapIn, objects: PendingObjectSwapIn<'_, P>) {
        fn is_send(_: impl Send) {}
        is_send(space);
        is_send(objects);
    }
}
