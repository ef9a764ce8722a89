//! Folios of anonymous memory: aged and swapped out.

use crate::Memory;
use crate::addr::{Frame, Order, PAGE_SHIFT, VirtRange};
use crate::arch::Arch;
use crate::folio::{Folio, LockedFolio};
use crate::platform::Platform;
use crate::rmap::{self, WalkLocking, WalkProgress, Walked};
use crate::swap::TakeRequest;
use crate::swap::unwritten::write_out_cached;
use crate::table::look;
use crate::table::split_folio::split_folio;
use crate::table::swap_out_scan::SwapOutScan;

use super::pressure::EvictionBatch;
use super::sweep::Which;

/// The number of places that map a folio, as found by a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mapped {
    /// The walk found no mapping.
    Nowhere,
    /// One table of one VMA maps the folio.
    InOne,
    /// One table of one VMA maps the folio, and the VMA is locked into memory.
    Locked,
    InSeveral,
}

impl<'m, P: Platform> EvictionBatch<'m, P> {
    /// Examines the folio of the frame and the folios around it in the same table. Adds those to be
    /// swapped out to the batch. Returns the number of pages freed immediately.
    #[inline(never)]
    pub(super) fn reclaim_anonymous(&mut self, frame: Frame, which: Which, target: u64) -> u64 {
        let memory = self.memory;
        let Some(held) = memory.frames.try_hold(frame) else { return 0 };
        let Some(locked) = held.try_into_locked() else {
            self.later = true;
            return 0;
        };
        let folio = locked.folio();
        if memory.frames.folio(folio).mappings() == 0 {
            return self.finish() + reclaim_cached(memory, locked);
        }
        let handle = memory.frames.folio(folio);
        let pinned = handle.pins() > 0;
        let pages = target.min(u64::from(u32::MAX)) as u32;
        let mut scan = match which {
            Which::Cold(turn) => SwapOutScan::cold(locked.locked(), turn, pages),
            Which::Passing => SwapOutScan::passing(locked.locked(), pages),
        };
        let mapped = if pinned { Mapped::Nowhere } else { self.take_around(folio, &mut scan) };
        if mapped == Mapped::Locked {
            handle.reclaim_state().mark_unevictable();
        }
        if scan.is_held_to_be_cut() {
            return self.cut_held(locked);
        }
        if scan.swapped_held() {
            // The lock now belongs to the batch, and keeps the folio and its mappings.
            drop(locked.leave_lock_to_batch());
            return 0;
        }
        let Which::Cold(turn) = which else { return 0 };
        if mapped == Mapped::InSeveral {
            return self.reclaim_family(locked, turn, target);
        }
        // Without this check, a folio that cannot be freed would count in every turn as one that
        // may be freed later.
        if !handle.reclaim_state().is_looked_at(turn) {
            handle.reclaim_state().note_look(turn);
        }
        0
    }

    /// Splits a folio that is mapped in one table if swap has only single slots for it. A later
    /// turn swaps out its pages. Frees the folio's unmapped pages.
    #[cold]
    #[inline(never)]
    fn cut_held(&mut self, locked: LockedFolio<'m, P>) -> u64 {
        // The window's entries are marked as pending until the batch is finished.
        let freed = self.finish();
        let (memory, folio, mut is_cut) = (self.memory, locked.folio(), false);
        let walked = rmap::for_each_anonymous_sight(memory, folio, WalkLocking::Try, |hit, _| {
            let mut entries = 0;
            if !is_cut && let Some(_vma) = hit.vma.try_read(memory.platform()) {
                entries = hit.range.pages();
                let cut = split_folio(&hit.page_table, folio, hit.range, Order::PAGE, || true);
                is_cut = cut.is_ok();
            }
            WalkProgress { until: hit.range.end(), entries }
        });
        self.later |= is_cut || walked == Walked::Busy;
        let held = locked.unlock();
        if is_cut {
            held.release_parts(Order::PAGE);
        }
        freed
    }

    /// Finds the places that map the folio. If it is one place, examines the window around it. So a
    /// window is examined only in the VMA that maps its folio, and in no other VMA of the family.
    fn take_around(&mut self, folio: Folio, scan: &mut SwapOutScan<'_>) -> Mapped {
        let memory = self.memory;
        let mappings = memory.frames.folio(folio).mappings();
        if mappings > folio.pages() {
            return Mapped::InSeveral;
        }
        let mut mapped = Mapped::Nowhere;
        let walked = rmap::for_each_anonymous_sight(memory, folio, WalkLocking::Try, |hit, _| {
            let mut entries = 0;
            if mapped == Mapped::Nowhere {
                entries = hit.range.pages();
                let met = look::mapped_pages(&hit.page_table, hit.range, folio);
                // A folio in two tables has a run in each table, and neither run covers the whole
                // folio.
                let span = P::Arch::PMD.span();
                let table = VirtRange::raw(hit.range.start().align_down(span).0, hit.range.end().0);
                if met >= mappings && table.pages() << PAGE_SHIFT <= span {
                    entries += u64::from(P::Arch::ENTRIES);
                    let locked = self.take_window(hit, scan);
                    mapped = if locked { Mapped::Locked } else { Mapped::InOne };
                } else if met > 0 {
                    mapped = Mapped::InSeveral;
                }
            }
            WalkProgress { until: hit.range.end(), entries }
        });
        self.later |= walked == Walked::Busy;
        mapped
    }
}

/// Evicts an unmapped folio of the swap cache once its content is in swap. Returns the number of
/// pages freed.
fn reclaim_cached<P: Platform>(memory: &Memory<P>, locked: LockedFolio<'_, P>) -> u64 {
    let pages = u64::from(locked.folio().pages());
    let Ok(Some(frozen)) = write_out_cached(memory, locked, TakeRequest::Awaits) else { return 0 };
    frozen.free_into(&mut memory.free_batch());
    pages
}
