//! The clock by which reclaim goes over the frames, and by which it tells how long a page was away.

use super::exhausted::Exhausted;
use crate::frame::Turn;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Where reclaim looks next, and how much it has evicted so far.
pub(crate) struct Clock {
    /// The frame at which the next look begins, counted from the first of the memory.
    hand: AtomicU64,
    /// Pages that were evicted. Shadows of evicted pages are readings of it.
    evicted: AtomicU32,
    /// Pages that came back soon enough to be hot.
    pub(crate) refaulted: AtomicU64,
    /// A whole turn has found nothing.
    pub(crate) exhausted: Exhausted,
}

impl Clock {
    pub(crate) const fn new() -> Self {
        Self {
            hand: AtomicU64::new(0),
            evicted: AtomicU32::new(0),
            refaulted: AtomicU64::new(0),
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

    /// Notes that `pages` pages were evicted.
    pub(crate) fn note_evicted(&self, pages: u32) {
        self.evicted.fetch_add(pages, Relaxed);
    }

    /// What an evicted page's slot remembers.
    pub(crate) fn shadow(&self) -> u32 {
        self.evicted.load(Relaxed)
    }

    /// How many pages were evicted since the shadow was made: the page would have stayed in a
    /// memory that is larger by as many (Linux: the refault distance of `workingset.c`).
    pub(crate) fn distance(&self, shadow: u32) -> u32 {
        self.evicted.load(Relaxed).wrapping_sub(shadow)
    }
}
