//! Flushes translations of entries removed from tables, and frees the pages and tables afterwards
//! ([`crate::tlb`] defines the rule).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Frame, Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::deferred::{Batch, DetachedTables};
use crate::platform::{Invalidation, Platform, Tables};
use crate::stats::Counts;
use crate::tlb::{self, Gather};

use super::detach::gather_detached;
use super::edit::Edit;
use super::locking::{Depth, LockSet, Node};
use super::zap_rmap::RmapZap;
use super::{PageTable, Table};
use crate::frame::pending::{self, Last};

impl<P: Platform> PageTable<'_, P> {
    /// Invalidates immediately, between breaking an entry and making the new one.
    pub(crate) fn invalidate_now(
        &self,
        range: VirtRange,
        level: Level<P::Arch>,
        counts: &mut Counts,
    ) {
        let what = Invalidation { range, stride: level.span(), tables: Tables::Unchanged };
        tlb::invalidate(self.memory.platform(), self.root, &self.active_cpus, &what, counts);
    }

    /// Flushes stale translations from every TLB and lowers the pending counts that waited for the
    /// flush.
    pub(crate) fn flush(&self, gather: &mut Gather, counts: &mut Counts) {
        gather.flush(self.memory.platform(), self.root, &self.active_cpus, counts);
        while let Some(table) = gather.take_mark() {
            // SAFETY: 1. the gather held the mark of a table whose count it had raised; 2. flushed
            // above.
            unsafe { self.lower_pending(table) };
        }
    }

    /// Raises the pending count of `table`. The caller holds the table's lock and is about to
    /// narrow an entry of the table; the gather's flush follows the release of the lock
    /// ([`crate::tlb`]).
    #[inline]
    pub(crate) fn mark_pending(&self, table: Frame, gather: &mut Gather, counts: &mut Counts) {
        if gather.has_just_marked(table) {
            return;
        }
        if !gather.has_room_for_mark() {
            self.flush(gather, counts);
        }
        pending::raise(self.meta(table).pending());
        gather.note_mark(table);
    }

    /// As [`PageTable::mark_pending`], for the source or the target table of a move.
    pub(crate) fn mark_moving(&self, table: Frame, gather: &mut Gather) {
        if !gather.has_lately_marked(table) {
            pending::raise(self.meta(table).pending());
            gather.note_mark(table);
        }
    }

    /// Lowers the pending count of a table after the flush. If the table has since been detached,
    /// the thread that lowers the count to zero frees it.
    ///
    /// # Safety
    /// 1. The caller has raised the count of this table and lowers it once.
    /// 2. The translations that the caller narrowed in the table were flushed.
    unsafe fn lower_pending(&self, table: Frame) {
        if pending::lower(self.meta(table).pending()) == Last::Yes {
            // The table was counted when it was handed over (`take_emptied`). SAFETY: 1. only the
            // last thread to lower the count frees the table, and each lowers what it raised
            // (obligation 1); 2. it was detached and flushed (obligation 2), and its readers have
            // left (`release_table` lowered the count then).
            unsafe { self.memory.frames.free(table, Order::PAGE) };
        }
    }

    /// Flushes `range` for a caller that has locked the tables in `locks` and found one of them
    /// pending. The caller remains responsible for the marks of its own gather, `own`.
    #[cold]
    pub(crate) fn honor_pending(
        &self,
        range: VirtRange,
        locks: &LockSet,
        own: Option<&Gather>,
        counts: &mut Counts,
    ) {
        let others = |table: &Frame| {
            let pending = pending::count(self.meta(*table).pending());
            pending > 0 && !own.is_some_and(|own| own.has_marked(*table, pending))
        };
        let pending = locks.tables().iter().filter(|table| others(table));
        let level: Option<Level<P::Arch>> = pending.map(|table| self.meta(*table).level()).max();
        let Some(level) = level else { return };
        // Translations below an entry of the table may belong to any address in the entry's span.
        let span = level.span();
        let start = range.start().align_down(span);
        let end = range.end().0.checked_next_multiple_of(span).unwrap_or(range.end().0);
        let what = Invalidation {
            range: VirtRange::raw(start.0, end),
            stride: PAGE_SIZE,
            tables: Tables::Changed,
        };
        tlb::invalidate(self.memory.platform(), self.root, &self.active_cpus, &what, counts);
        // A move in progress may have brought entries to the table that TLBs cache under the old
        // addresses. Callers with marks of their own also perform that flush. A walk of the reverse
        // map also visits and flushes the move's source, but nothing depends on it.
        let everything = VirtRange::raw(0, P::Arch::USER_END);
        if let Some(range) = self.moving.sources(everything) {
            let what = Invalidation { range, ..what };
            tlb::invalidate(self.memory.platform(), self.root, &self.active_cpus, &what, counts);
        }
    }

    /// Flushes the source of a move of several pieces, if such a move is in progress in this tree.
    /// Walks of the reverse map call this function. They hold a tree lock, so no piece of their VMA
    /// moves during the call. The flush is needed because a move marks only the tables at both
    /// ends, not the tables that it carries along:
    /// 1. CPU A moves a table from X to Y and releases the locks without a flush.
    /// 2. CPU B truncates the file: it locks only the table, which has no mark, clears an entry,
    ///    flushes Y and frees the page.
    /// 3. CPU C still writes through its translation of X.
    pub(crate) fn flush_source_of_move(&self) {
        if let Some(range) = self.moving.source() {
            let what = Invalidation { range, stride: PAGE_SIZE, tables: Tables::Changed };
            let mut counts = Counts::default();
            let (platform, cpus) = (self.memory.platform(), &self.active_cpus);
            tlb::invalidate(platform, self.root, cpus, &what, &mut counts);
            self.count(&counts);
        }
    }

    /// Waits for the flush of the former contents of `node`'s entry around `at`, or performs it.
    /// The caller has read the entry as empty without a lock. Returns whether it is empty indeed:
    /// while another thread splits a huge leaf, with the lock, the entry is empty for a moment.
    /// Flushes that are pending only for `own` are left to the caller.
    #[cold]
    pub(crate) fn is_empty_after_flushes(
        &self,
        node: Node<P::Arch, Table<'_>>,
        at: VirtAddr,
        own: Option<&Gather>,
    ) -> bool {
        let table = node.table.frame();
        let pending = pending::count(self.meta(table).pending());
        if !self.is_locked(table) && pending == own.map_or(0, |own| own.marks_of(table)) {
            return true;
        }
        let span = node.level.span();
        let start = at.align_down(span);
        let range = VirtRange::raw(start.0, start.0.saturating_add(span));
        // The cursor acquires the lock and reads the count.
        let section = self.read_section();
        let mut cursor = self.cursor_beside(&section, range, Depth::Floor(node.level), own);
        let found = cursor.entry_at(at);
        found.entry.is_empty() && found.node.level >= node.level
    }
}

impl<'m, P: Platform> PageTable<'m, P> {
    /// Lends an edit to `work`, then flushes and frees what the edit has gathered. Never waits for
    /// readers, so the caller may hold locks of VMAs and objects. Called outside of read sections.
    #[inline]
    pub(crate) fn edit<R>(&self, work: impl FnOnce(&mut Edit<'_, 'm, P>) -> R) -> R {
        let mut gather = Gather::new();
        let mut edit = Edit::new(self, &mut gather);
        let result = work(&mut edit);
        edit.finish();
        result
    }
}

impl<'m, P: Platform> Edit<'_, 'm, P> {
    /// Invalidates stale translations and counts down pages that were unmapped in VMAs that stay.
    /// Every operation calls this function before it releases the mutex. (No other thread relies on
    /// the call for the flush: a thread that locks a table finds the mark of the pending flush, see
    /// [`crate::tlb`].)
    #[inline(always)]
    pub(crate) fn flush(&mut self) {
        let (_, gather) = self.parts();
        // Most calls have flushed while the tables were locked and have freed no table.
        if gather.is_stale() || !gather.is_done() {
            self.flush_gathered();
        } else {
            gather.take_uncharge_before_unlock();
        }
    }

    /// As [`Edit::flush`], for a gather with work to flush or to count down.
    #[inline(never)]
    fn flush_gathered(&mut self) {
        let mut flushed = self.flushed();
        if flushed.gather.take_uncharge_before_unlock() {
            flushed.drop_contents(|| {});
        }
    }

    /// Invalidates stale translations.
    pub(crate) fn flush_stale(&mut self) {
        let (page_table, gather) = self.parts();
        let mut counts = Counts::default();
        page_table.flush(gather, &mut counts);
        page_table.count(&counts);
    }

    /// Flushes the remaining translations and frees the gathered pages and tables; tables are freed
    /// after their readers have left. Never waits for readers, so the caller may hold locks of VMAs
    /// and objects. Called outside of read sections.
    pub(crate) fn finish(&mut self) {
        let mut flushed = self.flushed();
        flushed.drop_contents(|| {});
        let tables = flushed.take_emptied();
        Batch::of(tables).free_after_readers(self.memory);
    }

    /// Invalidates stale translations and lends the gather to a caller that frees.
    #[inline]
    pub(crate) fn flushed(&mut self) -> Flushed<'_, 'm, P> {
        if self.is_stale() {
            self.flush_stale();
        }
        let (page_table, gather) = self.parts();
        Flushed { page_table, gather }
    }
}

/// The gather of an edit, without stale translations. A value of this type proves that:
/// - no TLB has a translation that the edit has narrowed or removed;
/// - the edit narrows no entry while the value exists, because the value borrows it.
///
/// Only this value frees the pages of detached tables.
pub(crate) struct Flushed<'op, 'm, P: Platform> {
    page_table: &'op PageTable<'m, P>,
    gather: &'op mut Gather,
}

impl<P: Platform> Flushed<'_, '_, P> {
    /// The detached tables, after their pages were freed, for a caller that has the tables freed
    /// after their readers have left. The tables count as freed from here on. Called without locks,
    /// so other threads may run between two tables.
    pub(crate) fn take_detached(mut self) -> DetachedTables {
        let platform = self.page_table.memory.platform();
        self.drop_contents(|| platform.yield_if_due());
        self.take_emptied()
    }

    /// Frees the pages of the detached tables. Calls `between` after each table.
    fn drop_contents(&mut self, between: impl Fn()) {
        let Self { page_table, gather } = self;
        let memory = page_table.memory;
        if gather.detached.is_empty() && gather.unscanned.is_empty() {
            return;
        }
        let mut counts = Counts::default();
        gather_detached(page_table, gather, &mut counts);
        let mut batch = memory.free_batch();
        let mut zap = RmapZap::detached(memory, &mut batch, &mut counts);
        while let Some(table) = gather.detached.pop(&memory.frames) {
            // SAFETY: `contents`: 1. just removed from the list of detached tables, and flushed,
            // because `self` has no stale translations. `push`: 1. and 2. the same.
            unsafe {
                zap.contents(table);
                gather.emptied.push(&memory.frames, table);
            }
            between();
        }
        page_table.count(&counts);
    }

    fn take_emptied(self) -> DetachedTables {
        let Self { page_table, gather } = self;
        debug_assert!(gather.detached.is_empty(), "freed before its pages were");
        let tables = core::mem::take(&mut gather.emptied);
        if !tables.is_empty() {
            let tables_freed = u64::from(tables.count());
            page_table.count(&Counts { tables_freed, ..Counts::default() });
        }
        tables
    }
}
