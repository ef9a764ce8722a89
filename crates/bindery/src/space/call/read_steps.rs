//! `read(2)` of an object in steps.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::error::Error;
use crate::object::{Object, ObjectLock, ObjectWait, ReadSteps};
use crate::platform::Platform;

use super::lock_wait::wait_for_object;
use super::steps::{CallReady, CallWait, Step};

/// A read of an object, as [`Object::read`], that stops at each page that has to be waited for and
/// continues there. No byte is read twice, and the pager is asked once per page.
///
/// Each step reads the object's current state. A truncation between two steps ends the read at the
/// new end, with a short count for the bytes read before. A failure of the pager after the first
/// byte also ends the read with a short count; the next call gets the error. A page that was
/// dropped is requested again.
///
/// The value holds a handle to the object and at most one page that was waited for, but no lock.
/// Dropping it ends the read. If the pager has received a request, it still answers, and the page
/// enters memory.
///
/// ```
/// use bindery::{Error, Object, PendingRead, Platform, Step};
///
/// /// `pread(2)`; another thread does the waiting.
/// fn read<P: Platform>(
///     file: &Object<'_, P>, offset: u64, into: &mut [u8],
/// ) -> Result<usize, Error> {
///     let mut read = PendingRead::new(file, offset, into.len())?;
///     let mut ready = None;
///     loop {
///         match read.step(ready.take(), into)? {
///             Step::Done => return Ok(read.moved()),
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
#[must_use = "the bytes are read by its steps"]
pub struct PendingRead<'m, P: Platform>(ReadSteps<'m, P>);

impl<'m, P: Platform> PendingRead<'m, P> {
    /// A read of `length` bytes at `offset`. Nothing has been read yet.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// [`Error::Invalid`] as [`Object::read`]; the other errors come from the steps.
    pub fn new(object: &Object<'m, P>, offset: u64, length: usize) -> Result<Self, Error> {
        ReadSteps::new(object, offset, length).map(Self)
    }

    /// The number of bytes read so far; after the end, the result of the call.
    pub fn moved(&self) -> usize {
        self.0.done()
    }

    /// Reads into the rest of `into`, the same `length` bytes in each step, until all bytes are
    /// read or a page has to be waited for. `ready` is the end of the wait that the last step
    /// returned. Without `ready`, the page is treated as if no wait had taken place: an error of
    /// the pager is lost, and the pager is asked again. After the end, does nothing.
    ///
    /// Stops for the lock of the pages before the first page, and sleeps for other locks. Reclaims if
    /// memory is short, but waits for no pager or device.
    /// Complexity: as [`Object::read`] of the part that the step reads.
    ///
    /// # Errors
    /// As [`Object::read`], if nothing was read.
    pub fn step(
        &mut self,
        ready: Option<CallReady<'m, P>>,
        into: &mut [u8],
    ) -> Result<Step<'m, 'm, P>, Error> {
        let platform = self.0.platform();
        self.step_with(ready, |done, from, length| {
            let Some(into) = into.get_mut(done..).map(|rest| first(rest, length)) else { return 0 };
            // SAFETY: the bytes belong to the object, and no thread has exclusive access to them.
            unsafe { platform.read_bytes(from, into) };
            into.len()
        })
    }

    /// As [`PendingRead::step`], with bytes that `copy` reads in place, as in
    /// [`Object::read_with`]. A short count ends the step; the next step continues with the byte at
    /// which `copy` stopped. A kernel that reads into a program's memory can thus fault that memory
    /// in by another call in steps, and then continue.
    ///
    /// Context: may sleep. Complexity: as [`PendingRead::step`].
    ///
    /// # Errors
    /// As [`PendingRead::step`].
    pub fn step_with(
        &mut self,
        ready: Option<CallReady<'m, P>>,
        mut copy: impl FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<Step<'m, 'm, P>, Error> {
        let mut ready = ready;
        if let Some(object) = self.0.rest()
            && let Some(wait) = wait_for_object(object, ObjectLock::Pages, &mut ready)
        {
            return Ok(Step::Blocked(wait));
        }
        self.0.read(ready.and_then(CallReady::of_object), &mut copy).map(step)
    }
}

/// The first `length` bytes, or fewer if the buffer is shorter.
fn first(bytes: &mut [u8], length: usize) -> &mut [u8] {
    let length = length.min(bytes.len());
    &mut bytes[..length]
}

fn step<'m, P: Platform>(wait: Option<ObjectWait<'m, P>>) -> Step<'m, 'm, P> {
    wait.map_or(Step::Done, |wait| Step::Blocked(CallWait::for_object(wait)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call may continue in another thread.
    fn _moves<P: Platform>(read: PendingRead<'_, P>) {
        fn is_send(_: impl Send) {}
        is_send(read);
    }
}
