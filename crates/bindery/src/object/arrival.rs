//! The age of a folio that is fetched from a pager while memory is short now and then.

use crate::Memory;
use crate::collections::page_tree::PageIndex;
use crate::frame::Folio;
use crate::platform::Platform;

use super::ObjectState;

/// Found out before the folio enters the index, where it takes the shadow's place.
pub(super) struct Arrival {
    /// Left by the last eviction of one of its pages.
    shadow: Option<u32>,
    /// Where it belongs among all pages of objects.
    place: u64,
}

impl Arrival {
    /// Of a folio whose first page will be at `first`.
    pub(super) fn of<P: Platform>(
        memory: &Memory<P>,
        object: &ObjectState,
        first: u64,
        folio: Folio,
    ) -> Self {
        let left = |index: &PageIndex| index.shadow(first, folio.pages());
        let shadow = object.pages.look(&memory.platform, left);
        Self { shadow, place: object.place_of(first) }
    }

    /// The folio has entered the index, and stays: the caller holds it.
    pub(super) fn note<P: Platform>(&self, memory: &Memory<P>, folio: Folio) {
        if let Some(shadow) = self.shadow {
            memory.frames.set_age(folio, memory.clock.note_return(shadow, folio.pages()));
        }
        memory.note_way(folio, self.place);
    }
}
