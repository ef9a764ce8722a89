//! Folios of the swap cache that lose their last mapping, or whose only mapping is swapped out,
//! while other entries refer to their slots. Swap holds their content, so their memory can be
//! freed.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::cached_folio::{CachedFolio, make_busy};
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::slots::{AreasStay, Stored, while_areas_stay};
use super::writeback::write_out;
use crate::Memory;
use crate::folio::{Folio, FolioLocked, Freed};
use crate::frame::FreeBatch;
use crate::platform::Platform;

/// Handles a folio whose mappings were dropped with this result. The caller may hold locks of
/// tables.
#[inline]
pub(crate) fn after_unmapping<P: Platform>(
    memory: &Memory<P>,
    batch: &mut FreeBatch<'_, P>,
    folio: Folio,
    freed: Freed,
) {
    if freed == Freed::Unmapped {
        evict_unmapped(memory, batch, folio);
    }
}

/// Frees the folio if only the swap cache holds it and all content is in swap. A folio that another
/// thread has locked or referenced is left to that thread or to reclaim.
#[cold]
#[inline(never)]
fn evict_unmapped<P: Platform>(memory: &Memory<P>, batch: &mut FreeBatch<'_, P>, folio: Folio) {
    if !memory.frames.folio(folio).is_swap_cached() {
        return;
    }
    // The caller no longer has a reference, so the frame may have another owner by now.
    let Some(held) = memory.frames.try_hold(folio.head) else { return };
    let Some(locked) = held.try_into_locked() else { return };
    let folio = locked.folio();
    // A folio in the cache is mapped only with its lock held.
    if memory.frames.folio(folio).mappings() > 0 {
        return;
    }
    let Some(cached) = CachedFolio::find(memory, locked.locked()) else { return };
    if cached.prepare_dropping()
        && let Some(frozen) = write_out(memory, locked, Stored::Yes)
    {
        frozen.free_into(batch);
    }
}

impl<P: Platform> CachedFolio<'_, P> {
    /// Like [`CachedFolio::prepare_out`], for an unmapped folio, if swap has the content of all
    /// pages that are still in the cache; pages that have left are not needed. Returns whether the
    /// folio was prepared.
    pub(super) fn prepare_dropping(&self) -> bool {
        while_areas_stay(self.memory.platform(), |stay| self.prepare_dropping_in(stay))
    }

    fn prepare_dropping_in(&self, stay: &AreasStay) -> bool {
        let Some((cluster, cells, _)) = self.slots().cells(stay, self.memory) else { return false };
        let _state = cluster.state.lock();
        let load = |cell: &AtomicU64| SlotState(cell.load(Relaxed));
        let is_ours = |(page, cell): &(u32, &AtomicU64)| {
            load(cell).frame() == Some(self.folio.head.plus(*page))
        };
        let ours = || (0..).zip(cells).filter(is_ours).map(|(_, cell)| cell);
        let is_stored = |cell: &AtomicU64| {
            load(cell).0 & SlotState::CONTENT != 0 && !load(cell).has(SlotState::WRITING)
        };
        let stored = self.handle().is_swap_cached() && ours().all(is_stored);
        if stored {
            make_busy(ours());
        }
        stored
    }
}

/// Allows a folio to be swapped out again to its present slots: makes them busy, and adds an
/// entry's reference to the slots of `named` pages from page `first` on. `None`, with nothing
/// changed, if the folio has no slots, if the area is stopped, or if a slot's count is at its
/// maximum. The caller holds the locks of the tables that get the entries.
pub(crate) fn send_out_again<P: Platform>(
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    first: u32,
    named: u32,
) -> Option<SlotRun> {
    let cached = CachedFolio::find(memory, folio)?;
    let stored = cached.prepare_out()?;
    let slots = cached.slots();
    let run = SlotRun { first: slots.first + u64::from(first), count: named, ..slots };
    if cached.may_be_written(stored) && run.dup(memory).is_ok() {
        return Some(slots);
    }
    cached.unlock(&PageSet::EMPTY);
    None
}

/// Removes a partly cached folio from the cache: some of its slots no longer have references, so it
/// cannot be swapped out to them. Other entries find the content in swap. Returns whether the folio
/// was removed, which requires that swap has the content of each page that is still cached. The
/// caller has a reference or mapping that keeps the folio.
pub(crate) fn leave_cache<P: Platform>(memory: &Memory<P>, folio: FolioLocked<'_>) -> bool {
    let Some(cached) = CachedFolio::find(memory, folio) else { return false };
    if cached.place.cached == folio.pages() || !cached.prepare_dropping() {
        return false;
    }
    cached.handle().mark_dirty();
    cached.give_up();
    true
}
