//! Flushes what was taken out of tables, and frees it afterwards ([`crate::tlb`] has the rule).

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
    /// Invalidates at once, between breaking an entry and making the new one.
    pub(crate) fn invalidate_now(
        &self,
        range: VirtRange,
        level: Level<P::Arch>,
        counts: &mut Counts,
    ) {
        let what = Invalidation { range, stride: level.span(), tables: Tables::Unchanged };
        tlb::invalidate(self.memory.platform(), self.root, &self.active_cpus, &what, counts);
    }

    /// Makes every TLB forget what is stale, and lowers the pending counts that waited for it.
    pub(crate) fn flush(&self, gather: &mut Gather, counts: &mut Counts) {
        gather.flush(self.memory.platform(), self.root, &self.active_cpus, counts);
        while let Some(table) = gather.take_mark() {
            // SAFETY: 1. the gather had the mark of a table that it raised; 2. flushed above.
            unsafe { self.lower_pending(table) };
        }
    }

    /// Raises the pending count of `table`, whose lock the caller holds and in which it is about to
    /// narrow an entry: the gather's flush comes after the lock is released ([`crate::tlb`]).
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

    /// As [`PageTable::mark_pending`], for either end of a move.
    pub(crate) fn mark_moving(&self, table: Frame, gather: &mut Gather) {
        if !gather.has_lately_marked(table) {
            pending::raise(self.meta(table).pending());
            gather.note_mark(table);
        }
    }

    /// Lowers the pending count of a table after the flush. If the table was detached in the
    /// meantime, the thread that lowers the count to zero frees it.
    ///
    /// # Safety
    /// 1. The caller has raised the count of this table, and lowers it once.
    /// 2. What it narrowed there was flushed.
    unsafe fn lower_pending(&self, table: Frame) {
        if pending::lower(self.meta(table).pending()) == Last::Yes {
            // It was counted when it was handed over (`take_emptied`). SAFETY: 1. only the last
            // thread to lower the count frees the table, and each lowers what it raised (obligation
            // 1); 2. it was detached and flushed (obligation 2), and its readers have left
            // (`release_table` lowered the count then).
            unsafe { self.memory.frames.free(table, Order::PAGE) };
        }
    }

    /// Flushes `range` for a caller that has locked the tables in `locks` and found one of them
    /// pending. The marks of `own`, the caller's gather, are left to the caller.
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
        // Translations below an entry of the table may be of any address in the entry's span.
        let span = level.span();
        let start = range.start().align_down(span);
        let end = range.end().0.checked_next_multiple_of(span).unwrap_or(range.end().0);
        let what = Invalidation {
            range: VirtRange::raw(start.0, end),
            stride: PAGE_SIZE,
            tables: Tables::Changed,
        };
        tlb::invalidate(self.memory.platform(), self.root, &self.active_cpus, &what, counts);
        // A move in progress may have brought entries to the table that TLBs cache under their old
        // addresses. Callers with marks of their own make that flush too. A walk of the reverse map
        // visits the move's source as well, and flushes it there, but nothing depends on that.
        let everything = VirtRange::raw(0, P::Arch::USER_END);
        if let Some(range) = self.moving.sources(everything) {
            let what = Invalidation { range, ..what };
            tlb::invalidate(self.memory.platform(), self.root, &self.active_cpus, &what, counts);
        }
    }

    /// Flushes the source of a move of several pieces, if one is in progress in this tree. Walks of
    /// the reverse map call this. They hold a tree lock, so no piece of their VMA moves during the
    /// call. The flush is needed because a move marks only the tables at both ends, not those that
    /// it carries:
    /// 1. CPU A moves a table from X to Y, and releases the locks without a flush.
    /// 2. CPU B truncates the file: it locks only the table, which has no mark, clears an entry,
    ///    flushes Y, and frees the page.
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

    /// Waits for the flush of what was in the entry of `node` around `at`, which was read as empty
    /// without a lock, or makes it. Flushes that are pending only for `own` are left to the caller.
    #[cold]
    pub(crate) fn wait_for_pending_flushes(
        &self,
        node: Node<P::Arch, Table<'_>>,
        at: VirtAddr,
        own: Option<&Gather>,
    ) {
        let table = node.table.frame();
        let pending = pending::count(self.meta(table).pending());
        if !self.is_locked(table) && pending == own.map_or(0, |own| own.marks_of(table)) {
            return;
        }
        let span = node.level.span();
        let start = at.align_down(span);
        let range = VirtRange::raw(start.0, start.0.saturating_add(span));
        // The cursor waits for the lock, and reads the count.
        let section = self.read_section();
        drop(self.cursor_beside(&section, range, Depth::Floor(node.level), own));
    }
}

impl<'m, P: Platform> PageTable<'m, P> {
    /// Lends an edit to `work`, and then flushes and frees what it has gathered. Never waits for
    /// readers, so locks of VMAs and objects may be held. Called outside of read sections.
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
    /// Invalidates stale translations, and counts down pages that were unmapped in VMAs that stay.
    /// Called by every operation before it releases the mutex. (No other thread relies on that for
    /// the flush: a thread that locks a table meets the mark of the pending flush, see
    /// [`crate::tlb`].)
    #[inline(always)]
    pub(crate) fn flush(&mut self) {
        let (_, gather) = self.parts();
        // Most calls have flushed with the tables locked, and freed no table.
        if gather.is_stale() || !gather.is_done() {
            self.flush_gathered();
        } else {
            gather.take_uncharge_before_unlock();
        }
    }

    /// As [`Edit::flush`], with something to flush or to count down.
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

    /// Flushes what is left, and frees what was gathered, the tables after their readers. Never
    /// waits for those, so locks of VMAs and objects may be held. Called outside of read sections.
    pub(crate) fn finish(&mut self) {
        let mut flushed = self.flushed();
        flushed.drop_contents(|| {});
        let tables = flushed.take_emptied();
        Batch::of(tables).free_after_readers(self.memory);
    }

    /// Invalidates what is stale, and lends the gather to a caller that frees.
    #[inline]
    pub(crate) fn flushed(&mut self) -> Flushed<'_, 'm, P> {
        if self.is_stale() {
            self.flush_stale();
        }
        let (page_table, gather) = self.parts();
        Flushed { page_table, gather }
    }
}

/// The gather of an edit, with nothing in it that is stale. Having one means:
/// - no TLB has a translation that the edit has narrowed or removed;
/// - the edit narrows no entry in the meantime: it is borrowed.
///
/// Only this value frees the pages of detached tables.
pub(crate) struct Flushed<'op, 'm, P: Platform> {
    page_table: &'op PageTable<'m, P>,
    gather: &'op mut Gather,
}

impl<P: Platform> Flushed<'_, '_, P> {
    /// The detached tables, with their pages freed, for a caller that has them freed after their
    /// readers. They count as freed from here on. Called without locks: other threads may run
    /// between two tables.
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
            // SAFETY: `contents`: 1. just taken off the list of the detached tables, and flushed:
            // `self` has nothing stale. `push`: 1. and 2. the same.
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
