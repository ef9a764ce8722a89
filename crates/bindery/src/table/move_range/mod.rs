//! Moves the mappings of one range to another (`mremap`): whole tables by one entry at every level,
//! the rest in runs.
//!
//! ```text
//! source   |  edge |      512 slots of level 2      |  edge |    both ends congruent modulo 2 MiB
//! pieces   | leaves|      tables: one entry each    | leaves|
//!              |               |                        |
//! target   |  edge |      512 slots of level 2      |  edge |
//! ```
//!
//! Each piece is moved under one set of locks. A move of one piece flushes before it releases them,
//! and frees its emptied tables in that flush. Otherwise:
//! 1. CPU A moves the entry of a page and releases the locks without a flush.
//! 2. CPU B swaps the page out through its new place, flushes that address, reuses the frame.
//! 3. CPU C still writes through its translation of the old address, into the reused frame.
//!
//! A move of several pieces releases the locks between them, those of the reverse map too, and
//! flushes once for many pieces. Until then each table at either end is marked as pending
//! ([`crate::tlb`]), and the tree names the move's source ([`Moving`]). A thread that finds the
//! mark flushes the source as well as its own range. The emptied tables are detached at the end, by
//! the fewest entries, with the last flush.
//!
//! The destination's VMA is in the trees of the reverse map before the first piece moves, so a
//! walker finds each page at one place or the other. It visits the destination again if entries
//! arrived there after it had passed (`rmap`). No table may leave the destination during the move:
//! 1. CPU A preallocates a table at the destination.
//! 2. CPU B truncates the file, finds no page in the table, and frees it.
//! 3. CPU A, half-way, has no memory for another.
//!
//! So during a move, a truncation clears the tree's entries one by one (`spare`).
//!
//! A move never fails half-way: the tables that the destination needs are preallocated before the
//! first entry moves.

mod pair;
mod parts;
mod shifted;
mod upper_levels;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::EntryAt;
use super::locking::{self, End, LockSet};
use super::run;
use super::zap::Flush;
use super::{NoMemory, PageTable, ReadSection, TablePool};
use pair::Pair;

pub(crate) use parts::Moving;

/// A part of a move that is done under one set of locks: entries of one level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece<A: Arch> {
    level: Level<A>,
    /// Bytes from the beginning of the move.
    offset: u64,
    len: u64,
}

/// How a move is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockSpans<A: Arch> {
    /// Under one set of locks; `None` if nothing is mapped.
    One(Option<Piece<A>>),
    /// Piece by piece; this is the first.
    Several(Piece<A>),
}

/// Most leaf tables of a piece, and most slots of a higher level.
const LEAF_TABLES: u64 = 2;
const SLOTS: u64 = 512;

/// A move of `source` to `to`; the two do not overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub(crate) source: VirtRange,
    pub(crate) to: VirtAddr,
    /// `source`, and around it what nothing is mapped in: tables inside it are empty afterwards.
    pub(crate) freeable: VirtRange,
}

impl<'m, P: Platform> PageTable<'m, P> {
    /// Looks how `what` is moved.
    #[inline]
    pub(crate) fn lock_spans(&self, what: &Move, counts: &mut Counts) -> LockSpans<P::Arch> {
        match self.next_piece(what, 0, None, counts) {
            None => LockSpans::One(None),
            Some(piece) if piece.offset == 0 && piece.len == what.source.len() => {
                LockSpans::One(Some(piece))
            }
            Some(piece) => LockSpans::Several(piece),
        }
    }

    /// The first piece at or after `offset` in which something may be mapped. Does not wait for
    /// flushes that are pending only for `own`.
    #[inline]
    fn next_piece(
        &self,
        what: &Move,
        mut offset: u64,
        own: Option<&Gather>,
        counts: &mut Counts,
    ) -> Option<Piece<P::Arch>> {
        // Most moves are one piece: that there is no second costs no call.
        while offset < what.source.len() {
            let section = ReadSection::enter(&self.memory.platform);
            let found = self.find_piece(&section, what, &mut offset, own, counts);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// As [`PageTable::next_piece`]; if nothing is found in a short stretch, the
    /// offset is where to go on.
    #[inline(never)]
    fn find_piece(
        &self,
        section: &ReadSection<'_, P>,
        what: &Move,
        offset: &mut u64,
        own: Option<&Gather>,
        counts: &mut Counts,
    ) -> Option<Piece<P::Arch>> {
        let (source, delta) = (what.source, what.to.0 ^ what.source.start().0);
        for _ in 0..locking::SPAN_ENTRIES / u32::from(P::Arch::LEVELS) {
            if *offset >= source.len() {
                break;
            }
            let at = source.start().0 + *offset;
            let left = source.len() - *offset;
            let fits = |level: Level<P::Arch>| {
                let mask = level.span() - 1;
                (delta | at) & mask == 0 && left > mask
            };
            let mut level = Level::PTE;
            while self.reach.takes_tables() && level < P::Arch::ROOT && fits(level.above()) {
                level = level.above();
            }
            let EntryAt { node, entry, .. } = self.peek(section, VirtAddr(at), counts);
            self.memory.worked(P::Arch::ROOT.steps_to(node.level) + 1, 0);
            if entry.is_empty() && node.level > level {
                if !locking::has_no_pending_flush(self, node.table) {
                    self.wait_for_pending_flushes(node, VirtAddr(at), own);
                }
                let slot_end = (at | (node.level.span() - 1)).saturating_add(1);
                *offset += (slot_end - at).min(left);
                continue;
            }
            let span = level.span();
            // Up to where a higher level may fit, or as much as one set of locks serves.
            let above = level.table_span();
            let len = if level == Level::PTE {
                let congruent = self.reach.takes_tables() && delta & (above - 1) == 0;
                let tables = if congruent { 1 } else { LEAF_TABLES };
                (at & !(above - 1)).saturating_add(tables * above) - at
            } else {
                let next = (at & !(above - 1)).saturating_add(above);
                let rises = self.reach.takes_tables()
                    && level < P::Arch::ROOT
                    && delta & (above - 1) == 0
                    && source.end().0.saturating_sub(next) >= above;
                let cut = if rises { next - at } else { u64::MAX };
                (SLOTS * span).min(cut)
            };
            let len = len.min(left) & !(span - 1);
            return Some(Piece { level, offset: *offset, len });
        }
        None
    }

    /// Moves everything by one piece, or nothing where memory runs out. The caller holds the VMAs
    /// of both ranges for writing, and the rmap locks of the source; nothing is mapped in the
    /// target. Tables come from the pool first. May wait for memory.
    ///
    /// Reads and writes the entries that are moved: one for each table that moves whole, one for
    /// each base page else. One invalidation, and one for each contiguous run or huge leaf that
    /// the ends cut; emptied tables are in the gather.
    pub(crate) fn move_one_piece(
        &self,
        what: &Move,
        piece: Option<Piece<P::Arch>>,
        pool: &mut TablePool<'m, P>,
        gather: &mut Gather,
        counts: &mut Counts,
    ) -> Result<(), NoMemory> {
        let Some(piece) = piece else {
            // There may be empty tables.
            self.detach_source(what, gather);
            return Ok(());
        };
        let flush = PieceFlush::BeforeUnlock;
        let mut locked = Locked { pool: &mut *pool, gather, counts: &mut *counts, flush };
        let mut done = Ok(());
        while done.is_ok() && self.move_piece(what, piece, &mut locked).is_err() {
            done = locked.pool.refill();
        }
        if done.is_err() {
            self.free_preallocated_tables(what);
        }
        pool.settle(counts);
        done
    }

    /// Detaches the tables that a move has emptied.
    fn detach_source(&self, what: &Move, gather: &mut Gather) {
        // Those at the edges stay, whatever is left in them.
        let span = P::Arch::PMD.span();
        let start = what.freeable.start().0.next_multiple_of(span);
        let end = what.freeable.end().0 & !(span - 1);
        if start >= end {
            return;
        }
        let freeable = VirtRange::raw(start, end);
        let emptied = self.zap(what.source, freeable, Flush::BeforeUnlock, gather);
        debug_assert!(emptied.is_ok(), "an empty range has no leaf to split");
    }

    /// Takes the empty tables out again that a move has left in its target.
    #[cold]
    fn free_preallocated_tables(&self, what: &Move) {
        let mut gather = Gather::new();
        let span = P::Arch::PMD.span();
        let (start, end) = (what.to.0, what.to.0 + what.source.len());
        let slots = (start & !(span - 1)..end).step_by(span as usize);
        slots.for_each(|at| self.prune(VirtAddr(at), &mut gather));
        self.finish(&mut gather);
    }

    #[inline]
    fn move_piece(
        &self,
        what: &Move,
        piece: Piece<P::Arch>,
        locked: &mut Locked<'_, 'm, P>,
    ) -> Result<(), NoMemory> {
        let (from, to) = (what.source.start().0 + piece.offset, what.to.0 + piece.offset);
        let transfer = Transfer { source: from, target: to, len: piece.len };
        let source = VirtRange::raw(from, from + piece.len);
        let target = VirtRange::raw(to, to + piece.len);
        // One piece takes the tables that it empties along.
        let alone = locked.flush == PieceFlush::BeforeUnlock;
        let cleared = if alone { what.freeable } else { source };
        let section = ReadSection::enter(&self.memory.platform);
        let mut locks = LockSet::new();
        let end = End { range: source, freeable: cleared };
        let (source_cover, target_cover) =
            locking::lock_both_ranges(self, self.root, end, target.into(), piece.level, &mut locks);
        locked.counts.tables_locked += locks.len() as u64;
        self.memory.worked(piece.len >> piece.level.span_shift(), 0);
        if locks.is_pending() {
            // Before anything is carried away: the flush of this move would cover only the old
            // place.
            self.honor_pending(source, &locks, Some(&*locked.gather), locked.counts);
            self.honor_pending(target, &locks, Some(&*locked.gather), locked.counts);
        }
        let from_span = source_cover.level.table_span();
        let mut pair = Pair {
            page_table: self,
            locks: &mut locks,
            counts: &mut *locked.counts,
            from: source_cover,
            to: target_cover,
            from_base: cleared.start().align_down(from_span),
            moved: source,
            level: piece.level,
            source_table: None,
            target_tables: [None; 2],
            pool: &mut *locked.pool,
            gather: &mut *locked.gather,
            flush: locked.flush,
            _section: section,
        };
        // A cover of the level that moves is the one table of the target.
        if alone && pair.to.level > piece.level {
            pair.preallocate_tables(transfer)?;
        }
        let moved = if piece.level > Level::PTE {
            pair.move_slots(transfer)
        } else {
            pair.move_leaves(transfer)
        };
        if alone {
            if moved.is_ok() {
                pair.detach_emptied(pair.from, pair.from_base, cleared);
            }
            self.flush(pair.gather, pair.counts);
        }
        moved
    }
}

/// The context of a piece while its tables are locked.
struct Locked<'a, 'm, P: Platform> {
    pool: &'a mut TablePool<'m, P>,
    gather: &'a mut Gather,
    counts: &'a mut Counts,
    flush: PieceFlush,
}

/// When the TLBs forget the old places of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PieceFlush {
    /// Before the locks are released.
    BeforeUnlock,
    /// Later: the tables of both ends are marked.
    Pending,
}

/// `len` bytes from `source` on, whose entries move to `target` and after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Transfer {
    source: u64,
    target: u64,
    len: u64,
}

impl Transfer {
    /// The rest after the first `offset` bytes.
    #[inline]
    fn after(self, offset: u64) -> Self {
        Self { source: self.source + offset, target: self.target + offset, len: self.len - offset }
    }
}

/// Calls `f` for an address of each target table to which a part of the source moves. `look` finds
/// the entry of the source at an address, of `level` or above it. Stops early where many entries
/// were looked at, and returns the number of bytes after which the rest begins.
fn for_each_target<P: Platform>(
    page_table: &PageTable<'_, P>,
    Transfer { source, target, len }: Transfer,
    level: Level<P::Arch>,
    look: impl Fn(u64) -> EntryAt<P::Arch>,
    mut f: impl FnMut(u64) -> Result<(), NoMemory>,
) -> Result<u64, NoMemory> {
    let span = level.table_span();
    let end = source + len;
    let (mut at, mut looked) = (source, 0);
    while at < end && looked < locking::SPAN_ENTRIES / 2 {
        let EntryAt { node, entry, .. } = look(at);
        if entry.is_empty() && node.level > level {
            let last = at | (node.level.span() - 1);
            at = last.saturating_add(1);
            continue;
        }
        let table_end = ((at | (span - 1)) + 1).min(end);
        while at < table_end {
            // As far as one table of the target reaches.
            let to = target + (at - source);
            let stop = (at + (to | (span - 1)) + 1 - to).min(table_end);
            let count = ((stop - at) >> level.span_shift()) as u32;
            let first = level.index_of(VirtAddr(at));
            let vacant = if node.level > level {
                0
            } else {
                run::count_empty(&page_table.slots(node.table)[first.slots(count)])
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
