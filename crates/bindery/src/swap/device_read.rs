//! Reads of a device that a thread waits for after it has released its locks.
//!
//! ```text
//! claimed --> under writeback --> read: in the swap cache, referred to by entries as before
//!    |            '-> the device has failed: leaves the cache
//!    '-> no request is free: leaves the cache
//! ```
//!
//! A fault must not hold a VMA's lock while a device works. So it begins the read, unlocks the VMA,
//! waits, and tries again: then it finds the folio in the swap cache, where its reference has kept
//! the folio. Meanwhile the folio is locked and *under writeback*, like one that is being written:
//! the lock and the reference belong to the request, until the thread that has begun the read takes
//! them back.

use core::sync::atomic::Ordering::Relaxed;

use super::area::SlotRun;
use super::cell::Cell;
use super::device::SwapOperation;
use super::early_read::Stored;
use super::page_set::PageSet;
use super::writeback::FolioTransfer;
use crate::Memory;
use crate::addr::Order;
use crate::error::{Error, Failure};
use crate::folio::SwapPlace;
use crate::folio::{Folio, FolioIndex, FolioLock, FolioRef, Owner};
use crate::platform::Platform;

/// A read that a device does for this thread. Its folio stays locked until
/// [`Memory::finish_device_read`].
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
    /// The folio has the content already: words fill it, or the device was done at once. The caller
    /// has the lock and its reference again.
    Done(FolioLock<'a, P>),
    /// The content is lost. The folio is released.
    Lost,
    /// All requests of the area are under way. The folio is released.
    Full,
    /// The device reads it.
    Begun(DeviceRead),
}

impl<P: Platform> Memory<P> {
    /// Begins to read `slots` into the folio for which they are claimed. The caller has the folio's
    /// lock and, without a guard, a reference; `wanted` is the slot that it needs. Does not wait.
    #[cold]
    pub(crate) fn begin_device_read<'a>(
        &'a self,
        lock: FolioLock<'a, P>,
        folio: Folio,
        slots: SlotRun,
        wanted: u64,
    ) -> Load<'a, P> {
        let place = place_of(slots);
        // A device that is done at once leaves nothing to wait for, so no wait would finish the
        // reads around the page. That also frees their requests.
        self.finish_swap_writes();
        // The slots are busy: that keeps the area and their content.
        let content = self.content_of(slots);
        if content == Some(Stored::None) {
            self.fill_filled_pages(folio, slots);
            self.rare.pages_swapped_in.fetch_add(u64::from(slots.count), Relaxed);
            return Load::Done(lock);
        }
        let device = self.area(slots.area).and_then(|area| Some((area, area.device()?)));
        let device = device.filter(|_| content.is_some());
        let request = device.map(|(area, device)| (area, device, area.requests.take()));
        let Some((area, device, Some(number))) = request else {
            self.give_up(folio, place);
            drop(lock.with_reference());
            return if device.is_some() { Load::Full } else { Load::Lost };
        };
        self.fill_filled_pages(folio, slots);
        area.requests.begin(number, folio.head, slots.first);
        // From here on, the folio is the request's.
        lock.with_reference().into_request();
        let what = FolioTransfer { operation: SwapOperation::Read, number, folio, place };
        self.submit_pieces(area, device, &what, |page| {
            self.slot_has(place.area, place.first + u64::from(page), Cell::STORED)
        });
        let read = DeviceRead { folio, slots, number, wanted };
        if area.requests.result(number).is_none() {
            return Load::Begun(read);
        }
        match self.end_device_read(&read) {
            Some(lock) => Load::Done(lock),
            None => Load::Lost,
        }
    }

    /// Waits for a read, and returns a reference to its folio, which is in the swap cache. If the
    /// device has failed to read several pages, reads the wanted one. `None` if that one is in the
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
            let folio = self.frames.new_folio(Order::PAGE).ok_or(Failure::NoMemory)?;
            let Some(lock) = self.claim_for_read(folio, slot) else { return Ok(None) };
            match self.begin_device_read(lock, folio, slot, slot.first) {
                Load::Done(lock) => return Ok(Some(self.leave_in_cache(lock, folio, slot))),
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

    /// Claims slots for a fresh folio, which the caller then has locked and with a reference. If a
    /// slot is in the cache or not referred to any more, the folio is freed.
    fn claim_for_read(&self, folio: Folio, slots: SlotRun) -> Option<FolioLock<'_, P>> {
        let Some(lock) = self.frames.folio(folio).try_lock(&self.platform) else {
            self.frames.fresh(folio).discard(&self.platform);
            return None;
        };
        self.frames.fresh(folio).set_owner(Owner::Nobody, FolioIndex::NONE);
        // The cache's reference, and the caller's.
        self.frames.fresh(folio).publish_two();
        if self.claim_slots(folio, slots).is_err() {
            drop(lock);
            self.frames.folio(folio).release_pages(&self.platform, 2);
            return None;
        }
        Some(lock)
    }

    /// Waits until the device is done, and leaves the folio in the cache. `None` if it has failed.
    fn await_device_read(&self, read: &DeviceRead) -> Option<FolioRef<'_, P>> {
        let area = self.area(read.slots.area)?;
        self.wait_for_devices(&mut || area.requests.result(read.number).is_some());
        let lock = self.end_device_read(read)?;
        Some(self.leave_in_cache(lock, read.folio, read.slots))
    }

    /// Takes the folio of a request back that is done. If the device has failed, the folio is
    /// released, and the slots have the content as before.
    fn end_device_read(&self, read: &DeviceRead) -> Option<FolioLock<'_, P>> {
        let area = self.area(read.slots.area)?;
        let succeeded = area.requests.result(read.number) == Some(true);
        let lock = self.frames.folio(read.folio).lock_of_request(&self.platform);
        debug_assert!(lock.is_some(), "a folio that a device reads is not taken back");
        self.free_request(area, read.number);
        let lock = lock?;
        if !succeeded {
            self.give_up(read.folio, place_of(read.slots));
            drop(lock.with_reference());
            return None;
        }
        self.rare.pages_swapped_in.fetch_add(u64::from(read.slots.count), Relaxed);
        Some(lock)
    }

    /// Unlocks a folio that is complete and leaves it in the cache, with the caller's reference.
    fn leave_in_cache<'a>(
        &'a self,
        lock: FolioLock<'a, P>,
        folio: Folio,
        slots: SlotRun,
    ) -> FolioRef<'a, P> {
        self.settle_slots(folio, place_of(slots), &PageSet::EMPTY);
        lock.with_reference().unlock()
    }

    /// Waits until a request of the area is free. Called without locks.
    pub(crate) fn wait_for_request(&self, area: u8) {
        if let Some(area) = self.area(area) {
            self.wait_for_devices(&mut || area.requests.has_free());
        }
    }
}

/// The place of a folio that has all of these slots.
fn place_of(slots: SlotRun) -> SwapPlace {
    SwapPlace { area: slots.area, first: slots.first, cached: slots.count }
}
