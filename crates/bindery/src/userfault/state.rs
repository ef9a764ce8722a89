//! The shared state of a userfaultfd.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::UnsafeCell;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::Memory;
use crate::addr::VirtRange;
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;
use crate::sync::parking::Parking;
use crate::sync::rw_lock::RwLock;
use crate::sync::word::Word;

use super::WaitingFaults;
use super::queue::{Ending, ForkIsNext, Forks, QueuedMessage, Queues, Waiter};
use super::{UserfaultFault, UserfaultFeatures, UserfaultScope};

/// A userfaultfd. Its words are those of the core library or of a model checker (`loom_model`).
pub(crate) struct UserfaultState<W = AtomicU32> {
    /// The number of handles, VMAs, waiting threads and queued forks that refer to this state.
    holders: AtomicU32,
    /// The number of the address space.
    space: u64,
    features: UserfaultFeatures,
    scope: UserfaultScope,
    /// 1 after the userfaultfd was closed.
    closed: W,
    /// The number of changes of the address space whose messages were not read yet.
    changing: W,
    /// 1 if messages are unread; readable without the lock.
    readable: W,
    /// Changes with each message and when the userfaultfd is closed; readers park on it.
    arrived: W,
    last_notice: LastNotice,
    lock: RwLock<W>,
    queues: UnsafeCell<Queues<W>>,
}

/// The last call that prepared a message for a userfaultfd. Used with the mutex of the
/// userfaultfd's address space held, so the accesses need no memory order.
struct LastNotice {
    /// The number of the call ([`Memory::new_identity`]); 0 before the first.
    call: AtomicU64,
    /// The child's state, if the call is a fork. The state lives as long as the call's list of
    /// messages.
    child: AtomicPtr<UserfaultState>,
    /// The number of checks by calls.
    #[cfg(any(test, feature = "measure"))]
    asked: AtomicU64,
}

// SAFETY: all fields are atomic except the queues, which only `with_locked` uses, with the lock
// held for writing. Waiters are used in the same way, from any thread.
unsafe impl<W: Send + Sync> Send for UserfaultState<W> {}
// SAFETY: as above.
unsafe impl<W: Send + Sync> Sync for UserfaultState<W> {}

impl LastNotice {
    fn new() -> Self {
        Self {
            call: AtomicU64::new(0),
            child: AtomicPtr::new(core::ptr::null_mut()),
            #[cfg(any(test, feature = "measure"))]
            asked: AtomicU64::new(0),
        }
    }
}

impl UserfaultState {
    /// Creates a userfaultfd of the address space with this number, with one hold.
    pub(crate) fn new(space: u64, features: UserfaultFeatures, scope: UserfaultScope) -> Self {
        Self::of_words(space, features, scope, || AtomicU32::new(0))
    }

    /// Queues the message of a fault and lends it to `work`, which may wait for the handler
    /// ([`QueuedFault::wait`]). Afterwards the message is in no queue. `None` if the userfaultfd is
    /// closed.
    #[inline(always)]
    pub(crate) fn with_queued<P: Platform, R>(
        &self,
        platform: &P,
        message: UserfaultFault,
        work: impl FnOnce(QueuedFault<'_>) -> R,
    ) -> Option<R> {
        let waiter = Waiter::new(QueuedMessage::Fault(message));
        // SAFETY: 1. the waiter stays in this stack frame, and `_queued`, which is dropped before
        // the waiter, removes it from its queue.
        if !unsafe { self.queue(platform, &waiter) } {
            return None;
        }
        let _queued = Queued { platform, state: self, waiter: &waiter };
        Some(work(QueuedFault { state: self, waiter: &waiter }))
    }

    /// Queues a message. Returns whether a reader may still read it.
    ///
    /// # Safety
    /// 1. The waiter lives and does not move as long as it is in a queue: until its ending is seen
    ///    ([`UserfaultState::wait`], `Waiter::ending`), or a withdrawal has returned.
    pub(super) unsafe fn queue<P: Platform>(&self, platform: &P, waiter: &Waiter) -> bool {
        // SAFETY: 1. the caller's obligation.
        let queued = unsafe { self.add(platform, waiter) };
        if queued {
            platform.userfault_arrived();
        }
        queued
    }

    /// As [`UserfaultState::queue`], but does not sleep for the lock: also returns false if another
    /// thread holds it.
    ///
    /// # Safety
    /// 1. As for [`UserfaultState::queue`], if this returns true.
    pub(super) unsafe fn try_queue<P: Platform>(&self, platform: &P, waiter: &Waiter) -> bool {
        let Some(lock) = self.lock.try_write_while(platform, || false) else { return false };
        // SAFETY: 1. the lock is held for writing; 2. for `add_to`, the caller's obligation.
        let queued = unsafe { self.with_locked(|queues| self.add_to(queues, waiter)) };
        drop(lock);
        if queued {
            self.note_arrival(platform);
            platform.userfault_arrived();
        }
        queued
    }

    /// Closes the userfaultfd: wakes all waiting threads, and no thread waits from then on.
    pub(crate) fn close<P: Platform>(&self, platform: &P) {
        self.end_all(platform);
        platform.userfault_arrived();
    }
}

impl<W: Word<u32>> UserfaultState<W> {
    /// Like [`UserfaultState::new`], with given words, which are 0.
    pub(super) fn of_words(
        space: u64,
        features: UserfaultFeatures,
        scope: UserfaultScope,
        word: impl Fn() -> W,
    ) -> Self {
        Self {
            holders: AtomicU32::new(1),
            space,
            features,
            scope,
            closed: word(),
            changing: word(),
            readable: word(),
            arrived: word(),
            last_notice: LastNotice::new(),
            lock: RwLock::of_word(word()),
            queues: UnsafeCell::new(Queues::new()),
        }
    }

    pub(crate) fn features(&self) -> UserfaultFeatures {
        self.features
    }

    pub(crate) fn has(&self, features: UserfaultFeatures) -> bool {
        self.features.contains(features)
    }

    pub(crate) fn scope(&self) -> UserfaultScope {
        self.scope
    }

    /// The number of the address space.
    pub(crate) fn space(&self) -> u64 {
        self.space
    }

    /// Whether the userfaultfd was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    /// Whether the address space is changing, which means that some message about a change was not
    /// read yet. Checked with the VMA locked, so that a change either came before and is seen, or
    /// waits for the lock.
    pub(crate) fn is_changing(&self) -> bool {
        self.changing.load(Ordering::Acquire) != 0
    }

    /// Starts a change, with the mutex of the address space held.
    pub(crate) fn begin_change(&self) {
        self.changing.add(1, Ordering::AcqRel);
    }

    /// Ends a change, because its message was read or never will be.
    pub(crate) fn end_change(&self) {
        self.changing.sub(1, Ordering::AcqRel);
    }

    /// Whether the call with this number has prepared a message for this userfaultfd. Called with
    /// the mutex of the address space held.
    pub(crate) fn has_notice_of(&self, call: u64) -> bool {
        #[cfg(any(test, feature = "measure"))]
        crate::stats::count_roughly(&self.last_notice.asked, 1);
        self.last_notice.call.load(Ordering::Relaxed) == call
    }

    /// The child's state in the message that the fork with this number has prepared. Called with
    /// the mutex of the address space held.
    pub(crate) fn child_of(&self, call: u64) -> Option<NonNull<UserfaultState>> {
        let noted = self.has_notice_of(call);
        noted.then(|| NonNull::new(self.last_notice.child.load(Ordering::Relaxed))).flatten()
    }

    /// Records that the call with this number has prepared a message. Called with the mutex of the
    /// address space held.
    pub(super) fn note_notice(&self, call: u64, child: Option<NonNull<UserfaultState>>) {
        let child = child.map_or(core::ptr::null_mut(), NonNull::as_ptr);
        self.last_notice.child.store(child, Ordering::Relaxed);
        self.last_notice.call.store(call, Ordering::Relaxed);
    }

    /// The number of times that calls have checked whether they have prepared a message for this
    /// userfaultfd.
    #[cfg(any(test, feature = "measure"))]
    pub(super) fn times_asked(&self) -> u64 {
        self.last_notice.asked.load(Ordering::Relaxed)
    }

    /// Whether a read would return a message immediately. Acquires no lock.
    pub(crate) fn is_readable(&self) -> bool {
        self.readable.load(Ordering::Acquire) != 0
    }

    /// Adds a holder.
    pub(crate) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn with_queues<R>(
        &self,
        parking: &impl Parking<W>,
        work: impl FnOnce(&mut Queues<W>) -> R,
    ) -> R {
        // SAFETY: 1. the lock is held for writing.
        self.lock.with_write(parking, || unsafe { self.with_locked(work) })
    }

    /// As [`UserfaultState::with_queues`].
    ///
    /// # Safety
    /// 1. The lock is held for writing.
    #[inline(always)]
    unsafe fn with_locked<R>(&self, work: impl FnOnce(&mut Queues<W>) -> R) -> R {
        // SAFETY: by the caller's obligation 1, no other thread uses the queues, and `work`, which
        // receives them, does not call this function again.
        let queues = unsafe { &mut *self.queues.get() };
        let result = work(queues);
        self.readable.store(u32::from(!queues.is_read()), Ordering::Release);
        result
    }

    /// Adds a waiter to the queues, unless the userfaultfd is closed. This is checked with the lock
    /// held, because a closing thread acquires the lock only once more and would not find a message
    /// that is added later.
    ///
    /// # Safety
    /// As for [`UserfaultState::queue`].
    #[inline(always)]
    unsafe fn add_to(&self, queues: &mut Queues<W>, waiter: &Waiter<W>) -> bool {
        if self.is_closed() {
            return false;
        }
        // SAFETY: 1. the caller's obligation.
        unsafe { queues.add(waiter) };
        true
    }

    /// Like [`UserfaultState::queue`], but only wakes waiting readers and does not notify the
    /// platform.
    ///
    /// # Safety
    /// As for [`UserfaultState::queue`].
    pub(super) unsafe fn add(&self, parking: &impl Parking<W>, waiter: &Waiter<W>) -> bool {
        // SAFETY: 1. the caller's obligation; `wait` removes the waiter.
        let queued = self.with_queues(parking, |queues| unsafe { self.add_to(queues, waiter) });
        if queued {
            self.note_arrival(parking);
        }
        queued
    }

    /// Waits, without locks, until a queued message is done or `interrupted` returns true.
    /// Afterwards the message is in no queue.
    pub(super) fn wait(
        &self,
        parking: &impl Parking<W>,
        waiter: &Waiter<W>,
        interrupted: impl Fn() -> bool,
    ) -> Ending {
        let ending = Self::park_until_done(parking, waiter, interrupted);
        ending.unwrap_or_else(|| self.withdraw(parking, waiter))
    }

    /// As [`UserfaultState::wait`], but the message stays in its queue if `interrupted` returns
    /// true, which gives `None`.
    pub(super) fn park_until_done(
        parking: &impl Parking<W>,
        waiter: &Waiter<W>,
        interrupted: impl Fn() -> bool,
    ) -> Option<Ending> {
        loop {
            if let Some(ending) = waiter.ending() {
                return Some(ending);
            }
            if interrupted() {
                return None;
            }
            match waiter.content() {
                QueuedMessage::Fault(_) => parking.park_for_handler(&waiter.word, 0),
                QueuedMessage::Fork(_)
                | QueuedMessage::Remap { .. }
                | QueuedMessage::Remove(_)
                | QueuedMessage::Unmap(_) => {
                    parking.park(&waiter.word, 0);
                }
            }
        }
    }

    /// Withdraws a message, unless it is already done.
    pub(super) fn withdraw(&self, parking: &impl Parking<W>, waiter: &Waiter<W>) -> Ending {
        self.with_queues(parking, |queues| queues.take(waiter));
        waiter.ending().unwrap_or(Ending::Interrupted)
    }

    /// As [`UserfaultState::withdraw`], for a message whose reader several threads await: their
    /// waits end.
    pub(super) fn withdraw_shared(&self, parking: &impl Parking<W>, waiter: &Waiter<W>) -> Ending {
        self.with_queues(parking, |queues| queues.end_unread(waiter, |word| parking.unpark(word)));
        waiter.ending().unwrap_or(Ending::Interrupted)
    }

    /// Wakes the faults in `range`, which then check again.
    pub(crate) fn wake(&self, parking: &impl Parking<W>, range: VirtRange) {
        self.with_queues(parking, |queues| queues.wake(range, |word| parking.unpark(word)));
    }

    /// Like [`Queues::faults`].
    pub(super) fn faults(&self, parking: &impl Parking<W>) -> WaitingFaults {
        self.with_queues(parking, |queues| queues.faults())
    }

    /// The next message.
    pub(super) fn read(
        &self,
        parking: &impl Parking<W>,
        forks: Forks,
    ) -> Result<Option<QueuedMessage>, ForkIsNext> {
        self.with_queues(parking, |queues| {
            // The change is over once its message is read.
            queues.read(forks, || self.end_change(), |word| parking.unpark(word))
        })
    }

    /// Sleeps until a message arrives, unless one has arrived since `seen`, or until the
    /// userfaultfd is closed.
    pub(crate) fn await_message(&self, parking: &impl Parking<W>, seen: u32) {
        parking.park(&self.arrived, seen);
    }

    /// The value for [`UserfaultState::await_message`], read before the check of the queue.
    pub(crate) fn messages_seen(&self) -> u32 {
        self.arrived.load(Ordering::Acquire)
    }

    /// Like [`UserfaultState::close`], but only wakes threads and does not notify the platform.
    pub(super) fn end_all(&self, parking: &impl Parking<W>) {
        self.with_queues(parking, |queues| {
            self.closed.store(1, Ordering::Release);
            queues.close(|word| parking.unpark(word));
        });
        self.note_arrival(parking);
    }

    /// Wakes the threads that wait for a message. Must be called after `with_queues`, which makes
    /// the message readable. If it were called inside `with_queues`:
    /// 1. CPU A, in `with_queues`, changes `arrived`.
    /// 2. CPU B reads `arrived` and finds no readable message yet.
    /// 3. CPU A makes the message readable and finds no thread to wake.
    /// 4. CPU B sleeps, because `arrived` has not changed.
    pub(super) fn note_arrival(&self, parking: &impl Parking<W>) {
        // Release: a thread that sees the change sees the readable message.
        self.arrived.add(1, Ordering::Release);
        parking.unpark(&self.arrived);
    }
}

/// The queued message of a fault. It lies in the stack frame of [`UserfaultState::with_queued`],
/// which it does not outlive.
#[derive(Clone, Copy)]
pub(crate) struct QueuedFault<'w> {
    state: &'w UserfaultState,
    waiter: &'w Waiter,
}

impl QueuedFault<'_> {
    /// Waits, without locks, until the handler has served the fault, the userfaultfd is closed, or
    /// a signal arrives that is among `interrupts`.
    pub(crate) fn wait<P: Platform>(self, platform: &P, interrupts: WaitSignals) -> Ending {
        self.state.wait(platform, self.waiter, || interrupts.has_come(platform))
    }
}

impl fmt::Debug for QueuedFault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuedFault").field("waiter", self.waiter).finish_non_exhaustive()
    }
}

/// The signals that end a wait for a handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitSignals {
    /// Any signal: the program repeats its access.
    Signal,
    /// Only fatal signals: a call of the kernel accesses the page.
    FatalSignal,
}

impl WaitSignals {
    /// Whether such a signal is pending.
    pub(super) fn has_come<P: Platform>(self, platform: &P) -> bool {
        match self {
            Self::Signal => platform.signal(),
            Self::FatalSignal => platform.fatal_signal(),
        }
    }
}

/// Removes a message from its queue when dropped.
struct Queued<'w, P: Platform> {
    platform: &'w P,
    state: &'w UserfaultState,
    waiter: &'w Waiter,
}

impl<P: Platform> Drop for Queued<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        // A message that is done is in no queue.
        if self.waiter.ending().is_none() {
            self.state.withdraw(self.platform, self.waiter);
        }
    }
}

/// Drops one hold on the state.
///
/// # Safety
/// 1. The hold belongs to the caller, which no longer uses the state.
pub(crate) unsafe fn release<P: Platform>(memory: &Memory<P>, state: NonNull<UserfaultState>) {
    // SAFETY: 1. the caller holds the state.
    let holders = unsafe { &state.as_ref().holders };
    if holders.fetch_sub(1, Ordering::AcqRel) == 1 {
        // SAFETY: 1. states come from this slab; 2. the dropped hold was the last.
        unsafe { memory.slab().free(&memory.frames, state) };
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for UserfaultState {
    const KIND: RecordKind = RecordKind::Userfault;
}
