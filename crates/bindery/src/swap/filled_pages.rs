//! The pages of a written folio that are filled with one repeated word.

use crate::folio::Folio;

use super::page_set::PageSet;
use super::slot_state::SlotState;

/// The location of each page of a folio after a write.
pub(crate) struct FilledPages {
    /// The pages that are filled with one repeated word; the others are in the area's store.
    pub(super) filled: PageSet,
}

impl FilledPages {
    pub(super) const NOTHING: Self = Self { filled: PageSet::EMPTY };

    /// The content bits for the page's cell.
    pub(super) fn content(&self, page: u32) -> u64 {
        if self.filled.has(page) { SlotState::FILLED } else { SlotState::STORED }
    }

    pub(super) fn is_filled(&self, page: u32) -> bool {
        self.filled.has(page)
    }

    /// The number of the folio's pages that are in the store.
    pub(super) fn in_store(&self, folio: Folio) -> u32 {
        (0..folio.pages()).filter(|page| !self.filled.has(*page)).count() as u32
    }
}
