//! [`PendingEvents`]: the messages of a call that has made its change, delivered in steps.

use crate::Memory;
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::call::steps::{CallEnd, CallReady, CallWait, Step};
use crate::userfault::{Ending, Notices};

/// The messages to userfaultfds about a change that a call has made. The steps deliver them, one
/// after another, before the call returns its result: each step stops until a handler has read the
/// message that it has sent. Until the last message is read, requests of the handlers that have
/// unread ones fail with [`crate::Error::TryAgain`].
///
/// The change is complete, and no other call can undo or repeat it. What other threads do to the
/// range between two steps follows the change, as on Linux, which has also released its locks.
///
/// A message is sent once. A wait that is dropped leaves it sent. It is taken back only if this
/// value is dropped, or at a fatal signal: then the call ends or continues without its reader. A
/// message about a fork that is taken back closes the child's userfaultfd.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, Platform, Step};
///
/// /// `munmap(2)`; another thread does the waiting.
/// fn unmap<P: Platform>(
///     space: &AddressSpace<'_, P>, at: VirtAddr, size: u64,
/// ) -> Result<(), Error> {
///     let (unmapped, mut events) = space.begin_munmap(at, size);
///     let mut ready = None;
///     while let Step::Blocked(wait) = events.step(ready.take()) {
///         // On another thread, or polled, in a kernel that needs this call.
///         ready = Some(wait.wait());
///     }
///     unmapped
/// }
/// ```
///
/// # Context
/// Context: may sleep, also in its drop.
#[derive(Debug)]
#[must_use = "dropping it withdraws the messages"]
pub struct PendingEvents<'m, P: Platform> {
    memory: &'m Memory<P>,
    notices: Notices,
}

impl<'m, P: Platform> PendingEvents<'m, P> {
    /// Performs a call up to its messages.
    #[inline(always)]
    pub(in crate::space) fn of<R>(
        space: &AddressSpace<'m, P>,
        begin: impl FnOnce(&mut Notices) -> R,
    ) -> (R, Self) {
        let mut events = Self { memory: space.page_table.memory, notices: Notices::default() };
        let result = begin(&mut events.notices);
        (result, events)
    }

    /// Whether no message is left, as after most calls.
    ///
    /// Context: any.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.notices.is_empty()
    }

    /// Sends messages until all are read or one has to wait for its reader. `ready` is the end of
    /// the wait that the last step returned; without it, the message is waited for again unless it
    /// was read.
    ///
    /// A fatal signal in the thread that waited or that takes the step ends the wait for the
    /// message. The step does not fail: the change has been made.
    ///
    /// Context: may sleep for the queue of the userfaultfd, but does not wait for a reader.
    /// Complexity: linear in the number of messages that it completes.
    pub fn step<'s>(&mut self, ready: Option<CallReady<'m, P>>) -> Step<'s, 'm, P> {
        if self.notices.is_empty() {
            return Step::Done;
        }
        let gives_up = matches!(ready, Some(CallReady(CallEnd::Message(Ending::Interrupted))));
        match self.notices.send(self.memory, gives_up) {
            Some(wait) => Step::Blocked(CallWait::for_event(wait)),
            None => Step::Done,
        }
    }

    /// Delivers the messages, sleeping as needed.
    ///
    /// Context: may sleep. Complexity: the sum of all steps.
    #[inline(always)]
    pub fn finish(mut self) {
        if !self.notices.is_empty() {
            core::mem::take(&mut self.notices).deliver(self.memory);
        }
    }
}

impl<P: Platform> Drop for PendingEvents<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.notices.is_empty() {
            core::mem::take(&mut self.notices).cancel(self.memory);
        }
    }
}
