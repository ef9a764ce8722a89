//! The nodes of a [`super::PageIndex`], and the arithmetic of page numbers and slots.

use core::ops::Range;
use core::ptr::NonNull;

use super::{PAGE_LIMIT, PageFlags};
use crate::addr::{Frame, PAGE_SHIFT};
use crate::frame::slab::Slab;
use crate::frame::{Frames, MAX_FOLIO_ORDER};
use crate::platform::Platform;

/// Base-2 logarithm of [`SLOTS`].
pub(super) const SLOT_BITS: usize = 6;
/// Slots in a node: as many as its bitmap has bits.
pub(super) const SLOTS: usize = 1 << SLOT_BITS;
/// The most levels that a tree can have.
pub(super) const HEIGHT: usize = level_of(PAGE_LIMIT - 1) + 1;

/// Set in the slot of every page in memory, so that it differs from an absent one (all zeroes) even
/// with frame 0. The bits between it and the frame are [`PageFlags`].
pub(super) const PRESENT: u64 = 1;

/// What the slots of a bottom node hold: frame number, flags, [`PRESENT`]; or where a page is in
/// swap ([`super::SwapSlot`]); or nothing, and perhaps a shadow ([`super::shadows`]).
pub(super) type Words = [u64; SLOTS];

/// The most nodes that the pages of one folio take: leaves, and two ways to the root.
pub(crate) const NODES_OF_A_FOLIO: u16 =
    (MAX_FOLIO_ORDER.pages() as usize / SLOTS + 1 + 2 * HEIGHT) as u16;

/// A node of the tree. It lives in the slab that [`Nodes`] names.
pub(crate) struct Node {
    /// Bit n: slot n is used.
    pub(super) used: u64,
    /// Bit n: the page of slot n is dirty, or one beneath it.
    pub(super) dirty: u64,
    /// Bit n: the page of slot n is in swap, or one beneath it.
    pub(super) swapped: u64,
    pub(super) slots: Slots,
}

pub(super) enum Slots {
    /// Level 0.
    Pages(Words),
    /// Any level above.
    Children([Option<Link>; SLOTS]),
}

/// Names a node. Only one slot of one tree, or its root, holds the link.
#[derive(Clone, Copy)]
pub(super) struct Link(pub(super) NonNull<Node>);

// SAFETY: a link belongs to one index, which owns the node as a box would, and a node holds numbers
// and links; so it may go wherever the index goes.
unsafe impl Send for Link {}
// SAFETY: through a shared index nodes are only read.
unsafe impl Sync for Link {}

/// Whether a node has pages with these flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) dirty: bool,
    pub(super) swapped: bool,
}

impl Node {
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

    /// Only for nodes above level 0. A child with dirty or swapped pages is [marked](Node::mark)
    /// afterwards.
    pub(super) fn set_child(&mut self, index: usize, child: Option<Link>) {
        if let Slots::Children(children) = &mut self.slots {
            children[index] = child;
            self.used = self.used & !(1 << index) | u64::from(child.is_some()) << index;
            self.dirty &= !(1 << index);
            self.swapped &= !(1 << index);
        }
    }

    /// What the node has.
    pub(super) fn marks(&self) -> Marks {
        Marks { dirty: self.dirty != 0, swapped: self.swapped != 0 }
    }

    /// Notes what [`Node::marks`] says of the child beneath slot `index`. Says whether that is new.
    pub(super) fn mark(&mut self, index: usize, marks: Marks) -> bool {
        let before = (self.dirty, self.swapped);
        self.dirty = before.0 & !(1 << index) | u64::from(marks.dirty) << index;
        self.swapped = before.1 & !(1 << index) | u64::from(marks.swapped) << index;
        (self.dirty, self.swapped) != before
    }

    /// The slots of a node of `level` beneath which there may be a page in memory with all of
    /// `flags`; at level 0, there is.
    #[inline]
    pub(super) fn slots_with(&self, flags: PageFlags, level: usize) -> u64 {
        match (flags.contains(PageFlags::DIRTY), level) {
            (true, _) => self.dirty,
            (false, 0) => self.used & !self.swapped,
            (false, _) => self.used,
        }
    }
}

/// Where nodes come from and go to.
pub(crate) struct Nodes<'a, P: Platform> {
    pub(super) slab: &'a Slab<Node, P>,
    pub(super) frames: &'a Frames<P>,
    pub(super) platform: &'a P,
}

impl<'a, P: Platform> Nodes<'a, P> {
    /// The nodes of `slab`.
    ///
    /// # Safety
    ///
    /// The caller promises:
    ///
    /// 1. An index is given nodes of one slab only: as long as it has a node, every value that its
    ///    methods get was made of the same `slab`, `frames` and `platform`.
    pub(crate) unsafe fn new(
        slab: &'a Slab<Node, P>,
        frames: &'a Frames<P>,
        platform: &'a P,
    ) -> Self {
        Self { slab, frames, platform }
    }
}

/// The lowest level whose first node spans `page`.
pub(super) const fn level_of(page: u64) -> usize {
    (page | 1).ilog2() as usize / SLOT_BITS
}

/// Which slot of its node of `level` has `page` beneath it.
#[inline]
pub(super) fn slot(page: u64, level: usize) -> usize {
    (page >> (level * SLOT_BITS)) as usize % SLOTS
}

/// The first page beneath slot `index` of the node of `level` that spans `page`.
pub(super) fn first_page(page: u64, level: usize, index: usize) -> u64 {
    let shift = level * SLOT_BITS;
    (page >> (shift + SLOT_BITS) << SLOT_BITS | index as u64) << shift
}

/// The first page after the node of level 0 that has the slot of `page`.
#[inline]
pub(super) fn leaf_end(page: u64) -> u64 {
    (page | (SLOTS as u64 - 1)).saturating_add(1)
}

/// Cuts `first..end` where nodes of level 0 meet: the first page of each piece, and the piece's
/// slots.
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

/// The bits of `slots`, of which there is at least one, in a bitmap.
pub(super) fn mask(slots: &Range<usize>) -> u64 {
    (u64::MAX >> (SLOTS - slots.len())) << slots.start
}

pub(super) fn word_of(frame: Frame) -> u64 {
    u64::from(frame.0) << PAGE_SHIFT | PRESENT
}

pub(super) fn frame_in(word: u64) -> Frame {
    Frame((word >> PAGE_SHIFT) as u32)
}

/// Whether the word is that of a page in memory, with all of `flags`.
pub(super) fn has(word: u64, flags: PageFlags) -> bool {
    let wanted = PRESENT | flags.bits();
    word & wanted == wanted
}
