//! Moves of several pieces: between two pieces, only the locks of the VMAs are held.

use crate::addr::VirtAddr;
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::table::NoMemory;
use crate::table::locking::Depth;

use super::{Piece, RangeMover, for_each_target};

/// The maximum number of leaf tables that are preallocated under one set of locks; 64 KiB together
/// with the upper tables.
const PREALLOCATED_TABLES: u64 = 12;
/// More levels than any architecture has.
const MAX_LEVELS: u8 = 5;

impl<P: Platform> RangeMover<'_, '_, P> {
    /// Prepares a move of several pieces by creating all tables that the target lacks. From then on
    /// no thread removes a table of the target, and no other thread can find the target's VMA yet.
    /// May wait for memory; if memory runs out, nothing has changed.
    ///
    /// No thread fills an empty entry of the source during the call, so the source is read without
    /// locks.
    pub(crate) fn preallocate_tables(&mut self) -> Result<(), NoMemory> {
        let done = self.preallocate_all();
        self.pool.settle(self.counts);
        if done.is_ok() {
            self.page_table.moving.begin(self.kind.source.range);
        } else {
            self.free_preallocated_tables();
        }
        done
    }

    fn preallocate_all(&mut self) -> Result<(), NoMemory> {
        let mut next = self.kind.first;
        while let Some(mut piece) = next {
            let span = P::Arch::PMD.span();
            if piece.level == Level::PTE && piece.len > span {
                // The ends are not congruent, so everything that follows is also of level 1.
                let left = self.kind.source.range.end().0 - piece.source;
                piece.len = piece.len.max((PREALLOCATED_TABLES * span).min(left));
            }
            let mut covered = 0;
            while covered < piece.len {
                match self.preallocate_piece(piece.after(covered)) {
                    Ok(more) => covered += more,
                    Err(NoMemory) => self.pool.refill()?,
                }
            }
            next = self.next_piece(piece.source + piece.len);
        }
        Ok(())
    }

    /// Fills the pool with the tables that the target can lack, whatever is currently mapped there.
    /// More tables may be needed if a fault fills the source before the move. May wait for memory.
    #[cold]
    pub(crate) fn supply_tables(&mut self) -> Result<(), NoMemory> {
        let page_table = self.page_table;
        let mut tables = 0;
        // The beginning of the last table of each level.
        const { assert!(P::Arch::LEVELS <= MAX_LEVELS) };
        let mut last = [None; MAX_LEVELS as usize + 1];
        let mut next = self.kind.first;
        while let Some(piece) = next {
            let section = page_table.read_section();
            let looked = for_each_target(page_table, page_table.root_in(&section), piece, |to| {
                let below_root = |level: &Level<P::Arch>| *level < P::Arch::ROOT;
                for level in piece.level.up_to(P::Arch::ROOT).filter(below_root) {
                    let base = Some(to & !(level.table_span() - 1));
                    tables += u64::from(last[usize::from(level.number())] != base);
                    last[usize::from(level.number())] = base;
                }
                Ok(())
            });
            drop(section);
            next = self.next_piece(piece.source + looked.unwrap_or(piece.len));
        }
        self.pool.add(tables)
    }

    /// Returns the number of bytes of the piece for which tables now exist.
    fn preallocate_piece(&mut self, mut piece: Piece<P::Arch>) -> Result<u64, NoMemory> {
        let (page_table, level) = (self.page_table, piece.level);
        let section = page_table.read_section();
        let mut cursor = page_table.unlocked_cursor(&section, piece.target());
        cursor.lock(&section, Depth::Floor(level), None);
        piece.len = cursor.range().len();
        let mut last = None;
        for_each_target(page_table, page_table.root_in(&section), piece, |to| {
            let base = to & !(level.table_span() - 1);
            if last != Some(base) {
                cursor.table_at(VirtAddr(to), level, self.pool)?;
                last = Some(base);
            }
            Ok(())
        })
    }

    /// Moves everything, piece by piece. Each piece is one call of `within`, which runs its
    /// argument with the locks of the source's reverse map held. `preallocate_tables` has
    /// succeeded, and the VMAs of both ends are in the trees of the reverse map. Cannot fail.
    ///
    /// Reads and writes the moved entries: one per table that moves as a whole, otherwise one per
    /// base page. Makes one invalidation per 64 tables, and one for each contiguous run or huge
    /// leaf that the ends divide. Emptied tables enter the gather.
    pub(crate) fn move_in_pieces(&mut self, within: impl Fn(&mut dyn FnMut())) {
        self.marks = true;
        let mut next = self.kind.first;
        while let Some(piece) = next {
            if !self.gather.has_room_for_piece() {
                self.flush();
            }
            loop {
                let mut moved = Ok(());
                within(&mut || moved = self.move_piece(piece));
                if moved.is_ok() {
                    break;
                }
                debug_assert!(false, "a preallocated table is missing");
                // Retries forever rather than leave the mapping half moved; each retry may sleep.
                let _ = self.pool.refill();
            }
            next = self.next_piece(piece.source + piece.len);
        }
        self.detach_source();
        // If there was nothing to detach, entries may still be stale.
        self.flush();
        self.page_table.moving.end();
        self.pool.settle(self.counts);
    }
}
