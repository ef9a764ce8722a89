//! Frees the slots of a folio that was swapped in as a whole for the only entries that refer to
//! them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::cached_folio::CachedFolio;
use super::freed::{FreedCell, FreedSlots};
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::slots::{AreasStay, index, while_areas_stay};
use crate::platform::Platform;

impl<P: Platform> CachedFolio<'_, P> {
    /// Like [`CachedFolio::unlock`], for a folio whose pages have each lost an entry. The slots are
    /// busy.
    pub(crate) fn finish_swap_in(&self) {
        let memory = self.memory;
        if !while_areas_stay(memory.platform(), |stay| self.free_all_slots(stay)) {
            let mut all = PageSet::EMPTY;
            all.add(0, self.folio.pages());
            self.unlock(&all);
        }
    }

    /// Removes the folio from the cache and frees its slots, if only one entry, which is being
    /// removed, referred to each slot. Returns whether the slots were freed; otherwise nothing has
    /// changed.
    fn free_all_slots(&self, stay: &AreasStay) -> bool {
        let (memory, run) = (self.memory, self.slots());
        let (Some(area), Some((cluster, cells, values))) =
            (memory.swap.area(run.area), run.cells(stay, memory))
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
            let last = FreedCell::end_work(&state, self.folio, (page, cell), now);
            last.forget_content(memory, value);
        }
        let mut freed = FreedSlots::new(area, cluster);
        (freed.first, freed.count) = (index(run.first), run.count);
        freed.free_run(&mut state);
        self.handle().set_cached_pages(self.place, 0);
        drop(state);
        freed.relist(run.first);
        // No other copy of the content exists.
        self.handle().mark_dirty();
        // SAFETY: 1. the reference is the cache's, and all pages have left the cache.
        unsafe { self.handle().release() };
        true
    }
}
