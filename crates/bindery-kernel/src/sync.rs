//! Locks.
//!
//! Interrupts are off in the kernel, so a spinning lock needs no care for them. A lock that is held
//! across a sleep must be a [`SleepingMutex`].

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::process::parking;

/// A lock that spins.
pub struct RawSpinLock(AtomicBool);

// SAFETY: only one caller at a time gets from the exchange to the store.
unsafe impl lock_api::RawMutex for RawSpinLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "the trait asks for it")]
    const INIT: Self = Self(AtomicBool::new(false));

    type Guard = lock_api::GuardSend;

    #[inline]
    fn lock(&self) -> Self::Guard {
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            core::hint::spin_loop();
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

/// Nobody has the lock.
const FREE: u32 = 0;
/// Somebody has it.
const TAKEN: u32 = 1;
/// Somebody has it, and others may be parked on the word.
const WANTED: u32 = 2;

/// A lock whose waiters sleep.
pub struct RawSleepingLock(AtomicU32);

// SAFETY: the word leaves `FREE` by one exchange at a time, and the holder alone brings it back.
unsafe impl lock_api::RawMutex for RawSleepingLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "the trait asks for it")]
    const INIT: Self = Self(AtomicU32::new(FREE));

    type Guard = lock_api::GuardSend;

    #[inline]
    fn lock(&self) -> Self::Guard {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        // Whoever takes the lock here does not know who else waits: it says that somebody does.
        while self.0.swap(WANTED, Ordering::Acquire) != FREE {
            parking::park(&self.0, WANTED);
        }
        lock_api::GuardSend::new()
    }

    #[inline]
    fn try_lock(&self) -> Option<Self::Guard> {
        let taken = self.0.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(lock_api::GuardSend::new)
    }

    #[inline]
    unsafe fn unlock(&self, _guard: Self::Guard) {
        if self.0.swap(FREE, Ordering::Release) == WANTED {
            parking::unpark(&self.0);
        }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed) != FREE
    }
}

/// For what is held for a moment, never across a sleep or a copy to or from a program.
pub type Mutex<T> = lock_api::Mutex<RawSpinLock, T>;

/// For what may be held across a sleep.
pub type SleepingMutex<T> = lock_api::Mutex<RawSleepingLock, T>;
