//! The pages of a memory object (shared memory, a file): [`PageIndex`], which frame holds which
//! page.
//!
//! A tree of nodes with 64 slots each. A slot at the bottom (level 0) holds one page, a slot above
//! names a node:
//!
//! ```text
//! level 2, 4,096 pages a slot            | 0 . . 3 . . . . |
//!                                         /       \
//! level 1, 64 pages a slot      | 0 1 . . . |   | . . 2 . . |
//!                                /   \                 \
//! level 0, a page    | 800 801 802 803 . |  | . 123 . |  | . . 7ff . . |
//!                 page 0     1   2   3          70            12,418
//! ```
//!
//! A folio of 2^n pages has 2^n slots of its own with rising frames, so a *run* (consecutive pages
//! in consecutive frames) shows by comparing neighbours, be it one folio, a part of one, or two
//! that happen to be adjacent. Each node has a bitmap of its used slots: what is absent is skipped
//! by whole subtrees, and a node that becomes empty is noticed at once.
//!
//! # Guarantees
//!
//! - *No more nodes than the pages need.* Every node has a page beneath it, and the root is as low
//!   as the highest page allows; an object without pages has no node. So the number of nodes
//!   follows from the set of pages, whatever its history. The one exception are nodes that
//!   [`PageIndex::prepare`] made and that no page was written to yet.
//! - *Out of memory changes nothing.* Only [`PageIndex::prepare`] allocates; where it fails, the
//!   nodes that it made are gone again. [`PageIndex::set`] cannot fail behind it.
//! - *Whoever reads never writes.* The owner of the index has a lock: any number of lookups
//!   (`&self`) may run together, a change (`&mut self`) runs alone. There are no atomics here.
//!
//! Costs are told in slots and in the height h of the tree, at most 9. Nothing sleeps or recurses.

mod node;

use bitflags::bitflags;

use crate::addr::{Frame, PAGE_SHIFT};
use crate::platform::Platform;
use crate::table::OutOfMemory;

use node::{
    HEIGHT, Link, PRESENT, SLOTS, Slots, Words, first_page, frame_in, has, leaf_end, level_of,
    mask, pieces, slot, word_of,
};
pub(crate) use node::{NODES_OF_A_FOLIO, Node, Nodes};

/// Pages have numbers below this: a file may have 2^64 bytes.
pub(crate) const PAGE_LIMIT: u64 = 1 << (u64::BITS - PAGE_SHIFT);

bitflags! {
    /// What is known of a page apart from its frame.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct PageFlags: u64 {
        /// The page was written since its content was last saved.
        const DIRTY = 1 << 1;
    }
}

/// One page of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slot {
    pub(crate) frame: Frame,
    pub(crate) flags: PageFlags,
}

/// Consecutive pages in consecutive frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    /// The number of the first page.
    pub(crate) page: u64,
    /// The frame that holds it.
    pub(crate) frame: Frame,
    /// How many pages, at least 1.
    pub(crate) count: u32,
}

/// What stands at a page, and for how many pages from there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stretch {
    /// No page.
    Empty(u64),
    /// Pages in consecutive frames, the first of which is named.
    Frames(Frame, u32),
}

/// The pages of one object.
///
/// It does not free its nodes when it is dropped, since it cannot reach their slab then: take all
/// pages or [`PageIndex::clear`] it before.
pub(crate) struct PageIndex {
    root: Option<Link>,
    /// The root's; 0 where there is none.
    level: usize,
    nodes: u64,
}

impl PageIndex {
    /// An index without pages. Allocates nothing.
    pub(crate) const fn new() -> Self {
        Self { root: None, level: 0, nodes: 0 }
    }

    /// How many nodes it has in its slab. O(1).
    pub(crate) fn node_count(&self) -> u64 {
        self.nodes
    }

    /// Where `page` is; `None` if it is absent. O(h).
    #[inline]
    pub(crate) fn get(&self, page: u64) -> Option<Slot> {
        let word = self.words(page)?[slot(page, 0)];
        let flags = PageFlags::from_bits_truncate(word);
        (word != 0).then_some(Slot { frame: frame_in(word), flags })
    }

    /// What stands at `page`, and how far it goes on, `limit` pages at the most.
    ///
    /// O(h) for what is absent, however long it is. For a run one step for each page, and O(h) for
    /// each node of level 0 that it reaches into.
    pub(crate) fn run(&self, page: u64, limit: u64) -> Stretch {
        match self.get(page) {
            Some(Slot { frame, .. }) => {
                let end = page.saturating_add(limit);
                Stretch::Frames(frame, self.length(page, frame, PageFlags::empty(), end))
            }
            None => {
                let absent = self.seek(page).map_or(limit, |(next, _)| next - page);
                Stretch::Empty(absent.min(limit))
            }
        }
    }

    /// The first run at or behind `from`, cut off at `end`. A run that begins before `from` is
    /// found from there on. O(h) for the way there, and the run's length as in [`PageIndex::run`].
    pub(crate) fn next_run(&self, from: u64, end: u64) -> Option<Run> {
        self.next_run_with(PageFlags::empty(), from, end)
    }

    /// As [`PageIndex::next_run`], of pages that have all of `flags`; neighbours that lack one are
    /// not part of the run. Looks at the slots of each node of level 0 on the way.
    pub(crate) fn next_run_with(&self, flags: PageFlags, mut from: u64, end: u64) -> Option<Run> {
        loop {
            let (page, words) = self.seek(from)?;
            if page >= end {
                return None;
            }
            let mut rest = words[slot(page, 0)..].iter();
            let Some(skipped) = rest.position(|word| has(*word, flags)) else {
                from = leaf_end(page);
                continue;
            };
            let page = page + skipped as u64;
            let frame = frame_in(words[slot(page, 0)]);
            let count = self.length(page, frame, flags, end);
            return (count > 0).then_some(Run { page, frame, count });
        }
    }

    /// Makes the nodes that `count` pages from `first` on need, so that [`PageIndex::set`] of any
    /// of them finds a place. The promise lasts until a call that frees nodes:
    /// [`PageIndex::take_run`], [`PageIndex::prune`], [`PageIndex::clear`], or a `prepare` that
    /// fails. What is not written must be [pruned](PageIndex::prune) in the end.
    ///
    /// O(h) for each 64 pages.
    ///
    /// # Errors
    ///
    /// Where memory runs out, or a page is not below [`PAGE_LIMIT`]. No empty node is left on the
    /// way to these pages then, and all pages are as they were.
    pub(crate) fn prepare<P: Platform>(
        &mut self,
        first: u64,
        count: u64,
        nodes: &Nodes<'_, P>,
    ) -> Result<(), OutOfMemory> {
        let end = first.checked_add(count).filter(|end| *end <= PAGE_LIMIT).ok_or(OutOfMemory)?;
        for (page, _) in pieces(first, end) {
            if self.make_path(page, nodes).is_none() {
                self.prune(first, page + 1 - first, nodes);
                return Err(OutOfMemory);
            }
        }
        Ok(())
    }

    /// Frees those nodes on the way to `count` pages from `first` on that have no page: what is
    /// left of a [`PageIndex::prepare`]. O(h) for each 64 pages.
    pub(crate) fn prune<P: Platform>(&mut self, first: u64, count: u64, nodes: &Nodes<'_, P>) {
        for (page, _) in pieces(first, first.saturating_add(count)) {
            self.free_empty(page, nodes);
        }
    }

    /// Writes `count` consecutive pages from `first` on, which lie in the frames from `frame` on.
    /// They are absent, and [prepared](PageIndex::prepare). No flag is set.
    ///
    /// One step for each page and O(h) for each 64.
    pub(crate) fn set(&mut self, first: u64, frame: Frame, count: u32) {
        for (page, slots) in pieces(first, first.saturating_add(u64::from(count))) {
            let Some((used, words)) = self.leaf_mut(page) else {
                debug_assert!(false, "page {page:#x} is not prepared");
                continue;
            };
            debug_assert_eq!(*used & mask(&slots), 0, "pages from {page:#x} on are present");
            *used |= mask(&slots);
            let frame = frame.plus((page - first) as u32);
            for (word, n) in words[slots].iter_mut().zip(0..) {
                *word = word_of(frame.plus(n));
            }
        }
    }

    /// As [`PageIndex::set`], of pages that are present: they lie elsewhere from now on, and keep
    /// their flags.
    pub(crate) fn replace(&mut self, first: u64, frame: Frame, count: u32) {
        for (page, slots) in pieces(first, first.saturating_add(u64::from(count))) {
            let Some((used, words)) = self.leaf_mut(page) else { continue };
            debug_assert_eq!(*used & mask(&slots), mask(&slots), "pages from {page:#x} are absent");
            let frame = frame.plus((page - first) as u32);
            for (word, n) in words[slots].iter_mut().zip(0..) {
                *word = word_of(frame.plus(n)) | *word & PageFlags::all().bits();
            }
        }
    }

    /// Removes the run that [`PageIndex::next_run`] finds, with the nodes that it leaves empty.
    /// Called until there is none, it empties a range:
    ///
    /// ```text
    /// while let Some(run) = index.take_run(from, end, &nodes) { ... give the frames back ... }
    /// ```
    ///
    /// O(h) for the way there and for each 64 pages, and two steps for each page.
    pub(crate) fn take_run<P: Platform>(
        &mut self,
        from: u64,
        end: u64,
        nodes: &Nodes<'_, P>,
    ) -> Option<Run> {
        let run = self.next_run(from, end)?;
        for (page, slots) in pieces(run.page, run.page + u64::from(run.count)) {
            let (used, words) = self.leaf_mut(page)?;
            *used &= !mask(&slots);
            let emptied = *used == 0;
            words[slots].fill(0);
            if emptied {
                self.free_empty(page, nodes);
            }
        }
        Some(run)
    }

    /// Sets `flags` of those of `count` pages from `first` on that are present. Looks at the slots
    /// in the range of all nodes of level 0, O(h) to reach each.
    pub(crate) fn set_flags(&mut self, first: u64, count: u64, flags: PageFlags) {
        self.change(first, count, |word| word | flags.bits());
    }

    /// Clears `flags`, as [`PageIndex::set_flags`].
    pub(crate) fn clear_flags(&mut self, first: u64, count: u64, flags: PageFlags) {
        self.change(first, count, |word| word & !flags.bits());
    }

    /// Forgets all pages and frees all nodes, those that are prepared too; what the frames hold is
    /// the caller's affair. O(h) for each node of level 0.
    #[cfg_attr(not(test), expect(dead_code, reason = "objects take their pages run by run"))]
    pub(crate) fn clear<P: Platform>(&mut self, nodes: &Nodes<'_, P>) {
        while let Some(mut at) = self.root {
            // Down to the first node without children, whose pages go.
            let mut first = 0;
            for level in (1..=self.level).rev() {
                let index = self.node(at).used.trailing_zeros() as usize % SLOTS;
                let Some(child) = self.node(at).child(index) else { break };
                first = first_page(first, level, index);
                at = child;
            }
            self.node_mut(at).used = 0;
            self.free_empty(first, nodes);
        }
    }

    /// Whether bitmaps, height and number of nodes are what the pages ask for, while nothing is
    /// merely prepared. Looks at every slot of level 0. For tests and the auditor.
    pub(crate) fn check(&self) -> bool {
        let (mut nodes, mut last, mut from) = (0, None, 0);
        while let Some((page, words)) = self.seek(from) {
            // The nodes on the way to `page` that are not on the way to `last`.
            nodes += last.map_or(self.level + 1, |last| level_of(page ^ last));
            let used = self.link(page).map_or(0, |leaf| self.node(leaf).used);
            let has_page = |index: usize| words[index] & PRESENT != 0;
            if (0..SLOTS).any(|n| has_page(n) != (used >> n & 1 == 1)) {
                return false;
            }
            last = Some(page);
            from = leaf_end(page);
        }
        nodes as u64 == self.nodes && last.map_or(0, level_of) == self.level
    }

    #[inline]
    fn node(&self, link: Link) -> &Node {
        // SAFETY: links come out of the tree, and a node is freed (`free_node`) only when it has
        // left the tree, by a method that borrows the index alone and uses the link no more. Nodes
        // change through `node_mut` alone, which excludes us by the borrow.
        unsafe { link.0.as_ref() }
    }

    #[inline]
    fn node_mut(&mut self, mut link: Link) -> &mut Node {
        // SAFETY: as in `node`; the borrow excludes every other reference to a node of this index,
        // and no other index links it.
        unsafe { link.0.as_mut() }
    }

    /// The root, if `page` lies in what it spans.
    #[inline]
    fn root_over(&self, page: u64) -> Option<Link> {
        self.root.filter(|_| level_of(page) <= self.level)
    }

    /// The node of level 0 that has the slot of `page`.
    #[inline]
    fn link(&self, page: u64) -> Option<Link> {
        let mut at = self.root_over(page)?;
        for level in (1..=self.level).rev() {
            at = self.node(at).child(slot(page, level))?;
        }
        Some(at)
    }

    /// The slots of the node of level 0 that has `page`'s.
    #[inline]
    fn words(&self, page: u64) -> Option<&Words> {
        match &self.node(self.link(page)?).slots {
            Slots::Pages(words) => Some(words),
            Slots::Children(_) => None,
        }
    }

    /// As [`PageIndex::words`], with the bitmap, for changes.
    fn leaf_mut(&mut self, page: u64) -> Option<(&mut u64, &mut Words)> {
        let link = self.link(page)?;
        match self.node_mut(link) {
            Node { used, slots: Slots::Pages(words) } => Some((used, words)),
            _ => None,
        }
    }

    /// The first page at or behind `from`, and the slots of its node. O(h), where nodes without
    /// pages wait to be written O(h) for each.
    fn seek(&self, from: u64) -> Option<(u64, &Words)> {
        let mut page = from;
        loop {
            // Where to go on if the way down ends: at the used slot next to it, in the lowest node
            // that has one.
            let mut behind = None;
            let mut at = self.root_over(page)?;
            for level in (0..=self.level).rev() {
                let node = self.node(at);
                let used = node.used & u64::MAX << slot(page, level);
                if used == 0 {
                    break;
                }
                let index = used.trailing_zeros() as usize;
                page = page.max(first_page(page, level, index));
                let others = used & (used - 1);
                if others != 0 {
                    behind = Some(first_page(page, level, others.trailing_zeros() as usize));
                }
                match &node.slots {
                    Slots::Pages(words) => return Some((page, words)),
                    Slots::Children(children) => at = children[index]?,
                }
            }
            page = behind?;
        }
    }

    /// How many pages from `page` on, which `frame` holds, form a run of pages with `flags` that
    /// ends before `end`.
    fn length(&self, page: u64, frame: Frame, flags: PageFlags, end: u64) -> u32 {
        let end = end.min(page.saturating_add(u64::from(u32::MAX)));
        let mut next = u64::from(frame.0);
        for (piece, slots) in pieces(page, end) {
            let words = self.words(piece).map_or(&[][..], |words| &words[slots.clone()]);
            let pairs = words.iter().zip(next..);
            let fits = |word: u64, frame| has(word, flags) && word >> PAGE_SHIFT == frame;
            let count = pairs.take_while(|(word, frame)| fits(**word, *frame)).count();
            next += count as u64;
            if count < slots.len() {
                break;
            }
        }
        (next - u64::from(frame.0)) as u32
    }

    /// Replaces the words of those of `count` pages from `first` on that are present.
    fn change(&mut self, first: u64, count: u64, to: impl Fn(u64) -> u64) {
        let end = first.saturating_add(count);
        let mut from = first;
        while let Some((page, _)) = self.seek(from).filter(|(page, _)| *page < end) {
            from = end.min(leaf_end(page));
            let slots = slot(page, 0)..=slot(from - 1, 0);
            let Some((_, words)) = self.leaf_mut(page) else { return };
            for word in words[slots].iter_mut().filter(|word| **word != 0) {
                *word = to(*word);
            }
        }
    }

    /// Makes the nodes that are missing between the root and `page`. Where it fails, those that it
    /// made before stay.
    fn make_path<P: Platform>(&mut self, page: u64, nodes: &Nodes<'_, P>) -> Option<()> {
        let wanted = level_of(page);
        let mut at = match self.root {
            Some(root) => root,
            None => {
                let root = self.new_node(wanted, nodes)?;
                (self.root, self.level) = (Some(root), wanted);
                root
            }
        };
        while self.level < wanted {
            let root = self.new_node(self.level + 1, nodes)?;
            self.node_mut(root).set_child(0, Some(at));
            self.root = Some(root);
            self.level += 1;
            at = root;
        }
        for level in (1..=self.level).rev() {
            let index = slot(page, level);
            at = match self.node(at).child(index) {
                Some(child) => child,
                None => {
                    let child = self.new_node(level - 1, nodes)?;
                    self.node_mut(at).set_child(index, Some(child));
                    child
                }
            };
        }
        Some(())
    }

    /// Frees the nodes on the way to `page` that are empty, or become so; and the root, for as long
    /// as it spans more than the pages need.
    fn free_empty<P: Platform>(&mut self, page: u64, nodes: &Nodes<'_, P>) {
        let mut path = [None; HEIGHT];
        let mut at = self.root_over(page);
        for level in (0..=self.level).rev() {
            path[level] = at;
            at = at.and_then(|link| self.node(link).child(slot(page, level)));
        }
        for level in 0..=self.level {
            let Some(link) = path[level] else { continue };
            if self.node(link).used != 0 {
                break;
            }
            match path.get(level + 1).copied().flatten() {
                Some(parent) => self.node_mut(parent).set_child(slot(page, level + 1), None),
                None => (self.root, self.level) = (None, 0),
            }
            self.free_node(link, nodes);
        }
        while let Some(root) = self.root
            && self.node(root).used == 1
            && let Some(child) = self.node(root).child(0)
        {
            self.root = Some(child);
            self.level -= 1;
            self.free_node(root, nodes);
        }
    }

    /// A node that nothing links yet.
    fn new_node<P: Platform>(&mut self, level: usize, nodes: &Nodes<'_, P>) -> Option<Link> {
        let node = nodes.slab.allocate(nodes.frames, nodes.platform, Node::new(level))?;
        self.nodes += 1;
        Some(Link(node))
    }

    /// Frees a node that nothing links any more.
    fn free_node<P: Platform>(&mut self, link: Link, nodes: &Nodes<'_, P>) {
        // SAFETY: 1. `new_node` got this pointer from the slab, which is the same by obligation 1
        // of `Nodes::new`, and nodes are freed here alone, once they have left the tree. 2. The
        // only link to it was the caller's, and nodes are `Send`.
        unsafe { nodes.slab.free(nodes.frames, nodes.platform, link.0) };
        self.nodes -= 1;
    }
}

#[cfg(test)]
mod tests;
