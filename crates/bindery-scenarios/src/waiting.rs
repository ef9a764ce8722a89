//! Detects that a call waits for another call by counting instead of timing. A platform with these
//! locks and waits reports a wait at once.

use std::cell::RefCell;

use bindery::sync::{LockApi05, RawLock};

/// Rounds of `relax` after which a thread counts as waiting.
const PATIENCE: u32 = 256;

struct Told {
    relaxed: u32,
    tell: Box<dyn Fn()>,
}

thread_local! {
    static TOLD: RefCell<Option<Told>> = const { RefCell::new(None) };
}

/// Runs `work` and calls `tell` whenever this thread has to wait for another thread.
pub fn told<R>(tell: impl Fn() + 'static, work: impl FnOnce() -> R) -> R {
    TOLD.set(Some(Told { relaxed: 0, tell: Box::new(tell) }));
    let result = work();
    TOLD.set(None);
    result
}

/// Records that this thread is about to sleep.
pub fn sleeps() {
    TOLD.with_borrow(|told| {
        if let Some(told) = told {
            (told.tell)();
        }
    });
}

/// Records that this thread waits for one round.
pub fn relaxes() {
    let waits = TOLD.with_borrow_mut(|told| {
        let Some(told) = told else { return false };
        told.relaxed += 1;
        told.relaxed % PATIENCE == 0
    });
    if waits {
        sleeps();
    }
}

/// A lock that reports when a thread has to wait for it.
pub struct TellingLock(LockApi05<parking_lot::RawMutex>);

type State = <LockApi05<parking_lot::RawMutex> as RawLock>::State;

// SAFETY: the lock is parking_lot's and is used only here.
unsafe impl RawLock for TellingLock {
    const UNLOCKED: Self = Self(LockApi05::UNLOCKED);

    type State = State;

    fn lock(&self) -> State {
        self.0.try_lock().unwrap_or_else(|| {
            sleeps();
            self.0.lock()
        })
    }

    fn try_lock(&self) -> Option<State> {
        self.0.try_lock()
    }

    unsafe fn unlock(&self, state: State) {
        // SAFETY: 1. and 2. are the caller's obligations.
        unsafe { self.0.unlock(state) }
    }
}
