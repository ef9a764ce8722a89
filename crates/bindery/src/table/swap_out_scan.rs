//! A scan for folios to swap out: the folios that it selects, and the reasons why it stops.

use crate::addr::VirtAddr;
use crate::folio::{Folio, FolioLocked, Turn};

/// The reason why a scan stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SwapOutStop {
    /// The scan reached the end of the part.
    End,
    /// The batch is full. The scan resumes at this address after the batch has been written out.
    Full(VirtAddr),
    /// The entries from this address on map a part of the folio, or map it with holes. The scan
    /// resumes there after the folio is split, or after [`SwapOutScan::leave`].
    Cut(Folio, VirtAddr),
    /// No slots are free.
    NoSlots,
}

/// The state of one scan for folios to swap out.
pub(crate) struct SwapOutScan<'l> {
    pub(super) choice: Choice,
    /// A folio that the caller has locked and to which it also holds a reference.
    pub(super) held: Option<FolioLocked<'l>>,
    /// Whether the scan swapped out `held`; the folio's lock and reference then belong to the
    /// batch.
    pub(super) swapped_held: bool,
    /// The current turn of the clock. The scan skips folios that were examined in this turn.
    pub(super) turn: Turn,
    /// The number of pages that may still be swapped out.
    pub(super) left: u32,
    /// A partly mapped folio that could not be split.
    pub(super) unsplittable: Option<Folio>,
    /// Whether the scan skipped a folio that a later scan may find cold. (Locked folios do not
    /// count, because the clock hand reaches them in the same turn.)
    pub(super) later: bool,
    /// Whether no block of slots was free for `held`, although single slots may be.
    pub(super) cut_held: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    All,
    Cold,
    Passing,
}

impl<'l> SwapOutScan<'l> {
    /// Selects all folios (`MADV_PAGEOUT`).
    pub(crate) const ALL: Self = Self {
        choice: Choice::All,
        held: None,
        swapped_held: false,
        turn: Turn::Even,
        left: u32::MAX,
        unsplittable: None,
        later: false,
        cut_held: false,
    };

    /// Makes the scan skip `folio`, which could not be split.
    pub(crate) fn leave(&mut self, folio: Folio) {
        self.unsplittable = Some(folio);
    }

    /// Selects folios that were not used recently, up to about `pages` pages. Skips folios that
    /// were examined in this turn of the clock. Ages the other folios.
    pub(crate) fn cold(held: FolioLocked<'l>, turn: Turn, pages: u32) -> Self {
        Self { choice: Choice::Cold, held: Some(held), turn, left: pages, ..Self::ALL }
    }

    /// Selects folios that are passing ([`crate::folio::Age::Passing`]), up to about `pages` pages.
    /// Does not change the age of other folios.
    pub(crate) fn passing(held: FolioLocked<'l>, pages: u32) -> Self {
        Self { choice: Choice::Passing, held: Some(held), left: pages, ..Self::ALL }
    }

    /// Whether the folio is the one that the caller holds.
    #[inline]
    pub(super) fn holds(&self, folio: Folio) -> bool {
        self.held.is_some_and(|held| *held == folio)
    }

    /// Whether a later scan may find more folios.
    pub(crate) fn may_find_more(&self) -> bool {
        self.later
    }

    /// Whether the caller's folio could be swapped out only in single pages.
    pub(crate) fn is_held_to_be_cut(&self) -> bool {
        self.cut_held
    }

    /// Whether the scan swapped out the caller's folio.
    pub(crate) fn swapped_held(&self) -> bool {
        self.swapped_held
    }
}
