//! Queued messages for which no thread waits: [`PolledMessage`] owns its message, [`PolledEvent`]
//! only waits for the reader.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;

use crate::Memory;
use crate::platform::Platform;

use super::UserfaultFault;
use super::notice::Notice;
use super::queue::{Ending, QueuedMessage, Waiter};
use super::state::{UserfaultState, WaitSignals};

/// The message of a fault or of a removal whose wait is polled. It is a [`Notice`] in a slab, so
/// that this value may move. The message is in its queue until it is done or this value is dropped.
/// After the drop, no reader finds the message, and a handler that has already read it wakes
/// nothing.
pub(crate) struct PolledMessage<'m, P: Platform> {
    memory: &'m Memory<P>,
    notice: NonNull<Notice>,
}

// SAFETY: the notice belongs to this value, and its userfaultfd is held. A waiter may be used from
// any thread: its word is atomic, and its other fields are used with the lock of the userfaultfd
// held.
unsafe impl<P: Platform> Send for PolledMessage<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for PolledMessage<'_, P> {}

impl<'m, P: Platform> PolledMessage<'m, P> {
    /// Queues the message of a fault, without sleeping. `None` if the userfaultfd is closed, if
    /// another thread holds its lock, or if memory is short.
    ///
    /// # Safety
    /// 1. `state` is held during the call.
    pub(crate) unsafe fn queue_fault(
        memory: &'m Memory<P>,
        state: NonNull<UserfaultState>,
        message: UserfaultFault,
    ) -> Option<Self> {
        // SAFETY: 1. the caller's obligation.
        let notice = unsafe { Notice::allocate(memory, state, QueuedMessage::Fault(message)) }?;
        // SAFETY: the caller's obligation 1, and the notice was just allocated.
        let (named, waiter) = unsafe { (state.as_ref(), &notice.as_ref().waiter) };
        // SAFETY: 1. the notice stays in its slab until the drop, which withdraws the message
        // first.
        if unsafe { named.try_queue(memory.platform(), waiter) } {
            return Some(Self { memory, notice });
        }
        // SAFETY: 1. and 2. the notice belongs to this call and is in no list and no queue.
        unsafe { Notice::let_go(memory, notice) };
        None
    }

    /// Queues the prepared message about a removal. May sleep for the lock of the queues. `None` if
    /// the userfaultfd is closed.
    ///
    /// # Safety
    /// 1. The notice belongs to the caller, which no longer uses it. It is in no list and no queue,
    ///    and its message is not about a fork.
    pub(super) unsafe fn queue_removal(
        memory: &'m Memory<P>,
        notice: NonNull<Notice>,
    ) -> Option<Self> {
        let message = Self { memory, notice };
        // SAFETY: 1. the notice stays in its slab until the drop, which withdraws the message
        // first.
        let queued = unsafe { message.state().queue(memory.platform(), message.waiter()) };
        queued.then_some(message)
    }

    fn waiter(&self) -> &Waiter {
        // SAFETY: the notice is freed only in the drop.
        unsafe { &self.notice.as_ref().waiter }
    }

    fn state(&self) -> &UserfaultState {
        // SAFETY: as above; the notice holds its state.
        unsafe { self.notice.as_ref().state.as_ref() }
    }

    /// The word that changes when the wait is over, and its value until that time.
    pub(crate) fn parked(&self) -> (&AtomicU32, u32) {
        self.waiter().parked()
    }

    /// The end of the wait: the fault was woken, the event was read, or the userfaultfd was closed.
    pub(crate) fn ending(&self) -> Option<Ending> {
        self.waiter().ending()
    }

    /// Whether the wait has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.ending().is_some()
    }

    /// Waits like a thread that blocks. Called without locks.
    pub(crate) fn wait(&self, interrupts: WaitSignals) -> Ending {
        let platform = self.memory.platform();
        self.state().wait(platform, self.waiter(), || interrupts.has_come(platform))
    }
}

impl<P: Platform> Drop for PolledMessage<'_, P> {
    fn drop(&mut self) {
        let (state, waiter) = (self.state(), self.waiter());
        // A message that is done is in no queue.
        let ending = waiter.ending();
        let ending = ending.unwrap_or_else(|| state.withdraw(self.memory.platform(), waiter));
        if ending != Ending::Woken && !matches!(waiter.content(), QueuedMessage::Fault(_)) {
            // The reader of an event ends the change, and no reader will get this one.
            state.end_change();
        }
        // SAFETY: 1. and 2. the notice belongs to this value, and is in no list and no longer in a
        // queue.
        unsafe { Notice::let_go(self.memory, self.notice) };
    }
}

impl<P: Platform> fmt::Debug for PolledMessage<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolledMessage").field("is_over", &self.is_over()).finish_non_exhaustive()
    }
}

/// The wait for the reader of the first message of a list ([`Notices::send`]). It shares the notice
/// with the list, which alone withdraws the message: dropping this value changes nothing.
///
/// [`Notices::send`]: super::Notices::send
pub(crate) struct PolledEvent<'m, P: Platform> {
    memory: &'m Memory<P>,
    notice: NonNull<Notice>,
}

// SAFETY: the notice is held. A waiter may be used from any thread, as for `PolledMessage`; other
// fields of the notice are not used.
unsafe impl<P: Platform> Send for PolledEvent<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for PolledEvent<'_, P> {}

impl<'m, P: Platform> PolledEvent<'m, P> {
    /// The wait for the reader of this message.
    ///
    /// # Safety
    /// 1. The notice is held during the call, and came from a slab of `memory`.
    pub(super) unsafe fn of(memory: &'m Memory<P>, notice: NonNull<Notice>) -> Self {
        // SAFETY: the caller's obligation 1.
        unsafe { notice.as_ref() }.hold();
        Self { memory, notice }
    }

    fn waiter(&self) -> &Waiter {
        // SAFETY: this value holds the notice.
        unsafe { &self.notice.as_ref().waiter }
    }

    /// The word that changes when the wait is over, and its value until that time.
    pub(crate) fn parked(&self) -> (&AtomicU32, u32) {
        self.waiter().parked()
    }

    /// The end of the wait: the message was read or withdrawn, or the userfaultfd was closed.
    pub(crate) fn ending(&self) -> Option<Ending> {
        self.waiter().ending()
    }

    /// Waits until the message is done or a fatal signal arrives. Called without locks.
    pub(crate) fn wait(&self) -> Ending {
        let platform = self.memory.platform();
        let ending =
            UserfaultState::park_until_done(platform, self.waiter(), || platform.fatal_signal());
        ending.unwrap_or(Ending::Interrupted)
    }
}

impl<P: Platform> Drop for PolledEvent<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the hold is this value's; 2. the list or its last user, which owns the notice,
        // lets go of it only in no queue.
        unsafe { Notice::let_go(self.memory, self.notice) };
    }
}

impl<P: Platform> fmt::Debug for PolledEvent<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolledEvent").field("ending", &self.ending()).finish_non_exhaustive()
    }
}
