//! [`SpinLock`]: a lock whose waiters spin, with interrupts off for the holder.
//!
//! If interrupt handlers also call the core, the holder must have interrupts off. Otherwise:
//! 1. A CPU acquires the lock.
//! 2. An interrupt arrives. Its handler tries to acquire the lock and spins.
//! 3. The handler never returns, so the holder never runs again.
//!
//! A waiter turns interrupts off before each attempt and back on between attempts, so that it
//! responds to other CPUs while it spins.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, Ordering};

use super::RawLock;

/// A platform's functions to turn the interrupts of the caller's CPU off and back on, and the step
/// of a waiter.
///
/// ```
/// use bindery::sync::{Interrupts, Mutex, SpinLock};
///
/// struct Flag;
///
/// impl Interrupts for Flag {
///     type State = bool;
///     fn disable() -> bool {
///         // x86-64: `pushf; cli`. AArch64: `mrs daif; msr daifset, #2`.
///         true
///     }
///     fn restore(was_enabled: bool) {
///         // `sti` if `was_enabled`; `msr daif`.
///     }
/// }
///
/// static TICKS: Mutex<SpinLock<Flag>, u64> = Mutex::new(0);
/// *TICKS.lock() += 1;
/// ```
///
/// # Context
/// Context: any. The functions never sleep, and are called with interrupts on or off.
pub trait Interrupts: 'static {
    /// The state to restore: whether interrupts were on.
    type State;

    /// Turns the interrupts of this CPU off and returns their previous state. Nests.
    fn disable() -> Self::State;

    /// Restores the state that [`Interrupts::disable`] returned. Nested calls restore in reverse
    /// order.
    fn restore(state: Self::State);

    /// Called repeatedly while another CPU holds the lock, with the waiter's interrupt state. A
    /// platform whose waiters must answer invalidations themselves does so here
    /// ([`Platform::relax`](crate::Platform::relax)).
    #[inline]
    fn relax() {
        core::hint::spin_loop();
    }
}

/// [`Interrupts`] of a machine that need not turn them off: handlers never call the core, or it is
/// always called with interrupts off.
///
/// ```
/// use bindery::sync::{AlwaysOff, SpinLock};
///
/// /// For a platform whose handlers never call the core.
/// type TableLock = SpinLock<AlwaysOff>;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AlwaysOff {}

impl Interrupts for AlwaysOff {
    type State = ();

    #[inline]
    fn disable() {}

    #[inline]
    fn restore((): ()) {}
}

/// A lock whose waiters spin. `I` turns interrupts off for the holder.
///
/// One byte; one atomic exchange to acquire, one store to release. Not fair: any of several waiters
/// may be next. It never sleeps, and may be acquired in interrupt handlers if `I` turns interrupts
/// off.
///
/// ```
/// use bindery::sync::{Mutex, SpinLock};
///
/// let list = Mutex::<SpinLock, [u32; 3]>::new([0; 3]);
/// list.lock()[1] = 5;
/// assert_eq!(*list.lock(), [0, 5, 0]);
/// ```
pub struct SpinLock<I = AlwaysOff> {
    locked: AtomicBool,
    /// Only functions of `I` are called: no value of it is stored or sent.
    interrupts: PhantomData<fn() -> I>,
}

// SAFETY: 1. only an exchange changes `locked` from false to true, and only the holder's store
// changes it back; the exchange acquires the store's release. 2. Nothing here panics, and a panic
// of `I` in `disable` or `restore` leaves the lock held forever.
unsafe impl<I: Interrupts> RawLock for SpinLock<I> {
    type State = I::State;

    const UNLOCKED: Self = Self { locked: AtomicBool::new(false), interrupts: PhantomData };

    #[inline]
    fn lock(&self) -> I::State {
        match self.try_lock() {
            Some(state) => state,
            None => self.lock_contended(),
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<I::State> {
        let state = I::disable();
        if self.locked.swap(true, Ordering::Acquire) {
            I::restore(state);
            return None;
        }
        Some(state)
    }

    #[inline]
    unsafe fn unlock(&self, state: I::State) {
        self.locked.store(false, Ordering::Release);
        I::restore(state);
    }
}

impl<I: Interrupts> SpinLock<I> {
    #[cold]
    #[inline(never)]
    fn lock_contended(&self) -> I::State {
        loop {
            // Plain loads keep the line shared while another CPU holds the lock.
            while self.locked.load(Ordering::Relaxed) {
                I::relax();
            }
            if let Some(state) = self.try_lock() {
                return state;
            }
        }
    }
}

impl<I> fmt::Debug for SpinLock<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let locked = self.locked.load(Ordering::Relaxed);
        f.write_str(if locked { "SpinLock(locked)" } else { "SpinLock(free)" })
    }
}
