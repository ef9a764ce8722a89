//! Writes folios out: to compressed memory at once, or to a device, which reports the result later.
//!
//! A folio that a device has keeps its lock, and has the *writeback* bit. Lock and reference of the
//! submitting thread belong to the request. The thread that finds it done takes them over, and
//! evicts the folio or keeps it. A fault that finds the folio by a slot waits for the device, not
//! for the lock, which perhaps no other thread would release:
//!
//! 1. CPU A submits a folio and does other work.
//! 2. CPU B faults on it, sees the writeback bit, and parks on `Swap::completions`.
//! 3. The device is done. Its interrupt handler records that, changes the word and wakes B.
//! 4. CPU B finds the request done, evicts or keeps the folio, and unlocks it.
//!
//! The bit is set in one step with the last check for parked waiters, so that none of them sleeps
//! through step 3.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::area::{Area, SlotRun};
use super::content::Written;
use super::device::{SwapDevice, SwapDeviceError, SwapOperation, SwapRequest};
use super::slots::Stored;
use crate::Memory;
use crate::error::Error;
use crate::events::RareEvents;
use crate::folio::SwapPlace;
use crate::folio::{Folio, FolioLock, LockedFolio};
use crate::interrupt;
use crate::platform::Platform;

/// A folio in a transfer to or from a device.
pub(super) struct FolioTransfer {
    pub(super) operation: SwapOperation,
    /// The number of the request.
    pub(super) number: u32,
    pub(super) folio: Folio,
    pub(super) place: SwapPlace,
}

impl<P: Platform> Memory<P> {
    /// Writes out a folio in the swap cache, whose slots are busy, unless its content is in swap.
    /// Returns whether the folio is the caller's now, frozen. Otherwise a device has it, or it
    /// stays.
    pub(crate) fn write_out_locked(&self, leaving: LockedFolio<'_, P>, stored: Stored) -> bool {
        let folio = leaving.folio();
        let Some(place) = self.frames.folio(folio).swap_place() else { return false };
        if stored == Stored::Yes {
            return self.finish_write_out(leaving, place, None);
        }
        if let Some(area) = self.area(place.area)
            && area.has_device()
        {
            return self.send_to_device(area, leaving, place);
        }
        let mut written = Written::NOTHING;
        if !self.write_out(leaving.locked(), place, &mut written) {
            self.unlock_unwritten(leaving.locked(), place);
            return false;
        }
        self.finish_write_out(leaving, place, Some(&written))
    }

    /// Finishes a write of a folio. Returns whether the folio is the caller's now, frozen.
    fn finish_write_out(
        &self,
        leaving: LockedFolio<'_, P>,
        place: SwapPlace,
        written: Option<&Written>,
    ) -> bool {
        let evicted = self.evict(leaving.locked(), place, written);
        if evicted {
            leaving.into_frozen();
        }
        evicted
    }

    /// Like [`Memory::write_out_locked`], for a folio whose slots are on a device.
    #[cold]
    #[inline(never)]
    fn send_to_device(
        &self,
        area: &Area<P>,
        leaving: LockedFolio<'_, P>,
        place: SwapPlace,
    ) -> bool {
        let folio = leaving.folio();
        let written = self.sort_pages(leaving.locked(), place);
        let Some(device) = area.device().filter(|_| written.in_store(folio) > 0) else {
            self.rare.pages_swapped_out.fetch_add(u64::from(folio.pages()), Relaxed);
            return self.finish_write_out(leaving, place, Some(&written));
        };
        let number = self.take_request(area);
        area.requests.begin(number, folio.head, place.first);
        self.swap.writing.fetch_add(u64::from(folio.pages()), Relaxed);
        // From here on, the folio belongs to the request.
        leaving.into_request();
        let what = FolioTransfer { operation: SwapOperation::Write, number, folio, place };
        self.submit_pieces(area, device, &what, |page| !written.is_filled(page));
        false
    }

    /// Submits the runs of the folio's pages in `wanted`, and then completes the submitter's own
    /// piece.
    pub(super) fn submit_pieces(
        &self,
        area: &Area<P>,
        device: &dyn SwapDevice<P>,
        what: &FolioTransfer,
        wanted: impl Fn(u32) -> bool,
    ) {
        let FolioTransfer { operation, number, folio, place } = *what;
        let mut page = 0;
        while page < folio.pages() {
            let pages = (page..folio.pages()).take_while(|page| wanted(*page)).count() as u32;
            if pages > 0 {
                area.requests.add_piece(number);
                let request = SwapRequest {
                    operation,
                    area: place.area,
                    number,
                    slot: place.first + u64::from(page),
                    frame: folio.head.plus(page),
                    pages,
                };
                device.submit(self, request);
            }
            page += pages.max(1);
        }
        area.requests.complete(number, operation, false);
        self.note_completion();
    }

    /// Completes a request of a device, with its result. After an error, a page that was to be
    /// written stays in memory, and a read raises SIGBUS for the access that needed the page. A
    /// thread that waits for the page, reclaim, or [`Memory::finish_swap_writes`] does the rest.
    ///
    /// It takes no lock but [`Platform::unpark`]'s. A driver that calls it in an interrupt handler
    /// needs an `unpark` that may be called there.
    ///
    /// Context: any. Constant time.
    pub fn complete_swap_request(&self, request: SwapRequest, result: Result<(), SwapDeviceError>) {
        let SwapRequest { operation, area, number, .. } = request;
        if let Some(area) = self.area(area) {
            if result.is_err() {
                RareEvents::note(match operation {
                    SwapOperation::Read => &self.rare.swap_read_errors,
                    SwapOperation::Write => &self.rare.swap_write_errors,
                });
            }
            area.requests.complete(number, operation, result.is_err());
            self.note_completion();
        }
    }

    /// Wakes the threads that wait for a device. The requests were changed before.
    fn note_completion(&self) {
        self.swap.completions.note(self.platform());
    }

    /// Frees the folios that devices have written, unless they are wanted again. The embedder may
    /// call it from a thread after completions; reclaim calls it, too. Returns the number of freed
    /// pages.
    ///
    /// Context: may sleep. Complexity: linear in the completed requests.
    #[inline]
    pub fn finish_swap_writes(&self) -> u64 {
        // Acquire: a thread that reads 0 finds the folios unlocked.
        let left = self.swap.writing.load(Acquire) | self.swap.reading.load(Acquire);
        if left == 0 { 0 } else { self.finish_writes() }
    }

    #[cold]
    fn finish_writes(&self) -> u64 {
        let (mut freed, mut some) = (0, false);
        for (area_number, area) in (0..).zip(&self.swap.areas) {
            let mut done = area.requests.take_done();
            some |= done != 0;
            while done != 0 {
                freed += self.finish_write(area_number, area, done.trailing_zeros());
                done &= done - 1;
            }
        }
        if some {
            self.note_completion();
        }
        freed
    }

    /// Finishes a request whose device is done. Lock and reference are the caller's now. Returns
    /// the number of freed pages.
    fn finish_write(&self, area_number: u8, area: &Area<P>, number: u32) -> u64 {
        if area.requests.is_around(number) {
            self.finish_early_read(area, number);
            return 0;
        }
        let succeeded = area.requests.result(number) == Some(true);
        let head = area.requests.head(number);
        let Some(folio) = self.frames.folio_of(head) else { return 0 };
        let pages = u64::from(folio.pages());
        let mut freed = 0;
        let first = area.requests.first_slot(number);
        let slots = SlotRun { area: area_number, first, count: folio.pages() };
        match (self.lock_written(folio, slots), self.frames.folio(folio).swap_place()) {
            (None, _) => {
                let written = if succeeded { pages } else { 0 };
                self.rare.pages_swapped_out.fetch_add(written, Relaxed);
                self.frames.folio(folio).release();
            }
            (Some(lock), Some(place)) if succeeded => {
                self.rare.pages_swapped_out.fetch_add(pages, Relaxed);
                let written = self.sorted_pages(folio, place);
                if self.finish_write_out(lock.with_reference(), place, Some(&written)) {
                    self.frames.folio(folio).free_frozen_into(&mut self.free_batch());
                    freed = pages;
                }
            }
            (Some(lock), place) => {
                if let Some(place) = place {
                    self.unlock_unwritten(lock.locked(), place);
                }
                drop(lock.with_reference());
            }
        }
        // Last: a device knows no folio of an area whose requests are all free.
        area.requests.free(number);
        // Release: the folio is unlocked.
        self.swap.writing.fetch_sub(pages, Release);
        freed
    }

    /// Waits until all writes, and all reads for which no thread waits, are complete, and frees the
    /// written folios.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::Interrupted`] for a fatal signal; the writes continue.
    pub fn wait_for_swap_writes(&self) -> Result<(), Error> {
        self.wait_unless_killed(&|| {
            self.swap.writing.load(Acquire) == 0 && self.swap.reading.load(Acquire) == 0
        })
    }

    /// Waits until the device of a stopped area is idle.
    pub(super) fn wait_for_area(&self, area: &Area<P>) -> Result<(), Error> {
        self.wait_unless_killed(&|| area.requests.is_idle())
    }

    fn wait_unless_killed(&self, is_over: &dyn Fn() -> bool) -> Result<(), Error> {
        let mut result = Ok(());
        self.wait_for_devices(&mut || {
            let over = is_over();
            result = if over { Ok(()) } else { interrupt::check(self.platform()) };
            over || result.is_err()
        });
        result
    }

    /// The number of pages that devices are writing.
    pub(crate) fn pages_under_writeback(&self) -> u64 {
        self.swap.writing.load(Relaxed)
    }

    /// Waits until a device completes a request, if one is writing. Returns the number of freed
    /// pages.
    pub(crate) fn wait_for_a_write(&self) -> u64 {
        let mut again = false;
        self.wait_for_devices(&mut || {
            core::mem::replace(&mut again, true) || self.swap.writing.load(Acquire) == 0
        })
    }

    /// Waits until `is_over`, which changes when a request completes. Finishes completed requests
    /// on the way, and returns the number of pages that this freed. The caller holds no lock of a
    /// table or cluster, and is in no read section. No device has a folio that the caller has
    /// locked.
    #[cold]
    #[inline(never)]
    pub(crate) fn wait_for_devices(&self, is_over: &mut dyn FnMut() -> bool) -> u64 {
        let mut freed = 0;
        self.swap.completions.wait(self.platform(), &mut || {
            freed += self.finish_swap_writes();
            is_over()
        });
        freed
    }

    /// Takes a request of the area, waiting for one if necessary: requests in flight need no memory
    /// and no lock to complete.
    pub(super) fn take_request(&self, area: &Area<P>) -> u32 {
        let mut taken = area.requests.take();
        if taken.is_none() {
            self.wait_for_devices(&mut || {
                taken = area.requests.take();
                taken.is_some()
            });
        }
        taken.unwrap_or_default()
    }

    /// Frees a request that its reader is done with.
    pub(super) fn free_request(&self, area: &Area<P>, number: u32) {
        area.requests.free(number);
        self.note_completion();
    }

    /// Locks a folio to which the caller has a reference. Waits for the holder of the lock. From a
    /// device's write, takes the lock over if the device allows that ([`Memory::take_back`]). The
    /// caller holds no lock of a table, and is in no read section.
    pub(crate) fn lock_folio(&self, folio: Folio) -> FolioLock<'_, P> {
        loop {
            if let Some(lock) = self.frames.folio(folio).lock_unless_writeback() {
                return lock;
            }
            if let Some(lock) = self.take_back(folio) {
                return lock;
            }
            self.wait_for_devices(&mut || !self.frames.folio(folio).is_under_writeback());
        }
    }

    /// The slots of a folio whose pages are all in the cache.
    pub(super) fn slots_of(folio: Folio, place: SwapPlace) -> SlotRun {
        SlotRun { area: place.area, first: place.first, count: folio.pages() }
    }
}
