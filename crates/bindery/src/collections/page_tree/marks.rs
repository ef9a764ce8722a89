//! The marks of dirty pages and of pages in swap in the nodes of the tree, and their verification.

use super::node::{Marks, PRESENT, SLOTS, has, leaf_end, level_of, slot};
use super::shadows::is_shadow;
use super::{PageFlags, PageIndex, SwapSlot};

impl PageIndex {
    /// Updates the marks of the nodes above the level 0 node of `page`, whose dirty pages and pages
    /// in swap have changed. O(h).
    pub(super) fn mark_above(&mut self, page: u64) {
        let path = self.path(page);
        for level in 1..=self.level() {
            let (Some(below), Some(link)) = (path[level - 1], path[level]) else { continue };
            let marks = self.node(below).marks();
            if !self.node_mut(link).mark(slot(page, level), marks) {
                return;
            }
        }
    }

    /// Whether the nodes on the path to `page` have the correct marks.
    fn is_marked_above(&self, page: u64) -> bool {
        let path = self.path(page);
        (1..=self.level()).all(|level| {
            let [below, above] = [level - 1, level].map(|level| path[level]);
            let marks = below.map(|below| self.node(below).marks());
            let bit = |marks: u64| marks >> slot(page, level) & 1 == 1;
            let above = above.map(|above| self.node(above));
            let marked =
                above.map(|node| Marks { dirty: bit(node.dirty), swapped: bit(node.swapped) });
            // An unused slot must have no marks.
            let beyond = above.is_some_and(|node| (node.dirty | node.swapped) & !node.used != 0);
            marked == marks && !beyond
        })
    }

    /// Verifies bitmaps, height and number of nodes. No page may be prepared. Reads every slot. For
    /// tests and the auditor.
    pub(crate) fn check(&self) -> bool {
        let (mut nodes, mut last, mut from) = (0, None, 0);
        let (mut all_dirty, mut all_failed) = (0, 0);
        while let Some((page, words)) = self.seek_used(from) {
            // The nodes on the path to `page` that are not on the path to `last`.
            nodes += last.map_or(self.level() + 1, |last| level_of(page ^ last));
            let leaf = self.link(page).map(|leaf| self.node(leaf));
            let bits = leaf.map(|leaf| (leaf.used, leaf.dirty, leaf.swapped));
            let slots_that = |holds: fn(u64) -> bool| {
                (0..SLOTS).fold(0, |bits, n| bits | u64::from(holds(words[n])) << n)
            };
            let (used, dirty, swapped) = (
                slots_that(|word| word != 0 && !is_shadow(word)),
                slots_that(|word| has(word, PageFlags::DIRTY)),
                slots_that(|word| SwapSlot::in_word(word).is_some()),
            );
            let failed = slots_that(|word| has(word, PageFlags::FAILED));
            let twice = slots_that(|word| has(word, PageFlags::FAILED_TWICE));
            all_dirty += u64::from(dirty.count_ones());
            all_failed += u64::from(failed.count_ones());
            let sound = slots_that(|word| word & PRESENT != 0) == used & !swapped
                && failed & !dirty == 0
                && twice & !failed == 0;
            if bits != Some((used, dirty, swapped)) || !sound || !self.is_marked_above(page) {
                return false;
            }
            last = Some(page);
            from = leaf_end(page);
        }
        nodes as u64 == self.node_count()
            && all_dirty == self.dirty_count()
            && all_failed == self.failed_count()
            && last.map_or(0, level_of) == self.level()
    }
}
