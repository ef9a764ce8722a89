//! Folios that are wanted again while a device writes them, where pages may change meanwhile
//! ([`SwapDevice::needs_stable_pages`](super::SwapDevice::needs_stable_pages)).
//!
//! The thread that wants the folio takes the lock over from the request. It finds the folio as
//! after a write that failed: in the cache, and its slots without content. The request keeps its
//! reference, so that the frames stay the folio's, and the slots, which are marked: nobody else
//! gets them, and nothing is written to them twice at once. The thread that finds the request done
//! lets both go.
//!
//! ```text
//! fault      cluster's lock: WRITEBACK goes, WRITING comes; map, settle, unlock
//! device     ............. still writes ...................... done
//! finisher                                                     cluster's lock: WRITING goes
//! ```
//!
//! The slots' marks, under the lock of their cluster, decide which thread has the folio. The
//! writeback bit does not: the folio may have gone out again, to other slots, when the first
//! request is done.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::cell::Cell;
use super::freed::FreedSlots;
use super::page_set::PageSet;
use super::slots::index;
use crate::Memory;
use crate::frame::swap_place::SwapPlace;
use crate::frame::{Folio, FolioLock};
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Takes a folio back that a device writes. The caller has a reference. `None` if the device
    /// needs stable pages, reads the folio, or is done with it.
    #[cold]
    pub(super) fn take_back(&self, folio: Folio) -> Option<FolioLock<'_, P>> {
        let (lock, place) = self.while_areas_stay(|| self.take_lock_over(folio))?;
        self.settle_slots(folio, place, &PageSet::EMPTY);
        Some(lock)
    }

    /// The lock of the folio is the caller's, and its slots are marked, in one step.
    fn take_lock_over(&self, folio: Folio) -> Option<(FolioLock<'_, P>, SwapPlace)> {
        let place = self.frames.swap_place(folio)?;
        if !self.area(place.area)?.lets_pages_change() {
            return None;
        }
        let (cluster, cells, _) = self.cells(Self::slots_of(folio, place))?;
        let _state = cluster.state.lock();
        let load = |cell: &AtomicU64| Cell(cell.load(Relaxed));
        // Not one that is read around another, whose slot has the content.
        let is_written = |(page, cell): (u32, &AtomicU64)| {
            load(cell).frame() == Some(folio.head.plus(page))
                && load(cell).has(Cell::BUSY)
                && !load(cell).has(Cell::STORED)
        };
        if !(0..).zip(cells).all(is_written) {
            return None;
        }
        let lock = self.frames.lock_of_request(&self.platform, folio)?;
        for cell in cells {
            cell.store(load(cell).0 & !Cell::CONTENT | Cell::WRITING, Relaxed);
        }
        Some((lock, place))
    }

    /// A device is done with the folio that it has written to these slots. Returns the lock, unless
    /// the folio was taken back: then the slots are let go.
    pub(super) fn lock_written(&self, folio: Folio, slots: SlotRun) -> Option<FolioLock<'_, P>> {
        let lock = || self.frames.lock_of_request(&self.platform, folio);
        let (Some(area), Some((cluster, cells, values))) =
            (self.area(slots.area), self.cells(slots))
        else {
            return lock();
        };
        if !area.lets_pages_change() {
            return lock();
        }
        let mut state = cluster.state.lock();
        let load = |cell: &AtomicU64| Cell(cell.load(Relaxed));
        if !cells.iter().any(|cell| load(cell).has(Cell::WRITING)) {
            return lock();
        }
        let mut freed = FreedSlots::new(area, cluster);
        for (at, (cell, value)) in (index(slots.first)..).zip(cells.iter().zip(values)) {
            let now = Cell(load(cell).0 & !Cell::WRITING);
            if !now.is_let_go() {
                cell.store(now.0, Relaxed);
                continue;
            }
            cell.store(Cell::FREE.0, Relaxed);
            // Its last entry went while the device was writing.
            self.empty_slot(now, value);
            freed.add(&mut state, at);
        }
        freed.give_back(&mut state);
        drop(state);
        freed.relist(slots.first);
        None
    }
}
