//! Sets of pages of a folio.

use super::bitmap::CLUSTER_SLOTS;

/// A set of pages of one folio.
#[derive(Clone, Copy)]
pub(crate) struct PageSet([u64; CLUSTER_SLOTS as usize / 64]);

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

    pub(crate) const EMPTY: Self = Self([0; CLUSTER_SLOTS as usize / 64]);

    /// Whether the page is in the set.
    #[inline]
    pub(crate) fn has(&self, page: u32) -> bool {
        self.0[page as usize / 64] >> (page % 64) & 1 != 0
    }

    /// Adds `count` pages from `first` on.
    pub(crate) fn add(&mut self, first: u32, count: u32) {
        for page in first..first + count {
            self.0[page as usize / 64] |= 1 << (page % 64);
        }
    }

    /// Removes `count` pages from `first` on.
    pub(crate) fn remove(&mut self, first: u32, count: u32) {
        for page in first..first + count {
            self.0[page as usize / 64] &= !(1 << (page % 64));
        }
    }

    /// The first run of pages in the set from `from` on.
    pub(crate) fn next_run(&self, from: u32) -> Option<SetRun> {
        let first = (from..Self::PAGES).find(|page| self.has(*page))?;
        let count = (first..Self::PAGES).take_while(|page| self.has(*page)).count();
        Some(SetRun { first, count: count as u32 })
    }
}
