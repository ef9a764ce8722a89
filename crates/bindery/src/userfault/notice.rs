//! Messages about changes of an address space, prepared with the mutex held and delivered without
//! it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::fmt;
use core::mem;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::Memory;
use crate::error::NoMemory;
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;

use super::polled::{PolledEvent, PolledMessage};
use super::queue::{Ending, QueuedMessage, Waiter};
use super::state::{UserfaultState, release};

/// A message to be delivered, and a hold on its userfaultfd.
pub(crate) struct Notice {
    pub(super) state: NonNull<UserfaultState>,
    pub(super) waiter: Waiter,
    next: Cell<Option<NonNull<Self>>>,
    /// Whether the message was queued. Used by the owner of the list.
    is_sent: Cell<bool>,
    /// The list or the wait that owns the notice, and the further waits for the reader.
    holders: AtomicU32,
}

/// Messages in the order of delivery. The list must be delivered, appended or canceled. Only its
/// first message may be in a queue.
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
        let make = || Self {
            state,
            waiter: Waiter::new(content),
            next: Cell::new(None),
            is_sent: Cell::new(false),
            holders: AtomicU32::new(1),
        };
        let node = memory.slab::<Self>().allocate_with(&memory.frames, make)?;
        // SAFETY: the caller's obligation 1.
        unsafe { state.as_ref() }.hold();
        Some(node)
    }

    /// Withdraws the queued message, unless it is done. All waits for it end.
    fn withdraw<P: Platform>(&self, platform: &P) -> Ending {
        // SAFETY: the notice holds the state.
        unsafe { self.state.as_ref() }.withdraw_shared(platform, &self.waiter)
    }

    /// Adds a holder.
    pub(super) fn hold(&self) {
        // Relaxed: the caller's own hold keeps the notice.
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    /// Drops one hold. The last one frees the notice, which drops its hold on the userfaultfd.
    ///
    /// # Safety
    /// 1. The hold belongs to the caller, which no longer uses the notice.
    /// 2. If it is the owner's hold, the notice is in no list and no queue.
    pub(super) unsafe fn let_go<P: Platform>(memory: &Memory<P>, node: NonNull<Self>) {
        // AcqRel: the uses by all other holders precede the free.
        // SAFETY: 1. for `notice`: the caller holds it.
        if unsafe { notice(node) }.holders.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        // SAFETY: 1. for `notice` and `release`: the notice is freed below, and the hold is its
        // own.
        unsafe { release(memory, notice(node).state) };
        // SAFETY: 1. the notice came from this slab; 2. the dropped hold was the last, and the
        // owner's obligation 2.
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
    pub(crate) fn deliver<P: Platform>(mut self, memory: &Memory<P>) {
        let mut gives_up = false;
        while let Some(wait) = self.send(memory, gives_up) {
            gives_up = wait.wait() == Ending::Interrupted;
        }
    }

    /// Delivers messages until one has to wait for its reader, and returns that wait; `None` after
    /// the last message. A message is sent once, however many waits for its reader were returned.
    /// `gives_up`: the first message is withdrawn if it is still unread. A fatal signal withdraws
    /// each message that is unread. Called without locks.
    #[cold]
    pub(crate) fn send<'m, P: Platform>(
        &mut self,
        memory: &'m Memory<P>,
        mut gives_up: bool,
    ) -> Option<PolledEvent<'m, P>> {
        let platform = memory.platform();
        loop {
            let node = self.first?;
            // SAFETY: 1. the notice belongs to this list until `end_first`, which follows its last
            // use.
            let one = unsafe { notice(node) };
            // SAFETY: the notice holds the state.
            let state = unsafe { one.state.as_ref() };
            let is_sent = one.is_sent.replace(true);
            // SAFETY: 1. the notice stays in its slab until it has left the queue: `end_first` is
            // called after that.
            if !is_sent && !unsafe { state.queue(platform, &one.waiter) } {
                self.end_first(memory, Ending::Closed);
                continue;
            }
            let withdraws = mem::take(&mut gives_up) || platform.fatal_signal();
            let ending = one.waiter.ending();
            let ending = ending.or_else(|| withdraws.then(|| one.withdraw(platform)));
            let Some(ending) = ending else {
                // SAFETY: 1. the notice is in the list, and came from a slab of the list's memory.
                return Some(unsafe { PolledEvent::of(memory, node) });
            };
            self.end_first(memory, ending);
        }
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

    /// Cancels the messages: the change has failed, or its call has ended without their readers.
    #[cold]
    pub(crate) fn cancel<P: Platform>(mut self, memory: &Memory<P>) {
        while let Some(node) = self.first {
            // SAFETY: 1. the notice belongs to this list until `end_first`.
            let one = unsafe { notice(node) };
            let ending = if one.is_sent.get() {
                one.withdraw(memory.platform())
            } else {
                Ending::Interrupted
            };
            self.end_first(memory, ending);
        }
    }

    /// Ends the first message, which is in no queue any more, in this way.
    fn end_first<P: Platform>(&mut self, memory: &Memory<P>, ending: Ending) {
        let Some(node) = self.first else { return };
        // SAFETY: 1. the notice belongs to this list, and is used last before `let_go`.
        let one = unsafe { notice(node) };
        self.first = one.next.get();
        if self.first.is_none() {
            self.last = None;
        }
        if ending != Ending::Woken {
            // SAFETY: the notice holds the state.
            unsafe { one.state.as_ref() }.end_change();
            if let QueuedMessage::Fork(child) = one.waiter.content() {
                // SAFETY: the hold belongs to the message, which no reader has received.
                unsafe { child.as_ref() }.close(memory.platform());
                // SAFETY: 1. as above.
                unsafe { release(memory, child) };
            }
        }
        // SAFETY: 1. the hold is that of this list; 2. the notice has just left the list, and is in
        // no queue.
        unsafe { Notice::let_go(memory, node) };
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notices").field("is_empty", &self.is_empty()).finish_non_exhaustive()
    }
}

// SAFETY: the notices belong to the list, and their userfaultfds are held. A waiter may be used
// from any thread (`PolledMessage`), the count of holders is atomic, and the owner of the list
// alone uses the other fields.
unsafe impl Send for Notices {}
// SAFETY: as above; a shared reference to a list only tells whether it is empty.
unsafe impl Sync for Notices {}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for Notice {
    const KIND: RecordKind = RecordKind::UserfaultNotice;
}
