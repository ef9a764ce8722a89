//! Reads of pages in swap: the largest folio that the slots around the page allow.

use crate::addr::{Order, Orders, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Level};
use crate::error::{Failure, FaultError};
use crate::folio::{Folio, FreshFolio, LockedFolio};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::swap::content::ClaimedFolio;
use crate::swap::device_read::Load;
use crate::swap::slot_state::SlotState;
use crate::swap::streak::{ReadByFault, note_streak, orders_to_read};
use crate::swap::{SlotRun, begin_read_around, window_around};
use crate::table::look;
use crate::table::run::Entries;
use crate::table::{EntryAt, PageTable};

use super::Wait;
use super::first_touch::folio_place;
use super::slow::{Fault, Next, Stepped};
use super::swap_in::{CachedPage, FaultSlot, Home, Reading, slot_at};

impl<P: Platform> Fault<'_, '_, P> {
    /// Reads the content of the slots around the page into a fresh folio and maps it. The folio is
    /// the largest that the policy allows and whose slots are consecutive. A fault reads no larger
    /// folio than the one that was swapped out, unless faults continue page after page
    /// ([`orders_to_read`]).
    pub(super) fn read_in(&self, slot: FaultSlot, reading: Reading) -> Stepped {
        let (memory, page) = (self.memory(), self.page);
        let allowed = self.swap_in_orders();
        let mut orders = allowed;
        if allowed.has_large() && reading == Reading::Fault {
            orders = allowed & orders_to_read(memory, page.0 >> PAGE_SHIFT, slot.went_out());
        }
        if orders == Orders::PAGE
            && reading == Reading::Fault
            && memory.swap.reads_around(slot.area)
        {
            self.read_around(allowed);
        }
        while let Some((order, slots)) = self.next_run(slot, &mut orders) {
            memory.may_wait();
            let Some(fresh) = memory.frames.new_exclusive_folio(order) else { continue };
            match self.read_folio(fresh, slots, slot.number) {
                // Nothing was read, or the page cannot be mapped.
                Ok(stepped @ (Err(_) | Ok(Next::Wait(Wait::SwapRequest { .. })))) => {
                    return stepped;
                }
                Ok(stepped) => {
                    if reading == Reading::Fault {
                        // The wait for a device counts the fault when the page was read.
                        if !matches!(stepped, Ok(Next::Wait(_))) {
                            memory.note_major_fault();
                        }
                        if allowed.has_large() {
                            self.note_streak(slot, order);
                        }
                        if memory.clock.has_reclaimed() {
                            self.note_way(order);
                        }
                    }
                    return stepped;
                }
                Err(UnreadSlot::Slots) => {}
                Err(UnreadSlot::Content) if order > Order::PAGE => {}
                Err(UnreadSlot::Content) => return Err(FaultError::Bus.into()),
            }
            if order == Order::PAGE {
                // Another thread is reading the page, or has mapped or dropped it.
                memory.platform().relax();
                return Ok(Next::Again);
            }
        }
        Err(Failure::NoMemory)
    }

    /// The permitted orders of swapped-in folios of the VMA.
    // Always inlined, like the next function: both are part of each fault on a page in swap.
    #[inline(always)]
    pub(in crate::space) fn swap_in_orders(&self) -> Orders {
        let flags = self.vma.flags();
        let policy = self.memory().folio_policy().orders(flags.huge_advice());
        self.space.settings.used_orders(policy, flags) | Orders::PAGE
    }

    /// The largest run around the page in `slot` that can be read as one folio of an order from
    /// `orders`. Removes that order and larger ones from `orders`. The result is a guess, since
    /// entries may change.
    #[inline(always)]
    pub(in crate::space) fn next_run(
        &self,
        slot: FaultSlot,
        orders: &mut Orders,
    ) -> Option<(Order, SlotRun)> {
        while let Some(order) = orders.take_largest() {
            let Some(range) = folio_place(self.page, order) else { continue };
            if !self.vma.range().covers(range) || order > P::Arch::PMD.order() {
                continue;
            }
            let before = (self.page.0 - range.start().0) >> PAGE_SHIFT;
            let Some(first) = slot.number.checked_sub(before) else { continue };
            if order == Order::PAGE || names_run(self.page_table(), range, (slot.area, first)) {
                return Some((order, SlotRun { area: slot.area, first, count: order.pages() }));
            }
        }
        None
    }

    /// Records that the fault has read a folio of this order, for a policy with large folios.
    // Out of line, so that a fault costs no more if the policy has no large folios.
    #[inline(never)]
    fn note_streak(&self, slot: FaultSlot, order: Order) {
        let first = (self.page.0 >> PAGE_SHIFT) & !u64::from(order.pages() - 1);
        let went_out = slot.went_out();
        note_streak(self.memory(), ReadByFault { first, order, went_out });
    }

    /// Records that the fault has read a folio of this order, once memory has been short. The folio
    /// may have been swapped out again.
    #[cold]
    #[inline(never)]
    fn note_way(&self, order: Order) {
        let memory = self.memory();
        let mut frame = None;
        look::look(self.page_table(), self.range(), |looked| {
            frame = looked.frame();
            false
        });
        let held = frame.and_then(|frame| memory.frames.try_hold(frame));
        if let Some(folio) = held.filter(|held| memory.frames.folio(**held).is_anonymous()) {
            let number = (self.page.0 >> PAGE_SHIFT) & !u64::from(order.pages() - 1);
            memory.clock.passing.note_way(&memory.frames, *folio, number);
        }
    }

    /// Starts readahead of swapped-out pages around the page, in the same VMA and table. Pages that
    /// were swapped out in a larger folio of the `allowed` orders are left out, because they are
    /// read as one folio.
    #[cold]
    fn read_around(&self, allowed: Orders) {
        let (memory, page) = (self.memory(), self.page);
        let Some(window) = window_around(memory, page.0 >> PAGE_SHIFT) else { return };
        let table = page.align_down(P::Arch::PMD.span());
        let table = VirtRange::from_len(table, P::Arch::PMD.span());
        let Some(range) = table.map(|table| table.intersection(self.vma.range())) else { return };
        for number in window.first..window.first + u64::from(window.pages) {
            let at = VirtAddr(number << PAGE_SHIFT);
            if at == page || at < range.start() || at >= range.end() {
                continue;
            }
            let comes_back_as_page = |state: SlotState| {
                let order = state.order();
                state.frame().is_none() && (order == Order::PAGE || !allowed.contains(order))
            };
            let is_to_be_read = |slot: &FaultSlot| slot.state.is_some_and(comes_back_as_page);
            if let Some(slot) = slot_at(self.page_table(), at).filter(is_to_be_read)
                && !begin_read_around(memory, slot.area, slot.number)
            {
                break;
            }
        }
    }

    /// Claims the slots for the folio, reads their content into the folio and maps it.
    fn read_folio(
        &self,
        fresh: FreshFolio<'_, P>,
        slots: SlotRun,
        wanted: u64,
    ) -> Result<Stepped, UnreadSlot> {
        let memory = self.memory();
        let claimed =
            ClaimedFolio::claim(memory, fresh, slots.area, slots.first).ok_or(UnreadSlot::Slots)?;
        if memory.swap.is_on_device(slots.area) {
            return self.begin_device_read(claimed, wanted);
        }
        let locked = claimed.load(memory).ok_or(UnreadSlot::Content)?;
        let mapped = self.map_loaded(&locked, slots);
        locked.end();
        mapped
    }

    /// Prepares a read of the folio from a device, to be performed with the VMA unlocked.
    #[cold]
    fn begin_device_read(
        &self,
        claimed: ClaimedFolio<'_, P>,
        wanted: u64,
    ) -> Result<Stepped, UnreadSlot> {
        let (memory, folio, slots) = (self.memory(), claimed.folio(), claimed.slots());
        // Until the folio is mapped, other entries may refer to the slots of its pages.
        memory.frames.folio(folio).exclusive().clear(0, folio.pages());
        match claimed.begin_device_read(memory, wanted) {
            Load::Done(locked) => self.map_loaded(&locked, slots),
            Load::Lost => Err(UnreadSlot::Content),
            Load::Full => Ok(Ok(Next::Wait(Wait::SwapRequest { area: slots.area }))),
            Load::Begun(read) => {
                if memory.clock.has_reclaimed() {
                    let number = self.page.0 >> PAGE_SHIFT;
                    let first = number & !u64::from(folio.pages() - 1);
                    memory.clock.passing.note_way(&memory.frames, folio, first);
                }
                Ok(Ok(Next::Wait(Wait::SwapRead(read))))
            }
        }
    }

    /// Maps a folio that contains the content of these slots.
    #[inline(always)]
    fn map_loaded(
        &self,
        locked: &LockedFolio<'_, P>,
        slots: SlotRun,
    ) -> Result<Stepped, UnreadSlot> {
        let (folio, place, page) = (locked.folio(), slots.place(), self.page);
        // The folio may contain pages below the page of the fault, so the address determines the
        // page's number.
        let inside = (page.0 & ((folio_bytes(folio)) - 1)) >> PAGE_SHIFT;
        let cached = CachedPage { folio: locked.locked(), place, number: inside as u32 };
        let start = VirtAddr(page.0 - (inside << PAGE_SHIFT));
        let home = Home { index: self.vma.folio_index_at(start), is_shared: false };
        Ok(self.map_swapped(cached, home, locked.lock()))
    }
}

/// The reason why nothing was read.
enum UnreadSlot {
    /// The slots do not match the entries.
    Slots,
    /// The device has lost the content.
    Content,
}

fn folio_bytes(folio: Folio) -> u64 {
    u64::from(folio.pages()) << PAGE_SHIFT
}

/// Whether the entries of `range` appear to refer to consecutive slots of an area from `first` on,
/// in one table.
#[inline(never)]
fn names_run<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    (area, first): (u8, u64),
) -> bool {
    let section = page_table.read_section();
    let EntryAt { node, index, entry } =
        page_table.peek(&section, range.start(), &mut Counts::default());
    let inside = (range.start().0 & (node.level.span() - 1)) >> PAGE_SHIFT;
    let Some(Absent::Swap { device, slot, .. }) = P::Arch::decode_absent(entry) else {
        return false;
    };
    if entry.is_empty() || (device, slot + inside) != (area, first) {
        return false;
    }
    let pages = range.pages() as u32;
    node.level > Level::PTE
        || P::Arch::match_absent(&page_table.entries(node.table)[index.positions(pages)]).0 == pages
}
