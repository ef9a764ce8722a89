//! References: holders of a folio that neither map nor pin it.
//!
//! Most references come from a holder of a mapping or of another reference. A walker that has only
//! a frame number (from a list, or from a walk over all memory) takes one *by number*:
//!
//! 1. The metadata tells which folio contains the frame. That is a guess: the folio may be freed or
//!    split at any time.
//! 2. A reference is added at the head, unless the count is zero ([`count::refer`]). A zero count
//!    means that no folio is published here: the frame is free, fresh, frozen, a table or a slab.
//! 3. *From now on* a folio with this head is not freed. Its metadata was published with the count.
//!    If the guess was wrong, the frame may belong to something else, and the reference is dropped.
//!    If it is the last one by then, dropping it frees the folio.
//!
//! Step 3 prevents this:
//! 1. CPU A needs frame 0x47 and reads in its tail: head 0x40, order 4.
//! 2. CPU B unmaps that folio; its frames become a page at 0x40 and a table at 0x47.
//! 3. CPU A takes a reference at 0x40 and would mistake the table for a page of a folio.
//!
//! Until step 3 ends, a thread that needs the folio exclusively sees one reference more than it
//! expects. A split reports that the folio is busy; a write to a page that was shared copies the
//! page. Both may happen at any time anyway.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::count::{self, NotThere, REFERENCE, ReferencesRefused, references_in};
use super::frozen::FrozenFolio;
use super::handle::{Folio, FolioHandle, Freed};
use crate::addr::{Frame, Order};
use crate::frame::meta::{MetaKind, is_kind, order_in};
use crate::frame::{Allocator, Frames};
use crate::platform::Platform;
use crate::sync::word::Word;

/// The metadata that a reference by number reads; loom has its own implementation.
pub(super) trait Heads {
    type Count: Word<u64>;
    /// Whether the frame has metadata.
    fn covers(&self, frame: Frame) -> bool;
    /// The `state` of the frame.
    fn state(&self, frame: Frame) -> u32;
    /// The head that the metadata of a tail names.
    fn head(&self, tail: Frame) -> Frame;
    /// The `count` of the frame.
    fn count(&self, frame: Frame) -> &Self::Count;
}

/// The folio that seems to contain the frame. A guess, unless the caller keeps the folio from being
/// freed or split.
#[inline]
pub(super) fn guess(heads: &impl Heads, frame: Frame) -> Option<Folio> {
    if !heads.covers(frame) {
        return None;
    }
    let state = heads.state(frame);
    if is_kind(state, MetaKind::Folio) {
        return Some(Folio::of(frame, order_in(state)));
    }
    if is_kind(state, MetaKind::Tail) {
        return guess_from_tail(heads, frame, heads.head(frame));
    }
    None
}

/// A tail may be a remnant of a freed folio, with an arbitrary head. But a live folio that extends
/// to `frame` has written its own head there.
#[inline]
fn guess_from_tail(heads: &impl Heads, frame: Frame, head: Frame) -> Option<Folio> {
    if !heads.covers(head) {
        return None;
    }
    let state = heads.state(head);
    let folio = Folio::of(head, order_in(state));
    let reaches = is_kind(state, MetaKind::Folio) && frame.0.wrapping_sub(head.0) < folio.pages();
    reaches.then_some(folio)
}

/// The reference was added to a folio that does not contain the frame; the caller must release it.
#[derive(Debug)]
pub(super) struct Mistaken(pub(super) Folio);

/// Adds a reference to the folio around `frame`, if it has a holder.
#[inline]
pub(super) fn from_nothing(heads: &impl Heads, frame: Frame) -> Result<Option<Folio>, Mistaken> {
    let Some(Folio { head, .. }) = guess(heads, frame) else { return Ok(None) };
    if !count::refer(heads.count(head)) {
        return Ok(None);
    }
    let state = heads.state(head);
    debug_assert!(is_kind(state, MetaKind::Folio), "{head:?} has a count");
    let folio = Folio::of(head, order_in(state));
    if frame.0.wrapping_sub(folio.head.0) < folio.pages() {
        Ok(Some(folio))
    } else {
        Err(Mistaken(folio))
    }
}

impl<P: Platform> Heads for Frames<P> {
    type Count = AtomicU64;

    #[inline]
    fn covers(&self, frame: Frame) -> bool {
        Allocator::covers(self, frame)
    }

    #[inline]
    fn state(&self, frame: Frame) -> u32 {
        self.meta(frame).state.load(Relaxed)
    }

    #[inline]
    fn head(&self, tail: Frame) -> Frame {
        Frame(self.meta(tail).owner.load(Relaxed))
    }

    #[inline]
    fn count(&self, frame: Frame) -> &AtomicU64 {
        &self.meta(frame).count
    }
}

/// A reference, released on drop. The folio is neither freed nor split while the reference exists.
pub(crate) struct FolioRef<'a, P: Platform> {
    handle: FolioHandle<'a, P>,
}

impl<P: Platform> Deref for FolioRef<'_, P> {
    type Target = Folio;

    fn deref(&self) -> &Folio {
        &self.handle.folio
    }
}

/// A reference as a plain value, for a state that does not borrow the memory. The value is not
/// copied, and the reference is released only through the guard that [`HeldFolio::guard`] restores.
/// A dropped value holds the folio forever.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "the folio stays forever"]
pub(crate) struct HeldFolio(Folio);

impl HeldFolio {
    /// Restores the guard of the reference. `frames` belong to the memory of the guard that became
    /// this value.
    #[inline(always)]
    pub(crate) fn guard<P: Platform>(self, frames: &Frames<P>) -> FolioRef<'_, P> {
        FolioRef { handle: frames.folio(self.0) }
    }
}

impl<'a, P: Platform> FolioRef<'a, P> {
    /// A guard for a reference that the caller holds without one.
    pub(super) fn adopt(handle: FolioHandle<'a, P>) -> Self {
        Self { handle }
    }

    /// The reference without its guard.
    #[inline(always)]
    pub(crate) fn into_held(self) -> HeldFolio {
        let held = HeldFolio(self.handle.folio);
        self.leave();
        held
    }
}

impl<'a, P: Platform> FolioRef<'a, P> {
    #[inline(always)]
    pub(super) fn handle(&self) -> FolioHandle<'a, P> {
        self.handle
    }
}

impl<P: Platform> FolioRef<'_, P> {
    /// Leaves the reference in place: the caller accounts for it by other means.
    #[inline]
    pub(super) fn leave(self) {
        core::mem::forget(self);
    }
}

impl<P: Platform> FolioRef<'_, P> {
    /// Releases one reference to each part of a folio that was split into parts of 2^`order` pages.
    /// These references replace this one.
    pub(crate) fn release_parts(self, order: Order) {
        let this = ManuallyDrop::new(self);
        // SAFETY: 1. they replace this reference, which is not dropped.
        unsafe { this.handle.release_parts(order) };
    }
}

impl<P: Platform> Drop for FolioRef<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. this guard's reference.
        unsafe { self.handle.release() };
    }
}

impl<P: Platform> fmt::Debug for FolioRef<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FolioRef").field(&self.handle.folio).finish()
    }
}

impl<'a, P: Platform> FolioHandle<'a, P> {
    /// Adds a reference, unless there are too many. Returns whether the reference was added. The
    /// caller has a reference, or keeps a mapping by a table's lock.
    #[inline]
    #[must_use]
    pub(super) fn try_get(self) -> bool {
        debug_assert_ne!(self.count().load(Relaxed), 0, "{:?} was free", self.folio);
        count::refer(self.count())
    }

    /// Adds references regardless of the number of other holders: one for each page that an
    /// object's index now contains, or one for the swap cache and one for the thread that writes
    /// the folio out. The caller has the folio's lock, and a reference or mappings. A refusal is
    /// counted in [`Allocator::refused`].
    pub(crate) fn add_references(self, references: u32) -> Result<(), ReferencesRefused> {
        let added = count::refer_locked(self.count(), references);
        added.inspect_err(|_| self.frames.refuse())
    }

    /// As [`FolioHandle::try_get`], but returns a guard that releases the reference on drop.
    pub(crate) fn keep(self) -> Option<FolioRef<'a, P>> {
        self.try_get().then(|| FolioRef { handle: self })
    }

    /// Releases a reference; the last one frees the folio if no mapping or pin remains. A
    /// reference that the folio does not have is counted in [`Allocator::refused`].
    ///
    /// # Safety
    /// 1. The caller owns the reference, which is in no guard and is released only here.
    #[inline]
    pub(crate) unsafe fn release(self) -> Freed {
        // SAFETY: 1. passed on.
        unsafe { self.release_pages(1) }
    }

    /// Removes `count` references at once, as [`FolioHandle::release`] does for one reference.
    ///
    /// # Safety
    /// 1. As for [`FolioHandle::release`], for each of the references.
    #[inline(always)]
    pub(crate) unsafe fn release_pages(self, count: u32) -> Freed {
        // SAFETY: 1. passed on.
        unsafe { release(self.frames, self.folio, count) }
    }

    /// Freezes the folio if `count` references are its only holders.
    ///
    /// # Safety
    /// 1. The caller owns the references and relinquishes them if the folio is frozen.
    #[inline]
    pub(crate) unsafe fn freeze(self, count: u32) -> Option<FrozenFolio<'a, P>> {
        // SAFETY: 1. the caller's obligation 1. 2. the count includes no mapping, and earlier
        // mappings were subtracted after their flush.
        unsafe { FrozenFolio::freeze(self, u64::from(count) * REFERENCE) }
    }

    /// Frees the folio if its last holder was removed; counts a refused removal.
    ///
    /// # Safety
    /// 1. The result is that of [`count::take`] or [`count::unmap_owned`] for holds of the
    ///    caller's.
    #[inline]
    pub(super) unsafe fn after_taking(self, result: Result<bool, NotThere>) -> Freed {
        match result {
            Ok(false) => Freed::No,
            Ok(true) => {
                // SAFETY: 1. this step lowered the count to zero (obligation 1), and no other step
                // can; 2. every thread that maps, pins or reads the folio is counted, and is
                // subtracted after the flush.
                unsafe { self.frames.free(self.folio.head, self.folio.order) };
                Freed::Yes
            }
            Err(NotThere) => {
                self.frames.refuse();
                Freed::No
            }
        }
    }

    /// The number of holders that neither map nor pin the folio. Stale at once unless the caller
    /// excludes others.
    #[inline]
    pub(crate) fn references(self) -> u32 {
        references_in(self.count().load(Relaxed))
    }
}

/// [`FolioHandle::release_pages`], which need not be inlined, because it receives words, not a
/// handle.
///
/// # Safety
/// 1. As for [`FolioHandle::release_pages`].
#[inline]
unsafe fn release<P: Platform>(frames: &Frames<P>, folio: Folio, count: u32) -> Freed {
    let folio = frames.folio(folio);
    let taken = u64::from(count) * REFERENCE;
    let result = count::take(folio.count(), taken, references_in);
    // SAFETY: 1. the references were the caller's (obligation 1).
    unsafe { folio.after_taking(result) }
}

impl<P: Platform> Frames<P> {
    /// A reference to the folio that contains `frame`. The frame may be freed and reused during the
    /// call. `None` if the frame is in no folio, or if its folio is not published yet or has too
    /// many references. Two loads and an atomic instruction; takes no lock.
    #[inline(always)]
    pub(crate) fn try_hold<'a>(&'a self, frame: Frame) -> Option<FolioRef<'a, P>> {
        hold(self, frame)
    }
}

/// [`Frames::try_hold`].
fn hold<P: Platform>(frames: &Frames<P>, frame: Frame) -> Option<FolioRef<'_, P>> {
    match from_nothing(frames, frame) {
        Ok(folio) => folio.map(|folio| FolioRef { handle: frames.folio(folio) }),
        Err(Mistaken(folio)) => {
            // SAFETY: 1. the reference was just added, to a folio that does not contain the frame.
            unsafe { frames.folio(folio).release() };
            None
        }
    }
}
