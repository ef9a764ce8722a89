//! The kernel's lock: of all CPUs, the holder alone runs code of the kernel.
//!
//! A CPU takes the lock on each entry from a program, and gives it back on the return and while it
//! idles. A switch of threads leaves the lock with the CPU. So code between two sleeps stays atomic
//! on any number of CPUs, and only programs run at the same time.
//!
//! The lock has no order. With an order, it would often wait for a CPU of an emulator that does not
//! run at the moment. A holder that stays in the kernel for long lets others have it ([`offer`]).
//!
//! The only code that runs without the lock answers requests of other CPUs ([`arch::answer`]), and
//! touches nothing but its own TLB. A CPU that waits for the lock answers them, too, because the
//! holder may wait for its answer.
//!
//! As long as only the first CPU runs threads, there is no lock to take.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::arch;

/// Whether several CPUs run threads. Never reset.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Whether a CPU holds the lock.
static IS_HELD: AtomicBool = AtomicBool::new(false);

/// The number of CPUs that wait for the lock.
static WAITING: AtomicU32 = AtomicU32::new(0);

/// The number of times that [`offer`] looks whether another CPU has taken the lock.
const PATIENCE: u32 = 1000;

/// Whether several CPUs run threads.
#[inline]
pub fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed)
}

/// From here on there is a lock, and the calling CPU holds it. Called once, while no other CPU runs
/// threads.
pub fn begin() {
    IS_HELD.store(true, Ordering::Relaxed);
    IS_USED.store(true, Ordering::Release);
}

/// Takes the lock. The caller does not hold it.
#[inline]
pub fn lock() {
    if is_used() && !try_to_take() {
        wait();
    }
}

#[inline]
fn try_to_take() -> bool {
    IS_HELD.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

#[cold]
fn wait() {
    WAITING.fetch_add(1, Ordering::Relaxed);
    while IS_HELD.load(Ordering::Relaxed) || !try_to_take() {
        arch::answer();
        core::hint::spin_loop();
    }
    WAITING.fetch_sub(1, Ordering::Relaxed);
}

/// Gives the lock back. The caller holds it.
#[inline]
pub fn unlock() {
    if is_used() {
        IS_HELD.store(false, Ordering::Release);
    }
}

/// Whether other CPUs wait for the lock, which the caller holds.
#[inline]
pub fn is_wanted() -> bool {
    is_used() && WAITING.load(Ordering::Relaxed) != 0
}

/// Lets the CPUs that wait for the lock have it first, unless none of them takes it soon. For the
/// caller, this is a sleep.
pub fn offer() {
    if !is_wanted() {
        return;
    }
    unlock();
    for _ in 0..PATIENCE {
        if IS_HELD.load(Ordering::Relaxed) || WAITING.load(Ordering::Relaxed) == 0 {
            break;
        }
        arch::answer();
        core::hint::spin_loop();
    }
    lock();
}
