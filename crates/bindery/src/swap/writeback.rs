//! Writes folios out: to compressed memory immediately, or to a device, which reports the result
//! later.
//!
//! A folio that a device is transferring stays locked and has the *writeback* bit. The lock and the
//! reference of the submitting thread belong to the request. The thread that finds the request
//! complete takes them over and evicts or keeps the folio. A fault that finds the folio through a
//! slot waits for the device rather than for the lock, which perhaps no other thread would release:
//!
//! 1. CPU A submits a folio and does other work.
//! 2. CPU B faults on it, sees the writeback bit, and parks on `Swap::completions`.
//! 3. The device completes the write. Its interrupt handler records this, changes the word and
//!    wakes B.
//! 4. CPU B finds the request complete, evicts or keeps the folio, and unlocks it.
//!
//! The bit is set in one step with the last check for parked waiters, so that no waiter sleeps
//! through step 3.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use super::Swap;
use super::area::{SlotArea, SlotRun};
use super::cached_folio::CachedFolio;
use super::cpu;
use super::device::{SwapDevice, SwapDeviceError, SwapOperation, SwapRequest};
use super::filled_pages::FilledPages;
use super::slots::Stored;
use super::take_over::{lock_written, take_over};
use crate::Memory;
use crate::error::Error;
use crate::events::RareEvents;
use crate::folio::{Folio, FolioLock, FolioRef, FrozenFolio, LockedFolio, SwapPlace};
use crate::interrupt;
use crate::platform::{Cpu, Platform};

/// A folio in a transfer to or from a device.
pub(super) struct FolioTransfer {
    pub(super) operation: SwapOperation,
    /// The number of the request.
    pub(super) number: u32,
    pub(super) folio: Folio,
    pub(super) place: SwapPlace,
}

impl FolioTransfer {
    /// Submits the runs of those pages of the folio for which `wanted` returns true, and then
    /// completes the submitter's own piece.
    pub(super) fn submit<P: Platform>(
        &self,
        memory: &Memory<P>,
        area: &SlotArea<P>,
        device: &dyn SwapDevice<P>,
        wanted: impl Fn(u32) -> bool,
    ) {
        let Self { operation, number, folio, place } = *self;
        let (group, number_there) = area.requests.group(number);
        let mut page = 0;
        while page < folio.pages() {
            let pages = (page..folio.pages()).take_while(|page| wanted(*page)).count() as u32;
            if pages > 0 {
                group.add_piece(number_there);
                let request = SwapRequest {
                    operation,
                    area: place.area,
                    number,
                    slot: place.first + u64::from(page),
                    frame: folio.head.plus(page),
                    pages,
                };
                device.submit(memory, request);
            }
            page += pages.max(1);
        }
        group.complete(number_there, operation, false);
        memory.swap.note_completion(memory.platform());
    }
}

/// Whether a write-out takes a request of a device. Without one, the folio stays in the cache,
/// unlocked and without content in swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TakeRequest {
    /// It does, and waits if all are in use.
    Awaits,
    /// It does if one is free.
    IfFree,
    /// It does not, because earlier folios wait for one.
    Never,
}

/// A folio stays in the cache because it got no request of the device of this area
/// ([`TakeRequest`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AllInUse {
    pub(crate) area: u8,
}

/// Writes out a folio in the swap cache, whose slots are busy, unless its content is already in
/// swap. Returns the folio if it now belongs to the caller. Otherwise a device has the folio, or it
/// stays in the cache.
#[inline]
pub(crate) fn write_out<'m, P: Platform>(
    memory: &'m Memory<P>,
    leaving: LockedFolio<'m, P>,
    stored: Stored,
) -> Option<FrozenFolio<'m, P>> {
    try_write_out(memory, leaving, stored, TakeRequest::Awaits).unwrap_or(None)
}

/// As [`write_out`], for a caller that may not wait for a request.
///
/// # Errors
/// [`AllInUse`], except with [`TakeRequest::Awaits`].
pub(crate) fn try_write_out<'m, P: Platform>(
    memory: &'m Memory<P>,
    leaving: LockedFolio<'m, P>,
    stored: Stored,
    take: TakeRequest,
) -> Result<Option<FrozenFolio<'m, P>>, AllInUse> {
    let folio = leaving.folio();
    let Some(place) = memory.frames.folio(folio).swap_place() else { return Ok(None) };
    if stored == Stored::Yes {
        return Ok(CachedFolio::evict(memory, leaving, place, None));
    }
    if let Some(area) = memory.swap.area(place.area)
        && area.has_device()
    {
        return send_to_device(memory, area, leaving, place, take);
    }
    let mut written = FilledPages::NOTHING;
    let cached = CachedFolio::new(memory, leaving.locked(), place);
    if !cached.write_out(&mut written) {
        cached.unlock_unwritten();
        return Ok(None);
    }
    Ok(CachedFolio::evict(memory, leaving, place, Some(&written)))
}

/// Like [`try_write_out`], for a folio whose slots are on a device.
#[cold]
#[inline(never)]
fn send_to_device<'m, P: Platform>(
    memory: &'m Memory<P>,
    area: &SlotArea<P>,
    leaving: LockedFolio<'m, P>,
    place: SwapPlace,
    take: TakeRequest,
) -> Result<Option<FrozenFolio<'m, P>>, AllInUse> {
    let folio = leaving.folio();
    let written = CachedFolio::new(memory, leaving.locked(), place).sort_pages();
    let device = area.device_of(memory, place.first);
    let Some(device) = device.filter(|_| written.in_store(folio) > 0) else {
        cpu::note_swapped_out(memory, folio.pages());
        return Ok(CachedFolio::evict(memory, leaving, place, Some(&written)));
    };
    let number = match take {
        TakeRequest::Awaits => Some(area.take_request(memory)),
        TakeRequest::IfFree => area.requests.take(cpu::own(memory)),
        TakeRequest::Never => None,
    };
    let Some(number) = number else {
        CachedFolio::new(memory, leaving.locked(), place).unlock_unwritten();
        return Err(AllInUse { area: place.area });
    };
    let (group, number_there) = area.requests.group(number);
    group.begin(number_there, folio.head, place.first);
    group.begin_writing(folio.pages());
    // From here on, the folio belongs to the request.
    leaving.into_request();
    let what = FolioTransfer { operation: SwapOperation::Write, number, folio, place };
    what.submit(memory, area, device, |page| !written.is_filled(page));
    if !group.take_done_one(number_there) {
        return Ok(None);
    }
    // A device without a queue has already finished. So its writes use one request at a time, and
    // the caller counts the folio as freed. If another thread was faster, the number may by now
    // belong to another folio's request.
    let mut own = None;
    let evicted = |evicted: FrozenFolio<'m, P>| {
        if evicted.folio() == folio {
            own = Some(evicted);
        } else {
            evicted.free_into(&mut memory.free_batch());
        }
    };
    // SAFETY: 1. `take_done_one` has assigned the request to this thread.
    unsafe { area.finish_one(memory, place.area, number, evicted) };
    memory.swap.note_completion(memory.platform());
    Ok(own)
}

/// Records that a device has completed a request, and wakes the threads that wait for the device.
pub(super) fn complete<P: Platform>(
    memory: &Memory<P>,
    request: SwapRequest,
    result: Result<(), SwapDeviceError>,
) {
    let SwapRequest { operation, area, number, .. } = request;
    if let Some(area) = memory.swap.area(area) {
        if result.is_err() {
            RareEvents::note(match operation {
                SwapOperation::Read => &memory.rare.swap_read_errors,
                SwapOperation::Write => &memory.rare.swap_write_errors,
            });
        }
        let (group, number) = area.requests.group(number);
        group.complete(number, operation, result.is_err());
        memory.swap.note_completion(memory.platform());
    }
}

impl<P: Platform> Swap<P> {
    /// Wakes the threads that wait for a device. The caller has already changed the requests.
    pub(super) fn note_completion(&self, platform: &P) {
        self.completions.note(platform);
    }

    /// The number of pages that devices are writing, and the number that they are reading without a
    /// waiting thread. Acquire: a thread that reads 0 finds the folios unlocked.
    fn pages_in_flight(&self) -> (u64, u64) {
        let areas = self.areas.iter().map(|area| area.requests.pages());
        areas.fold((0, 0), |sum, pages| (sum.0 + pages.0, sum.1 + pages.1))
    }

    /// The number of requests in flight on devices.
    pub(crate) fn requests_in_flight(&self) -> u32 {
        self.areas.iter().map(|area| area.requests.count()).sum()
    }

    /// The number of pages that devices are writing.
    pub(crate) fn pages_under_writeback(&self) -> u64 {
        if self.has_devices() { self.pages_in_flight().0 } else { 0 }
    }
}

/// Finishes the completed requests of the CPU's own groups. Reads no cache line of another CPU.
/// Returns the number of freed pages.
#[inline]
pub(crate) fn finish_own_writes<P: Platform>(memory: &Memory<P>) -> u64 {
    if memory.swap.has_devices() { finish_writes(memory, cpu::own(memory)) } else { 0 }
}

/// Finishes all completed requests; with a CPU, only those of its groups. Returns the number of
/// freed pages.
#[cold]
pub(super) fn finish_writes<P: Platform>(memory: &Memory<P>, cpu: Option<Cpu>) -> u64 {
    let (mut freed, mut some) = (0, false);
    for (area_number, area) in (0..).zip(&memory.swap.areas) {
        let mut done = area.requests.take_done(cpu);
        some |= done != 0;
        while done != 0 {
            // SAFETY: 1. `take_done` has assigned the request to this thread, which passes it once.
            freed += unsafe { area.finish_request(memory, area_number, done.trailing_zeros()) };
            done &= done - 1;
        }
    }
    if some {
        memory.swap.note_completion(memory.platform());
    }
    freed
}

impl<P: Platform> SlotArea<P> {
    /// Finishes a completed request. The lock and the reference now belong to the caller. Returns
    /// the number of freed pages.
    ///
    /// # Safety
    /// 1. The request was taken from the completed ones and is finished only here.
    unsafe fn finish_request(&self, memory: &Memory<P>, area_number: u8, number: u32) -> u64 {
        let mut freed = 0;
        let evicted = |folio: FrozenFolio<'_, P>| {
            freed = u64::from(folio.folio().pages());
            folio.free_into(&mut memory.free_batch());
        };
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.finish_one(memory, area_number, number, evicted) };
        freed
    }

    /// As [`SlotArea::finish_request`]. Passes the folio to `evicted` if it now belongs to the
    /// caller. The request ends after that, so a thread that waits for the writes finds the frames
    /// free.
    ///
    /// # Safety
    /// 1. As for [`SlotArea::finish_request`].
    unsafe fn finish_one<'m>(
        &self,
        memory: &'m Memory<P>,
        area_number: u8,
        number: u32,
        evicted: impl FnOnce(FrozenFolio<'m, P>),
    ) {
        let (group, number_there) = self.requests.group(number);
        if group.is_around(number_there) {
            // SAFETY: 1. the caller's obligation 1.
            unsafe { self.finish_early_read(memory, number) };
            return;
        }
        let number = number_there;
        let succeeded = group.result(number) == Some(true);
        let Some(folio) = memory.frames.folio_of(group.head(number)) else { return };
        let mut frozen = None;
        let first = group.first_slot(number);
        let slots = SlotRun { area: area_number, first, count: folio.pages() };
        // SAFETY: 1. the request belongs to this thread (obligation 1), and each branch releases
        // its reference.
        let lock = unsafe { lock_written(memory, folio, slots) };
        match (lock, memory.frames.folio(folio).swap_place()) {
            (None, _) => {
                if succeeded {
                    cpu::note_swapped_out(memory, folio.pages());
                }
                // SAFETY: 1. the reference is that of the request, which ends.
                unsafe { memory.frames.folio(folio).release() };
            }
            (Some(lock), Some(place)) if succeeded => {
                cpu::note_swapped_out(memory, folio.pages());
                let written = CachedFolio::new(memory, lock.locked(), place).sorted_pages();
                // SAFETY: 1. the reference is that of the request, from which the lock was taken
                // over.
                let leaving = unsafe { lock.with_reference() };
                frozen = CachedFolio::evict(memory, leaving, place, Some(&written));
            }
            (Some(lock), place) => {
                if let Some(place) = place {
                    CachedFolio::new(memory, lock.locked(), place).unlock_unwritten();
                }
                // SAFETY: 1. as above.
                drop(unsafe { lock.with_reference() });
            }
        }
        let pages = folio.pages();
        if let Some(frozen) = frozen {
            evicted(frozen);
        }
        // Release: the folio is unlocked, and it is freed if it was evicted.
        group.end_writing(pages);
        // Freed last, because once all requests of an area are free, no device may be using a folio
        // of the area.
        group.free(number);
    }

    /// Waits until the device of the stopped area is idle.
    pub(super) fn wait_until_idle(&self, memory: &Memory<P>) -> Result<(), Error> {
        wait_unless_killed(memory, &|| self.requests.is_idle())
    }

    /// Takes a request and waits for one if necessary. Requests in flight need no memory and no
    /// lock to complete.
    fn take_request(&self, memory: &Memory<P>) -> u32 {
        let mut taken = self.requests.take(cpu::own(memory));
        if taken.is_none() {
            wait_for_devices(memory, &mut || {
                taken = self.requests.take(cpu::own(memory));
                taken.is_some()
            });
        }
        taken.unwrap_or_default()
    }

    /// Frees a request that its reader has finished with.
    pub(super) fn free_request(&self, memory: &Memory<P>, number: u32) {
        let (group, number) = self.requests.group(number);
        group.free(number);
        memory.swap.note_completion(memory.platform());
    }
}

/// Waits until devices have no request without a waiting thread.
pub(super) fn wait_for_writes<P: Platform>(memory: &Memory<P>) -> Result<(), Error> {
    wait_unless_killed(memory, &|| memory.swap.pages_in_flight() == (0, 0))
}

fn wait_unless_killed<P: Platform>(
    memory: &Memory<P>,
    is_over: &dyn Fn() -> bool,
) -> Result<(), Error> {
    let mut result = Ok(());
    wait_for_devices(memory, &mut || {
        let over = is_over();
        result = if over { Ok(()) } else { interrupt::check(memory.platform()) };
        over || result.is_err()
    });
    result
}

/// Waits until a device completes a request, if a device is writing. Returns the number of freed
/// pages.
pub(crate) fn wait_for_a_write<P: Platform>(memory: &Memory<P>) -> u64 {
    let mut again = false;
    wait_for_devices(memory, &mut || {
        core::mem::replace(&mut again, true) || memory.swap.pages_under_writeback() == 0
    })
}

/// Waits until a request of the area is free. Called without locks.
pub(crate) fn wait_for_request<P: Platform>(memory: &Memory<P>, area: u8) {
    if let Some(area) = memory.swap.area(area) {
        wait_for_devices(memory, &mut || area.requests.has_free());
    }
}

/// Waits until `is_over` returns true; its result changes when a request completes. Finishes
/// completed requests during the wait, and returns the number of pages that this freed. The caller
/// holds no lock of a table or cluster, and is not in a read section. No device has a folio that
/// the caller has locked.
#[cold]
#[inline(never)]
pub(super) fn wait_for_devices<P: Platform>(
    memory: &Memory<P>,
    is_over: &mut dyn FnMut() -> bool,
) -> u64 {
    let mut freed = 0;
    memory.swap.completions.wait(memory.platform(), &mut || {
        freed += memory.finish_swap_writes();
        is_over()
    });
    freed
}

/// As [`lock_folio`], for a reference that a guard owns.
pub(crate) fn lock_kept<'k, P: Platform>(
    memory: &'k Memory<P>,
    kept: &'k FolioRef<'_, P>,
) -> FolioLock<'k, P> {
    // SAFETY: 1. the reference is that of the guard, which the lock borrows.
    unsafe { lock_folio(memory, **kept) }
}

/// Locks a folio to which the caller has a reference. Waits for the holder of the lock. If a device
/// is writing the folio, takes over the lock, provided that the device allows it ([`take_over`]).
/// The caller holds no lock of a table, and is not in a read section.
///
/// # Safety
/// 1. The caller keeps its reference until the lock is dropped.
pub(crate) unsafe fn lock_folio<P: Platform>(memory: &Memory<P>, folio: Folio) -> FolioLock<'_, P> {
    let handle = memory.frames.folio(folio);
    loop {
        // SAFETY: 1. the caller's obligation 1.
        if let Some(lock) = unsafe { handle.lock_unless_writeback() } {
            return lock;
        }
        // SAFETY: 1. the caller's obligation 1.
        if let Some(lock) = unsafe { take_over(memory, folio) } {
            return lock;
        }
        wait_for_devices(memory, &mut || !handle.is_under_writeback());
    }
}
