//! Reads without a waiting thread: of pages around a faulting one, and of pages that a program has
//! announced (`MADV_WILLNEED`).
//!
//! ```text
//! claimed --> under writeback --> in the swap cache, referred to by entries as before
//!    |            '-> the device has failed: leaves the cache
//!    '-> no request is free: leaves the cache
//! ```
//!
//! Like a folio that is being written, the folio is locked and *under writeback*: its lock belongs
//! to the request, and the thread that finds the request done unlocks the slots
//! ([`super::writeback`]).

use core::sync::atomic::Ordering::{Relaxed, Release};

use super::area::{Area, SlotRun};
use super::device::SwapOperation;
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::writeback::FolioTransfer;
use crate::Memory;
use crate::addr::Order;
use crate::events::RareEvents;
use crate::platform::Platform;

/// The reason of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// A fault needs a nearby page.
    Around,
    /// The program has announced that it will need the pages.
    Advice,
}

/// The source for the content of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// The cache: it has the content already, or another thread reads it in or writes it out.
    Cache,
    /// Compressed memory.
    Memory,
    /// A device that is about as fast.
    SynchronousDevice,
    /// A device that a thread would have to wait for.
    Device,
}

/// The result of an attempt to begin a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begun {
    /// A device has or had the request, or no page needed one.
    Yes,
    /// Some slot is in the cache, not referred to any more, or without content.
    Taken,
    /// No block of frames or no request is free.
    NoRoom,
}

/// The number of a run's pages that a device has; words fill the others.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    None,
    Some,
}

impl<P: Platform> Memory<P> {
    /// The source of the content of a slot of the area, given a recent copy of its cell.
    pub(crate) fn source_of(&self, area: u8, cell: SlotState) -> Source {
        match cell.frame() {
            Some(_) => Source::Cache,
            None if self.reads_around(area) => Source::Device,
            None if self.is_on_device(area) => Source::SynchronousDevice,
            None => Source::Memory,
        }
    }

    /// Like [`Memory::source_of`], for a slot that an object referred to a moment ago; `None` if no
    /// area has it.
    pub(crate) fn source_of_slot(&self, area: u8, slot: u64) -> Option<Source> {
        let cell = self.while_areas_stay(|| self.slot_state(area, slot));
        cell.map(|cell| self.source_of(area, cell))
    }

    /// Whether a read of the area could begin: a hint, to check before work that a refusal would
    /// waste.
    pub(crate) fn has_free_request(&self, area: u8) -> bool {
        self.area(area).is_some_and(|area| area.requests.has_free())
    }

    /// Begins to read the slots of a run of 2^`order`, which entries referred to a moment ago, into
    /// a fresh folio in the swap cache. Takes no memory from the reserve, and does not wait.
    pub(crate) fn begin_read(&self, run: SlotRun, order: Order, cause: Cause) -> Begun {
        let Some(fresh) = self.frames.new_folio(order) else { return Begun::NoRoom };
        let Some(claimed) = self.claim_for_read(fresh, run) else { return Begun::Taken };
        let (folio, place) = (claimed.folio(), run.place());
        // The slots are busy, which keeps the area and their content.
        let content = self.content_of(run);
        let worth = match cause {
            Cause::Around => content == Some(Stored::Some),
            Cause::Advice => content.is_some(),
        };
        if worth && content == Some(Stored::None) {
            self.fill_filled_pages(&claimed);
            self.rare.pages_swapped_in.fetch_add(u64::from(run.count), Relaxed);
            self.unlock_claimed(claimed.into_locked().locked(), place, &PageSet::EMPTY);
            return Begun::Yes;
        }
        let device = self.area(run.area).and_then(|area| Some((area, area.device()?)));
        let request =
            device.filter(|_| worth).map(|(area, device)| (area, device, area.requests.take()));
        let Some((area, device, Some(number))) = request else {
            claimed.give_up(self);
            return if worth { Begun::NoRoom } else { Begun::Taken };
        };
        self.fill_filled_pages(&claimed);
        area.requests.begin_around(number, folio.head);
        self.swap.reading.fetch_add(1, Relaxed);
        if cause == Cause::Around {
            RareEvents::note(&self.rare.swap_read_around);
            self.frames.folio(folio).mark_read_around();
        }
        // From here on, the folio is the request's.
        claimed.into_locked().into_request();
        let what = FolioTransfer { operation: SwapOperation::Read, number, folio, place };
        self.submit_pieces(area, device, &what, |page| {
            self.slot_has(place.area, place.first + u64::from(page), SlotState::STORED)
        });
        Begun::Yes
    }

    /// The number of a run's pages that a device has; the slots are busy. `None` if a slot has no
    /// content.
    pub(super) fn content_of(&self, run: SlotRun) -> Option<Stored> {
        let has =
            |page: u32, content| self.slot_has(run.area, run.first + u64::from(page), content);
        let stored = (0..run.count).filter(|page| has(*page, SlotState::STORED)).count();
        let filled = (0..run.count).filter(|page| has(*page, SlotState::FILLED)).count();
        let some = if stored == 0 { Stored::None } else { Stored::Some };
        (stored + filled == run.count as usize).then_some(some)
    }

    pub(super) fn slot_has(&self, area: u8, slot: u64, content: u64) -> bool {
        self.slot_state(area, slot).is_some_and(|cell| cell.has(content))
    }

    /// Completes a read for which no thread waits. Lock and reference are the caller's now. If the
    /// read failed, the slots keep their content.
    pub(super) fn finish_early_read(&self, area: &Area<P>, number: u32) {
        let read = area.requests.result(number) == Some(true);
        if let Some(folio) = self.frames.folio_of(area.requests.head(number)) {
            let lock = self.frames.folio(folio).lock_of_request();
            debug_assert!(lock.is_some(), "a folio that a device reads is not taken back");
            if let Some(lock) = lock {
                let locked = lock.with_reference();
                match self.frames.folio(folio).swap_place() {
                    Some(place) if read => {
                        self.rare.pages_swapped_in.fetch_add(u64::from(folio.pages()), Relaxed);
                        self.unlock_claimed(locked.locked(), place, &PageSet::EMPTY);
                    }
                    Some(place) => self.give_up(locked.locked(), place),
                    None => {}
                }
            }
        }
        area.requests.free(number);
        // Release: the folio is unlocked.
        self.swap.reading.fetch_sub(1, Release);
    }
}
