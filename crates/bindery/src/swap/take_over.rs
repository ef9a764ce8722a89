//! Takeover of folios that are needed again while a device writes them, if the device allows pages
//! to change ([`SwapDevice::needs_stable_pages`](super::SwapDevice::needs_stable_pages)).
//!
//! The thread that needs the folio takes over the lock from the request. It finds the folio in the
//! same state as after a failed write: in the cache, with slots that have no content. The request
//! keeps its reference, so that the frames still belong to the folio. It also keeps the slots,
//! which are marked: they cannot be reallocated, so no two writes to them overlap. The thread that
//! finds the request complete releases both.
//!
//! ```text
//! fault      cluster's lock: WRITEBACK goes, WRITING comes; map, unlock the slots, unlock
//! device     ............. still writes ...................... done
//! finisher                                                     cluster's lock: WRITING goes
//! ```
//!
//! The slots' marks, under the lock of their cluster, decide which thread owns the folio. The
//! writeback bit does not decide, because the folio may have been swapped out again, to other
//! slots, before the first request is complete.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::cached_folio::CachedFolio;
use super::freed::{FreedCell, FreedSlots};
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::slots::{AreasStay, index, while_areas_stay};
use crate::Memory;
use crate::folio::{Folio, FolioLock, SwapPlace};
use crate::platform::Platform;

/// Takes over a folio from a device that is writing it. `None` if the device needs stable pages, is
/// reading the folio, or has finished with it.
///
/// # Safety
/// 1. The caller has a reference, and keeps it until the lock is dropped.
#[cold]
pub(super) unsafe fn take_over<P: Platform>(
    memory: &Memory<P>,
    folio: Folio,
) -> Option<FolioLock<'_, P>> {
    let (lock, place) = while_areas_stay(memory.platform(), |stay| {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { take_lock_over(stay, memory, folio) }
    })?;
    CachedFolio::new(memory, lock.locked(), place).unlock(&PageSet::EMPTY);
    Some(lock)
}

/// Takes over the folio's lock and marks its slots, in one step.
///
/// # Safety
/// 1. As for [`take_over`].
unsafe fn take_lock_over<'m, P: Platform>(
    stay: &AreasStay,
    memory: &'m Memory<P>,
    folio: Folio,
) -> Option<(FolioLock<'m, P>, SwapPlace)> {
    let place = memory.frames.folio(folio).swap_place()?;
    if !memory.swap.area(place.area)?.lets_pages_change() {
        return None;
    }
    let (cluster, cells, _) = SlotRun::of_folio(folio, place).cells(stay, memory)?;
    let _state = cluster.state.lock();
    let load = |cell: &AtomicU64| SlotState(cell.load(Relaxed));
    // Excludes a read by read-around, whose slot has the content.
    let is_written = |(page, cell): (u32, &AtomicU64)| {
        load(cell).frame() == Some(folio.head.plus(page))
            && load(cell).has(SlotState::BUSY)
            && !load(cell).has(SlotState::STORED)
    };
    if !(0..).zip(cells).all(is_written) {
        return None;
    }
    // SAFETY: 1. the caller's reference (obligation 1).
    let lock = unsafe { memory.frames.folio(folio).lock_of_request() }?;
    for cell in cells {
        cell.store(load(cell).0 & !SlotState::CONTENT | SlotState::WRITING, Relaxed);
    }
    Some((lock, place))
}

/// Ends a device's write of the folio to these slots. Returns the folio's lock. If another thread
/// has taken over the lock ([`take_over`]), releases the slots and returns `None`.
///
/// # Safety
/// 1. The caller ends the request, and releases the request's reference after the lock.
pub(super) unsafe fn lock_written<P: Platform>(
    memory: &Memory<P>,
    folio: Folio,
    slots: SlotRun,
) -> Option<FolioLock<'_, P>> {
    // SAFETY: 1. the caller's obligation 1.
    while_areas_stay(memory.platform(), |stay| unsafe {
        lock_written_in(stay, memory, folio, slots)
    })
}

/// # Safety
/// 1. As for [`lock_written`].
unsafe fn lock_written_in<'m, P: Platform>(
    stay: &AreasStay,
    memory: &'m Memory<P>,
    folio: Folio,
    slots: SlotRun,
) -> Option<FolioLock<'m, P>> {
    // SAFETY: 1. the reference belongs to the request, which the caller ends (obligation 1).
    let lock = || unsafe { memory.frames.folio(folio).lock_of_request() };
    let (Some(area), Some((cluster, cells, values))) =
        (memory.swap.area(slots.area), slots.cells(stay, memory))
    else {
        return lock();
    };
    if !area.lets_pages_change() {
        return lock();
    }
    let mut state = cluster.state.lock();
    let load = |cell: &AtomicU64| SlotState(cell.load(Relaxed));
    if !cells.iter().any(|cell| load(cell).has(SlotState::WRITING)) {
        return lock();
    }
    let mut freed = FreedSlots::new(area, cluster);
    for (at, (cell, value)) in (index(slots.first)..).zip(cells.iter().zip(values)) {
        let Some(last) = FreedCell::end_writing(&state, cell) else { continue };
        // The slot's last entry was removed during the write.
        last.empty_slot(memory, value);
        freed.add(&mut state, at);
    }
    freed.free_run(&mut state);
    drop(state);
    freed.relist(slots.first);
    None
}
