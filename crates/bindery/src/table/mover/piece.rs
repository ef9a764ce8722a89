//! One piece of a move with its tables locked: the steps that both movers share.

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::table::locking::{self, End, LockSet, Node};
use crate::table::{EntryAt, NoMemory, PageTable, ReadSection, Table, TablePool};
use crate::tlb::Gather;

/// The entries that move under one set of locks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece<A: Arch> {
    /// The level of the moving entries.
    pub(super) level: Level<A>,
    pub(super) source: u64,
    pub(super) target: u64,
    /// The length, in bytes.
    pub(super) len: u64,
}

impl<A: Arch> Piece<A> {
    /// The rest after the first `offset` bytes.
    #[inline]
    pub(super) fn after(self, offset: u64) -> Self {
        let (source, target) = (self.source + offset, self.target + offset);
        Self { source, target, len: self.len - offset, ..self }
    }

    pub(super) fn source(&self) -> VirtRange {
        VirtRange::raw(self.source, self.source + self.len)
    }

    pub(super) fn target(&self) -> VirtRange {
        VirtRange::raw(self.target, self.target + self.len)
    }
}

/// The mode in which the VMAs of both ranges are held.
pub(super) trait MovePolicy {
    /// Whether the VMAs are held for reading only, so that other such moves may run at the same
    /// time. In that case, carried tables are also locked, and no table above level 1 is carried.
    const BESIDE_MOVES: bool;

    /// The source, together with the surrounding addresses whose tables serve only the source.
    #[inline]
    fn end_at(&self, source: VirtRange) -> End {
        source.into()
    }
}

/// One piece, whose tables in both ranges stay locked until the value is dropped.
pub(super) struct LockedPiece<'a, 's, 'm, P: Platform, S> {
    pub(super) page_table: &'s PageTable<'m, P>,
    pub(super) locks: &'a mut LockSet,
    pub(super) pool: &'a mut TablePool<'m, P>,
    pub(super) gather: &'a mut Gather,
    pub(super) counts: &'a mut Counts,
    /// The covers of the source and of the target.
    pub(super) from: Node<P::Arch, Table<'s>>,
    pub(super) to: Node<P::Arch, Table<'s>>,
    /// Whether the flush follows the release of the locks, in which case the tables of both ranges
    /// are marked.
    pub(super) marks: bool,
    pub(super) piece: Piece<P::Arch>,
    pub(super) policy: S,
}

impl<P: Platform, S> Drop for LockedPiece<'_, '_, '_, P, S> {
    #[inline]
    fn drop(&mut self) {
        self.locks.release_all(|table| self.page_table.unlock(table));
    }
}

/// The content below an address.
pub(super) enum Below<'s, A: Arch> {
    /// A table of the requested level.
    Table(Table<'s>),
    /// An empty entry above that level.
    Nothing(EntryAt<A, Table<'s>>),
    /// A huge leaf, or a huge absent entry.
    Huge(EntryAt<A, Table<'s>>),
}

impl<'s, P: Platform, S: MovePolicy> LockedPiece<'_, 's, '_, P, S> {
    /// Locks the tables of both ranges, and flushes both ranges on behalf of other operations with
    /// pending marks, because the flush of this move would cover only the old addresses. Called
    /// once.
    #[inline(always)]
    pub(super) fn lock(&mut self, section: &'s ReadSection<'_, P>) {
        let (page_table, piece) = (self.page_table, self.piece);
        let ranges = [piece.source(), piece.target()];
        let tables = page_table.tables(section);
        [self.from, self.to] = if S::BESIDE_MOVES {
            locking::lock_both_ranges_beside_moves(&tables, ranges, Level::PTE, self.locks)
        } else {
            let ends = [self.policy.end_at(ranges[0]), ranges[1].into()];
            locking::lock_both_ranges(&tables, ends, piece.level, self.locks)
        };
        self.counts.tables_locked += self.locks.len() as u64;
        if self.locks.is_pending() {
            for range in ranges {
                page_table.honor_pending(range, self.locks, Some(&*self.gather), self.counts);
            }
        }
    }

    /// Records that entries are about to leave or to enter the table, if their flush follows the
    /// unlock.
    #[inline]
    pub(super) fn mark(&mut self, table: Table<'_>) {
        if self.marks {
            self.page_table.mark_moving(table.frame(), self.gather);
        }
    }

    /// The content of `cover` at `at`, down to a table of `level`.
    #[inline]
    pub(super) fn below(
        &mut self,
        cover: Node<P::Arch, Table<'s>>,
        at: u64,
        level: Level<P::Arch>,
    ) -> Below<'s, P::Arch> {
        let found = self.page_table.table_below(cover, VirtAddr(at), level, Ordering::Relaxed);
        let lowest = found.as_ref().map_or_else(|found| found.node.level, |node| node.level);
        self.counts.entries_descended += cover.level.steps_to(lowest);
        match found {
            Ok(node) => Below::Table(node.table),
            Err(found) if found.entry.is_empty() => Below::Nothing(found),
            Err(found) => Below::Huge(found),
        }
    }

    /// The target's table of `level` for `at`, created if it is missing. Fails if no table is
    /// immediately available.
    #[inline]
    pub(super) fn target_table(
        &mut self,
        at: u64,
        level: Level<P::Arch>,
    ) -> Result<Table<'s>, NoMemory> {
        let (page_table, cover, at) = (self.page_table, self.to, VirtAddr(at));
        self.counts.entries_descended += cover.level.steps_to(level);
        page_table.table_under(cover, at, level, |missing| {
            let table = page_table.put_table(&missing, at, self.counts, self.pool)?;
            self.locks.push(table.frame());
            Ok(table)
        })
    }

    /// Replaces a huge entry by a table of entries one level below, and returns the table locked.
    pub(super) fn split(
        &mut self,
        huge: &EntryAt<P::Arch, Table<'s>>,
        at: u64,
    ) -> Result<Table<'s>, NoMemory> {
        let table = self.page_table.split(huge, VirtAddr(at), self.counts)?;
        self.locks.push(table.frame());
        Ok(table)
    }

    /// Records that TLBs may hold `count` pages of the source from page `page` of the piece on.
    #[inline]
    pub(super) fn stale_pages(&mut self, page: u32, count: u32) {
        self.gather.stale(self.source_pages(page, count), P::Arch::PTE);
    }

    /// The addresses of `count` pages of the source from page `page` of the piece on.
    #[inline]
    pub(super) fn source_pages(&self, page: u32, count: u32) -> VirtRange {
        let start = self.source_at(page);
        VirtRange::raw(start, start + u64::from(count) * PAGE_SIZE)
    }

    /// The source address of page `page` of the piece.
    #[inline]
    pub(super) fn source_at(&self, page: u32) -> u64 {
        self.piece.source + u64::from(page) * PAGE_SIZE
    }

    /// The target address of page `page` of the piece.
    #[inline]
    pub(super) fn target_at(&self, page: u32) -> u64 {
        self.piece.target + u64::from(page) * PAGE_SIZE
    }

    /// Counts entries that have left one table of the source and entered one table of the target.
    #[inline]
    pub(super) fn count_moved(&mut self, source: Table<'_>, target: Table<'_>, moved: u32) {
        self.counts.entries_written += 2 * u64::from(moved);
        self.page_table.change_entry_count(source, 0, moved);
        self.page_table.change_entry_count(target, moved, 0);
    }
}
