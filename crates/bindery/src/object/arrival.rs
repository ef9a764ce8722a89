//! The initial age of a folio that is fetched from a pager; reclaim uses the age when memory is
//! short.

use crate::Memory;
use crate::collections::page_tree::PageIndex;
use crate::folio::Folio;
use crate::platform::Platform;
use crate::swap;

use super::ObjectState;

/// Determined before the folio enters the index, because the folio replaces the shadow there.
pub(super) struct Arrival {
    /// The shadow left by the last eviction of one of the folio's pages.
    shadow: Option<u32>,
    /// The number of the folio's first page, counted over the pages of all objects.
    place: u64,
}

impl Arrival {
    /// For a folio whose first page will be at `first`.
    pub(super) fn of<P: Platform>(
        memory: &Memory<P>,
        object: &ObjectState,
        first: u64,
        folio: Folio,
    ) -> Self {
        let left = |index: &PageIndex| index.shadow(first, folio.pages());
        let shadow = object.pages.look(memory.platform(), left);
        Self { shadow, place: object.place_of(first) }
    }

    /// Sets the age of a folio that has entered the index. The caller holds the folio.
    pub(super) fn note<P: Platform>(&self, memory: &Memory<P>, folio: Folio) {
        if let Some(shadow) = self.shadow {
            memory.frames.folio(folio).reclaim_state().set_age(swap::note_return(
                memory,
                shadow,
                folio.pages(),
            ));
        }
        memory.clock.passing.note_way(&memory.frames, folio, self.place);
    }
}
