//! The entries above level 1 that a move carries: tables, huge leaves with their deposits, and huge
//! absent entries. Adjacent entries of one kind move in one pass.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{AbsentFormat, Arch, Entry, Kind, Level};
use crate::platform::Platform;
use crate::table::mover::piece::{Below, Piece};
use crate::table::run::Entries;
use crate::table::{NoMemory, TableEntry, run};

use super::RangePiece;

impl<'s, P: Platform> RangePiece<'_, 's, '_, P> {
    /// Moves the entries of a level above 1: tables, huge leaves, and absent entries. Fails like
    /// `move_leaves`.
    pub(super) fn move_upper(&mut self) -> Result<(), NoMemory> {
        let Piece { level, source, target, len } = self.piece;
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
                    // Not returned for a move of this level, because the source splits such a leaf.
                    offset += span;
                    continue;
                }
            };
            let index = level.index_of(VirtAddr(source + offset));
            let from = TableEntry { table, index };
            let moved = self.move_alike(from, self.piece.after(offset))?;
            if moved > 0 {
                offset += moved * span;
                continue;
            }
            let word = &self.page_table.entries(table)[index.position()];
            let entry = Entry(word.load(Ordering::Relaxed));
            self.counts.entries_read += 1;
            if !entry.is_empty() {
                let to = target + offset;
                let to =
                    TableEntry { table: self.target(to)?, index: level.index_of(VirtAddr(to)) };
                self.move_absent(from, entry, to);
            }
            offset += span;
        }
        Ok(())
    }

    /// Moves adjacent tables or adjacent huge leaves of `rest`, from the given entry on, up to the
    /// end of either table of this level. Returns the number of moved entries; zero if the entry is
    /// neither.
    fn move_alike(&mut self, from: TableEntry, rest: Piece<P::Arch>) -> Result<u64, NoMemory> {
        let TableEntry { table, index } = from;
        let Piece { level, source, target, len } = rest;
        let left = len >> level.span_shift();
        let first = run::load(self.page_table.entries(table), index);
        let kind = level.kind(first);
        if kind != Kind::Table && kind != Kind::Leaf {
            return Ok(0);
        }
        let to = self.target(target)?;
        let there = level.index_of(VirtAddr(target));
        let entries = &self.page_table.entries(table)[index.position()..];
        let there = &self.page_table.entries(to)[there.position()..];
        let count = entries.len().min(there.len()).min(left as usize);
        let (entries, there) = (&entries[..count], &there[..count]);
        let moved = if kind == Kind::Table {
            // Release: a reader of the empty entry either finds its table locked or finds the flush
            // complete.
            move_entries(entries, there, level, Kind::Table, |word, entry| {
                word.store(0, Ordering::Release);
                entry.0
            })
        } else {
            move_entries(entries, there, level, Kind::Leaf, |word, entry| {
                P::Arch::replace_entry(word, entry, |_| Entry::EMPTY).0 | P::Arch::SOFT_DIRTY
            })
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
    fn move_absent(&mut self, from: TableEntry, entry: Entry, to: TableEntry) {
        let word = &self.page_table.entries(from.table)[from.index.position()];
        let there = &self.page_table.entries(to.table)[to.index.position()];
        debug_assert_eq!(there.load(Ordering::Relaxed), 0, "the target is mapped");
        self.page_table.inherit_guards(from.table, to.table);
        word.store(0, Ordering::Relaxed);
        there.store(P::Arch::mark_absent_soft_dirty(entry).0, Ordering::Release);
        self.count_moved(from.table, to.table, 1);
        self.page_table.move_deposits(from.table, to.table, 1);
    }
}

/// Moves entries up to the first entry that is not of `kind`, and returns the number of moved
/// entries. `take` clears an entry and returns the entry to write.
#[inline(always)]
fn move_entries<A: Arch>(
    from: &[AtomicU64],
    to: &[AtomicU64],
    level: Level<A>,
    kind: Kind,
    take: impl Fn(&AtomicU64, Entry) -> u64,
) -> u64 {
    let mut moved = 0;
    for (word, there) in from.iter().zip(to) {
        let entry = Entry(word.load(Ordering::Relaxed));
        if level.kind(entry) != kind {
            break;
        }
        debug_assert_eq!(there.load(Ordering::Relaxed), 0, "the target is mapped");
        there.store(take(word, entry), Ordering::Release);
        moved += 1;
    }
    moved
}
