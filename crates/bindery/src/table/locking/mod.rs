//! The locking protocol of page tables, apart from the tables' contents, so that the very same code
//! runs under a model checker (`loom_model`).
//!
//! # What is locked
//! Each table has a lock. An operation on a range holds the *cover*, the lowest table that spans
//! the range, and the existing tables below it that overlap the range, down to a floor. So two
//! operations share nothing if their covers are different and neither is above the other.
//!
//! If the range is exactly that of one entry, the entry's table is the cover, not the one to which
//! the entry refers: detaching a table needs the lock of its parent.
//!
//! # In which order
//! Pre-order: parents before children, lower addresses before higher ones. A move takes the locks
//! of both its ranges in one pass of that order. Two passes in turn would deadlock:
//! 1. CPU A moves from table X to table Y: it locks X.
//! 2. CPU B moves from Y to X: it locks Y.
//! 3. Each waits for the other.
//!
//! There is one exception. A table that is being detached is locked only to be marked, and may come
//! before an edge that is held already. So a detaching operation keeps every move out of the range,
//! by holding its VMAs for writing. Otherwise:
//! 1. CPU A unmaps pages up to an edge in table Y, and holds Y.
//! 2. CPU B moves from X, in the middle of A's range, to Y: it holds X and waits for Y.
//! 3. CPU A detaches X and waits for B to mark it.
//!
//! # How the cover is found
//! The cover is found without locks, inside a read section, so that no table is freed under the
//! descent. If the cover was detached before it was locked, it is marked *stray*, and the descent
//! starts again:
//! 1. CPU A descends to table X and is about to lock it.
//! 2. CPU B, holding X's parent, detaches X, locks it, marks it stray, unlocks it.
//! 3. CPU A locks X. Without the mark it would now map pages where no walker comes.
//!
//! The tables below a detached one are locked and marked too, but later: one at a time, with no
//! other lock held, before their contents are dropped. Until then a thread that locks one of them
//! finds by a second descent, as below, that the table is not in the tree. The detaching thread
//! waits for a thread that locked one before, which may finish its work: no walker finds the table
//! any more. So detaching by one entry costs one entry and one mark under the locks, whatever is
//! below. This does not hold where no VMA keeps out the threads that fill entries
//! ([`super::stray::try_mark_stray`]): there, all tables are marked first, and they are of level 1.
//!
//! A table that is *moved* is not marked: it stays part of the tree at another address. So a thread
//! that has locked the cover descends once more, and starts again unless the table is still there:
//! 1. CPU A, writing to a program's memory at X, descends to the table of X and waits for its lock.
//! 2. CPU B moves the table from X to Y, and returns; another page is mapped at X.
//! 3. CPU A gets the lock. Without the second descent it would write to the page that is now at Y.
//!
//! The answer stays true while the lock is held, if every mover locks the tables that it carries or
//! keeps lockers out. A mover that holds the VMAs of both places for writing, and the rmap locks of
//! what they map, locks only the parents, and may carry tables of any level. Any other mover also
//! locks each table that it carries. Such a table must be of level 1: a table of level 2 may have
//! 512 others below it, which the mover does not lock.
//!
//! A move that holds the VMAs of both places for writing needs no second descent itself. One that
//! holds them for reading does, for both covers, because another such move may carry one of them
//! ([`lock_both_ranges_beside_moves`]). The tables below a cover hang in tables that it has locked.
//! A carried table changes its place in the order of locks. That cannot cause a deadlock: its
//! carrier waits for no further lock, and a thread that waits for the table releases all its locks
//! when it finds the table elsewhere.
//!
//! # How much is held at once
//! A *lock span* is the time in which an operation holds one set of locks. Other CPUs spin for a
//! table's lock. So one span never serves more than [`SPAN_ENTRIES`] entries or
//! [`lock_set::SPAN_DETACHED`] detached tables. The locks are taken in pre-order anyway, so they
//! stop there. An operation gets the front of its range, up to [`LockSet::end_of`], and locks again
//! for the rest. In a range with few tables, one span covers a long part; in a dense one, it covers
//! two tables. A table that the range covers whole counts as one entry, so a span never ends inside
//! of it.
//!
//! # Pending flushes
//! A thread that takes a lock learns whether the table is pending ([`crate::tlb`]), and then
//! flushes its own range before it acts. [`LockSet`] remembers that for all tables of an operation.

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
    /// A table that was found.
    type Table: Copy + PartialEq + Into<Frame>;
    /// The table of the highest level.
    fn root(&self) -> Self::Table;
    /// Waits for the table's lock.
    fn lock(&self, table: Frame);
    /// Releases the table's lock.
    fn unlock(&self, table: Frame);
    /// Called each time a descent starts again.
    fn start_again(&self) {}
    /// Whether the table was detached. Asked with its lock held.
    fn is_stray(&self, table: Frame) -> bool;
    /// Whether the table's lock is held. With acquire.
    fn is_locked(&self, table: Frame) -> bool;
    /// Whether entries of the table were narrowed and not flushed yet ([`crate::tlb`]). With
    /// acquire.
    fn is_pending(&self, table: Frame) -> bool;
    /// Marks the table as detached. Called with its lock held.
    fn mark_stray(&self, table: Frame);
    /// Clears that mark. Called with its lock held.
    fn clear_stray(&self, table: Frame);
    /// Whether the table may have a guard marker. Asked with its lock held.
    fn has_guards(&self, _table: Frame) -> bool {
        false
    }
    /// The number of entries of the table that are not empty, if it is known: a scan may stop
    /// there.
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
    /// Descends from the root by the tables for `addr`, while `goes_on` is true and a next table
    /// exists. Called inside a read section.
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
/// lock and with acquire. Called inside the read section of that load.
///
/// The thread that cleared the entry did so by a release store with the lock held. So the caller
/// sees the lock held; or released, and then the flush is over or the count is above zero.
#[inline]
pub(crate) fn has_no_pending_flush<T: LockTree>(tree: &T, table: Frame) -> bool {
    !tree.is_locked(table) && !tree.is_pending(table)
}

/// The lowest level at which locks are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Depth<A: Arch> {
    /// All overlapping tables at this level and above.
    Floor(Level<A>),
    /// Overlapping tables that the range covers only in part: those covered whole will be
    /// detached, and are locked one at a time when they are marked.
    Edges,
    /// As `Edges`, but only tables of level 1 will be detached: those above are all locked.
    LeafEdges,
}

impl<A: Arch> Depth<A> {
    fn floor(self) -> Level<A> {
        match self {
            Self::Floor(level) => level,
            Self::Edges | Self::LeafEdges => Level::PTE,
        }
    }

    /// Whether a table in an entry of `level` that the range covers whole stays unlocked.
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
    /// `raw`, which is at `index`, as a leaf of its own: without the mark of a contiguous run.
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
    /// A table to which an entry of this one refers.
    #[inline(always)]
    pub(crate) fn child<U>(&self, table: U) -> Node<A, U> {
        Node { table, level: self.level.below() }
    }
}

/// The first and the last entry that `range` overlaps, of the table of `level` that begins at
/// `base`. `None` if it overlaps none.
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

/// Descends without locks to the cover of `range`, not below `floor`.
fn find_cover<T: LockTree>(
    tree: &T,
    range: VirtRange,
    floor: Level<T::Arch>,
) -> Node<T::Arch, T::Table> {
    let spread = spread(range);
    tree.descend(range.start(), |node| node.level > floor && spread < node.level.span())
}

/// A number that is smaller than an entry's span exactly if `range` is inside the entry and does
/// not fill it. The range is not empty.
#[inline]
pub(crate) fn spread(range: VirtRange) -> u64 {
    let (start, last) = (range.start().0, range.end().0 - 1);
    // Two addresses are in one entry if they differ only in bits below its span. A range in it is
    // not all of it if it is shorter.
    u64::max(start ^ last, range.len())
}

/// The beginning of the span of the node that covers `range`.
fn base_of<A: Arch, T>(node: Node<A, T>, range: VirtRange) -> VirtAddr {
    range.start().align_down(node.level.table_span())
}

/// A pass in pre-order over the tables below a cover: it locks those that overlap one of the ranges
/// (rising, disjoint), down to the depth.
struct LockPass<'a, T: LockTree> {
    tree: &'a T,
    ranges: &'a [VirtRange],
    depth: Depth<T::Arch>,
    set: &'a mut LockSet,
}

impl<T: LockTree> LockPass<'_, T> {
    /// Locks the tables below `node`, whose span begins at `base`. `false` if it stopped because
    /// enough entries are locked.
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
            // Two ranges may share an entry: it is visited once, with both.
            let mut index = first.max(next);
            while index <= last {
                next = index + 1;
                let own = entry_range(base, node.level, index);
                if depth.spares(node.level) && range.covers(own) {
                    // It also covers all entries that follow, except perhaps the last.
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
                    // The entries into which a leaf is split that the range covers partly.
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

/// Locks a table that was found without locks. `false` if it was detached in between, or moved away
/// from the place that `is_at` tests: it is not locked then, and the descent starts again. Called
/// inside the read section of the descent.
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

/// Locks the tables that an operation on `range` needs, or on its front ([`LockSet::end_of`]), and
/// returns the cover. Called inside a read section.
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
