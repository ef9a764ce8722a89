//! Whether a process may be the only one that maps a folio, as far as the folio's own state can
//! tell.
//!
//! The count does not tell which process has a mapping. So a process that needs to know whether all
//! mappings are its own walks its entries for the folio, and compares. After a fork, each fault of
//! 512 would do so. Two bounds avoid the walk:
//!
//! 1. A process has at most one entry for each page that fits into the mapping. More mappings
//!    than that, a reference or a pin: others have the folio.
//! 2. A walk that finds `n` entries of one process among more mappings leaves a note: others have
//!    the folio as long as it has more than `n`. The note is in eighths of the folio's pages,
//!    rounded down. A walk needs fewer mappings than the note allows, and leaves one that allows
//!    less. So there are at most eight walks that find others, whatever the pages that each process
//!    gives up.
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
//! A note never permits reuse, so an outdated note costs copies, not correctness: up to an eighth
//! of the pages, or all if the process has mapped pages of the folio again since.

use core::sync::atomic::Ordering::Relaxed;

use super::count::mappings_in;
use super::handle::FolioHandle;
use crate::frame::meta::{FrameMeta, SHARED_EIGHTHS, SHARED_SHIFT};
use crate::platform::Platform;

/// The maximum of a note: it permits no walk.
const ALL_EIGHTHS: u32 = 8;

/// The maximum number of mappings of a folio of `pages` pages with which its note permits a walk.
const fn allowed(pages: u32, note: u32) -> u32 {
    pages * (ALL_EIGHTHS - note) / ALL_EIGHTHS
}

const fn note_in(state: u32) -> u32 {
    let note = (state & SHARED_EIGHTHS) >> SHARED_SHIFT;
    if note < ALL_EIGHTHS { note } else { ALL_EIGHTHS }
}

impl<'a, P: Platform> FolioHandle<'a, P> {
    /// The mappings of the folio that a process does not have.
    #[inline(always)]
    pub(crate) fn other_mappings(self) -> OtherMappings<'a> {
        OtherMappings { head: self.head(), pages: self.folio.pages() }
    }
}

/// The mappings of a folio, as seen by one process that has some of them: whether all are its own.
#[derive(Clone, Copy)]
pub(crate) struct OtherMappings<'a> {
    head: &'a FrameMeta,
    /// The folio's pages.
    pages: u32,
}

impl OtherMappings<'_> {
    /// Whether a process with room for `most` entries of the folio's pages may have all mappings of
    /// it, while it has no other holder. Two loads. If not, a walk over its entries would find
    /// others; or would have, a moment ago.
    #[inline]
    pub(crate) fn may_be_none(self, most: u32) -> bool {
        let count = self.head.count.load(Relaxed);
        let mappings = mappings_in(count);
        // The lower half counts references and pins.
        count as u32 == 0
            && mappings <= most
            && mappings <= allowed(self.pages, note_in(self.head.state.load(Relaxed)))
    }

    /// If there are more mappings than `ours`, notes that a process has only those. It keeps them
    /// by the locks of their tables.
    pub(crate) fn note(self, ours: u32) {
        if mappings_in(self.head.count.load(Relaxed)) <= ours {
            // Only a reference prevented the reuse, which says nothing about later writes.
            return;
        }
        let pages = self.pages;
        let note = ALL_EIGHTHS - (ours.min(pages) * ALL_EIGHTHS / pages);
        let raise = |state: u32| {
            let raised = state & !SHARED_EIGHTHS | note << SHARED_SHIFT;
            (note > note_in(state)).then_some(raised)
        };
        // Another process may have noted that already.
        let _ = self.head.state.fetch_update(Relaxed, Relaxed, raise);
    }

    /// Clears the note: a walk has found the mappings of one process only. A load if there is none.
    pub(crate) fn forget(self) {
        let state = &self.head.state;
        if state.load(Relaxed) & SHARED_EIGHTHS != 0 {
            state.fetch_and(!SHARED_EIGHTHS, Relaxed);
        }
    }
}
