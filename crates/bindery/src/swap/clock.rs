//! The clock of reclaim: its hand passes over the frames, and it measures for how long a page was
//! evicted.

use super::exhausted::Exhausted;
use super::passing::Passing;
use crate::folio::{Age, Turn};
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// A bit of the count of evicted pages, set while passing folios are swapped out, so that their
/// shadows contain it. (After two billion pages the carry sets the bit; the next sweep clears it.)
const SWEEPS: u32 = 1 << 31;

/// A CPU adds its evicted pages to the clock when it has counted this number.
const FOLDED: u32 = 64;
/// More than the evicted pages that all CPUs together have not added yet: each CPU adds them once
/// it has [`FOLDED`], and a folio has at most 512 pages.
const UNSEEN: u32 = crate::platform::MAX_CPUS as u32 * (FOLDED + 512);

/// Evicted pages that one CPU has counted but not yet added to the clock. The CPU's own shadows and
/// ages include them; those of another CPU are therefore wrong by fewer than [`FOLDED`] pages for
/// each such CPU.
pub(super) struct Evictions(AtomicU32);

impl Evictions {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
}

/// The position of reclaim and the number of pages that it has evicted so far.
pub(crate) struct Clock {
    /// The frame at which the next scan begins, counted from the first frame of the memory.
    hand: AtomicU64,
    /// The number of evicted pages, below [`SWEEPS`]. The shadow of an evicted page is a reading of
    /// this count.
    evicted: AtomicU32,
    /// The number of frames in use when memory was last reclaimed; 0 before that.
    used: AtomicU32,
    /// Up to this position, the hand also examines folios that were locked into memory.
    look_at_all: AtomicU64,
    /// Folios that are reclaimed before the hand finds them.
    pub(crate) passing: Passing,
    /// Set after a whole turn in which nothing was found.
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

    /// Takes the next `count` of `all` frames for a scan, but no frames of the next turn; no other
    /// CPU scans them in this turn. Returns their numbers and the turn. A step across the end would
    /// begin the next turn in the middle and skip the frames before it.
    pub(crate) fn advance(&self, count: u32, all: u32) -> (Range<u32>, Turn) {
        let (count, all) = (u64::from(count), u64::from(all.max(1)));
        let end = |at: u64| (at + count).min((at / all + 1) * all);
        let at = match self.hand.fetch_update(Relaxed, Relaxed, |at| Some(end(at))) {
            Ok(at) | Err(at) => at,
        };
        let turn = if (at / all).is_multiple_of(2) { Turn::Even } else { Turn::Odd };
        let first = (at % all) as u32;
        (first..first + (end(at) - at) as u32, turn)
    }

    /// The total distance of the hand, over all turns.
    pub(crate) fn hand(&self) -> u64 {
        self.hand.load(Relaxed)
    }

    /// Records that pages were unlocked from memory, which has `all` frames.
    #[cold]
    pub(crate) fn note_unlocked(&self, all: u32) {
        self.exhausted.forget();
        self.look_at_all(all);
    }

    /// Makes the hand examine all folios for one turn of `all` frames.
    pub(crate) fn look_at_all(&self, all: u32) {
        self.look_at_all.fetch_max(self.hand() + u64::from(all), Relaxed);
    }

    /// Whether the hand examines all folios. This includes the step at which the turn ends, because
    /// another CPU may have been in that step and may have marked a folio that it had just found
    /// locked.
    pub(crate) fn looks_at_all(&self) -> bool {
        self.hand() <= self.look_at_all.load(Relaxed)
    }

    /// Adds `pages` evicted pages. `own` is the counter of the caller's CPU.
    #[inline]
    pub(super) fn note_evicted(&self, own: Option<&Evictions>, pages: u32) {
        match own {
            None => _ = self.evicted.fetch_add(pages, Relaxed),
            Some(own) if own.0.fetch_add(pages, Relaxed) + pages < FOLDED => {}
            Some(own) => self.fold(own),
        }
    }

    /// Adds the evicted pages that a CPU has counted.
    #[cold]
    pub(super) fn fold(&self, own: &Evictions) {
        self.evicted.fetch_add(own.0.swap(0, Relaxed), Relaxed);
    }

    /// The shadow for the slot of an evicted page.
    pub(super) fn shadow(&self, own: Option<&Evictions>) -> u32 {
        let pending = own.map_or(0, |own| own.0.load(Relaxed));
        self.evicted.load(Relaxed).wrapping_add(pending)
    }

    /// Records the number of frames in use as reclaim begins.
    pub(crate) fn note_use(&self, frames: u64) {
        self.used.store(u32::try_from(frames).unwrap_or(u32::MAX), Relaxed);
    }

    /// Whether memory has ever been reclaimed; before that, the age of pages is not needed.
    #[inline]
    pub(crate) fn has_reclaimed(&self) -> bool {
        self.used.load(Relaxed) != 0
    }

    /// Marks the shadows of pages swapped out from now on as passing, until [`Clock::end_sweep`].
    pub(crate) fn begin_sweep(&self) {
        self.evicted.fetch_or(SWEEPS, Relaxed);
    }

    /// Ends [`Clock::begin_sweep`]: pages swapped out later follow the order of the clock.
    pub(crate) fn end_sweep(&self) {
        self.evicted.fetch_and(!SWEEPS, Relaxed);
    }

    /// Records that `pages` pages with this shadow are in memory again. Returns their initial age,
    /// before their fault counts. The number of pages evicted since then is the number by which
    /// memory is too small for these pages (Linux: the refault distance of `workingset.c`).
    pub(super) fn note_return(&self, own: Option<&Evictions>, shadow: u32, pages: u32) -> Age {
        if shadow & SWEEPS != 0 {
            self.passing.note_missed(pages);
        }
        let distance = self.shadow(own).wrapping_sub(shadow) & !SWEEPS;
        // The CPU of the shadow may have counted pages that this CPU does not see yet.
        let distance = if distance >= SWEEPS - UNSEEN { 0 } else { distance };
        Age::of_return(distance, self.used.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_turn_passes_all_frames_once() {
        for all in [1, 63, 64, 100, 130] {
            let clock = Clock::new();
            for turn in [Turn::Even, Turn::Odd, Turn::Even] {
                let mut passed = 0;
                while passed < all {
                    assert_eq!(clock.hand() % u64::from(all), u64::from(passed));
                    let (step, of) = clock.advance(64, all);
                    assert!(step.start == passed && step.end <= all, "{step:?} of {all}");
                    assert!(of == turn && !step.is_empty(), "{step:?} of {all}");
                    passed = step.end;
                }
            }
        }
    }

    #[test]
    fn a_page_missed_soon_is_hot() {
        let clock = Clock::new();
        assert!(!clock.has_reclaimed());
        clock.note_use(200);
        assert!(clock.has_reclaimed());
        let shadow = clock.shadow(None);
        clock.note_evicted(None, 99);
        assert_eq!(clock.note_return(None, shadow, 1), Age::Hot);
        clock.note_evicted(None, 1);
        assert_eq!(clock.note_return(None, shadow, 1), Age::Cold);
    }

    #[test]
    fn a_cpu_counts_its_own_evictions_at_once() {
        let (clock, here, there) = (Clock::new(), Evictions::new(), Evictions::new());
        // Pages are cold after ten evictions.
        clock.note_use(20);
        let before = clock.shadow(Some(&here));
        clock.note_evicted(Some(&here), 9);
        // The other CPU does not see these evictions yet, and finds a shadow from the future.
        assert_eq!((clock.shadow(None), clock.shadow(Some(&there))), (before, before));
        let ahead = clock.shadow(Some(&here));
        assert_eq!(clock.note_return(Some(&there), ahead, 1), Age::Hot);
        assert_eq!(clock.note_return(Some(&here), before, 1), Age::Hot);
        clock.note_evicted(Some(&here), 1);
        assert_eq!(clock.note_return(Some(&here), before, 1), Age::Cold);
        clock.note_evicted(Some(&here), FOLDED);
        assert_eq!(clock.shadow(None), before + 10 + FOLDED);
        clock.note_evicted(Some(&there), 5);
        clock.fold(&there);
        assert_eq!(clock.shadow(Some(&here)), before + 15 + FOLDED);
    }

    #[test]
    fn pages_evicted_in_a_sweep_are_missed() {
        let clock = Clock::new();
        clock.note_use(200);
        let before = clock.shadow(None);
        clock.begin_sweep();
        let shadow = clock.shadow(None);
        clock.note_evicted(None, 50);
        assert_eq!(clock.note_return(None, shadow, 4), Age::Hot);
        clock.end_sweep();
        assert_eq!(clock.note_return(None, shadow, 1), Age::Hot);
        assert_eq!(clock.note_return(None, before, 1), Age::Hot);
        assert_eq!(clock.passing.take_missed(), 5);
    }
}
