//! The locking protocol of page tables, separated from the tables' contents so that exactly the
//! same code runs under a model checker (`loom_model`).
//!
//! # What is locked
//! Each table has a lock. An operation on a range holds the *cover*, which is the lowest table that
//! spans the range, and the existing tables below it that overlap the range, down to a floor. Two
//! operations therefore share no lock if their covers differ and neither cover is above the other.
//!
//! If the range is exactly that of one entry, the cover is the table that contains the entry rather
//! than the table to which the entry refers, because detaching a table needs the lock of its
//! parent.
//!
//! # In which order
//! Locks are acquired in pre-order: parents before children, lower addresses before higher ones. A
//! move acquires the locks of both its ranges in one pass in that order. Two successive passes
//! would deadlock:
//! 1. CPU A moves from table X to table Y, and locks X.
//! 2. CPU B moves from Y to X, and locks Y.
//! 3. Each CPU waits for the other.
//!
//! There is one exception. A table that is being detached is locked only to be marked, and may
//! precede an edge that is already held. A detaching operation therefore excludes every move from
//! the range by holding the range's VMAs for writing. Otherwise:
//! 1. CPU A unmaps pages up to an edge in table Y and holds Y.
//! 2. CPU B moves from X, in the middle of A's range, to Y: it holds X and waits for Y.
//! 3. CPU A detaches X and waits for CPU B's lock in order to mark X.
//!
//! # How the cover is found
//! The cover is found without locks, inside a read section, so no table is freed during the
//! descent. If the cover was detached before it was locked, it is marked *stray*, and the descent
//! starts again:
//! 1. CPU A descends to table X and is about to lock it.
//! 2. CPU B, holding X's parent, detaches X, locks X, marks it stray and unlocks it.
//! 3. CPU A locks X. Without the mark, CPU A would now map pages where no walker looks.
//!
//! The tables below a detached table are also locked and marked, but later: one at a time, with no
//! other lock held, before their contents are dropped. Until then, a thread that locks one of these
//! tables finds by a second descent, as below, that the table is not in the tree. The detaching
//! thread waits for a thread that has already locked one; that thread may finish its work, since no
//! walker finds the table anyway. Detaching by one entry therefore costs one entry and one mark
//! under the locks, whatever lies below. This does not hold if no VMA excludes the threads that
//! fill entries ([`super::stray::try_mark_stray`]): in that case all tables are marked first, and
//! they are of level 1.
//!
//! A table that is *moved* is not marked, because it stays part of the tree at another address. A
//! thread that has locked the cover therefore descends once more, and starts again unless the table
//! is still in its place:
//! 1. CPU A, writing to a program's memory at X, descends to the table of X and waits for the
//!    table's lock.
//! 2. CPU B moves the table from X to Y and returns; another page is mapped at X.
//! 3. CPU A acquires the lock. Without the second descent, CPU A would write to the page that is
//!    now at Y.
//!
//! The result of the second descent stays true while the lock is held, provided that every mover
//! either locks the tables that it carries or excludes lockers. A mover that holds the VMAs of both
//! places for writing, together with the rmap locks of the objects and anon groups that they map,
//! locks only the parents and may carry tables of any level. Any other mover also locks each table
//! that it carries. Such a table must be of level 1: a level-2 table may have 512 tables below it,
//! which the mover does not lock.
//!
//! A move that holds the VMAs of both places for writing needs no second descent itself. A move
//! that holds them for reading needs it for both covers, because another such move may carry one of
//! the covers ([`lock_both_ranges_beside_moves`]). The tables below a cover hang in tables that the
//! cover's move has locked. A carried table changes its place in the lock order, but that cannot
//! cause a deadlock: the table's carrier waits for no further lock, and a thread that waits for the
//! table releases all its locks when it finds the table elsewhere.
//!
//! # How much is held at once
//! A *lock span* is the time during which an operation holds one set of locks. Other CPUs spin for
//! a table's lock, so one span never covers more than [`SPAN_ENTRIES`] entries or
//! [`lock_set::SPAN_DETACHED`] detached tables. Because locks are acquired in pre-order, locking
//! simply stops at that limit. An operation gets the front of its range, up to [`LockSet::end_of`],
//! and locks again for the rest. In a range with few tables, one span covers a long part; in a
//! dense range, it covers two tables. A table that the range covers completely counts as one entry,
//! so a span never ends inside such a table.
//!
//! # Pending flushes
//! A thread that acquires a lock finds out whether the table is pending ([`crate::tlb`]), and if so
//! flushes its own range before it acts. [`LockSet`] records the pending state for all tables of an
//! operation.

mod both_ranges;
mod lock_set;

use core::ops::RangeInclusive;

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Level};

pub(crate) use both_ranges::{End, lock_both_ranges, lock_both_ranges_beside_moves};
pub(crate) use lock_set::{LockSet, SPAN_ENTRIES};

/// A tree of tables, as the protocol sees it.
pub(crate) trait LockTree {
    type Arch: Arch;
    /// The type of a table that was found.
    type Table: Copy + PartialEq + Into<Frame>;
    /// The table of the highest level.
    fn root(&self) -> Self::Table;
    /// Waits for the table's lock.
    fn lock(&self, table: Frame);
    /// Releases the table's lock.
    fn unlock(&self, table: Frame);
    /// Called each time a descent starts again.
    fn start_again(&self) {}
    /// Whether the table was detached. The caller holds the table's lock.
    fn is_stray(&self, table: Frame) -> bool;
    /// Whether the table's lock is held. The load has acquire ordering.
    fn is_locked(&self, table: Frame) -> bool;
    /// Whether entries of the table were narrowed but not yet flushed ([`crate::tlb`]). The load
    /// has acquire ordering.
    fn is_pending(&self, table: Frame) -> bool;
    /// Marks the table as detached. The caller holds the table's lock.
    fn mark_stray(&self, table: Frame);
    /// Clears that mark. The caller holds the table's lock.
    fn clear_stray(&self, table: Frame);
    /// Whether the table may have a guard marker. The caller holds the table's lock.
    fn has_guards(&self, _table: Frame) -> bool {
        false
    }
    /// The number of non-empty entries of the table, if known; a scan may stop at that number.
    fn entry_count(&self, _table: Frame) -> u32 {
        u32::MAX
    }
    /// The table to which the entry refers, if any. Called inside a read section.
    fn child(&self, node: Node<Self::Arch, Self::Table>, index: EntryIndex) -> Option<Self::Table>;
    /// Whether `node` is the table of its level that covers `addr`. Called inside a read
    /// section.
    fn is_at(&self, node: Node<Self::Arch, Self::Table>, addr: VirtAddr) -> bool {
        self.descend(addr, |above| above.level > node.level) == node
    }
    /// Descends from the root through the tables for `addr`, while `goes_on` is true and a next
    /// table exists. Called inside a read section.
    #[inline]
    fn descend(
        &self,
        addr: VirtAddr,
        goes_on: impl Fn(Node<Self::Arch, Self::Table>) -> bool,
    ) -> Node<Self::Arch, Self::Table> {
        let mut node = Node { table: self.root(), level: Self::Arch::ROOT };
        while goes_on(node) {
            let index = node.level.index_of(addr);
            match self.child(node, index) {
                Some(table) => node = node.child(table),
                None => break,
            }
        }
        node
    }
}

/// Whether no flush is outstanding for an entry of `table` that was just read as empty, without a
/// lock and with an acquire load. Called inside the read section of that load.
///
/// The thread that cleared the entry used a release store with the lock held. The caller therefore
/// either sees the lock held, or sees it released, in which case the flush is complete or the count
/// is above zero.
#[inline]
pub(crate) fn has_no_pending_flush<T: LockTree>(tree: &T, table: Frame) -> bool {
    !tree.is_locked(table) && !tree.is_pending(table)
}

/// The lowest level at which locks are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Depth<A: Arch> {
    /// All overlapping tables at this level and above.
    Floor(Level<A>),
    /// Overlapping tables that the range covers only in part. Tables that the range covers
    /// completely will be detached, and are locked one at a time when they are marked.
    Edges,
    /// As `Edges`, but only level-1 tables will be detached, so all overlapping tables above level
    /// 1 are locked.
    LeafEdges,
}

impl<A: Arch> Depth<A> {
    fn floor(self) -> Level<A> {
        match self {
            Self::Floor(level) => level,
            Self::Edges | Self::LeafEdges => Level::PTE,
        }
    }

    /// Whether a table in an entry of `level` stays unlocked if the range covers it completely.
    fn spares(self, level: Level<A>) -> bool {
        match self {
            Self::Floor(_) => false,
            Self::Edges => true,
            Self::LeafEdges => level == Level::PMD,
        }
    }
}

/// A table and its level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Node<A: Arch, T = Frame> {
    pub(crate) table: T,
    pub(crate) level: Level<A>,
}

impl<A: Arch, T> Node<A, T> {
    /// `raw`, the entry at `index`, as a leaf of its own, without the mark of a contiguous run.
    #[inline(always)]
    pub(crate) fn single(&self, raw: Entry, index: EntryIndex) -> Entry {
        if self.level == Level::PTE { A::clear_contig(raw, index) } else { raw }
    }

    /// Whether `raw` belongs to a contiguous run.
    #[inline(always)]
    pub(crate) fn in_contig(&self, raw: Entry) -> bool {
        self.level == Level::PTE && A::is_contig(raw)
    }
}

impl<A: Arch, T> Node<A, T> {
    /// The node of a table to which an entry of this table refers.
    #[inline(always)]
    pub(crate) fn child<U>(&self, table: U) -> Node<A, U> {
        Node { table, level: self.level.below() }
    }
}

/// The first and the last entry that `range` overlaps in the table of `level` whose span starts at
/// `base`. `None` if it overlaps no entry.
fn overlapped_entries<A: Arch>(
    base: VirtAddr,
    level: Level<A>,
    range: VirtRange,
) -> Option<RangeInclusive<EntryIndex>> {
    let table = VirtRange::from_len(base, level.table_span())?;
    let part = range.intersection(table);
    if part.is_empty() {
        return None;
    }
    let last = VirtAddr(part.end().0 - 1);
    Some(level.index_of(part.start())..=level.index_of(last))
}

fn entry_range<A: Arch>(base: VirtAddr, level: Level<A>, index: EntryIndex) -> VirtRange {
    let start = base.0 + u64::from(index) * level.span();
    VirtRange::raw(start, start + level.span())
}

/// Descends without locks to the cover of `range`, but not below `floor`.
fn find_cover<T: LockTree>(
    tree: &T,
    range: VirtRange,
    floor: Level<T::Arch>,
) -> Node<T::Arch, T::Table> {
    let spread = spread(range);
    tree.descend(range.start(), |node| node.level > floor && spread < node.level.span())
}

/// A number that is smaller than an entry's span if and only if `range` lies inside the entry
/// without filling it. The range is not empty.
#[inline]
pub(crate) fn spread(range: VirtRange) -> u64 {
    let (start, last) = (range.start().0, range.end().0 - 1);
    // Two addresses lie in one entry if they differ only in bits below its span. A range within the
    // entry does not fill it if the range is shorter.
    u64::max(start ^ last, range.len())
}

/// The start of the span of the node that covers `range`.
fn base_of<A: Arch, T>(node: Node<A, T>, range: VirtRange) -> VirtAddr {
    range.start().align_down(node.level.table_span())
}

/// A pass in pre-order over the tables below a cover. The pass locks the tables that overlap one of
/// the ranges (ascending, disjoint), down to the depth.
struct LockPass<'a, T: LockTree> {
    tree: &'a T,
    ranges: &'a [VirtRange],
    depth: Depth<T::Arch>,
    set: &'a mut LockSet,
}

impl<T: LockTree> LockPass<'_, T> {
    /// Locks the tables below `node`, whose span starts at `base`. Returns `false` if it stopped
    /// because enough entries are locked.
    fn lock_below(&mut self, node: Node<T::Arch, T::Table>, base: VirtAddr) -> bool {
        let Self { tree, ranges, depth, .. } = *self;
        let floor = depth.floor();
        if node.level <= floor {
            return true;
        }
        let mut next = EntryIndex::FIRST;
        for range in ranges {
            let Some(overlapped) = overlapped_entries(base, node.level, *range) else { continue };
            let (first, last) = overlapped.into_inner();
            // Two ranges may share an entry, which is visited once for both.
            let mut index = first.max(next);
            while index <= last {
                next = index + 1;
                let own = entry_range(base, node.level, index);
                if depth.spares(node.level) && range.covers(own) {
                    // The subrange also covers all following entries, except perhaps the last.
                    let end = entry_range(base, node.level, last).end();
                    let count = last + u32::from(end <= range.end()) - index;
                    let admitted = self.set.admit_detached(count);
                    if admitted < count {
                        let span = node.level.span();
                        self.set.stop = own.start().0 + u64::from(admitted) * span;
                        return false;
                    }
                    index += count;
                    continue;
                }
                let part = range.intersection(own);
                let child = tree.child(node, index);
                let entries = match child {
                    Some(_) if node.level.below() > floor => 0,
                    None if part == own => 1,
                    // The entries into which a partly covered leaf is split.
                    _ => (part.len() >> node.level.below().span_shift()) as u32,
                };
                if !self.set.admit_entries(entries, part.start()) {
                    return false;
                }
                if let Some(table) = child {
                    self.set.acquire(tree, table.into());
                    let child = node.child(table);
                    if !self.lock_below(child, own.start()) {
                        return false;
                    }
                }
                index += 1;
            }
        }
        true
    }
}

/// Locks a table that was found without locks. Returns `false`, with the table unlocked, if the
/// table has been detached or moved away from the place that `is_at` tests; the descent then starts
/// again. Called inside the read section of the descent.
#[inline]
pub(crate) fn lock_found<T: LockTree>(
    tree: &T,
    table: Frame,
    is_at: impl FnOnce() -> bool,
) -> bool {
    tree.lock(table);
    if tree.is_stray(table) || !is_at() {
        tree.unlock(table);
        return false;
    }
    true
}

/// Locks the tables that an operation on `range` needs, or those of the front of `range`
/// ([`LockSet::end_of`]), and returns the cover. Called inside a read section.
pub(crate) fn lock_range<T: LockTree>(
    tree: &T,
    range: VirtRange,
    depth: Depth<T::Arch>,
    set: &mut LockSet,
) -> Node<T::Arch, T::Table> {
    loop {
        let cover = find_cover(tree, range, depth.floor());
        if lock_found(tree, cover.table.into(), || tree.is_at(cover, range.start())) {
            set.admit(tree, cover.table.into());
            if cover.level > depth.floor() {
                let base = base_of(cover, range);
                LockPass { tree, ranges: &[range], depth, set }.lock_below(cover, base);
            }
            return cover;
        }
        tree.start_again();
    }
}

#[cfg(test)]
mod tests {
    use super::{VirtRange, spread};

    #[test]
    fn a_range_spreads_over_entries_that_it_fills() {
        let ranges = (0..64).flat_map(|start| (start + 1..=64).map(move |end| (start, end)));
        for (start, end) in ranges {
            for span in [1, 2, 4, 8, 16, 32, 64] {
                let entry = start & !(span - 1);
                let is_inside = end <= entry + span && (start, end) != (entry, entry + span);
                let range = VirtRange::raw(start, end);
                assert_eq!(spread(range) < span, is_inside, "{start} to {end}, {span}");
            }
        }
    }
}
