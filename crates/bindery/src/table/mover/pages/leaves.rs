//! Level-1 entries of one piece: single pages, and folios whose entries are one run.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::Memory;
use crate::addr::{PAGE_SHIFT, VirtAddr};
use crate::arch::{Arch, Entry, EntryIndex, Equal, Level};
use crate::folio::{Folio, FolioLock};
use crate::platform::Platform;
use crate::table::contig::take_leaves;
use crate::table::mover::piece::Below;
use crate::table::run::{self, Entries};
use crate::table::{EntryAt, Table, TableEntry};

use super::{MoveStop, PagesPiece};

/// Consecutive entries of one source table and of one target table.
struct TablePair<'t> {
    /// The first entries.
    from: TableEntry<'t>,
    to: TableEntry<'t>,
    entries: &'t [AtomicU64],
    there: &'t [AtomicU64],
    /// The number of the piece's pages that precede the pair.
    page: u32,
    /// The numbers of entries that have left the source and that have arrived at the target. The
    /// tables' entry counts do not include these changes yet.
    left: u32,
    arrived: u32,
    /// Whether TLBs may hold one of the entries.
    stale: bool,
}

/// The pages of a folio that one run of entries maps.
pub(super) struct FolioRun {
    pub(super) folio: Folio,
    /// The number of the first of these pages in the folio.
    pub(super) number: u32,
    pub(super) count: u32,
    /// The first entry, without the contiguous bit, with accessed and dirty gathered from all
    /// entries.
    gathered: Entry,
}

impl<'s, P: Platform> PagesPiece<'_, 's, '_, '_, P> {
    /// The run of the leaf `entry`, which is at index `at` of the table with these entries. The run
    /// has at most `most` entries. `None` if the leaf maps no folio.
    #[inline(always)]
    pub(super) fn folio_run(
        &self,
        entries: &[AtomicU64],
        at: EntryIndex,
        most: u32,
        entry: Entry,
    ) -> Option<FolioRun> {
        let single = P::Arch::clear_contig(entry, at);
        let frame = P::Arch::frame(single);
        let folio = self.page_table.memory.frames.folio_of(frame)?;
        let number = frame.0 - folio.head.0;
        let limit = most.min(folio.pages() - number);
        let (count, gathered) = if self.are_unchanged(entries, at, limit) {
            (limit, single)
        } else {
            let equal = Equal::WRITABLE | Equal::SOFT_DIRTY;
            P::Arch::match_leaves(&entries[at.positions(limit)], at, equal, P::Arch::STEP, 0)
        };
        Some(FolioRun { folio, number, count, gathered })
    }

    /// Moves the whole piece. Returns the number of completed bytes.
    pub(super) fn move_leaves(&mut self) -> (u64, Option<MoveStop>) {
        let pages = (self.piece.len >> PAGE_SHIFT) as u32;
        let mut done = 0;
        while done < pages {
            let stop = self.move_stretch(&mut done, pages);
            if stop.is_some() {
                return (u64::from(done) << PAGE_SHIFT, stop);
            }
        }
        (self.piece.len, None)
    }

    /// Continues at page `done`, up to the end of the source's or the target's table.
    fn move_stretch(&mut self, done: &mut u32, pages: u32) -> Option<MoveStop> {
        let (source, target) = (self.source_at(*done), self.target_at(*done));
        let from = P::Arch::PTE.index_of(VirtAddr(source));
        let to = P::Arch::PTE.index_of(VirtAddr(target));
        let room = from.left::<P::Arch>().min(to.left::<P::Arch>());
        let count = (pages - *done).min(room);
        let there = match self.below(self.to, target, Level::PTE) {
            Below::Table(table) => Some(table),
            Below::Nothing(_) => None,
            Below::Huge(..) => return Some(MoveStop::Exists),
        };
        let table = match self.below(self.from, source, Level::PTE) {
            Below::Table(table) => table,
            Below::Nothing(_) if !self.policy.what.allows_holes => return Some(MoveStop::Missing),
            Below::Nothing(_) => {
                let vacant = there.map_or(count, |table| {
                    self.counts.entries_read += u64::from(count);
                    run::count_empty(&self.page_table.entries(table)[to.positions(count)])
                });
                *done += vacant;
                return (vacant < count).then_some(MoveStop::Exists);
            }
            Below::Huge(found) => return self.break_huge(found, source).err(),
        };
        let page_table = self.page_table;
        let entries = &page_table.entries(table)[from.positions(count)];
        if there.is_none() {
            let vacant = run::count_empty(entries);
            if vacant > 0 {
                self.counts.entries_read += u64::from(vacant);
                if !self.policy.what.allows_holes {
                    return Some(MoveStop::Missing);
                }
                *done += vacant;
                return None;
            }
        }
        let Ok(there) = there.map_or_else(|| self.target_table(target, Level::PTE), Ok) else {
            return Some(MoveStop::NoMemory);
        };
        self.mark(table);
        self.mark(there);
        let mut stretch = TablePair {
            from: TableEntry { table, index: from },
            to: TableEntry { table: there, index: to },
            entries,
            there: &page_table.entries(there)[to.positions(count)],
            page: *done,
            left: 0,
            arrived: 0,
            stale: false,
        };
        let (moved, stop) = self.move_entries(&mut stretch);
        *done += moved;
        self.counts.entries_read += u64::from(moved);
        self.counts.entries_written += 2 * u64::from(stretch.left);
        page_table.memory.worked(2 * u64::from(moved), 0);
        page_table.change_entry_count(table, 0, stretch.left);
        page_table.change_entry_count(there, stretch.arrived, 0);
        if stretch.stale {
            self.stale_pages(stretch.page, moved);
        }
        stop
    }

    /// Moves the entries of a stretch. Returns the number of completed entries.
    fn move_entries(&mut self, stretch: &mut TablePair<'_>) -> (u32, Option<MoveStop>) {
        let count = stretch.entries.len() as u32;
        let numbered = self.policy.numbered;
        let first_index = self.index_at(stretch.page);
        let Some(owner) = self.policy.what.owner.run_from(first_index, count.into()) else {
            return (0, Some(MoveStop::Busy));
        };
        // The number of completed entries, and the number of those that were not such single pages.
        let (mut at, mut others) = (0, 0);
        let mut stop = None;
        while at < count {
            let (word, there) = (&stretch.entries[at as usize], &stretch.there[at as usize]);
            if there.load(Ordering::Relaxed) != 0 {
                stop = Some(MoveStop::Exists);
                break;
            }
            let entry = Entry(word.load(Ordering::Relaxed));
            // One comparison covers all bits of a leaf, since nearly all leaves move unchanged.
            let number = self.number_of(entry);
            if let Some(single) = numbered.try_lock_single(number) {
                word.swap(0, Ordering::SeqCst);
                if !single.is_free_to_move(1) {
                    word.store(entry.0, Ordering::Relaxed);
                    // SAFETY: 1. the folio was locked above, by its number.
                    unsafe { self.unlock_head(entry) };
                    stop = Some(MoveStop::Busy);
                    break;
                }
                single.give_to(owner, at.into());
                there.store(entry.0, Ordering::Relaxed);
                // SAFETY: 1. the folio was locked above, and no guard of the lock exists.
                if !unsafe { numbered.unlock(number) } {
                    self.see_to_marks(entry);
                }
                at += 1;
                continue;
            }
            match self.move_other(stretch, at, entry) {
                Ok(passed) => (at, others) = (at + passed, others + passed),
                Err(found) => {
                    stop = Some(found);
                    break;
                }
            }
        }
        let singles = at - others;
        stretch.left += singles;
        stretch.arrived += singles;
        stretch.stale |= singles > 0;
        (at, stop)
    }

    /// Moves any entry except a single page whose leaf moves unchanged. Returns the number of
    /// completed entries.
    #[inline(never)]
    fn move_other(
        &mut self,
        stretch: &mut TablePair<'_>,
        at: u32,
        entry: Entry,
    ) -> Result<u32, MoveStop> {
        let (entries, there) = (&stretch.entries[at as usize..], &stretch.there[at as usize..]);
        let left = entries.len() as u32;
        if entry.is_empty() {
            if !self.policy.what.allows_holes {
                return Err(MoveStop::Missing);
            }
            let hole = run::count_empty(entries) as usize;
            return Ok(run::count_empty(&there[..hole]));
        }
        if entry.0 & P::Arch::PRESENT == 0 {
            let moved = self.move_absents(entries, there)?;
            stretch.left += moved;
            stretch.arrived += moved;
            return Ok(moved);
        }
        let memory = self.page_table.memory;
        let first = stretch.from.index + at;
        let frame = P::Arch::frame(P::Arch::clear_contig(entry, first));
        if memory.is_zero(frame) {
            return Ok(self.move_zero_page(stretch, at, entry));
        }
        let whole = self.page_table.entries(stretch.from.table);
        let run = self.folio_run(whole, first, left, entry).ok_or(MoveStop::Busy)?;
        let FolioRun { folio, number, count, .. } = run;
        let handle = memory.frames.folio(folio);
        let is_whole = handle.mappings() == count && run::are_empty(&there[..count as usize]);
        if is_whole && handle.exclusive().contains_all(number, count) {
            self.move_folio(stretch, at, run)?;
            return Ok(count);
        }
        if is_whole || !handle.exclusive().contains(number) {
            return Err(MoveStop::Busy);
        }
        self.move_scattered(stretch.page + at, folio, number)
    }

    /// Moves a folio whose mappings all lie in its run, which starts at `at`.
    fn move_folio(
        &mut self,
        stretch: &mut TablePair<'_>,
        at: u32,
        run: FolioRun,
    ) -> Result<(), MoveStop> {
        let FolioRun { folio, number, count, gathered } = run;
        let (page_table, frames) = (self.page_table, &self.page_table.memory.frames);
        let place = stretch.page + at;
        let Some(index) = self.index_of_folio(place, number) else {
            return Err(self.parts_of_folio(place, folio, number, count));
        };
        // SAFETY: 1. the run at the source, whose table is locked.
        let lock = unsafe { lock(page_table.memory, folio) }?;
        let taken = take_leaves::<P::Arch>(&stretch.entries[at as usize..(at + count) as usize]);
        // Precedes the check of the pins: see `is_pinned_since`.
        fence(Ordering::SeqCst);
        let gathered = P::Arch::gather_run(gathered, taken.0, taken.1);
        if frames.folio(folio).is_pinned_since() {
            if P::Arch::CONTIG_ENTRIES > 1 {
                // Single pages may form a contiguous run when they are written.
                let range = self.source_pages(place, count);
                page_table.invalidate_now(range, Level::PTE, self.counts);
            }
            page_table.change_entry_count(stretch.from.table, 0, count);
            page_table.write_leaves(stretch.from.plus(at), gathered, count);
            return Err(MoveStop::Busy);
        }
        lock.give_to(self.policy.what.owner, index);
        self.keep_content(folio);
        page_table.write_leaves(stretch.to.plus(at), self.arrived(gathered), count);
        stretch.left += count;
        stretch.stale = true;
        Ok(())
    }

    /// Moves the entry of the zero page, or of a page of the huge zero page, unchanged.
    #[cold]
    fn move_zero_page(&mut self, stretch: &mut TablePair<'_>, at: u32, entry: Entry) -> u32 {
        if P::Arch::is_contig(entry) {
            let addr = VirtAddr(self.source_at(stretch.page + at));
            self.page_table.unfold(stretch.from.plus(at), addr, self.counts);
        }
        let word = &stretch.entries[at as usize];
        let entry = Entry(word.load(Ordering::Relaxed));
        let old = P::Arch::replace_entry(word, entry, |_| Entry::EMPTY);
        stretch.there[at as usize].store(old.0, Ordering::Relaxed);
        stretch.left += 1;
        stretch.arrived += 1;
        stretch.stale = true;
        1
    }

    /// Replaces a huge entry by level-1 entries, if the piece moves only a part of it or the target
    /// cannot hold it.
    #[cold]
    fn break_huge(
        &mut self,
        found: EntryAt<P::Arch, Table<'s>>,
        source: u64,
    ) -> Result<(), MoveStop> {
        let entry = found.entry;
        let memory = self.page_table.memory;
        if entry.0 & P::Arch::PRESENT == 0 {
            self.may_move_absent(entry)?;
        } else if !memory.is_zero(P::Arch::frame(entry)) {
            let folio = memory.frames.folio_of(P::Arch::frame(entry)).ok_or(MoveStop::Busy)?;
            if !memory.frames.folio(folio).exclusive().contains(0) {
                return Err(MoveStop::Busy);
            }
        }
        // A huge leaf has its table on deposit, so the split allocates no memory.
        self.split(&found, source)?;
        Ok(())
    }
}

/// The lock of a folio, or the reason to stop.
///
/// # Safety
/// 1. The caller keeps the folio mapped until the lock is dropped.
pub(super) unsafe fn lock<P: Platform>(
    memory: &Memory<P>,
    folio: Folio,
) -> Result<FolioLock<'_, P>, MoveStop> {
    let folio = memory.frames.folio(folio);
    // SAFETY: 1. the caller's obligation 1.
    match unsafe { folio.try_lock() } {
        Some(lock) => Ok(lock),
        None => Err(folio.keep().map_or(MoveStop::Busy, |kept| MoveStop::Locked(kept.into_held()))),
    }
}
