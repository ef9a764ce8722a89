//! Folios of anonymous memory: aged, and sent to swap.

use crate::Memory;
use crate::addr::{Frame, VirtRange};
use crate::arch;
use crate::frame::{Folio, FolioLock, Reference};
use crate::platform::Platform;
use crate::rmap::{self, Locking, RmapHit, Seen};
use crate::table::PageTable;
use crate::table::locking::Depth;
use crate::table::swap_out::{OutBatch, Victims};
use crate::tlb::Gather;
use crate::vma::MappingFlags;

impl<P: Platform> Memory<P> {
    /// Looks at the folio of the frame, and at those around it where it is mapped. Returns how many pages
    /// were freed.
    pub(super) fn reclaim_anonymous(&self, frame: Frame, target: u64) -> u64 {
        let Some(held) = self.frames.try_hold(&self.platform, frame) else { return 0 };
        let Some(lock) = self.frames.try_lock_folio(&self.platform, *held) else { return 0 };
        if self.frames.mappings(*held) == 0 {
            return self.reclaim_cached(held, lock);
        }
        let mut batch = OutBatch::new();
        let mut victims = Victims::cold(*held, target.min(u64::from(u32::MAX)) as u32);
        let folio = *held;
        let walked = rmap::for_each_anonymous_sight(self, folio, Locking::Try, |hit, gather| {
            self.reclaim_window(hit, &mut victims, &mut batch, gather)
        });
        let _ = walked;
        if victims.took_held() {
            // Lock and reference are the batch's now.
            lock.leave_locked();
            core::mem::forget(held);
        } else {
            drop(lock);
            drop(held);
        }
        batch.write_out(self)
    }

    /// A folio that nobody maps, and that the swap cache holds: it goes if its content is in swap.
    fn reclaim_cached(&self, held: Reference<'_, P>, lock: FolioLock<'_, P>) -> u64 {
        let folio = *held;
        let Some(place) = self.frames.swap_place(folio) else { return 0 };
        let evicted = match self.prepare_out(folio, place) {
            Some(false) => self.evict(folio, place, None),
            Some(true) => {
                lock.leave_locked();
                core::mem::forget(held);
                // Lock and reference are the callee's.
                return if self.write_out_locked(folio) { self.free_frozen(folio) } else { 0 };
            }
            None => false,
        };
        if !evicted {
            return 0;
        }
        // Both go with the folio.
        lock.leave_locked();
        core::mem::forget(held);
        self.free_frozen(folio)
    }

    fn free_frozen(&self, folio: Folio) -> u64 {
        self.frames.free_frozen_into(&mut self.free_batch(), folio);
        u64::from(folio.pages())
    }

    /// Harvests the accessed bits of the table around the hit, and makes swap entries of what is cold.
    fn reclaim_window(
        &self,
        hit: &RmapHit<'_, '_, P>,
        victims: &mut Victims,
        batch: &mut OutBatch,
        gather: &mut Gather,
    ) -> Seen {
        let seen = Seen { until: hit.range.end(), entries: u64::from(arch::entries::<P::Arch>()) };
        if hit.vma.has(MappingFlags::LOCKED) {
            return seen;
        }
        let span = arch::table_span::<P::Arch>(1);
        let start = hit.range.start().align_down(span);
        let end = hit.range.end().0.checked_next_multiple_of(span).unwrap_or(hit.range.end().0);
        let window = VirtRange::raw(start.0, end).intersection(hit.vma.range());
        let mut cursor = hit.table.cursor_beside(window, Depth::Floor(1), Some(&*gather));
        let attributes = hit.vma.flags().attributes();
        let _ = PageTable::swap_out(&mut cursor, attributes, victims, batch, gather);
        seen
    }
}
