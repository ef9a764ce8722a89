//! The nodes of a [`super::PageIndex`], and the arithmetic of page numbers and slots.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Range;
use core::ptr::NonNull;

use super::{PAGE_LIMIT, PageFlags};
use crate::addr::{Frame, PAGE_SHIFT};
use crate::folio::MAX_FOLIO_ORDER;
use crate::frame::Frames;
use crate::frame::slab::Slab;
use crate::platform::Platform;

/// Base-2 logarithm of [`SLOTS`].
pub(super) const SLOT_BITS: usize = 6;
/// Slots in a node, one for each bit of its bitmap.
pub(super) const SLOTS: usize = 1 << SLOT_BITS;
/// The maximum number of levels of a tree.
pub(super) const HEIGHT: usize = level_of(PAGE_LIMIT - 1) + 1;

/// Set in the slot of every page in memory, so that the slot is nonzero even with frame 0. The bits
/// between this bit and the frame are [`PageFlags`].
pub(super) const PRESENT: u64 = 1;

/// The slots of a bottom node: frame number, flags, [`PRESENT`]; or the swap slot of a page
/// ([`super::SwapSlot`]); or empty, perhaps with a shadow ([`super::shadows`]).
pub(super) type Words = [u64; SLOTS];

/// The maximum number of nodes that the pages of one folio need: leaves, and two paths to the root.
pub(crate) const NODES_OF_A_FOLIO: u16 =
    (MAX_FOLIO_ORDER.pages() as usize / SLOTS + 1 + 2 * HEIGHT) as u16;

/// A node of the tree, from the slab in [`Nodes`]. Nodes of different indexes share no cache line.
#[repr(align(64))]
pub(crate) struct IndexNode {
    /// Bit n: slot n is used.
    pub(super) used: u64,
    /// Bit n: slot n has a dirty page, or a dirty page below it.
    pub(super) dirty: u64,
    /// Bit n: slot n has a page in swap, or a page in swap below it.
    pub(super) swapped: u64,
    pub(super) slots: Slots,
}

pub(super) enum Slots {
    /// Level 0.
    Pages(Words),
    /// Any level above.
    Children([Option<Link>; SLOTS]),
}

/// A link to a node. Only one slot of one tree, or the tree's root, contains the link.
#[derive(Clone, Copy)]
pub(super) struct Link(pub(super) NonNull<IndexNode>);

// SAFETY: a link belongs to one index, which owns the node like a box, and a node contains only
// numbers and links; so the link may be sent with the index.
unsafe impl Send for Link {}
// SAFETY: a shared index only reads its nodes.
unsafe impl Sync for Link {}

/// Whether a node has dirty pages and pages in swap.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) dirty: bool,
    pub(super) swapped: bool,
}

impl IndexNode {
    pub(super) fn new(level: usize) -> Self {
        let slots = match level {
            0 => Slots::Pages([0; SLOTS]),
            _ => Slots::Children([None; SLOTS]),
        };
        Self { used: 0, dirty: 0, swapped: 0, slots }
    }

    #[inline]
    pub(super) fn child(&self, index: usize) -> Option<Link> {
        match &self.slots {
            Slots::Children(children) => children[index],
            Slots::Pages(_) => None,
        }
    }

    /// Only for nodes above level 0. A child with dirty or swapped pages is
    /// [marked](IndexNode::mark) afterwards.
    pub(super) fn set_child(&mut self, index: usize, child: Option<Link>) {
        if let Slots::Children(children) = &mut self.slots {
            children[index] = child;
            self.used = self.used & !(1 << index) | u64::from(child.is_some()) << index;
            self.dirty &= !(1 << index);
            self.swapped &= !(1 << index);
        }
    }

    /// The marks of the node.
    pub(super) fn marks(&self) -> Marks {
        Marks { dirty: self.dirty != 0, swapped: self.swapped != 0 }
    }

    /// Records the child's [`IndexNode::marks`] at slot `index`. Returns whether the marks changed.
    pub(super) fn mark(&mut self, index: usize, marks: Marks) -> bool {
        let before = (self.dirty, self.swapped);
        self.dirty = before.0 & !(1 << index) | u64::from(marks.dirty) << index;
        self.swapped = before.1 & !(1 << index) | u64::from(marks.swapped) << index;
        (self.dirty, self.swapped) != before
    }

    /// The slots of a node of `level` below which a page in memory may have all of `flags`. Exact
    /// at level 0.
    #[inline]
    pub(super) fn slots_with(&self, flags: PageFlags, level: usize) -> u64 {
        match (flags.contains(PageFlags::DIRTY), level) {
            (true, _) => self.dirty,
            (false, 0) => self.used & !self.swapped,
            (false, _) => self.used,
        }
    }
}

/// The source of an index's nodes.
pub(crate) struct Nodes<'a, P: Platform> {
    pub(super) slab: &'a Slab<IndexNode, P>,
    pub(super) frames: &'a Frames<P>,
}

impl<'a, P: Platform> Nodes<'a, P> {
    /// The nodes of `slab`.
    ///
    /// # Safety
    ///
    /// The caller promises:
    ///
    /// 1. An index gets nodes of only one slab: while it has a node, every value passed to its
    ///    methods was made from the same `slab` and `frames`.
    pub(crate) unsafe fn new(slab: &'a Slab<IndexNode, P>, frames: &'a Frames<P>) -> Self {
        Self { slab, frames }
    }
}

/// The lowest level at which the first node spans `page`.
pub(super) const fn level_of(page: u64) -> usize {
    (page | 1).ilog2() as usize / SLOT_BITS
}

/// The slot that leads to `page` in its node of `level`.
#[inline]
pub(super) fn slot(page: u64, level: usize) -> usize {
    (page >> (level * SLOT_BITS)) as usize % SLOTS
}

/// The first page below slot `index` of the node of `level` that spans `page`.
pub(super) fn first_page(page: u64, level: usize, index: usize) -> u64 {
    let shift = level * SLOT_BITS;
    (page >> (shift + SLOT_BITS) << SLOT_BITS | index as u64) << shift
}

/// The first page after the node of level 0 that contains the slot of `page`.
#[inline]
pub(super) fn leaf_end(page: u64) -> u64 {
    (page | (SLOTS as u64 - 1)).saturating_add(1)
}

/// Cuts `first..end` at the bounds of nodes of level 0: the first page of each piece, and the
/// piece's slots.
pub(super) fn pieces(first: u64, end: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    let mut next = first;
    core::iter::from_fn(move || {
        let page = next;
        let after = end.min(leaf_end(page));
        next = after;
        let start = slot(page, 0);
        (page < end).then(|| (page, start..start + (after - page) as usize))
    })
}

/// The bits of `slots`, which is not empty, in a bitmap.
pub(super) fn mask(slots: &Range<usize>) -> u64 {
    (u64::MAX >> (SLOTS - slots.len())) << slots.start
}

pub(super) fn word_of(frame: Frame) -> u64 {
    u64::from(frame.0) << PAGE_SHIFT | PRESENT
}

pub(super) fn frame_in(word: u64) -> Frame {
    Frame((word >> PAGE_SHIFT) as u32)
}

/// The number of pages in memory among the words whose last store has failed.
pub(super) fn failed_in(words: &[u64]) -> u32 {
    words.iter().filter(|word| has(**word, PageFlags::FAILED)).count() as u32
}

/// Whether the word is that of a page in memory with all of `flags`.
pub(super) fn has(word: u64, flags: PageFlags) -> bool {
    let wanted = PRESENT | flags.bits();
    word & wanted == wanted
}
