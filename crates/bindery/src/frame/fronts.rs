//! The fronts of all CPUs together: the allocations and frees that use them, and the drains.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering::Relaxed;

use super::buddy::{Buddy, READY_ORDER};
use super::front::{Front, HUGE, LARGEST, LEAST_FRAMES, Locked, MOST_FRAMES};
use super::{AllocateFor, Allocator, drains};
use crate::addr::{Frame, Order};
use crate::cpu::CpuTable;
use crate::platform::{Cpu, Platform};

impl<P: Platform> Allocator<P> {
    /// The front of each CPU.
    pub(crate) fn fronts(&self) -> &CpuTable<Front<P>> {
        &self.fronts
    }

    /// Whether CPUs have fronts. Without fronts, allocations and frees avoid their overhead.
    #[inline(always)]
    pub(super) fn has_fronts(&self) -> bool {
        self.front_limit.load(Relaxed) != 0
    }

    /// Publishes the state of the lists to readers without the lock, including whether frames may
    /// enter fronts. Called under the lock. Without fronts, [`Allocator::publish`] suffices.
    #[inline]
    pub(super) fn publish_to_fronts(&self, buddy: &Buddy) {
        self.publish(buddy);
        let is_low = buddy.free_frame_count() < self.reserve.load(Relaxed) * 3;
        self.lists.is_low.store(is_low, Relaxed);
    }

    /// The number of frames on the free lists, without those in fronts. Unlike
    /// [`Allocator::free_frame_count`], this reads no other CPU's data.
    #[inline]
    pub(crate) fn listed_frame_count(&self) -> u64 {
        self.lists.free.load(Relaxed)
    }

    /// The front for an allocation or a free of a block of `order`, and the limit of its frames.
    /// `None` if no CPU was announced or memory is low.
    #[inline]
    fn front(&self, order: Order) -> Option<(&Front<P>, u32)> {
        let limit = self.front_limit.load(Relaxed);
        if limit == 0 || order > LARGEST || self.lists.is_low.load(Relaxed) {
            return None;
        }
        Some((self.fronts.get(self.platform().cpu())?, limit))
    }

    /// The front for an allocation or a free of a block of [`HUGE`]. `None` if its limit is smaller
    /// than the block, or memory is low.
    fn front_of_huge(&self) -> Option<&Front<P>> {
        let limit = self.front_limit.load(Relaxed);
        if limit < HUGE.pages() || self.lists.is_low.load(Relaxed) {
            return None;
        }
        self.fronts.get(self.platform().cpu())
    }

    /// Keeps the block of [`HUGE`] at `first` in the caller's front, if the front wants such a
    /// block and `is_free` confirms that the block may be freed. If this returns `false`, the
    /// caller frees the block.
    fn keep_huge(&self, first: Frame, is_free: impl FnOnce() -> bool) -> bool {
        let Some(front) = self.front_of_huge() else { return false };
        let mut locked = front.lock();
        let kept = first.is_aligned(HUGE) && locked.wants_huge() && is_free();
        if kept {
            locked.put_huge(self.metas(), first);
            drains::note_put(&*self.drains);
        }
        kept
    }

    /// A block from the caller's front or the free lists. O([`super::MAX_ORDER`]); occasionally
    /// linear in the frames of all fronts, amortized over many calls.
    // Out of line: otherwise the compiler would not inline its callers.
    #[inline(never)]
    pub(super) fn take(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        if self.has_fronts() {
            return self.take_with_fronts(order, purpose);
        }
        if order == Order::PAGE
            && let Some(frame) = self.take_ready(purpose)
        {
            return Some(frame);
        }
        self.take_without_fronts(order, purpose)
    }

    /// A ready frame, if no other CPU holds the lists' lock.
    // Makes no call, so `take` need not save registers for one.
    #[inline(always)]
    fn take_ready(&self, purpose: AllocateFor) -> Option<Frame> {
        let mut buddy = self.lists.buddy.try_lock()?;
        let frame = buddy.take_ready(self.metas(), purpose)?;
        self.publish(&buddy);
        self.note_taken(1);
        Some(frame)
    }

    #[inline(never)]
    fn take_without_fronts(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        let frame = self.take_from_lists(order, purpose);
        // A thread that has read an older limit may have added frames to a front.
        if frame.is_none() && self.fronts.has_slots() {
            return self.take_after_drains(order, purpose);
        }
        frame
    }

    #[inline(never)]
    fn take_with_fronts(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        // Skipped while memory is low, because reclaim takes frames from the lists first.
        if let Some((front, limit)) = self.front(order)
            && let Some(frame) = self.take_from_front(front, order, limit)
        {
            return Some(frame);
        }
        if purpose == AllocateFor::Use
            && order == HUGE
            && let Some(front) = self.front_of_huge()
            && let Some(frame) = front.lock().take_huge(self.metas())
        {
            return Some(frame);
        }
        let frame = self.take_beside_fronts(order, purpose);
        if frame.is_some() { frame } else { self.take_after_drains(order, purpose) }
    }

    /// An allocation that found nothing on the free lists. Between a drain and the retry, another
    /// CPU may move a block from the lists into its front and use one frame of it. So a single page
    /// is retried until a drain finds nothing: each further round means that another CPU got a
    /// frame. Larger blocks are retried only once, because drained frames need not coalesce.
    #[cold]
    #[inline(never)]
    fn take_after_drains(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        loop {
            let found = self.drain_fronts(order);
            let frame = self.take_beside_fronts(order, purpose);
            if frame.is_some() || found == 0 || order > Order::PAGE {
                return frame;
            }
        }
    }

    /// As [`Allocator::take_from_lists`].
    #[inline(never)]
    fn take_beside_fronts(&self, order: Order, purpose: AllocateFor) -> Option<Frame> {
        let mut buddy = self.lists.buddy.lock();
        let frame = buddy.allocate(self.metas(), order, purpose);
        self.publish_to_fronts(&buddy);
        self.note_taken(frame.map_or(0, |_| u64::from(order.pages())));
        frame
    }

    /// [`Allocator::allocate_up_to`], from the free lists. Drains the fronts if the lists are
    /// empty.
    #[inline(never)]
    pub(super) fn take_up_to(&self, order: Order, purpose: AllocateFor) -> Option<(Frame, Order)> {
        let try_lists = || {
            let mut buddy = self.lists.buddy.lock();
            let block = buddy.allocate_up_to(self.metas(), order, purpose);
            self.publish_to_fronts(&buddy);
            self.note_taken(block.map_or(0, |(_, order)| u64::from(order.pages())));
            block
        };
        loop {
            let block = try_lists();
            if block.is_some() || self.drain_fronts(Order::PAGE) == 0 {
                return block.or_else(try_lists);
            }
        }
    }

    #[inline]
    fn take_from_front(&self, front: &Front<P>, order: Order, limit: u32) -> Option<Frame> {
        let mut locked = front.lock();
        if let Some(frame) = locked.take(self.metas(), order) {
            return Some(frame);
        }
        self.refill(&mut locked, order, limit)?;
        locked.take(self.metas(), order)
    }

    /// Moves a block of at least 2^`order` frames to a front that has no such block. For single
    /// pages in fragmented memory, moves several blocks, because each later refill would acquire
    /// the lists' lock.
    #[inline(never)]
    fn refill(&self, locked: &mut Locked<'_, P>, order: Order, limit: u32) -> Option<()> {
        let most = Order((limit / 2).max(1).ilog2() as u8).min(READY_ORDER);
        if locked.is_full(most.pages(), limit) {
            self.shrink(locked, limit.saturating_sub(most.pages()));
        }
        let mut buddy = self.lists.buddy.lock();
        // Two frames share a cache line of metadata, so one CPU takes both if a pair is free.
        let mut take_block = || {
            let pairs = buddy.take_for_front(self.metas(), order.max(Order(1)), most);
            pairs.or_else(|| buddy.take_for_front(self.metas(), order, most))
        };
        let (first, count) = take_block()?;
        locked.put(self.metas(), first, count);
        let mut left = if order == Order::PAGE { LEAST_FRAMES.saturating_sub(count) } else { 0 };
        while left > 0
            && !locked.is_full(most.pages(), limit)
            && let Some((first, count)) = take_block()
        {
            locked.put(self.metas(), first, count);
            left = left.saturating_sub(count);
        }
        // Recorded before the lists are unlocked: a CPU that then finds them empty sees that a
        // front has frames and waits for the front's lock.
        drains::note_put(&*self.drains);
        self.publish_to_fronts(&buddy);
        Some(())
    }

    /// Moves the frames of all fronts to the free lists, unless `order` exceeds a front's largest
    /// blocks and the block exceeds all fronts together. Returns the number of frames found.
    pub(super) fn drain_fronts(&self, order: Order) -> u64 {
        if order > LARGEST && self.frames_in_fronts() < u64::from(order.pages()) {
            return 0;
        }
        let mut found = 0;
        drains::run(&*self.drains, || {
            found = self.fronts.iter().map(|front| self.empty(front)).sum();
            found
        });
        found
    }

    /// Moves the frames of a CPU's front to the free lists when the CPU is taken offline.
    pub(crate) fn empty_front(&self, cpu: Cpu) {
        if let Some(front) = self.fronts.get(cpu) {
            self.empty(front);
        }
    }

    /// Returns the number of frames that the front had.
    fn empty(&self, front: &Front<P>) -> u64 {
        // Even if the front seems empty: the lock orders this drain with frames that enter the
        // front.
        let mut locked = front.lock();
        let held = front.held();
        if held > 0 {
            let mut buddy = self.lists.buddy.lock();
            locked.empty(self.metas(), |first, count| buddy.free_run(self.metas(), first, count));
            self.publish_to_fronts(&buddy);
            locked.show();
        } else {
            locked.want_no_huge();
        }
        u64::from(held)
    }

    /// Frees a block, into the caller's front if possible. The caller has notified the platform.
    #[inline(never)]
    pub(super) fn free_with_fronts(&self, first: Frame, order: Order) {
        let is_allocated = || Buddy::is_allocated(self.metas(), first, order);
        if order == HUGE && self.keep_huge(first, is_allocated) {
            return;
        }
        let is_allocated = if let Some((front, limit)) = self.front(order) {
            let locked = front.lock();
            let is_allocated = Buddy::is_allocated(self.metas(), first, order);
            if is_allocated {
                self.put_into(locked, first, order.pages(), limit);
            }
            is_allocated
        } else {
            let mut buddy = self.lists.buddy.lock();
            let freed = buddy.free(self.metas(), first, order);
            self.publish_to_fronts(&buddy);
            freed.is_ok()
        };
        if !is_allocated {
            self.refuse();
        }
    }

    /// Frees `count` consecutive frames without an owner, all of them tails, into the caller's
    /// front if possible.
    ///
    /// # Safety
    /// 1. and 2. As for `free_run` in [`super::batch`].
    #[inline(never)]
    pub(super) unsafe fn free_run_with_fronts(&self, first: Frame, count: u32) {
        if count == HUGE.pages() && self.keep_huge(first, || true) {
            return;
        }
        if let Some((front, limit)) = self.front(Order::PAGE)
            && count < limit
        {
            self.put_into(front.lock(), first, count, limit);
            return;
        }
        let mut buddy = self.lists.buddy.lock();
        buddy.free_run(self.metas(), first, count);
        self.publish_to_fronts(&buddy);
    }

    /// Moves the oldest frames of a front to the lists, until it has at most `frames` frames.
    #[inline(never)]
    fn shrink(&self, locked: &mut Locked<'_, P>, frames: u32) {
        let mut buddy = self.lists.buddy.lock();
        locked.shrink(self.metas(), frames, |first, count| {
            buddy.free_run(self.metas(), first, count);
        });
        self.publish_to_fronts(&buddy);
        locked.show();
    }

    #[inline]
    fn put_into(&self, mut locked: Locked<'_, P>, first: Frame, count: u32, limit: u32) {
        if locked.is_full(count, limit) {
            self.shrink(&mut locked, limit.saturating_sub(count) / 4 * 3);
        }
        locked.put(self.metas(), first, count);
        drains::note_put(&*self.drains);
    }

    /// Sets the limit of each front when `online` CPUs are online: a 64th of the memory divided by
    /// their number. A front above its limit keeps its frames until its next change.
    pub(crate) fn share_fronts(&self, online: u32) {
        let share = self.total / 64 / u64::from(online.max(1));
        let limit = u32::try_from(share).unwrap_or(MOST_FRAMES);
        self.set_front_limit(if online == 0 || limit < LEAST_FRAMES { 0 } else { limit });
    }

    /// Sets the limit of each front, up to [`MOST_FRAMES`]; 0 for no fronts.
    pub(crate) fn set_front_limit(&self, limit: u32) {
        self.front_limit.store(limit.min(MOST_FRAMES), Relaxed);
        self.publish_to_fronts(&self.lists.buddy.lock());
        // A block of 2 MiB would otherwise remain in a front whose limit excludes it.
        if limit < HUGE.pages() {
            self.drain_fronts(if limit == 0 { Order::PAGE } else { HUGE });
        }
    }

    /// The free frames in all fronts.
    #[inline]
    pub(super) fn frames_in_fronts(&self) -> u64 {
        if self.fronts.has_slots() { self.add_up_fronts() } else { 0 }
    }

    #[inline(never)]
    fn add_up_fronts(&self) -> u64 {
        self.fronts.iter().map(|front| u64::from(front.held())).sum()
    }

    /// Whether a free frame is kept for single allocations: it is ready or in a front.
    pub(crate) fn is_kept_free(&self, frame: Frame) -> bool {
        self.ready().contains(frame) || self.fronts.iter().any(|front| front.lock().contains(frame))
    }

    /// Verifies the fronts. Returns the number of their runs.
    ///
    /// # Errors
    /// An inconsistent frame.
    pub(super) fn check_fronts(&self) -> Result<u64, Frame> {
        self.fronts.iter().map(|front| front.lock().check(self.metas())).sum()
    }
}
