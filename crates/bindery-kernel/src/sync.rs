//! Locks.
//!
//! Interrupts are off in the kernel, so a spinning lock needs no care for them. A lock that is held
//! across a sleep must be a [`SleepingMutex`].

use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::process::scheduler;

/// What a waiter does before it looks again.
pub trait Waiting {
    /// Once.
    fn wait();
}

/// Nothing: the lock is about to be free.
pub struct Spin;

impl Waiting for Spin {
    fn wait() {
        core::hint::spin_loop();
    }
}

/// It lets others run.
pub struct LetOthersRun;

impl Waiting for LetOthersRun {
    fn wait() {
        scheduler::yield_now();
    }
}

/// A lock whose waiters wait as `W` says.
pub struct RawLock<W>(AtomicBool, PhantomData<fn() -> W>);

// SAFETY: only one caller at a time gets from the exchange to the store.
unsafe impl<W: Waiting> lock_api::RawMutex for RawLock<W> {
    #[allow(clippy::declare_interior_mutable_const, reason = "the trait asks for it")]
    const INIT: Self = Self(AtomicBool::new(false), PhantomData);

    type Guard = lock_api::GuardSend;

    #[inline]
    fn lock(&self) -> Self::Guard {
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            W::wait();
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<Self::Guard> {
        (!self.0.swap(true, Ordering::Acquire)).then(lock_api::GuardSend::new)
    }

    #[inline]
    unsafe fn unlock(&self, _guard: Self::Guard) {
        self.0.store(false, Ordering::Release);
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A lock that spins.
pub type RawSpinLock = RawLock<Spin>;

/// A lock whose waiter lets others run.
pub type RawSleepingLock = RawLock<LetOthersRun>;

/// For what is held for a moment, never across a sleep or a copy to or from a program.
pub type Mutex<T> = lock_api::Mutex<RawSpinLock, T>;

/// For what may be held across a sleep.
pub type SleepingMutex<T> = lock_api::Mutex<RawSleepingLock, T>;
