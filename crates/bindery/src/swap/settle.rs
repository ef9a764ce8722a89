//! Slots that are free: of a folio that came in whole, for the only entries that name its slots, and
//! one by one.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::cell::Cell;
use super::freed::FreedSlots;
use super::page_set::PageSet;
use super::slots::index;
use crate::Memory;
use crate::frame::Folio;
use crate::frame::swap_place::SwapPlace;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// As [`Memory::settle_slots`], where each page of the folio has lost an entry. The slots are
    /// busy.
    pub(crate) fn settle_all_slots(&self, folio: Folio, place: SwapPlace) {
        if !self.free_all_slots(folio, place) {
            let mut all = PageSet::EMPTY;
            all.add(0, folio.pages());
            self.settle_slots(folio, place, &all);
        }
    }

    /// The folio leaves the cache, and its slots are free, if each is named by one entry, which is
    /// gone. Says whether that was so; else nothing has changed.
    fn free_all_slots(&self, folio: Folio, place: SwapPlace) -> bool {
        let run = SlotRun { area: place.area, first: place.first, count: folio.pages() };
        let (Some(area), Some((cluster, cells, values))) = (self.area(run.area), self.cells(run))
        else {
            return false;
        };
        let mut state = cluster.state.lock();
        let is_last = |cell: &AtomicU64| {
            let cell = Cell(cell.load(Relaxed));
            cell.entries() == 1 && cell.has(Cell::CACHED | Cell::BUSY)
        };
        if !cells.iter().all(is_last) {
            return false;
        }
        for (cell, value) in cells.iter().zip(values) {
            self.forget_content(Cell(cell.load(Relaxed)), value);
            cell.store(Cell::FREE.0, Relaxed);
        }
        let mut freed = FreedSlots::new(area, cluster);
        (freed.first, freed.count) = (index(run.first), run.count);
        freed.give_back(&mut state);
        self.frames.set_cached_pages(folio, place, 0);
        drop(state);
        freed.relist(run.first);
        // Its content is nowhere else now.
        self.frames.mark_dirty(folio);
        self.frames.release(&self.platform, folio);
        true
    }

    /// The slot is free: the store forgets it, and its page leaves the cache, with the last one the
    /// folio. The cluster's lock is held.
    #[inline(never)]
    pub(super) fn empty_slot(&self, cell: Cell, value: &AtomicU64) {
        self.forget_content(cell, value);
        let Some(folio) = cell.frame().and_then(|frame| self.frames.folio_of(frame)) else {
            return;
        };
        let Some(place) = self.frames.swap_place(folio) else { return };
        self.frames.set_cached_pages(folio, place, place.cached - 1);
        // Its content is nowhere else now.
        self.frames.mark_dirty(folio);
        if place.cached == 1 {
            self.frames.release(&self.platform, folio);
        }
    }
}
