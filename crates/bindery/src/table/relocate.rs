//! Moving what one range maps to another (`mremap`): whole tables by one entry at every level, the
//! rest in runs.
//!
//! ```text
//! source   |  edge |      512 slots of level 2      |  edge |    both ends congruent modulo 2 MiB
//! pieces   | leaves|  tables, at most 64 a piece    | leaves|
//!              |               |                        |
//! target   |  edge |      512 slots of level 2      |  edge |
//! ```
//!
//! Each piece is moved under one set of locks and flushed once, before any of them is given back:
//! 1. CPU A moves the entry of a page and drops the locks without a flush;
//! 2. CPU B swaps the page out through its new place, flushes that address, reuses the frame;
//! 3. CPU C still writes through its translation of the old address, into the reused frame.
//!
//! A move never fails half-way: the tables that the target needs are laid before the first entry
//! moves ([`PageTable::relocate`]). Emptied source tables go with the flush of their piece.

mod pair;
mod shifted;

use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{self, Arch, Entry, Kind};
use crate::platform::{Platform, Wait};
use crate::stats::Counts;
use crate::tlb::Gather;

use super::lock::{self, CHUNK_TABLES, Depth, LockSet, Node};
use super::run;
use super::zap::Flush;
use super::{OutOfMemory, PageTable, Reach, ReadSection, TablePool};
use pair::Pair;

/// A move whose source has at most so many tables of level 2 takes those that it empties in the
/// flush of its last piece.
const UPPER_TABLES: u64 = 8;

/// A part of a move that is done under one set of locks: entries of one level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    level: u8,
    /// Bytes from the beginning of the move.
    offset: u64,
    len: u64,
}

/// A move of `source` to `to`; the two do not overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub(crate) source: VirtRange,
    pub(crate) to: VirtAddr,
    /// `source`, and around it what nothing is mapped in: tables inside it are empty afterwards.
    pub(crate) hull: VirtRange,
}

impl<'m, P: Platform> PageTable<'m, P> {
    /// The first piece at or behind `offset` in which something may be mapped.
    #[inline]
    fn next_piece(&self, what: &Move, offset: u64, counts: &mut Counts) -> Option<Piece> {
        // Most moves are one piece: that there is no second costs no call.
        if offset >= what.source.len() {
            return None;
        }
        let _section = ReadSection::enter(&self.memory.platform);
        self.find_piece(what, offset, counts)
    }

    /// As [`PageTable::next_piece`], in a read section.
    fn piece_behind(&self, what: &Move, offset: u64, counts: &mut Counts) -> Option<Piece> {
        if offset < what.source.len() { self.find_piece(what, offset, counts) } else { None }
    }

    #[inline(never)]
    fn find_piece(&self, what: &Move, mut offset: u64, counts: &mut Counts) -> Option<Piece> {
        let (source, delta) = (what.source, what.to.0 ^ what.source.start().0);
        while offset < source.len() {
            let at = source.start().0 + offset;
            let left = source.len() - offset;
            let fits = |level: u8| {
                let mask = arch::span::<P::Arch>(level) - 1;
                (delta | at) & mask == 0 && left > mask
            };
            let mut level = 1;
            while self.reach == Reach::Table && level < P::Arch::LEVELS && fits(level + 1) {
                level += 1;
            }
            let (node, _, entry) = self.peek(VirtAddr(at), counts);
            if entry.is_empty() && node.level > level {
                if !lock::is_settled(self, node.table) {
                    self.settle(node, VirtAddr(at), None);
                }
                let slot_end = (at | (arch::span::<P::Arch>(node.level) - 1)).saturating_add(1);
                offset += (slot_end - at).min(left);
                continue;
            }
            let span = arch::span::<P::Arch>(level);
            // Up to where a higher level may fit, or as much as one set of locks spans.
            let above = arch::table_span::<P::Arch>(level);
            let len = if level == 1 {
                let congruent = self.reach == Reach::Table && delta & (above - 1) == 0;
                let tables = if congruent { 1 } else { CHUNK_TABLES };
                (at & !(above - 1)).saturating_add(tables * above) - at
            } else {
                let next = (at & !(above - 1)).saturating_add(above);
                let rises = self.reach == Reach::Table
                    && level < P::Arch::LEVELS
                    && delta & (above - 1) == 0
                    && source.end().0.saturating_sub(next) >= above;
                let cut = if rises { next - at } else { u64::MAX };
                (CHUNK_TABLES * span).min(cut)
            };
            let len = len.min(left) & !(span - 1);
            return Some(Piece { level, offset, len });
        }
        None
    }

    /// Moves everything, or nothing where memory runs out. The caller holds the VMAs of both ranges
    /// for writing, and the rmap locks of the source; nothing is mapped in the target. May wait for
    /// memory.
    ///
    /// Reads and writes the entries that are moved: one for each table that moves whole, one for
    /// each base page else. One invalidation a piece, and one for each contiguous block or huge
    /// leaf that its ends cut; emptied tables are in the gather.
    pub(crate) fn relocate(
        &self,
        what: &Move,
        gather: &mut Gather,
        counts: &mut Counts,
    ) -> Result<(), OutOfMemory> {
        let mut pool = TablePool::new(self.memory);
        let first = self.next_piece(what, 0, counts);
        let mut locked = Locked { pool: &mut pool, gather, counts: &mut *counts };
        let done = match first {
            // A single piece lays its own tables.
            Some(piece) if piece.offset + piece.len < what.source.len() => {
                self.lay_all(what, first, &mut locked)
            }
            _ => Ok(()),
        };
        let done = done.and_then(|()| self.relocate_from(what, first, &mut locked));
        if done.is_err() {
            self.take_laid(what);
        }
        if pool.is_used() {
            pool.give_back();
            *counts += pool.counts;
        }
        done
    }

    /// Creates all tables that the target lacks, so that no piece fails behind one that has moved:
    /// nobody takes an empty table out of a range whose VMAs are held. Nor does anybody fill what is
    /// empty in the source, so it is looked at without locks.
    #[inline(never)]
    fn lay_all(
        &self,
        what: &Move,
        first: Option<Piece>,
        locked: &mut Locked<'_, 'm, P>,
    ) -> Result<(), OutOfMemory> {
        let mut next = first;
        // Up to where there are tables of that level.
        let mut laid = (0, 0);
        loop {
            {
                let _section = ReadSection::enter(&self.memory.platform);
                while let Some(piece) = next
                    && self.is_laid(what, piece, &mut laid, locked.counts)
                {
                    next = self.piece_behind(what, piece.offset + piece.len, locked.counts);
                }
            }
            let Some(piece) = next else { return Ok(()) };
            while self.lay_piece(what, piece, locked.pool).is_err() {
                locked.pool.refill()?;
            }
            next = self.next_piece(what, piece.offset + piece.len, locked.counts);
        }
    }

    fn lay_piece(
        &self,
        what: &Move,
        piece: Piece,
        pool: &mut TablePool<'m, P>,
    ) -> Result<(), OutOfMemory> {
        let (source, target) = (what.source.start().0 + piece.offset, what.to.0 + piece.offset);
        let range = VirtRange::raw(target, target + piece.len);
        let mut cursor = self.unlocked_cursor(range);
        cursor.lock(Depth::Floor(piece.level), None);
        let root = Node { table: self.root, level: P::Arch::LEVELS };
        let look = |at| self.look_under(root, at, piece.level);
        let mut last = None;
        for_each_target(self, (source, target, piece.len), piece.level, look, |to| {
            let base = to & !(arch::table_span::<P::Arch>(piece.level) - 1);
            if last != Some(base) {
                cursor.table_at(VirtAddr(to), piece.level, pool)?;
                last = Some(base);
            }
            Ok(())
        })
    }

    /// The entry at `at` under `node`: that of `level`, or the one above it that has no table below
    /// it. In a read section, or with the tables locked.
    fn look_under(&self, mut node: Node, at: u64, level: u8) -> (Node, Entry) {
        loop {
            let index = arch::index_of::<P::Arch>(VirtAddr(at), node.level);
            let entry = Entry(self.slots(node.table)[index as usize].load(Ordering::Acquire));
            let below = arch::kind::<P::Arch>(entry, node.level) == Kind::Table;
            if node.level == level || !below {
                return (node, entry);
            }
            node = Node { table: P::Arch::frame(entry), level: node.level - 1 };
        }
    }

    /// Whether the target has all tables that a piece of a level above 1 could need: one or two.
    /// `laid` says up to where there are tables of which level. Called in a read section.
    fn is_laid(
        &self,
        what: &Move,
        piece: Piece,
        laid: &mut (u8, u64),
        counts: &mut Counts,
    ) -> bool {
        let start = what.to.0 + piece.offset;
        let last = start + piece.len - 1;
        if piece.level == 1 {
            return false;
        }
        if laid.0 == piece.level && last < laid.1 {
            return true;
        }
        let there =
            |at: u64, counts: &mut Counts| self.peek(VirtAddr(at), counts).0.level <= piece.level;
        let all = there(start, counts) && there(last, counts);
        if all {
            let span = arch::table_span::<P::Arch>(piece.level);
            *laid = (piece.level, (last | (span - 1)).saturating_add(1));
        }
        all
    }

    /// Takes the empty tables out again that a move has left in its target.
    #[cold]
    fn take_laid(&self, what: &Move) {
        let mut gather = Gather::new();
        let span = arch::table_span::<P::Arch>(1);
        let (start, end) = (what.to.0, what.to.0 + what.source.len());
        let slots = (start & !(span - 1)..end).step_by(span as usize);
        slots.for_each(|at| self.prune(VirtAddr(at), &mut gather));
        self.finish(&mut gather);
    }

    fn relocate_from(
        &self,
        what: &Move,
        first: Option<Piece>,
        locked: &mut Locked<'_, 'm, P>,
    ) -> Result<(), OutOfMemory> {
        let mut next = first;
        let mut whole = false;
        let moderate = what.source.len() <= UPPER_TABLES * arch::table_span::<P::Arch>(2);
        while let Some(piece) = next {
            let offset = piece.offset + piece.len;
            let reached_end = offset == what.source.len();
            let begin = what.source.start().0 + piece.offset;
            // The last piece of a move of moderate size takes all of the hull, and with it the
            // tables above; those of a larger one would be too many to lock. A piece of level 3
            // sees no table of level 2 that an earlier piece has emptied in part, so it may do so
            // only where there was no earlier one.
            let complete = piece.level <= 2 || piece.offset == 0;
            let cleared = if reached_end && moderate && complete {
                whole = true;
                what.hull
            } else {
                let start = if piece.offset == 0 { what.hull.start().0 } else { begin };
                let end = if reached_end { what.hull.end().0 } else { begin + piece.len };
                VirtRange::raw(start, end)
            };
            // A single piece lays its tables under the same locks.
            let single = next == first && reached_end;
            while self.relocate_piece(what, piece, cleared, single, locked).is_err() {
                if locked.pool.refill().is_err() {
                    if next == first {
                        // Nothing has moved.
                        return Err(OutOfMemory);
                    }
                    debug_assert!(false, "a table that was laid is gone");
                    // Rather wait for ever than tear the mapping apart.
                    self.memory.platform.relax(Wait::Long);
                }
            }
            next = self.next_piece(what, offset, locked.counts);
        }
        if !whole {
            // Tables above what moved may be left.
            // Nothing is mapped there any more, so there is nothing to split and no failure.
            let flush = Flush::BeforeUnlock;
            let emptied = self.zap(what.source, what.hull, flush, locked.gather);
            debug_assert!(emptied.is_ok(), "an empty range has no leaf to split");
        }
        Ok(())
    }

    #[inline]
    fn relocate_piece(
        &self,
        what: &Move,
        piece: Piece,
        cleared: VirtRange,
        single: bool,
        locked: &mut Locked<'_, 'm, P>,
    ) -> Result<(), OutOfMemory> {
        self.with_pair(what, piece, cleared, locked, |pair, source, target, len| {
            // A cover of the level that moves is the one table of the target.
            if single && pair.to.level > piece.level {
                pair.lay(source, target, len)?;
            }
            let moved = if piece.level > 1 {
                pair.move_slots(source, target, len)
            } else {
                pair.move_leaves(source, target, len)
            };
            if moved.is_ok() {
                pair.unhook_emptied(pair.from, pair.from_base, cleared);
            }
            self.flush(pair.gather, pair.counts);
            moved
        })
    }

    /// Does `work` with the tables of `locked_source` and of the piece's target locked; it gets the
    /// two addresses and the length of the piece.
    #[inline(always)]
    fn with_pair(
        &self,
        what: &Move,
        piece: Piece,
        locked_source: VirtRange,
        locked: &mut Locked<'_, 'm, P>,
        work: impl FnOnce(&mut Pair<'_, 'm, '_, P>, u64, u64, u64) -> Result<(), OutOfMemory>,
    ) -> Result<(), OutOfMemory> {
        let section = ReadSection::enter(&self.memory.platform);
        let mut locks = LockSet::new();
        let to = what.to.0 + piece.offset;
        let target = VirtRange::raw(to, to + piece.len);
        let (source_cover, target_cover) =
            lock::lock_pair(self, self.root, locked_source, target, piece.level, &mut locks);
        locked.counts.tables_locked += locks.len() as u64;
        if locks.is_pending() {
            // Before anything is carried away: the flush of this move would name the old place alone.
            self.honour_pending(locked_source, &locks, None, locked.counts);
            self.honour_pending(target, &locks, None, locked.counts);
        }
        let from_span = arch::table_span::<P::Arch>(source_cover.level);
        let mut pair = Pair {
            tables: self,
            locks: &mut locks,
            counts: &mut *locked.counts,
            from: source_cover,
            to: target_cover,
            from_base: locked_source.start().align_down(from_span),
            moved: what.source,
            level: piece.level,
            source_table: None,
            target_tables: [None; 2],
            pool: &mut *locked.pool,
            gather: &mut *locked.gather,
            _section: section,
        };
        work(&mut pair, what.source.start().0 + piece.offset, to, piece.len)
    }
}

/// What a piece needs while its tables are locked.
struct Locked<'a, 'm, P: Platform> {
    pool: &'a mut TablePool<'m, P>,
    gather: &'a mut Gather,
    counts: &'a mut Counts,
}

/// Calls `f` for an address of each target table that something of the source goes to: `len` bytes
/// from `source` on, which go to `target` and behind it. `look` finds the entry of the source at an
/// address, of `level` or above it.
fn for_each_target<P: Platform>(
    tables: &PageTable<'_, P>,
    (source, target, len): (u64, u64, u64),
    level: u8,
    look: impl Fn(u64) -> (Node, Entry),
    mut f: impl FnMut(u64) -> Result<(), OutOfMemory>,
) -> Result<(), OutOfMemory> {
    let span = arch::table_span::<P::Arch>(level);
    let end = source + len;
    let mut at = source;
    while at < end {
        let (node, entry) = look(at);
        if entry.is_empty() && node.level > level {
            let last = at | (arch::span::<P::Arch>(node.level) - 1);
            at = last.saturating_add(1);
            continue;
        }
        let table_end = ((at | (span - 1)) + 1).min(end);
        while at < table_end {
            // As far as one table of the target reaches.
            let to = target + (at - source);
            let stop = (at + (to | (span - 1)) + 1 - to).min(table_end);
            let count = ((stop - at) >> arch::span_shift::<P::Arch>(level)) as u32;
            let first = arch::index_of::<P::Arch>(VirtAddr(at), level);
            let occupied =
                node.level > level || run::empty(tables.slots(node.table), first, count) < count;
            if occupied {
                f(to)?;
            }
            at = stop;
        }
    }
    Ok(())
}
