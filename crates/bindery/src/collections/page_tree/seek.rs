//! Searches in the tree: from the root to a page's slot, to the next used or marked slot, and over
//! the slots of a run.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Frame, PAGE_SHIFT};

use super::node::{
    HEIGHT, IndexNode, Link, PRESENT, Slots, Words, failed_in, first_page, has, leaf_end, level_of,
    pieces, slot, word_of,
};
use super::{LONGEST_RUN, Leaf, PageFlags, PageIndex};

impl PageIndex {
    #[inline]
    pub(super) fn node(&self, link: Link) -> &IndexNode {
        self.note(1);
        // SAFETY: links come out of the tree. `free_node` frees a node only after it has left the
        // tree, in a method that borrows the index exclusively and does not use the link again.
        // Nodes change only through `node_mut`, which the shared borrow excludes.
        unsafe { link.0.as_ref() }
    }

    #[inline]
    pub(super) fn node_mut(&mut self, mut link: Link) -> &mut IndexNode {
        self.note(1);
        // SAFETY: as in `node`; the borrow excludes every other reference to a node of this index,
        // and no other index links it.
        unsafe { link.0.as_mut() }
    }

    /// The root, if it spans `page`.
    #[inline]
    pub(super) fn root_over(&self, page: u64) -> Option<Link> {
        self.root.filter(|_| level_of(page) <= self.level())
    }

    /// The node of level 0 that contains the slot of `page`.
    #[inline]
    pub(super) fn link(&self, page: u64) -> Option<Link> {
        let mut at = self.root_over(page)?;
        for level in (1..=self.level()).rev() {
            at = self.node(at).child(slot(page, level))?;
        }
        Some(at)
    }

    /// The slots of the node of level 0 that contains the slot of `page`.
    #[inline]
    pub(super) fn words(&self, page: u64) -> Option<&Words> {
        match &self.node(self.link(page)?).slots {
            Slots::Pages(words) => Some(words),
            Slots::Children(_) => None,
        }
    }

    /// The node of level 0 that contains the slot of `page`, for changes.
    pub(super) fn leaf_mut(&mut self, page: u64) -> Option<Leaf<'_>> {
        let link = self.link(page)?;
        let IndexNode { used, dirty, swapped, slots } = self.node_mut(link);
        match slots {
            Slots::Pages(words) => Some(Leaf { used, dirty, swapped, words }),
            Slots::Children(_) => None,
        }
    }

    /// On each level, the node on the path to `page`, if it exists.
    pub(super) fn path(&self, page: u64) -> [Option<Link>; HEIGHT] {
        let mut path = [None; HEIGHT];
        let mut at = self.root_over(page);
        for level in (0..=self.level()).rev() {
            path[level] = at;
            at = at.and_then(|link| self.node(link).child(slot(page, level)));
        }
        path
    }

    /// The first page at or after `from` that is in memory and has all of `flags`, and the slots of
    /// its node. O(h), plus O(h) for each node without such pages on the path.
    pub(super) fn seek_with(&self, flags: PageFlags, from: u64) -> Option<(u64, &Words)> {
        self.seek(from, |node, level| node.slots_with(flags, level))
    }

    /// Like [`PageIndex::seek_with`], for all pages.
    pub(super) fn seek_used(&self, from: u64) -> Option<(u64, &Words)> {
        self.seek(from, |node, _| node.used)
    }

    /// The first page at or after `from` below a slot that `slots` selects in each node, given the
    /// node's level.
    #[inline]
    pub(super) fn seek(
        &self,
        from: u64,
        slots: impl Fn(&IndexNode, usize) -> u64,
    ) -> Option<(u64, &Words)> {
        let mut page = from;
        loop {
            // The place to continue if the descent ends: the next used slot, in the lowest node
            // that has such a slot.
            let mut after = None;
            let mut at = self.root_over(page)?;
            for level in (0..=self.level()).rev() {
                let node = self.node(at);
                let used = slots(node, level) & u64::MAX << slot(page, level);
                if used == 0 {
                    break;
                }
                let index = used.trailing_zeros() as usize;
                page = page.max(first_page(page, level, index));
                let others = used & (used - 1);
                if others != 0 {
                    after = Some(first_page(page, level, others.trailing_zeros() as usize));
                }
                match &node.slots {
                    Slots::Pages(words) => return Some((page, words)),
                    Slots::Children(children) => at = children[index]?,
                }
            }
            page = after?;
        }
    }

    /// The length of the run that begins with `page` in `frame`, consists of pages with `flags`,
    /// and ends before `end`.
    pub(super) fn length(&self, page: u64, frame: Frame, flags: PageFlags, end: u64) -> u32 {
        self.length_alike(page, word_of(frame) | flags.bits(), flags, end)
    }

    /// The length of the run that begins with `page`, whose word is `first`, and ends before `end`.
    /// Its pages agree with the first page in `flags`.
    pub(super) fn length_alike(&self, page: u64, first: u64, flags: PageFlags, end: u64) -> u32 {
        let end = end.min(page.saturating_add(u64::from(LONGEST_RUN)));
        // Compares frame, presence and flags at once.
        let mask = !0 << PAGE_SHIFT | PRESENT | flags.bits();
        let mut wanted = first & mask;
        for (piece, slots) in pieces(page, end) {
            let words = self.words(piece).map_or(&[][..], |words| &words[slots.clone()]);
            let fits = |n: &usize| words[*n] & mask == wanted + ((*n as u64) << PAGE_SHIFT);
            let count = (0..words.len()).take_while(fits).count();
            wanted += (count as u64) << PAGE_SHIFT;
            self.note(count as u64);
            if count < slots.len() {
                break;
            }
        }
        ((wanted >> PAGE_SHIFT) - (first >> PAGE_SHIFT)) as u32
    }

    /// Replaces the words of the present pages among `count` pages from `first` on, node by node.
    /// Skips nodes without a page that has `flags`.
    pub(super) fn change(
        &mut self,
        first: u64,
        count: u64,
        flags: PageFlags,
        to: impl Fn(u64) -> u64,
    ) {
        let end = first.saturating_add(count);
        let mut from = first;
        while let Some((page, _)) = self.seek_with(flags, from).filter(|(page, _)| *page < end) {
            from = end.min(leaf_end(page));
            let slots = slot(page, 0)..slot(from - 1, 0) + 1;
            let Some(Leaf { dirty, words, .. }) = self.leaf_mut(page) else { return };
            let before = *dirty;
            let failed_before = failed_in(&words[slots.clone()]);
            let part = slots.clone();
            for (word, n) in words[slots.clone()].iter_mut().zip(slots) {
                if *word & PRESENT != 0 {
                    *word = to(*word);
                    *dirty = *dirty & !(1 << n) | u64::from(has(*word, PageFlags::DIRTY)) << n;
                }
            }
            let (after, failed) = (*dirty, failed_in(&words[part]));
            self.dirty = self.dirty + after.count_ones() - before.count_ones();
            self.failed = self.failed + failed - failed_before;
            if (after == 0) != (before == 0) {
                self.mark_above(page);
            }
        }
    }
}
