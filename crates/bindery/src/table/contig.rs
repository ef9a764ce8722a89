//! Contiguous (contpte) runs: leaves are folded into runs as they are written, and unfolded before
//! a part of a run changes.
//!
//! Removing a leaf from a run uses break-before-make, like each change of a translation's size
//! ([`super::leaf`]).

use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Level, Write};
use crate::platform::Platform;
use crate::stats::Counts;

use super::run::Entries;
use super::{PageTable, TableEntry, run};

impl<P: Platform> PageTable<'_, P> {
    /// Writes the entries of `count` pages that continue `first`, either leaves or `PROT_NONE`
    /// entries, into empty entries from `at` on, and folds leaves where alignment allows. All pages
    /// belong to one folio. The caller counts the entries.
    pub(crate) fn fill(&self, at: TableEntry, first: Entry, count: u32) {
        self.write_leaves(at, first, count);
    }

    /// As [`PageTable::fill`], inlined into a loop over runs.
    #[inline]
    pub(crate) fn write_leaves(&self, at: TableEntry, first: Entry, count: u32) {
        let TableEntry { table, index } = at;
        // A CPU that sees a leaf must see the writes to its page, not the earlier content of the
        // frame. One fence serves all stores below.
        fence(Ordering::Release);
        if first.0 & P::Arch::PRESENT == 0 {
            return self.write_prot_none(at, first, count);
        }
        let entries = self.entries(table);
        let mut entry = first;
        let end = index + count;
        let mut at = index;
        // Frames and entries advance in step, so contiguous runs fit either everywhere or nowhere.
        let congruent =
            (P::Arch::frame(first).0 ^ index.number()) & (P::Arch::CONTIG_ENTRIES - 1) == 0;
        if P::Arch::CONTIG_ENTRIES == 1 || !congruent {
            for word in &entries[index.positions(count)] {
                word.store(entry.0, Ordering::Relaxed);
                entry = Entry(entry.0.wrapping_add(P::Arch::STEP));
            }
            at = end;
        }
        while at < end {
            let fold = end - at >= P::Arch::CONTIG_ENTRIES && P::Arch::may_fold(entry, at);
            let piece = if fold { P::Arch::CONTIG_ENTRIES } else { 1 };
            for at in at.stretch(piece) {
                let written = if fold { P::Arch::set_contig(entry, at) } else { entry };
                entries[at.position()].store(written.0, Ordering::Relaxed);
                entry = Entry(entry.0.wrapping_add(P::Arch::STEP));
            }
            at += piece;
        }
        self.change_entry_count(table, count, 0);
    }

    /// As [`PageTable::write_leaves`], in a mapping without permissions: the entries record the
    /// pages, but the MMU sees none of them.
    #[cold]
    fn write_prot_none(&self, at: TableEntry, first: Entry, count: u32) {
        let TableEntry { table, index } = at;
        for (page, word) in (0..).zip(&self.entries(table)[index.positions(count)]) {
            word.store(P::Arch::nth_page(first, page).0, Ordering::Relaxed);
        }
        self.change_entry_count(table, count, 0);
    }

    /// Clears the whole contiguous run whose first entry is `at`. Returns that entry without the
    /// contiguous bit, with accessed and dirty gathered from all entries.
    pub(crate) fn take_contig(&self, at: TableEntry, counts: &mut Counts) -> Entry {
        let TableEntry { table, index } = at;
        let entries = &self.entries(table)[index.positions(P::Arch::CONTIG_ENTRIES)];
        let first = P::Arch::clear_contig(run::load(entries, EntryIndex::FIRST), index);
        let (any, all) = take_leaves::<P::Arch>(entries);
        counts.entries_read += u64::from(P::Arch::CONTIG_ENTRIES);
        counts.entries_written += u64::from(P::Arch::CONTIG_ENTRIES);
        P::Arch::gather_run(first, any, all)
    }

    /// Turns the contiguous run that contains the entry `at`, for address `addr`, into single
    /// pages. Every page then counts as accessed or dirty if any page did, since the MMU may have
    /// set the bits in any entry of the contiguous run.
    pub(crate) fn unfold(&self, at: TableEntry, addr: VirtAddr, counts: &mut Counts) {
        let TableEntry { table, index } = at;
        let size = u64::from(P::Arch::CONTIG_ENTRIES) * PAGE_SIZE;
        let base = addr.align_down(size);
        let first = index.align_down(P::Arch::CONTIG_ENTRIES);
        let entries = self.entries(table);
        // Software bits may differ inside a contiguous run, so every entry retains its own.
        let mut pages = [Entry::EMPTY; 16];
        let pages = &mut pages[..(P::Arch::CONTIG_ENTRIES as usize).min(16)];
        for (at, page) in first.stretch(P::Arch::CONTIG_ENTRIES).zip(pages.iter_mut()) {
            let word = &entries[at.position()];
            let old = Entry(word.load(Ordering::Relaxed));
            *page = P::Arch::clear_contig(P::Arch::replace_entry(word, old, |_| Entry::EMPTY), at);
        }
        self.invalidate_now(VirtRange::raw(base.0, base.0 + size), Level::PTE, counts);
        let gathered = pages.iter().fold(pages[0], |all, page| P::Arch::gather(all, *page));
        for (at, page) in first.stretch(P::Arch::CONTIG_ENTRIES).zip(pages.iter()) {
            let entry = P::Arch::gather(*page, gathered);
            entries[at.position()].store(entry.0, Ordering::Relaxed);
        }
        counts.entries_read += u64::from(P::Arch::CONTIG_ENTRIES);
        counts.entries_written += 2 * u64::from(P::Arch::CONTIG_ENTRIES);
    }

    /// Makes leaves of whole contiguous runs in `range`, whose table is locked, writable before
    /// their writes, with one flush.
    ///
    /// A TLB must never find two entries of a run that differ, so no entry is valid from its break
    /// to the end of the flush.
    pub(crate) fn make_contig_writable(
        &self,
        entries: &[AtomicU64],
        range: VirtRange,
        counts: &mut Counts,
    ) {
        for word in entries {
            word.fetch_and(!P::Arch::PRESENT, Ordering::Relaxed);
        }
        self.invalidate_now(range, Level::PTE, counts);
        for word in entries {
            let entry = Entry(word.load(Ordering::Relaxed) | P::Arch::PRESENT);
            word.store(P::Arch::make_writable(entry, Write::Later).0, Ordering::Relaxed);
        }
    }
}

/// Clears leaves. Returns the bits that were set in any of them and the bits that were set in all.
#[inline]
pub(super) fn take_leaves<A: Arch>(entries: &[AtomicU64]) -> (u64, u64) {
    let (mut any, mut all) = (0, u64::MAX);
    for word in entries {
        let mut raw = word.load(Ordering::Relaxed);
        if A::SATURATED.is(Entry(raw)) {
            word.store(0, Ordering::Relaxed);
        } else {
            raw = word.swap(0, Ordering::Relaxed);
        }
        any |= raw;
        all &= raw;
    }
    (any, all)
}
