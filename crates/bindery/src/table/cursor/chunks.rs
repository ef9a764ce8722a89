//! Long ranges, locked part by part, and the search for the first non-empty entry.

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::super::locking::{self, Depth};
use super::super::{EntryAt, PageTable, ReadSection};
use super::Cursor;

impl<P: Platform> PageTable<'_, P> {
    /// The part of `range` from its first non-empty entry to the next multiple of `size`, a power
    /// of two. Flushes that are pending for `own` stay pending. The caller either excludes new
    /// tables from the range or tolerates missing tables that are created during the call.
    pub(crate) fn first_part(
        &self,
        range: VirtRange,
        size: u64,
        own: Option<&Gather>,
    ) -> Option<VirtRange> {
        let end = range.end().0;
        let start = first_table(self, range.start().0, end, own);
        let stop = (start & !(size - 1)).saturating_add(size).min(end);
        (start < stop).then(|| VirtRange::raw(start, stop))
    }
}

/// The first address from `start` on whose entry is not empty, or `end`. No TLB still holds a
/// translation of the addresses before it.
fn first_table<P: Platform>(
    page_table: &PageTable<'_, P>,
    mut start: u64,
    end: u64,
    own: Option<&Gather>,
) -> u64 {
    let mut counts = Counts::default();
    let mut found = false;
    while start < end && !found {
        let section = page_table.read_section();
        let looks = locking::SPAN_ENTRIES / u32::from(P::Arch::LEVELS);
        for _ in 0..looks {
            if start >= end {
                break;
            }
            let EntryAt { node, entry, .. } =
                page_table.peek(&section, VirtAddr(start), &mut counts);
            page_table.memory.worked(P::Arch::ROOT.steps_to(node.level) + 1, 0);
            found = node.level == Level::PTE || !entry.is_empty();
            if found {
                break;
            }
            if !locking::has_no_pending_flush(&page_table.tables(&section), node.table.frame())
                && !page_table.is_empty_after_flushes(node, VirtAddr(start), own)
            {
                continue;
            }
            let last = start | (node.level.span() - 1);
            start = last.saturating_add(1);
        }
    }
    page_table.count(&counts);
    start.min(end)
}

/// A range that is locked part by part, where each part is as long as one set of locks allows
/// ([`super::locking`]). A gap without tables is skipped in one step, whatever its size. The caller
/// excludes new tables from the range.
pub(crate) struct Chunks {
    range: VirtRange,
    /// The last address at which the locks of the next part may end. This is the end of a level-2
    /// table, so that no table above it is locked unless the part covers that table completely.
    stop: u64,
}

impl Chunks {
    #[inline]
    pub(crate) fn of(range: VirtRange) -> Self {
        Self { range, stop: 0 }
    }

    /// Makes the next part start at `at`, inside or at the end of the previous part.
    pub(crate) fn go_on_from(&mut self, at: VirtAddr) {
        self.range = VirtRange::raw(at.0, self.range.end().0);
    }

    /// Locks `part`, the result of [`Chunks::next_part`], or the front of it.
    // Always inlined, like `PageTable::cursor`.
    #[inline(always)]
    pub(crate) fn lock<'a, 'm, P: Platform>(
        &mut self,
        page_table: &'a PageTable<'m, P>,
        section: &'a ReadSection<'_, P>,
        part: VirtRange,
        depth: Depth<P::Arch>,
    ) -> Cursor<'a, 'm, P> {
        let mut cursor = page_table.unlocked_cursor(section, part);
        cursor.lock(section, depth, None);
        self.go_on_from(cursor.range().end());
        cursor
    }

    /// The range of the next locks. The caller locks this range or its front, and continues from
    /// the end of the locked part.
    #[inline(always)]
    pub(in crate::table) fn next_part<P: Platform>(
        &mut self,
        page_table: &PageTable<'_, P>,
        own: Option<&Gather>,
    ) -> Option<VirtRange> {
        let (start, end) = (self.range.start().0, self.range.end().0);
        let mut part = self.range;
        if start >= self.stop {
            let start = first_table(page_table, start, end, own);
            let size = P::Arch::PMD.table_span();
            self.stop = (start & !(size - 1)).saturating_add(size).min(end);
            part = VirtRange::raw(start, end);
        }
        (!part.is_empty()).then(|| VirtRange::raw(part.start().0, self.stop))
    }
}
