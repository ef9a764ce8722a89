//! [`Pool`]: frames divided into chunks, and lists of frames with holes.
//!
//! ```text
//! a frame of 64 chunks   |#### ######........####..########################........#####|
//!                              hole of 1   hole of 8              hole of 8, the widest of all
//! ```
//!
//! `word` in the frame's metadata has a bit for each chunk in use. A frame is on the list of its
//! widest hole, linked by `next` and `previous`. A full frame is on no list, and an empty one is
//! freed immediately. `owner` is the number of the pool.
//!
//! **Placement.** An object is stored in the narrowest hole that is wide enough. If no hole is wide
//! enough, the object is split over the widest holes, of at least [`MIN_PIECE`] chunks, into at
//! most [`MAX_PIECES`] pieces; only the last piece may use a new frame. So a new frame is allocated
//! only when the old ones are nearly full, whatever the sizes of objects: pages that compress to 60
//! % do not waste 40 % of each frame. A raw page always has a whole frame, so that it can be copied
//! in one step.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering::Relaxed;

use arrayvec::ArrayVec;

use super::extent::{CHUNK, CHUNKS, Extent};
use super::pools::SHARED;
use super::quota::{CompressedQuota, FrameCredit};
use super::{Corrupt, StoreError, object};
use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::frame::drains::{self, Drains, Machine};
use crate::frame::meta::{MetaKind, NONE, is_kind, link, order_in};
use crate::frame::{AllocateFor, Frames};
use crate::platform::Platform;

/// The maximum number of pieces of an object.
pub(super) const MAX_PIECES: usize = 4;
/// The narrowest hole that accepts a piece of a larger object.
const MIN_PIECE: u32 = 4;

/// The pieces of one object, in order.
pub(super) type Extents = ArrayVec<Extent, MAX_PIECES>;
/// Frames that became empty.
pub(super) type Emptied = ArrayVec<Frame, MAX_PIECES>;

/// The frames of a pool, their lists, and its counts.
pub(super) struct Pool {
    /// The pool's number, which is stored in the metadata of each of its frames.
    number: u32,
    /// The first frame of each list. The index of a list is the width of its frames' widest hole;
    /// list 0 is empty.
    lists: [u32; CHUNKS as usize],
    /// The lists that are not empty, one bit each.
    listed: u64,
    credit: FrameCredit,
    pub(super) counts: PoolCounts,
}

/// The counts of a pool.
#[derive(Default)]
pub(super) struct PoolCounts {
    /// As in [`CompressedUsage`](super::CompressedUsage).
    pub(super) pages_stored: u64,
    pub(super) pages_raw: u64,
    pub(super) bytes_compressed: u64,
    pub(super) frames_used: u64,
}

impl Pool {
    pub(super) const fn new(number: u32) -> Self {
        let counts =
            PoolCounts { pages_stored: 0, pages_raw: 0, bytes_compressed: 0, frames_used: 0 };
        let lists = [NONE; CHUNKS as usize];
        Self { number, lists, listed: 0, credit: FrameCredit::new(number != SHARED), counts }
    }

    /// The list of the narrowest holes that are at least `chunks` wide; 0 if no such list exists.
    fn narrowest(&self, chunks: u32) -> u32 {
        let wide = u64::MAX.checked_shl(chunks).unwrap_or(0) & self.listed;
        if wide == 0 { 0 } else { wide.trailing_zeros() }
    }

    fn first_of(&self, list: u32) -> Option<Frame> {
        link(self.lists[list as usize])
    }

    /// Returns the credit to the quota.
    pub(super) fn return_credit(&mut self, quota: &CompressedQuota) {
        self.credit.return_all(quota);
    }

    /// The number of frames that the pool has been granted.
    pub(super) fn granted(&self) -> u64 {
        self.counts.frames_used + self.credit.frames()
    }

    /// Borrows the pool together with the frames that it divides.
    pub(super) fn in_frames<'a, P: Platform>(
        &'a mut self,
        frames: &'a Frames<P>,
        quota: &'a CompressedQuota,
        searches: &'a Drains<P>,
    ) -> PoolInFrames<'a, P> {
        PoolInFrames { pool: self, frames, quota, searches }
    }
}

/// A pool, locked, and the frames that it divides.
pub(super) struct PoolInFrames<'a, P: Platform> {
    pool: &'a mut Pool,
    frames: &'a Frames<P>,
    quota: &'a CompressedQuota,
    searches: &'a Drains<P>,
}

impl<P: Platform> PoolInFrames<'_, P> {
    /// Reserves chunks for an object of `length` bytes, at most a page.
    ///
    /// # Errors
    /// The errors of [`super::CompressedStore::store`]; nothing is reserved.
    pub(super) fn reserve(&mut self, length: usize) -> Result<Extents, StoreError> {
        let mut extents = Extents::new();
        let mut left = length;
        while left > 0 {
            let may_split = length < PAGE_SIZE as usize && extents.remaining_capacity() > 1;
            match self.reserve_piece(left, may_split) {
                Ok(extent) => {
                    left -= extent.bytes();
                    extents.push(extent);
                }
                Err(error) => {
                    // Pieces before the last one are in shared frames, which do not become empty.
                    extents.iter().for_each(|extent| _ = self.clear(*extent));
                    return Err(error);
                }
            }
        }
        self.pool.counts.pages_stored += 1;
        self.pool.counts.pages_raw += u64::from(length == PAGE_SIZE as usize);
        self.pool.counts.bytes_compressed += length as u64;
        Ok(extents)
    }

    /// Reserves chunks for `length` bytes, or for the first part of them.
    fn reserve_piece(&mut self, length: usize, may_split: bool) -> Result<Extent, StoreError> {
        let chunks = length.div_ceil(CHUNK) as u32;
        if let Some(frame) = self.pool.first_of(self.pool.narrowest(chunks)) {
            return Ok(self.carve(frame, chunks, length));
        }
        let widest = self.pool.listed.checked_ilog2().unwrap_or(0);
        if may_split
            && widest >= MIN_PIECE
            && let Some(frame) = self.pool.first_of(widest)
        {
            return Ok(self.carve(frame, widest, length));
        }
        let frame = self.grow()?;
        Ok(self.carve(frame, chunks, length))
    }

    /// Allocates a new frame, which is on no list yet.
    fn grow(&mut self) -> Result<Frame, StoreError> {
        let keeps = self.keeps_credit();
        if !self.pool.credit.take(self.quota, keeps) {
            return Err(StoreError::Limit);
        }
        let Some(frame) = self.frames.allocate(Order::PAGE, AllocateFor::Reclaim) else {
            self.pool.credit.put(self.quota, false);
            return Err(StoreError::NoMemory);
        };
        let meta = self.frames.meta(frame);
        meta.reset(MetaKind::Compressed, Order::PAGE);
        meta.owner.store(self.pool.number, Relaxed);
        self.pool.counts.frames_used += 1;
        self.quota.note_used();
        // The frame may have room for smaller objects than the refused ones.
        drains::note_put(self.searches);
        Ok(frame)
    }

    /// Whether the pool may keep credit: no search is in progress, and no search has failed.
    fn keeps_credit(&self) -> bool {
        !self.quota.is_searching() && self.searches.state() == drains::UNKNOWN
    }

    /// Reserves `chunks` of a frame that has a hole of that width.
    fn carve(&mut self, frame: Frame, chunks: u32, length: usize) -> Extent {
        let used = self.frames.meta(frame).word.load(Relaxed);
        let first = holes_at(!used, chunks).trailing_zeros().min(CHUNKS - chunks);
        let extent = Extent { frame, first, chunks, length };
        self.change(frame, used | extent.mask());
        extent
    }

    /// Releases the chunks of an object and returns the frames that are now empty, for the caller
    /// to free.
    ///
    /// # Errors
    /// An extent that is not in use in this pool; that extent and all after it are not released.
    ///
    /// # Safety
    /// If the object's chunks are in use:
    /// 1. The object belongs to the caller, and no other call frees it.
    /// 2. No thread reads the object any longer.
    pub(super) unsafe fn release(&mut self, object: Extent) -> Result<Emptied, Corrupt> {
        let mut emptied = Emptied::new();
        let mut next = Some(object);
        while let Some(extent) = next
            && !emptied.is_full()
        {
            object::check(self.frames, extent)?;
            if pool_of(self.frames, extent.frame) != self.pool.number {
                return Err(Corrupt);
            }
            // SAFETY: 1. checked above. 2. the caller's obligation 1.
            next = unsafe { object::rest(self.frames.platform(), extent) }?;
            if self.clear(extent) {
                self.pool.counts.frames_used -= 1;
                self.pool.credit.put(self.quota, self.keeps_credit());
                emptied.push(extent.frame);
            }
        }
        self.pool.counts.pages_stored -= 1;
        self.pool.counts.pages_raw -= u64::from(object.is_raw());
        self.pool.counts.bytes_compressed -= object.length as u64;
        drains::note_put(self.searches);
        Ok(emptied)
    }

    /// Releases the chunks of one extent. Returns whether the frame is now empty, in which case it
    /// is on no list.
    fn clear(&mut self, extent: Extent) -> bool {
        let used = self.frames.meta(extent.frame).word.load(Relaxed) & !extent.mask();
        self.change(extent.frame, used);
        used == 0
    }

    /// Stores the bitmap of used chunks and moves the frame to the list for that bitmap.
    fn change(&mut self, frame: Frame, used: u64) {
        let meta = self.frames.meta(frame);
        let before = list_of(meta.word.load(Relaxed));
        let after = list_of(used);
        meta.word.store(used, Relaxed);
        if before == after {
            return;
        }
        if before != 0 {
            self.unlink(frame, before);
        }
        if after != 0 {
            self.link(frame, after);
        }
    }

    fn link(&mut self, frame: Frame, list: u32) {
        let meta = self.frames.meta(frame);
        let head = &mut self.pool.lists[list as usize];
        meta.next.store(*head, Relaxed);
        meta.previous.store(NONE, Relaxed);
        if *head != NONE {
            self.frames.meta(Frame(*head)).previous.store(frame.0, Relaxed);
        }
        *head = frame.0;
        self.pool.listed |= 1 << list;
    }

    fn unlink(&mut self, frame: Frame, list: u32) {
        let meta = self.frames.meta(frame);
        let (next, previous) = (meta.next.load(Relaxed), meta.previous.load(Relaxed));
        if next != NONE {
            self.frames.meta(Frame(next)).previous.store(previous, Relaxed);
        }
        if previous != NONE {
            self.frames.meta(Frame(previous)).next.store(next, Relaxed);
            return;
        }
        self.pool.lists[list as usize] = next;
        if next == NONE {
            self.pool.listed &= !(1 << list);
        }
    }

    /// Verifies that each frame is on the list of its widest hole and that no list is longer than
    /// the number of frames. O(frames with holes).
    ///
    /// # Errors
    /// A frame that is on a wrong list, or [`NONE`] if a list is marked wrongly.
    pub(super) fn check(&self) -> Result<(), Frame> {
        let mut seen = 0;
        for list in 0..CHUNKS {
            let first = self.pool.lists[list as usize];
            if (first != NONE) != (self.pool.listed & 1 << list != 0) {
                return Err(Frame(first));
            }
            let (mut next, mut previous) = (first, NONE);
            while next != NONE {
                let frame = Frame(next);
                let meta = self.frames.meta(frame);
                let right = list != 0
                    && seen < self.pool.counts.frames_used
                    && is_pool_frame(self.frames, frame)
                    && pool_of(self.frames, frame) == self.pool.number
                    && list_of(meta.word.load(Relaxed)) == list
                    && meta.previous.load(Relaxed) == previous;
                if !right {
                    return Err(frame);
                }
                seen += 1;
                (previous, next) = (next, meta.next.load(Relaxed));
            }
        }
        Ok(())
    }
}

/// Whether the frame with this number holds compressed pages.
pub(super) fn is_pool_frame<P: Platform>(frames: &Frames<P>, frame: Frame) -> bool {
    frames.manages(frame) && {
        let state = frames.meta(frame).state.load(Relaxed);
        is_kind(state, MetaKind::Compressed) && order_in(state) == Order::PAGE
    }
}

/// The number of the pool that a frame of compressed pages belongs to.
pub(super) fn pool_of<P: Platform>(frames: &Frames<P>, frame: Frame) -> u32 {
    frames.meta(frame).owner.load(Relaxed)
}

/// The list for a frame with these chunks in use: the width of its widest hole. 0, for no list, if
/// the frame is full or empty.
fn list_of(used: u64) -> u32 {
    if used == 0 { 0 } else { widest(!used) }
}

/// The width of the widest hole. O(log width).
fn widest(free: u64) -> u32 {
    if free == 0 {
        return 0;
    }
    // The starts of holes of `width`: two holes that overlap or touch form a wider one.
    let (mut starts, mut width) = (free, 1);
    while width < CHUNKS {
        let wider = starts & starts >> width;
        if wider == 0 {
            break;
        }
        (starts, width) = (wider, 2 * width);
    }
    let mut more = width / 2;
    while more > 0 {
        let wider = starts & starts >> more;
        if wider != 0 {
            (starts, width) = (wider, width + more);
        }
        more /= 2;
    }
    width
}

/// The starts of holes of `width` chunks, one bit each. O(log width).
fn holes_at(mut free: u64, width: u32) -> u64 {
    let mut have = 1;
    while have < width {
        let more = have.min(width - have);
        free &= free >> more;
        have += more;
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn holes_are_found_wherever_they_are(free: u64, also: u64, width in 1u32..=CHUNKS) {
            for free in [free, free & also, free | also, u64::MAX, 0] {
                let is_hole = |at: u32| (at..at + width).all(|chunk| free & 1 << chunk != 0);
                let starts = (0..=CHUNKS - width).filter(|at| is_hole(*at));
                let found = starts.fold(0u64, |bits, at| bits | 1 << at);
                prop_assert_eq!(holes_at(free, width), found);
                prop_assert_eq!(widest(free) >= width, found != 0);
            }
        }
    }
}
