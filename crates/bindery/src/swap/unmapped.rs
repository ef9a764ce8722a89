//! Folios of the swap cache that lose their last mapping, or whose only mapping is swapped out,
//! while other entries refer to their slots: swap has their content, so they need no memory.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::slots::{Stored, make_busy};
use crate::Memory;
use crate::folio::{Folio, FolioLocked, Freed, LockedFolio, SwapPlace};
use crate::frame::FreeBatch;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Handles a folio whose mappings were dropped with this result. The caller may have table
    /// locks.
    #[inline]
    pub(crate) fn after_unmapping(&self, batch: &mut FreeBatch<'_, P>, folio: Folio, freed: Freed) {
        if freed == Freed::Unmapped {
            self.evict_unmapped(batch, folio);
        }
    }

    /// Frees the folio if only the swap cache has it, and all content is in swap. A folio that
    /// another thread has locked or referenced is left to that thread or to reclaim.
    #[cold]
    #[inline(never)]
    fn evict_unmapped(&self, batch: &mut FreeBatch<'_, P>, folio: Folio) {
        if !self.frames.folio(folio).is_swap_cached() {
            return;
        }
        // The caller has no reference any more: the frame may have another owner by now.
        let Some(held) = self.frames.try_hold(folio.head) else { return };
        let Some(lock) = self.frames.folio(*held).try_lock() else { return };
        let folio = *held;
        // Mapped only under the lock.
        if self.frames.folio(folio).mappings() > 0 {
            return;
        }
        let Some(place) = self.frames.folio(folio).swap_place() else { return };
        if self.prepare_dropping(lock.locked(), place)
            && self.write_out_locked(LockedFolio::new(lock, held), Stored::Yes)
        {
            self.frames.folio(folio).free_frozen_into(batch);
        }
    }

    /// Like [`Memory::prepare_out`], for an unmapped folio, if swap has the content of all pages
    /// that are still in the cache: the others are not needed. Returns whether that is so.
    pub(super) fn prepare_dropping(&self, folio: FolioLocked<'_>, place: SwapPlace) -> bool {
        let Some((cluster, cells, _)) = self.cells(Self::slots_of(*folio, place)) else {
            return false;
        };
        let _state = cluster.state.lock();
        let load = |cell: &AtomicU64| SlotState(cell.load(Relaxed));
        let is_ours =
            |(page, cell): &(u32, &AtomicU64)| load(cell).frame() == Some(folio.head.plus(*page));
        let ours = || (0..).zip(cells).filter(is_ours).map(|(_, cell)| cell);
        let is_stored = |cell: &AtomicU64| {
            load(cell).0 & SlotState::CONTENT != 0 && !load(cell).has(SlotState::WRITING)
        };
        let stored = self.frames.folio(*folio).is_swap_cached() && ours().all(is_stored);
        if stored {
            make_busy(ours());
        }
        stored
    }

    /// Lets a folio be swapped out again to the slots that it has: makes them busy, and adds a
    /// reference of an entry to those of `named` pages from page `first` on. `None`, with nothing
    /// changed, if it has no slots, if the area is stopped, or if a slot's count is at its maximum.
    /// The caller has the locks of the tables that get the entries.
    pub(crate) fn send_out_again(
        &self,
        folio: FolioLocked<'_>,
        first: u32,
        named: u32,
    ) -> Option<SlotRun> {
        let place = self.frames.folio(*folio).swap_place()?;
        let stored = self.prepare_out(folio, place)?;
        let slots = Self::slots_of(*folio, place);
        let run = SlotRun { first: slots.first + u64::from(first), count: named, ..slots };
        if self.may_write_out(stored, place) && self.dup_slots(run).is_ok() {
            return Some(slots);
        }
        self.unlock_claimed(folio, place, &PageSet::EMPTY);
        None
    }

    /// Removes a partly cached folio from the cache: some of its slots have no references any more,
    /// so it cannot be swapped out to them. Other entries find the content in swap. Returns whether
    /// it did; it does not if the content of a page is missing there. The caller has a reference or
    /// mapping that keeps the folio.
    pub(crate) fn leave_cache(&self, folio: FolioLocked<'_>) -> bool {
        let Some(place) = self.frames.folio(*folio).swap_place() else { return false };
        if place.cached == folio.pages() || !self.prepare_dropping(folio, place) {
            return false;
        }
        self.frames.folio(*folio).mark_dirty();
        self.give_up(folio, place);
        true
    }

    /// Whether a folio with busy slots may be written out: the store would refuse again if it has
    /// refused since the last free.
    pub(crate) fn may_write_out(&self, stored: Stored, place: SwapPlace) -> bool {
        stored == Stored::Yes || self.takes_content(place.area)
    }

    /// Whether the content of a folio is in swap; its slots, which are busy, begin there.
    pub(crate) fn stored_at(&self, slots: SlotRun) -> Stored {
        let cell = self.slot_state(slots.area, slots.first);
        let stored = cell.is_some_and(|cell| cell.0 & SlotState::CONTENT != 0);
        if stored { Stored::Yes } else { Stored::No }
    }
}
