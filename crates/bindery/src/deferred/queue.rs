//! The order of a deferred free, without the items and the readers, so that a model checker
//! (`loom_model`) runs the very same code.
//!
//! ```text
//!  unlinked --> open --(a grace period begins)--> closed --(it is over)--> ripe --> freed
//! ```

use crate::platform::GracePeriod;

/// The machine and the items, as the order needs them.
pub(super) trait Machine {
    /// Items that wait together.
    type Batch: Default;

    /// Whether a batch is empty.
    fn is_empty(batch: &Self::Batch) -> bool;
    /// Appends a batch to another one.
    fn append(&self, to: &mut Self::Batch, batch: Self::Batch);
    /// [`crate::Platform::grace_period`].
    fn grace_period(&self) -> GracePeriod;
    /// [`crate::Platform::is_over`].
    fn is_over(&self, period: GracePeriod) -> bool;
}

/// Whether every read section has ended that could have found the items that the caller has just
/// unlinked. If so, the caller frees them at once.
///
/// The period begins after the unlinking. The other way round:
/// 1. CPU A begins to count a grace period;
/// 2. CPU B enters a read section, and finds the VMA in the index;
/// 3. CPU A removes the VMA, finds the period over, and frees it; CPU B reads it.
#[inline]
pub(super) fn no_reader_left<M: Machine>(machine: &M) -> bool {
    let period = machine.grace_period();
    machine.is_over(period)
}

/// The items that wait for readers. Guarded by a lock.
pub(super) struct Queue<B> {
    /// Collects newly unlinked items.
    open: B,
    /// Its items were unlinked before its grace period began.
    closed: B,
    period: GracePeriod,
    /// Items whose readers have all left.
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

    /// Adds items that were unlinked before.
    pub(super) fn push<M: Machine<Batch = B>>(&mut self, machine: &M, batch: B) {
        // Not to the closed batch, whose grace period may have begun before the unlinking.
        machine.append(&mut self.open, batch);
    }

    /// Puts back ripe items that were not freed.
    pub(super) fn put_back<M: Machine<Batch = B>>(&mut self, machine: &M, ripe: B) {
        machine.append(&mut self.ripe, ripe);
    }

    /// Takes the items whose readers have all left, and begins the next grace period.
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
            // Once more: if no reader is left, this period is over already.
            self.closed = core::mem::take(&mut self.open);
            self.period = machine.grace_period();
        }
        core::mem::take(&mut self.ripe)
    }

    /// Takes the items that some readers may know, for a caller that waits for the readers before
    /// it frees them.
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
