//! Frames from the embedder's view: their use, and the frames that the embedder allocates.

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
        kind_of(self, frame)
    }

    /// The use of a frame. Frames outside the memory are reported as such. Briefly takes the locks
    /// of the allocator and of the CPUs' free frames, and no others.
    ///
    /// Context: any. Complexity: linear in the number of CPUs that were ever online.
    pub fn frame_view(&self, frame: Frame) -> FrameView {
        crate::folio::frame_view(&self.frames, frame)
    }

    /// The frames from the lowest to the highest of the memory, holes included.
    ///
    /// Context: any.
    pub fn frame_span(&self) -> FrameRange {
        self.frames.span()
    }

    /// Counts frames by use. Frames are examined one by one, so a frame whose use changes
    /// concurrently is counted under its old or its new use.
    ///
    /// Context: spins. Complexity: linear in the blocks of frames.
    pub fn frame_usage(&self) -> FrameUsage {
        crate::folio::frame_usage(&self.frames, self.huge_order())
    }

    /// Allocates 2^`order` consecutive frames, aligned to their size, for the embedder's own use,
    /// for example for [`crate::KernelMap::vmap`] or a device. Their content is unspecified. `None`
    /// if no such block is free outside the reclaim reserve, or if `order` is above 10. In the
    /// first case [`Memory::drain_deferred`] may help.
    ///
    /// Context: spins. Complexity: constant.
    pub fn allocate_frames(&self, order: Order) -> Option<FrameRange> {
        allocate(self, order)
    }

    /// Frees all frames of one [`Memory::allocate_frames`]. Returns whether they came from such a
    /// call, and no program maps any of them ([`crate::FrameSource`]); other frames are left
    /// unchanged. Leaves are counted down at the end of an unmapping, so revoked frames may be
    /// refused briefly while another thread completes a `munmap` or drops an address space.
    ///
    /// Context: spins. Complexity: constant.
    ///
    /// # Safety
    /// 1. The caller owns the frames: the caller, or the code that passed them on, received them
    ///    from [`Memory::allocate_frames`].
    /// 2. The frames are no longer in use: no reference and no device reads or writes them, no
    ///    table and no TLB maps them. (TLBs may map frames that [`crate::KernelMap::vunmap`] unmaps
    ///    lazily until the next [`crate::KernelMap::purge`].)
    ///
    /// ```
    /// fn free<P: bindery::Platform>(memory: &bindery::Memory<P>, frames: bindery::FrameRange) {
    ///     // SAFETY: 1. `allocate_frames` returned them; 2. they are not used any more.
    ///     unsafe { memory.free_frames(frames) };
    /// }
    /// ```
    ///
    /// Safe code cannot free frames:
    ///
    /// ```compile_fail,E0133
    /// fn free<P: bindery::Platform>(memory: &bindery::Memory<P>, frames: bindery::FrameRange) {
    ///     memory.free_frames(frames);
    /// }
    /// ```
    pub unsafe fn free_frames(&self, frames: FrameRange) -> bool {
        // SAFETY: 1. and 2. the caller's obligations.
        unsafe { free(self, frames) }
    }
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
    /// Another use, or a frame outside the memory.
    Other,
}

fn kind_of<P: Platform>(memory: &Memory<P>, frame: Frame) -> FrameKind {
    match memory.frames.folio_of(frame) {
        None if memory.is_zero(frame) => FrameKind::Zero,
        Some(folio) if memory.frames.folio(folio).is_anonymous() => FrameKind::Anonymous,
        Some(folio) if memory.frames.folio(folio).is_of_object() => FrameKind::Object,
        _ => FrameKind::Other,
    }
}

fn allocate<P: Platform>(memory: &Memory<P>, order: Order) -> Option<FrameRange> {
    let first = memory.frames.allocate(order, AllocateFor::Use).or_else(|| {
        // The frames that CPUs cache, free or with only free objects, may complete a block.
        if !memory.frames.fronts().has_slots() || order > MAX_ORDER {
            return None;
        }
        memory.slabs().for_each(|slab| slab.trim(&memory.frames));
        memory.frames.trim();
        memory.frames.allocate(order, AllocateFor::Use)
    })?;
    let state = meta::state_of(meta::MetaKind::Embedder, order);
    memory.frames.meta(first).state.store(state, Ordering::Relaxed);
    Some(FrameRange { first, count: order.pages() })
}

/// # Safety
/// 1. and 2. as of [`Memory::free_frames`].
unsafe fn free<P: Platform>(memory: &Memory<P>, frames: FrameRange) -> bool {
    let order = Order(frames.count.trailing_zeros() as u8);
    if !frames.count.is_power_of_two() || order > MAX_ORDER || !memory.frames.manages(frames.first)
    {
        return false;
    }
    let taken = meta::state_of(meta::MetaKind::Embedder, order);
    let raw = meta::state_of(meta::MetaKind::Raw, order);
    // Checked before the state changes, because an unmapping finds the block by its state. A
    // program may still map some frames until the source revokes them; after that, the count only
    // falls.
    if memory.frames.meta(frames.first).word.load(Ordering::Acquire) != 0 {
        return false;
    }
    // In one step, so that only one of two threads that free the same frames succeeds.
    let state = &memory.frames.meta(frames.first).state;
    let known = state.compare_exchange(taken, raw, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if known {
        // SAFETY: 1. the state was this block's, and was changed just now; 2. the caller's
        // obligation 2.
        unsafe { memory.frames.free(frames.first, order) };
    }
    known
}
