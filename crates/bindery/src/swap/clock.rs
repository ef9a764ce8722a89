//! The clock by which reclaim goes over the frames, and by which it tells how long a page was away.

use super::exhausted::Exhausted;
use super::passing::Passing;
use crate::frame::{Age, Turn};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Set in the number of evicted pages while passing folios are sent out, so that their shadows have
/// it. (After two billion pages the carry sets it; the next sweep clears it.)
const SWEEPS: u32 = 1 << 31;

/// Where reclaim looks next, and how much it has evicted so far.
pub(crate) struct Clock {
    /// The frame at which the next look begins, counted from the first of the memory.
    hand: AtomicU64,
    /// Pages that were evicted, below [`SWEEPS`]. Shadows of evicted pages are readings of it.
    evicted: AtomicU32,
    /// Frames that were in use when memory was last reclaimed; 0 until it first is.
    used: AtomicU32,
    /// Until the hand is here, it passes over no folio that was locked into memory.
    look_at_all: AtomicU64,
    /// Folios that go before the hand finds them.
    pub(crate) passing: Passing,
    /// A whole turn has found nothing.
    pub(crate) exhausted: Exhausted,
}

impl Clock {
    pub(crate) const fn new() -> Self {
        Self {
            hand: AtomicU64::new(0),
            evicted: AtomicU32::new(0),
            used: AtomicU32::new(0),
            look_at_all: AtomicU64::new(0),
            passing: Passing::new(),
            exhausted: Exhausted::new(),
        }
    }

    /// Takes the next `count` of `all` frames for a look: nobody else looks at them in this turn.
    /// Returns the number of the first, and which turn it is.
    pub(crate) fn advance(&self, count: u32, all: u32) -> (u32, Turn) {
        let at = self.hand.fetch_add(u64::from(count), Relaxed);
        let all = u64::from(all.max(1));
        let turn = if (at / all).is_multiple_of(2) { Turn::Even } else { Turn::Odd };
        ((at % all) as u32, turn)
    }

    /// How far the hand has come, in all turns.
    pub(crate) fn hand(&self) -> u64 {
        self.hand.load(Relaxed)
    }

    /// The hand looks at all folios for a turn, of `all` frames.
    pub(crate) fn look_at_all(&self, all: u32) {
        self.look_at_all.fetch_max(self.hand() + u64::from(all), Relaxed);
    }

    /// Whether the hand looks at all folios. The step at which the turn ends is one of them: another CPU
    /// may have been in it, and have marked what it has just found locked.
    pub(crate) fn looks_at_all(&self) -> bool {
        self.hand() <= self.look_at_all.load(Relaxed)
    }

    /// Notes that `pages` pages were evicted.
    pub(crate) fn note_evicted(&self, pages: u32) {
        self.evicted.fetch_add(pages, Relaxed);
    }

    /// What an evicted page's slot remembers.
    pub(crate) fn shadow(&self) -> u32 {
        self.evicted.load(Relaxed)
    }

    /// Notes that reclaim begins while so many frames are in use.
    pub(crate) fn note_use(&self, frames: u64) {
        self.used.store(u32::try_from(frames).unwrap_or(u32::MAX), Relaxed);
    }

    /// Whether memory has been reclaimed: until then, nothing needs to know how old pages are.
    #[inline]
    pub(crate) fn has_reclaimed(&self) -> bool {
        self.used.load(Relaxed) != 0
    }

    /// From now on until [`Clock::end_sweep`], what goes out is noted to be passing.
    pub(crate) fn begin_sweep(&self) {
        self.evicted.fetch_or(SWEEPS, Relaxed);
    }

    /// What goes out from now on goes in the order of the clock.
    pub(crate) fn end_sweep(&self) {
        self.evicted.fetch_and(!SWEEPS, Relaxed);
    }

    /// `pages` pages come back that left this shadow. Says how old they are, but for what their fault
    /// tells. By how many pages were evicted since, memory is too small for them (Linux: the refault
    /// distance of `workingset.c`).
    pub(crate) fn note_return(&self, shadow: u32, pages: u32) -> Age {
        if shadow & SWEEPS != 0 {
            self.passing.note_missed(pages);
        }
        let distance = self.evicted.load(Relaxed).wrapping_sub(shadow) & !SWEEPS;
        Age::of_return(distance, self.used.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_hot_if_less_went_out_since_than_half_of_what_is_used() {
        let clock = Clock::new();
        assert!(!clock.has_reclaimed());
        clock.note_use(200);
        assert!(clock.has_reclaimed());
        let shadow = clock.shadow();
        clock.note_evicted(99);
        assert_eq!(clock.note_return(shadow, 1), Age::Hot);
        clock.note_evicted(1);
        assert_eq!(clock.note_return(shadow, 1), Age::Cold);
    }

    #[test]
    fn pages_that_went_out_in_a_sweep_are_missed() {
        let clock = Clock::new();
        clock.note_use(200);
        let before = clock.shadow();
        clock.begin_sweep();
        let shadow = clock.shadow();
        clock.note_evicted(50);
        assert_eq!(clock.note_return(shadow, 4), Age::Hot);
        clock.end_sweep();
        assert_eq!(clock.note_return(shadow, 1), Age::Hot);
        assert_eq!(clock.note_return(before, 1), Age::Hot);
        assert_eq!(clock.passing.take_missed(), 5);
    }
}
