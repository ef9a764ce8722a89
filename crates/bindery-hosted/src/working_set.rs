//! Working sets larger than memory: the order in which their pages are visited, and the minimum
//! number of page moves that an optimal choice of victims needs.

use std::collections::BTreeSet;

/// The order in which a program visits the pages of its memory, determined by a seed.
///
/// `programs/include/pattern.h` implements the same patterns in C; a test compares both.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pattern {
    /// One page after the other, repeatedly from the first.
    Sequential,
    /// All pages are equally likely.
    Random,
    /// Four visits in five are to the *hot* pages, the first fifth of all.
    Hot80,
    /// Nineteen visits in twenty are to the hot pages.
    Hot95,
    /// The page of rank k is visited k times less often than the page of rank 1.
    Zipf,
    /// Every second visit is to a hot page; the others pass through the rest in order.
    Scan,
}

/// Mixes the bits of a number.
const fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 31).wrapping_mul(0x7fb5_d329_728e_a185);
    let value = (value ^ value >> 27).wrapping_mul(0x81da_def4_bc2d_d44d);
    value ^ value >> 33
}

/// Number `at` of the random numbers of a key.
const fn word(key: u64, at: u64) -> u64 {
    mix(key.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

impl Pattern {
    /// All patterns.
    pub const ALL: [Self; 6] =
        [Self::Sequential, Self::Random, Self::Hot80, Self::Hot95, Self::Zipf, Self::Scan];

    /// The page of the visit. O(1).
    ///
    /// # Panics
    /// If there are fewer than five pages.
    pub fn page(self, pages: u64, seed: u64, visit: u64) -> u64 {
        let (choice, place) = (word(seed, 2 * visit), word(seed, 2 * visit + 1));
        let hot = pages / 5;
        let (in_hot, in_rest) = (place % hot, hot + place % (pages - hot));
        match self {
            Self::Sequential => visit % pages,
            Self::Random => place % pages,
            Self::Hot80 if choice % 10 < 8 => in_hot,
            Self::Hot95 if choice % 20 < 19 => in_hot,
            Self::Hot80 | Self::Hot95 => in_rest,
            // Each power of two is equally likely, and so is each rank between two powers. A prime
            // scatters the ranks over the pages.
            Self::Zipf => {
                let power = 1_u64 << (choice % u64::from(pages.ilog2() + 1));
                let rank = power + place % power;
                let rank = if rank > pages { rank / 2 } else { rank };
                rank.wrapping_mul(2_654_435_761) % pages
            }
            Self::Scan if visit.is_multiple_of(2) => in_hot,
            Self::Scan => hot + visit / 2 % (pages - hot),
        }
    }

    /// The pages that `programs/workloads/working_set.c` touches: first all pages in order, then
    /// `passes` times as many visits as pages in the order of the pattern, and finally all pages in
    /// order again.
    pub fn trace(self, pages: u64, passes: u64, seed: u64) -> impl Iterator<Item = u64> {
        let visits = (0..pages * passes).map(move |visit| self.page(pages, seed, visit));
        (0..pages).chain(visits).chain(0..pages)
    }
}

/// Pages moved between memory and swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PagesMoved {
    /// From swap.
    pub into_memory: u64,
    /// To swap.
    pub out: u64,
}

impl PagesMoved {
    /// In both directions.
    pub fn all(self) -> u64 {
        self.into_memory + self.out
    }
}

/// The number of pages moved if the victim is always the page whose next use is farthest away
/// (Belady's MIN), which is the minimum. A page in memory has no copy in swap, and pages are
/// swapped in on demand. Without frames, no page is moved.
///
/// Complexity: O(n log n) in the length of the trace.
pub fn fewest_moved(trace: &[u64], frames: u64) -> PagesMoved {
    let pages = trace.iter().max().map_or(0, |page| *page as usize + 1);
    // For each visit, the time of the next visit of its page.
    let mut next = vec![usize::MAX; trace.len()];
    let mut last = vec![usize::MAX; pages];
    for (visit, page) in trace.iter().enumerate().rev() {
        next[visit] = std::mem::replace(&mut last[*page as usize], visit);
    }
    let mut moved = PagesMoved::default();
    let mut in_memory = BTreeSet::new();
    let mut was_touched = vec![false; pages];
    for (visit, page) in trace.iter().enumerate().take(if frames == 0 { 0 } else { usize::MAX }) {
        if !in_memory.remove(&(visit, *page)) {
            moved.into_memory += u64::from(was_touched[*page as usize]);
            was_touched[*page as usize] = true;
            if in_memory.len() as u64 == frames {
                in_memory.pop_last();
                moved.out += 1;
            }
        }
        in_memory.insert((next[visit], *page));
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 1_000;

    /// The number of visits of each page in 200 passes.
    fn visits(pattern: Pattern) -> Vec<u64> {
        let mut visits = vec![0; PAGES as usize];
        for visit in 0..200 * PAGES {
            visits[pattern.page(PAGES, 16, visit) as usize] += 1;
        }
        visits
    }

    #[test]
    fn hot_pages_get_the_visits_of_the_pattern() {
        for (pattern, percent) in
            [(Pattern::Random, 20), (Pattern::Hot80, 80), (Pattern::Hot95, 95), (Pattern::Scan, 50)]
        {
            let visits = visits(pattern);
            let hot: u64 = visits[..PAGES as usize / 5].iter().sum();
            assert!(hot.abs_diff(percent * 2_000) < 1_000, "{pattern:?}: {hot}");
            assert!(visits.iter().all(|visits| *visits > 0), "{pattern:?} leaves a page out");
        }
    }

    #[test]
    fn ranks_get_visits_by_the_law_of_zipf() {
        let mut visits = visits(Pattern::Zipf);
        visits.sort_unstable_by(|one, other| other.cmp(one));
        // Ranks from 1 to 1000 in ten powers of two: each has a tenth of 200,000 visits.
        let of_powers = [visits[0], visits[1..3].iter().sum(), visits[3..7].iter().sum()];
        assert!(of_powers.iter().all(|visits| visits.abs_diff(20_000) < 1_000), "{of_powers:?}");
        assert!(visits[999] > 0 && visits[999] < visits[0] / 200, "{}", visits[999]);
    }

    #[test]
    fn the_page_that_is_needed_last_goes_out() {
        // The example of textbooks: nine faults with three frames.
        let trace = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        let moved = fewest_moved(&trace, 3);
        // Six pages are accessed for the first time, so three faults swap a page in.
        assert_eq!(moved, PagesMoved { into_memory: 3, out: 6 });
        assert_eq!(fewest_moved(&trace, 6).all(), 0);
        assert_eq!(fewest_moved(&[], 3).all() + fewest_moved(&trace, 0).all(), 0);
    }
}
