//! Drops pages of an object, in memory and in swap, and splits long work on them into pieces.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::PageRange;
use crate::platform::Platform;
use crate::swap::SlotRun;

use super::ObjectState;
use super::backing::Accounting;
use super::invalidate::PagesMayGo;
use super::pages::for_each_part;
use super::placed_folio::PlacedFolio;
use super::swap_in::slots_of;

/// The number of pages after which other threads may run.
const PIECE: u32 = 256;

/// Drops the pages, which are mapped nowhere: frees their frames unless other references remain,
/// and frees the slots of pages in swap. An object may be as large as memory, so other threads may
/// run in between; the caller holds only locks of the object. May sleep.
///
/// Complexity: linear in the runs, plus O(height of the index) for each 64 pages.
pub(super) fn drop_pages<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    piece: &mut DropPiece<'_, P>,
    proof: &PagesMayGo,
) {
    if object.pages.swapped() > 0 {
        drop_swapped(memory, object, pages, piece);
    }
    // Consecutive pages mostly have consecutive frames, which are freed together.
    let mut batch = memory.free_batch();
    loop {
        let taken = object.pages.change(memory, |index, nodes| {
            let run = index.take_run(pages.first, pages.end, nodes);
            (run, run.map_or(0, |run| -i64::from(run.count)))
        });
        let Some(run) = taken else { return };
        for_each_part(memory, run, |page, frame, folio, count| {
            debug_assert!(frame.0 >= folio.head.0);
            let first = page - u64::from(frame.0 - folio.head.0);
            let folio = PlacedFolio { memory, object, folio, first };
            // SAFETY: 1. the pages are a part of the run that was removed above; each part is
            // released once.
            unsafe { folio.release_dropped(count, &mut batch, proof) };
            piece.add(count);
            true
        });
        if object.accounting() == Accounting::PerPage {
            object.uncommit(memory, u64::from(run.count));
        }
    }
}

/// Drops the pages that are in swap; no entry refers to their slots. Complexity: as [`drop_pages`].
#[cold]
fn drop_swapped<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    piece: &mut DropPiece<'_, P>,
) {
    loop {
        let taken = object.pages.change(memory, |index, nodes| {
            let run = index.take_swapped(pages.first, pages.end, nodes);
            object.pages.count_swapped(run.map_or(0, |run| -i64::from(run.count)));
            (run, 0)
        });
        let Some(run) = taken else { return };
        // The index no longer refers to the slots. A folio that is being written out, or that stays
        // in the swap cache because its write failed, is released with them.
        let SlotRun { area, first, count } = slots_of(run);
        for done in (0..count).step_by(PIECE as usize) {
            let count = PIECE.min(count - done);
            SlotRun { area, first: first + u64::from(done), count }.release(memory);
            piece.add(count);
        }
        if object.accounting() == Accounting::PerPage {
            object.uncommit(memory, u64::from(run.count));
        }
    }
}

/// The amount of work on pages since other threads could last run.
pub(super) struct DropPiece<'m, P: Platform> {
    pages: u32,
    platform: &'m P,
}

impl<'m, P: Platform> DropPiece<'m, P> {
    /// The first of several pieces.
    pub(super) fn first_of(memory: &'m Memory<P>) -> Self {
        Self { pages: 0, platform: memory.platform() }
    }

    /// Counts `pages` pages.
    pub(super) fn add(&mut self, pages: u32) {
        self.pages = self.pages.saturating_add(pages);
        if self.pages >= PIECE {
            self.pages = 0;
            self.platform.yield_if_due();
        }
    }
}
