//! [`RawLock`]: the lock interface that the core requires.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::AtomicU32;

/// A lock without a value: a [`Platform`](crate::Platform) supplies it, and [`Mutex`](super::Mutex)
/// guards a value with it.
///
/// ```
/// use bindery::sync::{Mutex, RawLock};
/// use core::sync::atomic::{AtomicBool, Ordering};
///
/// struct Spinning(AtomicBool);
///
/// // SAFETY: 1. the exchange lets one caller in until `unlock`; its orderings are acquire and release.
/// unsafe impl RawLock for Spinning {
///     type State = ();
///     const UNLOCKED: Self = Self(AtomicBool::new(false));
///     fn lock(&self) {
///         while self.try_lock().is_none() {
///             core::hint::spin_loop();
///         }
///     }
///     fn try_lock(&self) -> Option<()> {
///         (!self.0.swap(true, Ordering::Acquire)).then_some(())
///     }
///     unsafe fn unlock(&self, (): ()) {
///         self.0.store(false, Ordering::Release);
///     }
/// }
///
/// static COUNT: Mutex<Spinning, u64> = Mutex::new(0);
/// *COUNT.lock() += 1;
/// assert_eq!(*COUNT.lock(), 1);
/// ```
///
/// # Safety
/// The implementor promises:
/// 1. **Mutual exclusion.** Between the return of [`RawLock::lock`], or a [`RawLock::try_lock`]
///    that returns a state, and the [`RawLock::unlock`] that takes this state, no other acquisition
///    of the same lock succeeds. The holder's writes before `unlock` are visible to the next
///    holder.
/// 2. **No unwinding.** None of the functions panics.
///
/// # Context
/// Context: may sleep, if the lock is a [`Platform::Mutex`](crate::Platform::Mutex). A
/// [`Platform::SpinLock`](crate::Platform::SpinLock) never sleeps: the core acquires it in read
/// sections, with table locks held, and wherever the embedder calls a function with the context
/// "spins".
pub unsafe trait RawLock: Sized + Send + Sync {
    /// State that the holder keeps from acquisition to release, for example whether interrupts were
    /// on. `()` for most locks.
    type State;

    /// An unlocked lock.
    const UNLOCKED: Self;

    /// Acquires the lock and waits while another caller holds it. Not reentrant.
    fn lock(&self) -> Self::State;

    /// Acquires the lock if it is free. Never waits.
    fn try_lock(&self) -> Option<Self::State>;

    /// For a task that must not sleep and has found the lock taken
    /// ([`FaultWait::poll`](crate::FaultWait::poll)): marks the lock, and returns a word and a value
    /// of it. When the marked lock is released, the word gets another value, and then the embedder
    /// wakes all tasks that wait for the word, as for
    /// [`Platform::unpark`](crate::Platform::unpark). If the lock is free by now, the word has
    /// another value already. The task competes for the lock with all others.
    ///
    /// `None`, the provided result, if the lock has no such word. Then a thread has to wait in the
    /// place of the task. Never waits.
    ///
    /// A poll makes the calls `try_lock`, `parked_on` and `unlock`, never in an interrupt handler.
    fn parked_on(&self) -> Option<(&AtomicU32, u32)> {
        None
    }

    /// Releases the lock.
    ///
    /// # Safety
    /// 1. The caller holds the lock, and `state` came from that acquisition.
    /// 2. The call runs on the thread that acquired the lock; for a lock that turns interrupts or
    ///    preemption off, therefore on the same CPU.
    unsafe fn unlock(&self, state: Self::State);
}
