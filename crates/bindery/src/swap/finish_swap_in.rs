//! Frees slots: of a folio that was swapped in whole for the only entries that refer to its slots,
//! and one by one.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::freed::{FreedCell, FreedSlots};
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::slots::index;
use crate::Memory;
use crate::folio::{FolioLocked, SwapPlace};
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Like [`Memory::unlock_claimed`], for a folio whose pages have each lost an entry. The slots
    /// are busy.
    pub(crate) fn finish_swap_in(&self, folio: FolioLocked<'_>, place: SwapPlace) {
        if !self.free_all_slots(folio, place) {
            let mut all = PageSet::EMPTY;
            all.add(0, folio.pages());
            self.unlock_claimed(folio, place, &all);
        }
    }

    /// Removes the folio from the cache and frees its slots, if only one entry referred to each of
    /// them and is removed. Returns whether that was so; otherwise nothing has changed.
    fn free_all_slots(&self, folio: FolioLocked<'_>, place: SwapPlace) -> bool {
        let run = SlotRun { area: place.area, first: place.first, count: folio.pages() };
        let (Some(area), Some((cluster, cells, values))) = (self.area(run.area), self.cells(run))
        else {
            return false;
        };
        let mut state = cluster.state.lock();
        let is_last = |cell: &AtomicU64| {
            let cell = SlotState(cell.load(Relaxed));
            cell.entries() == 1 && cell.has(SlotState::CACHED | SlotState::BUSY)
        };
        if !cells.iter().all(is_last) {
            return false;
        }
        for (page, (cell, value)) in (0..).zip(cells.iter().zip(values)) {
            let now = SlotState(cell.load(Relaxed));
            let last = FreedCell::end_work(&state, folio, (page, cell), now);
            self.forget_content(last, value);
        }
        let mut freed = FreedSlots::new(area, cluster);
        (freed.first, freed.count) = (index(run.first), run.count);
        freed.give_back(&mut state);
        self.frames.folio(*folio).set_cached_pages(place, 0);
        drop(state);
        freed.relist(run.first);
        // No other copy of the content is left.
        self.frames.folio(*folio).mark_dirty();
        self.frames.folio(*folio).release();
        true
    }

    /// Ends the use of a freed cell's slot: the store frees its content, and its page leaves the
    /// cache, and with the last page the folio.
    #[inline(never)]
    pub(super) fn empty_slot(&self, freed: FreedCell<'_>, value: &AtomicU64) {
        let cell = freed.was();
        self.forget_content(freed, value);
        let Some(folio) = cell.frame().and_then(|frame| self.frames.folio_of(frame)) else {
            return;
        };
        let Some(place) = self.frames.folio(folio).swap_place() else { return };
        self.frames.folio(folio).set_cached_pages(place, place.cached - 1);
        // No other copy of the content is left.
        self.frames.folio(folio).mark_dirty();
        if place.cached == 1 {
            self.frames.folio(folio).release();
        }
    }
}
