//! The order of a drain, without the frames, so that a model checker (`drains_loom_model`) runs the
//! very same code.
//!
//! An allocation that finds nothing on the free lists moves the frames of all fronts there, and
//! tries the lists once more. While memory is short, most drains would find nothing. So a drain
//! that found nothing is remembered until the next frame enters a front ([`EMPTY`]).
//!
//! A drain counts as empty only if no frame has entered a front since it began:
//! 1. CPU A drains, and finds the front of CPU B empty;
//! 2. CPU B frees a frame into its front;
//! 3. CPU A finds the other fronts empty. CPU C must not fail without a drain of its own.
//!
//! The lock of each front orders the steps: a CPU that puts a frame into a front behind the drain
//! of A sees that A drains. Only one drain runs at a time:
//! 1. CPU A finds the front of CPU B empty, and CPU B puts a frame into it;
//! 2. CPU C begins to drain, which hides that A was disturbed;
//! 3. CPU A finds nothing, and CPU B allocates before C has reached its front.
//!
//! The pools of compressed memory ([`crate::swap`]) use the same order. A search of all pools for
//! room corresponds to a drain, and room that appears in a pool to a frame that enters a front.

use core::sync::atomic::{
    AtomicU8,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use crate::platform::Platform;
use crate::sync::Mutex;

/// Some front may have frames.
pub(crate) const UNKNOWN: u8 = 0;
/// A drain is under way, and no frame has entered a front since it began.
pub(crate) const DRAINING: u8 = 1;
/// No front has a frame.
pub(crate) const EMPTY: u8 = 2;

/// The state of the drains and the lock of a drain, as the order needs them.
pub(crate) trait Machine {
    /// Reads the state, with acquire ordering.
    fn state(&self) -> u8;
    /// Replaces any state by [`UNKNOWN`], with acquire and release ordering.
    fn disturb(&self);
    /// Writes [`DRAINING`], with release ordering.
    fn begin(&self);
    /// Replaces [`DRAINING`], with release ordering; leaves anything else.
    fn replace_draining(&self, state: u8);
    /// Runs `drain` while no other drain runs.
    fn one_at_a_time(&self, drain: impl FnOnce());
}

/// A frame has entered a front, whose lock is held.
#[inline]
pub(crate) fn note_put<M: Machine>(machine: &M) {
    if machine.state() != UNKNOWN {
        // Not a plain store: the end of a drain must be in the same modification order.
        machine.disturb();
    }
}

/// Drains all fronts by `drain`, which returns the number of frames that it has found, unless no
/// front has any. The caller tries the lists once more, whatever was found: another drain may have
/// moved frames there.
pub(crate) fn run<M: Machine>(machine: &M, drain: impl FnOnce() -> u64) {
    if machine.state() == EMPTY {
        return;
    }
    machine.one_at_a_time(|| {
        if machine.state() == EMPTY {
            return;
        }
        machine.begin();
        let found = drain();
        machine.replace_draining(if found == 0 { EMPTY } else { UNKNOWN });
    });
}

/// The drains of all fronts.
pub(crate) struct Drains<P: Platform> {
    /// Most frees only read it.
    state: AtomicU8,
    lock: Mutex<P::SpinLock, ()>,
}

impl<P: Platform> Drains<P> {
    /// No front has a frame.
    pub(crate) const fn new() -> Self {
        Self { state: AtomicU8::new(EMPTY), lock: Mutex::new(()) }
    }
}

impl<P: Platform> Drains<P> {
    /// Some front may have frames.
    pub(crate) const fn unknown() -> Self {
        Self { state: AtomicU8::new(UNKNOWN), lock: Mutex::new(()) }
    }
}

impl<P: Platform> Machine for Drains<P> {
    #[inline]
    fn state(&self) -> u8 {
        self.state.load(Acquire)
    }

    #[inline]
    fn disturb(&self) {
        self.state.swap(UNKNOWN, AcqRel);
    }

    fn begin(&self) {
        self.state.store(DRAINING, Release);
    }

    fn replace_draining(&self, state: u8) {
        let _disturbed = self.state.compare_exchange(DRAINING, state, Release, Relaxed);
    }

    #[cold]
    fn one_at_a_time(&self, drain: impl FnOnce()) {
        let _lock = self.lock.lock();
        drain();
    }
}
