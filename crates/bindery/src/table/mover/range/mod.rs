//! Moves the mappings of one range to another (`mremap`): whole tables by one entry at every level,
//! and the rest in runs.
//!
//! ```text
//! source   |  edge |     512 entries of level 2     |  edge |    both ends congruent modulo 2 MiB
//! pieces   | leaves|      tables: one entry each    | leaves|
//!              |               |                        |
//! target   |  edge |     512 entries of level 2     |  edge |
//! ```
//!
//! A move of one piece flushes before it releases the locks, and frees its emptied tables with that
//! flush. A move of several pieces releases the locks, including those of the reverse map, between
//! the pieces. It detaches the emptied tables at the end, by the fewest possible entries, with the
//! last flush.
//!
//! The destination's VMA enters the trees of the reverse map before the first of several pieces
//! moves, so a walker finds each page at one address or the other. The walker visits the
//! destination again if entries arrived there after it had passed (`rmap`). No table may leave the
//! destination during the move:
//! 1. CPU A preallocates a table at the destination.
//! 2. CPU B truncates the file, finds no page in the table, and frees it.
//! 3. CPU A, half-way through, has no memory for another table.
//!
//! During a move, a truncation therefore clears the tree's entries one by one (`spare`).
//!
//! A move never fails half-way: the tables that the destination needs are preallocated before the
//! first entry moves.

mod leaves;
mod pieces;
mod shifted;
mod upper_levels;

use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::table::edit::Edit;
use crate::table::locking::{self, End, Node};
use crate::table::zap::Flush;
use crate::table::{EntryAt, NoMemory, PageTable, ReadSection, Table, TablePool, run};

use super::Mover;
use super::piece::{LockedPiece, MovePolicy, Piece};

/// The maximum number of leaf tables in a piece, and of entries of a higher level.
const LEAF_TABLES: u64 = 2;
const UPPER_ENTRIES: u64 = 512;

/// A move whose caller holds the VMAs of both ranges for writing. The target is unmapped.
pub(crate) struct RangeMove<A: Arch> {
    /// The source. Tables inside its freeable span are empty after the move.
    source: End,
    /// The start of the target, which does not overlap the source.
    to: VirtAddr,
    /// The first piece that may contain mappings.
    first: Option<Piece<A>>,
}

/// A move of a range in progress.
pub(crate) type RangeMover<'a, 'm, P> = Mover<'a, 'm, P, RangeMove<<P as Platform>::Arch>>;

/// The policy of a piece for VMAs held for writing: the tables of the piece's level in use, keyed
/// by the addresses at which they start.
struct ForWriting<'s> {
    /// The source, together with the surrounding addresses whose tables serve only the source.
    freeable: VirtRange,
    source_table: Option<(u64, Table<'s>)>,
    /// The most recent table first. Two tables are in use if the ends are not congruent.
    target_tables: [Option<(u64, Table<'s>)>; 2],
    /// The numbers of empty and of absent entries in the current run.
    empty: u32,
    absent: u32,
}

impl ForWriting<'_> {
    fn new(freeable: VirtRange) -> Self {
        let target_tables = [None; 2];
        Self { freeable, source_table: None, target_tables, empty: 0, absent: 0 }
    }
}

impl MovePolicy for ForWriting<'_> {
    const BESIDE_MOVES: bool = false;

    #[inline]
    fn end_at(&self, source: VirtRange) -> End {
        End { range: source, freeable: self.freeable }
    }
}

impl<'m, P: Platform> Edit<'_, 'm, P> {
    /// Lends a move of `source` to a range of the same length at `to`. Tables come from the pool if
    /// it has any.
    #[inline]
    pub(crate) fn move_range<R>(
        &mut self,
        source: End,
        to: VirtAddr,
        pool: &mut TablePool<'m, P>,
        work: impl FnOnce(&mut RangeMover<'_, 'm, P>) -> R,
    ) -> R {
        let (page_table, gather) = self.parts();
        let mut counts = Counts::default();
        let mut mover = Mover {
            page_table,
            pool,
            gather,
            counts: &mut counts,
            marks: false,
            kind: RangeMove { source, to, first: None },
        };
        mover.kind.first = mover.next_piece(source.range.start().0);
        let result = work(&mut mover);
        page_table.count(&counts);
        result
    }
}

impl<P: Platform> RangeMover<'_, '_, P> {
    /// Whether all mappings move under one set of locks.
    #[inline]
    pub(crate) fn is_one_piece(&self) -> bool {
        let source = self.kind.source.range;
        self.kind.first.is_none_or(|first| first.source() == source)
    }

    /// The first piece at or after the address `at` that may contain mappings. Does not wait for
    /// flushes that are pending only for this move.
    #[inline]
    fn next_piece(&mut self, mut at: u64) -> Option<Piece<P::Arch>> {
        // Inlined because most moves are one piece: reaching the end of the range needs no call.
        while at < self.kind.source.range.end().0 {
            let section = self.page_table.read_section();
            let found = self.find_piece(&section, &mut at);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// As `next_piece`, but gives up after a short stretch without entries and advances `next` past
    /// it.
    #[inline(never)]
    fn find_piece(
        &mut self,
        section: &ReadSection<'_, P>,
        next: &mut u64,
    ) -> Option<Piece<P::Arch>> {
        let (page_table, source) = (self.page_table, self.kind.source.range);
        let (start, end) = (source.start().0, source.end().0);
        let (distance, delta) = (self.kind.to.0.wrapping_sub(start), self.kind.to.0 ^ start);
        for _ in 0..locking::SPAN_ENTRIES / u32::from(P::Arch::LEVELS) {
            let at = *next;
            if at >= end {
                break;
            }
            let left = end - at;
            let fits = |level: Level<P::Arch>| {
                let mask = level.span() - 1;
                (delta | at) & mask == 0 && left > mask
            };
            let mut level = Level::PTE;
            while page_table.reach.takes_tables() && level < P::Arch::ROOT && fits(level.above()) {
                level = level.above();
            }
            let found = page_table.peek(section, VirtAddr(at), self.counts);
            let EntryAt { node, entry, .. } = found;
            page_table.memory.worked(P::Arch::ROOT.steps_to(node.level) + 1, 0);
            if entry.is_empty() && node.level > level {
                if !locking::has_no_pending_flush(&page_table.tables(section), node.table.frame()) {
                    let own = self.marks.then_some(&*self.gather);
                    if !page_table.is_empty_after_flushes(node, VirtAddr(at), own) {
                        continue;
                    }
                }
                *next = found.end(at).min(end);
                continue;
            }
            let span = level.span();
            // Up to the address at which a higher level may fit, or the limit of one set of locks.
            let above = level.table_span();
            let len = if level == Level::PTE {
                let congruent = page_table.reach.takes_tables() && delta & (above - 1) == 0;
                let tables = if congruent { 1 } else { LEAF_TABLES };
                (at & !(above - 1)).saturating_add(tables * above) - at
            } else {
                let next = (at & !(above - 1)).saturating_add(above);
                let rises = page_table.reach.takes_tables()
                    && level < P::Arch::ROOT
                    && delta & (above - 1) == 0
                    && end.saturating_sub(next) >= above;
                let cut = if rises { next - at } else { u64::MAX };
                (UPPER_ENTRIES * span).min(cut)
            };
            let len = len.min(left) & !(span - 1);
            return Some(Piece { level, source: at, target: at.wrapping_add(distance), len });
        }
        None
    }

    /// Moves everything in one piece (`is_one_piece`), or nothing if memory runs out. The caller
    /// holds the rmap locks of the source. May wait for memory.
    ///
    /// Reads and writes the moved entries: one per table that moves as a whole, otherwise one per
    /// base page. Makes one invalidation, and one for each contiguous run or huge leaf that the
    /// ends divide. Emptied tables enter the gather.
    pub(crate) fn move_one_piece(&mut self) -> Result<(), NoMemory> {
        let Some(piece) = self.kind.first else {
            // Empty tables may remain.
            self.detach_source();
            return Ok(());
        };
        let mut done = Ok(());
        while done.is_ok() && self.move_piece(piece).is_err() {
            done = self.pool.refill();
        }
        if done.is_err() {
            self.free_preallocated_tables();
        }
        self.pool.settle(self.counts);
        done
    }

    /// Detaches the tables that a move has emptied.
    fn detach_source(&mut self) {
        // The tables at the edges also serve addresses outside the range, so these tables stay.
        let span = P::Arch::PMD.span();
        let End { range, freeable } = self.kind.source;
        let start = freeable.start().0.next_multiple_of(span);
        let end = freeable.end().0 & !(span - 1);
        if start >= end {
            return;
        }
        let freeable = VirtRange::raw(start, end);
        let mut edit = Edit::new(self.page_table, self.gather);
        let emptied = edit.zap(range, freeable, Flush::BeforeUnlock);
        debug_assert!(emptied.is_ok(), "an empty range has no leaf to split");
    }

    /// Detaches the empty tables that a failed move has left in its target.
    #[cold]
    fn free_preallocated_tables(&self) {
        let span = P::Arch::PMD.span();
        let (start, end) = (self.kind.to.0, self.kind.to.0 + self.kind.source.range.len());
        let tables = (start & !(span - 1)..end).step_by(span as usize);
        self.page_table.edit(|edit| tables.for_each(|at| edit.prune(VirtAddr(at))));
    }

    #[inline]
    fn move_piece(&mut self, piece: Piece<P::Arch>) -> Result<(), NoMemory> {
        // A single piece moves the tables that it empties as a whole.
        let cleared = if self.marks { piece.source() } else { self.kind.source.freeable };
        let page_table = self.page_table;
        let section = page_table.read_section();
        let tree = (page_table, &section);
        self.with_piece(tree, piece, ForWriting::new(cleared), |locked| {
            locked.page_table.memory.worked(piece.len >> piece.level.span_shift(), 0);
            // A cover at the level of the piece is the only table of the target.
            if !locked.marks && locked.to.level > piece.level {
                locked.preallocate_tables()?;
            }
            let moved =
                if piece.level > Level::PTE { locked.move_upper() } else { locked.move_leaves() };
            if !locked.marks && moved.is_ok() {
                let base = cleared.start().align_down(locked.from.level.table_span());
                locked.detach_emptied(locked.from, base, cleared);
            }
            moved
        })
    }
}

/// Calls `f` with an address in each target table to which a part of the piece moves, looking up
/// entries from `from` downwards. Stops early after many entries, and returns the number of bytes
/// before the rest.
fn for_each_target<P: Platform>(
    page_table: &PageTable<'_, P>,
    from: Node<P::Arch, Table<'_>>,
    piece: Piece<P::Arch>,
    mut f: impl FnMut(u64) -> Result<(), NoMemory>,
) -> Result<u64, NoMemory> {
    let Piece { level, source, target, len } = piece;
    let span = level.table_span();
    let end = source + len;
    let (mut at, mut looked) = (source, 0);
    while at < end && looked < locking::SPAN_ENTRIES / 2 {
        let found = page_table.entry_below(from, VirtAddr(at), level, Ordering::Acquire);
        let EntryAt { node, entry, .. } = found;
        if entry.is_empty() && node.level > level {
            at = found.end(at);
            continue;
        }
        let table_end = ((at | (span - 1)) + 1).min(end);
        while at < table_end {
            // Up to the end of one table of the target.
            let to = target + (at - source);
            let stop = (at + (to | (span - 1)) + 1 - to).min(table_end);
            let count = ((stop - at) >> level.span_shift()) as u32;
            let first = level.index_of(VirtAddr(at));
            let vacant = if node.level > level {
                0
            } else {
                run::count_empty(&page_table.entries(node.table)[first.positions(count)])
            };
            looked += vacant + 1;
            if vacant < count {
                f(to)?;
            }
            at = stop;
        }
    }
    page_table.memory.worked(u64::from(looked), 0);
    Ok(at.min(end) - source)
}

/// One piece of a move with VMAs held for writing.
type RangePiece<'a, 's, 'm, P> = LockedPiece<'a, 's, 'm, P, ForWriting<'s>>;
