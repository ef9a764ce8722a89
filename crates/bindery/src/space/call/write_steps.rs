//! `write(2)` of an object in steps.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::error::Error;
use crate::object::{Object, ObjectLock, WriteSteps};
use crate::platform::Platform;

use super::lock_wait::wait_for_object;
#[cfg(doc)]
use super::read_steps::PendingRead;
use super::steps::{CallReady, CallWait, Step};

/// A write to an object, as [`Object::write`], that stops where it would have to wait and continues
/// there. No byte is written twice, and the pager is asked once per page.
///
/// The write stops only before its first byte: for the pager's content of the first and the last
/// page, for pages that are being stored, for pages in swap, for room below a dirty limit, and for
/// another call that changes the object. After that, one step writes all bytes, and other writers see
/// either the whole write or none of it. (The exceptions are those of [`Object::write_with`].)
/// Between two steps, other threads may change the object: another write or a truncation has the
/// same effect as before the whole call. A write beyond an end that a truncation has moved
/// therefore lets the object grow again.
///
/// Unlike a blocking call, the write has no place in the queue for pages that are being stored:
/// while other calls continue to store the pages, it may stop again.
///
/// The value holds a handle to the object and at most two pages that were waited for, but no lock.
/// Dropping it before the last step leaves the object unchanged, except that pages may have been
/// read.
///
/// ```
/// use bindery::{Error, Object, PendingWrite, Platform, Step};
///
/// /// `pwrite(2)`, of which another thread does the waiting.
/// fn write<P: Platform>(
///     file: &Object<'_, P>, offset: u64, from: &[u8],
/// ) -> Result<usize, Error> {
///     let mut write = PendingWrite::new(file, offset, from.len())?;
///     let mut ready = None;
///     loop {
///         match write.step(ready.take(), from)? {
///             Step::Done => return Ok(write.moved()),
///             // On another thread, or polled, in a kernel that needs this call.
///             Step::Blocked(wait) => ready = Some(wait.wait()),
///         }
///     }
/// }
/// ```
///
/// # Context
/// Context: may sleep. The drop may also sleep, like that of an [`Object`].
#[derive(Debug)]
#[must_use = "the bytes are written by its steps"]
pub struct PendingWrite<'m, P: Platform>(WriteSteps<'m, P>);

impl<'m, P: Platform> PendingWrite<'m, P> {
    /// A write of `length` bytes at `offset`. Nothing has been written yet.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// [`Error::Invalid`] as [`Object::write`]; the other errors come from the steps.
    pub fn new(object: &Object<'m, P>, offset: u64, length: usize) -> Result<Self, Error> {
        WriteSteps::new(object, offset, length).map(Self)
    }

    /// The number of bytes written so far; after the end, the result of the call.
    pub fn moved(&self) -> usize {
        self.0.done()
    }

    /// Writes the rest of `from`, the same `length` bytes in each step, unless the write has to
    /// wait first. `ready` is as in [`PendingRead::step`]. After the end, does nothing.
    ///
    /// Stops while another call changes the object, before the first byte, and sleeps for other
    /// locks. Reclaims if memory is short. Waits for the pager in
    /// [`crate::Pager::resize`] if the object grows, and for a swap device only if reclaim has
    /// evicted a page that was in memory, or was waited for, before. Complexity: as
    /// [`Object::write`]; for shared memory with pages in swap, also linear in the number of runs
    /// of pages.
    ///
    /// # Errors
    /// As [`Object::write`], if nothing was written.
    pub fn step(
        &mut self,
        ready: Option<CallReady<'m, P>>,
        from: &[u8],
    ) -> Result<Step<'m, 'm, P>, Error> {
        let platform = self.0.platform();
        self.step_with(ready, |done, to, length| {
            let Some(from) = from.get(done..) else { return 0 };
            let from = &from[..length.min(from.len())];
            // SAFETY: the bytes belong to the object, and no reference to them exists.
            unsafe { platform.write_bytes(to, from) };
            from.len()
        })
    }

    /// As [`PendingWrite::step`], with bytes that `copy` writes in place, as in
    /// [`Object::write_with`]. A short count ends the step; the next step continues with the byte
    /// at which `copy` stopped, as another write.
    ///
    /// Context: may sleep. Complexity: as [`PendingWrite::step`].
    ///
    /// # Errors
    /// As [`PendingWrite::step`].
    pub fn step_with(
        &mut self,
        ready: Option<CallReady<'m, P>>,
        mut copy: impl FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<Step<'m, 'm, P>, Error> {
        let mut ready = ready;
        if let Some(object) = self.0.rest()
            && let Some(wait) = wait_for_object(object, ObjectLock::Changes, &mut ready)
        {
            return Ok(Step::Blocked(wait));
        }
        let wait = self.0.write(ready.and_then(CallReady::of_object), &mut copy)?;
        Ok(wait.map_or(Step::Done, |wait| Step::Blocked(CallWait::for_object(wait))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call may continue in another thread.
    fn _moves<P: Platform>(write: PendingWrite<'_, P>) {
        fn is_send(_: impl Send) {}
        is_send(write);
    }
}
