//! Frames as the embedder sees them: their use, and those that it allocates for itself.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use super::Memory;
use crate::addr::{Frame, Order};
use crate::folio::{FrameUsage, FrameView};
use crate::frame::{AllocateFor, FrameRange, MAX_ORDER, meta};
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// The role of a frame for the address spaces that map it.
    ///
    /// Context: any.
    pub fn frame_kind(&self, frame: Frame) -> FrameKind {
        match self.frames.folio_of(frame) {
            None if self.is_zero(frame) => FrameKind::Zero,
            Some(folio) if self.frames.folio(folio).is_anonymous() => FrameKind::Anonymous,
            Some(folio) if self.frames.folio(folio).is_of_object() => FrameKind::Object,
            _ => FrameKind::Other,
        }
    }

    /// The use of a frame. Frames that do not belong to the memory are reported as such. Takes no
    /// lock but the allocator's and those of the CPUs' free frames, briefly.
    ///
    /// Context: any. Complexity: linear in the CPUs that were ever online.
    pub fn frame_view(&self, frame: Frame) -> FrameView {
        crate::folio::frame_view(&self.frames, frame)
    }

    /// The frames from the lowest to the highest of the memory, holes included.
    ///
    /// Context: any.
    pub fn frame_span(&self) -> FrameRange {
        self.frames.span()
    }

    /// Counts frames by use. It looks them up one by one, so a frame whose use changes concurrently
    /// is counted by its old or its new use.
    ///
    /// Context: spins. Complexity: linear in the blocks of frames.
    pub fn frame_usage(&self) -> FrameUsage {
        crate::folio::frame_usage(&self.frames, self.huge_order())
    }

    /// Allocates 2^`order` consecutive frames, aligned to their size, for the embedder's own use:
    /// to map them by [`crate::KernelMap::vmap`], or for a device. Their content is unspecified.
    /// `None` if there is no such block beside the frames that are kept for reclaim, or if `order`
    /// is above 10. In the first case [`Memory::drain_deferred`] may help.
    ///
    /// Context: spins. Complexity: constant.
    pub fn allocate_frames(&self, order: Order) -> Option<FrameRange> {
        let first = self.frames.allocate(order, AllocateFor::Use).or_else(|| {
            // The frames that CPUs keep, free or with free objects only, may complete a block.
            if !self.frames.fronts().has_slots() || order > MAX_ORDER {
                return None;
            }
            self.slabs().for_each(|slab| slab.trim(&self.frames));
            self.frames.trim();
            self.frames.allocate(order, AllocateFor::Use)
        })?;
        let state = meta::state_of(meta::Kind::Embedder, order);
        self.frames.meta(first).state.store(state, Ordering::Relaxed);
        Some(FrameRange { first, count: order.pages() })
    }

    /// Frees all frames of one [`Memory::allocate_frames`]. Returns whether they came from such a
    /// call, and no program maps one ([`crate::FrameSource`]); anything else stays as it is. Leaves
    /// are counted down at the end of an unmapping. So frames that were revoked may be refused for a
    /// moment, while another thread ends a `munmap` or an address space.
    ///
    /// Context: spins. Complexity: constant.
    ///
    /// # Safety
    /// 1. The frames are the caller's: the caller, or the code that passed them on, got them from
    ///    [`Memory::allocate_frames`].
    /// 2. The frames are no longer in use: no reference and no device reads or writes them, no
    ///    table and no TLB names them. (Frames that [`crate::KernelMap::vunmap`] unmaps lazily stay
    ///    named until the next [`crate::KernelMap::purge`].)
    ///
    /// ```
    /// fn free<P: bindery::Platform>(memory: &bindery::Memory<P>, frames: bindery::FrameRange) {
    ///     // SAFETY: 1. `allocate_frames` returned them; 2. they are not used any more.
    ///     unsafe { memory.free_frames(frames) };
    /// }
    /// ```
    ///
    /// Safe code does not free frames:
    ///
    /// ```compile_fail,E0133
    /// fn free<P: bindery::Platform>(memory: &bindery::Memory<P>, frames: bindery::FrameRange) {
    ///     memory.free_frames(frames);
    /// }
    /// ```
    pub unsafe fn free_frames(&self, frames: FrameRange) -> bool {
        let order = Order(frames.count.trailing_zeros() as u8);
        if !frames.count.is_power_of_two()
            || order > MAX_ORDER
            || !self.frames.manages(frames.first)
        {
            return false;
        }
        let taken = meta::state_of(meta::Kind::Embedder, order);
        let raw = meta::state_of(meta::Kind::Raw, order);
        // Before the state changes: an unmapping finds the block by it. A program may still map some
        // frames, until the source revokes them; after that, the count only falls.
        if self.frames.meta(frames.first).word.load(Ordering::Acquire) != 0 {
            return false;
        }
        // In one step: if two threads free the same frames, only one of them succeeds.
        let state = &self.frames.meta(frames.first).state;
        let known =
            state.compare_exchange(taken, raw, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if known {
            // SAFETY: 1. the state said so, and says so no more; 2. the caller's obligation 2.
            unsafe { self.frames.free(frames.first, order) };
        }
        known
    }
}

/// Leaves without a folio. Those of the embedder's blocks are counted in the block's metadata, so
/// that no block is freed while a program maps a part of it. Zero pages, and frames that are not of
/// the memory, have no counts.
impl<P: Platform> Memory<P> {
    /// Whether programs may map these frames through a [`crate::FrameSource`]: none of them is one
    /// that the memory allocates for the core.
    pub(crate) fn may_show(&self, frames: FrameRange) -> bool {
        self.each_block(frames, |block, _| block.is_some())
    }

    /// The length of a run of leaves without a folio that begins with `frame`, at most `limit`: it
    /// ends before a frame of the core's, which may be a folio of the next mapping.
    #[cold]
    pub(crate) fn shown_limit(&self, frame: Frame, limit: u32) -> u32 {
        let mut length = 0;
        self.each_block(FrameRange { first: frame, count: limit }, |block, count| {
            length += if block.is_some() { count } else { 0 };
            block.is_some()
        });
        length.max(1)
    }

    /// Counts new leaves of these frames, which may be shown.
    pub(crate) fn map_uncounted(&self, first: Frame, pages: u32) {
        self.each_block(FrameRange { first, count: pages }, |block, count| {
            if let Some(Block::Embedder(head)) = block {
                self.frames.meta(head).word.fetch_add(u64::from(count), Ordering::Relaxed);
            }
            true
        });
    }

    /// Counts removed leaves of these frames, which have no folio.
    #[inline]
    pub(crate) fn unmap_uncounted(&self, first: Frame, pages: u32) {
        if !self.is_zero(first) {
            self.unmap_shown(first, pages);
        }
    }

    #[cold]
    fn unmap_shown(&self, first: Frame, pages: u32) {
        self.each_block(FrameRange { first, count: pages }, |block, count| {
            if let Some(Block::Embedder(head)) = block {
                // Release: the block is freed after all accesses through the leaves.
                self.frames.meta(head).word.fetch_sub(u64::from(count), Ordering::Release);
            }
            true
        });
    }

    /// Visits the blocks of the frames in order, each with the number of its frames that are among
    /// them, as long as `visit` returns true. `None` for a frame that the core uses. Returns what
    /// `visit` returned last.
    fn each_block(
        &self,
        frames: FrameRange,
        mut visit: impl FnMut(Option<Block>, u32) -> bool,
    ) -> bool {
        let span = self.frame_span();
        let (mut at, mut left) = (frames.first, frames.count);
        while left > 0 {
            // Before the memory, and behind it, there are no blocks.
            let (block, count) = if at < span.first {
                (Some(Block::Other), span.first.0 - at.0)
            } else if !span.contains(at) {
                (Some(Block::Other), left)
            } else if let Some((head, order)) = self.embedder_block(at) {
                (Some(Block::Embedder(head)), head.0 + order.pages() - at.0)
            } else if self.frames.manages(at) {
                (None, 1)
            } else {
                (Some(Block::Other), 1)
            };
            let count = count.min(left);
            if !visit(block, count) {
                return false;
            }
            (at, left) = (Frame(at.0.wrapping_add(count)), left - count);
        }
        true
    }

    /// The embedder's block that holds `frame`: its head and its order. A head is aligned to its
    /// block's size, and the frames behind it are tails.
    fn embedder_block(&self, frame: Frame) -> Option<(Frame, Order)> {
        let span = self.frame_span();
        (0..=MAX_ORDER.0).map(Order).find_map(|order| {
            let head = Frame(frame.0 & !(order.pages() - 1));
            let state = span.contains(head).then(|| self.frames.meta(head))?;
            let state = state.state.load(Ordering::Relaxed);
            (state == meta::state_of(meta::Kind::Embedder, order)).then_some((head, order))
        })
    }
}

/// Frames that the core does not use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Block {
    /// Those of a block of [`Memory::allocate_frames`], by its first frame.
    Embedder(Frame),
    /// Those that are not of the memory.
    Other,
}

/// The role of a frame for the address spaces that map it.
///
/// ```
/// use bindery::addr::Frame;
/// use bindery::{FrameKind, Memory, Platform};
///
/// fn is_zero_page<P: Platform>(memory: &Memory<P>, frame: Frame) -> bool {
///     memory.frame_kind(frame) == FrameKind::Zero
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    /// The zero page, or a page of the huge zero page.
    Zero,
    /// Anonymous memory.
    Anonymous,
    /// A page of shared memory or of a file.
    Object,
    /// Another use, or not a frame of the memory.
    Other,
}
