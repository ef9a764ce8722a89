//! Level-1 entries whose two addresses are not congruent modulo the contiguous run: existing runs
//! are unfolded, and new runs are folded.

use core::sync::atomic::Ordering;

use crate::addr::VirtAddr;
use crate::arch::{Arch, Entry, EntryIndex, Equal, Saturated};
use crate::memory::folio_limit;
use crate::platform::Platform;
use crate::table::run::Entries;
use crate::table::{NoMemory, TableEntry, run};

use super::RangePiece;

/// The maximum number of pages in a contiguous run of any architecture.
const MOST_PAGES: usize = 16;

impl<'s, P: Platform> RangePiece<'_, 's, '_, P> {
    /// Moves contiguous runs, pages that become a contiguous run, or entries up to the place where
    /// the next run may start, for a source and a target that are not congruent modulo the
    /// contiguous run. Returns the number of entries. (Pages that would form a contiguous run but
    /// lie in two source tables stay single, which affects one contiguous run in 2 MiB.)
    pub(super) fn move_shifted(
        &mut self,
        from: TableEntry<'s>,
        count: u32,
        page: u32,
    ) -> Result<u32, NoMemory> {
        let target = self.target_at(page);
        let TableEntry { table, index } = from;
        let words = self.page_table.entries(table);
        let raw = run::load(words, index);
        let size = P::Arch::CONTIG_ENTRIES;
        let to = P::Arch::PTE.index_of(VirtAddr(target));
        if P::Arch::is_contig(raw) {
            if index.offset_in(size) == 0 && count >= size {
                let moved = self.scatter_contigs(from, count, page)?;
                if moved > 0 {
                    return Ok(moved);
                }
                return self.move_contig(from, page);
            }
            let source = VirtAddr(self.source_at(page));
            self.page_table.unfold(from, source, self.counts);
            return Ok(0);
        }
        let present = raw.0 & P::Arch::PRESENT != 0;
        if present && count >= size && P::Arch::may_fold(raw, to) {
            let (limit, step) = folio_limit(self.page_table.memory, P::Arch::frame(raw), size);
            let equal = Equal::WRITABLE;
            let entries = &words[index.positions(limit)];
            let (alike, _) = P::Arch::match_leaves(entries, index, equal, step, 0);
            if alike == size && step != 0 {
                return self.move_contig(from, page);
            }
        }
        // In both the source and the target, no contiguous run starts before the next multiple of
        // its size.
        let up_to = |index: EntryIndex| size - index.offset_in(size);
        let count = count.min(up_to(index)).min(up_to(to));
        let to = TableEntry { table: self.target(target)?, index: to };
        self.move_congruent(from, to, page, count);
        Ok(count)
    }

    /// Moves the contiguous runs from the given entry on as single pages, while the MMU has nothing
    /// to add to any of their entries, up to the end of the target's table. Returns the number of
    /// entries.
    fn scatter_contigs(
        &mut self,
        from: TableEntry<'s>,
        count: u32,
        page: u32,
    ) -> Result<u32, NoMemory> {
        let TableEntry { table, index } = from;
        let target = self.target_at(page);
        let target_table = self.target(target)?;
        let to = P::Arch::PTE.index_of(VirtAddr(target));
        let size = const {
            assert!(P::Arch::CONTIG_ENTRIES as usize <= MOST_PAGES);
            P::Arch::CONTIG_ENTRIES as usize
        };
        let words = &self.page_table.entries(table)[index.positions(count)];
        let there = &self.page_table.entries(target_table)[to.position()..];
        let mut at = index;
        for (contig, pages) in words.chunks_exact(size).zip(there.chunks_exact(size)) {
            let Saturated { mask, value } = const { P::Arch::SATURATED.with(P::Arch::SOFT_DIRTY) };
            // Each entry is loaded once and kept in a register until the whole contiguous run has
            // been checked.
            let mut entries = [value; MOST_PAGES];
            let mut differ = 0;
            for (entry, word) in entries.iter_mut().zip(contig) {
                *entry = word.load(Ordering::Relaxed);
                differ |= *entry ^ value;
            }
            if differ & mask != 0 || !P::Arch::is_contig(Entry(entries[0])) {
                break;
            }
            for ((word, page), entry) in contig.iter().zip(pages).zip(entries) {
                word.store(0, Ordering::Relaxed);
                page.store(P::Arch::clear_contig(Entry(entry), at).0, Ordering::Relaxed);
                at += 1;
            }
        }
        let moved = at - index;
        if moved > 0 {
            self.counts.entries_read += u64::from(moved);
            self.count_moved(table, target_table, moved);
            self.stale_pages(page, moved);
        }
        Ok(moved)
    }

    /// Moves the pages of a contiguous run, or pages that become one, either as single pages or as
    /// a contiguous run, whichever fits. Returns the number of pages.
    #[inline]
    fn move_contig(&mut self, from: TableEntry<'s>, page: u32) -> Result<u32, NoMemory> {
        let size = P::Arch::CONTIG_ENTRIES;
        self.targets(self.target_at(page), size)?;
        let first = self.page_table.take_contig(from, self.counts);
        self.page_table.change_entry_count(from.table, 0, size);
        self.stale_pages(page, size);
        self.arrive(first, size, page);
        Ok(size)
    }

    /// Writes `count` pages that have left the source. The target may cross two tables, both of
    /// which exist (`targets`).
    pub(super) fn arrive(&mut self, first: Entry, count: u32, page: u32) {
        let mut entry = Entry(first.0 | P::Arch::SOFT_DIRTY);
        let mut done = 0;
        while done < count {
            let at = self.target_at(page + done);
            let to = P::Arch::PTE.index_of(VirtAddr(at));
            let part = (count - done).min(to.left::<P::Arch>());
            let Ok(target_table) = self.target(at) else {
                debug_assert!(false, "pages were taken before there was a table for them");
                return;
            };
            self.page_table.write_leaves(
                TableEntry { table: target_table, index: to },
                entry,
                part,
            );
            self.counts.entries_written += u64::from(part);
            let step = P::Arch::STEP.wrapping_mul(u64::from(part));
            entry = Entry(entry.0.wrapping_add(step));
            done += part;
        }
    }
}
