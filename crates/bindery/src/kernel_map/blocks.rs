//! The frames that an area owns: blocks of 2^order frames, linked through their metadata.
//!
//! ```text
//! area.blocks -> head 0x400 (order 9) -> head 0x37 (order 0) -> head 0x80 (order 4) -> none
//! ```
//!
//! The list is in address order, so the frames are freed without reading the tables, and adjacent
//! blocks are freed as one.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::Memory;
use crate::addr::{Frame, Order};
use crate::frame::meta::link;
use crate::frame::meta::{MetaKind, NONE, state_of};
use crate::platform::Platform;

/// A list of blocks. Only the caller that has claimed the area, or the purge, uses the list.
pub(super) struct Blocks {
    first: AtomicU32,
    last: AtomicU32,
}

impl Blocks {
    pub(super) const fn new() -> Self {
        Self { first: AtomicU32::new(NONE), last: AtomicU32::new(NONE) }
    }

    /// Appends a block, fresh from the allocator.
    pub(super) fn push<P: Platform>(&self, memory: &Memory<P>, head: Frame, order: Order) {
        let meta = memory.frames.meta(head);
        meta.state.store(state_of(MetaKind::Kernel, order), Relaxed);
        meta.next.store(NONE, Relaxed);
        match link(self.last.load(Relaxed)) {
            Some(last) => memory.frames.meta(last).next.store(head.0, Relaxed),
            None => self.first.store(head.0, Relaxed),
        }
        self.last.store(head.0, Relaxed);
    }

    /// Prepends the blocks of another list.
    pub(super) fn prepend<P: Platform>(&self, memory: &Memory<P>, other: &Self) {
        let Some(last) = link(other.last.swap(NONE, Relaxed)) else { return };
        let own = self.first.swap(other.first.swap(NONE, Relaxed), Relaxed);
        memory.frames.meta(last).next.store(own, Relaxed);
        if own == NONE {
            self.last.store(last.0, Relaxed);
        }
    }

    /// The blocks: heads and orders.
    pub(super) fn iter<'a, P: Platform>(
        &'a self,
        memory: &'a Memory<P>,
    ) -> impl Iterator<Item = (Frame, Order)> + 'a {
        let mut next = link(self.first.load(Relaxed));
        core::iter::from_fn(move || {
            let head = next?;
            let meta = memory.frames.meta(head);
            next = link(meta.next.load(Relaxed));
            Some((head, meta.order()))
        })
    }

    /// Cuts the list after `pages` pages and returns the rest. A block across the cut is split into
    /// several; those before the cut remain in this list.
    pub(super) fn cut<P: Platform>(&self, memory: &Memory<P>, pages: u64) -> Self {
        let after = Self::new();
        let mut left = pages;
        let mut last = NONE;
        let mut next = link(self.first.load(Relaxed));
        while let Some(head) = next {
            let meta = memory.frames.meta(head);
            let size = u64::from(meta.order().pages());
            if left < size {
                break;
            }
            left -= size;
            last = head.0;
            next = link(meta.next.load(Relaxed));
        }
        let Some(cut) = next else { return after };
        after.first.store(cut.0, Relaxed);
        after.last.store(self.last.load(Relaxed), Relaxed);
        self.last.store(last, Relaxed);
        match link(last) {
            Some(last) => memory.frames.meta(last).next.store(NONE, Relaxed),
            None => self.first.store(NONE, Relaxed),
        }
        if left > 0 {
            self.split_first(memory, &after, left as u32);
        }
        after
    }

    /// Moves the first `pages` frames of the first block of `after` to this list.
    fn split_first<P: Platform>(&self, memory: &Memory<P>, after: &Self, pages: u32) {
        let Some(block) = link(after.first.load(Relaxed)) else { return };
        let meta = memory.frames.meta(block);
        let (end, next) = (meta.order().pages(), meta.next.load(Relaxed));
        let rest = Self::new();
        let mut at = 0;
        while at < end {
            let limit = if at < pages { pages } else { end };
            let aligned = if at == 0 { u32::MAX } else { at.trailing_zeros() };
            let order = Order(aligned.min((limit - at).ilog2()) as u8);
            let list = if at < pages { self } else { &rest };
            list.push(memory, block.plus(at), order);
            at += order.pages();
        }
        // The block's former successor now follows the block's remainder.
        match link(rest.last.load(Relaxed)) {
            Some(last) => memory.frames.meta(last).next.store(next, Relaxed),
            None => rest.first.store(next, Relaxed),
        }
        if next == NONE {
            after.last.store(rest.last.load(Relaxed), Relaxed);
        }
        after.first.store(rest.first.load(Relaxed), Relaxed);
    }

    /// Frees all frames.
    ///
    /// # Safety
    /// 1. The frames have no user, and no TLB holds them.
    pub(super) unsafe fn free<P: Platform>(&self, memory: &Memory<P>) {
        let mut batch = memory.free_batch();
        let mut next = link(self.first.swap(NONE, Relaxed));
        self.last.store(NONE, Relaxed);
        while let Some(head) = next {
            let meta = memory.frames.meta(head);
            next = link(meta.next.load(Relaxed));
            let order = meta.order();
            // The block merges with its neighbors; a head inside the merged block would be wrong.
            meta.state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
            // SAFETY: 1. all frames are tails except the head, which became one just now. 2. the
            // list owned the block and no longer contains it; it has no users (obligation 1).
            unsafe { batch.push(head, order.pages()) };
        }
    }
}
