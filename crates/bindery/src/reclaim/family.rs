//! Folios of anonymous memory that several VMAs of one family of address spaces map. They are aged
//! and swapped out together, one stretch of an owner at a time.
//!
//! A walk of the reverse map examines the stretch in each VMA and counts the mappings that it
//! finds. The unused folios for which all mappings were found are swapped out: a second walk
//! replaces their mappings with swap entries, with one flush for each VMA. So a page costs each of
//! the processes at most two visits in a turn of the clock, regardless of its neighbors.

use core::sync::atomic::{Ordering, fence};

use crate::Memory;
use crate::addr::Order;
use crate::folio::{Eviction, FolioLocked, LockedFolio, Turn};
use crate::platform::Platform;
use crate::rmap::{self, RmapHit, WalkLocking, WalkProgress, Walked};
use crate::swap::page_set::PageSet;
use crate::swap::{CachedFolio, leave_cache, send_out_again, write_out};
use crate::table::edit::Edit;
use crate::table::swap_out_shared::{SharedFolio, SharedFolios, StretchPart};
use crate::vma::{MappingFlags, Vma};

use super::pressure::EvictionBatch;

/// The reason why a walk skipped a VMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Skipped {
    /// The VMA's pages are locked into memory.
    Locked,
    /// Another thread is changing the VMA.
    Busy,
}

impl<'m, P: Platform> EvictionBatch<'m, P> {
    /// Examines a folio that several VMAs map, and the folios that follow it in the memory of its
    /// owner, up to about `target` pages. Swaps out the unused ones. If a mapping could not be
    /// reached, or a device uses a folio, the rest of the folio's pages stay in the swap cache, and
    /// the remaining entries keep them. Returns the number of pages freed.
    #[inline(never)]
    pub(super) fn reclaim_family(
        &mut self,
        first: LockedFolio<'m, P>,
        turn: Turn,
        target: u64,
    ) -> u64 {
        let freed = self.finish();
        self.memory.frames.folio(first.folio()).reclaim_state().note_look(turn);
        let owner = first.owner();
        let mut folios = SharedFolios::new(first, owner, turn, target);
        self.age_family(&mut folios, turn);
        let mut left = folios.folios.len();
        folios.folios.retain(|shared| {
            left -= 1;
            self.prepare_shared(shared.leaving.locked(), left as u32)
        });
        freed + send_family(self.memory, folios) + self.finish()
    }

    /// Retains in the stretch only the unused folios whose mappings were all visited.
    fn age_family(&mut self, folios: &mut SharedFolios<'m, P>, turn: Turn) {
        let memory = self.memory;
        let mut kept = None;
        let walked = walk_stretch(memory, folios, |hit, part, folios, edit| {
            let looked = unless_locked(memory.platform(), hit.vma, || {
                let attributes = hit.vma.flags().attributes().get();
                edit.look_at_shared(part, attributes, folios);
            });
            kept = kept.or(looked.err());
        });
        let complete = matches!(walked, Walked::Visited(_));
        // Folios that are locked into memory stay until `Clock::note_unlocked`.
        self.later |= walked == Walked::Busy || kept == Some(Skipped::Busy);
        folios.folios.retain(|shared| {
            let handle = memory.frames.folio(shared.leaving.folio());
            if !complete || shared.met < handle.mappings() {
                if complete && kept == Some(Skipped::Locked) {
                    handle.reclaim_state().mark_unevictable();
                }
                self.later |= shared.met > 0 && kept != Some(Skipped::Locked);
                return false;
            }
            handle.reclaim_state().note_look(turn);
            let may = handle.reclaim_state().update_age(shared.used) == Eviction::May;
            self.later |= !may;
            may
        });
    }

    /// Makes slots of the folio busy: its own slots, or new ones, in which case slots are also
    /// allocated for `left` more folios. Returns whether the folio has slots.
    fn prepare_shared(&mut self, folio: FolioLocked<'_>, left: u32) -> bool {
        let memory = self.memory;
        if memory.frames.folio(*folio).is_swap_cached() {
            if send_out_again(memory, folio, 0, 0).is_some() {
                return true;
            }
            if !leave_cache(memory, folio) {
                return false;
            }
        }
        let more = if folio.order == Order::PAGE { left } else { 0 };
        let Some(slots) = self.idle().slots(memory, folio.order, 1 + more) else { return false };
        if memory.frames.folio(*folio).add_references(1).is_err() {
            slots.free_unused(memory);
            return false;
        }
        let _ = CachedFolio::send_out(memory, folio, slots, 0, 0);
        true
    }
}

/// Visits the part of the stretch that each VMA may map.
fn walk_stretch<'m, P: Platform>(
    memory: &'m Memory<P>,
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
    rmap::for_each_sight_from(memory, folio, count, WalkLocking::Try, |hit, edit| {
        let mut entries = 0;
        let index = hit.vma.page_offset_of(hit.range.start());
        if let Some(part) = folios.part_of(index, hit.range) {
            entries = part.range.pages();
            visit(hit, part, folios, edit);
        }
        WalkProgress { until: hit.range.end(), entries }
    })
}

/// Swaps out the folios. Their slots are busy. Returns the number of pages freed.
fn send_family<'m, P: Platform>(memory: &'m Memory<P>, mut folios: SharedFolios<'m, P>) -> u64 {
    let _ = walk_stretch(memory, &mut folios, |hit, part, folios, edit| {
        let _ = unless_locked(memory.platform(), hit.vma, || {
            let attributes = hit.vma.flags().attributes().get();
            edit.swap_out_shared(part.range, attributes, folios);
        });
    });
    // After the entries that lead to the folios were cleared, and before the folios' content is
    // read: a thread that has pinned a folio may write to it concurrently, and its pin is visible
    // here.
    fence(Ordering::SeqCst);
    let mut freed = 0;
    let enough = memory.enough_free_frames();
    let mut batch = memory.free_batch();
    for SharedFolio { leaving, .. } in folios.folios.drain(..) {
        let folio = leaving.folio();
        let handle = memory.frames.folio(folio);
        let Some(cached) = CachedFolio::find(memory, leaving.locked()) else { continue };
        if handle.mappings() > 0 || handle.pins() > 0 {
            cached.unlock(&PageSet::EMPTY);
            continue;
        }
        let stored = cached.stored();
        if let Some(frozen) = write_out(memory, leaving, stored) {
            frozen.free_into(&mut batch);
            freed += u64::from(folio.pages());
            if memory.frames.listed_frame_count() < enough {
                // Storing the next folio may need these frames.
                batch.free_all();
            }
        }
    }
    freed
}

/// Runs `work` on the VMA's entries with the VMA locked for reading, unless its pages are locked
/// into memory or another thread is changing it ([`EvictionBatch::take_window`]).
fn unless_locked<P: Platform>(platform: &P, vma: &Vma, work: impl FnOnce()) -> Result<(), Skipped> {
    let _vma = vma.try_read(platform).ok_or(Skipped::Busy)?;
    if vma.has(MappingFlags::LOCKED) {
        return Err(Skipped::Locked);
    }
    work();
    Ok(())
}
