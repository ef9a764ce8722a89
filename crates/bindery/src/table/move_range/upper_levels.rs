//! The entries above level 1 that a move carries: tables, huge leaves with their deposits, and huge
//! absent entries. Entries of one kind side by side move in one pass.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{AbsentFormat, Arch, Entry, Kind, Level};
use crate::platform::Platform;
use crate::table::locked_piece::Below;
use crate::table::run::{self, Slots};
use crate::table::{NoMemory, TableSlot};

use super::Piece;
use super::leaves::RangePiece;

impl<P: Platform> RangePiece<'_, '_, P> {
    /// Moves the entries of a level above 1: tables, huge leaves, and absent entries. Fails as
    /// [`RangePiece::move_leaves`].
    pub(super) fn move_slots(&mut self) -> Result<(), NoMemory> {
        let piece @ Piece { level, source, target, len } = self.policy.piece;
        let span = level.span();
        let mut offset = 0;
        while offset < len {
            let table = match self.source(source + offset, source + offset) {
                Below::Table(table) => table,
                Below::Nothing(empty) => {
                    offset = empty.end(source + offset) - source;
                    continue;
                }
                Below::Huge(_) => {
                    // Not returned for a move of this level: the source splits such a leaf.
                    offset += span;
                    continue;
                }
            };
            let index = level.index_of(VirtAddr(source + offset));
            let from = TableSlot { table, index };
            let moved = self.move_alike(from, piece.after(offset))?;
            if moved > 0 {
                offset += moved * span;
                continue;
            }
            let slot = &self.page_table.slots(table)[index.slot()];
            let entry = Entry(slot.load(Ordering::Relaxed));
            self.counts.entries_read += 1;
            if !entry.is_empty() {
                let to = self.target(target + offset)?;
                self.move_absent(from, entry, to, target + offset);
            }
            offset += span;
        }
        Ok(())
    }

    /// Moves the tables, or the huge leaves, of `rest` whose entries lie side by side from the given
    /// one on, as far as both tables of this level reach. Returns their number; zero if the entry is
    /// neither.
    fn move_alike(&mut self, from: TableSlot, rest: Piece<P::Arch>) -> Result<u64, NoMemory> {
        let TableSlot { table, index } = from;
        let Piece { level, source, target, len } = rest;
        let left = len >> level.span_shift();
        let first = run::load(self.page_table.slots(table), index);
        let kind = level.kind(first);
        if kind != Kind::Table && kind != Kind::Leaf {
            return Ok(0);
        }
        let to = self.target(target)?;
        let there = level.index_of(VirtAddr(target));
        let slots = &self.page_table.slots(table)[index.slot()..];
        let there = &self.page_table.slots(to)[there.slot()..];
        let count = slots.len().min(there.len()).min(left as usize);
        let (slots, there) = (&slots[..count], &there[..count]);
        let moved = if kind == Kind::Table {
            move_names(slots, there, level)
        } else {
            move_huge_leaves(slots, there, level)
        };
        self.counts.entries_read += moved;
        self.count_moved(table, to, moved as u32);
        let len = moved << level.span_shift();
        let range = VirtRange::raw(source, source + len);
        if kind == Kind::Table {
            self.counts.tables_moved += moved;
            self.gather.stale_tables(range);
        } else {
            self.page_table.move_deposits(table, to, moved as u32);
            self.gather.stale(range, level);
        }
        Ok(moved)
    }

    /// Moves an absent entry.
    fn move_absent(&mut self, from: TableSlot, entry: Entry, to: Frame, target: u64) {
        let TableSlot { table, index } = from;
        let slot = &self.page_table.slots(table)[index.slot()];
        let there = self.policy.piece.level.index_of(VirtAddr(target));
        let there = &self.page_table.slots(to)[there.slot()];
        debug_assert_eq!(there.load(Ordering::Relaxed), 0, "the target is mapped");
        self.page_table.inherit_guards(table, to);
        slot.store(0, Ordering::Relaxed);
        there.store(P::Arch::mark_absent_soft_dirty(entry).0, Ordering::Release);
        self.count_moved(table, to, 1);
        self.page_table.move_deposits(table, to, 1);
    }
}

/// Moves entries that refer to tables, up to the first other entry, and returns their number.
fn move_names<A: Arch>(from: &[AtomicU64], to: &[AtomicU64], level: Level<A>) -> u64 {
    let mut moved = 0;
    for (slot, there) in from.iter().zip(to) {
        let entry = Entry(slot.load(Ordering::Relaxed));
        if level.kind(entry) != Kind::Table {
            break;
        }
        debug_assert_eq!(there.load(Ordering::Relaxed), 0, "the target is mapped");
        // Release: a reader of the empty entry finds its table locked, or the flush done.
        slot.store(0, Ordering::Release);
        there.store(entry.0, Ordering::Release);
        moved += 1;
    }
    moved
}

/// Moves huge leaves, up to the first other entry, and returns their number.
fn move_huge_leaves<A: Arch>(from: &[AtomicU64], to: &[AtomicU64], level: Level<A>) -> u64 {
    let mut moved = 0;
    for (slot, there) in from.iter().zip(to) {
        let entry = Entry(slot.load(Ordering::Relaxed));
        if level.kind(entry) != Kind::Leaf {
            break;
        }
        debug_assert_eq!(there.load(Ordering::Relaxed), 0, "the target is mapped");
        let old = A::replace_entry(slot, entry, |_| Entry::EMPTY);
        there.store(old.0 | A::SOFT_DIRTY, Ordering::Release);
        moved += 1;
    }
    moved
}
