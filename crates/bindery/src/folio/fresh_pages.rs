//! Fresh folios of one page that are filled one by one, and mapped or discarded together.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use arrayvec::ArrayVec;

use super::fresh::FreshFolio;
use super::handle::{Folio, OnePage};
use super::owner::{FolioIndex, LiveOwner};
use crate::frame::Frames;
use crate::platform::Platform;

/// At most `N` fresh folios of one page. They are mapped in order, each once; the frames of the
/// others are lost unless they are discarded.
#[must_use = "fresh folios must be mapped or discarded"]
pub(crate) struct FreshPages<'a, P: Platform, const N: usize> {
    frames: &'a Frames<P>,
    pages: ArrayVec<OnePage, N>,
    /// The first so many are mapped.
    mapped: usize,
}

impl<'a, P: Platform, const N: usize> FreshPages<'a, P, N> {
    #[inline(always)]
    pub(crate) fn new(frames: &'a Frames<P>) -> Self {
        Self { frames, pages: ArrayVec::new(), mapped: 0 }
    }

    /// How many there are, mapped or not.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Adds a folio, which has one page. Discards one for which there is no room.
    #[inline(always)]
    pub(crate) fn push(&mut self, fresh: FreshFolio<'a, P>) {
        match OnePage::of(*fresh) {
            Some(page) if !self.pages.is_full() => {
                fresh.leave();
                self.pages.push(page);
            }
            _ => fresh.discard(),
        }
    }

    /// Those that are not mapped yet.
    #[inline(always)]
    pub(crate) fn left(&self) -> &[OnePage] {
        self.pages.get(self.mapped..).unwrap_or_default()
    }

    /// The first that is not mapped yet.
    #[inline(always)]
    pub(crate) fn first(&self) -> Option<Folio> {
        self.left().first().map(OnePage::folio)
    }

    /// Records the owner of those that are not mapped yet, with their indices from `first` on.
    #[inline(always)]
    pub(crate) fn set_owner(&self, owner: LiveOwner<'_>, first: u64) {
        for (page, index) in self.left().iter().zip(first..) {
            // SAFETY: 1. it was pushed, and is not mapped yet.
            let fresh = unsafe { self.frames.fresh(page.folio()) };
            fresh.set_owner(owner, FolioIndex::new(index));
            fresh.leave();
        }
    }

    /// Publishes the next `count` of them with one mapping each. Returns these.
    #[inline(always)]
    pub(crate) fn map(&mut self, count: usize) -> &[OnePage] {
        let mapped = self.pages.get(self.mapped..).unwrap_or_default();
        let mapped = &mapped[..count.min(mapped.len())];
        self.mapped += mapped.len();
        for page in mapped {
            // SAFETY: 1. it was pushed, and counts as mapped from here on.
            unsafe { self.frames.fresh(page.folio()) }.map(1);
        }
        mapped
    }

    /// Discards those that are not mapped.
    #[inline(always)]
    pub(crate) fn discard(self) {
        for page in self.left() {
            // SAFETY: 1. it was pushed, and was not mapped; this value ends here.
            unsafe { self.frames.fresh(page.folio()) }.discard();
        }
    }
}
