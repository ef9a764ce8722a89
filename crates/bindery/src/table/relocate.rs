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
//! A move never fails half-way: the tables that the target needs are allocated before the first
//! entry moves ([`PageTable::plan_move`]). Emptied source tables go with the flush of their piece.

mod pair;
mod shifted;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{self, Arch};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::{Flush, Gather};

use super::lock::{self, CHUNK_TABLES, LockSet};
use super::{PageTable, Reach, ReadSection, TablePool};
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

/// What a move needs.
pub(crate) struct Plan {
    /// How many tables the target lacks.
    pub(crate) tables: u64,
    /// The piece to begin with.
    pub(crate) first: Option<Piece>,
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

    /// What a move will need. The caller keeps everyone else out of both ranges until the move.
    /// Reads a few entries for each source table.
    pub(crate) fn plan_move(&self, what: &Move, counts: &mut Counts) -> Plan {
        let _section = ReadSection::enter(&self.memory.platform);
        let mut missing = Missing { last: [None; 8], count: 0 };
        let mut offset = 0;
        let first = self.next_piece(what, offset, counts);
        let mut next = first;
        while let Some(piece) = next {
            let source = what.source.start().0 + piece.offset;
            let target = what.to.0 + piece.offset;
            if piece.level > 1 {
                self.missing(&mut missing, target, piece.len, piece.level, counts);
            } else {
                let mut at = source;
                while at < source + piece.len {
                    let slot_end = (at | (arch::table_span::<P::Arch>(1) - 1)) + 1;
                    let end = slot_end.min(source + piece.len);
                    let (node, _, entry) = self.peek(VirtAddr(at), counts);
                    let filled =
                        if node.level == 1 { self.live(node.table) > 0 } else { !entry.is_empty() };
                    if filled {
                        let target = target + (at - source);
                        self.missing(&mut missing, target, end - at, 1, counts);
                    }
                    at = end;
                }
            }
            offset = piece.offset + piece.len;
            next = self.next_piece(what, offset, counts);
        }
        Plan { tables: missing.count, first }
    }

    /// Counts the tables down to `level` that are missing for `len` bytes at `target`.
    fn missing(
        &self,
        missing: &mut Missing,
        target: u64,
        len: u64,
        level: u8,
        counts: &mut Counts,
    ) {
        for addr in [target, target + len - 1] {
            let (node, _, _) = self.peek(VirtAddr(addr), counts);
            for lacking in level..node.level {
                let base = addr & !(arch::table_span::<P::Arch>(lacking) - 1);
                let last = &mut missing.last[usize::from(lacking) % 8];
                if *last != Some(base) {
                    *last = Some(base);
                    missing.count += 1;
                }
            }
        }
    }

    /// Moves everything. `first` is the first piece of the plan, and `pool` holds at least as many
    /// tables as the plan asks for. The caller holds the VMAs of both ranges for writing; nothing is
    /// mapped in the target.
    ///
    /// Reads and writes the entries that are moved: one for each table that moves whole, one for
    /// each base page else. One invalidation a piece, and one for each contiguous block or huge
    /// leaf that its ends cut; emptied tables that no piece could take are in the gather.
    pub(crate) fn relocate(
        &self,
        what: &Move,
        first: Option<Piece>,
        pool: &mut TablePool<'m, P>,
        counts: &mut Counts,
    ) -> Gather {
        let mut gather = Gather::new();
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
            self.relocate_piece(what, piece, cleared, pool, &mut gather, counts);
            next = self.next_piece(what, offset, counts);
        }
        if !whole {
            // Tables above what moved may be left.
            // Nothing is mapped there any more, so there is nothing to split and no failure.
            let emptied = self.zap(what.source, what.hull, Flush::Later, &mut gather);
            debug_assert!(emptied.is_ok(), "an empty range has no leaf to split");
        }
        gather
    }

    fn relocate_piece(
        &self,
        what: &Move,
        piece: Piece,
        cleared: VirtRange,
        pool: &mut TablePool<'m, P>,
        gather: &mut Gather,
        counts: &mut Counts,
    ) {
        let section = ReadSection::enter(&self.memory.platform);
        let mut locks = LockSet::new();
        let target = what.to.0 + piece.offset;
        let target = VirtRange::raw(target, target + piece.len);
        let (from, to) = lock::lock_pair(self, self.root, cleared, target, piece.level, &mut locks);
        counts.tables_locked += locks.len() as u64;
        let source = what.source.start().0 + piece.offset;
        let mut pair = Pair {
            tables: self,
            locks: &mut locks,
            counts,
            from,
            to,
            from_base: cleared.start().align_down(arch::table_span::<P::Arch>(from.level)),
            moved: what.source,
            level: piece.level,
            source_table: None,
            target_table: None,
            pool,
            gather,
            _section: section,
        };
        if piece.level > 1 {
            pair.move_slots(source, target.start().0, piece.len);
        } else {
            pair.move_leaves(source, target.start().0, piece.len);
        }
        pair.unhook_emptied(from, pair.from_base, cleared);
        self.flush(pair.gather, pair.counts);
    }
}

/// Which missing tables were counted already: the last one on each level, as addresses rise.
struct Missing {
    last: [Option<u64>; 8],
    count: u64,
}
