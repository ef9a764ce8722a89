//! Level-1 entries of one span: single pages, and folios whose entries are one run.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::Memory;
use crate::addr::{Frame, Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Equal, Level};
use crate::folio::{Folio, FolioLock};
use crate::platform::Platform;
use crate::table::run::{self, Slots};

use super::{Below, EntryAt, LockSpan, MoveStop};

/// A stretch of one table of the source, and of one of the target.
pub(super) struct Part<'t> {
    pub(super) table: Frame,
    /// The source's first entry.
    pub(super) first: EntryIndex,
    pub(super) slots: &'t [AtomicU64],
    pub(super) target: Frame,
    pub(super) target_first: EntryIndex,
    pub(super) there: &'t [AtomicU64],
    /// Pages of the span before this part.
    pub(super) page: u32,
    /// Entries that have left the source, and those that have arrived at the target; not counted
    /// in the tables yet.
    gone: u32,
    come: u32,
    /// TLBs may hold one of them.
    stale: bool,
}

/// The pages of a folio that one run of entries maps.
struct FolioRun {
    folio: Folio,
    /// The first of them.
    number: u32,
    /// How many.
    alike: u32,
}

impl<P: Platform> LockSpan<'_, '_, P> {
    /// Moves all of the span. Returns the number of bytes that are done.
    pub(super) fn move_leaves(&mut self) -> (u64, Option<MoveStop>) {
        let pages = (self.policy.len >> PAGE_SHIFT) as u32;
        let mut done = 0;
        while done < pages {
            let stop = self.move_part(&mut done, pages);
            if stop.is_some() {
                return (u64::from(done) << PAGE_SHIFT, stop);
            }
        }
        (self.policy.len, None)
    }

    /// Continues at page `done`, as far as one table of the source and one of the target reach.
    fn move_part(&mut self, done: &mut u32, pages: u32) -> Option<MoveStop> {
        let (source, target) =
            (self.source_at(*done), self.policy.target + u64::from(*done) * PAGE_SIZE);
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
                    run::count_empty(&self.page_table.slots(table)[to.slots(count)])
                });
                *done += vacant;
                return (vacant < count).then_some(MoveStop::Exists);
            }
            Below::Huge(found) => return self.break_huge(found, source).err(),
        };
        let page_table = self.page_table;
        let slots = &page_table.slots(table)[from.slots(count)];
        if there.is_none() {
            let vacant = run::count_empty(slots);
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
        let mut part = Part {
            table,
            first: from,
            slots,
            target: there,
            target_first: to,
            there: &page_table.slots(there)[to.slots(count)],
            page: *done,
            gone: 0,
            come: 0,
            stale: false,
        };
        let (moved, stop) = self.move_entries(&mut part);
        *done += moved;
        self.counts.entries_read += u64::from(moved);
        self.counts.entries_written += 2 * u64::from(part.gone);
        page_table.memory.worked(2 * u64::from(moved), 0);
        page_table.change_entry_count(table, 0, part.gone);
        page_table.change_entry_count(there, part.come, 0);
        if part.stale {
            self.gather
                .stale(VirtRange::raw(source, source + u64::from(moved) * PAGE_SIZE), P::Arch::PTE);
        }
        stop
    }

    /// Moves the entries of a part. Returns the number of entries that are done.
    fn move_entries(&mut self, part: &mut Part<'_>) -> (u32, Option<MoveStop>) {
        let count = part.slots.len() as u32;
        let numbered = self.policy.numbered;
        let first_index = self.policy.index + u64::from(part.page);
        let Some(owner) = self.policy.what.owner.run_from(first_index, count.into()) else {
            return (0, Some(MoveStop::Busy));
        };
        let mut at = 0;
        while at < count {
            let (slot, there) = (&part.slots[at as usize], &part.there[at as usize]);
            if there.load(Ordering::Relaxed) != 0 {
                return (at, Some(MoveStop::Exists));
            }
            let entry = Entry(slot.load(Ordering::Relaxed));
            // One comparison covers all bits of a leaf: nearly all leaves move unchanged.
            let number = self.number_of(entry);
            if let Some(single) = numbered.try_lock_single(number) {
                slot.swap(0, Ordering::SeqCst);
                if !single.is_free_to_move(1) {
                    slot.store(entry.0, Ordering::Relaxed);
                    // SAFETY: 1. locked above, by its number.
                    unsafe { self.unlock_head(entry, Order::PAGE) };
                    return (at, Some(MoveStop::Busy));
                }
                single.give_to(owner, at.into());
                there.store(entry.0, Ordering::Relaxed);
                // SAFETY: 1. it was locked above, and no guard of it exists.
                if !unsafe { numbered.unlock(number) } {
                    self.see_to_marks(entry, Order::PAGE);
                }
                part.gone += 1;
                part.come += 1;
                part.stale = true;
                at += 1;
                continue;
            }
            match self.move_other(part, at, entry) {
                Ok(passed) => at += passed,
                Err(stop) => return (at, Some(stop)),
            }
        }
        (at, None)
    }

    /// Moves any entry but a single page whose leaf moves without a change. Returns the number of
    /// entries that are done.
    #[inline(never)]
    fn move_other(&mut self, part: &mut Part<'_>, at: u32, entry: Entry) -> Result<u32, MoveStop> {
        let (slots, there) = (&part.slots[at as usize..], &part.there[at as usize..]);
        let left = slots.len() as u32;
        if entry.is_empty() {
            if !self.policy.what.allows_holes {
                return Err(MoveStop::Missing);
            }
            let hole = run::count_empty(slots) as usize;
            return Ok(run::count_empty(&there[..hole]));
        }
        if entry.0 & P::Arch::PRESENT == 0 {
            let moved = self.move_absents(slots, there)?;
            part.gone += moved;
            part.come += moved;
            return Ok(moved);
        }
        let memory = self.page_table.memory;
        let first = part.first + at;
        let frame = P::Arch::frame(P::Arch::clear_contig(entry, first));
        if memory.is_zero(frame) {
            return Ok(self.move_zero_page(part, at, entry));
        }
        let folio = memory.frames.folio_of(frame).ok_or(MoveStop::Busy)?;
        let number = frame.0 - folio.head.0;
        let limit = left.min(folio.pages() - number);
        let whole = self.page_table.slots(part.table);
        let (alike, gathered) = if self.are_unchanged(whole, first, limit) {
            (limit, P::Arch::clear_contig(entry, first))
        } else {
            let equal = Equal::WRITABLE | Equal::SOFT_DIRTY;
            let entries = &whole[first.slots(limit)];
            P::Arch::match_leaves(entries, first, equal, P::Arch::STEP, 0)
        };
        if !memory.frames.folio(folio).exclusive().contains(number) {
            return Err(MoveStop::Busy);
        }
        if memory.frames.folio(folio).mappings() != alike
            || !run::are_empty(&there[..alike as usize])
        {
            return self.move_scattered(part.page + at, folio, number);
        }
        if !memory.frames.folio(folio).exclusive().contains_all(number, alike) {
            return Err(MoveStop::Busy);
        }
        self.move_folio(part, at, gathered, FolioRun { folio, number, alike })?;
        Ok(alike)
    }

    /// Moves a folio whose mappings are all among the `alike` entries at `at`.
    fn move_folio(
        &mut self,
        part: &mut Part<'_>,
        at: u32,
        gathered: Entry,
        run: FolioRun,
    ) -> Result<(), MoveStop> {
        let FolioRun { folio, number, alike } = run;
        let (page_table, frames) = (self.page_table, &self.page_table.memory.frames);
        let place = part.page + at;
        let Some(index) = self.index_of_folio(place, number) else {
            return Err(self.parts_of_folio(place, folio, number, alike));
        };
        let lock = lock(page_table.memory, folio)?;
        let taken = take_run::<P::Arch>(&part.slots[at as usize..(at + alike) as usize]);
        // Before the look at the pins: see `is_pinned_since`.
        fence(Ordering::SeqCst);
        let gathered = P::Arch::gather_run(gathered, taken.0, taken.1);
        if frames.folio(folio).is_pinned_since() {
            if P::Arch::CONTIG_ENTRIES > 1 {
                // Pages that were single may be a contiguous run when they are written.
                let (start, end) = (part.page + at, part.page + at + alike);
                let range = VirtRange::raw(self.source_at(start), self.source_at(end));
                page_table.invalidate_now(range, Level::PTE, self.counts);
            }
            page_table.change_entry_count(part.table, 0, alike);
            page_table.write_leaves(part.table, part.first + at, gathered, alike);
            return Err(MoveStop::Busy);
        }
        lock.give_to(self.policy.what.owner, index);
        let to = part.target_first + at;
        page_table.write_leaves(part.target, to, self.arrived(gathered), alike);
        part.gone += alike;
        part.stale = true;
        Ok(())
    }

    /// Moves the zero page, or a page of the huge one, as it is.
    #[cold]
    fn move_zero_page(&mut self, part: &mut Part<'_>, at: u32, entry: Entry) -> u32 {
        if P::Arch::is_contig(entry) {
            let addr = VirtAddr(self.source_at(part.page + at));
            self.page_table.unfold(part.table, part.first + at, addr, self.counts);
        }
        let slot = &part.slots[at as usize];
        let entry = Entry(slot.load(Ordering::Relaxed));
        let old = P::Arch::replace_entry(slot, entry, |_| Entry::EMPTY);
        part.there[at as usize].store(old.0, Ordering::Relaxed);
        part.gone += 1;
        part.come += 1;
        part.stale = true;
        1
    }

    /// Replaces a huge entry by entries of level 1, if the span moves a part of it or the target
    /// cannot have it.
    #[cold]
    fn break_huge(&mut self, found: EntryAt<P::Arch>, source: u64) -> Result<(), MoveStop> {
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
        // A huge leaf has its table on deposit, so this takes no memory.
        self.split(&found, source)?;
        Ok(())
    }
}

/// The lock of a folio that the caller keeps mapped, or the reason to stop.
pub(super) fn lock<P: Platform>(
    memory: &Memory<P>,
    folio: Folio,
) -> Result<FolioLock<'_, P>, MoveStop> {
    match memory.frames.folio(folio).try_lock() {
        Some(lock) => Ok(lock),
        None if memory.frames.folio(folio).try_get() => Err(MoveStop::Locked(folio)),
        None => Err(MoveStop::Busy),
    }
}

/// Clears the leaves. Returns the bits that some of them had, and those that all had.
fn take_run<A: Arch>(slots: &[AtomicU64]) -> (u64, u64) {
    let (mut any, mut all) = (0, u64::MAX);
    for slot in slots {
        let mut raw = slot.load(Ordering::Relaxed);
        if A::SATURATED.is(Entry(raw)) {
            slot.store(0, Ordering::Relaxed);
        } else {
            raw = slot.swap(0, Ordering::Relaxed);
        }
        any |= raw;
        all &= raw;
    }
    (any, all)
}
