//! Adapters for locks of the `lock_api` crate, in both versions that kernels use.
//!
//! They are types instead of blanket implementations, because a lock may implement both versions of
//! `lock_api`, and a platform may implement [`RawLock`] itself.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;

use super::RawLock;

/// A lock of a crate that implements `lock_api` 0.4, for example `spin::Mutex<()>` or
/// `parking_lot` 0.12. Feature `lock_api_04`.
///
/// ```
/// use bindery::sync::{LockApi04, Mutex};
///
/// let count = Mutex::<LockApi04<spin::Mutex<()>>, u64>::new(0);
/// *count.lock() += 1;
/// ```
#[cfg(feature = "lock_api_04")]
pub struct LockApi04<L>(L);

// SAFETY: 1. `lock_api::RawMutex` requires the same of its implementors. 2. An implementation that
// panics has not changed the holder of the lock.
#[cfg(feature = "lock_api_04")]
unsafe impl<L: lock_api_04::RawMutex + Send + Sync> RawLock for LockApi04<L> {
    type State = ();

    const UNLOCKED: Self = Self(L::INIT);

    #[inline]
    fn lock(&self) {
        self.0.lock();
    }

    #[inline]
    fn try_lock(&self) -> Option<()> {
        self.0.try_lock().then_some(())
    }

    #[inline]
    unsafe fn unlock(&self, (): ()) {
        // SAFETY: the caller holds the lock, in the context that acquired it (contracts 1 and 2).
        unsafe { self.0.unlock() };
    }
}

#[cfg(feature = "lock_api_04")]
impl<L> fmt::Debug for LockApi04<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockApi04")
    }
}

/// A lock of a crate that implements `lock_api` 0.5, for example `parking_lot` 0.13. Feature
/// `lock_api_05`.
///
/// ```
/// use bindery::sync::{LockApi05, Mutex};
///
/// let count = Mutex::<LockApi05<parking_lot::RawMutex>, u64>::new(0);
/// *count.lock() += 1;
/// ```
#[cfg(feature = "lock_api_05")]
pub struct LockApi05<L>(L);

// SAFETY: as for `LockApi04`; the guard state of `lock_api` 0.5 is the state of the acquisition
// here.
#[cfg(feature = "lock_api_05")]
unsafe impl<L: lock_api_05::RawMutex + Send + Sync> RawLock for LockApi05<L> {
    type State = L::Guard;

    const UNLOCKED: Self = Self(L::INIT);

    #[inline]
    fn lock(&self) -> L::Guard {
        self.0.lock()
    }

    #[inline]
    fn try_lock(&self) -> Option<L::Guard> {
        self.0.try_lock()
    }

    #[inline]
    unsafe fn unlock(&self, state: L::Guard) {
        // SAFETY: the caller holds the lock, and `state` is from this acquisition (contracts 1 and
        // 2).
        unsafe { self.0.unlock(state) };
    }
}

#[cfg(feature = "lock_api_05")]
impl<L> fmt::Debug for LockApi05<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockApi05")
    }
}
