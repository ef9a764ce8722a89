//! Faults on pages in swap: the content comes back, as the largest folio that its slots allow.

use core::cell::Cell;

use crate::addr::{Order, Orders, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Level};
use crate::error::{Failure, FaultError, NoMemory};
use crate::folio::SwapPlace;
use crate::folio::{Folio, FolioIndex, FolioLock, FolioOwner, Owner};
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::AddressSpace;
use crate::stats::Counts;
use crate::swap::SlotRun;
use crate::swap::cell::{self, ClaimError};
use crate::swap::streak::ReadByFault;
use crate::table::run::Slots;
use crate::table::swap_in::SwapIn;
use crate::table::{EntryAt, ReadSection};
use crate::vma::Vma;

use super::copy_on_write::folio_range;
use super::first_touch::folio_place;
use super::{Access, PageAccess, Resolved, Step};

/// Why a page comes back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::space) enum Reading {
    /// A program has touched it.
    Fault,
    /// Its area is turned off.
    SwapOff,
    /// The program has said that it will need it.
    Advice,
}

/// A page of a folio that is in the swap cache.
#[derive(Clone, Copy)]
struct CachedPage {
    folio: Folio,
    place: SwapPlace,
    /// Its number in the folio.
    number: u32,
}

/// Whose the pages of a folio are that come back.
#[derive(Clone, Copy)]
struct Home {
    /// The index that the folio's first page has in the VMA.
    index: FolioIndex,
    /// The folio is mapped elsewhere, and belongs to another group of the VMA's family.
    is_shared: bool,
}

/// The slot that an entry names for one page.
#[derive(Clone, Copy)]
pub(in crate::space) struct Slot {
    pub(in crate::space) area: u8,
    number: u64,
    /// As it was in the read section of the look; `None` if no area has such a slot.
    pub(in crate::space) cell: Option<cell::Cell>,
}

impl Slot {
    /// The order of the folio in which the page went out.
    #[inline]
    fn went_out(self) -> Order {
        self.cell.map_or(Order::PAGE, cell::Cell::order)
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Brings the page back that a swap entry names, with the pages around it that were
    /// swapped out with it. Begins again where something has changed in between. May sleep.
    #[inline(never)]
    pub(in crate::space) fn swap_in(
        &self,
        vma: &Vma,
        wanted: PageAccess,
        slot: Slot,
        reading: Reading,
    ) -> Result<Step, Failure<FaultError>> {
        let page = wanted.page;
        let memory = self.page_table.memory;
        // Where no area has such a slot, the entry is corrupted.
        let cell = slot.cell.ok_or(FaultError::Bus)?;
        if cell.frame().is_some()
            && let Some(cached) = memory.find_cached(slot.area, slot.number)
        {
            // Whoever writes the folio out, or reads it, has the lock.
            let lock = memory.lock_folio(*cached);
            if memory.frames.folio(*cached).take_read_around() {
                memory.note_hit_of_read_around(page.0 >> PAGE_SHIFT);
            }
            let place = memory.frames.folio(*cached).swap_place();
            let number = place.map_or(u64::MAX, |place| slot.number.wrapping_sub(place.first));
            if let Some(place) = place
                && number < u64::from(cached.pages())
                && place.area == slot.area
            {
                let number = number as u32;
                let found = CachedPage { folio: *cached, place, number };
                return match self.home_of(vma, &lock, page, found) {
                    Some(home) => self.map_swapped(vma, wanted, found, home, &lock),
                    None => self.map_copy_of_cached(vma, wanted, found),
                };
            }
            return Ok(Step::Again);
        }
        self.read_in(vma, wanted, slot, reading)
    }

    /// Where a folio belongs of which a page comes to `page`. `None` if it cannot come there as it
    /// is: its pages are mapped with another index, or for another family, or its first page would
    /// have an index below zero.
    ///
    /// Of a folio that is not mapped, the owner says nothing: the thread that has unmapped it last
    /// may be about to take the owner away (`folio::lock`), whose memory may be another's by
    /// now. It is mapped only under the lock, which is held here.
    fn home_of(
        &self,
        vma: &Vma,
        lock: &FolioLock<'_, P>,
        page: VirtAddr,
        cached: CachedPage,
    ) -> Option<Home> {
        let index = vma.folio_index_around(page, cached.number)?;
        let frames = &self.page_table.memory.frames;
        if frames.folio(cached.folio).mappings() == 0 {
            return Some(Home { index, is_shared: false });
        }
        let FolioOwner { owner, first } = lock.owner();
        let group = vma.group().filter(|group| group.is_related(self.platform(), owner))?;
        let is_own = AnonGroup::as_owner(Some(group.node())) == owner;
        (first == index).then_some(Home { index, is_shared: !is_own })
    }

    /// Maps a copy of a page that is in the cache, and that is not mapped. A folio has one index, so
    /// the page cannot come here as it is:
    /// 1. a folio of 16 pages goes out, and stays in the cache;
    /// 2. the swap entries of the last eight move (`UFFDIO_MOVE`);
    /// 3. a fault at the old place maps the first eight. Or the new place begins at index 4, and the
    ///    first page of the folio would have the index -4.
    #[cold]
    fn map_copy_of_cached(
        &self,
        vma: &Vma,
        wanted: PageAccess,
        cached: CachedPage,
    ) -> Result<Step, Failure<FaultError>> {
        let PageAccess { page, access } = wanted;
        let CachedPage { folio, place, number } = cached;
        let memory = self.page_table.memory;
        memory.may_wait();
        let copy = self.own_folio(vma, page, Order::PAGE).ok_or(NoMemory)?;
        self.platform().copy(folio.head.plus(number), copy.head, 1);
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let what = SwapIn {
            folio,
            place,
            start: VirtAddr(page.0.wrapping_sub(u64::from(number) << PAGE_SHIFT)),
            range,
            attributes: vma.flags().attributes(),
            change: vma.entry_policy(),
        };
        memory.before_execution(what.attributes.permissions, copy);
        if !self.page_table.swap_in_copy(&what, copy) {
            memory.frames.fresh(copy).discard(self.platform());
            return Ok(Step::Again);
        }
        let slot = place.first + u64::from(number);
        memory.release_slots(SlotRun { area: place.area, first: slot, count: 1 });
        self.published(range);
        // One that is to be written, and may not be yet, is looked at again.
        Ok(if access == Access::Write {
            Step::Again
        } else {
            Step::Done(Resolved::FromSwap(range))
        })
    }

    /// The slot that is named at `page`, read without locks.
    pub(in crate::space) fn slot_at(&self, page: VirtAddr) -> Option<Slot> {
        let section = ReadSection::enter(self.platform());
        let seen = self.page_table.peek(&section, page, &mut Counts::default());
        self.slot_of(&section, seen, page)
    }

    /// The slot that an entry names for `page`. It is looked up in the read section in which the
    /// entry was read: until that ends, the slot's area stays.
    #[inline]
    pub(super) fn slot_of(
        &self,
        _section: &ReadSection<'_, P>,
        seen: EntryAt<P::Arch>,
        page: VirtAddr,
    ) -> Option<Slot> {
        let EntryAt { node, entry, .. } = seen;
        let inside = (page.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
        match P::Arch::decode_absent(entry)? {
            Absent::Swap { device, slot, .. } if !entry.is_empty() => {
                let number = slot + inside;
                let cell = self.page_table.memory.swap_cell(device, number);
                Some(Slot { area: device, number, cell })
            }
            Absent::Swap { .. } | Absent::Marker(_) | Absent::ProtNone { .. } => None,
        }
    }

    /// Reads the content of the slots around `page` into a fresh folio, and maps it. It is the largest
    /// that the policy allows and whose slots are consecutive; for a fault, no larger than the one that
    /// went out, unless faults have gone on page after page ([`Memory::orders_to_read`]).
    ///
    /// [`Memory::orders_to_read`]: crate::Memory::orders_to_read
    fn read_in(
        &self,
        vma: &Vma,
        wanted: PageAccess,
        slot: Slot,
        reading: Reading,
    ) -> Result<Step, Failure<FaultError>> {
        let page = wanted.page;
        let memory = self.page_table.memory;
        let allowed = self.swap_in_orders(vma);
        let mut orders = allowed;
        if allowed.has_large() && reading == Reading::Fault {
            orders = allowed & memory.orders_to_read(page.0 >> PAGE_SHIFT, slot.went_out());
        }
        if orders == Orders::PAGE && reading == Reading::Fault && memory.reads_around(slot.area) {
            self.read_around(vma, page, allowed);
        }
        while let Some((order, slots)) = self.next_run(vma, page, slot, &mut orders) {
            memory.may_wait();
            let Some(folio) = memory.frames.new_exclusive_folio(order) else { continue };
            match self.read_folio(vma, wanted, folio, slots) {
                Ok(step) => {
                    if reading == Reading::Fault {
                        memory.note_major_fault();
                        if allowed.has_large() {
                            self.note_streak(page, slot, order);
                        }
                        if memory.clock.has_reclaimed() {
                            self.note_way(page, order);
                        }
                    }
                    return Ok(step);
                }
                Err(Unread::Slots) => {}
                Err(Unread::Content) if order > Order::PAGE => {}
                Err(Unread::Content) => return Err(FaultError::Bus.into()),
                Err(Unread::Refused(failure)) => return Err(failure),
            }
            if order == Order::PAGE {
                // Another thread reads the page, or has it, or it is gone.
                self.platform().relax();
                return Ok(Step::Again);
            }
        }
        Err(Failure::NoMemory)
    }

    /// The orders that folios of the VMA may have which come back from swap.
    // Always, and the next: they are part of each fault on a page in swap.
    #[inline(always)]
    pub(in crate::space) fn swap_in_orders(&self, vma: &Vma) -> Orders {
        let policy = self.page_table.memory.folio_policy().orders(vma.flags().huge_advice());
        self.used_orders(policy, vma.flags()) | Orders::PAGE
    }

    /// The largest run around `page`, which is in `slot`, that could come back as one folio of an
    /// order from `orders`, which loses that order and the larger ones. A guess: entries may change.
    #[inline(always)]
    pub(in crate::space) fn next_run(
        &self,
        vma: &Vma,
        page: VirtAddr,
        slot: Slot,
        orders: &mut Orders,
    ) -> Option<(Order, SlotRun)> {
        while let Some(order) = orders.take_largest() {
            let Some(range) = folio_place(page, order) else { continue };
            if !vma.range().covers(range) || order > P::Arch::PMD.order() {
                continue;
            }
            let before = (page.0 - range.start().0) >> PAGE_SHIFT;
            let Some(first) = slot.number.checked_sub(before) else { continue };
            if order == Order::PAGE || self.names_run(range, slot.area, first) {
                return Some((order, SlotRun { area: slot.area, first, count: order.pages() }));
            }
        }
        None
    }

    /// A fault on `page` has read a folio of that order, where the policy has large ones.
    // Apart, so that a fault costs no more where it has none.
    #[inline(never)]
    fn note_streak(&self, page: VirtAddr, slot: Slot, order: Order) {
        let first = (page.0 >> PAGE_SHIFT) & !u64::from(order.pages() - 1);
        let went_out = slot.went_out();
        self.page_table.memory.note_streak(ReadByFault { first, order, went_out });
    }

    /// A fault on `page` has read a folio of that order, and memory is short now and then. The folio
    /// may have gone again.
    #[cold]
    #[inline(never)]
    fn note_way(&self, page: VirtAddr, order: Order) {
        let memory = self.page_table.memory;
        let mut frame = None;
        self.page_table.look(VirtRange::raw(page.0, page.0 + PAGE_SIZE), |looked| {
            frame = looked.frame();
            false
        });
        let held = frame.and_then(|frame| memory.frames.try_hold(self.platform(), frame));
        if let Some(folio) = held.filter(|held| memory.frames.folio(**held).is_anonymous()) {
            memory.note_way(*folio, (page.0 >> PAGE_SHIFT) & !u64::from(order.pages() - 1));
        }
    }

    /// Begins to read pages of the VMA around `page`, of one table with it, that are in swap. Those that
    /// went out in a larger folio of the `allowed` orders come back in one, and not here.
    #[cold]
    fn read_around(&self, vma: &Vma, page: VirtAddr, allowed: Orders) {
        let memory = self.page_table.memory;
        let number = page.0 >> PAGE_SHIFT;
        let Some(window) = memory.window_around(number) else { return };
        let table = page.align_down(P::Arch::PMD.span());
        let table = VirtRange::from_len(table, P::Arch::PMD.span());
        let Some(range) = table.map(|table| table.intersection(vma.range())) else { return };
        for number in window.first..window.first + u64::from(window.pages) {
            let at = VirtAddr(number << PAGE_SHIFT);
            if at == page || at < range.start() || at >= range.end() {
                continue;
            }
            let comes_alone = |cell: cell::Cell| {
                let order = cell.order();
                cell.frame().is_none() && (order == Order::PAGE || !allowed.contains(order))
            };
            let is_to_be_read = |slot: &Slot| slot.cell.is_some_and(comes_alone);
            if let Some(slot) = self.slot_at(at).filter(is_to_be_read)
                && !memory.begin_read_around(slot.area, slot.number)
            {
                break;
            }
        }
    }

    /// Whether the entries of `range` seem to name consecutive slots, in one table.
    #[inline(never)]
    fn names_run(&self, range: VirtRange, area: u8, first: u64) -> bool {
        let section = ReadSection::enter(self.platform());
        let EntryAt { node, index, entry } =
            self.page_table.peek(&section, range.start(), &mut Counts::default());
        let inside = (range.start().0 & (node.level.span() - 1)) >> PAGE_SHIFT;
        let Some(Absent::Swap { device, slot, .. }) = P::Arch::decode_absent(entry) else {
            return false;
        };
        if entry.is_empty() || (device, slot + inside) != (area, first) {
            return false;
        }
        let pages = range.pages() as u32;
        node.level > Level::PTE
            || P::Arch::match_absent(&self.page_table.slots(node.table)[index.slots(pages)]).0
                == pages
    }

    fn read_folio(
        &self,
        vma: &Vma,
        wanted: PageAccess,
        folio: Folio,
        slots: SlotRun,
    ) -> Result<Step, Unread> {
        let page = wanted.page;
        let memory = self.page_table.memory;
        let frames = &memory.frames;
        let Some(lock) = frames.folio(folio).try_lock(self.platform()) else {
            return Err(Unread::Slots);
        };
        frames.fresh(folio).set_owner(Owner::Nobody, FolioIndex::NONE);
        // The cache's reference, and ours. Published first: a thread that finds the folio by a slot
        // finds it counted.
        frames.fresh(folio).publish_two();
        if let Err(ClaimError::Cached | ClaimError::Gone) = memory.claim_slots(folio, slots) {
            drop(lock);
            frames.folio(folio).release_pages(self.platform(), 2);
            return Err(Unread::Slots);
        }
        let place = SwapPlace { area: slots.area, first: slots.first, cached: slots.count };
        if !memory.load_folio(folio, slots) {
            memory.give_up(folio, place);
            drop(lock);
            frames.folio(folio).release(self.platform());
            return Err(Unread::Content);
        }
        // Below the head there may be pages that the fault does not see: the address tells the
        // number.
        let inside = (page.0 & ((folio_bytes(folio)) - 1)) >> PAGE_SHIFT;
        let cached = CachedPage { folio, place, number: inside as u32 };
        let start = VirtAddr(page.0 - (inside << PAGE_SHIFT));
        let home = Home { index: vma.folio_index_at(start), is_shared: false };
        let step = self.map_swapped(vma, wanted, cached, home, &lock);
        drop(lock);
        frames.folio(folio).release(self.platform());
        step.map_err(Unread::Refused)
    }

    /// Maps the folio, which is in the cache and complete, wherever entries of the VMA name its
    /// slots around `page`, which is its page `number`. Fails where the page cannot be mapped
    /// though nothing has changed: a fault that began again would do so forever.
    #[inline(never)]
    fn map_swapped(
        &self,
        vma: &Vma,
        wanted: PageAccess,
        cached: CachedPage,
        home: Home,
        lock: &FolioLock<'_, P>,
    ) -> Result<Step, Failure<FaultError>> {
        let PageAccess { page, access } = wanted;
        let CachedPage { folio, place, number } = cached;
        let memory = self.page_table.memory;
        let start = VirtAddr(page.0.wrapping_sub(u64::from(number) << PAGE_SHIFT));
        let what = SwapIn {
            folio,
            place,
            start,
            range: folio_range(vma, page, number, folio),
            attributes: vma.flags().attributes(),
            change: vma.entry_policy(),
        };
        memory.before_execution(what.attributes.permissions, folio);
        let is_shared = Cell::new(home.is_shared);
        let own = |exclusive: bool| {
            // Others may name the slots of pages that are not exclusive, or map other pages of the
            // folio: they all are below the root.
            is_shared.set(is_shared.get() || !exclusive);
            let group = if is_shared.get() {
                vma.group().map(AnonGroup::root_pointer)
            } else {
                vma.group_pointer()
            };
            lock.set_owner(AnonGroup::as_owner(group), home.index);
        };
        // Whether the page is mapped now, and whether all that are, are exclusive.
        let (mapped, exclusive) = match self.page_table.swap_in_whole(&what, own) {
            Some(exclusive) => {
                memory.settle_all_slots(folio, place);
                (true, exclusive)
            }
            None => self.map_in_runs(&what, number, &own)?,
        };
        self.published(what.range);
        // A page that is to be written, and may not be yet, is looked at again.
        Ok(if mapped && (access != Access::Write || exclusive) {
            Step::Done(Resolved::FromSwap(what.range))
        } else {
            Step::Again
        })
    }

    /// As [`AddressSpace::map_swapped`], where the folio is not one run. Says whether page `number`
    /// is mapped, and whether all that are, are exclusive.
    #[inline(never)]
    fn map_in_runs(
        &self,
        what: &SwapIn,
        number: u32,
        own: &dyn Fn(bool),
    ) -> Result<(bool, bool), Failure<FaultError>> {
        let done = self.page_table.swap_in(what, own);
        self.page_table.memory.settle_slots(what.folio, what.place, &done.pages);
        let mapped = done.pages.has(number);
        if done.refused && !mapped {
            return Err(Failure::NoMemory);
        }
        Ok((mapped, done.exclusive))
    }
}

/// Why nothing was read.
enum Unread {
    /// The slots are not as the entries said.
    Slots,
    /// The device has lost the content.
    Content,
    /// The content came, and the page cannot be mapped.
    Refused(Failure<FaultError>),
}

fn folio_bytes(folio: Folio) -> u64 {
    u64::from(folio.pages()) << PAGE_SHIFT
}
