//! The state of a userfaultfd, which all who name it share.

use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::Memory;
use crate::addr::VirtRange;
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;
use crate::sync::rw_lock::RwLock;

use super::queue::{Content, Ending, ForkIsNext, Forks, Queues, Waiter};
use super::{UserfaultFeatures, UserfaultScope};

/// A userfaultfd.
pub(crate) struct UserfaultState {
    /// Handles, VMAs, waiting threads and queued forks that name it.
    holders: AtomicU32,
    /// The number of the address space that it belongs to.
    space: u64,
    features: UserfaultFeatures,
    scope: UserfaultScope,
    closed: AtomicBool,
    /// Changes of the address space whose messages were not read yet.
    changing: AtomicU32,
    /// Whether there are unread messages; to be asked without the lock.
    readable: AtomicBool,
    /// Changes with each message, and when it is closed; readers park on it.
    arrived: AtomicU32,
    lock: RwLock,
    queues: UnsafeCell<Queues>,
}

// SAFETY: all is atomic but the queues, which only `alone` uses, with the lock held for writing.
// Waiters are used so too, from any thread.
unsafe impl Send for UserfaultState {}
// SAFETY: as above.
unsafe impl Sync for UserfaultState {}

impl UserfaultState {
    /// A userfaultfd of the address space with this number, held once.
    pub(crate) fn new(space: u64, features: UserfaultFeatures, scope: UserfaultScope) -> Self {
        Self {
            holders: AtomicU32::new(1),
            space,
            features,
            scope,
            closed: AtomicBool::new(false),
            changing: AtomicU32::new(0),
            readable: AtomicBool::new(false),
            arrived: AtomicU32::new(0),
            lock: RwLock::new(),
            queues: UnsafeCell::new(Queues::default()),
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
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the address space changes: some message about that was not read yet. Asked with the
    /// VMA locked, so that a change comes before, and is seen, or waits for the lock.
    pub(crate) fn is_changing(&self) -> bool {
        self.changing.load(Ordering::Acquire) != 0
    }

    /// A change begins, with the mutex of the address space held.
    pub(crate) fn begin_change(&self) {
        self.changing.fetch_add(1, Ordering::AcqRel);
    }

    /// A change is over, because its message was read, or will never be.
    pub(crate) fn end_change(&self) {
        self.changing.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether a read gives a message at once. Takes no lock.
    pub(crate) fn is_readable(&self) -> bool {
        self.readable.load(Ordering::Acquire)
    }

    /// One holder more.
    pub(crate) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    fn alone<P: Platform, R>(&self, platform: &P, work: impl FnOnce(&mut Queues) -> R) -> R {
        self.lock.with_write(platform, || {
            // SAFETY: the lock is held for writing, and `work` does not come here again.
            let queues = unsafe { &mut *self.queues.get() };
            let result = work(queues);
            self.readable.store(!queues.is_read(), Ordering::Release);
            result
        })
    }

    /// Queues a message. Says whether there is somebody to read it.
    ///
    /// # Safety
    /// 1. The waiter stays where it is, and lives, until [`UserfaultState::wait`] has returned.
    pub(crate) unsafe fn queue<P: Platform>(&self, platform: &P, waiter: &Waiter) -> bool {
        let queued = self.alone(platform, |queues| {
            if self.is_closed() {
                return false;
            }
            // SAFETY: 1. the caller's obligation: `wait` takes it out.
            unsafe { queues.add(waiter) };
            self.arrived.fetch_add(1, Ordering::Release);
            true
        });
        if queued {
            platform.unpark(&self.arrived);
            platform.userfault_arrived();
        }
        queued
    }

    /// Waits, without locks, until a queued message has served its purpose, or until `interrupted`
    /// says so. The message is in no queue then.
    pub(crate) fn wait<P: Platform>(
        &self,
        platform: &P,
        waiter: &Waiter,
        interrupted: impl Fn() -> bool,
    ) -> Ending {
        while waiter.ending().is_none() {
            if interrupted() {
                return self.withdraw(platform, waiter);
            }
            platform.park(&waiter.word, 0);
        }
        waiter.ending().unwrap_or(Ending::Interrupted)
    }

    /// Takes a message back, unless it has just served its purpose.
    pub(crate) fn withdraw<P: Platform>(&self, platform: &P, waiter: &Waiter) -> Ending {
        self.alone(platform, |queues| queues.take(waiter));
        waiter.ending().unwrap_or(Ending::Interrupted)
    }

    /// Lets the faults in `range` go on, which look again.
    pub(crate) fn wake<P: Platform>(&self, platform: &P, range: VirtRange) {
        self.alone(platform, |queues| queues.wake(range, |word| platform.unpark(word)));
    }

    /// As [`Queues::faults`].
    pub(super) fn faults<P: Platform>(&self, platform: &P) -> (u64, u64) {
        self.alone(platform, |queues| queues.faults())
    }

    /// The next message.
    pub(super) fn read<P: Platform>(
        &self,
        platform: &P,
        forks: Forks,
    ) -> Result<Option<Content>, ForkIsNext> {
        self.alone(platform, |queues| {
            // With its message read, the change is over.
            queues.read(forks, || self.end_change(), |word| platform.unpark(word))
        })
    }

    /// Sleeps until a message comes, unless one has since `seen`, or until it is closed.
    pub(crate) fn await_message<P: Platform>(&self, platform: &P, seen: u32) {
        platform.park(&self.arrived, seen);
    }

    /// To be asked before a look at the queue that [`UserfaultState::await_message`] follows.
    pub(crate) fn messages_seen(&self) -> u32 {
        self.arrived.load(Ordering::Acquire)
    }

    /// Lets all who wait go on; nobody waits any more.
    pub(crate) fn close<P: Platform>(&self, platform: &P) {
        self.alone(platform, |queues| {
            self.closed.store(true, Ordering::Release);
            queues.close(|word| platform.unpark(word));
            self.arrived.fetch_add(1, Ordering::Release);
        });
        platform.unpark(&self.arrived);
        platform.userfault_arrived();
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
