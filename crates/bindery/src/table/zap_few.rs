//! Unmapping a few pages of one table.
//!
//! A call for one page or a few pages has little work in the table. The set of locks, the cursor
//! and its runs, which serve any range ([`super::zap`]), would dominate its cost. The table is
//! therefore found and locked as in a fault, and one pass reads the entries. The order of
//! suspension, flush and drop is the same as in [`super::zap`].

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, EntryIndex, Kind, Level};
use crate::platform::Platform;
use crate::stats::Counts;

use super::edit::Edit;
use super::locking;
use super::narrowing::Unflushed;
use super::run;
use super::zap_rmap::{absent_run, drop_suspended_few, release_absent};
use super::{PageTable, ReadSection, Table};

/// The maximum number of pages for this path: a folio of 64 KiB.
const FEW: u64 = 16;

/// A table of level 1 that is locked without a cursor. Dropping the value releases the lock.
pub(super) struct LockedTable<'s, 'm, P: Platform> {
    page_table: &'s PageTable<'m, P>,
    table: Table<'s>,
    pub(super) counts: Counts,
    /// Whether narrowed entries have to be flushed before the lock is released.
    unflushed: Unflushed,
}

impl<'s, 'm, P: Platform> LockedTable<'s, 'm, P> {
    /// The page table that contains the locked table.
    #[inline(always)]
    pub(super) fn page_table(&self) -> &'s PageTable<'m, P> {
        self.page_table
    }

    /// The table.
    #[inline(always)]
    pub(super) fn table(&self) -> Table<'s> {
        self.table
    }
}

impl<P: Platform> Drop for LockedTable<'_, '_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        self.unflushed.assert_none();
        self.page_table.unlock(self.table.frame());
        self.page_table.count(&self.counts);
    }
}

/// As [`super::zap::zap`], for few pages of one table. The caller has locked the VMAs of `range`
/// for writing, so no move carries the table or its parent along. `freeable` is the range with the
/// free addresses around it; [`super::zap::zap`] would free the tables that it covers. Returns
/// false, with nothing changed, for any other range and if the table is not ready: the table is
/// missing or a huge leaf, another flush is pending, or an end of the range divides a contiguous
/// run.
#[inline]
pub(super) fn zap_few<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    freeable: VirtRange,
) -> bool {
    let is_few = range.len() <= FEW << PAGE_SHIFT
        && !range.is_empty()
        && locking::spread(freeable) < P::Arch::PMD.span();
    is_few && edit.reach.takes_tables() && zap_in_table(edit, range)
}

#[inline(never)]
fn zap_in_table<P: Platform>(edit: &mut Edit<'_, '_, P>, range: VirtRange) -> bool {
    let page_table = edit.table();
    let section = page_table.read_section();
    let Some(mut locked) = lock_table(page_table, &section, range.start()) else { return false };
    let first = P::Arch::PTE.index_of(range.start());
    let pages = (range.len() >> PAGE_SHIFT) as u32;
    let words = page_table.entries(locked.table);
    if cuts_contig::<P::Arch>(words, first, first + pages) {
        return false;
    }
    page_table.memory.worked(u64::from(pages), 0);
    locked.counts.entries_read = u64::from(pages);
    let Some(leaves) = drop_absent(&mut locked, words, first, pages) else { return true };
    let start = range.start().offset(u64::from(leaves.start - first) << PAGE_SHIFT);
    let end = start.offset(u64::from(leaves.end - leaves.start) << PAGE_SHIFT);
    let part = VirtRange::raw(start.0, end.0);
    let words = &words[leaves.start.position()..leaves.end.position()];
    let LockedTable { counts, unflushed, .. } = &mut locked;
    edit.narrow_few(words, part, unflushed).suspend_mapped();
    counts.entries_written += u64::from(leaves.end - leaves.start);
    edit.flush_few(counts, unflushed);
    // SAFETY: 1. flushed above, with the table locked.
    unsafe { drop_suspended_few(&mut locked, leaves) };
    true
}

/// Locks the table of level 1 that covers `addr`.
#[inline(always)]
fn lock_table<'s, 'm, P: Platform>(
    page_table: &'s PageTable<'m, P>,
    section: &'s ReadSection<'_, P>,
    addr: VirtAddr,
) -> Option<LockedTable<'s, 'm, P>> {
    let found = page_table.leaf_table(section, addr)?;
    page_table.try_lock_leaf_table(section, addr, &found).then(|| LockedTable {
        page_table,
        table: found.table,
        counts: Counts { tables_locked: 1, ..Counts::default() },
        unflushed: Unflushed::none(),
    })
}

/// Whether a contiguous run of the table reaches beyond the entries from `first` to `end`.
#[inline(always)]
fn cuts_contig<A: Arch>(words: &[AtomicU64], first: EntryIndex, end: EntryIndex) -> bool {
    let contig = A::CONTIG_ENTRIES;
    let is_contig = |index| A::is_contig(run::load(words, index));
    contig > 1
        && (first.offset_in(contig) != 0 && is_contig(first)
            || end.offset_in(contig) != 0 && is_contig(end - 1))
}

/// Releases and clears the absent entries, which no TLB holds, among `count` entries of the locked
/// table from `first` on. Returns the range from the first leaf to the last.
#[inline(always)]
fn drop_absent<P: Platform>(
    locked: &mut LockedTable<'_, '_, P>,
    words: &[AtomicU64],
    first: EntryIndex,
    count: u32,
) -> Option<Range<EntryIndex>> {
    let end = first + count;
    let mut leaves: Option<Range<EntryIndex>> = None;
    let mut index = first;
    while index < end {
        let entry = run::load(words, index);
        match P::Arch::PTE.kind(entry) {
            Kind::Empty => {}
            Kind::Leaf => {
                let first = leaves.map_or(index, |leaves| leaves.start);
                leaves = Some(first..index + 1);
            }
            Kind::Absent | Kind::Table => {
                index += drop_absent_run(locked, &words[..end.position()], index);
                continue;
            }
        }
        index += 1;
    }
    leaves
}

/// Releases and clears the absent entries from `index` on that one call can release. Returns the
/// number of entries.
#[inline(never)]
fn drop_absent_run<P: Platform>(
    locked: &mut LockedTable<'_, '_, P>,
    words: &[AtomicU64],
    index: EntryIndex,
) -> u32 {
    let limit = words.len() as u32 - index.number();
    let memory = locked.page_table.memory;
    let (count, first) = absent_run(memory, words, index, limit);
    // SAFETY: 1. the table is locked while `locked` exists; the entries are cleared below. 2. an
    // absent entry was flushed when it was made, or it is under a mark, and a table with a mark is
    // not locked this way.
    unsafe { release_absent(memory, Level::PTE, first, count, &mut locked.counts) };
    for word in &words[index.positions(count)] {
        word.store(0, Ordering::Relaxed);
    }
    locked.counts.entries_written += u64::from(count);
    locked.page_table.change_entry_count(locked.table, 0, count);
    count
}
