//! Folios of anonymous memory: aged, and sent to swap.

use core::sync::atomic::{Ordering, fence};

use crate::Memory;
use crate::addr::Frame;
use crate::arch::Arch;
use crate::frame::swap_place::SwapPlace;
use crate::frame::{Eviction, Folio, FolioLock, LockedFolio, Reference, Turn};
use crate::platform::Platform;
use crate::rmap::{self, Locking, Seen, Walked};
use crate::swap::SlotRun;
use crate::swap::page_set::PageSet;
use crate::swap::slots::Stored;
use crate::table::victims::Victims;
use crate::vma::{MappingFlags, Vma};

use super::pressure::Batch;

impl<P: Platform> Memory<P> {
    /// Looks at the folio of the frame, and at those around it where it is mapped: what is cold
    /// goes into the batch. Returns how many pages were freed at once.
    #[inline(never)]
    pub(super) fn reclaim_anonymous<'m>(
        &'m self,
        frame: Frame,
        turn: Turn,
        target: u64,
        batch: &mut Batch<'m, P>,
    ) -> u64 {
        let Some(held) = self.frames.try_hold(&self.platform, frame) else { return 0 };
        let Some(lock) = self.frames.try_lock_folio(&self.platform, *held) else {
            batch.later = true;
            return 0;
        };
        if self.frames.mappings(*held) == 0 {
            return batch.finish() + self.reclaim_cached(held, lock);
        }
        let mut victims = Victims::cold(*held, turn, target.min(u64::from(u32::MAX)) as u32);
        let folio = *held;
        let walked = rmap::for_each_anonymous_sight(self, folio, Locking::Try, |hit, _| {
            batch.take_window(hit, &mut victims);
            Seen { until: hit.range.end(), entries: u64::from(P::Arch::ENTRIES) }
        });
        let (met, used) = victims.elsewhere();
        let complete = matches!(walked, Walked::Visited(_)) && met >= self.frames.mappings(folio);
        batch.later |= walked == Walked::Busy || (met > 0 && !complete);
        let shared = met > 0 && complete && {
            self.frames.note_look(folio, turn);
            let may = self.frames.look(folio, used) == Eviction::May;
            batch.later |= !may;
            may
        };
        if victims.took_held() {
            // The lock is the batch's now, and keeps the folio with its mappings.
            lock.leave_to_batch();
            return 0;
        }
        if shared {
            return batch.finish() + self.reclaim_shared(held, lock);
        }
        // Or one that cannot go would count as one that may go later, in every turn.
        if !self.frames.is_looked_at(folio, turn) {
            self.frames.note_look(folio, turn);
        }
        0
    }

    /// Sends a cold folio to swap that several VMAs map: in each, its entries become swap entries,
    /// and are flushed. Where one could not be reached, or a device uses the folio, the rest of its
    /// pages stay in the swap cache, and the entries that are left keep them. Returns how many
    /// pages were freed.
    fn reclaim_shared(&self, held: Reference<'_, P>, lock: FolioLock<'_, P>) -> u64 {
        let folio = *held;
        let (place, stored) = match self.frames.swap_place(folio) {
            Some(place) => match self.prepare_out(folio, place) {
                Some(stored) if self.may_write_out(stored, place) => (place, stored),
                Some(_) => return self.keep_in_cache(folio, place),
                None => return 0,
            },
            None => {
                let Some(slots) = self.allocate_slots(folio.order, 1) else { return 0 };
                if self.frames.add_references(folio, 1).is_err() {
                    self.free_unused_slots(slots);
                    return 0;
                }
                (self.send_out(folio, slots, 0, 0), Stored::No)
            }
        };
        let slots = SlotRun { area: place.area, first: place.first, count: folio.pages() };
        let _ = rmap::for_each_anonymous_sight(self, folio, Locking::Try, |hit, gather| {
            self.unless_locked(hit.vma, || {
                hit.page_table.swap_out_shared(hit.range, folio, slots, gather);
            });
            Seen { until: hit.range.end(), entries: u64::from(folio.pages()) }
        });
        // After the entries, which lead to the folio, and before its content is read: a thread that
        // has pinned it writes to it meanwhile, and is seen here.
        fence(Ordering::SeqCst);
        if self.frames.mappings(folio) > 0 || self.frames.pins(folio) > 0 {
            self.settle_slots(folio, place, &PageSet::EMPTY);
            return 0;
        }
        let leaving = LockedFolio::new(lock, held);
        if self.write_out_locked(leaving, stored) { self.free_frozen(folio) } else { 0 }
    }

    /// A folio that nobody maps, and that the swap cache holds: it goes once its content is in swap.
    fn reclaim_cached(&self, held: Reference<'_, P>, lock: FolioLock<'_, P>) -> u64 {
        let folio = *held;
        let Some(place) = self.frames.swap_place(folio) else { return 0 };
        let Some(stored) = self.prepare_eviction(folio, place) else { return 0 };
        if !self.may_write_out(stored, place) {
            return self.keep_in_cache(folio, place);
        }
        let leaving = LockedFolio::new(lock, held);
        if self.write_out_locked(leaving, stored) { self.free_frozen(folio) } else { 0 }
    }

    /// Leaves a folio in the swap cache that had been prepared to go. Frees nothing.
    fn keep_in_cache(&self, folio: Folio, place: SwapPlace) -> u64 {
        self.settle_slots(folio, place, &PageSet::EMPTY);
        0
    }

    fn free_frozen(&self, folio: Folio) -> u64 {
        self.frames.free_frozen_into(&mut self.free_batch(), folio);
        u64::from(folio.pages())
    }

    /// Does `work` on the VMA's entries with the VMA locked for reading, unless its pages are
    /// locked into memory or somebody changes it ([`Batch::take_window`]).
    fn unless_locked(&self, vma: &Vma, work: impl FnOnce()) {
        if let Some(_vma) = vma.try_read(&self.platform)
            && !vma.has(MappingFlags::LOCKED)
        {
            work();
        }
    }
}
