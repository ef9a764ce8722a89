//! The source addresses of moves in progress. A move releases its locks before it flushes, so TLBs
//! may still hold entries of these addresses.

#[cfg(all(test, any(loom, shuttle)))]
use crate::sync::model::sync::atomic::AtomicU64;
#[cfg(not(all(test, any(loom, shuttle))))]
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering;

use crate::addr::VirtRange;

/// The moves of several pieces in progress in a tree. At most one of them holds its VMAs for
/// writing, because it also holds the mutex of the address space, and its source is recorded. Moves
/// that hold VMAs for reading ([`super::pages`]) are only counted.
pub(crate) struct Moving {
    start: AtomicU64,
    end: AtomicU64,
    beside_faults: AtomicU64,
}

impl Moving {
    pub(crate) fn new() -> Self {
        let none = || AtomicU64::new(0);
        Self { start: none(), end: none(), beside_faults: none() }
    }

    /// The addresses under which TLBs may hold pages that a move in progress has carried elsewhere:
    /// the source, or `everything` if several sources are possible.
    #[cold]
    pub(crate) fn sources(&self, everything: VirtRange) -> Option<VirtRange> {
        let many = self.beside_faults.load(Ordering::Acquire) > 0;
        if many { Some(everything) } else { self.source() }
    }

    /// Called before a move concurrent with faults marks its first table.
    pub(crate) fn begin_beside_faults(&self) {
        // Relaxed: the lock of the marked table publishes the count.
        self.beside_faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Called after the move's last flush.
    pub(crate) fn end_beside_faults(&self) {
        self.beside_faults.fetch_sub(1, Ordering::Release);
    }

    /// The source of a move that holds its VMAs for writing, if such a move is in progress. The
    /// caller has locked a table and found a mark of the move there, so `begin` precedes this call.
    /// If `end` also precedes it, so does the flush, and any result is correct.
    pub(crate) fn source(&self) -> Option<VirtRange> {
        let (start, end) = (self.start.load(Ordering::Acquire), self.end.load(Ordering::Acquire));
        (start < end).then(|| VirtRange::raw(start, end))
    }

    /// Called before the first table is marked, and before the destination is in any tree of the
    /// reverse map.
    pub(crate) fn begin(&self, source: VirtRange) {
        self.start.store(source.start().0, Ordering::Release);
        self.end.store(source.end().0, Ordering::Release);
    }

    /// Called after the last flush.
    pub(crate) fn end(&self) {
        self.end.store(0, Ordering::Release);
    }
}
