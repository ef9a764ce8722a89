//! Locks.
//!
//! Interrupts are off in the kernel, so a spinning lock needs no care for them. A lock that is held
//! across a sleep must be a [`SleepingMutex`].

use core::sync::atomic::{AtomicU32, Ordering};

use bindery::sync::{RawLock, SpinLock};

use crate::process::parking;

/// Nobody has the lock.
const FREE: u32 = 0;
/// Somebody has it.
const TAKEN: u32 = 1;
/// Somebody has it, and others may be parked on the word.
const WANTED: u32 = 2;

/// A lock whose waiters sleep.
pub struct SleepingLock(AtomicU32);

// SAFETY: 1. the word leaves `FREE` by one exchange at a time, which acquires what the holder
// released, and the holder alone brings it back. 2. Parking does not panic.
unsafe impl RawLock for SleepingLock {
    type State = ();

    const UNLOCKED: Self = Self(AtomicU32::new(FREE));

    #[inline]
    fn lock(&self) {
        if self.try_lock().is_some() {
            return;
        }
        // This thread does not know whether others wait, so it marks the lock as contended.
        while self.0.swap(WANTED, Ordering::Acquire) != FREE {
            parking::park(&self.0, WANTED);
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<()> {
        self.0.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).map(drop).ok()
    }

    #[inline]
    unsafe fn unlock(&self, (): ()) {
        if self.0.swap(FREE, Ordering::Release) == WANTED {
            parking::unpark(&self.0);
        }
    }
}

/// For what is held for a moment, never across a sleep or a copy to or from a program.
pub type Mutex<T> = bindery::sync::Mutex<SpinLock, T>;

/// For what may be held across a sleep.
pub type SleepingMutex<T> = bindery::sync::Mutex<SleepingLock, T>;
