//! The choice of victims: how reclaim evaluates its observations of a folio.
//!
//! This file makes every decision about age. Page tables and objects report whether a folio was
//! used; the swap slots report how long it was evicted.
//!
//! ```text
//!              cold        referenced   hot        passing
//! used         referenced  hot          hot        referenced
//! not used     evicted     evicted      cold       evicted
//! ```
//!
//! | a folio comes into memory | as |
//! |---|---|
//! | for the first time, or after long | cold |
//! | soon after it went out: before half as many went out as there are frames in use | hot |
//! | by faults that go through memory in order | passing, however soon |
//!
//! A call that copies from a folio, such as `read(2)`, makes a cold folio referenced and a
//! referenced folio hot.
//!
//! A *passing* folio was accessed by a program that proceeds through its memory in order. The
//! program most likely needs all its other folios before this one again, and these would otherwise
//! be evicted instead. So passing folios are evicted first ([`crate::reclaim`]), although they were
//! used most recently.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::handle::{FolioHandle, change_flag};
use crate::frame::meta::{HOT, LOOKED, REFERENCED};
use crate::platform::Platform;

/// The use of a folio, as far as reclaim knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Age {
    /// The folio was not found used.
    Cold,
    /// The folio was used between the last two scans.
    Referenced,
    /// The folio was used before each of two scans, or was needed soon after its eviction.
    Hot,
    /// The folio was needed by a program that proceeds from page to page.
    Passing,
}

/// Whether reclaim may evict a folio that it has examined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Eviction {
    /// Reclaim may evict the folio now.
    May,
    /// Not in this turn: the folio was used, or was hot until now.
    Later,
}

/// A turn of reclaim's clock, identified by the parity of its number. Each turn examines a folio
/// once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    Even,
    Odd,
}

impl Age {
    const BITS: u32 = REFERENCED | HOT;

    const fn of(state: u32) -> Self {
        match (state & HOT != 0, state & REFERENCED != 0) {
            (false, false) => Self::Cold,
            (false, true) => Self::Referenced,
            (true, false) => Self::Hot,
            (true, true) => Self::Passing,
        }
    }

    const fn bits(self) -> u32 {
        match self {
            Self::Cold => 0,
            Self::Referenced => REFERENCED,
            Self::Hot => HOT,
            Self::Passing => REFERENCED | HOT,
        }
    }

    /// The age of a folio that is read from swap, unless it is passing: `distance` pages were
    /// evicted after it, and `used` frames are in use.
    pub(crate) const fn of_return(distance: u32, used: u32) -> Self {
        if distance < used / 2 { Self::Hot } else { Self::Cold }
    }

    /// The age after another examination, given whether the folio was used since the previous one.
    /// `None`: evict the folio.
    const fn after_look(self, used: bool) -> Option<Self> {
        match (self, used) {
            (Self::Cold | Self::Passing, true) => Some(Self::Referenced),
            (Self::Referenced | Self::Hot, true) => Some(Self::Hot),
            (Self::Hot, false) => Some(Self::Cold),
            (Self::Cold | Self::Referenced | Self::Passing, false) => None,
        }
    }
}

/// The bits of a folio's state that serve the choice of victims.
#[derive(Clone, Copy)]
pub(crate) struct ReclaimState<'a>(pub(super) &'a AtomicU32);

impl<'a, P: Platform> FolioHandle<'a, P> {
    /// The bits that serve the choice of victims.
    #[inline(always)]
    pub(crate) fn reclaim_state(self) -> ReclaimState<'a> {
        ReclaimState(self.state())
    }
}

impl ReclaimState<'_> {
    /// The recorded use of the folio.
    pub(crate) fn age(self) -> Age {
        Age::of(self.0.load(Relaxed))
    }

    /// Records the folio's use.
    pub(crate) fn set_age(self, age: Age) {
        let state = self.0;
        let changed = (state.load(Relaxed) & Age::BITS) ^ age.bits();
        if changed != 0 {
            // One step, because every value of the two bits has a meaning. Two concurrent changes
            // may leave an age that neither thread intended; that is their only effect.
            state.fetch_xor(changed, Relaxed);
        }
    }

    /// Updates the age after another examination of the folio, given whether it was used since the
    /// previous one. Returns whether the folio may be evicted.
    pub(crate) fn update_age(self, used: bool) -> Eviction {
        match self.age().after_look(used) {
            Some(age) => {
                self.set_age(age);
                Eviction::Later
            }
            None => Eviction::May,
        }
    }

    /// Records that a call has read from the folio, because page table entries record only the
    /// accesses of programs. A folio that is read twice between two examinations is hot; a folio
    /// that is read once is evicted as if it had not been read (Linux: `mark_page_accessed`). A
    /// passing folio remains passing if the read continues the previous one.
    pub(crate) fn note_read(self, goes_on: bool) {
        let age = match self.age() {
            Age::Passing if goes_on => Age::Passing,
            Age::Cold | Age::Passing => Age::Referenced,
            Age::Referenced | Age::Hot => Age::Hot,
        };
        self.set_age(age);
    }

    /// Whether reclaim has examined the folio in this turn of its clock.
    pub(crate) fn is_looked_at(self, turn: Turn) -> bool {
        let looked = self.0.load(Relaxed) & LOOKED != 0;
        looked == (turn == Turn::Odd)
    }

    /// Records that reclaim has examined the folio in this turn.
    pub(crate) fn note_look(self, turn: Turn) {
        change_flag(self.0, LOOKED, turn == Turn::Odd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folio_ages_by_two_looks() {
        let looks =
            |age: Age, used: &[bool]| used.iter().try_fold(age, |age, used| age.after_look(*used));
        assert_eq!(looks(Age::Cold, &[true, true, true]), Some(Age::Hot));
        assert_eq!(looks(Age::Hot, &[false]), Some(Age::Cold));
        for gone in [&[false][..], &[true, false], &[true, true, false, false]] {
            assert_eq!(looks(Age::Cold, gone), None, "{gone:?}");
        }
        assert_eq!(looks(Age::Passing, &[false]), None);
        assert_eq!(looks(Age::Passing, &[true]), Some(Age::Referenced));
    }

    #[test]
    fn an_age_is_two_bits_of_the_state() {
        for age in [Age::Cold, Age::Referenced, Age::Hot, Age::Passing] {
            assert_eq!(Age::of(age.bits() | LOOKED), age);
        }
    }
}
