//! Physical memory: the allocator of frames, their metadata, and slabs.
//!
//! | file | contents |
//! |---|---|
//! | `meta` | `FrameMeta`: 32 bytes about each frame, one layout for each use |
//! | `range` | [`FrameRange`]: consecutive frames; checks the machine's ranges |
//! | `error` | [`FramesError`]: the reasons why they cannot be used |
//! | `allocator` | `Allocator`: all ways in and out of the free lists |
//! | `buddy` | the free lists: blocks of 2^order frames |
//! | `front`, `fronts`, `drains` | free frames that each CPU keeps for itself |
//! | `batch` | frames that are freed together |
//! | `pending`, `table_meta` | page tables: pending flushes; what else is known of one |
//! | `slab` | `Slab`: small objects of the core, carved from frames |
//! | `slab_pool` | frames that a slab keeps in advance |
//! | `magazine` | free objects that each CPU keeps for itself |
//! | `inject` | allocations that fail on purpose, for tests |
//!
//! [`Frames`] combines these parts. No function here sleeps. The free lists have one spin lock,
//! which is held for a number of steps bounded by [`MAX_ORDER`] and ranks below every other lock of
//! the core. The owner of a frame decides the meaning of its metadata. Metadata is accessed by
//! plain stores while the frame has one owner, and by atomic instructions once tables refer to it.
//! [`crate::folio`] describes the metadata of user memory.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod allocator;
mod batch;
mod buddy;
pub(crate) mod drains;
#[cfg(all(test, any(loom, shuttle)))]
mod drains_loom_model;
mod error;
mod front;
mod fronts;
#[cfg(any(test, feature = "testing"))]
mod inject;
mod magazine;
#[cfg(all(test, any(loom, shuttle)))]
mod magazine_loom_model;
pub(crate) mod meta;
pub(crate) mod pending;
mod range;
pub(crate) mod slab;
mod slab_pool;
pub(crate) mod table_meta;
#[cfg(test)]
pub(crate) mod tests;

use core::ops::Deref;

use crate::addr::PAGE_SIZE;
use crate::cpu::CpuTable;
use crate::platform::Platform;

use meta::{FrameMeta, META_SIZE, MetaArray};
use range::span_of;

pub(crate) use allocator::{AllocateFor, Allocator, FrameTraffic};
pub(crate) use batch::FreeBatch;
pub use buddy::MAX_ORDER;
pub use error::FramesError;
pub(crate) use front::{Front, MOST_FRAMES};
pub(crate) use magazine::Magazines;
pub use range::FrameRange;

/// The machine's memory: its frames, their free or allocated state, and the use of each.
/// Dereferences to [`Allocator`].
pub(crate) struct Frames<P: Platform> {
    allocator: Allocator<P>,
    /// The free objects that each CPU keeps for itself.
    magazines: CpuTable<Magazines<P>>,
}

impl<P: Platform> Deref for Frames<P> {
    type Target = Allocator<P>;

    #[inline(always)]
    fn deref(&self) -> &Allocator<P> {
        &self.allocator
    }
}

impl<P: Platform> Frames<P> {
    /// Takes over the memory in `ranges`, in any order. The metadata of all frames from the lowest
    /// to the highest, holes included, is stored at the end of the largest range: 32 bytes for each
    /// frame, or 0.8% of a memory without holes.
    ///
    /// Time linear in the frames.
    ///
    /// # Errors
    ///
    /// Each case of [`FramesError`], before anything is written.
    ///
    /// # Safety
    ///
    /// 1. The frames in `ranges` have no other user from now on.
    pub(crate) unsafe fn new(platform: P, ranges: &[FrameRange]) -> Result<Self, FramesError> {
        let (first, count) = span_of(&platform, ranges)?;
        let largest = ranges.iter().max_by_key(|range| range.count).ok_or(FramesError::Empty)?;
        let meta_frames = (u64::from(count) * META_SIZE as u64).div_ceil(PAGE_SIZE) as u32;
        let all: u64 = ranges.iter().map(|range| u64::from(range.count)).sum();
        if meta_frames > largest.count || u64::from(meta_frames) == all {
            return Err(FramesError::TooSmall);
        }
        let kept = largest.count - meta_frames;
        let meta_first = largest.first.plus(kept);
        platform.zero(meta_first, meta_frames);
        let base = platform.direct_map(meta_first).cast::<FrameMeta>().as_ptr();
        // SAFETY: 1. The direct map's promise: these frames lie in one range, so their bytes are
        // consecutive. `span_of` checked that they are page-aligned. They remain valid while the
        // platform lives, which the value owns. They have no other user (1). They are zeroed, and
        // they are not handed to the buddy allocator below, so no other user ever receives them.
        let metas = unsafe { MetaArray::new(base, first, count) };

        let allocator = Allocator::new(platform, metas, |lent, buddy| {
            for range in ranges {
                let usable = if core::ptr::eq(range, largest) { kept } else { range.count };
                buddy.add(lent, range.first, usable);
            }
        });
        Ok(Self { allocator, magazines: CpuTable::new() })
    }

    /// The magazines of each CPU.
    pub(crate) fn magazines(&self) -> &CpuTable<Magazines<P>> {
        &self.magazines
    }
}
