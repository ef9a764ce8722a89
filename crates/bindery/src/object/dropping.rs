//! Pages that an object loses, in memory and in swap; and how long work on them is cut into pieces.

use crate::Memory;
use crate::addr::PageRange;
use crate::platform::Platform;
use crate::swap::SlotRun;

use super::ObjectState;
use super::invalidate::PagesMayGo;
use super::pages::{for_each_part, let_go};
use super::state::Accounting;
use super::swap_in::slots_of;

/// After so many pages, other threads may run.
const PIECE: u32 = 256;

/// Drops the pages, which are mapped nowhere: the frames are free unless there are other references,
/// and so are the slots of those in swap. An object may be as large as memory, so other threads run in
/// between: the caller has no lock but those of the object. May sleep.
///
/// Complexity: in the runs, and O(height of the index) for each 64 pages.
pub(super) fn drop_pages<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    piece: &mut Piece<'_, P>,
    proof: &PagesMayGo,
) {
    if object.pages.swapped() > 0 {
        drop_swapped(memory, object, pages, piece);
    }
    loop {
        let taken = object.pages.change(memory, |index, nodes| {
            let run = index.take_run(pages.first, pages.end, nodes);
            (run, run.map_or(0, |run| -i64::from(run.count)))
        });
        let Some(run) = taken else { return };
        for_each_part(memory, run, |page, frame, folio, count| {
            debug_assert!(frame.0 >= folio.head.0);
            let first = page - u64::from(frame.0 - folio.head.0);
            let_go(memory, object, first, folio, count, proof);
            piece.add(count);
            true
        });
        if object.accounting() == Accounting::PerPage {
            object.uncommit(memory, u64::from(run.count));
        }
    }
}

/// Drops those of the pages that are in swap: no entry names their slots. The same costs.
#[cold]
fn drop_swapped<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    piece: &mut Piece<'_, P>,
) {
    loop {
        let taken = object.pages.change(memory, |index, nodes| {
            let run = index.take_swapped(pages.first, pages.end, nodes);
            object.pages.count_swapped(run.map_or(0, |run| -i64::from(run.count)));
            (run, 0)
        });
        let Some(run) = taken else { return };
        // The index names them no more: a folio that is being written out, or stays in the swap
        // cache since it could not be, is let go with them.
        let SlotRun { area, first, count } = slots_of(run);
        for done in (0..count).step_by(PIECE as usize) {
            let count = PIECE.min(count - done);
            memory.release_slots(SlotRun { area, first: first + u64::from(done), count });
            piece.add(count);
        }
        if object.accounting() == Accounting::PerPage {
            object.uncommit(memory, u64::from(run.count));
        }
    }
}

/// Work on pages since other threads could run.
pub(super) struct Piece<'m, P: Platform> {
    pages: u32,
    platform: &'m P,
}

impl<'m, P: Platform> Piece<'m, P> {
    /// The first of several.
    pub(super) fn first_of(memory: &'m Memory<P>) -> Self {
        Self { pages: 0, platform: &memory.platform }
    }

    /// So many pages are done.
    pub(super) fn add(&mut self, pages: u32) {
        self.pages = self.pages.saturating_add(pages);
        if self.pages >= PIECE {
            self.pages = 0;
            self.platform.yield_if_due();
        }
    }
}
