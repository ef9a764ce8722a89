//! The allocator of frames: its free lists, and every function that adds frames to them or removes
//! frames. `fronts` contains the parts that CPUs keep for themselves.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use crossbeam_utils::CachePadded;

use super::FrameRange;
use super::buddy::{Buddy, MAX_ORDER};
use super::drains::Drains;
use super::front::Front;
#[cfg(any(test, feature = "testing"))]
use super::inject::Inject;
use super::meta::{FrameMeta, MetaArray, MetaKind, Metas};
use crate::addr::{Frame, Order};
use crate::cpu::CpuTable;
use crate::platform::Platform;
use crate::sync::Mutex;

/// The free frames of the machine, in lists and in fronts, and the metadata of all frames.
pub(crate) struct Allocator<P: Platform> {
    /// On its own cache lines, because the embedder may write to it at any time while `metas` is
    /// only read.
    pub(super) platform: CachePadded<P>,
    pub(super) metas: MetaArray,
    pub(super) total: u64,
    /// A copy of the free lists' value: the number of frames reserved for [`AllocateFor::Reclaim`].
    pub(super) reserve: AtomicU64,
    /// The number of calls that would have corrupted the counts or lists. Such calls change
    /// nothing.
    refused: AtomicU64,
    pub(super) fronts: CpuTable<Front<P>>,
    /// The maximum number of frames in each front; 0 for no fronts.
    pub(super) front_limit: AtomicU32,
    /// On its own cache lines, because the fields beside it are only read.
    pub(super) drains: CachePadded<Drains<P>>,
    /// Each allocation writes this field, so its cache lines contain no read-only field.
    pub(super) lists: CachePadded<FreeLists<P>>,
    #[cfg(any(test, feature = "testing"))]
    pub(crate) inject: Inject,
}

/// The free lists, and the counts that change with them: an allocation of a single frame writes one
/// cache line, if the platform's spin lock has at most 24 bytes.
#[repr(C)]
pub(super) struct FreeLists<P: Platform> {
    /// A copy of the count in `buddy`, for readers without the lock.
    pub(super) free: AtomicU64,
    /// The number of frames allocated so far; changed under the lock of `buddy`.
    pub(super) taken: AtomicU64,
    pub(super) buddy: Mutex<P::SpinLock, Buddy>,
    /// Whether the lists have less than three times the reserve. Then no frame enters a front.
    pub(super) is_low: AtomicBool,
}

/// The purpose of an allocation. Every caller states its purpose; a default would be dangerous,
/// because an allocation that unnecessarily consumes the reserve leaves reclaim unable to free
/// memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AllocateFor {
    /// Memory in general use: folios, tables, objects of the core, areas. Such an allocation fails
    /// instead of consuming the reserve.
    Use,
    /// Memory for a call that frees more memory: reclaim may allocate every free frame.
    Reclaim,
}

/// The numbers of frames allocated and freed so far.
pub(crate) struct FrameTraffic {
    pub(crate) taken: u64,
    pub(crate) returned: u64,
}

impl<P: Platform> Allocator<P> {
    /// An allocator of the frames that `add` adds, with their metadata in `metas`.
    pub(super) fn new(
        platform: P,
        metas: MetaArray,
        add: impl FnOnce(Metas<'_>, &mut Buddy),
    ) -> Self {
        let mut buddy = Buddy::new();
        add(metas.lend(), &mut buddy);
        let total = buddy.free_frame_count();
        Self {
            platform: CachePadded::new(platform),
            metas,
            total,
            reserve: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            fronts: CpuTable::new(),
            front_limit: AtomicU32::new(0),
            drains: CachePadded::new(Drains::new()),
            lists: CachePadded::new(FreeLists {
                free: AtomicU64::new(total),
                taken: AtomicU64::new(0),
                buddy: Mutex::new(buddy),
                is_low: AtomicBool::new(false),
            }),
            #[cfg(any(test, feature = "testing"))]
            inject: Inject::new(),
        }
    }

    /// The platform that provides access to the frames.
    #[inline]
    pub(crate) fn platform(&self) -> &P {
        &self.platform
    }

    /// The metadata of a frame in the span: one that this allocator has allocated, or for which
    /// [`Allocator::manages`] is true.
    #[inline]
    pub(crate) fn meta(&self, frame: Frame) -> &FrameMeta {
        self.metas().get(frame)
    }

    /// Whether the frame has metadata.
    #[inline]
    pub(crate) fn covers(&self, frame: Frame) -> bool {
        self.metas().covers(frame)
    }

    /// The metadata of all frames, for a pass over many.
    #[inline]
    pub(crate) fn metas(&self) -> Metas<'_> {
        self.metas.lend()
    }

    /// The frames that are kept ready for single allocations: free, regardless of their metadata.
    pub(crate) fn ready(&self) -> FrameRange {
        let (first, count) = self.lists.buddy.lock().ready();
        FrameRange { first, count }
    }

    /// Whether `frame` was or can be allocated here: it is in the span, and neither in a hole nor
    /// part of the metadata.
    #[inline]
    pub(crate) fn manages(&self, frame: Frame) -> bool {
        self.metas().covers(frame) && self.metas().get(frame).kind() != MetaKind::Reserved
    }

    /// The first frame that has metadata, and the number of such frames, holes included.
    pub(crate) fn span(&self) -> FrameRange {
        self.metas().span()
    }

    /// A block of 2^`order` frames, aligned to its size, contents unspecified. Its head is
    /// [`MetaKind::Raw`] with all fields empty, the other frames are [`MetaKind::Tail`]. `None` if
    /// no free block is large enough, `order` is above [`MAX_ORDER`], or the block would come from
    /// the reserve and `purpose` is not [`AllocateFor::Reclaim`].
    ///
    /// Does not sleep. O([`MAX_ORDER`]).
    #[inline]
    pub(crate) fn allocate(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        if self.fails_on_purpose() {
            return None;
        }
        self.take(order, purpose)
    }

    /// Reserves `frames` frames for [`AllocateFor::Reclaim`].
    pub(crate) fn set_reserve(&self, frames: u64) {
        let mut buddy = self.lists.buddy.lock();
        buddy.set_reserve(frames);
        self.reserve.store(frames, Relaxed);
        self.publish_to_fronts(&buddy);
    }

    /// The number of frames reserved for [`AllocateFor::Reclaim`].
    pub(crate) fn reserve(&self) -> u64 {
        self.reserve.load(Relaxed)
    }

    /// As [`Allocator::allocate`], but returns a smaller block if no block of this size is free.
    /// Also returns the block's order. `None` if no single frame is available for `purpose`. Does
    /// not sleep. O([`MAX_ORDER`]).
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
        let block = buddy.allocate_up_to(self.metas(), order, purpose);
        self.publish(&buddy);
        self.note_taken(block.map_or(0, |(_, order)| u64::from(order.pages())));
        block
    }

    /// [`Allocator::take`], from the free lists.
    #[inline(always)]
    pub(super) fn take_from_lists(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        let mut buddy = self.lists.buddy.lock();
        let frame = buddy.allocate(self.metas(), order, purpose);
        self.publish(&buddy);
        self.note_taken(frame.map_or(0, |_| u64::from(order.pages())));
        frame
    }

    /// Publishes the counts of the lists to readers without the lock. Called under the lock.
    #[inline]
    pub(super) fn publish(&self, buddy: &Buddy) {
        self.lists.free.store(buddy.free_frame_count(), Relaxed);
    }

    /// The lock of `buddy` is held, so a plain addition suffices.
    #[inline]
    pub(super) fn note_taken(&self, frames: u64) {
        self.lists.taken.store(self.lists.taken.load(Relaxed).wrapping_add(frames), Relaxed);
    }

    /// The numbers of frames that were allocated and freed so far.
    pub(crate) fn traffic(&self) -> FrameTraffic {
        let from_fronts = self.fronts.iter().map(Front::taken).sum();
        let taken = self.lists.taken.load(Relaxed).wrapping_add(from_fronts);
        // The number of frames in use is `total - free`; all other allocated frames have been
        // returned.
        let returned = taken.saturating_sub(self.total.saturating_sub(self.free_frame_count()));
        FrameTraffic { taken, returned }
    }

    /// Frees an allocated block of any use. Notifies the platform first.
    ///
    /// A block that is not allocated, or was allocated with another order, is left unchanged and
    /// counted in [`Allocator::refused`], because a leak is the safest consequence of a bug. (A
    /// double free is detected until the block is allocated again.)
    ///
    /// Does not sleep. O([`MAX_ORDER`]), whatever the order.
    ///
    /// # Safety
    /// If the block is allocated with this order:
    /// 1. The caller owns the block, and no other thread frees it.
    /// 2. Its frames are no longer in use: no reference, no entry, no TLB, no reader in a read
    ///    section, no device.
    #[inline]
    pub(crate) unsafe fn free(&self, first: Frame, order: Order) {
        // Most callers free one page, which the compiler knows.
        if order == Order::PAGE {
            // SAFETY: the caller's obligations are the same.
            unsafe { self.free_page(first) };
        } else {
            // SAFETY: the caller's obligations are the same.
            unsafe { self.free_block(first, order) };
        }
    }

    /// [`Allocator::free`] of a page, in a separate function so that its order is a constant.
    ///
    /// # Safety
    /// As for [`Allocator::free`].
    #[inline(never)]
    unsafe fn free_page(&self, page: Frame) {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.free_any(page, Order::PAGE) };
    }

    /// [`Allocator::free`] of a larger block.
    ///
    /// # Safety
    /// As for [`Allocator::free`].
    #[inline(never)]
    unsafe fn free_block(&self, first: Frame, order: Order) {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.free_any(first, order) };
    }

    /// [`Allocator::free`], inlined into both functions above.
    ///
    /// # Safety
    /// As for [`Allocator::free`].
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
        let freed = buddy.free(self.metas(), first, order);
        self.publish(&buddy);
        drop(buddy);
        if freed.is_err() {
            self.refuse();
        }
    }

    /// Returns the frames that are kept for single allocations to the large blocks: the ready
    /// frames and those of all fronts. O(log frames), and linear in the frames of the fronts.
    pub(crate) fn trim(&self) {
        self.drain_fronts(Order::PAGE);
        self.lists.buddy.lock().join_ready(self.metas());
    }

    /// The number of free frames, of any order. Does not wait for the lock. Frames that move
    /// between a front and the lists during the call may count twice or not at all.
    ///
    /// Context: any.
    pub fn free_frame_count(&self) -> u64 {
        self.lists.free.load(Relaxed) + self.frames_in_fronts()
    }

    /// Whether at least `count` frames are free. Reads other CPUs' data only if the lists have
    /// fewer.
    pub(crate) fn has_free_frames(&self, count: u64) -> bool {
        self.listed_frame_count() >= count || self.free_frame_count() >= count
    }

    /// As [`Allocator::free_frame_count`], but misses no frame: no frame moves to or from the lists
    /// during the call, and those that have arrived there may count twice.
    #[cold]
    pub(crate) fn free_frames_at_most(&self) -> u64 {
        let buddy = self.lists.buddy.lock();
        buddy.free_frame_count() + self.frames_in_fronts()
    }

    /// The number of frames that can be allocated when all are free: the ranges without the
    /// metadata.
    ///
    /// Context: any.
    pub fn total_frames(&self) -> u64 {
        self.total
    }

    /// The number of calls that failed because they tried to free, unmap or release a frame that
    /// was not allocated, mapped or held. Each is a bug of the core; the auditor requires 0.
    ///
    /// Context: any.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Calls `f` for every block with its head, its order (0 for single reserved frames and for
    /// tables, which store their level instead) and its kind. Ready frames and frames in a front
    /// are reported as single free frames. A frame reported as [`MetaKind::Tail`] belongs to no
    /// block, which means corruption. For a quiet system; O(frames).
    pub(crate) fn for_each_block(&self, mut f: impl FnMut(Frame, Order, MetaKind)) {
        let FrameRange { first, count } = self.metas().span();
        let (ready, kept) = self.lists.buddy.lock().ready();
        let mut at = 0;
        while at < count {
            let frame = first.plus(at);
            let meta = self.metas().get(frame);
            let is_ready = frame.0.wrapping_sub(ready.0) < kept;
            let kind = if is_ready { MetaKind::Free } else { meta.kind() };
            if kind == MetaKind::Front {
                let run = (meta.word.load(Relaxed) as u32).clamp(1, count - at);
                (0..run).for_each(|kept| f(frame.plus(kept), Order::PAGE, MetaKind::Free));
                at += run;
                continue;
            }
            let order = if kind.has_order() && !is_ready { meta.order() } else { Order::PAGE };
            f(frame, order, kind);
            at = at.saturating_add(order.pages());
        }
    }

    /// Verifies that free lists, kinds and counts agree, that free blocks are aligned, whole, and
    /// joined with their buddies. Holds the allocator's lock for a time linear in all frames. For
    /// the auditor and tests.
    ///
    /// # Errors
    ///
    /// An inconsistent frame, or the first frame of the span if only a total is wrong.
    pub(crate) fn check_free_lists(&self) -> Result<(), Frame> {
        let runs = self.check_fronts()?;
        let FrameRange { first, count } = self.metas().span();
        let heads =
            (0..count).filter(|at| self.metas().get(first.plus(*at)).kind() == MetaKind::Front);
        let buddy = self.lists.buddy.lock();
        if heads.count() as u64 != runs || self.lists.free.load(Relaxed) != buddy.free_frame_count()
        {
            return Err(first);
        }
        buddy.check(self.metas())
    }

    /// Whether the allocation fails on purpose, for a test.
    #[inline]
    pub(super) fn fails_on_purpose(&self) -> bool {
        #[cfg(any(test, feature = "testing"))]
        return self.inject.fails();
        #[cfg(not(any(test, feature = "testing")))]
        false
    }
}

#[cfg(test)]
mod layout {
    use core::mem::offset_of;

    use super::{Allocator, Buddy, CachePadded, Drains, FreeLists};
    use crate::frame::Frames;
    use crate::frame::tests::Machine;

    #[test]
    fn an_allocation_from_a_front_writes_one_line() {
        assert_eq!(
            (offset_of!(Frames<Machine>, allocator) + offset_of!(Allocator<Machine>, lists)) % 64,
            0
        );
        // The lock is one word before the lists.
        let lists = offset_of!(FreeLists<Machine>, buddy) + size_of::<u64>();
        assert!(lists + Buddy::USED_BY_SINGLE_FRAMES <= 64);
    }

    #[test]
    fn words_that_are_only_read_have_own_lines() {
        let line = |offset: usize| offset / 64;
        let written = [
            offset_of!(Allocator<Machine>, platform),
            offset_of!(Allocator<Machine>, drains),
            offset_of!(Allocator<Machine>, lists),
        ];
        let sizes = [
            size_of::<CachePadded<Machine>>(),
            size_of::<CachePadded<Drains<Machine>>>(),
            size_of::<CachePadded<FreeLists<Machine>>>(),
        ];
        for read in [
            offset_of!(Allocator<Machine>, metas),
            offset_of!(Allocator<Machine>, total),
            offset_of!(Allocator<Machine>, reserve),
            offset_of!(Allocator<Machine>, fronts),
            offset_of!(Allocator<Machine>, front_limit),
        ] {
            for (first, size) in written.into_iter().zip(sizes) {
                assert!(!(line(first)..=line(first + size - 1)).contains(&line(read)));
            }
        }
    }
}
