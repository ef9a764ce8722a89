//! Moves of several pieces: between two pieces, only the locks of the VMAs are held.

#[cfg(not(all(test, loom)))]
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering;
#[cfg(all(test, loom))]
use loom::sync::atomic::AtomicU64;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::table::locking::Depth;
use crate::table::{NoMemory, PageTable, ReadSection, TablePool};
use crate::tlb::Gather;

use super::{Locked, Move, Piece, PieceFlush, Transfer, for_each_target};

/// The source of a move of several pieces that is under way in a tree. One at a time: the mover
/// holds the mutex of the address space. Moves that hold VMAs only for reading
/// ([`crate::table::move_pages`]) are counted: there may be many.
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

    /// The addresses under which TLBs may know pages that a move under way has carried elsewhere:
    /// the source, or `everything` if there may be many sources.
    #[cold]
    pub(crate) fn sources(&self, everything: VirtRange) -> Option<VirtRange> {
        let many = self.beside_faults.load(Ordering::Acquire) > 0;
        if many { Some(everything) } else { self.source() }
    }

    /// A move beside faults is about to mark its first table.
    pub(crate) fn begin_beside_faults(&self) {
        // Relaxed: the lock of the table that is marked publishes it.
        self.beside_faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Called after its last flush.
    pub(crate) fn end_beside_faults(&self) {
        self.beside_faults.fetch_sub(1, Ordering::Release);
    }

    /// The source, if a move is under way. Asked by a caller that has locked a table and found a
    /// mark of the move there: that comes after `begin`. If it comes after `end` too, so does it
    /// after the flush, and whatever is returned will do.
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

/// The most leaf tables that are preallocated under one set of locks; with those above, 64 KiB.
const PREALLOCATED_TABLES: u64 = 12;
/// More levels than any architecture has.
const MAX_LEVELS: u8 = 5;

impl<'m, P: Platform> PageTable<'m, P> {
    /// Prepares a move of several pieces, from the piece `first` on: creates all tables that the
    /// target lacks. From here on no thread removes a table of the target. The caller holds the VMA
    /// of the source for writing, and no other thread can find the target's yet. May wait for
    /// memory; if there is none, nothing has changed.
    ///
    /// No thread fills an empty entry of the source during the call, so it is read without locks.
    pub(crate) fn lay(
        &self,
        what: &Move,
        first: Piece<P::Arch>,
        pool: &mut TablePool<'m, P>,
        counts: &mut Counts,
    ) -> Result<(), NoMemory> {
        let done = self.preallocate_all(what, first, pool, counts);
        pool.settle(counts);
        if done.is_ok() {
            self.moving.begin(what.source);
        } else {
            self.free_preallocated_tables(what);
        }
        done
    }

    fn preallocate_all(
        &self,
        what: &Move,
        first: Piece<P::Arch>,
        pool: &mut TablePool<'m, P>,
        counts: &mut Counts,
    ) -> Result<(), NoMemory> {
        let mut next = Some(first);
        while let Some(mut piece) = next {
            let span = P::Arch::PMD.span();
            if piece.level == Level::PTE && piece.len > span {
                // Not congruent, so all that follows is of level 1 too.
                let longest = (PREALLOCATED_TABLES * span).min(what.source.len() - piece.offset);
                piece.len = piece.len.max(longest);
            }
            let mut covered = 0;
            while covered < piece.len {
                let rest =
                    Piece { offset: piece.offset + covered, len: piece.len - covered, ..piece };
                match self.preallocate_piece(what, rest, pool) {
                    Ok(more) => covered += more,
                    Err(NoMemory) => pool.refill()?,
                }
            }
            next = self.next_piece(what, piece.offset + piece.len, None, counts);
        }
        Ok(())
    }

    /// How many tables the target of a move can lack, whatever is mapped there now. More if a fault
    /// fills the source before the move.
    #[cold]
    pub(crate) fn tables_to_lay(&self, what: &Move, counts: &mut Counts) -> u64 {
        let root = self.root_node();
        let (mut tables, mut offset) = (0, 0);
        // The beginning of the last table of each level.
        const { assert!(P::Arch::LEVELS <= MAX_LEVELS) };
        let mut last = [None; MAX_LEVELS as usize + 1];
        while let Some(piece) = self.next_piece(what, offset, None, counts) {
            let (from, to) = (what.source.start().0 + piece.offset, what.to.0 + piece.offset);
            let section = ReadSection::enter(&self.memory.platform);
            let look = |at| self.entry_below(root, VirtAddr(at), piece.level, Ordering::Acquire);
            let transfer = Transfer { source: from, target: to, len: piece.len };
            let looked = for_each_target(self, transfer, piece.level, look, |to| {
                let below_root = |level: &Level<P::Arch>| *level < P::Arch::ROOT;
                for level in piece.level.up_to(P::Arch::ROOT).filter(below_root) {
                    let base = Some(to & !(level.table_span() - 1));
                    tables += u64::from(last[usize::from(level.number())] != base);
                    last[usize::from(level.number())] = base;
                }
                Ok(())
            });
            drop(section);
            offset = piece.offset + looked.unwrap_or(piece.len);
        }
        tables
    }

    /// Returns how many bytes of the piece it has got tables for.
    fn preallocate_piece(
        &self,
        what: &Move,
        piece: Piece<P::Arch>,
        pool: &mut TablePool<'m, P>,
    ) -> Result<u64, NoMemory> {
        let (source, target) = (what.source.start().0 + piece.offset, what.to.0 + piece.offset);
        let range = VirtRange::raw(target, target + piece.len);
        let mut cursor = self.unlocked_cursor(range);
        cursor.lock(Depth::Floor(piece.level), None);
        let len = cursor.range().len();
        let root = self.root_node();
        let look = |at| self.entry_below(root, VirtAddr(at), piece.level, Ordering::Acquire);
        let mut last = None;
        let transfer = Transfer { source, target, len };
        for_each_target(self, transfer, piece.level, look, |to| {
            let base = to & !(piece.level.table_span() - 1);
            if last != Some(base) {
                cursor.table_at(VirtAddr(to), piece.level, pool)?;
                last = Some(base);
            }
            Ok(())
        })
    }

    /// Moves everything, piece by piece, each by a call of `within`, which does what it is given
    /// with the rmap locks of the source held. [`PageTable::lay`] has made it ready, and the VMAs
    /// of both ends are in those trees. Cannot fail.
    ///
    /// Reads and writes the entries that are moved: one for each table that moves whole, one for
    /// each base page else. One invalidation for 64 tables, and one for each contiguous run or huge
    /// leaf that the ends cut; emptied tables are in the gather.
    pub(crate) fn move_in_pieces(
        &self,
        what: &Move,
        first: Piece<P::Arch>,
        gather: &mut Gather,
        counts: &mut Counts,
        within: impl Fn(&mut dyn FnMut()),
    ) {
        let mut pool = TablePool::new(self.memory);
        let mut next = Some(first);
        while let Some(piece) = next {
            if !gather.has_room_for_piece() {
                self.flush(gather, counts);
            }
            loop {
                let flush = PieceFlush::Pending;
                let mut locked = Locked { pool: &mut pool, gather, counts, flush };
                let mut moved = Ok(());
                within(&mut || moved = self.move_piece(what, piece, &mut locked));
                if moved.is_ok() {
                    break;
                }
                debug_assert!(false, "a preallocated table is missing");
                // Retry forever rather than leave the mapping half moved; each retry may sleep.
                let _ = pool.refill();
            }
            next = self.next_piece(what, piece.offset + piece.len, Some(&*gather), counts);
        }
        self.detach_source(what, gather);
        // If there was nothing to detach, entries may still be stale.
        self.flush(gather, counts);
        self.moving.end();
        pool.settle(counts);
    }
}
