//! The locks of a move: the tables of both its ranges, acquired in one pass.

use crate::addr::VirtRange;
use crate::arch::Level;

use super::lock_set::LockSet;
use super::{Depth, LockPass, LockTree, Node, base_of, find_cover};

/// One end of a move, either its source or its target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct End {
    /// The range to be locked.
    pub(crate) range: VirtRange,
    /// The span of the cover: the range together with the surrounding addresses whose tables serve
    /// only the range.
    pub(crate) freeable: VirtRange,
}

impl From<VirtRange> for End {
    fn from(range: VirtRange) -> Self {
        Self { range, freeable: range }
    }
}

/// Locks the tables that a move between two disjoint ranges needs, in one pass. Returns the cover
/// of each range, in the order of the ends. The caller holds the VMAs of both ranges for writing.
/// Called inside a read section.
pub(crate) fn lock_both_ranges<T: LockTree>(
    tree: &T,
    ends: [End; 2],
    floor: Level<T::Arch>,
    set: &mut LockSet,
) -> [Node<T::Arch, T::Table>; 2] {
    lock_two_covers(tree, ends, floor, set, Covers::Stay)
}

/// As [`lock_both_ranges`], for a caller that holds the VMAs of both ranges for reading.
pub(crate) fn lock_both_ranges_beside_moves<T: LockTree>(
    tree: &T,
    ranges: [VirtRange; 2],
    floor: Level<T::Arch>,
    set: &mut LockSet,
) -> [Node<T::Arch, T::Table>; 2] {
    if floor == Level::PTE
        && let Some(tables) = lock_leaf_tables(tree, ranges, set)
    {
        return tables;
    }
    lock_two_covers(tree, ranges.map(End::from), floor, set, Covers::MayBeCarried)
}

/// The fast path for ranges that each lie in one level-1 table, as a page does, without filling it;
/// such a table is the cover. `None` if no such table exists or if another move is carrying it
/// away.
#[inline]
fn lock_leaf_tables<T: LockTree>(
    tree: &T,
    [one, other]: [VirtRange; 2],
    set: &mut LockSet,
) -> Option<[Node<T::Arch, T::Table>; 2]> {
    let span = Level::<T::Arch>::PTE.table_span();
    let is_part_of_one = |range: VirtRange| {
        range.len() < span && (range.start().0 ^ (range.end().0 - 1)) & !(span - 1) == 0
    };
    if !is_part_of_one(one) || !is_part_of_one(other) {
        return None;
    }
    let leaf_table = |range: VirtRange| {
        let node = tree.descend(range.start(), |node| node.level > Level::PTE);
        (node.level == Level::PTE).then_some(node)
    };
    let (first, second) = (leaf_table(one)?, leaf_table(other)?);
    let ends = [(first, one), (second, other)];
    let [low, high] = if one.start() < other.start() { ends } else { [ends[1], ends[0]] };
    let mut lock = |(node, range): (Node<T::Arch, T::Table>, VirtRange)| {
        set.acquire(tree, node.table.into());
        !tree.is_stray(node.table.into()) && tree.is_at(node, range.start())
    };
    if !lock(low) || high.0 != low.0 && !lock(high) {
        set.release(tree);
        tree.start_again();
        return None;
    }
    // The mover has limited the size of its piece.
    set.entries = u32::MAX;
    Some([first, second])
}

/// Whether another mover may carry a cover away between the check of the cover and its locking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Covers {
    Stay,
    MayBeCarried,
}

fn lock_two_covers<T: LockTree>(
    tree: &T,
    ends: [End; 2],
    floor: Level<T::Arch>,
    set: &mut LockSet,
    covers: Covers,
) -> [Node<T::Arch, T::Table>; 2] {
    let [End { range: first, freeable: low }, End { range: second, freeable: high }] = ends;
    if low.start() > high.start() {
        let [low, high] = lock_two_covers(tree, [ends[1], ends[0]], floor, set, covers);
        return [high, low];
    }
    let depth = Depth::Floor(floor);
    // The mover has limited the size of its piece.
    set.entries = u32::MAX;
    let spans = |node: Node<T::Arch, T::Table>, own: VirtRange, range: VirtRange| {
        VirtRange::from_len(base_of(node, own), node.level.table_span())
            .is_some_and(|span| span.covers(range))
    };
    let is_moved = |cover: Node<T::Arch, T::Table>, range: VirtRange| {
        tree.is_stray(cover.table.into())
            || covers == Covers::MayBeCarried && !tree.is_at(cover, range.start())
    };
    loop {
        let mut low_cover = find_cover(tree, low, floor);
        let mut high_cover = find_cover(tree, high, floor);
        // One cover may be above the other or equal to it, in which case it is the cover of both.
        if spans(low_cover, low, high) && low_cover.level >= high_cover.level {
            high_cover = low_cover;
        } else if spans(high_cover, high, low) {
            low_cover = high_cover;
        }
        set.acquire(tree, low_cover.table.into());
        if is_moved(low_cover, low) {
            set.release(tree);
            tree.start_again();
            continue;
        }
        let base = base_of(low_cover, low);
        if low_cover == high_cover {
            let ranges = &[first, second];
            LockPass { tree, ranges, depth, set }.lock_below(low_cover, base);
            return [low_cover, high_cover];
        }
        LockPass { tree, ranges: &[first], depth, set }.lock_below(low_cover, base);
        set.acquire(tree, high_cover.table.into());
        if is_moved(high_cover, high) {
            set.release(tree);
            tree.start_again();
            continue;
        }
        let base = base_of(high_cover, high);
        LockPass { tree, ranges: &[second], depth, set }.lock_below(high_cover, base);
        return [low_cover, high_cover];
    }
}
