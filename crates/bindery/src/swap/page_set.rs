//! Sets of pages of a folio.

use super::bitmap::CLUSTER_SLOTS;

/// The number of pages in one word of a set.
const WORD_PAGES: u32 = u64::BITS;

/// A set of pages of one folio.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageSet([u64; (CLUSTER_SLOTS / WORD_PAGES) as usize]);

/// Consecutive pages of a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SetRun {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl SetRun {
    /// The page after the last.
    pub(crate) fn end(self) -> u32 {
        self.first + self.count
    }
}

impl PageSet {
    /// The maximum number of pages.
    pub(crate) const PAGES: u32 = CLUSTER_SLOTS;

    pub(crate) const EMPTY: Self = Self([0; (CLUSTER_SLOTS / WORD_PAGES) as usize]);

    /// Whether the page is in the set.
    #[inline]
    pub(crate) fn has(&self, page: u32) -> bool {
        self.0[(page / WORD_PAGES) as usize] >> (page % WORD_PAGES) & 1 != 0
    }

    /// Adds `count` pages from `first` on.
    pub(crate) fn add(&mut self, first: u32, count: u32) {
        for (word, mask) in masks(first, count) {
            self.0[word] |= mask;
        }
    }

    /// Removes `count` pages from `first` on.
    pub(crate) fn remove(&mut self, first: u32, count: u32) {
        for (word, mask) in masks(first, count) {
            self.0[word] &= !mask;
        }
    }

    /// The first run of pages in the set from `from` on. O(words passed).
    pub(crate) fn next_run(&self, from: u32) -> Option<SetRun> {
        let first = self.next_page(from, true)?;
        let end = self.next_page(first, false).unwrap_or(Self::PAGES);
        Some(SetRun { first, count: end - first })
    }

    /// The first page from `from` on that is in the set, or the first that is not.
    fn next_page(&self, from: u32, is_in: bool) -> Option<u32> {
        let skipped = (from / WORD_PAGES) as usize;
        let mut mask = u64::MAX << (from % WORD_PAGES);
        for (number, word) in self.0.iter().enumerate().skip(skipped) {
            let found = (if is_in { *word } else { !*word }) & mask;
            if found != 0 {
                return Some(number as u32 * WORD_PAGES + found.trailing_zeros());
            }
            mask = u64::MAX;
        }
        None
    }
}

/// The words that hold the bits of `count` pages from `first` on, each with a mask of these bits.
fn masks(first: u32, count: u32) -> impl Iterator<Item = (usize, u64)> {
    let end = first + count;
    let mut page = first;
    core::iter::from_fn(move || {
        let pages = (end - page).min(WORD_PAGES - page % WORD_PAGES);
        let mask = (u64::MAX >> (WORD_PAGES - pages.max(1))) << (page % WORD_PAGES);
        let word = (page / WORD_PAGES) as usize;
        page += pages;
        (pages != 0).then_some((word, mask))
    })
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// The runs of a set, found page by page.
    fn runs(pages: &[bool]) -> Vec<SetRun> {
        let mut runs: Vec<SetRun> = Vec::new();
        for page in (0..PageSet::PAGES).filter(|page| pages[*page as usize]) {
            match runs.last_mut() {
                Some(last) if last.end() == page => last.count += 1,
                _ => runs.push(SetRun { first: page, count: 1 }),
            }
        }
        runs
    }

    proptest! {
        #[test]
        fn the_runs_are_those_of_the_pages(
            changes in prop::collection::vec(
                (any::<bool>(), 0..=PageSet::PAGES, 0..=PageSet::PAGES), 0..12,
            ),
        ) {
            let (mut set, mut pages) = (PageSet::EMPTY, [false; PageSet::PAGES as usize]);
            for (adds, one, other) in changes {
                let (first, end) = (one.min(other), one.max(other));
                if adds {
                    set.add(first, end - first);
                } else {
                    set.remove(first, end - first);
                }
                pages[first as usize..end as usize].fill(adds);
            }
            let mut found = Vec::new();
            let mut next = set.next_run(0);
            while let Some(run) = next {
                found.push(run);
                next = set.next_run(run.end());
            }
            prop_assert_eq!(found, runs(&pages));
            prop_assert!((0..PageSet::PAGES).all(|page| set.has(page) == pages[page as usize]));
        }
    }
}
