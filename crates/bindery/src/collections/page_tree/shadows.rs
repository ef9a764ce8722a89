//! Shadows: the eviction times of pages that a pager can supply again.
//!
//! ```text
//! 63 ............................. 32   31 ... 4   3        2 .. 0
//! pages that were evicted until then spare SHADOW neither in memory nor in swap
//! ```
//!
//! A shadow is stored in the slot of its page. A shadow neither creates nor keeps a node, and is
//! lost with the last page of its node. So shadows use no memory, and the number of nodes still
//! depends only on the pages. A hot set with some evicted pages keeps nearly all its shadows; a
//! file that was read once from end to end needs no shadows and loses them. (Linux keeps the nodes
//! and reclaims them later: `shadow_nodes` of `workingset.c`.)

use super::PageIndex;
use super::node::{pieces, slot};

/// Set in the slot of a page that has left a shadow.
const SHADOW: u64 = 1 << 3;
const EVICTED_SHIFT: u32 = 32;

impl PageIndex {
    /// Stores the time of eviction for `count` absent pages from `first` on, if their nodes still
    /// exist. One step for each page, plus O(h) for each 64.
    pub(crate) fn leave_shadows(&mut self, first: u64, count: u32, evicted: u32) {
        let word = u64::from(evicted) << EVICTED_SHIFT | SHADOW;
        for (page, slots) in pieces(first, first.saturating_add(u64::from(count))) {
            if let Some(leaf) = self.leaf_mut(page) {
                leaf.words[slots].iter_mut().filter(|word| **word == 0).for_each(|at| *at = word);
            }
        }
    }

    /// The first shadow among `count` pages from `first` on. One step for each page, plus O(h) for
    /// each 64.
    pub(crate) fn shadow(&self, first: u64, count: u32) -> Option<u32> {
        pieces(first, first.saturating_add(u64::from(count))).find_map(|(page, slots)| {
            let words = self.words(page)?;
            debug_assert_eq!(slot(page, 0), slots.start);
            let left = words[slots].iter().find(|word| is_shadow(**word))?;
            Some((left >> EVICTED_SHIFT) as u32)
        })
    }
}

/// Whether the slot's page is absent and has left a shadow.
pub(super) fn is_shadow(word: u64) -> bool {
    word & (SHADOW | (SHADOW - 1)) == SHADOW
}
