//! The tables of both places of one piece of a move, locked: the ground of `mremap`
//! ([`super::move_range`]) and of `UFFDIO_MOVE` ([`super::move_pages`]).

use core::sync::atomic::Ordering;

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::locking::{self, End, LockSet, Node};
use super::{EntryAt, NoMemory, PageTable, ReadSection, TablePool};

/// The state that only one of the two moves has, and its way to lock.
pub(super) trait MovePolicy {
    /// The caller holds the VMAs of both places for reading only, so other moves run beside it.
    const BESIDE_MOVES: bool;
}

/// One piece: the tables of both places, locked until it is dropped.
pub(super) struct LockedPiece<'a, 'm, P: Platform, S> {
    pub(super) page_table: &'a PageTable<'m, P>,
    pub(super) locks: &'a mut LockSet,
    pub(super) pool: &'a mut TablePool<'m, P>,
    pub(super) gather: &'a mut Gather,
    pub(super) counts: &'a mut Counts,
    /// The covers of the source and of the target.
    pub(super) from: Node<P::Arch>,
    pub(super) to: Node<P::Arch>,
    /// The flush comes after the locks are released: the tables of both places are marked.
    pub(super) marks: bool,
    pub(super) policy: S,
    pub(super) _section: ReadSection<'m, P>,
}

impl<P: Platform, S> Drop for LockedPiece<'_, '_, P, S> {
    fn drop(&mut self) {
        self.locks.release(self.page_table);
    }
}

/// The content below an address.
pub(super) enum Below<A: Arch> {
    /// A table of the level that was asked for.
    Table(Frame),
    /// An empty entry above that level.
    Nothing(EntryAt<A>),
    /// A huge leaf, or a huge absent entry.
    Huge(EntryAt<A>),
}

impl<'m, P: Platform, S: MovePolicy> LockedPiece<'_, 'm, P, S> {
    /// Locks the tables of both places down to `floor`, and flushes what other operations have left
    /// pending there: the flush of this move would cover only the old place. Called once.
    #[inline(always)]
    pub(super) fn lock(&mut self, source: End, target: VirtRange, floor: Level<P::Arch>) {
        let page_table = self.page_table;
        [self.from, self.to] = if S::BESIDE_MOVES {
            let ranges = [source.range, target];
            locking::lock_both_ranges_beside_moves(page_table, ranges, floor, self.locks)
        } else {
            locking::lock_both_ranges(page_table, [source, target.into()], floor, self.locks)
        };
        self.counts.tables_locked += self.locks.len() as u64;
        if self.locks.is_pending() {
            for range in [source.range, target] {
                page_table.honor_pending(range, self.locks, Some(&*self.gather), self.counts);
            }
        }
    }

    /// Records that entries are about to leave the table, or to arrive there, if their flush comes
    /// after the unlock.
    #[inline]
    pub(super) fn mark(&mut self, table: Frame) {
        if self.marks {
            self.page_table.mark_moving(table, self.gather);
        }
    }

    /// The content of `cover` at `at`, down to a table of `level`.
    #[inline]
    pub(super) fn below(
        &mut self,
        cover: Node<P::Arch>,
        at: u64,
        level: Level<P::Arch>,
    ) -> Below<P::Arch> {
        let found = self.page_table.table_below(cover, VirtAddr(at), level, Ordering::Relaxed);
        let lowest = found.as_ref().map_or_else(|found| found.node.level, |node| node.level);
        self.counts.entries_descended += cover.level.steps_to(lowest);
        match found {
            Ok(node) => Below::Table(node.table),
            Err(found) if found.entry.is_empty() => Below::Nothing(found),
            Err(found) => Below::Huge(found),
        }
    }

    /// The target's table of `level` for `at`, created where it is missing. Fails if no table is
    /// free at once.
    #[inline]
    pub(super) fn target_table(
        &mut self,
        at: u64,
        level: Level<P::Arch>,
    ) -> Result<Frame, NoMemory> {
        let (page_table, cover, at) = (self.page_table, self.to, VirtAddr(at));
        self.counts.entries_descended += cover.level.steps_to(level);
        page_table.table_under(cover, at, level, |missing| {
            let table = page_table.put_table(&missing, at, self.counts, self.pool)?;
            self.locks.push(table);
            Ok(table)
        })
    }

    /// Replaces a huge entry by a table of entries one level below, which it returns locked.
    pub(super) fn split(&mut self, huge: &EntryAt<P::Arch>, at: u64) -> Result<Frame, NoMemory> {
        let table = self.page_table.split(huge, VirtAddr(at), self.counts)?;
        self.locks.push(table);
        Ok(table)
    }

    /// Counts entries that left one table of the source and arrived in one of the target.
    #[inline]
    pub(super) fn count_moved(&mut self, source: Frame, target: Frame, moved: u32) {
        self.counts.entries_written += 2 * u64::from(moved);
        self.page_table.change_entry_count(source, 0, moved);
        self.page_table.change_entry_count(target, moved, 0);
    }

    /// Makes the TLBs forget the old places, with the locks held.
    #[inline]
    pub(super) fn flush(&mut self) {
        self.page_table.flush(self.gather, self.counts);
    }
}
