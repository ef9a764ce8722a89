//! Pages that come back while a program goes through its memory in order: they go first.
//!
//! A loop over more than fits in memory, or a scan beside other work, needs a page once and then all
//! the others before it needs that one again. The clock would keep what was used last, which is what
//! the scan has behind it, and evict what it comes to next. So faults that go on in order are noticed,
//! and what they bring back is *passing* ([`crate::frame::Age`]). The last of these folios are in a
//! ring, by their frames, from where reclaim takes them ([`crate::reclaim`]) before the clock moves.
//!
//! ```text
//! faults on     100  101  300  102  301  103  105  ...
//! in order        0    1    0    2    1    3    4      passing from the third on
//! ring                                   103  105      the last few stay
//! ```
//!
//! The clock has its share nevertheless: each passing page that is missed after it was sent out so
//! gives the hand a frame to pass. A loop over what would fit, if only cold pages of others went, gets
//! their frames; in a loop over more than fits, the hand finds that all pages are used, and none of
//! them goes.
//!
//! All is a hint: threads that note pages at once may lose some.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::Memory;
use crate::addr::Frame;
use crate::frame::{Age, Folio};
use crate::platform::Platform;

/// How many ways through memory are followed at once.
const WAYS: usize = 4;
/// A fault at most so many pages after the last one of a way goes on with it: those between are in
/// memory.
const NEAR: u64 = 16;
/// Faults after the first that make a way.
const FAULTS: u64 = 3;
/// Where the number of faults begins in a way; below is the page.
const COUNT_SHIFT: u32 = 56;
/// Folios that the ring has room for.
const RING: u32 = 128;
/// The last passing folios, which stay: programs may still be at work there.
const LATEST: u32 = 8;
/// The most frames that the hand passes at a time because pages were missed.
const MOST_MISSED: u32 = 64;

/// The ways that faults go, and the folios that they have passed.
pub(crate) struct Passing {
    /// The last page of each way, and how many faults went on with it. The last one used is the first.
    ways: [AtomicU64; WAYS],
    /// The numbers of frames, one after the other and again from the first.
    ring: [AtomicU32; RING as usize],
    /// How many were entered.
    entered: AtomicU32,
    /// How many were taken or have been lost.
    taken: AtomicU32,
    /// Passing pages that were missed after they went out.
    missed: AtomicU32,
}

impl Passing {
    pub(super) const fn new() -> Self {
        Self {
            ways: [const { AtomicU64::new(0) }; WAYS],
            ring: [const { AtomicU32::new(0) }; RING as usize],
            entered: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            missed: AtomicU32::new(0),
        }
    }

    /// A fault brings `count` pages back, the first of which has that number, in whatever numbering
    /// its memory has. Says whether it goes through memory in order.
    pub(crate) fn note_fault(&self, page: u64, count: u32) -> bool {
        let page = page & ((1 << COUNT_SHIFT) - 1);
        let end = page + u64::from(count) - 1;
        let mut faults = 0;
        let mut moved = end;
        for way in &self.ways {
            let found = way.load(Relaxed);
            let last = found & ((1 << COUNT_SHIFT) - 1);
            let goes_on = page.wrapping_sub(last + 1) < NEAR;
            if goes_on {
                faults = ((found >> COUNT_SHIFT) + 1).min(FAULTS);
            }
            // The others move back by one, up to the place of this one.
            way.store(moved, Relaxed);
            moved = found;
            if goes_on {
                break;
            }
        }
        self.ways[0].store(end | faults << COUNT_SHIFT, Relaxed);
        faults == FAULTS
    }

    /// Enters a folio that is passing.
    pub(crate) fn enter(&self, head: Frame) {
        let at = self.entered.fetch_add(1, Relaxed);
        self.ring[(at % RING) as usize].store(head.0, Relaxed);
    }

    /// The folio that was entered first and is not one of the last. It may be anything by now.
    pub(crate) fn take(&self) -> Option<Frame> {
        let entered = self.entered.load(Relaxed);
        let mut taken = self.taken.load(Relaxed);
        if entered.wrapping_sub(taken) > RING {
            taken = entered.wrapping_sub(RING);
        }
        if entered.wrapping_sub(taken) <= LATEST {
            return None;
        }
        self.taken.store(taken.wrapping_add(1), Relaxed);
        Some(Frame(self.ring[(taken % RING) as usize].load(Relaxed)))
    }

    /// How many folios may be taken.
    pub(crate) fn waiting(&self) -> u64 {
        let waiting = self.entered.load(Relaxed).wrapping_sub(self.taken.load(Relaxed)).min(RING);
        u64::from(waiting.saturating_sub(LATEST))
    }

    /// Notes that so many pages came back that went out as passing.
    pub(crate) fn note_missed(&self, pages: u32) {
        self.missed.fetch_add(pages, Relaxed);
    }

    /// How many frames the hand is to pass because pages were missed since the last time.
    pub(crate) fn take_missed(&self) -> u32 {
        if self.missed.load(Relaxed) == 0 {
            return 0;
        }
        self.missed.swap(0, Relaxed).min(MOST_MISSED)
    }
}

impl<P: Platform> Memory<P> {
    /// A fault has the folio read, whose first page has that number, in whatever numbering its memory
    /// has: the folio is passing if the fault goes on where others went. The caller has a reference
    /// to it.
    #[inline(never)]
    pub(crate) fn note_way(&self, folio: Folio, page: u64) {
        let passing = &self.clock.passing;
        if passing.note_fault(page, folio.pages()) {
            self.frames.set_age(folio, Age::Passing);
            passing.enter(folio.head);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn passing_faults(passing: &Passing, pages: impl IntoIterator<Item = u64>) -> Vec<u64> {
        pages.into_iter().filter(|page| passing.note_fault(*page, 1)).collect()
    }

    #[test]
    fn the_fourth_fault_in_order_is_passing() {
        let passing = Passing::new();
        assert_eq!(passing_faults(&passing, 100..106), [103, 104, 105]);
        assert_eq!(passing_faults(&passing, [121, 137, 154]), [121, 137], "sixteen pages on");
        let passing = Passing::new();
        assert_eq!(passing_faults(&passing, (100..200).rev()), [], "backwards");
        assert_eq!(passing_faults(&passing, [7; 100]), [], "the same page");
    }

    #[test]
    fn several_ways_are_followed_at_once_beside_faults_anywhere() {
        let passing = Passing::new();
        let ways = (0..50).flat_map(|page| [1_000 + page, 2_000 + page, 3_000 + page]);
        assert_eq!(passing_faults(&passing, ways).len(), 3 * 47);
        let passing = Passing::new();
        let scan =
            (0..50).flat_map(|page| [1_000 + page, (page + 2) * 7_919_000, page * 104_729_000]);
        assert_eq!(passing_faults(&passing, scan).len(), 47);
    }

    #[test]
    fn a_folio_counts_with_all_its_pages() {
        let passing = Passing::new();
        let faults: Vec<bool> = (0..5).map(|folio| passing.note_fault(folio * 64, 64)).collect();
        assert_eq!(faults, [false, false, false, true, true]);
    }

    #[test]
    fn the_ring_gives_the_oldest_and_keeps_the_last() {
        let passing = Passing::new();
        assert_eq!(passing.take(), None);
        for frame in 0..20 {
            passing.enter(Frame(frame));
        }
        let taken: Vec<u32> = core::iter::from_fn(|| passing.take()).map(|frame| frame.0).collect();
        assert_eq!(taken, (0..12).collect::<Vec<_>>());
        for frame in 20..500 {
            passing.enter(Frame(frame));
        }
        assert_eq!(passing.take(), Some(Frame(500 - RING)));
    }

    #[test]
    fn missed_pages_are_told_once_and_not_too_many() {
        let passing = Passing::new();
        passing.note_missed(5);
        assert_eq!((passing.take_missed(), passing.take_missed()), (5, 0));
        passing.note_missed(u32::MAX);
        assert_eq!(passing.take_missed(), MOST_MISSED);
    }
}
