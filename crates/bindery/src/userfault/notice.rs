//! Messages about changes of an address space, prepared with the mutex held and delivered without
//! it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::ptr::NonNull;

use crate::Memory;
use crate::error::NoMemory;
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;

use super::polled::PolledMessage;
use super::queue::{Ending, QueuedMessage, Waiter};
use super::state::{UserfaultState, release};

/// A message to be delivered, and a hold on its userfaultfd.
pub(crate) struct Notice {
    pub(super) state: NonNull<UserfaultState>,
    pub(super) waiter: Waiter,
    next: Cell<Option<NonNull<Self>>>,
}

/// Messages in the order of delivery. The list must be delivered, appended or canceled.
#[derive(Default)]
#[must_use]
pub(crate) struct Notices {
    first: Option<NonNull<Notice>>,
    last: Option<NonNull<Notice>>,
}

/// A notice in a list.
///
/// # Safety
/// 1. The list is not delivered or canceled before the last use of the reference; until then, the
///    notice lives in its slab.
unsafe fn notice<'a>(node: NonNull<Notice>) -> &'a Notice {
    // SAFETY: the caller's obligation 1.
    unsafe { node.as_ref() }
}

impl Notice {
    /// Allocates a notice that is in no list and no queue and holds its userfaultfd.
    ///
    /// # Safety
    /// 1. `state` is held during the call.
    pub(super) unsafe fn allocate<P: Platform>(
        memory: &Memory<P>,
        state: NonNull<UserfaultState>,
        content: QueuedMessage,
    ) -> Option<NonNull<Self>> {
        let make = || Self { state, waiter: Waiter::new(content), next: Cell::new(None) };
        let node = memory.slab::<Self>().allocate_with(&memory.frames, make)?;
        // SAFETY: the caller's obligation 1.
        unsafe { state.as_ref() }.hold();
        Some(node)
    }

    /// Frees a notice and drops its hold.
    ///
    /// # Safety
    /// 1. The notice belongs to the caller, is in no list and no queue, and is no longer used.
    pub(super) unsafe fn free<P: Platform>(memory: &Memory<P>, node: NonNull<Self>) {
        // SAFETY: 1. for `notice` and `release`: the notice is freed below, and the hold is its
        // own.
        unsafe { release(memory, notice(node).state) };
        // SAFETY: 1. the notice came from this slab; 2. the caller's obligation 1.
        unsafe { memory.slab().free(&memory.frames, node) };
    }
}

impl Notices {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Prepares a message of the call with this number. From here on, the address space counts as
    /// changing. The caller holds the mutex.
    ///
    /// # Safety
    /// 1. `state` is held during the call by the VMA that refers to it.
    pub(crate) unsafe fn push<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        call: u64,
        state: NonNull<UserfaultState>,
        content: QueuedMessage,
    ) -> Result<(), NoMemory> {
        memory.may_wait();
        // SAFETY: 1. the caller's obligation.
        let node = unsafe { Notice::allocate(memory, state, content) }.ok_or(NoMemory)?;
        // SAFETY: the state is held (the caller's obligation 1).
        let named = unsafe { state.as_ref() };
        named.begin_change();
        named.note_notice(call, content.child());
        self.append(Self { first: Some(node), last: Some(node) });
        Ok(())
    }

    /// Appends other messages.
    pub(crate) fn append(&mut self, others: Self) {
        match self.last {
            // SAFETY: 1. this is the last notice of this list, which is borrowed exclusively.
            Some(last) => unsafe { notice(last) }.next.set(others.first),
            None => self.first = others.first,
        }
        self.last = others.last.or(self.last);
    }

    /// Delivers the messages one by one, and for each waits until it is read, its userfaultfd is
    /// closed, or a fatal signal arrives. Called without locks.
    #[cold]
    pub(crate) fn deliver<P: Platform>(self, memory: &Memory<P>) {
        let platform = memory.platform();
        self.each(memory, |state, waiter| {
            // SAFETY: 1. the notice stays in its slab until `wait` has returned.
            if !unsafe { state.queue(platform, waiter) } {
                return Ending::Closed;
            }
            state.wait(platform, waiter, || platform.fatal_signal())
        });
    }

    /// Queues the message, the only one of the list, for a caller that polls its end or moves the
    /// wait to another thread. `None` if the list is empty or the userfaultfd is closed. May sleep.
    #[cold]
    pub(crate) fn queue_removal<P: Platform>(
        self,
        memory: &Memory<P>,
    ) -> Option<PolledMessage<'_, P>> {
        let node = self.first?;
        debug_assert!(self.last == Some(node), "the others would be lost");
        // SAFETY: 1. the notice belongs to this list, which ends here; it is in no queue. Only
        // operations prepare messages about forks, and they deliver them.
        unsafe { PolledMessage::queue_removal(memory, node) }
    }

    /// Cancels the messages after the change has failed.
    #[cold]
    pub(crate) fn cancel<P: Platform>(self, memory: &Memory<P>) {
        self.each(memory, |_, _| Ending::Interrupted);
    }

    fn each<P: Platform>(
        self,
        memory: &Memory<P>,
        mut deliver: impl FnMut(&UserfaultState, &Waiter) -> Ending,
    ) {
        let mut next = self.first;
        while let Some(node) = next {
            // SAFETY: 1. the notice belongs to this list, and is freed below, after its last use.
            let one = unsafe { notice(node) };
            next = one.next.get();
            // SAFETY: the notice holds the state.
            let state = unsafe { one.state.as_ref() };
            if deliver(state, &one.waiter) != Ending::Woken {
                state.end_change();
                if let QueuedMessage::Fork(child) = one.waiter.content() {
                    // SAFETY: the hold belongs to the message, which no reader has received.
                    unsafe { child.as_ref() }.close(memory.platform());
                    // SAFETY: 1. as above.
                    unsafe { release(memory, child) };
                }
            }
            // SAFETY: 1. the notice belongs to this list, which ends here; it is in no queue.
            unsafe { Notice::free(memory, node) };
        }
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for Notice {
    const KIND: RecordKind = RecordKind::UserfaultNotice;
}
