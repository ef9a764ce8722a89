//! Physical memory: the allocator of frames, their metadata, and slabs.
//!
//! | file | contents |
//! |---|---|
//! | `meta` | `FrameMeta`: 32 bytes about each frame, one layout for each use |
//! | `range` | [`FrameRange`]: consecutive frames; checks the machine's ranges |
//! | `error` | [`FramesError`]: the reasons why they cannot be used |
//! | `buddy` | the allocator of blocks of 2^order frames |
//! | `front`, `fronts`, `drains` | free frames that each CPU keeps for itself |
//! | `batch` | frames that are freed together |
//! | `pending`, `table_meta` | page tables: pending flushes; what else is known of one |
//! | `slab` | `Slab`: small objects of the core, carved from frames |
//! | `magazine` | free objects that each CPU keeps for itself |
//! | `inject` | allocations that fail on purpose, for tests |
//!
//! [`Frames`] puts them together. Nothing here sleeps. The free lists have one spin lock, which is
//! held for a number of steps bounded by [`MAX_ORDER`] and is below every other lock of the core.
//! The owner of a frame decides the meaning of its metadata: plain stores while it has one owner,
//! atomic instructions once tables name it. [`crate::folio`] tells what the metadata of user memory
//! means.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod batch;
mod buddy;
mod drains;
#[cfg(all(test, loom))]
mod drains_loom_model;
mod error;
mod front;
mod fronts;
#[cfg(any(test, feature = "testing"))]
mod inject;
mod magazine;
#[cfg(all(test, loom))]
mod magazine_loom_model;
pub(crate) mod meta;
pub(crate) mod pending;
mod range;
pub(crate) mod slab;
pub(crate) mod table_meta;
#[cfg(test)]
pub(crate) mod tests;

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use crossbeam_utils::CachePadded;

use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::cpu::CpuTable;
use crate::platform::Platform;
use crate::sync::Mutex;

use buddy::Buddy;
use drains::Drains;
use meta::{FrameMeta, Kind, META_SIZE, MetaArray};
use range::span_of;

pub(crate) use batch::FreeBatch;
pub use buddy::MAX_ORDER;
pub use error::FramesError;
pub(crate) use front::{Front, MOST_FRAMES};
pub(crate) use magazine::Magazines;
pub use range::FrameRange;

/// The machine's memory: which frames there are, which are free, and what each is used for.
pub(crate) struct Frames<P: Platform> {
    /// On lines of its own: the embedder may write it at any time, and `metas` is only read.
    platform: CachePadded<P>,
    metas: MetaArray,
    total: u64,
    /// As in the free lists: frames that are kept for [`AllocateFor::Reclaim`].
    reserve: AtomicU64,
    /// Calls that would have corrupted the counts or lists, and changed nothing.
    refused: AtomicU64,
    fronts: CpuTable<Front<P>>,
    /// The maximum of frames in each front; 0 for no fronts.
    front_limit: AtomicU32,
    drains: Drains<P>,
    /// The free objects that each CPU keeps for itself.
    magazines: CpuTable<Magazines<P>>,
    /// Each allocation writes it, so no line that is only read has a part of it.
    lists: CachePadded<Lists<P>>,
    #[cfg(any(test, feature = "testing"))]
    inject: inject::Inject,
}

/// The free lists, and the counts that change with them: an allocation of a single frame writes one
/// cache line, if the platform's spin lock has at most 24 bytes.
#[repr(C)]
struct Lists<P: Platform> {
    /// As in `buddy`, to be read without the lock.
    free: AtomicU64,
    /// Frames that were taken so far; changes with the lock of `buddy` held.
    taken: AtomicU64,
    buddy: Mutex<P::SpinLock, Buddy>,
    /// Whether the lists have less than three times the reserve: then no frame enters a front.
    is_low: AtomicBool,
}

/// The purpose of an allocation. Each names its own, and none is the default: an allocation that
/// takes the reserve without need leaves reclaim unable to free anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AllocateFor {
    /// Memory that is used: folios, tables, objects of the core, areas. It leaves the reserve, and
    /// fails instead.
    Use,
    /// Memory that frees more memory, in a call that frees it: reclaim may take all that there is.
    Reclaim,
}

/// How many frames went both ways so far.
pub(crate) struct FrameTraffic {
    pub(crate) taken: u64,
    pub(crate) returned: u64,
}

impl<P: Platform> Frames<P> {
    /// Takes over the memory in `ranges`, in any order. The metadata of all frames from the lowest
    /// to the highest, holes included, is kept at the end of the largest range: 32 bytes each, or
    /// 0.8% of the memory where there are no holes.
    ///
    /// Time linear in the frames.
    ///
    /// # Errors
    ///
    /// Each case of [`FramesError`], before anything is written.
    ///
    /// # Safety
    ///
    /// 1. Nothing else uses the frames in `ranges` from now on.
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
        // consecutive, `span_of` saw that they begin aligned to a page, and they stay while
        // the platform does, which the value owns. Nothing else uses them (1). They are zeroed,
        // and since they are not handed to the buddy allocator below, no other user ever gets them.
        let metas = unsafe { MetaArray::new(base, first, count) };

        let mut buddy = Buddy::new();
        for range in ranges {
            let usable = if core::ptr::eq(range, largest) { kept } else { range.count };
            buddy.add(metas, range.first, usable);
        }
        let total = buddy.free_frame_count();
        Ok(Self {
            platform: CachePadded::new(platform),
            metas,
            total,
            reserve: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            fronts: CpuTable::new(),
            front_limit: AtomicU32::new(0),
            drains: Drains::new(),
            magazines: CpuTable::new(),
            lists: CachePadded::new(Lists {
                free: AtomicU64::new(total),
                taken: AtomicU64::new(0),
                buddy: Mutex::new(buddy),
                is_low: AtomicBool::new(false),
            }),
            #[cfg(any(test, feature = "testing"))]
            inject: inject::Inject::new(),
        })
    }

    /// The platform that the frames are reached by.
    #[inline]
    pub(crate) fn platform(&self) -> &P {
        &self.platform
    }

    /// The magazines of each CPU.
    pub(crate) fn magazines(&self) -> &CpuTable<Magazines<P>> {
        &self.magazines
    }

    /// The metadata of a frame in the span: one that this allocator has allocated, or for which
    /// [`Frames::manages`] is true.
    #[inline]
    pub(crate) fn meta(&self, frame: Frame) -> &FrameMeta {
        self.metas.get(frame)
    }

    /// Whether there is metadata of the frame.
    #[inline]
    pub(crate) fn covers(&self, frame: Frame) -> bool {
        self.metas.covers(frame)
    }

    /// The metadata of all frames, for a pass over many.
    #[inline]
    pub(crate) fn metas(&self) -> MetaArray {
        self.metas
    }

    /// The frames that are kept ready for single allocations: free, whatever their metadata says.
    pub(crate) fn ready(&self) -> FrameRange {
        let (first, count) = self.lists.buddy.lock().ready();
        FrameRange { first, count }
    }

    /// Whether `frame` is memory that is, was or can be allocated here: in the span, and neither
    /// a hole nor the metadata.
    #[inline]
    pub(crate) fn manages(&self, frame: Frame) -> bool {
        self.metas.covers(frame) && self.metas.get(frame).kind() != Kind::Reserved
    }

    /// The first frame that has metadata, and how many have, holes included.
    pub(crate) fn span(&self) -> FrameRange {
        self.metas.span()
    }

    /// A block of 2^`order` frames, aligned to its size, contents unspecified. Its head is
    /// [`Kind::Raw`] with all fields empty, the other frames are [`Kind::Tail`]. `None` if no
    /// free block is large enough, `order` is above [`MAX_ORDER`], or the block would be one of the
    /// reserve, and `purpose` is not [`AllocateFor::Reclaim`].
    ///
    /// Does not sleep. O([`MAX_ORDER`]).
    #[inline]
    pub(crate) fn allocate(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        if self.fails_on_purpose() {
            return None;
        }
        self.take(order, purpose)
    }

    /// Keeps `frames` frames for [`AllocateFor::Reclaim`].
    pub(crate) fn set_reserve(&self, frames: u64) {
        let mut buddy = self.lists.buddy.lock();
        buddy.set_reserve(frames);
        self.reserve.store(frames, Relaxed);
        self.publish_to_fronts(&buddy);
    }

    /// Frames that are kept for [`AllocateFor::Reclaim`].
    pub(crate) fn reserve(&self) -> u64 {
        self.reserve.load(Relaxed)
    }

    /// As [`Frames::allocate`], of a smaller block where none is so large, and its order. `None` if
    /// `purpose` may not take a single frame. Does not sleep. O([`MAX_ORDER`]).
    pub(crate) fn allocate_up_to(
        &self,
        order: Order,
        purpose: AllocateFor,
    ) -> Option<(Frame, Order)> {
        if self.fails_on_purpose() {
            return None;
        }
        if self.has_fronts() {
            return self.take_up_to(order, purpose);
        }
        let mut buddy = self.lists.buddy.lock();
        let block = buddy.allocate_up_to(self.metas, order, purpose);
        self.publish(&buddy);
        self.note_taken(block.map_or(0, |(_, order)| u64::from(order.pages())));
        block
    }

    /// [`Frames::take`], from the free lists.
    #[inline(always)]
    fn take_from_lists(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        let mut buddy = self.lists.buddy.lock();
        let frame = buddy.allocate(self.metas, order, purpose);
        self.publish(&buddy);
        self.note_taken(frame.map_or(0, |_| u64::from(order.pages())));
        frame
    }

    /// Shows what the lists have to readers without the lock, which is held.
    #[inline]
    fn publish(&self, buddy: &Buddy) {
        self.lists.free.store(buddy.free_frame_count(), Relaxed);
    }

    /// The lock of `buddy` is held, so a plain addition is enough.
    #[inline]
    fn note_taken(&self, frames: u64) {
        self.lists.taken.store(self.lists.taken.load(Relaxed).wrapping_add(frames), Relaxed);
    }

    /// The numbers of frames that were allocated and freed so far.
    pub(crate) fn traffic(&self) -> FrameTraffic {
        let from_fronts = self.fronts.iter().map(Front::taken).sum();
        let taken = self.lists.taken.load(Relaxed).wrapping_add(from_fronts);
        // Frames in use are `total - free`; all others that were taken have been returned.
        let returned = taken.saturating_sub(self.total.saturating_sub(self.free_frame_count()));
        FrameTraffic { taken, returned }
    }

    /// Gives an allocated block back, whatever it was used for, and tells the platform first.
    ///
    /// A block that is not allocated, or was allocated with another order, stays as it is and is
    /// counted in [`Frames::refused`]: of a bug, a leak is the safest outcome. (A second free is
    /// recognized for as long as the block has not been allocated again.)
    ///
    /// Does not sleep. O([`MAX_ORDER`]), whatever the order.
    ///
    /// # Safety
    /// If the block is allocated with this order:
    /// 1. It is the caller's, and no other thread frees it.
    /// 2. Nobody uses its frames any more: no reference, no entry, no TLB, no reader in a read
    ///    section, no device.
    #[inline]
    pub(crate) unsafe fn free(&self, first: Frame, order: Order) {
        // Most callers free one page, and the compiler knows of it.
        if order == Order::PAGE {
            // SAFETY: the caller's obligations are the same.
            unsafe { self.free_page(first) };
        } else {
            // SAFETY: the caller's obligations are the same.
            unsafe { self.free_block(first, order) };
        }
    }

    /// [`Frames::free`] of a page, apart so that its order is a constant.
    ///
    /// # Safety
    /// As for [`Frames::free`].
    #[inline(never)]
    unsafe fn free_page(&self, page: Frame) {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.free_any(page, Order::PAGE) };
    }

    /// [`Frames::free`] of a larger block.
    ///
    /// # Safety
    /// As for [`Frames::free`].
    #[inline(never)]
    unsafe fn free_block(&self, first: Frame, order: Order) {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.free_any(first, order) };
    }

    /// [`Frames::free`], in each of its two functions.
    ///
    /// # Safety
    /// As for [`Frames::free`].
    #[inline(always)]
    unsafe fn free_any(&self, first: Frame, order: Order) {
        if order <= MAX_ORDER {
            self.platform.frames_released(first, order.pages());
        }
        if self.has_fronts() {
            self.free_with_fronts(first, order);
            return;
        }
        let mut buddy = self.lists.buddy.lock();
        let freed = buddy.free(self.metas, first, order);
        self.publish(&buddy);
        drop(buddy);
        if freed.is_err() {
            self.refuse();
        }
    }

    /// Lets free frames that are kept for single allocations join the large blocks: those that are
    /// ready, and those of all fronts. O(log frames), and linear in the frames of the fronts.
    pub(crate) fn trim(&self) {
        self.drain_fronts(Order::PAGE);
        self.lists.buddy.lock().join_ready(self.metas);
    }

    /// Frames that are free now, of any order. Does not wait for the lock.
    ///
    /// Context: any.
    pub fn free_frame_count(&self) -> u64 {
        self.lists.free.load(Relaxed) + self.frames_in_fronts()
    }

    /// Frames that can be allocated when all are free: the ranges without the metadata.
    ///
    /// Context: any.
    pub fn total_frames(&self) -> u64 {
        self.total
    }

    /// How many calls were refused because they freed, unmapped or released what was not
    /// allocated, mapped or held. Each is a bug of the core; the auditor requires 0.
    ///
    /// Context: any.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Shows `f` every block: its head, its order (0 for tables, whose level is stored there, and
    /// for single reserved frames), its kind. Frames that are ready or in a front are shown as single free ones.
    /// A frame that is shown as [`Kind::Tail`] belongs to no block: something is broken. For a
    /// quiet system; O(frames).
    pub(crate) fn for_each_block(&self, mut f: impl FnMut(Frame, Order, Kind)) {
        let FrameRange { first, count } = self.metas.span();
        let (ready, kept) = self.lists.buddy.lock().ready();
        let mut at = 0;
        while at < count {
            let frame = first.plus(at);
            let meta = self.metas.get(frame);
            let is_ready = frame.0.wrapping_sub(ready.0) < kept;
            let kind = if is_ready { Kind::Free } else { meta.kind() };
            let order = match kind {
                Kind::Front => {
                    let run = (meta.word.load(Relaxed) as u32).clamp(1, count - at);
                    (0..run).for_each(|kept| f(frame.plus(kept), Order::PAGE, Kind::Free));
                    at += run;
                    continue;
                }
                Kind::Free if is_ready => Order::PAGE,
                Kind::Reserved | Kind::Tail | Kind::Table => Order::PAGE,
                Kind::Free
                | Kind::Raw
                | Kind::Folio
                | Kind::Slab
                | Kind::Zero
                | Kind::Kernel
                | Kind::Embedder
                | Kind::Compressed
                | Kind::Swap
                | Kind::Cpu => meta.order(),
            };
            f(frame, order, kind);
            at = at.saturating_add(order.pages());
        }
    }

    /// Verifies that free lists, kinds and counts agree, that free blocks are aligned, whole, and
    /// joined with their buddies. Holds the allocator's lock for a time linear in all frames: for
    /// the auditor and tests.
    ///
    /// # Errors
    ///
    /// A frame at which something is wrong; the first of the span where only a total is.
    pub(crate) fn check_free_lists(&self) -> Result<(), Frame> {
        let runs = self.check_fronts()?;
        let FrameRange { first, count } = self.metas.span();
        let heads = (0..count).filter(|at| self.metas.get(first.plus(*at)).kind() == Kind::Front);
        let buddy = self.lists.buddy.lock();
        if heads.count() as u64 != runs || self.lists.free.load(Relaxed) != buddy.free_frame_count()
        {
            return Err(first);
        }
        buddy.check(self.metas)
    }

    #[cfg(not(any(test, feature = "testing")))]
    #[inline]
    fn fails_on_purpose(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod layout {
    use core::mem::offset_of;

    use super::tests::Machine;
    use super::{Buddy, Frames, Lists};

    #[test]
    fn an_allocation_of_a_ready_frame_writes_one_line() {
        assert_eq!(offset_of!(Frames<Machine>, lists) % 64, 0);
        // The lock is a word in front of the lists.
        let lists = offset_of!(Lists<Machine>, buddy) + size_of::<u64>();
        assert!(lists + Buddy::USED_BY_SINGLE_FRAMES <= 64);
    }
}
