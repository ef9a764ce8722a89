//! Faults on pages in swap: the folio in the swap cache is mapped wherever entries refer to its
//! slots.

use crate::addr::{Order, PAGE_SHIFT, VirtAddr};
use crate::arch::{Absent, AbsentFormat};
use crate::error::{Failure, FaultError, NoMemory};
use crate::folio::{FolioIndex, FolioLock, FolioLocked, FolioOwner, SwapPlace};
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::stats::Counts;
use crate::swap;
use crate::swap::slot_state::SlotState;
use crate::swap::{CachedFolio, SlotRun, find_cached, note_hit_of_read_around};
use crate::table::publish::publish;
use crate::table::swap_in;
use crate::table::swap_in::SwapIn;
use crate::table::{EntryAt, PageTable, Table};

use super::copy_on_write::folio_range;
use super::first_touch::own_folio;
use super::slow::{Fault, Next, Stepped};
use super::{Access, Resolved, Wait};
use crate::space::entry_policy::entry_policy;

/// The purpose of a swap-in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::space) enum Reading {
    /// A program has accessed the page.
    Fault,
    /// The page's area is being turned off.
    SwapOff,
    /// The program has announced that it will need the page.
    Advice,
}

/// A page of a folio in the swap cache.
#[derive(Clone, Copy)]
pub(super) struct CachedPage<'l> {
    pub(super) folio: FolioLocked<'l>,
    pub(super) place: SwapPlace,
    /// The page's number in the folio.
    pub(super) number: u32,
}

/// The owner of a folio to be swapped in.
#[derive(Clone, Copy)]
pub(super) struct Home {
    /// The index of the folio's first page in the VMA.
    pub(super) index: FolioIndex,
    /// Whether entries of other processes may refer to the folio's slots or map other pages of the
    /// folio. Such a folio belongs to the root of the VMA's family, from which the reverse map
    /// reaches all these processes.
    pub(super) is_shared: bool,
}

/// The slot to which an entry refers for one page.
#[derive(Clone, Copy)]
pub(in crate::space) struct FaultSlot {
    pub(in crate::space) area: u8,
    pub(super) number: u64,
    /// A copy of the slot's state, read in the same read section as the entry; `None` if no area
    /// has such a slot.
    pub(in crate::space) state: Option<SlotState>,
}

impl FaultSlot {
    /// The order of the folio in which the page was swapped out.
    #[inline]
    pub(super) fn went_out(self) -> Order {
        self.state.map_or(Order::PAGE, SlotState::order)
    }
}

/// The slot to which the entry of `page` refers, read without locks.
pub(in crate::space) fn slot_at<P: Platform>(
    page_table: &PageTable<'_, P>,
    page: VirtAddr,
) -> Option<FaultSlot> {
    let section = page_table.read_section();
    let seen = page_table.peek(&section, page, &mut Counts::default());
    slot_of(page_table, seen, page)
}

/// The slot to which an entry refers for `page`. The slot is looked up in the read section in which
/// the entry was read, so the slot's area stays until the section ends.
#[inline]
pub(super) fn slot_of<P: Platform>(
    page_table: &PageTable<'_, P>,
    seen: EntryAt<P::Arch, Table<'_>>,
    page: VirtAddr,
) -> Option<FaultSlot> {
    let EntryAt { node, entry, .. } = seen;
    let inside = (page.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
    match P::Arch::decode_absent(entry)? {
        Absent::Swap { device, slot, .. } if !entry.is_empty() => {
            let number = slot + inside;
            let memory = page_table.memory;
            let state = swap::state_of(memory, device, number);
            Some(FaultSlot { area: device, number, state })
        }
        Absent::Swap { .. } | Absent::Marker(_) | Absent::ProtNone { .. } => None,
    }
}

impl<P: Platform> Fault<'_, '_, P> {
    /// Swaps in the page whose entry refers to `slot`, together with the pages around it that were
    /// swapped out with it. Does not wait for devices.
    #[inline(never)]
    pub(in crate::space) fn swap_in(&self, slot: FaultSlot, reading: Reading) -> Stepped {
        let memory = self.memory();
        // If no area has such a slot, the entry is corrupt.
        let state = slot.state.ok_or(FaultError::Bus)?;
        if state.frame().is_some()
            && let Some(cached) = find_cached(memory, slot.area, slot.number)
        {
            // A thread or a device that is writing the folio out or reading it holds the lock.
            // Waiting for that lock with the VMA locked would make changes of the VMA wait for the
            // device.
            let Some(lock) = cached.try_lock() else {
                return Ok(Next::Wait(Wait::SwapCache { area: slot.area, slot: slot.number }));
            };
            if memory.frames.folio(*cached).take_read_around() {
                note_hit_of_read_around(memory, self.page.0 >> PAGE_SHIFT);
            }
            let place = memory.frames.folio(*cached).swap_place();
            let number = place.map_or(u64::MAX, |place| slot.number.wrapping_sub(place.first));
            if let Some(place) = place
                && number < u64::from(cached.pages())
                && place.area == slot.area
            {
                let number = number as u32;
                let found = CachedPage { folio: lock.locked(), place, number };
                return match self.home_of(&lock, found) {
                    Some(home) => self.map_swapped(found, home, &lock),
                    None => self.map_copy_of_cached(found),
                };
            }
            return Ok(Next::Again);
        }
        self.read_in(slot, reading)
    }

    /// The owner of the folio that contains the page. `None` if the page cannot be mapped from the
    /// folio: the folio's pages are mapped with a different index or for a different family, or its
    /// first page would have a negative index.
    ///
    /// The recorded owner of a folio without mappings is stale: the last thread that unmapped the
    /// folio may be about to remove the owner (`folio::lock`), whose memory may already be reused.
    /// Such a folio is mapped only under its lock, which the caller holds.
    fn home_of(&self, lock: &FolioLock<'_, P>, cached: CachedPage<'_>) -> Option<Home> {
        let (memory, vma) = (self.memory(), self.vma);
        let index = vma.folio_index_around(self.page, cached.number)?;
        if memory.frames.folio(*cached.folio).mappings() == 0 {
            return Some(Home { index, is_shared: false });
        }
        let FolioOwner { owner, first } = lock.owner();
        let group = vma.group().filter(|group| group.is_related(memory.platform(), owner))?;
        let is_own = AnonGroup::as_owner(Some(group)).owner() == owner;
        (first == index).then_some(Home { index, is_shared: !is_own })
    }

    /// Maps a copy of a page that is in the cache but not mapped. A folio has one index, so the
    /// page itself cannot be mapped here:
    /// 1. a folio of 16 pages is swapped out and stays in the cache;
    /// 2. the swap entries of the last eight move (`UFFDIO_MOVE`);
    /// 3. a fault at the old place maps the first eight pages. Or the new place starts at index 4,
    ///    so that the first page of the folio would have the index -4.
    #[cold]
    fn map_copy_of_cached(&self, cached: CachedPage<'_>) -> Stepped {
        let CachedPage { folio, place, number } = cached;
        let memory = self.memory();
        memory.may_wait();
        let copy = own_folio(memory, self.vma, self.page, Order::PAGE).ok_or(NoMemory)?;
        memory.platform().copy(folio.head.plus(number), copy.head, 1);
        let range = self.range();
        let what = SwapIn { range, ..self.swap_in_of(cached) };
        before_execution(memory, what.attributes.permissions, *copy);
        if let Some(copy) = swap_in::swap_in_copy(self.page_table(), &what, copy) {
            copy.discard();
            return Ok(Next::Again);
        }
        let slot = place.first + u64::from(number);
        SlotRun { area: place.area, first: slot, count: 1 }.release(memory);
        publish(self.page_table(), range);
        // A write then checks the entry again, which may not permit the write yet.
        Ok(if self.access == Access::Write {
            Next::Again
        } else {
            Next::Done(Resolved::FromSwap(range))
        })
    }

    /// Maps the folio, which is complete in the cache, wherever entries of the VMA refer to its
    /// slots around the page. Fails if the page cannot be mapped although nothing has changed,
    /// because the fault would otherwise start over forever.
    #[inline(never)]
    pub(super) fn map_swapped(
        &self,
        cached: CachedPage<'_>,
        home: Home,
        lock: &FolioLock<'_, P>,
    ) -> Stepped {
        let memory = self.memory();
        let what = self.swap_in_of(cached);
        let range = what.range;
        before_execution(memory, what.attributes.permissions, *cached.folio);
        // Whether the page is now mapped, and whether all mapped pages are exclusive.
        let (mapped, exclusive) =
            match swap_in::swap_in_whole(self.page_table(), &what, |exclusive| {
                self.set_home(lock, Home { is_shared: home.is_shared || !exclusive, ..home });
            }) {
                Some(exclusive) => {
                    CachedFolio::new(memory, cached.folio, cached.place).finish_swap_in();
                    (true, exclusive)
                }
                None => self.map_in_runs(cached, home, lock)?,
            };
        publish(self.page_table(), range);
        // A write then checks the entry again, which may not permit the write yet.
        Ok(if mapped && (self.access != Access::Write || exclusive) {
            Next::Done(Resolved::FromSwap(range))
        } else {
            Next::Again
        })
    }

    /// The folio that contains the page, and the part of the folio that belongs in the VMA.
    // Always inlined, so that the most frequent fault keeps the result in registers.
    #[inline(always)]
    fn swap_in_of<'l>(&self, cached: CachedPage<'l>) -> SwapIn<'l> {
        let CachedPage { folio, place, number } = cached;
        SwapIn {
            folio,
            place,
            start: VirtAddr(self.page.0.wrapping_sub(u64::from(number) << PAGE_SHIFT)),
            range: folio_range(self.vma, self.page, number, *folio),
            attributes: self.vma.flags().attributes().get(),
            change: entry_policy(self.vma),
        }
    }

    /// Sets the owner of a folio that is about to be mapped.
    fn set_home(&self, lock: &FolioLock<'_, P>, home: Home) {
        let group = self.vma.group();
        let group = if home.is_shared { group.map(AnonGroup::root) } else { group };
        lock.set_owner(AnonGroup::as_owner(group), home.index);
    }

    /// As [`Fault::map_swapped`], for a folio that is not one run. Returns whether the page is
    /// mapped, and whether all mapped pages are exclusive.
    #[inline(never)]
    fn map_in_runs(
        &self,
        cached: CachedPage<'_>,
        mut home: Home,
        lock: &FolioLock<'_, P>,
    ) -> Result<(bool, bool), Failure<FaultError>> {
        let CachedPage { folio, place, number } = cached;
        let done = swap_in::swap_in(self.page_table(), &self.swap_in_of(cached), |exclusive| {
            home.is_shared |= !exclusive;
            self.set_home(lock, home);
        });
        CachedFolio::new(self.memory(), folio, place).unlock(&done.pages);
        let mapped = done.pages.has(number);
        if done.refused && !mapped {
            return Err(Failure::NoMemory);
        }
        Ok((mapped, done.exclusive))
    }
}
