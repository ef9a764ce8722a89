//! The state of a userfaultfd, which all who name it share.

use core::cell::UnsafeCell;
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
use super::queue::{Content, Ending, ForkIsNext, Forks, Queues, Waiter};
use super::{UserfaultFeatures, UserfaultScope};

/// A userfaultfd. Its words are those of the core library or of a model checker (`loom_model`).
pub(crate) struct UserfaultState<W = AtomicU32> {
    /// Handles, VMAs, waiting threads and queued forks that name it.
    holders: AtomicU32,
    /// The number of the address space that it belongs to.
    space: u64,
    features: UserfaultFeatures,
    scope: UserfaultScope,
    /// 1 if nobody serves it any more.
    closed: W,
    /// Changes of the address space whose messages were not read yet.
    changing: W,
    /// 1 if there are unread messages; to be asked without the lock.
    readable: W,
    /// Changes with each message, and when it is closed; readers park on it.
    arrived: W,
    last_notice: LastNotice,
    lock: RwLock<W>,
    queues: UnsafeCell<Queues<W>>,
}

/// The last call that has prepared a message for a userfaultfd. Used with the mutex of its address
/// space held, so the accesses need no order.
struct LastNotice {
    /// The number of the call ([`Memory::new_identity`]); 0 before the first.
    call: AtomicU64,
    /// The child's state, where the call is a fork. It lives as long as the call's list of messages.
    child: AtomicPtr<UserfaultState>,
    /// How often calls have asked.
    #[cfg(any(test, feature = "measure"))]
    asked: AtomicU64,
}

// SAFETY: all is atomic but the queues, which only `alone` uses, with the lock held for writing.
// Waiters are used so too, from any thread.
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
    /// A userfaultfd of the address space with this number, held once.
    pub(crate) fn new(space: u64, features: UserfaultFeatures, scope: UserfaultScope) -> Self {
        Self::of_words(space, features, scope, || AtomicU32::new(0))
    }

    /// Queues a message. Says whether there is somebody to read it.
    ///
    /// # Safety
    /// 1. The waiter stays where it is, and lives, until [`UserfaultState::wait`] has returned.
    pub(crate) unsafe fn queue<P: Platform>(&self, platform: &P, waiter: &Waiter) -> bool {
        // SAFETY: 1. the caller's obligation.
        let queued = unsafe { self.add(platform, waiter) };
        if queued {
            platform.userfault_arrived();
        }
        queued
    }

    /// Lets all who wait go on; nobody waits any more.
    pub(crate) fn close<P: Platform>(&self, platform: &P) {
        self.end_all(platform);
        platform.userfault_arrived();
    }
}

impl<W: Word<u32>> UserfaultState<W> {
    /// As [`UserfaultState::new`], of words that are 0.
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

    /// The address space that it belongs to.
    pub(crate) fn space(&self) -> u64 {
        self.space
    }

    /// Whether nobody serves it any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    /// Whether the address space changes: some message about that was not read yet. Asked with the
    /// VMA locked, so that a change comes before, and is seen, or waits for the lock.
    pub(crate) fn is_changing(&self) -> bool {
        self.changing.load(Ordering::Acquire) != 0
    }

    /// A change begins, with the mutex of the address space held.
    pub(crate) fn begin_change(&self) {
        self.changing.add(1, Ordering::AcqRel);
    }

    /// A change is over, because its message was read, or will never be.
    pub(crate) fn end_change(&self) {
        self.changing.sub(1, Ordering::AcqRel);
    }

    /// Whether the call with this number has prepared a message for it. Called with the mutex of the
    /// address space held.
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

    /// Notes that the call with this number has prepared a message. Called with the mutex of the
    /// address space held.
    pub(super) fn note_notice(&self, call: u64, child: Option<NonNull<UserfaultState>>) {
        let child = child.map_or(core::ptr::null_mut(), NonNull::as_ptr);
        self.last_notice.child.store(child, Ordering::Relaxed);
        self.last_notice.call.store(call, Ordering::Relaxed);
    }

    /// How often calls have asked whether they have prepared a message for it.
    #[cfg(any(test, feature = "measure"))]
    pub(super) fn times_asked(&self) -> u64 {
        self.last_notice.asked.load(Ordering::Relaxed)
    }

    /// Whether a read gives a message at once. Takes no lock.
    pub(crate) fn is_readable(&self) -> bool {
        self.readable.load(Ordering::Acquire) != 0
    }

    /// One holder more.
    pub(crate) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn alone<R>(
        &self,
        parking: &impl Parking<W>,
        work: impl FnOnce(&mut Queues<W>) -> R,
    ) -> R {
        self.lock.with_write(parking, || {
            // SAFETY: the lock is held for writing, and `work` does not come here again.
            let queues = unsafe { &mut *self.queues.get() };
            let result = work(queues);
            self.readable.store(u32::from(!queues.is_read()), Ordering::Release);
            result
        })
    }

    /// As [`UserfaultState::queue`], and wakes those who wait for a message.
    ///
    /// # Safety
    /// As of [`UserfaultState::queue`].
    pub(super) unsafe fn add(&self, parking: &impl Parking<W>, waiter: &Waiter<W>) -> bool {
        let queued = self.alone(parking, |queues| {
            // With the lock held: who closes takes it once more, and would not find the message.
            if self.is_closed() {
                return false;
            }
            // SAFETY: 1. the caller's obligation: `wait` takes it out.
            unsafe { queues.add(waiter) };
            true
        });
        if queued {
            self.note_arrival(parking);
        }
        queued
    }

    /// Waits, without locks, until a queued message has served its purpose, or until `interrupted`
    /// says so. The message is in no queue then.
    pub(crate) fn wait(
        &self,
        parking: &impl Parking<W>,
        waiter: &Waiter<W>,
        interrupted: impl Fn() -> bool,
    ) -> Ending {
        while waiter.ending().is_none() {
            if interrupted() {
                return self.withdraw(parking, waiter);
            }
            match waiter.content() {
                Content::Fault(_) => parking.park_for_handler(&waiter.word, 0),
                Content::Fork(_)
                | Content::Remap { .. }
                | Content::Remove(_)
                | Content::Unmap(_) => {
                    parking.park(&waiter.word, 0);
                }
            }
        }
        waiter.ending().unwrap_or(Ending::Interrupted)
    }

    /// Takes a message back, unless it has just served its purpose.
    pub(crate) fn withdraw(&self, parking: &impl Parking<W>, waiter: &Waiter<W>) -> Ending {
        self.alone(parking, |queues| queues.take(waiter));
        waiter.ending().unwrap_or(Ending::Interrupted)
    }

    /// Lets the faults in `range` go on, which look again.
    pub(crate) fn wake(&self, parking: &impl Parking<W>, range: VirtRange) {
        self.alone(parking, |queues| queues.wake(range, |word| parking.unpark(word)));
    }

    /// As [`Queues::faults`].
    pub(super) fn faults(&self, parking: &impl Parking<W>) -> WaitingFaults {
        self.alone(parking, |queues| queues.faults())
    }

    /// The next message.
    pub(super) fn read(
        &self,
        parking: &impl Parking<W>,
        forks: Forks,
    ) -> Result<Option<Content>, ForkIsNext> {
        self.alone(parking, |queues| {
            // With its message read, the change is over.
            queues.read(forks, || self.end_change(), |word| parking.unpark(word))
        })
    }

    /// Sleeps until a message comes, unless one has since `seen`, or until it is closed.
    pub(crate) fn await_message(&self, parking: &impl Parking<W>, seen: u32) {
        parking.park(&self.arrived, seen);
    }

    /// To be asked before a look at the queue that [`UserfaultState::await_message`] follows.
    pub(crate) fn messages_seen(&self) -> u32 {
        self.arrived.load(Ordering::Acquire)
    }

    /// As [`UserfaultState::close`], and wakes those who wait for a message.
    pub(super) fn end_all(&self, parking: &impl Parking<W>) {
        self.alone(parking, |queues| {
            self.closed.store(1, Ordering::Release);
            queues.close(|word| parking.unpark(word));
        });
        self.note_arrival(parking);
    }

    /// Wakes those who wait for a message. After `alone`, which says that there is one. Before:
    /// 1. CPU A, in `alone`, changes `arrived`.
    /// 2. CPU B reads `arrived`, and finds nothing readable yet.
    /// 3. CPU A says that there is a message, and wakes nobody.
    /// 4. CPU B sleeps, since `arrived` is as it was read.
    pub(super) fn note_arrival(&self, parking: &impl Parking<W>) {
        // Release: who sees the change sees what is readable.
        self.arrived.add(1, Ordering::Release);
        parking.unpark(&self.arrived);
    }
}

/// Gives one hold back.
///
/// # Safety
/// 1. The hold is the caller's, who names the state no more.
pub(crate) unsafe fn release<P: Platform>(memory: &Memory<P>, state: NonNull<UserfaultState>) {
    // SAFETY: 1. the caller holds it.
    let holders = unsafe { &state.as_ref().holders };
    if holders.fetch_sub(1, Ordering::AcqRel) == 1 {
        // SAFETY: 1. states come from this slab; 2. that was the last hold.
        unsafe { memory.slab().free(&memory.frames, &memory.platform, state) };
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for UserfaultState {
    const KIND: RecordKind = RecordKind::Userfault;
}
