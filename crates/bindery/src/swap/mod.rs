//! Swap: slots for anonymous pages that are not in memory, and the swap cache.
//!
//! | file | contents |
//! |---|---|
//! | `area` | [`SlotArea`]: clusters and their lists |
//! | `owned` | the allocation of slots, and the clusters that CPUs own |
//! | `discard` | discards of free slots on devices |
//! | `cluster`, `bitmap` | 512 slots, their lock, and the bitmap of taken ones |
//! | `cpu` | the clusters that a CPU owns, and its counts |
//! | `cluster_lists` | the lists of an area's clusters |
//! | `slot_state` | references to a slot, and the location of its content |
//! | `slots`, `freed` | slots taken, referred to and released: by runs, under one lock |
//! | `cached_folio`, `finish_swap_in` | [`CachedFolio`]: a folio at its slots |
//! | `content`, `filled_pages`, `page_set` | writing and reading |
//! | `device_read` | reads that a thread waits for after it has released its locks |
//! | `device`, `requests` | [`SwapDevice`], and its requests |
//! | `take_over` | folios that are wanted again while a device writes them |
//! | `unmapped` | folios that leave the cache with their last mapping |
//! | `unwritten` | unmapped folios of the cache that were not written out yet |
//! | `writeback` | folios written out, at once or when a device is done |
//! | `read_around` | the pages to read around a wanted one |
//! | `early_read`, `polled` | reads without a waiting thread; waits that are polled |
//! | `streak` | faults on one page after another |
//! | `passing` | faults that pass through memory in order, and the pages behind them |
//! | `clock` | the hand of reclaim, and how long pages were evicted |
//! | `exhausted` | the record that nothing is left to reclaim |
//! | `same_filled` | pages that need no store |
//! | `usage` | counts for listings |
//! | `face` | the calls of embedders |
//! | `compressed`, `no_compression` | the store of compressed pages, and its form in a build without it |
//!
//! # The protocol
//! A page of a folio is in memory, in swap, or in the *swap cache*, which means in both, or in
//! transit between them. The cache is not a separate structure: the slot's state refers to the
//! page's frame, and the folio's metadata refers to the slot. The cache has one reference to the
//! folio.
//!
//! ```text
//! mapped  --send_out-->  cached, busy  --write_out, evict-->  only in swap
//!    ^                    |         ^                             |
//!    |<---map, unlock-----'         '------claim, load------------'
//! ```
//!
//! 1. *The folio's lock* is held from `send_out` or `claim_slots` until the slots are unlocked or
//!    the folio is evicted. A fault that finds the page through its slot waits for the lock.
//! 2. *A busy slot* is released by the holder of the folio's lock, as the last step. Entries
//!    removed before that only lower the count. So neither the slot nor its content is reused while
//!    I/O is in flight.
//! 3. *A folio is never written to while a slot holds its content.* An entry allows writes only if
//!    it is exclusive. In that case nothing else refers to its slot, and the page leaves the cache
//!    before the folio's lock is released. So the content of a slot is never stale, and a clean
//!    folio may be evicted.
//! 4. *A slot is reused* once the entries, the cache and I/O have all released it ([`slot_state`]).
//! 5. *A page in the cache that cannot be stored stays there*: entries refer to its slot, and
//!    faults find it.
//! 6. *A folio that a device writes* is locked, with the writeback bit, until its request is done.
//!    A thread that needs the page waits for the device ([`writeback`]), unless the device allows
//!    pages to change during a write. In that case, the thread takes over the lock ([`take_over`]).
//!
//! # Locks
//! The lock of a cluster is a spin lock that ranks after those of tables and folios, and before
//! those of the store and the frame allocator. The lock of an area's lists ranks before those of
//! the area's clusters.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

pub(crate) mod area;
mod bitmap;
pub(crate) mod cached_folio;
mod clock;
mod cluster;
mod cluster_lists;
#[cfg(feature = "compression")]
mod compressed;
pub(crate) mod content;
pub(crate) mod cpu;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod damage;
mod device;
pub(crate) mod device_read;
pub(crate) mod early_read;
pub(crate) mod exhausted;
mod face;
mod filled_pages;
mod finish_swap_in;
mod freed;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model_of_faults;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model_of_slots;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model_of_take_over;
#[cfg(not(feature = "compression"))]
mod no_compression;
pub(crate) mod page_set;
mod passing;
pub(crate) mod polled;
mod read_around;
mod requests;
mod same_filled;
pub(crate) mod slot_state;
pub(crate) mod slots;
pub(crate) mod streak;
mod take_over;
mod unmapped;
pub(crate) mod unwritten;
mod usage;
mod writeback;

use core::fmt;

use crate::Memory;
use crate::addr::Frame;
use crate::error::{CallError, Failure};
use crate::frame::Frames;
use crate::platform::Platform;
use crate::sync::Mutex;
use crate::sync::completions::Completions;

use area::SlotArea;
#[cfg(feature = "compression")]
pub(crate) use compressed::StorePart;
#[cfg(feature = "compression")]
use compressed::{CompressedStore, Handle};
pub use device::{SwapDevice, SwapDeviceError, SwapOperation, SwapRequest};
#[cfg(not(feature = "compression"))]
pub(crate) use no_compression::StorePart;
#[cfg(not(feature = "compression"))]
use no_compression::{CompressedStore, Handle};
use read_around::{ContentPlace, ReadAround};
pub use usage::{CompressedUsage, SwapUsage};

pub(crate) use area::SlotRun;
pub(crate) use cached_folio::CachedFolio;
pub(crate) use clock::Clock;
use cpu::SwapFaults;
pub(crate) use cpu::{
    SwapPart, adopt, frequent_events, hand_over, note_evicted, note_return, shadow,
};
pub(crate) use early_read::source_of_slot;
pub(crate) use read_around::{begin_read_around, note_hit_of_read_around, window_around};
pub(crate) use slots::{allocate_slots, find_cached, is_slot_full, is_slot_resident, state_of};
pub(crate) use unmapped::{after_unmapping, leave_cache, send_out_again};
pub(crate) use writeback::{
    AllInUse, TakeRequest, finish_own_writes, lock_folio, lock_kept, try_write_out,
    wait_for_a_write, wait_for_request, write_out,
};

/// The maximum number of swap areas at a time. 0 in a build without the feature `swap`, so that the
/// compiler drops the code that would use an area.
pub const MAX_SWAP_AREAS: usize = if cfg!(feature = "swap") { 8 } else { 0 };

/// Bounds for the number of frames reserved for reclaim while a swap area is on.
const LEAST_RESERVE: u64 = 32;
const MOST_RESERVE: u64 = 1024;

/// The areas that are on, as one bit each.
struct AreasOn(u8);

impl AreasOn {
    const MOST: () = assert!(MAX_SWAP_AREAS <= u8::BITS as usize);

    fn has(&self, number: usize) -> bool {
        self.0 >> number & 1 != 0
    }

    /// The number of an area that is off.
    fn first_off(&self) -> Option<usize> {
        let () = Self::MOST;
        (0..MAX_SWAP_AREAS).find(|number| !self.has(*number))
    }

    fn insert(&mut self, number: usize) {
        self.0 |= 1 << number;
    }

    fn remove(&mut self, number: usize) {
        self.0 &= !(1 << number);
    }
}

/// All swap areas, and the store that they share.
pub(crate) struct Swap<P: Platform> {
    areas: [SlotArea<P>; MAX_SWAP_AREAS],
    /// The set of areas that are on. Locked while an area is turned on or off.
    on: Mutex<P::Mutex, AreasOn>,
    pub(crate) store: CompressedStore<P>,
    around: ReadAround,
    faults: SwapFaults,
    /// Threads that wait for a device park here.
    completions: Completions,
}

impl<P: Platform> Swap<P> {
    /// Swap without areas, and with a store limited to `limit` frames.
    pub(crate) const fn new(limit: u64) -> Self {
        let areas = [const { SlotArea::new() }; MAX_SWAP_AREAS];
        Self {
            areas,
            on: Mutex::new(AreasOn(0)),
            store: CompressedStore::new(limit),
            around: ReadAround::new(),
            faults: SwapFaults::new(),
            completions: Completions::new(),
        }
    }

    /// Stores the content of a page of a locked folio that no entry maps. `None` if the store has
    /// no room. May sleep.
    ///
    /// # Safety
    /// 1. The caller has the folio's lock and a reference.
    /// 2. No entry maps the folio, and it has no pins.
    // Out of line, so that a page filled with one word does not pay for the registers that this
    // function saves.
    #[inline(never)]
    unsafe fn store(&self, frames: &Frames<P>, page: Frame) -> Option<u64> {
        // SAFETY: 1. the caller's obligation 1. 2. The caller's obligation 2, and the core reads
        // the page by atomics.
        let stored = unsafe { self.store.store(frames, page) };
        stored.ok().map(|handle| handle.to_raw())
    }

    /// Reads the content that [`Swap::store`] has stored. Returns whether the read succeeded. May
    /// sleep.
    ///
    /// # Safety
    /// 1. `handle` is the value of a busy slot with stored content.
    /// 2. The page belongs to a fresh, locked folio, which no entry maps.
    unsafe fn load(&self, frames: &Frames<P>, handle: u64, page: Frame) -> bool {
        let Some(handle) = Handle::from_raw(handle) else { return false };
        // SAFETY: 1. the slot's value is the handle that `store` returned, and the slot is busy, so
        // no thread frees its content during the load. 2. The caller's obligation 2.
        unsafe { self.store.load(frames, &handle, page) }.is_ok()
    }

    /// Frees the content that [`Swap::store`] has stored. Does not sleep.
    ///
    /// # Safety
    /// 1. The caller has removed the handle from the slot's value under the cluster's lock, or has
    ///    never stored it there.
    /// 2. The slot is not busy for a thread that is loading it.
    #[inline(never)]
    unsafe fn forget(&self, frames: &Frames<P>, handle: u64) {
        if let Some(handle) = Handle::from_raw(handle) {
            // SAFETY: 1. and 2. the caller's obligations 1 and 2.
            unsafe { self.store.free(frames, handle) };
        }
    }
}

/// The reason why an area was not added or removed.
///
/// ```
/// use bindery::{Memory, Platform, SwapArea, SwapError};
///
/// /// 1 GiB of compressed memory, or less if there is no room for its account.
/// fn add<P: Platform>(memory: &Memory<P>) -> Result<SwapArea, SwapError> {
///     match memory.swap_on(262_144, 0) {
///         Err(SwapError::OutOfMemory) => memory.swap_on(16_384, 0),
///         other => other,
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SwapError {
    /// [`MAX_SWAP_AREAS`] are already in use.
    TooMany,
    /// The area has no slots, or too many to account for.
    Size,
    /// No memory is free for the area's metadata: 8 KiB for each 2 MiB.
    OutOfMemory,
    /// The area does not exist.
    NotThere,
    /// Slots of the area are taken.
    InUse,
    /// A fatal signal arrived while a device was writing; the area stays, stopped.
    Interrupted,
    /// The build does not support such areas: all areas need the feature `swap`, and those in
    /// compressed memory also need the feature `compression`.
    NotBuilt,
}

impl fmt::Display for SwapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooMany => "the maximum number of swap areas is in use",
            Self::Size => "the swap area has no slots, or more than can be accounted for",
            Self::OutOfMemory => "out of memory for the slots of the swap area",
            Self::NotThere => "no such swap area exists",
            Self::InUse => "slots of the swap area are in use",
            Self::Interrupted => "a fatal signal ended the wait for a swap device",
            Self::NotBuilt => "the build has no swap areas of this kind",
        })
    }
}

impl core::error::Error for SwapError {}

impl CallError for SwapError {
    const OUT_OF_MEMORY: Self = Self::OutOfMemory;
}

/// A swap area, for listings (`/proc/swaps`).
///
/// ```
/// use bindery::{Memory, Platform};
///
/// /// The size column of `/proc/swaps`, in KiB.
/// fn sizes<P: Platform>(memory: &Memory<P>) -> Vec<u64> {
///     memory.swap_areas().map(|area| area.slots * 4).collect()
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwapArea {
    /// The area's number, from 0: the device in swap entries.
    pub number: u8,
    /// Areas of higher priority are used first.
    pub priority: i16,
    /// The number of slots, of one page each.
    pub slots: u64,
    /// The number of taken slots.
    pub taken: u64,
}

impl<P: Platform> Swap<P> {
    /// The areas that are on.
    pub(crate) fn areas(&self) -> impl Iterator<Item = SwapArea> + '_ {
        let areas = self.areas.iter().enumerate().filter(|(_, area)| area.slots() > 0);
        areas.map(|(number, area)| {
            let slots = area.slots();
            // Another area, with more slots, may be turned on under this number.
            let taken = area.taken().min(slots);
            SwapArea { number: number as u8, priority: area.priority(), slots, taken }
        })
    }

    /// Resumes the allocation of slots in the area. Returns whether the area exists.
    fn resume(&self, area: &SwapArea) -> bool {
        self.area(area.number).inspect(|area| area.resume()).is_some()
    }

    /// Releases the store's memory if no area is on.
    fn release_unused_store(&self, frames: &Frames<P>, on: &AreasOn) {
        if on.0 == 0 {
            frames.set_reserve(0);
            self.store.release(frames);
        }
    }

    /// Turns on an area of `slots` slots that does not allocate any.
    #[cfg(any(test, feature = "testing"))]
    fn plant_area(&self, frames: &Frames<P>, number: u8, slots: u64) {
        let mut on = self.on.lock();
        let area = &self.areas[usize::from(number)];
        area.turn_on(frames, slots, 0, None).expect("memory for the account");
        area.stop();
        on.insert(usize::from(number));
    }

    /// The number of frames that account for all slots of all areas.
    pub(crate) fn account(&self, frames: &Frames<P>) -> u64 {
        self.areas.iter().map(|area| area.account(frames)).sum()
    }

    /// Whether a swap area is on.
    pub(crate) fn is_on(&self) -> bool {
        self.areas.iter().any(SlotArea::may_allocate)
    }

    /// Whether a page without a slot may find a free slot and room for its content. Spins.
    pub(crate) fn has_room(&self, frames: &Frames<P>) -> bool {
        let mut with_slots = self.areas.iter().filter(|area| area.has_free_slot());
        with_slots.any(|area| self.has_room_for_content(frames, area))
    }

    /// Whether the content of a page that already has a slot of the area may find room. Spins.
    fn takes_content(&self, frames: &Frames<P>, area: u8) -> bool {
        self.area(area).is_some_and(|area| self.has_room_for_content(frames, area))
    }

    fn has_room_for_content(&self, frames: &Frames<P>, area: &SlotArea<P>) -> bool {
        area.has_device() || self.store.may_take(frames)
    }
}

/// One attempt to add an area.
pub(crate) fn turn_on_once<P: Platform>(
    memory: &Memory<P>,
    slots: u64,
    priority: i16,
    device: Option<&'static dyn SwapDevice<P>>,
) -> Result<SwapArea, Failure<SwapError>> {
    let Memory { swap, frames, .. } = memory;
    if area::account_of::<P>(slots).is_none() {
        // More memory would not help.
        return Err(SwapError::Size.into());
    }
    let mut turned_on = swap.on.lock();
    let number = turned_on.first_off().ok_or(SwapError::TooMany)?;
    let area = &swap.areas[number];
    let prepared = match device {
        Some(_) => Ok(()),
        None => swap.store.prepare(frames),
    };
    let kind = match device {
        None => ContentPlace::Memory,
        Some(device) if device.is_synchronous() => ContentPlace::SynchronousDevice,
        Some(_) => ContentPlace::Device,
    };
    // Set before a slot of the area is allocated, so that a thread that reads a slot finds the
    // kind.
    swap.around.set_area(number, kind);
    let on = prepared.ok().and_then(|()| area.turn_on(frames, slots, priority, device));
    if on.is_none() {
        swap.around.set_area(number, ContentPlace::Memory);
        swap.release_unused_store(frames, &turned_on);
        return Err(Failure::NoMemory);
    }
    turned_on.insert(number);
    // The store needs frames in order to free frames.
    frames.set_reserve((frames.total_frames() / 64).clamp(LEAST_RESERVE, MOST_RESERVE));
    memory.commitment().swap_changed(slots as i64);
    Ok(SwapArea { number: number as u8, priority, slots, taken: 0 })
}

/// Waits for the device and removes an area without taken slots.
fn turn_off<P: Platform>(memory: &Memory<P>, number: u8) -> Result<(), SwapError> {
    let Memory { swap, frames, .. } = memory;
    let area = swap.area(number).ok_or(SwapError::NotThere)?;
    let number = usize::from(number);
    let mut turned_on = swap.on.lock();
    if !turned_on.has(number) {
        return Err(SwapError::NotThere);
    }
    area.stop();
    area.wait_until_idle(memory).map_err(|_| SwapError::Interrupted)?;
    let slots = area.slots();
    if !area.turn_off(frames) {
        return Err(SwapError::InUse);
    }
    turned_on.remove(number);
    swap.around.set_area(number, ContentPlace::Memory);
    memory.commitment().swap_changed(-(slots as i64));
    swap.release_unused_store(frames, &turned_on);
    Ok(())
}
