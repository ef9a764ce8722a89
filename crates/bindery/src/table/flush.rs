//! Flushing what was taken out of tables, and giving it back afterwards ([`crate::tlb`] tells the rule).

use core::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch;
use crate::frame::meta;
use crate::platform::{Invalidation, Platform, Tables};
use crate::stats::Counts;
use crate::tlb::{self, Gather};

use super::lock::{Depth, LockSet, Node, Tree};
use super::pending::{self, Last};
use super::{PageTable, free_table, level_of, link, zap};

impl<P: Platform> PageTable<'_, P> {
    /// Invalidates at once, between breaking an entry and making the new one.
    pub(crate) fn invalidate_now(&self, range: VirtRange, level: u8, counts: &mut Counts) {
        let what =
            Invalidation { range, stride: arch::span::<P::Arch>(level), tables: Tables::Unchanged };
        tlb::invalidate(&self.memory.platform, self.root, &self.presence, &what, counts);
    }

    /// Makes every TLB forget what is stale, and lowers the pending counts that waited for it.
    pub(crate) fn flush(&self, gather: &mut Gather, counts: &mut Counts) {
        gather.flush(&self.memory.platform, self.root, &self.presence, counts);
        while let Some(table) = gather.take_mark() {
            self.lower_pending(table, counts);
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
        pending::raise(&self.meta(table).previous);
        gather.note_mark(table);
    }

    /// Lowers the pending count of a table after the flush. The table may have been detached
    /// meanwhile; the last one frees it then.
    fn lower_pending(&self, table: Frame, counts: &mut Counts) {
        if pending::lower(&self.meta(table).previous) == Last::Yes {
            free_table(self.memory, table, counts);
        }
    }

    /// Frees a detached table that no reader can reach any more, or leaves that to whoever lowers
    /// its pending count to zero.
    fn release_table(&self, table: Frame, counts: &mut Counts) {
        if pending::release(&self.meta(table).previous) == Last::Yes {
            free_table(self.memory, table, counts);
        }
    }

    /// Flushes `range` for whoever has locked the tables in `locks` and found one of them pending.
    /// The marks of `own`, the caller's gather, are its own affair.
    #[cold]
    pub(crate) fn honour_pending(
        &self,
        range: VirtRange,
        locks: &LockSet,
        own: Option<&Gather>,
        counts: &mut Counts,
    ) {
        let others = |table: &Frame| {
            let pending = pending::count(&self.meta(*table).previous);
            pending > own.map_or(0, |own| own.marks_of(*table))
        };
        let pending = locks.tables().iter().filter(|table| others(table));
        let Some(level) = pending.map(|table| level_of(self.meta(*table))).max() else { return };
        // What was below one of the table's slots may be anywhere in it.
        let span = arch::span::<P::Arch>(level);
        let start = range.start().align_down(span);
        let end = range.end().0.checked_next_multiple_of(span).unwrap_or(range.end().0);
        let what = Invalidation {
            range: VirtRange::raw(start.0, end),
            stride: PAGE_SIZE,
            tables: Tables::Changed,
        };
        tlb::invalidate(&self.memory.platform, self.root, &self.presence, &what, counts);
    }

    /// Waits for the flush of what stood in the slot of `node` around `at`, which was read as empty
    /// without a lock, or makes it. What is pending for `own` alone is the caller's affair.
    #[cold]
    pub(crate) fn settle(&self, node: Node, at: VirtAddr, own: Option<&Gather>) {
        let pending = pending::count(&self.meta(node.table).previous);
        if !self.is_locked(node.table) && pending == own.map_or(0, |own| own.marks_of(node.table)) {
            return;
        }
        let span = arch::span::<P::Arch>(node.level);
        let slot = at.align_down(span);
        let range = VirtRange::raw(slot.0, slot.0.saturating_add(span));
        // The cursor waits for the lock, and looks at the count.
        drop(self.cursor_beside(range, Depth::Floor(node.level), own));
    }

    /// Flushes what is left, waits for readers and frees what was gathered. Called without locks,
    /// outside of read sections.
    pub(crate) fn finish(&self, gather: &mut Gather) {
        let mut counts = Counts::default();
        self.flush(gather, &mut counts);
        self.stats.add(&counts);
        self.drop_contents(gather);
        if gather.emptied.is_some() {
            self.memory.platform.synchronize();
        }
        self.free_unhooked(gather);
    }

    /// Gives back what stands in the unhooked tables, after the flush.
    pub(crate) fn drop_contents(&self, gather: &mut Gather) {
        debug_assert!(!gather.is_stale(), "given back before it was flushed");
        if gather.unhooked.is_none() {
            return;
        }
        let mut counts = Counts::default();
        let mut batch = self.memory.free_batch();
        while let Some(table) = gather.unhooked {
            let next = &self.meta(table).next;
            gather.unhooked = link(next.load(Ordering::Relaxed));
            zap::drop_contents(self.memory, table, &mut batch, &mut counts);
            next.store(gather.emptied.map_or(meta::NONE, |table| table.0), Ordering::Relaxed);
            gather.emptied = Some(table);
        }
        self.stats.add(&counts);
    }

    /// Frees the unhooked tables, after the last reader.
    pub(crate) fn free_unhooked(&self, gather: &mut Gather) {
        debug_assert!(gather.unhooked.is_none(), "freed before it was given back");
        if gather.emptied.is_none() {
            return;
        }
        let mut counts = Counts::default();
        while let Some(table) = gather.emptied {
            gather.emptied = link(self.meta(table).next.load(Ordering::Relaxed));
            self.release_table(table, &mut counts);
        }
        self.stats.add(&counts);
    }
}
