//! The order of a drain, separate from the frames, so that a model checker (`drains_loom_model`)
//! runs the same code.
//!
//! An allocation that finds nothing on the free lists moves the frames of all fronts there and
//! tries the lists once more. While memory is short, most drains would find nothing. So an empty
//! drain is remembered until the next frame enters a front ([`EMPTY`]).
//!
//! A drain counts as empty only if no frame has entered a front since it began:
//! 1. CPU A drains and finds the front of CPU B empty;
//! 2. CPU B frees a frame into its front;
//! 3. CPU A finds the other fronts empty. An allocation by CPU C must not fail without a drain of
//!    its own.
//!
//! The locks of the fronts order the steps: a CPU that adds a frame to a front that A has passed
//! sees A's drain in progress. Only one drain runs at a time. Otherwise:
//! 1. CPU A finds the front of CPU B empty, and CPU B adds a frame to it;
//! 2. CPU C begins to drain, which conceals the disturbance from A;
//! 3. CPU A finds nothing, and CPU B allocates before C reaches B's front.
//!
//! The pools of compressed memory ([`crate::swap`]) use the same protocol. A search of all pools
//! for room corresponds to a drain, and room that appears in a pool corresponds to a frame that
//! enters a front.

use core::sync::atomic::{
    AtomicU8,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use crate::platform::Platform;
use crate::sync::Mutex;

/// Some front may have frames.
pub(crate) const UNKNOWN: u8 = 0;
/// A drain is in progress, and no frame has entered a front since it began.
pub(crate) const DRAINING: u8 = 1;
/// No front has a frame.
pub(crate) const EMPTY: u8 = 2;

/// The drain state and drain lock, as the protocol needs them.
pub(crate) trait Machine {
    /// Reads the state, with acquire ordering.
    fn state(&self) -> u8;
    /// Replaces any state by [`UNKNOWN`], with acquire and release ordering.
    fn disturb(&self);
    /// Writes [`DRAINING`], with release ordering.
    fn begin(&self);
    /// Replaces [`DRAINING`] by `state`, with release ordering; leaves any other state unchanged.
    fn replace_draining(&self, state: u8);
    /// Runs `drain` while no other drain runs.
    fn one_at_a_time(&self, drain: impl FnOnce());
}

/// Records that a frame has entered a front, whose lock is held.
#[inline]
pub(crate) fn note_put<M: Machine>(machine: &M) {
    if machine.state() != UNKNOWN {
        // Not a plain store: a read-modify-write continues the release sequence of the store that
        // it replaces.
        machine.disturb();
    }
}

/// Unless all fronts are known to be empty, drains them by `drain`, which returns the number of
/// frames it found. The caller then tries the lists once more, regardless of the result, because
/// another drain may have moved frames there.
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
    /// Most frees only read this word.
    state: AtomicU8,
    lock: Mutex<P::SpinLock, ()>,
}

impl<P: Platform> Drains<P> {
    /// The state when no front has a frame.
    pub(crate) const fn new() -> Self {
        Self { state: AtomicU8::new(EMPTY), lock: Mutex::new(()) }
    }
}

impl<P: Platform> Drains<P> {
    /// The state when some front may have frames.
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
