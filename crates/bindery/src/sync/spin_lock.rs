//! [`SpinLock`]: a lock whose waiters spin, with interrupts off for the holder.
//!
//! Why interrupts are off for the holder, if handlers call the core as well:
//! 1. A CPU acquires the lock.
//! 2. An interrupt arrives. Its handler wants the lock, and spins.
//! 3. The holder runs again when the handler returns: never.
//!
//! A waiter turns interrupts off before it tries, and back on between two attempts, so that it
//! answers other CPUs while it spins.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, Ordering};

use super::RawLock;

/// How a platform turns the interrupts of the caller's CPU off and back on: two functions, and what
/// a waiter does.
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
    /// Whether interrupts were on: what [`Interrupts::restore`] restores.
    type State;

    /// Turns the interrupts of this CPU off and returns how they were. Nests.
    fn disable() -> Self::State;

    /// Restores the state that [`Interrupts::disable`] returned. Of nested calls, the last is
    /// restored first.
    fn restore(state: Self::State);

    /// Called again and again while another CPU holds the lock, with interrupts as the waiter had
    /// them. A platform whose waiters must answer invalidations themselves does so here
    /// ([`Platform::relax`](crate::Platform::relax)).
    #[inline]
    fn relax() {
        core::hint::spin_loop();
    }
}

/// [`Interrupts`] of a machine where there is nothing to turn off: the core is never called with
/// interrupts on and from their handlers as well.
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
/// One byte; one atomic exchange to acquire, one store to release. Not fair: among several waiters
/// any may be next. It never sleeps, and may be acquired in interrupt handlers if `I` turns
/// interrupts off.
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
    /// Only functions of `I` are called: no value of it is here, or sent anywhere.
    interrupts: PhantomData<fn() -> I>,
}

// SAFETY: 1. `locked` goes from false to true by one exchange, and back by the holder's store
// alone; the exchange acquires what the store released. 2. Nothing here panics, and a panic of `I`
// in `disable` or `restore` leaves the lock as a lock that is held forever.
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
