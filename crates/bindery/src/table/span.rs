//! A cursor, lent by an edit, whose entries may also be narrowed.

use core::ops::{Deref, DerefMut};

use crate::addr::VirtRange;
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::cursor::{Chunks, Cursor};
use super::edit::Edit;
use super::locking::Depth;
use super::{PageTable, ReadSection, Table};

/// A locked range of the page table that an [`Edit`] edits. A value of this type proves that stale
/// translations have a gather, which the edit flushes; only a span narrows entries
/// ([`super::narrowing`]).
///
/// Everything else is a method of the [`Cursor`].
pub(crate) struct Span<'e, 'm, P: Platform> {
    cursor: Cursor<'e, 'm, P>,
    /// The gather of the edit.
    pub(super) gather: &'e mut Gather,
}

impl<'e, 'm, P: Platform> Deref for Span<'e, 'm, P> {
    type Target = Cursor<'e, 'm, P>;

    #[inline(always)]
    fn deref(&self) -> &Cursor<'e, 'm, P> {
        &self.cursor
    }
}

impl<'e, 'm, P: Platform> DerefMut for Span<'e, 'm, P> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Cursor<'e, 'm, P> {
        &mut self.cursor
    }
}

impl<'m, P: Platform> Edit<'_, 'm, P> {
    /// Locks `range` or its front, as [`PageTable::cursor`] does. Flushes that are pending for this
    /// edit stay pending.
    // Always inlined, like `PageTable::cursor`.
    #[inline(always)]
    pub(crate) fn span<'e>(
        &'e mut self,
        section: &'e ReadSection<'_, P>,
        range: VirtRange,
        depth: Depth<P::Arch>,
    ) -> Span<'e, 'm, P> {
        let mut span = self.unlocked_span(section, range);
        span.lock(section, depth);
        span
    }

    /// As [`Edit::span`], without the locks: the caller calls [`Span::lock`] once the span is in
    /// its final place. The compiler would copy a span that is returned with its locks.
    #[inline(always)]
    pub(super) fn unlocked_span<'e>(
        &'e mut self,
        section: &'e ReadSection<'_, P>,
        range: VirtRange,
    ) -> Span<'e, 'm, P> {
        let (page_table, gather) = self.parts();
        Span { cursor: page_table.unlocked_cursor(section, range), gather }
    }

    /// The next part of `chunks`, to be locked by [`Edit::chunk_span`]. Flushes that are pending
    /// for this edit stay pending.
    #[inline(always)]
    pub(crate) fn next_part(&self, chunks: &mut Chunks) -> Option<VirtRange> {
        chunks.next_part(self.page_table, Some(&*self.gather))
    }

    /// Locks `part`, the next part of `chunks`, or its front. Flushes that are pending for this
    /// edit stay pending.
    #[inline(always)]
    pub(crate) fn chunk_span<'e>(
        &'e mut self,
        section: &'e ReadSection<'_, P>,
        chunks: &mut Chunks,
        part: VirtRange,
        depth: Depth<P::Arch>,
    ) -> Span<'e, 'm, P> {
        let mut span = self.unlocked_span(section, part);
        span.lock(section, depth);
        chunks.go_on_from(span.range().end());
        span
    }
}

impl<'e, 'm, P: Platform> Span<'e, 'm, P> {
    /// Locks the range; called once.
    #[inline(always)]
    pub(super) fn lock(&mut self, section: &'e ReadSection<'_, P>, depth: Depth<P::Arch>) {
        let Self { cursor, gather } = self;
        cursor.lock(section, depth, Some(&**gather));
    }

    /// The page table, the counters of this lock span, and the gather.
    #[inline(always)]
    pub(super) fn parts(&mut self) -> (&'e PageTable<'m, P>, &mut Counts, &mut Gather) {
        (self.cursor.page_table, &mut self.cursor.counts, self.gather)
    }

    /// Raises the pending count of `table`, a locked table in which an entry is about to be
    /// narrowed, because the flush follows the release of the lock. Flushes first if the gather is
    /// full.
    #[inline(always)]
    pub(super) fn mark_pending(&mut self, table: Table<'_>) {
        let (page_table, counts, gather) = self.parts();
        page_table.mark_pending(table.frame(), gather, counts);
    }

    /// Flushes stale translations with the locks held.
    pub(crate) fn flush(&mut self) {
        let (page_table, counts, gather) = self.parts();
        page_table.flush(gather, counts);
        self.cursor.unflushed.lower();
    }
}
