//! [`PageIndex`]: the frames of an object's pages (shared memory, a file).
//!
//! A tree of nodes with 64 slots each. A slot at the bottom (level 0) contains one page; a slot
//! above links to a node:
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
//! A folio of 2^n pages occupies 2^n slots with ascending frames. So a comparison of neighbors
//! reveals a *run* (consecutive pages in consecutive frames): a folio, a part of a folio, or folios
//! that happen to be adjacent. Each node has a bitmap of its used slots, so absent pages are
//! skipped by whole subtrees, and an empty node is recognized at once. A second bitmap marks the
//! slots above dirty pages, so that clean pages are skipped too (Linux: the marks of an xarray). A
//! third bitmap marks the slots above pages in swap, whose slots contain a swap slot in place of a
//! frame ([`SwapSlot`]; Linux: a value entry). Such a page is not in memory, so runs of frames skip
//! it. A reclaimed page leaves the time of its eviction in its slot, as long as its node exists
//! ([`shadows`]).
//!
//! # Guarantees
//!
//! - *No more nodes than the pages need.* Every node has a page beneath it, and the root is as low
//!   as the highest page allows; an object without pages has no node. So the number of nodes
//!   depends only on the set of pages, not on its history. The only exceptions are nodes that
//!   [`PageIndex::prepare`] made and that have no page yet.
//! - *Out of memory changes nothing.* Only [`PageIndex::prepare`] allocates. If it fails, the nodes
//!   that it made are freed again. If it succeeds, [`PageIndex::set`] cannot fail.
//! - *Readers never write.* The owner of the index provides a lock: any number of look-ups
//!   (`&self`) may run concurrently, and a change (`&mut self`) runs exclusively. The index
//!   contains no atomics.
//!
//! Costs are given in slots and in the height h of the tree, at most 9. No function sleeps or
//! recurses. Other threads spin for the lock that callers hold, so a run is counted only up to
//! [`LONGEST_RUN`].

mod growth;
mod marks;
mod node;
mod seek;
mod shadows;
mod swapped;

use bitflags::bitflags;

use crate::addr::{Frame, PAGE_SHIFT};
use crate::error::NoMemory;
use crate::platform::Platform;

pub(crate) use node::{IndexNode, NODES_OF_A_FOLIO, Nodes};
use node::{
    Link, PRESENT, SLOTS, Words, failed_in, first_page, frame_in, leaf_end, mask, pieces, slot,
    word_of,
};
pub(crate) use swapped::{SwapSlot, SwappedRun};

/// The exclusive limit of page numbers: a file may have 2^64 bytes.
pub(crate) const PAGE_LIMIT: u64 = 1 << (u64::BITS - PAGE_SHIFT);

/// The maximum length of a run that one call returns; the remaining pages form another run.
pub(crate) const LONGEST_RUN: u32 = 1024;

bitflags! {
    /// The flags of a page, besides its frame.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct PageFlags: u64 {
        /// The page was written since its content was last saved. The other flags are set only with
        /// this one.
        const DIRTY = 1 << 1;
        /// The last attempt to save the page failed.
        const FAILED = 1 << 2;
        /// The last two attempts to save the page failed.
        const FAILED_TWICE = 1 << 3;
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
pub(crate) struct IndexRun {
    /// The number of the first page.
    pub(crate) page: u64,
    /// The frame of the first page.
    pub(crate) frame: Frame,
    /// The number of pages, at least 1.
    pub(crate) count: u32,
}

/// The state of a page, and the number of consecutive pages in the same state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageStretch {
    /// No page.
    Empty(u64),
    /// Pages in consecutive frames; the first is given.
    Frames(Frame, u32),
    /// Pages in consecutive swap slots; the first is given.
    Swapped(SwapSlot, u32),
}

/// A node of level 0.
struct Leaf<'a> {
    used: &'a mut u64,
    dirty: &'a mut u64,
    swapped: &'a mut u64,
    words: &'a mut Words,
}

/// The pages of one object.
///
/// Dropping the index does not free its nodes, because the drop has no access to their slab: first
/// remove all pages, or call [`PageIndex::clear`].
pub(crate) struct PageIndex {
    root: Option<Link>,
    /// The root's level; 0 without a root.
    level: u32,
    nodes: u32,
    /// The number of dirty pages.
    dirty: u32,
    /// The number of dirty pages whose last store failed.
    failed: u32,
    /// The number of nodes and slots read by all calls.
    #[cfg(any(test, feature = "measure"))]
    looked_at: core::sync::atomic::AtomicU64,
}

impl PageIndex {
    /// An index without pages. Allocates nothing.
    pub(crate) const fn new() -> Self {
        Self {
            root: None,
            level: 0,
            nodes: 0,
            dirty: 0,
            failed: 0,
            #[cfg(any(test, feature = "measure"))]
            looked_at: core::sync::atomic::AtomicU64::new(0),
        }
    }

    /// The number of nodes and slots read by all calls so far.
    #[cfg(any(test, feature = "measure"))]
    pub(crate) fn looked_at(&self) -> u64 {
        self.looked_at.load(core::sync::atomic::Ordering::Relaxed)
    }

    /// The root's level.
    #[inline]
    fn level(&self) -> usize {
        self.level as usize
    }

    #[inline]
    fn note(&self, _slots: u64) {
        #[cfg(any(test, feature = "measure"))]
        crate::stats::count_roughly(&self.looked_at, _slots);
    }

    /// The number of the index's nodes in the slab. O(1).
    pub(crate) fn node_count(&self) -> u64 {
        self.nodes.into()
    }

    /// The number of dirty pages. O(1).
    pub(crate) fn dirty_count(&self) -> u64 {
        self.dirty.into()
    }

    /// The number of dirty pages whose store has failed. O(1).
    pub(crate) fn failed_count(&self) -> u64 {
        self.failed.into()
    }

    /// The slot of `page`; `None` if it is not in memory. O(h).
    #[inline]
    pub(crate) fn get(&self, page: u64) -> Option<Slot> {
        let word = self.words(page)?[slot(page, 0)];
        let flags = PageFlags::from_bits_truncate(word);
        (word & PRESENT != 0).then_some(Slot { frame: frame_in(word), flags })
    }

    /// Whether any page is dirty. O(1).
    pub(crate) fn has_dirty(&self) -> bool {
        self.root.is_some_and(|root| self.node(root).dirty != 0)
    }

    /// The state of `page`, and the number of consecutive pages in the same state, at most `limit`.
    ///
    /// O(h) for absent pages, regardless of their number. For a run, one step for each page, plus
    /// O(h) for each node of level 0 that the run touches.
    pub(crate) fn run(&self, page: u64, limit: u64) -> PageStretch {
        self.run_cut(page, limit, |_| limit)
    }

    /// Like [`PageIndex::run`], with a run limited to the length that `cut` returns for its first
    /// frame, so that no unneeded pages are counted.
    pub(crate) fn run_cut(
        &self,
        page: u64,
        limit: u64,
        cut: impl FnOnce(Frame) -> u64,
    ) -> PageStretch {
        match self.get(page) {
            Some(Slot { frame, .. }) => {
                let end = page.saturating_add(limit.min(cut(frame)));
                PageStretch::Frames(frame, self.length(page, frame, PageFlags::empty(), end))
            }
            None => match self.seek_used(page) {
                Some((next, words)) if next == page => {
                    let end = page.saturating_add(limit);
                    let first = SwapSlot::in_word(words[slot(page, 0)]).unwrap_or_default();
                    PageStretch::Swapped(first, self.swapped_length(page, first, end))
                }
                next => {
                    let absent = next.map_or(limit, |(next, _)| next - page);
                    PageStretch::Empty(absent.min(limit))
                }
            },
        }
    }

    /// The first run at or after `from`, truncated at `end`. A run that begins before `from` is
    /// returned from `from` on. O(h) for the descent; the run's length costs as in
    /// [`PageIndex::run`].
    pub(crate) fn next_run(&self, from: u64, end: u64) -> Option<IndexRun> {
        self.next_run_with(PageFlags::empty(), from, end)
    }

    /// Passes the runs from `from` to `end` to `put`, in ascending order, until it returns false.
    /// Each run is limited to the length that `cut` returns for its first frame, at least one page.
    /// Returns the page after the last run passed, or `end` if all were passed.
    ///
    /// O(h) for each node of level 0 with pages in the range and for each run of several pages,
    /// plus one step for each slot.
    pub(crate) fn each_run_cut(
        &self,
        from: u64,
        end: u64,
        cut: impl Fn(Frame) -> u64,
        mut put: impl FnMut(IndexRun) -> bool,
    ) -> u64 {
        let any = PageFlags::empty();
        let mut from = from;
        while let Some((mut page, words)) =
            self.seek_with(any, from).filter(|(page, _)| *page < end)
        {
            let leaf_end = leaf_end(page).min(end);
            while page < leaf_end {
                let word = words[slot(page, 0)];
                if word & PRESENT == 0 {
                    page += 1;
                    continue;
                }
                let frame = frame_in(word);
                // Most pages are folios of one page, which the next slot often shows.
                let next = words.get(slot(page, 0) + 1);
                let count = match next.is_some_and(|next| frame_in(*next) != frame.plus(1)) {
                    true => 1,
                    false => match cut(frame).min(end - page) {
                        0 | 1 => 1,
                        most => self.length(page, frame, any, page + most),
                    },
                };
                let run = IndexRun { page, frame, count };
                page += u64::from(count);
                if !put(run) {
                    return page;
                }
            }
            from = page;
        }
        end
    }

    /// Like [`PageIndex::next_run`], for pages that have all of `flags`; neighbors that lack a flag
    /// are not part of the run. The cost is the same, regardless of the number of pages that lack a
    /// flag.
    pub(crate) fn next_run_with(&self, flags: PageFlags, from: u64, end: u64) -> Option<IndexRun> {
        let (page, words) = self.seek_with(flags, from).filter(|(page, _)| *page < end)?;
        let frame = frame_in(words[slot(page, 0)]);
        let count = self.length(page, frame, flags, end);
        (count > 0).then_some(IndexRun { page, frame, count })
    }

    /// The first run of dirty pages at or after `from`, with its flags. The run is truncated at
    /// `end` and where the flags change. The cost is the same.
    pub(crate) fn next_dirty(&self, from: u64, end: u64) -> Option<(IndexRun, PageFlags)> {
        let (page, words) =
            self.seek_with(PageFlags::DIRTY, from).filter(|(page, _)| *page < end)?;
        let word = words[slot(page, 0)];
        let (frame, flags) = (frame_in(word), PageFlags::from_bits_truncate(word));
        let count = self.length_alike(page, word, PageFlags::all(), end);
        (count > 0).then_some((IndexRun { page, frame, count }, flags))
    }

    /// Makes the nodes that `count` pages from `first` on need, so that [`PageIndex::set`] cannot
    /// fail for these pages. This guarantee ends with a call that frees nodes:
    /// [`PageIndex::take_run`], [`PageIndex::prune`], [`PageIndex::clear`], or a `prepare` that
    /// fails. Unused nodes must be [pruned](PageIndex::prune) in the end.
    ///
    /// O(h) for each 64 pages.
    ///
    /// # Errors
    ///
    /// If memory runs out, or a page is not below [`PAGE_LIMIT`]. No empty node remains on the path
    /// to these pages, and no page has changed.
    pub(crate) fn prepare<P: Platform>(
        &mut self,
        first: u64,
        count: u64,
        nodes: &Nodes<'_, P>,
    ) -> Result<(), NoMemory> {
        let end = first.checked_add(count).filter(|end| *end <= PAGE_LIMIT).ok_or(NoMemory)?;
        for (page, _) in pieces(first, end) {
            if self.make_path(page, nodes).is_none() {
                self.prune(first, page + 1 - first, nodes);
                return Err(NoMemory);
            }
        }
        Ok(())
    }

    /// Frees the nodes that [`PageIndex::prepare`] made for `count` pages from `first` on, if they
    /// have no page. O(h) for each 64 pages.
    pub(crate) fn prune<P: Platform>(&mut self, first: u64, count: u64, nodes: &Nodes<'_, P>) {
        for (page, _) in pieces(first, first.saturating_add(count)) {
            self.free_empty(page, nodes);
        }
    }

    /// Inserts `count` consecutive pages from `first` on, in the frames from `frame` on. The pages
    /// are absent and [prepared](PageIndex::prepare). No flag is set.
    ///
    /// One step for each page, plus O(h) for each 64.
    pub(crate) fn set(&mut self, first: u64, frame: Frame, count: u32) {
        for (page, slots) in pieces(first, first.saturating_add(u64::from(count))) {
            let Some(Leaf { used, words, .. }) = self.leaf_mut(page) else {
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

    /// Like [`PageIndex::set`], for present pages: they get other frames but keep their flags.
    pub(crate) fn replace(&mut self, first: u64, frame: Frame, count: u32) {
        for (page, slots) in pieces(first, first.saturating_add(u64::from(count))) {
            let Some(Leaf { used, words, .. }) = self.leaf_mut(page) else { continue };
            debug_assert_eq!(*used & mask(&slots), mask(&slots), "pages from {page:#x} are absent");
            let frame = frame.plus((page - first) as u32);
            for (word, n) in words[slots].iter_mut().zip(0..) {
                *word = word_of(frame.plus(n)) | *word & PageFlags::all().bits();
            }
        }
    }

    /// Removes the run that [`PageIndex::next_run`] finds and the nodes that become empty. Repeated
    /// calls empty a range:
    ///
    /// ```text
    /// while let Some(run) = index.take_run(from, end, &nodes) { ... give the frames back ... }
    /// ```
    ///
    /// O(h) for the descent and for each 64 pages, plus two steps for each page.
    pub(crate) fn take_run<P: Platform>(
        &mut self,
        from: u64,
        end: u64,
        nodes: &Nodes<'_, P>,
    ) -> Option<IndexRun> {
        let run = self.next_run(from, end)?;
        for (page, slots) in pieces(run.page, run.page + u64::from(run.count)) {
            let Leaf { used, dirty, words, .. } = self.leaf_mut(page)?;
            *used &= !mask(&slots);
            let (emptied, was_dirty) = (*used == 0, *dirty != 0);
            let fewer = (*dirty & mask(&slots)).count_ones();
            let failed = if fewer > 0 { failed_in(&words[slots.clone()]) } else { 0 };
            *dirty &= !mask(&slots);
            words[slots].fill(0);
            self.dirty -= fewer;
            self.failed -= failed;
            if emptied {
                self.free_empty(page, nodes);
            }
            if was_dirty {
                self.mark_above(page);
            }
        }
        Some(run)
    }

    /// For the present pages among `count` pages from `first` on, sets `flags` and clears all other
    /// flags. Reads every slot of the range in nodes of level 0, plus O(h) to reach each node.
    pub(crate) fn set_flags(&mut self, first: u64, count: u64, flags: PageFlags) {
        let others = PageFlags::all() - flags;
        let to = |word: u64| word & !others.bits() | flags.bits();
        self.change(first, count, PageFlags::empty(), to);
    }

    /// Clears all flags of the present pages among `count` pages from `first` on, at the cost of
    /// [`PageIndex::set_flags`]. Skips nodes without a dirty page.
    pub(crate) fn clear_flags(&mut self, first: u64, count: u64) {
        self.change(first, count, PageFlags::DIRTY, |word| word & !PageFlags::all().bits());
    }

    /// Removes all pages and frees all nodes, including prepared ones; the caller handles the
    /// frames. O(h) for each node of level 0.
    #[cfg_attr(not(test), expect(dead_code, reason = "objects take their pages run by run"))]
    pub(crate) fn clear<P: Platform>(&mut self, nodes: &Nodes<'_, P>) {
        while let Some(mut at) = self.root {
            // Descends to the first node without children, whose pages are removed.
            let mut first = 0;
            for level in (1..=self.level()).rev() {
                let index = self.node(at).used.trailing_zeros() as usize % SLOTS;
                let Some(child) = self.node(at).child(index) else { break };
                first = first_page(first, level, index);
                at = child;
            }
            self.node_mut(at).used = 0;
            (self.dirty, self.failed) = (0, 0);
            self.free_empty(first, nodes);
        }
    }
}

#[cfg(test)]
mod tests;
