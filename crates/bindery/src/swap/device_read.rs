//! Reads of a device that a thread waits for after it has released its locks.
//!
//! ```text
//! claimed --> under writeback --> read: in the swap cache, referred to by entries as before
//!    |            '-> the device has failed: leaves the cache
//!    '-> no request is free: leaves the cache
//! ```
//!
//! A fault must not hold a VMA's lock while a device works. So it claims the slots and takes a
//! request, unlocks the VMA, submits the request, waits, and tries again: then it finds the folio in
//! the swap cache, where its reference has kept the folio. Meanwhile the folio is locked and *under
//! writeback*, like one that is being written: the lock and the reference belong to the request,
//! until the thread that has begun the read takes them back.

use core::sync::atomic::Ordering::Relaxed;

use super::area::SlotRun;
use super::content::ClaimedFolio;
use super::device::SwapOperation;
use super::early_read::Stored;
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::writeback::FolioTransfer;
use crate::Memory;
use crate::addr::Order;
use crate::error::{Error, Failure};
use crate::folio::{Folio, FolioRef, LockedFolio};
use crate::platform::Platform;

/// A read for this thread, which [`Memory::finish_device_read`] submits to the device. Its folio
/// stays locked until then.
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

/// The result of an attempt to begin a read.
pub(crate) enum Load<'a, P: Platform> {
    /// The folio has the content already: words fill it.
    Done(LockedFolio<'a, P>),
    /// The content is lost. The folio is released.
    Lost,
    /// All requests of the area are under way. The folio is released.
    Full,
    /// The device is to read it.
    Begun(DeviceRead),
}

impl<P: Platform> Memory<P> {
    /// Takes a request to read the content of a claimed folio; `wanted` is the slot that the caller
    /// needs. The device does not work yet, and the call does not wait.
    #[cold]
    pub(crate) fn begin_device_read<'a>(
        &'a self,
        claimed: ClaimedFolio<'a, P>,
        wanted: u64,
    ) -> Load<'a, P> {
        let (folio, slots) = (claimed.folio(), claimed.slots());
        // Frees the requests of reads that are done.
        self.finish_swap_writes();
        // The slots are busy: that keeps the area and their content.
        let content = self.content_of(slots);
        if content == Some(Stored::None) {
            self.fill_filled_pages(&claimed);
            self.rare.pages_swapped_in.fetch_add(u64::from(slots.count), Relaxed);
            return Load::Done(claimed.into_locked());
        }
        let device = self.area(slots.area).and_then(|area| Some((area, area.device()?)));
        let device = device.filter(|_| content.is_some());
        let request = device.map(|(area, _)| (area, area.requests.take()));
        let Some((area, Some(number))) = request else {
            claimed.give_up(self);
            return if device.is_some() { Load::Full } else { Load::Lost };
        };
        self.fill_filled_pages(&claimed);
        area.requests.begin(number, folio.head, slots.first);
        // From here on, the folio is the request's.
        claimed.into_locked().into_request();
        Load::Begun(DeviceRead { folio, slots, number, wanted })
    }

    /// Has the device read, waits, and returns a reference to the folio, which is in the swap cache. If
    /// the device has failed to read several pages, reads the wanted one. `None` if that one is in the
    /// cache already, or needed no more. Called without locks. May sleep.
    ///
    /// # Errors
    /// [`Error::InputOutput`] if the content is lost; [`Error::OutOfMemory`].
    pub(crate) fn finish_device_read(
        &self,
        read: DeviceRead,
    ) -> Result<Option<FolioRef<'_, P>>, Failure> {
        if let Some(held) = self.await_device_read(&read) {
            return Ok(Some(held));
        }
        if read.folio.order == Order::PAGE {
            return Err(Error::InputOutput.into());
        }
        self.read_page(SlotRun { first: read.wanted, count: 1, ..read.slots })
    }

    /// Reads one page into the swap cache, as [`Memory::finish_device_read`] does.
    fn read_page(&self, slot: SlotRun) -> Result<Option<FolioRef<'_, P>>, Failure> {
        loop {
            let fresh = self.frames.new_folio(Order::PAGE).ok_or(Failure::NoMemory)?;
            let Some(claimed) = self.claim_for_read(fresh, slot) else { return Ok(None) };
            match self.begin_device_read(claimed, slot.first) {
                Load::Done(locked) => return Ok(Some(self.leave_in_cache(locked, slot))),
                Load::Lost => return Err(Error::InputOutput.into()),
                Load::Full => self.wait_for_request(slot.area),
                Load::Begun(read) => {
                    return match self.await_device_read(&read) {
                        Some(held) => Ok(Some(held)),
                        None => Err(Error::InputOutput.into()),
                    };
                }
            }
        }
    }

    /// Submits a read, waits until the device is done, and leaves the folio in the cache. `None` if
    /// the device has failed.
    fn await_device_read(&self, read: &DeviceRead) -> Option<FolioRef<'_, P>> {
        let &DeviceRead { folio, slots, number, .. } = read;
        // The busy slots keep the area and its device.
        let area = self.area(slots.area)?;
        let (place, operation) = (slots.place(), SwapOperation::Read);
        let what = FolioTransfer { operation, number, folio, place };
        self.submit_pieces(area, area.device()?, &what, |page| {
            self.slot_has(place.area, place.first + u64::from(page), SlotState::STORED)
        });
        self.wait_for_devices(&mut || area.requests.result(read.number).is_some());
        let locked = self.end_device_read(read)?;
        Some(self.leave_in_cache(locked, read.slots))
    }

    /// Takes the folio of a request back that is done. If the device has failed, the folio is
    /// released, and the slots have the content as before.
    fn end_device_read(&self, read: &DeviceRead) -> Option<LockedFolio<'_, P>> {
        let area = self.area(read.slots.area)?;
        let succeeded = area.requests.result(read.number) == Some(true);
        let lock = self.frames.folio(read.folio).lock_of_request();
        debug_assert!(lock.is_some(), "a folio that a device reads is not taken back");
        self.free_request(area, read.number);
        let locked = lock?.with_reference();
        if !succeeded {
            self.give_up(locked.locked(), read.slots.place());
            return None;
        }
        self.rare.pages_swapped_in.fetch_add(u64::from(read.slots.count), Relaxed);
        Some(locked)
    }

    /// Unlocks a folio that is complete and leaves it in the cache, with the caller's reference.
    fn leave_in_cache<'a>(&'a self, locked: LockedFolio<'a, P>, slots: SlotRun) -> FolioRef<'a, P> {
        self.unlock_claimed(locked.locked(), slots.place(), &PageSet::EMPTY);
        locked.unlock()
    }

    /// Waits until a request of the area is free. Called without locks.
    pub(crate) fn wait_for_request(&self, area: u8) {
        if let Some(area) = self.area(area) {
            self.wait_for_devices(&mut || area.requests.has_free());
        }
    }
}
