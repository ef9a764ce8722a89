//! Whether one process may have all mappings of a folio, judged from the folio's own state.
//!
//! The count does not identify the processes that have mappings. So a process that needs to know
//! whether all mappings are its own walks its entries for the folio and compares the numbers. After
//! a fork, each of the 512 faults of a folio would start such a walk. Two bounds avoid it:
//!
//! 1. A process has at most one entry for each page that fits into the mapping. If the folio has
//!    more mappings, a reference or a pin, other holders exist.
//! 2. A walk that finds `n` entries of one process among more mappings leaves a note: as long as
//!    the folio has more than `n` mappings, others have some of them. The note counts eighths of
//!    the folio's pages, rounded down. A walk starts only if the folio has fewer mappings than the
//!    note allows, and then lowers the note. So at most eight walks can find mappings of others,
//!    regardless of the pages that each process unmaps.
//!
//! ```text
//!                             mappings   note      a write of the child
//! 512 pages, after a fork       1,024    512       copies: more than 512
//! the parent drops 384 pages      640    512       copies
//! 128 pages are copied            512    512       walks: 384 are its own; note 384; copies
//! 128 pages are copied            384    384       walks: 256 are its own; note 256; copies
//! the parent exits                255    256       walks: all are its own; no note; reuses
//! ```
//!
//! A note never permits reuse, so an outdated note costs only copies, not correctness: copies of up
//! to an eighth of the pages, or of all pages if the process has mapped pages of the folio again
//! since.

use core::sync::atomic::Ordering::Relaxed;

use super::count::mappings_in;
use super::handle::FolioHandle;
use crate::frame::meta::{FrameMeta, SHARED_EIGHTHS, SHARED_SHIFT};
use crate::platform::Platform;

/// The maximum of a note: it permits no walk.
const ALL_EIGHTHS: u32 = 8;

/// The maximum number of mappings at which a note permits a walk for a folio of `pages` pages.
const fn allowed(pages: u32, note: u32) -> u32 {
    pages * (ALL_EIGHTHS - note) / ALL_EIGHTHS
}

const fn note_in(state: u32) -> u32 {
    let note = (state & SHARED_EIGHTHS) >> SHARED_SHIFT;
    if note < ALL_EIGHTHS { note } else { ALL_EIGHTHS }
}

impl<'a, P: Platform> FolioHandle<'a, P> {
    /// The mappings of the folio by other processes.
    #[inline(always)]
    pub(crate) fn other_mappings(self) -> OtherMappings<'a> {
        OtherMappings { head: self.head(), pages: self.folio.pages() }
    }
}

/// The mappings of a folio, from the view of one process that has some of them. Tells whether all
/// are its own.
#[derive(Clone, Copy)]
pub(crate) struct OtherMappings<'a> {
    head: &'a FrameMeta,
    /// The folio's pages.
    pages: u32,
}

impl OtherMappings<'_> {
    /// Whether a process that has at most `most` entries for the folio's pages may have all
    /// mappings of the folio, which then has no other holder. Two loads. If `false`, a walk over
    /// the process's entries would find mappings of others, or would have found them a moment ago.
    #[inline]
    pub(crate) fn may_be_none(self, most: u32) -> bool {
        let count = self.head.count.load(Relaxed);
        let mappings = mappings_in(count);
        // The lower half counts references and pins.
        count as u32 == 0
            && mappings <= most
            && mappings <= allowed(self.pages, note_in(self.head.state.load(Relaxed)))
    }

    /// If the folio has more mappings than `ours`, notes that this process has only `ours`. The
    /// caller holds these mappings by the locks of their tables.
    pub(crate) fn note(self, ours: u32) {
        if mappings_in(self.head.count.load(Relaxed)) <= ours {
            // Only a reference prevented the reuse; this has no bearing on later writes.
            return;
        }
        let pages = self.pages;
        let note = ALL_EIGHTHS - (ours.min(pages) * ALL_EIGHTHS / pages);
        let raise = |state: u32| {
            let raised = state & !SHARED_EIGHTHS | note << SHARED_SHIFT;
            (note > note_in(state)).then_some(raised)
        };
        // Another process may have noted that first.
        let _ = self.head.state.fetch_update(Relaxed, Relaxed, raise);
    }

    /// Clears the note after a walk that has found only the mappings of one process. Only a load if
    /// the folio has no note.
    pub(crate) fn forget(self) {
        let state = &self.head.state;
        if state.load(Relaxed) & SHARED_EIGHTHS != 0 {
            state.fetch_and(!SHARED_EIGHTHS, Relaxed);
        }
    }
}
