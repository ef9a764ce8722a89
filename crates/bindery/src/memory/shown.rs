//! Leaves without a folio. Those of the embedder's blocks are counted in the block's metadata, so
//! that no block is freed while a program maps a part of it. Zero pages and frames outside the
//! memory have no counts.

use core::sync::atomic::Ordering;

use super::Memory;
use crate::addr::{Frame, Order};
use crate::frame::{FrameRange, MAX_ORDER, meta};
use crate::platform::Platform;

/// The user of frames that the core does not use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameUser {
    /// Frames of a block of [`Memory::allocate_frames`], identified by its first frame.
    Embedder(Frame),
    /// Frames outside the memory.
    Other,
}

/// Whether programs may map these frames through a [`crate::FrameSource`]: the memory has allocated
/// none of them for the core.
pub(crate) fn may_show<P: Platform>(memory: &Memory<P>, frames: FrameRange) -> bool {
    each_block(memory, frames, |block, _| block.is_some())
}

/// The length of a run of leaves without a folio that begins with `frame`, at most `limit`. The run
/// ends before a frame of the core, which may be a folio of the next mapping.
#[cold]
pub(crate) fn shown_limit<P: Platform>(memory: &Memory<P>, frame: Frame, limit: u32) -> u32 {
    let mut length = 0;
    each_block(memory, FrameRange { first: frame, count: limit }, |block, count| {
        length += if block.is_some() { count } else { 0 };
        block.is_some()
    });
    length.max(1)
}

/// Counts new leaves of these frames, which `may_show` permits.
pub(crate) fn map_shown<P: Platform>(memory: &Memory<P>, frames: FrameRange) {
    each_block(memory, frames, |block, count| {
        if let Some(FrameUser::Embedder(head)) = block {
            memory.frames.meta(head).word.fetch_add(u64::from(count), Ordering::Relaxed);
        }
        true
    });
}

/// Counts removed leaves of these frames, which have no folio.
#[inline]
pub(crate) fn unmap_shown<P: Platform>(memory: &Memory<P>, frames: FrameRange) {
    if !memory.is_zero(frames.first) {
        count_removed(memory, frames);
    }
}

#[cold]
fn count_removed<P: Platform>(memory: &Memory<P>, frames: FrameRange) {
    each_block(memory, frames, |block, count| {
        if let Some(FrameUser::Embedder(head)) = block {
            // Release: the block is freed after all accesses through the leaves.
            memory.frames.meta(head).word.fetch_sub(u64::from(count), Ordering::Release);
        }
        true
    });
}

/// Visits the blocks of the frames in order, each with the number of given frames in it, as long as
/// `visit` returns true. `None` for a frame that the core uses. Returns the last result of `visit`.
fn each_block<P: Platform>(
    memory: &Memory<P>,
    frames: FrameRange,
    mut visit: impl FnMut(Option<FrameUser>, u32) -> bool,
) -> bool {
    let span = memory.frame_span();
    let (mut at, mut left) = (frames.first, frames.count);
    while left > 0 {
        // No blocks exist before or after the memory.
        let (block, count) = if at < span.first {
            (Some(FrameUser::Other), span.first.0 - at.0)
        } else if !span.contains(at) {
            (Some(FrameUser::Other), left)
        } else if let holes = count_holes(memory, at, left)
            && holes > 0
        {
            (Some(FrameUser::Other), holes)
        } else if let Some((head, order)) = embedder_block(memory, at) {
            (Some(FrameUser::Embedder(head)), head.0 + order.pages() - at.0)
        } else {
            (None, 1)
        };
        let count = count.min(left);
        if !visit(block, count) {
            return false;
        }
        (at, left) = (Frame(at.0.wrapping_add(count)), left - count);
    }
    true
}

/// The number of frames from `at` on, a frame of the memory's span, that are holes in the memory.
fn count_holes<P: Platform>(memory: &Memory<P>, at: Frame, limit: u32) -> u32 {
    let span = memory.frame_span();
    let is_hole = |ahead: &u32| {
        let frame = at.plus(*ahead);
        span.contains(frame) && !memory.frames.manages(frame)
    };
    (0..limit).take_while(is_hole).count() as u32
}

/// The embedder's block that holds `frame`: its head and its order. A head is aligned to its
/// block's size, and the frames after it are tails.
fn embedder_block<P: Platform>(memory: &Memory<P>, frame: Frame) -> Option<(Frame, Order)> {
    let span = memory.frame_span();
    (0..=MAX_ORDER.0).map(Order).find_map(|order| {
        let head = Frame(frame.0 & !(order.pages() - 1));
        let state = span.contains(head).then(|| memory.frames.meta(head))?;
        let state = state.state.load(Ordering::Relaxed);
        (state == meta::state_of(meta::MetaKind::Embedder, order)).then_some((head, order))
    })
}
