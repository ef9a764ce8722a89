//! Sets of pages of a folio.

use super::bitmap::CLUSTER_SLOTS;

/// Pages of a folio.
#[derive(Clone, Copy)]
pub(crate) struct PageSet([u64; CLUSTER_SLOTS as usize / 64]);

impl PageSet {
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
}
