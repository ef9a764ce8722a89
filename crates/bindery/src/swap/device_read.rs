//! Device reads that a thread waits for after it has released its locks.
//!
//! ```text
//! claimed --> under writeback --> read: in the swap cache, referred to by entries as before
//!    |            '-> the device has failed: leaves the cache
//!    '-> no request is free: leaves the cache
//! ```
//!
//! A fault must not hold a VMA's lock while a device works. So it claims the slots and allocates a
//! request, unlocks the VMA, submits the request, waits, and retries: it then finds the folio in
//! the swap cache, where its reference has kept the folio. During the read, the folio is locked and
//! *under writeback*, like a folio that is being written: the lock and the reference belong to the
//! request until the thread that started the read takes them over.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use super::area::SlotRun;
use super::cached_folio::CachedFolio;
use super::content::ClaimedFolio;
use super::cpu;
use super::device::SwapOperation;
use super::early_read::DevicePages;
use super::page_set::PageSet;
use super::polled::PolledSlot;
use super::slot_state::SlotState;
use super::writeback::{FolioTransfer, finish_own_writes, wait_for_devices, wait_for_request};
use crate::Memory;
use crate::addr::Order;
use crate::error::{Error, Failure};
use crate::folio::{Folio, FolioRef, LockedFolio};
use crate::platform::Platform;

/// A read by this thread, which [`DeviceRead::finish`] submits to the device. The folio stays
/// locked until then.
#[derive(Debug)]
#[must_use = "the folio stays locked until the read is finished"]
pub(crate) struct DeviceRead {
    folio: Folio,
    slots: SlotRun,
    /// The number of the request.
    number: u32,
    /// The slot that the thread needs.
    wanted: u64,
}

/// The result of an attempt to start a read.
pub(crate) enum Load<'a, P: Platform> {
    /// The folio already has the content: its pages are filled with repeated words.
    Done(LockedFolio<'a, P>),
    /// The content is lost. The folio is released.
    Lost,
    /// All requests of the area are in flight. The folio is released.
    Full,
    /// The device has to read the content.
    Begun(DeviceRead),
}

impl<'a, P: Platform> ClaimedFolio<'a, P> {
    /// Allocates a request to read the content of the folio. `wanted` is the slot that the caller
    /// needs. The device does not work yet, and the call does not wait.
    #[cold]
    pub(crate) fn begin_device_read(self, memory: &'a Memory<P>, wanted: u64) -> Load<'a, P> {
        let (folio, slots) = (self.folio(), self.slots());
        // Frees the requests of completed reads.
        finish_own_writes(memory);
        // The slots are busy, which keeps the area on and their content stored.
        let content = slots.content(memory);
        if content == Some(DevicePages::None) {
            self.fill_filled_pages(memory);
            cpu::note_swapped_in(memory, slots.count);
            return Load::Done(self.into_locked());
        }
        let device = memory
            .swap
            .area(slots.area)
            .and_then(|area| Some((area, area.device_of(memory, slots.first)?)));
        let device = device.filter(|_| content.is_some());
        let request = device.map(|(area, _)| (area, area.requests.take(cpu::own(memory))));
        let Some((area, Some(number))) = request else {
            self.give_up(memory);
            return if device.is_some() { Load::Full } else { Load::Lost };
        };
        self.fill_filled_pages(memory);
        let (group, number_there) = area.requests.group(number);
        group.begin(number_there, folio.head, slots.first);
        // From here on, the folio belongs to the request.
        self.into_locked().into_request();
        Load::Begun(DeviceRead { folio, slots, number, wanted })
    }
}

impl DeviceRead {
    /// Makes the device read, waits, and returns a reference to the folio, which is in the swap
    /// cache. If the device has failed to read several pages, reads only the needed one. `None` if
    /// that page is already in the cache or is no longer needed. Called without locks. May sleep.
    ///
    /// # Errors
    /// [`Error::InputOutput`] if the content is lost; [`Error::OutOfMemory`].
    pub(crate) fn finish<P: Platform>(
        self,
        memory: &Memory<P>,
    ) -> Result<Option<FolioRef<'_, P>>, Failure> {
        if let Some(held) = self.run(memory) {
            return Ok(Some(held));
        }
        if self.folio.order == Order::PAGE {
            return Err(Error::InputOutput.into());
        }
        read_page(memory, SlotRun { first: self.wanted, count: 1, ..self.slots })
    }

    /// Abandons the read, in favor of a wait that starts another read in its first poll.
    pub(crate) fn into_polled<P: Platform>(self, memory: &Memory<P>) -> PolledSlot {
        let polled = PolledSlot::read(self.slots, self.folio.order, self.wanted);
        self.give_up(memory);
        polled
    }

    /// Ends the request without a read: the folio is released, and the slots keep their content.
    pub(crate) fn give_up<P: Platform>(self, memory: &Memory<P>) {
        // The request was not submitted, so it has no result, as after a failure of the device.
        let locked = self.end(memory);
        debug_assert!(locked.is_none(), "a read that was not submitted is done");
    }

    /// Submits the read, waits until the device is done, and leaves the folio in the cache. `None`
    /// if the device has failed.
    fn run<'m, P: Platform>(&self, memory: &'m Memory<P>) -> Option<FolioRef<'m, P>> {
        let &Self { folio, slots, number, .. } = self;
        // The busy slots keep the area and its device on.
        let area = memory.swap.area(slots.area)?;
        let (place, operation) = (slots.place(), SwapOperation::Read);
        let what = FolioTransfer { operation, number, folio, place };
        what.submit(memory, area, area.device_of(memory, slots.first)?, |page| {
            slots.page_has(memory, page, SlotState::STORED)
        });
        let (group, number) = area.requests.group(number);
        let is_done = || group.result(number).is_some();
        // A device without a queue has already finished.
        if !is_done() {
            wait_for_devices(memory, &mut || is_done());
        }
        let locked = self.end(memory)?;
        Some(leave_in_cache(memory, locked, slots))
    }

    /// Takes over the folio's lock from the completed request. If the device has failed, the folio
    /// is released, and the slots keep their content.
    fn end<'m, P: Platform>(&self, memory: &'m Memory<P>) -> Option<LockedFolio<'m, P>> {
        let area = memory.swap.area(self.slots.area)?;
        let (group, number) = area.requests.group(self.number);
        let succeeded = group.result(number) == Some(true);
        // SAFETY: 1. the reference belongs to the request, and the request to this read.
        let lock = unsafe { memory.frames.folio(self.folio).lock_of_request() };
        debug_assert!(lock.is_some(), "a folio that a device reads is not taken back");
        area.free_request(memory, self.number);
        // SAFETY: 1. the reference is that of the request, from which the lock was taken over.
        let locked = unsafe { lock?.with_reference() };
        if !succeeded {
            CachedFolio::new(memory, locked.locked(), self.slots.place()).give_up();
            return None;
        }
        cpu::note_swapped_in(memory, self.slots.count);
        Some(locked)
    }
}

/// Reads one page into the swap cache, as [`DeviceRead::finish`] does.
fn read_page<P: Platform>(
    memory: &Memory<P>,
    slot: SlotRun,
) -> Result<Option<FolioRef<'_, P>>, Failure> {
    loop {
        let fresh = memory.frames.new_folio(Order::PAGE).ok_or(Failure::NoMemory)?;
        let Some(claimed) = ClaimedFolio::claim(memory, fresh, slot.area, slot.first) else {
            return Ok(None);
        };
        match claimed.begin_device_read(memory, slot.first) {
            Load::Done(locked) => return Ok(Some(leave_in_cache(memory, locked, slot))),
            Load::Lost => return Err(Error::InputOutput.into()),
            Load::Full => wait_for_request(memory, slot.area),
            Load::Begun(read) => {
                return match read.run(memory) {
                    Some(held) => Ok(Some(held)),
                    None => Err(Error::InputOutput.into()),
                };
            }
        }
    }
}

/// Unlocks a folio whose content is complete and leaves it in the cache, with the caller's
/// reference.
fn leave_in_cache<'a, P: Platform>(
    memory: &'a Memory<P>,
    locked: LockedFolio<'a, P>,
    slots: SlotRun,
) -> FolioRef<'a, P> {
    CachedFolio::new(memory, locked.locked(), slots.place()).unlock(&PageSet::EMPTY);
    locked.unlock()
}
