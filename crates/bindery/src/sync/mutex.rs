//! [`Mutex`]: a value and the lock that guards it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::AtomicU32;

use super::RawLock;

/// A value that only the holder of its lock can access. All mutexes of the core are of this type;
/// an embedder may use it for its own values.
///
/// `L` decides whether a waiter sleeps or spins, and whether interrupts are off for the holder.
///
/// ```
/// use bindery::sync::{Mutex, SpinLock};
///
/// static LAST: Mutex<SpinLock, u64> = Mutex::new(0);
///
/// let mut last = LAST.lock();
/// *last = 7;
/// assert!(LAST.try_lock().is_none(), "the guard lives");
/// drop(last);
/// assert_eq!(*LAST.lock(), 7);
/// ```
///
/// The value cannot be accessed without the lock:
///
/// ```compile_fail,E0616
/// # use bindery::sync::{Mutex, SpinLock};
/// let mutex = Mutex::<SpinLock, u64>::new(0);
/// let value = &mutex.value;
/// ```
///
/// nor after the guard was dropped:
///
/// ```compile_fail,E0505
/// # use bindery::sync::{Mutex, SpinLock};
/// let mutex = Mutex::<SpinLock, u64>::new(0);
/// let guard = mutex.lock();
/// let value = &*guard;
/// drop(guard);
/// assert_eq!(*value, 0);
/// ```
///
/// # Context
/// Context: any, except [`Mutex::lock`], which has that of `L`.
// The lock comes first: it shares a cache line with the first fields of the value.
#[repr(C)]
pub struct Mutex<L, T> {
    lock: L,
    value: UnsafeCell<T>,
}

// SAFETY: only the holder of the lock gets a reference to the value (contract 1 of `RawLock`), so
// sharing the mutex sends the value between threads, one at a time.
unsafe impl<L: RawLock, T: Send> Sync for Mutex<L, T> {}

impl<L: RawLock, T> Mutex<L, T> {
    /// An unlocked mutex around `value`.
    #[inline]
    pub const fn new(value: T) -> Self {
        Self { lock: L::UNLOCKED, value: UnsafeCell::new(value) }
    }

    /// Waits for the lock and acquires it until the guard is dropped.
    ///
    /// May sleep if `L` sleeps. May be called with interrupts off, or in an interrupt handler, if
    /// `L` allows that. Never called by the holder.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, L, T> {
        MutexGuard::new(self, self.lock.lock())
    }

    /// Acquires the lock if it is free. Never waits.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, L, T>> {
        Some(MutexGuard::new(self, self.lock.try_lock()?))
    }

    /// As [`RawLock::parked_on`].
    pub(crate) fn parked_on(&self) -> Option<(&AtomicU32, u32)> {
        self.lock.parked_on()
    }

    /// The value. The exclusive borrow replaces the lock.
    #[inline]
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<L: RawLock, T: Default> Default for Mutex<L, T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<L: RawLock, T: fmt::Debug> fmt::Debug for Mutex<L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.try_lock() {
            Some(guard) => f.debug_tuple("Mutex").field(&*guard).finish(),
            None => f.write_str("Mutex(locked)"),
        }
    }
}

/// The holder's access to the value of a [`Mutex`]. Dropping it releases the lock.
///
/// The guard cannot leave the thread that acquired the lock:
///
/// ```compile_fail,E0277
/// # use bindery::sync::{Mutex, SpinLock};
/// static MUTEX: Mutex<SpinLock, u64> = Mutex::new(0);
/// let guard = MUTEX.lock();
/// std::thread::spawn(move || drop(guard));
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct MutexGuard<'a, L: RawLock, T> {
    mutex: &'a Mutex<L, T>,
    state: ManuallyDrop<L::State>,
    /// Neither `Send` (contract 2 of [`RawLock::unlock`]) nor `Sync`.
    stays: PhantomData<*mut ()>,
}

impl<'a, L: RawLock, T> MutexGuard<'a, L, T> {
    /// `state` comes from an acquisition of the mutex's lock, which the guard takes over.
    #[inline]
    fn new(mutex: &'a Mutex<L, T>, state: L::State) -> Self {
        Self { mutex, state: ManuallyDrop::new(state), stays: PhantomData }
    }
}

impl<L: RawLock, T> Deref for MutexGuard<'_, L, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard's lock is held, so no other guard exists (contract 1 of `RawLock`), and
        // the borrow of this guard excludes `deref_mut`.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<L: RawLock, T> DerefMut for MutexGuard<'_, L, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; this guard is borrowed exclusively.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<L: RawLock, T> Drop for MutexGuard<'_, L, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the state is taken only here, and a guard is dropped only once.
        let state = unsafe { ManuallyDrop::take(&mut self.state) };
        // SAFETY: 1. the guard held the lock with this state; 2. the guard is not `Send`.
        unsafe { self.mutex.lock.unlock(state) };
    }
}

impl<L: RawLock, T: fmt::Debug> fmt::Debug for MutexGuard<'_, L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
