//! Passes over many folios that entries of one table map. Each folio is locked, assigned to another
//! owner, and unlocked by a few instructions. Folios that need more work are left to the general
//! functions.
//!
//! Here, the *number* of a frame is its distance from the machine's first frame.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use super::count::{MAPPING, REFERENCES};
use super::exclusive::WORD_PAGES;
use super::lock_word;
use super::owner::OwnerRun;
use crate::addr::{Frame, Order};
use crate::frame::meta::{
    EXCLUSIVE, FOLIO_LOCK, FrameMeta, KIND_AND_ORDER, MetaKind, Metas, ORDER_MASK, ORDER_SHIFT,
    state_of,
};
use crate::frame::{FrameRange, Frames};
use crate::platform::Platform;

/// All frames, by their numbers.
#[derive(Clone, Copy)]
pub(crate) struct FolioBatch<'a> {
    metas: Metas<'a>,
    /// The number of frames.
    count: u64,
}

/// The lock of a folio. Dropping this value does not release the lock; see [`FolioBatch::unlock`],
/// and [`super::handle::FolioHandle::lock_of_batch`].
pub(crate) struct LockedHead<'a>(&'a FrameMeta);

impl<P: Platform> Frames<P> {
    /// The first frame of the machine, and a view of all frames.
    #[inline]
    pub(crate) fn folio_batch(&self) -> (Frame, FolioBatch<'_>) {
        let metas = self.metas();
        let FrameRange { first, count } = metas.span();
        (first, FolioBatch { metas, count: count.into() })
    }
}

impl<'a> FolioBatch<'a> {
    // A bare `bool`, and the pointer in a separate function: an `Option` of the pointer would be
    // tested once more.
    #[inline(always)]
    fn has(self, number: u64) -> bool {
        number < self.count
    }

    /// # Safety
    /// 1. [`FolioBatch::has`] returns true for the number.
    #[inline(always)]
    unsafe fn head(self, number: u64) -> &'a FrameMeta {
        debug_assert!(self.has(number), "no frame has the number {number}");
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.metas.nth(number as usize) }
    }

    /// Takes the lock of the folio of one page at frame `number`, if the page is anon-exclusive and
    /// the lock is free. Otherwise returns `None`; it may also do so if another thread sets a flag.
    /// The caller keeps a mapping of the folio until the folio is unlocked.
    #[inline(always)]
    pub(crate) fn try_lock_single(self, number: u64) -> Option<LockedHead<'a>> {
        if !self.has(number) {
            return None;
        }
        let free = state_of(MetaKind::Folio, Order::PAGE) | EXCLUSIVE;
        // SAFETY: 1. checked above.
        let head = unsafe { self.head(number) };
        Self::try_lock(head, KIND_AND_ORDER | EXCLUSIVE, free)
    }

    /// Takes the lock if it is free and the state's bits in `mask` equal `free`.
    #[inline(always)]
    fn try_lock(head: &'a FrameMeta, mask: u32, free: u32) -> Option<LockedHead<'a>> {
        let seen = head.state.load(Ordering::Relaxed);
        let lock = || {
            let locked = seen | FOLIO_LOCK;
            head.state.compare_exchange(seen, locked, Ordering::Acquire, Ordering::Relaxed)
        };
        (seen & (mask | FOLIO_LOCK) == free && lock().is_ok()).then_some(LockedHead(head))
    }

    /// The order of the folio whose head is frame `number`, if the folio has 2 to 64 pages.
    #[inline(always)]
    pub(crate) fn large_order(self, number: u64) -> Option<Order> {
        if !self.has(number) {
            return None;
        }
        // SAFETY: 1. checked above.
        let state = unsafe { self.head(number) }.state.load(Ordering::Relaxed);
        let order = Order((state >> ORDER_SHIFT & ORDER_MASK >> ORDER_SHIFT) as u8);
        let is_large = order > Order::PAGE && order.pages() <= WORD_PAGES;
        (is_large && state & KIND_AND_ORDER == state_of(MetaKind::Folio, order)).then_some(order)
    }

    /// As [`FolioBatch::try_lock_single`], for a folio of the order that
    /// [`FolioBatch::large_order`] returned.
    #[inline(always)]
    pub(crate) fn try_lock_large(self, number: u64, order: Order) -> Option<LockedHead<'a>> {
        if !self.has(number) || !self.has(number + 1) {
            return None;
        }
        // The bits of up to 64 pages are in the first tail. SAFETY: 1. checked above.
        let exclusive = unsafe { self.head(number + 1) }.word.load(Ordering::Relaxed);
        let all = u64::MAX >> (WORD_PAGES - order.pages());
        if exclusive & all != all {
            return None;
        }
        // SAFETY: 1. checked above.
        let head = unsafe { self.head(number) };
        Self::try_lock(head, KIND_AND_ORDER, state_of(MetaKind::Folio, order))
    }

    /// Releases the lock of a folio. Returns `false` if a thread waits for the lock or has orphaned
    /// the folio: the caller then calls [`super::handle::FolioHandle::see_to_marks`].
    ///
    /// # Safety
    /// 1. The caller acquired the lock through this type, by this number, and no guard of the folio
    ///    exists.
    #[inline(always)]
    #[must_use]
    pub(crate) unsafe fn unlock(self, number: u64) -> bool {
        // SAFETY: 1. checked when the folio was locked (obligation 1).
        let head = unsafe { self.head(number) };
        lock_word::unlock_at_once(&head.state)
    }
}

impl LockedHead<'_> {
    /// Whether exactly `mappings` entries map the folio, and it has no pin. The caller has just
    /// removed those entries in a sequentially consistent step; see
    /// [`super::handle::FolioHandle::is_pinned_since`].
    #[inline(always)]
    pub(crate) fn is_free_to_move(&self, mappings: u32) -> bool {
        self.0.count.load(Ordering::SeqCst) & !REFERENCES == u64::from(mappings) * MAPPING
    }

    /// Sets another owner of the folio, with the index `number` after the first of the run.
    #[inline(always)]
    pub(crate) fn give_to(&self, owner: OwnerRun, number: u64) {
        owner.write(self.0, number);
    }
}
