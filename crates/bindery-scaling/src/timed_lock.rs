//! A lock that measures its hold times.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Instant;

use bindery::sync::{RawLock, SpinLock};

thread_local! {
    /// Whether the running thread counts holds.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
    /// The holds of the running thread, by the lock's address.
    static HOLDS: RefCell<HashMap<usize, Hold>> = RefCell::new(HashMap::new());
}

/// All holds of one lock.
#[derive(Clone, Copy, Default, Debug)]
pub struct Hold {
    /// The total hold time.
    pub nanoseconds: u64,
    /// The number of holds.
    pub count: u64,
}

/// The nanoseconds between two readings of the clock, by which each hold appears longer.
pub fn clock_cost() -> f64 {
    const READINGS: u32 = 10_000;
    let total: u128 = (0..READINGS).map(|_| Instant::now().elapsed().as_nanos()).sum();
    total as f64 / f64::from(READINGS)
}

/// The holds of the running thread during `work`, by the lock's address.
pub fn holds_during(work: impl FnOnce()) -> HashMap<usize, Hold> {
    HOLDS.with_borrow_mut(HashMap::clear);
    COUNTS.set(true);
    work();
    COUNTS.set(false);
    HOLDS.take()
}

/// A spin lock that adds up the running thread's hold times.
pub struct TimedLock(SpinLock);

// SAFETY: 1. the inner lock provides exclusion. 2. Neither the inner lock nor the clock panics, and
// the map is borrowed only for an insertion, which acquires no lock of this type.
unsafe impl RawLock for TimedLock {
    type State = Option<Instant>;

    const UNLOCKED: Self = Self(SpinLock::UNLOCKED);

    fn lock(&self) -> Self::State {
        self.0.lock();
        COUNTS.get().then(Instant::now)
    }

    fn try_lock(&self) -> Option<Self::State> {
        self.0.try_lock()?;
        Some(COUNTS.get().then(Instant::now))
    }

    unsafe fn unlock(&self, since: Self::State) {
        let held = since.map(|since| since.elapsed().as_nanos() as u64);
        // SAFETY: 1. and 2. are the caller's obligations.
        unsafe { self.0.unlock(()) };
        if let Some(held) = held {
            let address = std::ptr::from_ref(self).addr();
            HOLDS.with_borrow_mut(|holds| {
                let hold = holds.entry(address).or_default();
                hold.nanoseconds += held;
                hold.count += 1;
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_holds_during_the_work_count() {
        let (first, second) = (TimedLock::UNLOCKED, TimedLock::UNLOCKED);
        let hold = |lock: &TimedLock| {
            let state = lock.lock();
            // SAFETY: 1. the line above; 2. the same thread.
            unsafe { lock.unlock(state) };
        };
        hold(&second);
        let holds = holds_during(|| {
            hold(&first);
            hold(&first);
        });
        assert_eq!(holds.keys().collect::<Vec<_>>(), [&std::ptr::from_ref(&first).addr()]);
        assert!(holds.values().all(|hold| hold.count == 2));
    }
}
