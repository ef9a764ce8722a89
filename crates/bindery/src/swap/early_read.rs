//! Reads without a waiting thread: of pages around a faulting page, and of pages that a program has
//! announced (`MADV_WILLNEED`).
//!
//! ```text
//! claimed --> under writeback --> in the swap cache, referred to by entries as before
//!    |            '-> the device has failed: leaves the cache
//!    '-> no request is free: leaves the cache
//! ```
//!
//! Like a folio that is being written, the folio is locked and *under writeback*: its lock belongs
//! to the request, and the thread that finds the request complete unlocks the slots
//! ([`super::writeback`]).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use super::Swap;
use super::area::{SlotArea, SlotRun};
use super::cached_folio::CachedFolio;
use super::content::ClaimedFolio;
use super::cpu::{self, frequent_events};
use super::device::SwapOperation;
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::slots::state_of;
use super::writeback::FolioTransfer;
use crate::Memory;
use crate::addr::Order;
use crate::events::RareEvents;
use crate::platform::Platform;

/// The reason for a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// A fault needs a nearby page.
    Around,
    /// A program has announced that it will need the pages.
    Advice,
}

/// The source of a slot's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EarlySource {
    /// The cache: it already has the content, or another thread is reading it in or writing it out.
    Cache,
    /// Compressed memory.
    Memory,
    /// A device that is about as fast as memory.
    SynchronousDevice,
    /// A device that a thread would have to wait for.
    Device,
}

/// The result of an attempt to start a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begun {
    /// A device has or had the request, or no page needed a device.
    Yes,
    /// Some slot is in the cache, no longer referred to, or without content.
    Taken,
    /// No block of frames or no request is free.
    NoRoom,
}

/// Whether a device holds some of a run's pages; the other pages are filled with repeated words.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DevicePages {
    None,
    Some,
}

impl<P: Platform> Swap<P> {
    /// The source of the content of a slot of the area, given a recent copy of its cell.
    pub(crate) fn source_of(&self, area: u8, cell: SlotState) -> EarlySource {
        match cell.frame() {
            Some(_) => EarlySource::Cache,
            None if self.reads_around(area) => EarlySource::Device,
            None if self.is_on_device(area) => EarlySource::SynchronousDevice,
            None => EarlySource::Memory,
        }
    }

    /// Whether a read of the area could begin. This is a hint, checked before work that a refusal
    /// would waste.
    pub(crate) fn has_free_request(&self, area: u8) -> bool {
        self.area(area).is_some_and(|area| area.requests.has_free())
    }
}

/// Like [`Swap::source_of`], for a slot that an object referred to a moment ago. `None` if no area
/// has the slot.
pub(crate) fn source_of_slot<P: Platform>(
    memory: &Memory<P>,
    area: u8,
    slot: u64,
) -> Option<EarlySource> {
    state_of(memory, area, slot).map(|cell| memory.swap.source_of(area, cell))
}

impl SlotRun {
    /// Starts to read the slots of a run of 2^`order`, to which entries referred a moment ago, into
    /// a fresh folio in the swap cache. Uses no memory from the reserve and does not wait.
    pub(crate) fn begin_read<P: Platform>(
        self,
        memory: &Memory<P>,
        order: Order,
        cause: Cause,
    ) -> Begun {
        let Some(fresh) = memory.frames.new_folio(order) else { return Begun::NoRoom };
        let Some(claimed) = ClaimedFolio::claim(memory, fresh, self.area, self.first) else {
            return Begun::Taken;
        };
        let (folio, slots) = (claimed.folio(), claimed.slots());
        let place = slots.place();
        // The slots are busy, which keeps the area on and their content stored.
        let content = slots.content(memory);
        let worth = match cause {
            Cause::Around => content == Some(DevicePages::Some),
            Cause::Advice => content.is_some(),
        };
        if worth && content == Some(DevicePages::None) {
            claimed.fill_filled_pages(memory);
            cpu::note_swapped_in(memory, slots.count);
            let locked = claimed.into_locked();
            CachedFolio::new(memory, locked.locked(), place).unlock(&PageSet::EMPTY);
            return Begun::Yes;
        }
        let area = memory.swap.area(self.area);
        let device = area
            .and_then(|area| Some((area, area.device_of(memory, self.first)?)))
            .filter(|_| worth);
        let request =
            device.map(|(area, device)| (area, device, area.requests.take(cpu::own(memory))));
        let Some((area, device, Some(number))) = request else {
            claimed.give_up(memory);
            return if worth { Begun::NoRoom } else { Begun::Taken };
        };
        claimed.fill_filled_pages(memory);
        let (group, number_there) = area.requests.group(number);
        group.begin_around(number_there, folio.head);
        group.begin_reading(1);
        if cause == Cause::Around {
            RareEvents::note(&frequent_events(memory).swap_read_around);
            memory.frames.folio(folio).mark_read_around();
        }
        // From here on, the folio belongs to the request.
        claimed.into_locked().into_request();
        let what = FolioTransfer { operation: SwapOperation::Read, number, folio, place };
        what.submit(memory, area, device, |page| slots.page_has(memory, page, SlotState::STORED));
        Begun::Yes
    }

    /// Whether a device holds some of the pages; the slots are busy. `None` if a slot has no
    /// content.
    pub(super) fn content<P: Platform>(self, memory: &Memory<P>) -> Option<DevicePages> {
        let count = |content| {
            (0..self.count).filter(|page| self.page_has(memory, *page, content)).count() as u32
        };
        let (stored, filled) = (count(SlotState::STORED), count(SlotState::FILLED));
        let some = if stored == 0 { DevicePages::None } else { DevicePages::Some };
        (stored + filled == self.count).then_some(some)
    }

    /// Whether a slot of the run has content of this kind. The slot is busy.
    pub(super) fn page_has<P: Platform>(self, memory: &Memory<P>, page: u32, content: u64) -> bool {
        let slot = self.first + u64::from(page);
        let state = state_of(memory, self.area, slot);
        state.is_some_and(|state| state.has(content))
    }
}

impl<P: Platform> SlotArea<P> {
    /// Completes a read for which no thread waits. The lock and the reference now belong to the
    /// caller. If the read failed, the slots keep their content.
    ///
    /// # Safety
    /// 1. The request was taken from the completed ones and is finished only here.
    pub(super) unsafe fn finish_early_read(&self, memory: &Memory<P>, number: u32) {
        let (group, number) = self.requests.group(number);
        let read = group.result(number) == Some(true);
        if let Some(folio) = memory.frames.folio_of(group.head(number)) {
            // SAFETY: 1. the reference belongs to the request, and is released with the lock before
            // the request is freed (obligation 1).
            let lock = unsafe { memory.frames.folio(folio).lock_of_request() };
            debug_assert!(lock.is_some(), "a folio that a device reads is not taken back");
            if let Some(lock) = lock {
                // SAFETY: 1. the reference is that of the request, from which the lock was taken
                // over.
                let locked = unsafe { lock.with_reference() };
                match CachedFolio::find(memory, locked.locked()) {
                    Some(cached) if read => {
                        cpu::note_swapped_in(memory, folio.pages());
                        cached.unlock(&PageSet::EMPTY);
                    }
                    Some(cached) => cached.give_up(),
                    None => {}
                }
            }
        }
        group.end_reading(1);
        group.free(number);
    }
}
