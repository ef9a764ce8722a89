//! The queues of a userfaultfd: messages in the memory of the waiting threads.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::addr::{VirtAddr, VirtRange};
use crate::sync::word::Word;

use super::WaitingFaults;
use super::{UserfaultFault, UserfaultState};

/// The content of a queued message.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QueuedMessage {
    Fault(UserfaultFault),
    /// A fork, with the child's state, which the waiting thread holds for the message.
    Fork(NonNull<UserfaultState>),
    Remap {
        from: VirtAddr,
        to: VirtAddr,
        length: u64,
    },
    Remove(VirtRange),
    Unmap(VirtRange),
}

impl QueuedMessage {
    /// The child's state, if the message is about a fork.
    pub(super) fn child(&self) -> Option<NonNull<UserfaultState>> {
        if let Self::Fork(child) = self { Some(*child) } else { None }
    }
}

/// The way in which a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// A fault was woken, or an event was read.
    Woken,
    /// The userfaultfd was closed.
    Closed,
    /// A signal arrived.
    Interrupted,
}

/// A reader's treatment of a message about a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Forks {
    Read,
    Left,
}

/// The next message is about a fork and was not taken ([`super::Userfault::try_read_but_fork`]).
///
/// ```
/// use bindery::{ForkIsNext, Platform, Userfault, UserfaultMessage};
///
/// /// Reads a message; `has_room` says whether there is room for a child's userfaultfd.
/// fn next<'m, P: Platform>(
///     userfault: &Userfault<'m, P>,
///     has_room: impl FnOnce() -> bool,
/// ) -> Option<UserfaultMessage<'m, P>> {
///     match userfault.try_read_but_fork() {
///         Ok(message) => message,
///         Err(ForkIsNext) if has_room() => userfault.try_read(),
///         Err(ForkIsNext) => None,
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForkIsNext;

const WAITS: u32 = 0;
const WOKEN: u32 = 1;
const CLOSED: u32 = 2;

/// The queue that a waiter is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WaiterQueue {
    Nowhere,
    UnreadFaults,
    ReadFaults,
    Events,
}

/// A message and its waiting thread. All fields except the word are used with the lock of the state
/// held.
#[derive(Debug)]
pub(crate) struct Waiter<W = AtomicU32> {
    content: QueuedMessage,
    /// The word that the thread parks on. Changing it is the last access of the waking thread to
    /// the waiter.
    pub(super) word: W,
    place: Cell<WaiterQueue>,
    next: Cell<Option<NonNull<Self>>>,
    previous: Cell<Option<NonNull<Self>>>,
}

impl Waiter {
    /// A waiter in no queue.
    pub(crate) const fn new(content: QueuedMessage) -> Self {
        Self::of_word(content, AtomicU32::new(WAITS))
    }

    /// The word, and its value while the wait lasts.
    pub(super) fn parked(&self) -> (&AtomicU32, u32) {
        (&self.word, WAITS)
    }
}

impl<W> Waiter<W> {
    /// A waiter in no queue, with the word at 0.
    pub(super) const fn of_word(content: QueuedMessage, word: W) -> Self {
        Self {
            content,
            word,
            place: Cell::new(WaiterQueue::Nowhere),
            next: Cell::new(None),
            previous: Cell::new(None),
        }
    }

    /// The content of the message.
    pub(crate) fn content(&self) -> QueuedMessage {
        self.content
    }

    fn concerns(&self, range: VirtRange) -> bool {
        matches!(self.content, QueuedMessage::Fault(fault) if range.contains(fault.address))
    }
}

impl<W: Word<u32>> Waiter<W> {
    /// The way in which the wait ended; `None` while it lasts.
    pub(super) fn ending(&self) -> Option<Ending> {
        // Acquire: the thread sees everything that happened before the wake-up.
        match self.word.load(Ordering::Acquire) {
            WAITS => None,
            WOKEN => Some(Ending::Woken),
            _ => Some(Ending::Closed),
        }
    }
}

/// A doubly linked list of waiters, oldest first.
#[derive(Debug)]
struct WaiterList<W> {
    first: Option<NonNull<Waiter<W>>>,
    last: Option<NonNull<Waiter<W>>>,
}

impl<W> WaiterList<W> {
    const EMPTY: Self = Self { first: None, last: None };
}

/// The queues of one userfaultfd.
#[derive(Debug)]
pub(super) struct Queues<W> {
    unread: WaiterList<W>,
    read: WaiterList<W>,
    events: WaiterList<W>,
}

/// A queued waiter.
///
/// # Safety
/// 1. The waiter is in a queue whose lock is held until the last use of the reference. A waiter
///    lives from [`Queues::add`] until it is removed (obligation 1 of `add`).
unsafe fn waiter<'a, W>(node: NonNull<Waiter<W>>) -> &'a Waiter<W> {
    // SAFETY: the caller's obligation 1.
    unsafe { node.as_ref() }
}

impl<W: Word<u32>> Queues<W> {
    pub(super) const fn new() -> Self {
        Self { unread: WaiterList::EMPTY, read: WaiterList::EMPTY, events: WaiterList::EMPTY }
    }

    fn list(&mut self, place: WaiterQueue) -> Option<&mut WaiterList<W>> {
        match place {
            WaiterQueue::Nowhere => None,
            WaiterQueue::UnreadFaults => Some(&mut self.unread),
            WaiterQueue::ReadFaults => Some(&mut self.read),
            WaiterQueue::Events => Some(&mut self.events),
        }
    }

    fn push(&mut self, node: &Waiter<W>, place: WaiterQueue) {
        let Some(list) = self.list(place) else { return };
        let pointer = NonNull::from(node);
        node.place.set(place);
        node.next.set(None);
        node.previous.set(list.last);
        match list.last {
            // SAFETY: 1. this is the last waiter in a queue of `self`, which the lock's holder
            // borrows exclusively.
            Some(last) => unsafe { waiter(last) }.next.set(Some(pointer)),
            None => list.first = Some(pointer),
        }
        list.last = Some(pointer);
    }

    /// Removes a waiter from its queue.
    pub(super) fn take(&mut self, node: &Waiter<W>) {
        let (next, previous) = (node.next.get(), node.previous.get());
        let Some(list) = self.list(node.place.get()) else { return };
        match previous {
            // SAFETY: 1. this is a neighbor in a queue of `self`, as in `push`.
            Some(previous) => unsafe { waiter(previous) }.next.set(next),
            None => list.first = next,
        }
        match next {
            // SAFETY: 1. as above.
            Some(next) => unsafe { waiter(next) }.previous.set(previous),
            None => list.last = previous,
        }
        node.place.set(WaiterQueue::Nowhere);
    }

    /// Queues a waiter that is in no queue.
    ///
    /// # Safety
    /// 1. The waiter lives and does not move until it is removed.
    pub(super) unsafe fn add(&mut self, node: &Waiter<W>) {
        let fault = matches!(node.content, QueuedMessage::Fault(_));
        self.push(node, if fault { WaiterQueue::UnreadFaults } else { WaiterQueue::Events });
    }

    /// Whether all messages are read.
    pub(super) fn is_read(&self) -> bool {
        self.unread.first.is_none() && self.events.first.is_none()
    }

    /// The next message: faults first, as on Linux. A fault stays queued until it is woken. An
    /// event is done once it is read: `done` is called before the event's thread may see this, and
    /// afterwards `wake` is called with the address of the thread's word.
    ///
    /// # Errors
    /// The next message is about a fork and must not be taken.
    pub(super) fn read(
        &mut self,
        forks: Forks,
        done: impl FnOnce(),
        wake: impl FnOnce(*const W),
    ) -> Result<Option<QueuedMessage>, ForkIsNext> {
        if let Some(first) = self.unread.first {
            // SAFETY: 1. this is the first waiter in a queue of `self`, and it stays in a queue.
            let fault = unsafe { waiter(first) };
            self.take(fault);
            self.push(fault, WaiterQueue::ReadFaults);
            return Ok(Some(fault.content));
        }
        let Some(first) = self.events.first else { return Ok(None) };
        // SAFETY: 1. this is the first waiter in a queue of `self`, until `end` removes it, which
        // is the last use.
        let event = unsafe { waiter(first) };
        let content = event.content;
        if forks == Forks::Left && matches!(content, QueuedMessage::Fork(_)) {
            return Err(ForkIsNext);
        }
        done();
        self.end(event, WOKEN, wake);
        Ok(Some(content))
    }

    /// Removes a waiter and wakes its thread.
    fn end(&mut self, node: &Waiter<W>, how: u32, wake: impl FnOnce(*const W)) {
        self.take(node);
        let word = &raw const node.word;
        // Stored last: the thread may return, which frees its waiter, as soon as it sees the value.
        node.word.store(how, Ordering::Release);
        wake(word);
    }

    /// Takes a message back that no reader has received. Calls `wake` with the address of the word.
    pub(super) fn end_unread(&mut self, node: &Waiter<W>, wake: impl FnOnce(*const W)) {
        if node.place.get() != WaiterQueue::Nowhere {
            self.end(node, CLOSED, wake);
        }
    }

    /// The number of waiting faults.
    pub(super) fn faults(&self) -> WaitingFaults {
        let count = |list: &WaiterList<W>| {
            // SAFETY: 1. the waiter is in a queue of `self`, which does not change during the
            // count.
            let next = |node: &NonNull<Waiter<W>>| unsafe { waiter(*node) }.next.get();
            core::iter::successors(list.first, next).count() as u64
        };
        let unread = count(&self.unread);
        WaitingFaults { unread, all: unread + count(&self.read) }
    }

    /// Wakes the faults in `range`. Calls `wake` with the address of each fault's word.
    pub(super) fn wake(&mut self, range: VirtRange, mut wake: impl FnMut(*const W)) {
        for first in [self.unread.first, self.read.first] {
            let mut next = first;
            while let Some(node) = next {
                // SAFETY: 1. the waiter is in a queue of `self`, until `end` removes it, which is
                // the last use.
                let fault = unsafe { waiter(node) };
                next = fault.next.get();
                if fault.concerns(range) {
                    self.end(fault, WOKEN, &mut wake);
                }
            }
        }
    }

    /// Wakes all waiting threads, because no handler will answer their messages.
    pub(super) fn close(&mut self, mut wake: impl FnMut(*const W)) {
        for place in [WaiterQueue::UnreadFaults, WaiterQueue::ReadFaults, WaiterQueue::Events] {
            while let Some(node) = self.list(place).and_then(|list| list.first) {
                // SAFETY: 1. this is the first waiter in a queue of `self`, as in `wake`.
                self.end(unsafe { waiter(node) }, CLOSED, &mut wake);
            }
        }
    }
}
