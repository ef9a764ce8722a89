//! Locks.
//!
//! Interrupts are off in the kernel, so the holder of a spinning lock does nothing about them. A
//! waiter answers other CPUs itself ([`SpinLock`]). A lock that is held across a sleep must be a
//! [`SleepingMutex`].

use core::sync::atomic::{AtomicU32, Ordering, fence};

use bindery::sync::RawLock;
use bindery_parts::{FairLock, FairLockGuard, FairTicket};
use spin::Once;

use crate::{arch, kernel_lock};

/// Waits a moment for another CPU. Answers its requests, because it may wait for the answer: it
/// flushes TLBs with locks held, and this CPU has its interrupts off.
#[inline]
pub fn relax() {
    if kernel_lock::is_used() {
        arch::answer_apart();
    }
    arch::pause();
}

/// A lock whose waiters spin in the order in which they arrive, and answer the requests of other
/// CPUs meanwhile.
pub struct SpinLock(FairLock);

// SAFETY: 1. a thread holds the lock from its turn until it passes the turn on, and sees what the
// holders before it have written. 2. No function panics: `unlock` gets the ticket of this lock.
unsafe impl RawLock for SpinLock {
    type State = FairTicket;

    const UNLOCKED: Self = Self(FairLock::new());

    #[inline]
    fn lock(&self) -> FairTicket {
        self.0.lock(relax).into_ticket()
    }

    #[inline]
    fn try_lock(&self) -> Option<FairTicket> {
        self.0.try_lock().map(FairLockGuard::into_ticket)
    }

    #[inline]
    unsafe fn unlock(&self, ticket: FairTicket) {
        self.0.unlock(ticket);
    }
}

/// No thread has the lock.
const FREE: u32 = 0;
/// A thread holds the lock.
const TAKEN: u32 = 1;
/// A thread holds the lock, and others may be parked on the word.
const WANTED: u32 = 2;

/// The number of times that a waiter looks at a sleeping lock before it sleeps, if several CPUs run
/// threads: a holder on another CPU has most locks for a shorter time than a sleep takes.
const PATIENCE: u32 = 1000;

/// A lock whose waiters sleep.
pub struct SleepingLock(AtomicU32);

impl SleepingLock {
    /// Takes the lock if its holder gives it back soon.
    #[cold]
    fn lock_soon(&self) -> bool {
        for _ in 0..PATIENCE {
            // The holder of this lock may wait for the kernel's.
            if kernel_lock::is_held() && kernel_lock::is_wanted() {
                return false;
            }
            if self.0.load(Ordering::Relaxed) == FREE && self.try_lock().is_some() {
                return true;
            }
            relax();
        }
        false
    }
}

// SAFETY: 1. the word leaves `FREE` by one exchange at a time, which acquires what the holder
// released, and only the holder resets it. 2. Parking does not panic.
unsafe impl RawLock for SleepingLock {
    type State = ();

    const UNLOCKED: Self = Self(AtomicU32::new(FREE));

    #[inline]
    fn lock(&self) {
        if self.try_lock().is_some() {
            return;
        }
        if kernel_lock::is_used() && self.lock_soon() {
            return;
        }
        // This thread does not know whether others wait, so it marks the lock as contended.
        while self.0.swap(WANTED, Ordering::Acquire) != FREE {
            park(&self.0, WANTED);
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<()> {
        self.0.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).map(drop).ok()
    }

    fn parked_on(&self) -> Option<(&AtomicU32, u32)> {
        // If this fails, the lock is contended already, or free.
        let _ = self.0.compare_exchange(TAKEN, WANTED, Ordering::Relaxed, Ordering::Relaxed);
        Some((&self.0, WANTED))
    }

    #[inline]
    unsafe fn unlock(&self, (): ()) {
        if self.0.swap(FREE, Ordering::Release) == WANTED {
            unpark(&self.0);
        }
    }
}

/// The service that parks threads. Its functions do not panic.
pub trait Parking: Sync {
    /// As [`park`].
    fn park(&self, word: &AtomicU32, expected: u32);

    /// Wakes all threads that are parked on the word at this address. Called with or without the
    /// kernel's lock, and with spin locks held.
    fn unpark(&self, word: *const AtomicU32);
}

static PARKING: Once<&'static dyn Parking> = Once::new();

/// The number of parked threads.
static PARKED: AtomicU32 = AtomicU32::new(0);

/// Registers the service that parks threads.
pub fn set_parking(parking: &'static dyn Parking) {
    PARKING.call_once(|| parking);
}

/// Called by the service when the number of parked threads changes.
pub fn set_parked(count: u32) {
    PARKED.store(count, Ordering::Relaxed);
}

/// Sleeps until [`unpark`] is called for `word`; returns at once if the word is not `expected`. May
/// return early. In the idle loop and at boot it always returns early, because no other thread
/// could change the word during the sleep.
pub fn park(word: &AtomicU32, expected: u32) {
    match PARKING.get() {
        Some(parking) => kernel_lock::inside(|| parking.park(word, expected)),
        None => relax(),
    }
}

/// Wakes all threads that are parked on the word at this address. The word may have been freed.
#[cold]
#[inline(never)]
pub fn unpark(word: *const AtomicU32) {
    if kernel_lock::is_used() {
        // The change of the word before the count: a thread that is about to sleep counts itself
        // before it reads the word again.
        fence(Ordering::SeqCst);
    }
    if PARKED.load(Ordering::Relaxed) > 0
        && let Some(parking) = PARKING.get()
    {
        parking.unpark(word);
    }
}

/// A lock for short sections without a sleep or a copy to or from a program.
pub type Mutex<T> = bindery::sync::Mutex<SpinLock, T>;

/// A lock for sections that may sleep.
pub type SleepingMutex<T> = bindery::sync::Mutex<SleepingLock, T>;
