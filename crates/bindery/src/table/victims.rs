//! The folios that a scan swaps out, and where the scan stops.

use crate::addr::VirtAddr;
use crate::folio::{Folio, Turn};

/// The reason why a scan stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SwapOutStop {
    /// It reached the end of the part.
    End,
    /// The batch is full: it goes on from here when the batch is written out.
    Full(VirtAddr),
    /// The entries from here on map a part of the folio, or map it with holes. It goes on from here
    /// when the folio was split, or with [`Victims::leave`].
    Cut(Folio, VirtAddr),
    /// No slots are free.
    NoSlots,
}

/// The state of one scan for folios to swap out.
pub(crate) struct Victims {
    pub(super) choice: Choice,
    /// A folio of which the caller has the lock and a reference.
    pub(super) held: Option<Folio>,
    /// That folio is swapped out: lock and reference belong to the batch.
    pub(super) took_held: bool,
    /// The turn of the clock: folios that were looked at in it stay.
    pub(super) turn: Turn,
    /// Pages that may still be swapped out.
    pub(super) left: u32,
    /// A folio that is mapped here in part and cannot be split.
    pub(super) unsplittable: Option<Folio>,
    /// A folio stays that another look may find cold. (One that is locked is left to the hand, which
    /// comes to it by itself in the same turn.)
    pub(super) later: bool,
    /// The folio that the caller holds has found no block of slots, where single pages would.
    pub(super) cut_held: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    All,
    Cold,
    Passing,
}

impl Victims {
    /// All of them (`MADV_PAGEOUT`).
    pub(crate) const ALL: Self = Self {
        choice: Choice::All,
        held: None,
        took_held: false,
        turn: Turn::Even,
        left: u32::MAX,
        unsplittable: None,
        later: false,
        cut_held: false,
    };

    /// Skips that folio, which could not be split.
    pub(crate) fn leave(&mut self, folio: Folio) {
        self.unsplittable = Some(folio);
    }

    /// Those that were not used lately, up to about `pages` pages, and that were not looked at in
    /// this turn of the clock. The others get older.
    pub(crate) fn cold(held: Folio, turn: Turn, pages: u32) -> Self {
        Self { choice: Choice::Cold, held: Some(held), turn, left: pages, ..Self::ALL }
    }

    /// Those that are passing ([`crate::folio::Age::Passing`]), up to about `pages` pages. The others
    /// stay as they are.
    pub(crate) fn passing(held: Folio, pages: u32) -> Self {
        Self { choice: Choice::Passing, held: Some(held), left: pages, ..Self::ALL }
    }

    /// Whether another look may find more.
    pub(crate) fn may_find_more(&self) -> bool {
        self.later
    }

    /// Whether the folio that the caller holds could be swapped out only in single pages.
    pub(crate) fn is_held_to_be_cut(&self) -> bool {
        self.cut_held
    }

    /// Whether the folio that the caller holds went out.
    pub(crate) fn took_held(&self) -> bool {
        self.took_held
    }
}
