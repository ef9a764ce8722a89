//! The marks of dirty pages in the nodes of the tree, and their verification.

use super::node::{PRESENT, SLOTS, has, leaf_end, level_of, slot};
use super::{PageFlags, PageIndex};

impl PageIndex {
    /// Lets the nodes above that of level 0 with `page` know whether it has dirty pages. O(h).
    pub(super) fn mark_above(&mut self, page: u64) {
        let path = self.path(page);
        for level in 1..=self.level {
            let (Some(below), Some(link)) = (path[level - 1], path[level]) else { continue };
            let dirty = self.node(below).dirty != 0;
            if !self.node_mut(link).mark(slot(page, level), dirty) {
                return;
            }
        }
    }

    /// Whether the nodes on the way to `page` know which of them have dirty pages.
    fn is_marked_above(&self, page: u64) -> bool {
        let path = self.path(page);
        (1..=self.level).all(|level| {
            let [below, above] = [level - 1, level].map(|level| path[level]);
            let dirty = below.is_some_and(|below| self.node(below).dirty != 0);
            let marked = above.map(|above| self.node(above).dirty >> slot(page, level) & 1 == 1);
            // What is beneath an unused slot is not dirty, either.
            let beyond = above
                .map(|above| self.node(above))
                .is_some_and(|node| node.dirty & !node.used != 0);
            marked == Some(dirty) && !beyond
        })
    }

    /// Whether bitmaps, height and number of nodes are what the pages ask for, while nothing is
    /// merely prepared. Looks at every slot. For tests and the auditor.
    pub(crate) fn check(&self) -> bool {
        let (mut nodes, mut last, mut from) = (0, None, 0);
        while let Some((page, words)) = self.seek(from) {
            // The nodes on the way to `page` that are not on the way to `last`.
            nodes += last.map_or(self.level + 1, |last| level_of(page ^ last));
            let bits =
                self.link(page).map(|leaf| self.node(leaf)).map(|leaf| (leaf.used, leaf.dirty));
            let slots_that = |holds: fn(u64) -> bool| {
                (0..SLOTS).fold(0, |bits, n| bits | u64::from(holds(words[n])) << n)
            };
            let (used, dirty) = (
                slots_that(|word| word & PRESENT != 0),
                slots_that(|word| has(word, PageFlags::DIRTY)),
            );
            if bits != Some((used, dirty)) || !self.is_marked_above(page) {
                return false;
            }
            last = Some(page);
            from = leaf_end(page);
        }
        nodes as u64 == self.nodes && last.map_or(0, level_of) == self.level
    }
}
