//! The order of a deferred free, apart from the items and the readers, so that the very same code
//! runs under a model checker (`loom_model`).
//!
//! ```text
//!  unlinked --> open --(a grace period begins)--> closed --(it is over)--> ripe --> freed
//! ```

use crate::platform::GracePeriod;

/// What the order needs of the machine, and of what waits.
pub(super) trait Machine {
    /// What waits together.
    type Batch: Default;

    /// Whether nothing is in a batch.
    fn is_empty(batch: &Self::Batch) -> bool;
    /// Puts a batch after another one.
    fn append(&self, to: &mut Self::Batch, batch: Self::Batch);
    /// [`crate::Platform::grace_period`].
    fn grace_period(&self) -> GracePeriod;
    /// [`crate::Platform::is_over`].
    fn is_over(&self, period: GracePeriod) -> bool;
}

/// Whether every read section has ended that could have found what the caller has just unlinked.
/// The caller frees it at once then.
///
/// The period begins after the unlinking. The other way round:
/// 1. CPU A begins to count a grace period;
/// 2. CPU B enters a read section, and finds the VMA in the index;
/// 3. CPU A takes the VMA out, finds the period over, and frees it; CPU B reads it.
#[inline]
pub(super) fn no_reader_left<M: Machine>(machine: &M) -> bool {
    let period = machine.grace_period();
    machine.is_over(period)
}

/// What waits for readers. Behind a lock.
pub(super) struct Queue<B> {
    /// Collects what is unlinked.
    open: B,
    /// Everything in it was unlinked before its grace period began.
    closed: B,
    period: GracePeriod,
    /// What no reader knows any more.
    ripe: B,
}

impl<B: Default> Queue<B> {
    pub(super) fn new() -> Self {
        Self {
            open: B::default(),
            closed: B::default(),
            period: GracePeriod::default(),
            ripe: B::default(),
        }
    }

    /// Adds what was unlinked before.
    pub(super) fn push<M: Machine<Batch = B>>(&mut self, machine: &M, batch: B) {
        // Not to the closed batch, whose grace period may have begun before the unlinking.
        machine.append(&mut self.open, batch);
    }

    /// Puts back what was ripe and has not been freed.
    pub(super) fn put_back<M: Machine<Batch = B>>(&mut self, machine: &M, ripe: B) {
        machine.append(&mut self.ripe, ripe);
    }

    /// Takes what no reader knows any more, and begins the next grace period.
    pub(super) fn take_ripe<M: Machine<Batch = B>>(&mut self, machine: &M) -> B {
        loop {
            if !M::is_empty(&self.closed) {
                if !machine.is_over(self.period) {
                    break;
                }
                machine.append(&mut self.ripe, core::mem::take(&mut self.closed));
            }
            if M::is_empty(&self.open) {
                break;
            }
            // Once more: where no reader is left, this period is over already.
            self.closed = core::mem::take(&mut self.open);
            self.period = machine.grace_period();
        }
        core::mem::take(&mut self.ripe)
    }

    /// Takes what some readers may know, for a caller that waits for them before it frees it.
    pub(super) fn take_unripe<M: Machine<Batch = B>>(&mut self, machine: &M) -> B {
        let mut batch = core::mem::take(&mut self.closed);
        machine.append(&mut batch, core::mem::take(&mut self.open));
        batch
    }

    /// The batches. For the auditor.
    pub(super) fn batches(&self) -> [&B; 3] {
        [&self.open, &self.closed, &self.ripe]
    }
}
