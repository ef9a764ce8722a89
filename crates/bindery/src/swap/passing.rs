//! Pages that are swapped in while a program passes through its memory in order. They are evicted
//! first.
//!
//! A loop over more memory than fits, or a scan by another program, accesses a page once and then
//! all the other pages before it needs the page again. The clock would keep the most recently used
//! pages, which the scan has already passed, and evict those that it reaches next. So sequential
//! faults are detected, and the pages that they swap in are *passing* ([`crate::folio::Age`]). A
//! ring holds the frames of the latest of these folios. Reclaim takes them from there
//! ([`crate::reclaim`]) before the clock advances.
//!
//! ```text
//! faults on           100  101  300  102  301  103  105  ...
//! faults in order       1    2    1    3    2    4    5      passing from the fourth on
//! ring                                         103  105      the last few stay
//! ```
//!
//! The clock still advances: each passing page that is needed after its eviction advances the hand
//! by one frame. So a loop that would fit if cold pages of other programs were evicted gets their
//! frames. In a loop over more than fits, the hand finds all pages used and evicts none of them.
//!
//! All of this is a hint: concurrent threads may lose some notes.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::addr::Frame;
use crate::folio::{Age, Folio};
use crate::frame::Frames;
use crate::platform::Platform;

/// The number of sequences of faults that are tracked at once.
const WAYS: usize = 4;
/// The maximum distance, in pages, from the last fault of a sequence to one that continues it. The
/// pages in between are in memory.
const NEAR: u64 = 16;
/// The number of faults, after the first, that establish a sequence.
const FAULTS: u64 = 3;
/// The bits of a way from here on hold the number of faults; the bits below hold the page.
const COUNT_SHIFT: u32 = 56;
/// The capacity of the ring, in folios.
const RING: u32 = 128;
/// The number of latest passing folios that stay in memory, because programs may still be using
/// them.
const LATEST: u32 = 8;
/// The maximum number of frames that the hand passes at a time because of missed pages.
const MOST_MISSED: u32 = 64;

/// The sequences of faults, and the folios that they have passed.
pub(crate) struct Passing {
    /// The last page of each sequence and the number of faults that continued it, with the most
    /// recently continued sequence first.
    ways: [AtomicU64; WAYS],
    /// Numbers of frames, in a ring.
    ring: [AtomicU32; RING as usize],
    /// The number of folios entered.
    entered: AtomicU32,
    /// The number of folios taken or overwritten.
    taken: AtomicU32,
    /// The number of passing pages that were missed after their eviction.
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

    /// Records that a fault swapped in `count` pages from number `page` on, in any numbering of the
    /// program's memory. Returns whether the fault passes through memory in order.
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
            // The sequences that come before this one's old position move back by one.
            way.store(moved, Relaxed);
            moved = found;
            if goes_on {
                break;
            }
        }
        self.ways[0].store(end | faults << COUNT_SHIFT, Relaxed);
        faults == FAULTS
    }

    /// Enters a passing folio.
    pub(crate) fn enter(&self, head: Frame) {
        let at = self.entered.fetch_add(1, Relaxed);
        self.ring[(at % RING) as usize].store(head.0, Relaxed);
    }

    /// Takes the oldest entered folio, unless it is one of the latest. Its frame may have any use
    /// by now.
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

    /// The number of folios that may be taken.
    pub(crate) fn waiting(&self) -> u64 {
        let waiting = self.entered.load(Relaxed).wrapping_sub(self.taken.load(Relaxed)).min(RING);
        u64::from(waiting.saturating_sub(LATEST))
    }

    /// Records that `pages` passing pages were missed.
    pub(crate) fn note_missed(&self, pages: u32) {
        self.missed.fetch_add(pages, Relaxed);
    }

    /// The number of frames that the hand has to pass because of pages missed since the last call.
    pub(crate) fn take_missed(&self) -> u32 {
        if self.missed.load(Relaxed) == 0 {
            return 0;
        }
        self.missed.swap(0, Relaxed).min(MOST_MISSED)
    }

    /// Marks a folio that a fault has read as passing, if the fault continues a sequence. The
    /// folio's first page has the number `page`, in any numbering of the program's memory. The
    /// caller has a reference to the folio.
    #[inline(never)]
    pub(crate) fn note_way<P: Platform>(&self, frames: &Frames<P>, folio: Folio, page: u64) {
        if self.note_fault(page, folio.pages()) {
            frames.folio(folio).reclaim_state().set_age(Age::Passing);
            self.enter(folio.head);
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
    fn several_ways_are_followed_among_random_faults() {
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
    fn the_ring_yields_oldest_and_keeps_latest() {
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
    fn missed_pages_are_reported_once_in_bounds() {
        let passing = Passing::new();
        passing.note_missed(5);
        assert_eq!((passing.take_missed(), passing.take_missed()), (5, 0));
        passing.note_missed(u32::MAX);
        assert_eq!(passing.take_missed(), MOST_MISSED);
    }
}
