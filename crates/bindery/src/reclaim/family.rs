//! Folios of anonymous memory that several VMAs of one family of address spaces map: aged and
//! swapped out together, one stretch of an owner at a time.
//!
//! A walk through the reverse map looks at the stretch in each VMA, and adds up the mappings that
//! it meets. The unused folios whose mappings were all met are swapped out: a second walk makes
//! swap entries of them, with one flush for each VMA. So a page costs each of the processes at most
//! two visits in a turn of the clock, regardless of its neighbors.

use core::sync::atomic::{Ordering, fence};

use crate::Memory;
use crate::addr::Order;
use crate::folio::{Eviction, FolioLocked, LockedFolio, Turn};
use crate::platform::Platform;
use crate::rmap::{self, Locking, RmapHit, Seen, Walked};
use crate::swap::SlotRun;
use crate::swap::page_set::PageSet;
use crate::table::edit::Edit;
use crate::table::swap_out_shared::{SharedFolio, SharedFolios, StretchPart};
use crate::vma::{MappingFlags, Vma};

use super::pressure::Batch;

/// The reason why a walk skipped a VMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kept {
    /// Its pages are locked into memory.
    Locked,
    /// Another thread changes it.
    Busy,
}

impl<P: Platform> Memory<P> {
    /// Examines a folio that several VMAs map, and those that follow it in the memory of its owner,
    /// up to about `target` pages; swaps out the unused ones. If a mapping could not be reached, or
    /// a device uses a folio, the rest of its pages stay in the swap cache, and the remaining
    /// entries keep them. Returns the number of pages freed.
    #[inline(never)]
    pub(super) fn reclaim_family<'m>(
        &'m self,
        first: LockedFolio<'m, P>,
        turn: Turn,
        target: u64,
        batch: &mut Batch<'m, P>,
    ) -> u64 {
        let freed = batch.finish();
        self.frames.folio(first.folio()).reclaim_state().note_look(turn);
        let owner = first.owner();
        let mut folios = SharedFolios::new(first, owner, turn, target);
        self.age_family(&mut folios, turn, batch);
        let mut left = folios.folios.len();
        folios.folios.retain(|shared| {
            left -= 1;
            self.prepare_shared(shared.leaving.locked(), left as u32, batch)
        });
        freed + self.send_family(folios) + batch.finish()
    }

    /// Keeps in the stretch only the unused folios whose mappings were all met.
    fn age_family<'m>(
        &'m self,
        folios: &mut SharedFolios<'m, P>,
        turn: Turn,
        batch: &mut Batch<'m, P>,
    ) {
        let mut kept = None;
        let walked = self.walk_stretch(folios, |hit, part, folios, edit| {
            let looked = self.unless_locked(hit.vma, || {
                let attributes = hit.vma.flags().attributes();
                edit.look_at_shared(part, attributes, folios);
            });
            kept = kept.or(looked.err());
        });
        let complete = matches!(walked, Walked::Visited(_));
        // Folios that are locked into memory stay until `Memory::note_unlocked`.
        batch.later |= walked == Walked::Busy || kept == Some(Kept::Busy);
        folios.folios.retain(|shared| {
            let folio = shared.leaving.folio();
            if !complete || shared.met < self.frames.folio(folio).mappings() {
                if complete && kept == Some(Kept::Locked) {
                    self.frames.folio(folio).reclaim_state().mark_unevictable();
                }
                batch.later |= shared.met > 0 && kept != Some(Kept::Locked);
                return false;
            }
            self.frames.folio(folio).reclaim_state().note_look(turn);
            let may =
                self.frames.folio(folio).reclaim_state().update_age(shared.used) == Eviction::May;
            batch.later |= !may;
            may
        });
    }

    /// Visits the part of the stretch that each VMA may map.
    fn walk_stretch<'m>(
        &'m self,
        folios: &mut SharedFolios<'m, P>,
        mut visit: impl FnMut(
            &RmapHit<'_, 'm, P>,
            StretchPart,
            &mut SharedFolios<'m, P>,
            &mut Edit<'_, 'm, P>,
        ),
    ) -> Walked {
        let Some(first) = folios.folios.first() else { return Walked::NotMapped };
        let folio = first.leaving.folio();
        let pages = folios.pages();
        let count = pages.end - pages.first;
        rmap::for_each_sight_from(self, folio, count, Locking::Try, |hit, edit| {
            let mut entries = 0;
            let index = hit.vma.page_offset_of(hit.range.start());
            if let Some(part) = folios.part_of(index, hit.range) {
                entries = part.range.pages();
                visit(hit, part, folios, edit);
            }
            Seen { until: hit.range.end(), entries }
        })
    }

    /// Makes slots of the folio busy: its own, or new ones, which are also allocated for `left`
    /// more folios. Returns whether it has slots.
    fn prepare_shared<'m>(
        &'m self,
        folio: FolioLocked<'_>,
        left: u32,
        batch: &mut Batch<'m, P>,
    ) -> bool {
        if self.frames.folio(*folio).is_swap_cached() {
            if self.send_out_again(folio, 0, 0).is_some() {
                return true;
            }
            if !self.leave_cache(folio) {
                return false;
            }
        }
        let more = if folio.order == Order::PAGE { left } else { 0 };
        let Some(slots) = batch.idle().slots(self, folio.order, 1 + more) else { return false };
        if self.frames.folio(*folio).add_references(1).is_err() {
            self.free_unused_slots(slots);
            return false;
        }
        self.send_out(folio, slots, 0, 0);
        true
    }

    /// Swaps out the folios, whose slots are busy. Returns the number of pages freed.
    fn send_family<'m>(&'m self, mut folios: SharedFolios<'m, P>) -> u64 {
        let _ = self.walk_stretch(&mut folios, |hit, part, folios, edit| {
            let _ = self.unless_locked(hit.vma, || {
                let attributes = hit.vma.flags().attributes();
                edit.swap_out_shared(part.range, attributes, folios);
            });
        });
        // After clearing the entries, which lead to the folios, and before reading their content: a
        // thread that has pinned a folio may write to it concurrently, and its pin is visible here.
        fence(Ordering::SeqCst);
        let mut freed = 0;
        let enough = self.enough_free_frames();
        let mut batch = self.free_batch();
        for SharedFolio { leaving, .. } in folios.folios.drain(..) {
            let folio = leaving.folio();
            let Some(place) = self.frames.folio(folio).swap_place() else { continue };
            if self.frames.folio(folio).mappings() > 0 || self.frames.folio(folio).pins() > 0 {
                self.unlock_claimed(leaving.locked(), place, &PageSet::EMPTY);
                continue;
            }
            let slots = SlotRun { area: place.area, first: place.first, count: folio.pages() };
            if self.write_out_locked(leaving, self.stored_at(slots)) {
                self.frames.folio(folio).free_frozen_into(&mut batch);
                freed += u64::from(folio.pages());
                if self.free_frame_count() < enough {
                    // The next folio may have to be stored in these frames.
                    batch.free_all();
                }
            }
        }
        freed
    }

    /// Runs `work` on the VMA's entries with the VMA locked for reading, unless its pages are
    /// locked into memory or another thread changes it ([`Batch::take_window`]).
    fn unless_locked(&self, vma: &Vma, work: impl FnOnce()) -> Result<(), Kept> {
        let _vma = vma.try_read(self.platform()).ok_or(Kept::Busy)?;
        if vma.has(MappingFlags::LOCKED) {
            return Err(Kept::Locked);
        }
        work();
        Ok(())
    }
}
