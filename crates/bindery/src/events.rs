//! Rare events of memory, counted for `/proc/vmstat`.

use core::sync::atomic::{AtomicU64, Ordering};

/// Counts of rare events so far ([`crate::Memory::events`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Events {
    /// Frames that were allocated, for any use.
    pub frames_allocated: u64,
    /// Frames that were freed.
    pub frames_freed: u64,
    /// Folios that a fault on anonymous memory allocated and mapped by one huge leaf.
    pub huge_faults: u64,
    /// Such folios that were allocated to collapse smaller ones.
    pub huge_collapses: u64,
    /// Folios that were split into smaller ones.
    pub folio_splits: u64,
    /// Huge leaves that were replaced by a table.
    pub leaf_splits: u64,
    /// Huge zero pages that were made: one at most.
    pub huge_zero_pages: u64,
}

/// The counters of those that happen seldom.
#[derive(Default)]
pub(crate) struct RareEvents {
    pub(crate) huge_faults: AtomicU64,
    pub(crate) huge_collapses: AtomicU64,
    pub(crate) folio_splits: AtomicU64,
    pub(crate) leaf_splits: AtomicU64,
    pub(crate) huge_zero_pages: AtomicU64,
}

impl RareEvents {
    /// Notes that it has happened once more.
    pub(crate) fn note(event: &AtomicU64) {
        event.fetch_add(1, Ordering::Relaxed);
    }

    /// All, with the frames that the allocator has counted.
    pub(crate) fn read(&self, frames_allocated: u64, frames_freed: u64) -> Events {
        let read = |event: &AtomicU64| event.load(Ordering::Relaxed);
        Events {
            frames_allocated,
            frames_freed,
            huge_faults: read(&self.huge_faults),
            huge_collapses: read(&self.huge_collapses),
            folio_splits: read(&self.folio_splits),
            leaf_splits: read(&self.leaf_splits),
            huge_zero_pages: read(&self.huge_zero_pages),
        }
    }
}
