//! Level-1 entries whose two places are not congruent modulo the contiguous run: runs are unfolded,
//! and new ones are folded.

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SIZE, VirtAddr};
use crate::arch::{Arch, Entry, EntryIndex, Equal, Saturated};
use crate::platform::Platform;
use crate::table::run::Slots;
use crate::table::{NoMemory, TableSlot, run};

use super::Piece;
use super::leaves::RangePiece;

/// The most pages that a contiguous run of any architecture has.
const MOST_PAGES: usize = 16;

impl<P: Platform> RangePiece<'_, '_, P> {
    /// Moves contiguous runs, the pages that become one, or entries up to where the next may begin,
    /// where source and target are not congruent modulo the contiguous run; returns the number of
    /// entries. (Pages that would make a contiguous run but are in two source tables stay
    /// single: one contiguous run in 2 MiB.)
    pub(super) fn move_shifted(
        &mut self,
        from: TableSlot,
        count: u32,
        rest: Piece<P::Arch>,
    ) -> Result<u32, NoMemory> {
        let Piece { source, target, .. } = rest;
        let TableSlot { table, index } = from;
        let slots = self.page_table.slots(table);
        let raw = run::load(slots, index);
        let size = P::Arch::CONTIG_ENTRIES;
        let to = P::Arch::PTE.index_of(VirtAddr(target));
        if P::Arch::is_contig(raw) {
            if index.offset_in(size) == 0 && count >= size {
                let moved = self.scatter_contigs(from, to, count, target)?;
                if moved > 0 {
                    return Ok(moved);
                }
                return self.move_contig(from, target, to);
            }
            self.page_table.unfold(table, index, VirtAddr(source), self.counts);
            return Ok(0);
        }
        let present = raw.0 & P::Arch::PRESENT != 0;
        if present && count >= size && P::Arch::may_fold(raw, to) {
            let (limit, step) = self.page_table.memory.folio_limit(P::Arch::frame(raw), size);
            let equal = Equal::WRITABLE;
            let entries = &slots[index.slots(limit)];
            let (alike, _) = P::Arch::match_leaves(entries, index, equal, step, 0);
            if alike == size && step != 0 {
                return self.move_contig(from, target, to);
            }
        }
        // No contiguous run begins before the next multiple of its size, in the source or in the
        // target.
        let up_to = |index: EntryIndex| size - index.offset_in(size);
        let count = count.min(up_to(index)).min(up_to(to));
        let target_table = self.target(target)?;
        self.move_congruent(from, TableSlot { table: target_table, index: to }, count);
        Ok(count)
    }

    /// Moves the contiguous runs from the given entry on as single pages, as long as the MMU has
    /// nothing to add to any of their entries, and as far as the target's table reaches. Returns
    /// the number of entries.
    fn scatter_contigs(
        &mut self,
        from: TableSlot,
        to: EntryIndex,
        count: u32,
        target: u64,
    ) -> Result<u32, NoMemory> {
        let TableSlot { table, index } = from;
        let target_table = self.target(target)?;
        let size = const {
            assert!(P::Arch::CONTIG_ENTRIES as usize <= MOST_PAGES);
            P::Arch::CONTIG_ENTRIES as usize
        };
        let slots = &self.page_table.slots(table)[index.slots(count)];
        let there = &self.page_table.slots(target_table)[to.slot()..];
        let mut at = index;
        for (contig, pages) in slots.chunks_exact(size).zip(there.chunks_exact(size)) {
            let Saturated { mask, value } = const { P::Arch::SATURATED.with(P::Arch::SOFT_DIRTY) };
            // Each entry is loaded once, and kept in a register until all of the contiguous run
            // have passed.
            let mut entries = [value; MOST_PAGES];
            let mut differ = 0;
            for (entry, slot) in entries.iter_mut().zip(contig) {
                *entry = slot.load(Ordering::Relaxed);
                differ |= *entry ^ value;
            }
            if differ & mask != 0 || !P::Arch::is_contig(Entry(entries[0])) {
                break;
            }
            for ((slot, page), entry) in contig.iter().zip(pages).zip(entries) {
                slot.store(0, Ordering::Relaxed);
                page.store(P::Arch::clear_contig(Entry(entry), at).0, Ordering::Relaxed);
                at += 1;
            }
        }
        let moved = at - index;
        if moved > 0 {
            self.counts.entries_read += u64::from(moved);
            self.count_moved(table, target_table, moved);
            self.stale_leaves(from, moved);
        }
        Ok(moved)
    }

    /// Moves the pages of a contiguous run, or those that become one, as single pages or as a
    /// contiguous run, whichever fits. Returns their number.
    #[inline]
    fn move_contig(
        &mut self,
        from: TableSlot,
        target: u64,
        to: EntryIndex,
    ) -> Result<u32, NoMemory> {
        let TableSlot { table, index } = from;
        let size = P::Arch::CONTIG_ENTRIES;
        if size > to.left::<P::Arch>() {
            self.targets(target, size)?;
            let first = self.page_table.take_contig(table, index, self.counts);
            self.take_along(from, first, size, target);
            return Ok(size);
        }
        let target_table = self.target(target)?;
        let first = self.page_table.take_contig(table, index, self.counts);
        self.page_table.change_entry_count(table, 0, size);
        self.stale_leaves(from, size);
        let first = Entry(first.0 | P::Arch::SOFT_DIRTY);
        self.page_table.write_leaves(target_table, to, first, size);
        self.counts.entries_written += u64::from(size);
        Ok(size)
    }

    /// Writes `count` pages that were just taken from the source, and subtracts them there.
    #[inline(never)]
    fn take_along(&mut self, from: TableSlot, first: Entry, count: u32, target: u64) {
        self.page_table.change_entry_count(from.table, 0, count);
        self.stale_leaves(from, count);
        self.arrive(first, count, target);
    }

    /// Writes `count` pages that have left the source; the target may lie in two tables, both of
    /// which exist ([`RangePiece::targets`]).
    pub(super) fn arrive(&mut self, first: Entry, count: u32, target: u64) {
        let mut entry = Entry(first.0 | P::Arch::SOFT_DIRTY);
        let mut done = 0;
        while done < count {
            let at = target + u64::from(done) * PAGE_SIZE;
            let to = P::Arch::PTE.index_of(VirtAddr(at));
            let part = (count - done).min(to.left::<P::Arch>());
            let Ok(target_table) = self.target(at) else {
                debug_assert!(false, "pages were taken before there was a table for them");
                return;
            };
            self.page_table.write_leaves(target_table, to, entry, part);
            self.counts.entries_written += u64::from(part);
            let step = P::Arch::STEP.wrapping_mul(u64::from(part));
            entry = Entry(entry.0.wrapping_add(step));
            done += part;
        }
    }
}
