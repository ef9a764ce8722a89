//! The order of a deferred free, separate from the items and the readers, so that a model checker
//! (`loom_model`) runs the same code.
//!
//! ```text
//!  unlinked --> open --(a grace period begins)--> closed --(it is over)--> ripe --> freed
//! ```

use crate::platform::GracePeriod;

/// The machine and the items, as the protocol needs them.
pub(super) trait QueueMachine {
    /// Items that wait together.
    type Batch: Default;

    /// Whether a batch is empty.
    fn is_empty(batch: &Self::Batch) -> bool;
    /// Appends a batch to another.
    fn append(&self, to: &mut Self::Batch, batch: Self::Batch);
    /// [`crate::Platform::grace_period`].
    fn grace_period(&self) -> GracePeriod;
    /// [`crate::Platform::is_over`].
    fn is_over(&self, period: GracePeriod) -> bool;
}

/// Whether every read section that could have found the just unlinked items has ended. If so, the
/// caller frees the items at once.
///
/// The grace period begins after the unlinking. In the reverse order:
/// 1. CPU A begins a grace period;
/// 2. CPU B enters a read section and finds the VMA in the index;
/// 3. CPU A removes the VMA, finds the grace period over, and frees the VMA while CPU B reads it.
#[inline]
pub(super) fn no_reader_left<M: QueueMachine>(machine: &M) -> bool {
    let period = machine.grace_period();
    machine.is_over(period)
}

/// The items that wait for a grace period. Guarded by a lock.
///
/// # Drains
/// A drain frees all items of all queues. Each drain has a unique number:
/// 1. It closes the open items of each queue under its number ([`Queue::close_for`]).
/// 2. It waits for the readers once, for all queues together.
/// 3. It takes from each queue the items that are closed under its number
///    ([`Queue::take_drained`]).
///
/// If a later drain closes newer items before step 3, all closed items get the later drain's
/// number, because only its wait is long enough for all of them. The earlier drain then waits for
/// the later drain. All drains visit the queues in the same order, so no two of them wait for each
/// other.
///
/// Only one thread at a time frees items that it took from a queue. A drain also waits for that
/// thread. So after a drain has passed a queue, no item that was unlinked before the drain remains
/// in the queue or with a thread that is freeing it. The exception is items that were handed over
/// between queues during the drain; the drain then restarts.
pub(super) struct Queue<B> {
    /// Collects newly unlinked items.
    open: B,
    /// The closed items, which were unlinked before their grace period began.
    closed: B,
    period: GracePeriod,
    /// The drain that waits for the readers of the closed items; 0 for none.
    drain: u64,
    /// Items whose grace period is over.
    ripe: B,
    /// Whether a thread is freeing items that it has taken. It then calls [`Queue::end_free`].
    is_freeing: bool,
    /// Whether a drain waits for that thread.
    is_awaited: bool,
}

impl<B: Default> Queue<B> {
    pub(super) fn new() -> Self {
        Self {
            open: B::default(),
            closed: B::default(),
            period: GracePeriod::default(),
            drain: 0,
            ripe: B::default(),
            is_freeing: false,
            is_awaited: false,
        }
    }

    /// Adds items that were unlinked before.
    pub(super) fn push<M: QueueMachine<Batch = B>>(&mut self, machine: &M, batch: B) {
        // Not added to the closed batch, whose grace period may have begun before the unlinking.
        machine.append(&mut self.open, batch);
    }

    /// Takes the items whose grace period is over and begins the next grace period. `None`: no item
    /// is ripe, or another thread is freeing items.
    pub(super) fn take_ripe<M: QueueMachine<Batch = B>>(&mut self, machine: &M) -> Option<B> {
        if self.is_freeing {
            return None;
        }
        self.ripen(machine);
        self.take_all_ripe::<M>()
    }

    /// Completes [`Queue::take_ripe`] or [`Queue::take_drained`]: puts back the items that were not
    /// freed. Returns whether a drain waits for this.
    pub(super) fn end_free<M: QueueMachine<Batch = B>>(&mut self, machine: &M, left: B) -> bool {
        machine.append(&mut self.ripe, left);
        self.is_freeing = false;
        core::mem::take(&mut self.is_awaited)
    }

    /// Closes all items for a drain with this number. Returns whether it must wait for readers
    /// before it calls [`Queue::take_drained`].
    pub(super) fn close_for<M: QueueMachine<Batch = B>>(
        &mut self,
        machine: &M,
        drain: u64,
    ) -> bool {
        self.ripen(machine);
        if M::is_empty(&self.closed) {
            return false;
        }
        // If no newer items exist, a drain that already waits will free the closed items.
        if self.drain == 0 || !M::is_empty(&self.open) {
            machine.append(&mut self.closed, core::mem::take(&mut self.open));
            self.period = machine.grace_period();
            self.drain = drain;
        }
        true
    }

    /// Takes all ripe items and all items that were closed for the drain with this number. The
    /// drain has waited for the readers since. `None`: another thread is to free some of these
    /// items; the drain waits for its [`Queue::end_free`] and retries.
    pub(super) fn take_drained<M: QueueMachine<Batch = B>>(
        &mut self,
        machine: &M,
        drain: u64,
    ) -> Option<B> {
        if self.is_freeing || self.drain != 0 && self.drain != drain {
            self.is_awaited = true;
            return None;
        }
        if self.drain == drain {
            self.drain = 0;
            machine.append(&mut self.ripe, core::mem::take(&mut self.closed));
        }
        Some(self.take_all_ripe::<M>().unwrap_or_default())
    }

    /// Removes all items, which the caller adds to another queue as open items with a new grace
    /// period. Excludes items that another thread is freeing.
    pub(super) fn take_all<M: QueueMachine<Batch = B>>(&mut self, machine: &M) -> B {
        let mut all = core::mem::take(&mut self.open);
        machine.append(&mut all, core::mem::take(&mut self.closed));
        machine.append(&mut all, core::mem::take(&mut self.ripe));
        self.drain = 0;
        all
    }

    /// The batches. For the auditor.
    pub(super) fn batches(&self) -> [&B; 3] {
        [&self.open, &self.closed, &self.ripe]
    }

    /// Moves items whose grace period is over to the ripe items and begins the next grace period.
    fn ripen<M: QueueMachine<Batch = B>>(&mut self, machine: &M) {
        loop {
            if !M::is_empty(&self.closed) {
                if !machine.is_over(self.period) {
                    return;
                }
                self.drain = 0;
                machine.append(&mut self.ripe, core::mem::take(&mut self.closed));
            }
            if M::is_empty(&self.open) {
                return;
            }
            // Checked once more: without readers, the new grace period is already over.
            self.closed = core::mem::take(&mut self.open);
            self.period = machine.grace_period();
        }
    }

    fn take_all_ripe<M: QueueMachine<Batch = B>>(&mut self) -> Option<B> {
        self.is_freeing = !M::is_empty(&self.ripe);
        self.is_freeing.then(|| core::mem::take(&mut self.ripe))
    }
}
