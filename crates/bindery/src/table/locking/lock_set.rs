//! The locks that an operation holds, and the limits on its work while it holds them.

use arrayvec::ArrayVec;

use crate::addr::{Frame, VirtAddr, VirtRange};

use super::LockTree;

/// The maximum number of entries that an operation reads in one lock span.
pub(crate) const SPAN_ENTRIES: u32 = 1024;

/// The maximum number of tables that an operation detaches in one lock span.
pub(crate) const SPAN_DETACHED: u32 = 512;

/// The maximum number of locks of one operation. On each of five levels, an operation on a range
/// locks at most four tables: two that lie entirely inside the range, with 512 of its entries each,
/// and two at its edges. An edge may split a huge leaf on two levels. A move locks two or three
/// tables of its own level per side, and two on each level above.
const CAPACITY: usize = 32;

/// The locks that an operation holds.
pub(crate) struct LockSet {
    tables: ArrayVec<Frame, CAPACITY>,
    /// Whether one of the tables was pending when it was locked.
    pending: bool,
    /// The number of entries that may still be read, and the number of tables that may still be
    /// detached.
    pub(super) entries: u32,
    detached: u32,
    /// The end of the locked part, if it lies before the end of the range.
    pub(super) stop: u64,
}

impl LockSet {
    // Not `const`: a constant would be copied in full, including the room for tables.
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self {
            tables: ArrayVec::new(),
            pending: false,
            entries: SPAN_ENTRIES,
            detached: SPAN_DETACHED,
            stop: u64::MAX,
        }
    }

    /// The end of the part of `range` that the locks serve.
    #[inline]
    pub(crate) fn end_of(&self, range: VirtRange) -> VirtAddr {
        VirtAddr(range.end().0.min(self.stop))
    }

    /// Counts `count` entries from `start` on against the limit. Returns `false` if they exceed it,
    /// in which case the locks end at `start`.
    #[inline]
    pub(super) fn admit_entries(&mut self, count: u32, start: VirtAddr) -> bool {
        if count > self.entries {
            self.stop = start.0;
            return false;
        }
        self.entries -= count;
        true
    }

    /// Counts up to `count` entries that refer to tables to be detached against the limit. Returns
    /// the number of admitted entries.
    #[inline]
    pub(super) fn admit_detached(&mut self, count: u32) -> u32 {
        let count = count.min(self.entries).min(self.detached);
        self.entries -= count;
        self.detached -= count;
        count
    }

    /// Whether one of the tables was pending when it was locked, so that the caller must flush
    /// before it acts.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// The locked tables.
    pub(crate) fn tables(&self) -> &[Frame] {
        &self.tables
    }

    /// Takes ownership of the lock of `table`, which the caller has acquired.
    pub(crate) fn push(&mut self, table: Frame) {
        self.tables.push(table);
    }

    pub(crate) fn len(&self) -> usize {
        self.tables.len()
    }

    /// Releases all locks in reverse order.
    pub(crate) fn release<T: LockTree>(&mut self, tree: &T) {
        self.release_all(|table| tree.unlock(table));
    }

    /// As [`LockSet::release`], by `unlock`.
    #[inline(always)]
    pub(crate) fn release_all(&mut self, unlock: impl Fn(Frame)) {
        while let Some(table) = self.tables.pop() {
            unlock(table);
        }
    }

    pub(super) fn acquire<T: LockTree>(&mut self, tree: &T, table: Frame) {
        tree.lock(table);
        self.admit(tree, table);
    }

    /// Takes ownership of the lock of a table of the tree.
    pub(super) fn admit<T: LockTree>(&mut self, tree: &T, table: Frame) {
        self.pending |= tree.is_pending(table);
        self.tables.push(table);
    }
}
