//! The buddy allocator: blocks of 2^order frames, aligned to their size.
//!
//! ```text
//! order 2  | frames 0x40..0x44             |     one block, or its two halves,
//! order 1  | 0x40..0x42    | 0x42..0x44    |     which are buddies: their numbers
//! order 0  | 40    | 41    | 42    | 43    |     differ in bit `order` alone
//! ```
//!
//! An allocation splits the smallest free block that is large enough and returns the upper halves
//! to the lists. A freed block coalesces with its buddy, repeatedly, while the buddy is free. Both
//! operations need a number of steps bounded by [`MAX_ORDER`]. The lists are doubly linked through
//! the metadata of the blocks' heads, so the allocator needs no memory. The most recently freed
//! blocks are used first, because they are in the cache.
//!
//! Single frames are requested most often, and halving a block for each request would dominate the
//! cost. So a block of up to [`READY_ORDER`] leaves the lists as a whole, and single frames are
//! allocated from it in order: they are *ready*. The remaining frames coalesce with their buddies
//! again when a larger block is needed and none is free.
//!
//! Invariants: a free block's head is [`MetaKind::Free`] and on the list of its order, and its
//! other frames are [`MetaKind::Tail`]; no two buddies are both free; a frame that is `Free` is on
//! a list; ready frames are `Tail`. All functions here except [`Buddy::is_allocated`] run under the
//! one lock of [`super::Allocator`].

use core::sync::atomic::Ordering::Relaxed;

use super::meta::{MetaKind, Metas, NONE, kind_in, order_in, state_of};
use super::{AllocateFor, FrameRange};
use crate::addr::{Frame, Order};

/// The largest order of a block: 2^10 frames, 4 MiB.
pub const MAX_ORDER: Order = Order(10);

const ORDERS: usize = MAX_ORDER.0 as usize + 1;

/// The largest block from which single frames are allocated in order: 64 frames.
pub(super) const READY_ORDER: Order = Order(6);

/// The block is not allocated, so nothing was freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NotAllocated;

/// The free lists. An allocation of a ready frame uses only the first fields.
#[repr(C)]
pub(super) struct Buddy {
    ready: Ready,
    /// The number of frames in the lists and ready frames.
    free_frames: u64,
    /// The number of these frames that are reserved for [`AllocateFor::Reclaim`].
    reserve: u64,
    /// Bit n is set where the list of order n has a block.
    occupied: u32,
    heads: [u32; ORDERS],
}

/// The remaining part of a block from which single frames are allocated, by frame number.
#[derive(Clone, Copy)]
struct Ready {
    first: u32,
    end: u32,
}

impl Buddy {
    /// The number of bytes that an allocation of a ready frame uses.
    #[cfg(test)]
    pub(super) const USED_BY_SINGLE_FRAMES: usize = core::mem::offset_of!(Self, occupied);

    pub(super) const fn new() -> Self {
        let ready = Ready { first: 0, end: 0 };
        Self { heads: [NONE; ORDERS], occupied: 0, free_frames: 0, reserve: 0, ready }
    }

    /// The number of frames that can be allocated.
    pub(super) fn free_frame_count(&self) -> u64 {
        self.free_frames
    }

    /// Adds `count` frames that were [`MetaKind::Reserved`] until now, in the largest blocks that
    /// their alignment allows.
    pub(super) fn add(&mut self, metas: Metas<'_>, first: Frame, count: u32) {
        for frame in 0..count {
            metas
                .get(first.plus(frame))
                .state
                .store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
        }
        self.free_run(metas, first, count);
    }

    /// Reserves `frames` frames for [`AllocateFor::Reclaim`].
    pub(super) fn set_reserve(&mut self, frames: u64) {
        self.reserve = frames;
    }

    /// The number of frames that an allocation for this purpose may take. This is the only check of
    /// the reserve. Nothing changes between the check and the allocation, so the reserve is exact.
    #[inline]
    fn available(&self, purpose: AllocateFor) -> u64 {
        match purpose {
            AllocateFor::Use => self.free_frames.saturating_sub(self.reserve),
            AllocateFor::Reclaim => self.free_frames,
        }
    }

    /// Takes a block of `order`; its head is [`MetaKind::Raw`]. Frames leave the lists here, in
    /// [`Buddy::take_ready`] and in [`Buddy::take_for_front`].
    #[inline]
    pub(super) fn allocate(
        &mut self,
        metas: Metas<'_>,
        order: Order,
        purpose: AllocateFor,
    ) -> Option<Frame> {
        if self.available(purpose) < u64::from(order.min(MAX_ORDER).pages()) {
            return None;
        }
        if order == Order::PAGE {
            if self.ready.first == self.ready.end {
                self.make_ready(metas)?;
            }
            return self.take_ready(metas, purpose);
        }
        let frame = self.take_or_join(metas, order)?;
        metas.get(frame).reset(MetaKind::Raw, order);
        self.free_frames -= u64::from(order.pages());
        Some(frame)
    }

    /// As [`Buddy::allocate`], for a ready frame. Returns `None` also if no frame is ready.
    #[inline(always)]
    pub(super) fn take_ready(&mut self, metas: Metas<'_>, purpose: AllocateFor) -> Option<Frame> {
        if self.ready.first == self.ready.end || self.available(purpose) == 0 {
            return None;
        }
        let frame = Frame(self.ready.first);
        self.ready.first += 1;
        metas.get(frame).reset(MetaKind::Raw, Order::PAGE);
        self.free_frames -= 1;
        Some(frame)
    }

    /// Makes frames ready: takes the smallest available block, so that large blocks are preserved.
    #[cold]
    fn make_ready(&mut self, metas: Metas<'_>) -> Option<()> {
        let smallest = Order(self.occupied.trailing_zeros() as u8);
        let order = smallest.min(READY_ORDER);
        let block = self.take(metas, order)?;
        metas.get(block).state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
        self.ready = Ready { first: block.0, end: block.0 + order.pages() };
        Some(())
    }

    /// Takes a block for the front of a CPU: the smallest with at least 2^`least` frames, but with
    /// at most 2^`most` frames and at most [`READY_ORDER`]. All its frames become
    /// [`MetaKind::Tail`] and no longer count as free. Returns the first frame and the number of
    /// frames. Never takes the reserve.
    pub(super) fn take_for_front(
        &mut self,
        metas: Metas<'_>,
        least: Order,
        most: Order,
    ) -> Option<(Frame, u32)> {
        let available = self.available(AllocateFor::Use).checked_ilog2()? as u8;
        let most = most.min(READY_ORDER).min(Order(available));
        if self.occupied >> least.0 == 0 {
            self.join_ready(metas);
        }
        let large_enough = self.occupied >> least.0;
        if least > most || large_enough == 0 {
            return None;
        }
        let order = Order(least.0 + large_enough.trailing_zeros() as u8).min(most);
        let block = self.take(metas, order)?;
        metas.get(block).state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
        self.free_frames -= u64::from(order.pages());
        Some((block, order.pages()))
    }

    /// Takes a block of 2^`order` frames, or the largest smaller one if no such block is free. Also
    /// returns the block's order.
    pub(super) fn allocate_up_to(
        &mut self,
        metas: Metas<'_>,
        order: Order,
        purpose: AllocateFor,
    ) -> Option<(Frame, Order)> {
        let most = self.available(purpose).checked_ilog2()? as u8;
        let order = order.min(MAX_ORDER).min(Order(most));
        if self.occupied >> order.0 == 0 {
            // The ready frames may complete a block.
            self.join_ready(metas);
        }
        let order = match self.occupied {
            0 => return None,
            occupied if occupied >> order.0 != 0 => order,
            occupied => Order(occupied.ilog2() as u8),
        };
        Some((self.allocate(metas, order, purpose)?, order))
    }

    fn take_or_join(&mut self, metas: Metas<'_>, order: Order) -> Option<Frame> {
        self.take(metas, order).or_else(|| {
            self.join_ready(metas);
            self.take(metas, order)
        })
    }

    /// Returns the ready frames to the lists, coalesced with their buddies.
    pub(super) fn join_ready(&mut self, metas: Metas<'_>) {
        let Ready { first, end } = self.ready;
        self.ready.first = end;
        // The ready frames already counted as free.
        self.free_frames -= u64::from(end - first);
        self.free_run(metas, Frame(first), end - first);
    }

    /// The ready frames: the first, and their number.
    pub(super) fn ready(&self) -> (Frame, u32) {
        (Frame(self.ready.first), self.ready.end - self.ready.first)
    }

    /// Takes a block of `order` off the lists. The head remains [`MetaKind::Free`], and the block
    /// still counts as free.
    fn take(&mut self, metas: Metas<'_>, order: Order) -> Option<Frame> {
        if order > MAX_ORDER {
            return None;
        }
        let large_enough = self.occupied >> order.0;
        if large_enough == 0 {
            return None;
        }
        let mut found = Order(order.0 + large_enough.trailing_zeros() as u8);
        let frame = Frame(self.heads[usize::from(found.0)]);
        self.unlink(metas, frame, found);
        while found > order {
            found = found.below();
            self.link(metas, frame.plus(found.pages()), found);
        }
        Some(frame)
    }

    /// Returns an allocated block to the free lists.
    ///
    /// # Errors
    ///
    /// [`NotAllocated`], with nothing changed, if `first` is not the head of an allocated block of
    /// this order.
    pub(super) fn free(
        &mut self,
        metas: Metas<'_>,
        first: Frame,
        order: Order,
    ) -> Result<(), NotAllocated> {
        if !Self::is_allocated(metas, first, order) {
            return Err(NotAllocated);
        }
        self.insert(metas, first, order);
        Ok(())
    }

    /// Whether `first` is the head of an allocated block of this order.
    #[inline]
    pub(super) fn is_allocated(metas: Metas<'_>, first: Frame, order: Order) -> bool {
        if !metas.covers(first) {
            return false;
        }
        let state = metas.get(first).state.load(Relaxed);
        let allocated = match kind_in(state) {
            MetaKind::Raw
            | MetaKind::Folio
            | MetaKind::Slab
            | MetaKind::Zero
            | MetaKind::Kernel
            | MetaKind::Embedder
            | MetaKind::Compressed
            | MetaKind::Swap => order_in(state) == order,
            // A table stores its level in place of the order and is always one frame.
            MetaKind::Table => order == Order::PAGE,
            MetaKind::Reserved
            | MetaKind::Free
            | MetaKind::Tail
            | MetaKind::Cpu
            | MetaKind::Front => false,
        };
        allocated && order <= MAX_ORDER && first.is_aligned(order)
    }

    /// Returns `count` frames from `first`, all of them [`MetaKind::Tail`] and without an owner, to
    /// the lists, in the largest blocks that their alignment allows, coalesced with their buddies.
    pub(super) fn free_run(&mut self, metas: Metas<'_>, first: Frame, count: u32) {
        let mut done = 0;
        while done < count {
            let block = first.plus(done);
            let aligned = block.0.trailing_zeros();
            let fits = (count - done).ilog2();
            let order = Order(aligned.min(fits).min(u32::from(MAX_ORDER.0)) as u8);
            self.insert(metas, block, order);
            done += order.pages();
        }
    }

    /// Returns the block to the lists, coalesced with its buddies.
    fn insert(&mut self, metas: Metas<'_>, first: Frame, order: Order) {
        self.free_frames += u64::from(order.pages());
        let (mut first, mut order) = (first, order);
        while order < MAX_ORDER {
            let buddy = Frame(first.0 ^ order.pages());
            // No free block extends beyond the array, so if the head of a free buddy of this order
            // lies in the array, the whole buddy does.
            let joins = metas.covers(buddy)
                && metas.get(buddy).state.load(Relaxed) == state_of(MetaKind::Free, order);
            if !joins {
                break;
            }
            self.unlink(metas, buddy, order);
            let upper = first.max(buddy);
            metas.get(upper).state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
            first = first.min(buddy);
            order = order.above();
        }
        self.link(metas, first, order);
    }

    /// Makes the block the first of its list.
    fn link(&mut self, metas: Metas<'_>, block: Frame, order: Order) {
        let head = &mut self.heads[usize::from(order.0)];
        let meta = metas.get(block);
        meta.state.store(state_of(MetaKind::Free, order), Relaxed);
        meta.next.store(*head, Relaxed);
        meta.previous.store(NONE, Relaxed);
        if *head != NONE {
            metas.get(Frame(*head)).previous.store(block.0, Relaxed);
        }
        *head = block.0;
        self.occupied |= 1 << order.0;
    }

    /// Removes the block from its list; the caller changes its kind.
    fn unlink(&mut self, metas: Metas<'_>, block: Frame, order: Order) {
        let meta = metas.get(block);
        let (next, previous) = (meta.next.load(Relaxed), meta.previous.load(Relaxed));
        if next != NONE {
            metas.get(Frame(next)).previous.store(previous, Relaxed);
        }
        if previous != NONE {
            metas.get(Frame(previous)).next.store(next, Relaxed);
        } else {
            self.heads[usize::from(order.0)] = next;
            if next == NONE {
                self.occupied &= !(1 << order.0);
            }
        }
    }

    /// Compares lists, kinds and counts with each other. Time linear in all frames.
    ///
    /// # Errors
    ///
    /// A frame at which they disagree, or the first of all frames if only a total is wrong.
    pub(super) fn check(&self, metas: Metas<'_>) -> Result<(), Frame> {
        let FrameRange { first, count } = metas.span();
        let mut listed_blocks = 0u64;
        let mut listed_frames = 0u64;
        for order in Order::PAGE.up_to(MAX_ORDER) {
            let mut previous = NONE;
            let mut link = self.heads[usize::from(order.0)];
            if (link != NONE) != (self.occupied & 1 << order.0 != 0) {
                return Err(if link == NONE { first } else { Frame(link) });
            }
            while link != NONE {
                let block = Frame(link);
                Self::check_block(metas, block, order, previous)?;
                listed_blocks += 1;
                if listed_blocks > u64::from(count) {
                    return Err(block);
                }
                listed_frames += u64::from(order.pages());
                previous = link;
                link = metas.get(block).next.load(Relaxed);
            }
        }
        let Ready { first: ready, end } = self.ready;
        let stranger = |frame: &u32| {
            !metas.covers(Frame(*frame)) || metas.get(Frame(*frame)).kind() != MetaKind::Tail
        };
        if let Some(stranger) = (ready..end).find(stranger) {
            return Err(Frame(stranger));
        }
        listed_frames += u64::from(end.saturating_sub(ready));
        let free =
            (0..count).filter(|frame| metas.get(first.plus(*frame)).kind() == MetaKind::Free);
        if free.count() as u64 != listed_blocks || listed_frames != self.free_frames {
            return Err(first);
        }
        Ok(())
    }

    /// Checks one block of a free list, which was reached from `previous`.
    fn check_block(
        metas: Metas<'_>,
        block: Frame,
        order: Order,
        previous: u32,
    ) -> Result<(), Frame> {
        let last = block.0.checked_add(order.pages() - 1).ok_or(block)?;
        if !metas.covers(block) || !metas.covers(Frame(last)) || !block.is_aligned(order) {
            return Err(block);
        }
        let meta = metas.get(block);
        let free = state_of(MetaKind::Free, order);
        if meta.state.load(Relaxed) != free || meta.previous.load(Relaxed) != previous {
            return Err(block);
        }
        let inside = (1..order.pages()).map(|frame| block.plus(frame));
        if let Some(stranger) = inside.into_iter().find(|f| metas.get(*f).kind() != MetaKind::Tail)
        {
            return Err(stranger);
        }
        let buddy = Frame(block.0 ^ order.pages());
        let unjoined = order < MAX_ORDER
            && metas.covers(buddy)
            && metas.get(buddy).state.load(Relaxed) == free;
        if unjoined { Err(block) } else { Ok(()) }
    }
}
