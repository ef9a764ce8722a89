//! Mappings and pins of folios.
//!
//! A mapping is removed only after the flush that revoked it, so that freed frames are in no TLB
//! (invariant 1 of `docs/invariants.md`); see `tlb/`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use super::count::{
    self, Left, MAPPING, PIN, PinRoom, REFERENCE, TooManyMappings, mappings_in, pins_in,
    references_in,
};
use super::frozen::FrozenFolio;
use super::handle::{Folio, FolioHandle, Freed, change_flag};
use super::owner::{self, FolioIndex, LiveOwner, OwnerMark};
use crate::addr::{Frame, Order};
use crate::frame::meta::{DIRTY, KIND_AND_ORDER, MetaKind, state_of};
use crate::frame::{Frames, FreeBatch};
use crate::platform::Platform;

/// The holders of a folio at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holders {
    /// Holders that neither map nor pin it.
    pub(crate) references: u32,
    pub(crate) pins: u32,
    /// Pairs of a page and an entry that maps it.
    pub(crate) mappings: u32,
}

impl<P: Platform> FolioHandle<'_, P> {
    /// Adds `pages` mappings, at most as many as the folio has pages. One atomic instruction.
    ///
    /// # Errors
    ///
    /// [`TooManyMappings`] if the folio would have 2^31 or more mappings; nothing has changed.
    #[inline]
    pub(crate) fn map(self, pages: u32) -> Result<(), TooManyMappings> {
        debug_assert!(pages <= self.folio.pages());
        count::map(self.count(), pages)
    }

    /// Drops `pages` mappings; frees the folio with the last one if no reference remains. One
    /// atomic instruction if the folio is not freed. Mappings that the folio does not have are not
    /// dropped but counted in [`crate::frame::Allocator::refused`].
    ///
    /// An anonymous folio that loses its last mapping while references or pins remain loses its
    /// owner, because nothing keeps the owner alive.
    ///
    /// # Safety
    /// 1. The caller owns the mappings: it has removed their entries, and drops the mappings only
    ///    here.
    /// 2. No TLB has translations from these entries.
    #[inline(always)]
    pub(crate) unsafe fn unmap(self, pages: u32) -> Freed {
        // SAFETY: 1. and 2. the caller's obligations 1 and 2.
        unsafe { unmap(self.frames, self.folio, pages) }
    }

    /// Frees the folio into the batch if the caller's `pages` mappings are its only holders.
    /// Returns whether it was freed; otherwise nothing has changed. One compare-exchange freezes
    /// the folio, so that no thread can take a new reference, not even by frame number.
    ///
    /// # Safety
    /// 1. and 2. As for [`FolioHandle::unmap`], if this call frees the folio.
    #[inline]
    pub(crate) unsafe fn free_into(self, batch: &mut FreeBatch<'_, P>, pages: u32) -> bool {
        // SAFETY: 1. the caller's mappings (obligation 1); 2. the caller's obligation 2.
        let frozen = unsafe { FrozenFolio::freeze(self, u64::from(pages) * MAPPING) };
        frozen.map(|folio| folio.free_into(batch)).is_some()
    }

    /// As [`FolioHandle::free_into`], but only for anonymous folios: a folio that an object owns,
    /// or owned when it was mapped, is left unchanged.
    ///
    /// # Safety
    /// 1. and 2. As for [`FolioHandle::free_into`].
    #[inline]
    pub(crate) unsafe fn free_anonymous_into(
        self,
        batch: &mut FreeBatch<'_, P>,
        pages: u32,
    ) -> bool {
        // SAFETY: 1. and 2. passed on.
        !owner::is_counted_for_object(self.head().word.load(Relaxed))
            && unsafe { self.free_into(batch, pages) }
    }

    /// Removes the owner of an anonymous folio whose only holders are `pages` mappings and `held`
    /// references, owned by the caller or the swap cache. Replaces these holds by two references,
    /// one for the caller and one for the swap cache. Returns `false`, with nothing changed, if the
    /// folio had other holders. The caller has the folio's lock. One compare-exchange.
    ///
    /// # Safety
    /// 1. and 2. As for [`FolioHandle::unmap`].
    /// 3. The `held` references are the caller's, or the swap cache's.
    #[inline]
    pub(crate) unsafe fn unmap_all(self, pages: u32, held: u32) -> bool {
        let from = u64::from(pages) * MAPPING + u64::from(held) * REFERENCE;
        let unmapped = count::exchange(self.count(), from, 2 * REFERENCE);
        if unmapped {
            OwnerMark::of(LiveOwner::NONE).write(self.head(), FolioIndex::NONE);
        }
        unmapped
    }

    /// As [`FolioHandle::unmap`], for a caller that unmaps many folios: a folio that becomes free
    /// is added to the batch. With `dirty`, the folio is marked dirty.
    ///
    /// # Safety
    /// 1. and 2. As for [`FolioHandle::unmap`].
    #[inline]
    pub(crate) unsafe fn unmap_into(
        self,
        batch: &mut FreeBatch<'_, P>,
        pages: u32,
        dirty: impl FnOnce() -> bool,
    ) -> Freed {
        // SAFETY: 1. and 2. passed on.
        if unsafe { self.free_into(batch, pages) } {
            return Freed::Yes;
        }
        if dirty() {
            // Marked before the mapping is dropped, because the folio may then be freed and reused.
            self.mark_dirty();
        }
        // SAFETY: 1. and 2. passed on; nothing was dropped above.
        unsafe { self.unmap(pages) }
    }

    /// Pins the folio, using the given part of the field's room. The folio stays in place until it
    /// is unpinned. The caller keeps it mapped during the call. Returns whether the field had room.
    pub(crate) fn pin(self, room: PinRoom) -> bool {
        count::pin(self.count(), room)
    }

    /// Drops a pin; frees the folio with the last one if it has no other holder.
    ///
    /// # Safety
    /// 1. The caller owns the pin and drops it only here.
    pub(crate) unsafe fn unpin(self) -> Freed {
        let result = count::take(self.count(), PIN, pins_in);
        // SAFETY: 1. the pin was the caller's (obligation 1).
        unsafe { self.after_taking(result) }
    }

    /// Whether the folio is pinned. The caller has just removed the folio's entries in a
    /// sequentially consistent step. A thread that pins a page counts the pin and then checks
    /// whether the entry is still present. So at least one of the two threads sees the other's
    /// step.
    #[inline]
    pub(crate) fn is_pinned_since(self) -> bool {
        pins_in(self.count().load(SeqCst)) > 0
    }

    /// All holders at one moment.
    #[inline]
    pub(crate) fn holders(self) -> Holders {
        // Acquire: a mapping that is gone has left its pins and references behind.
        let count = self.count().load(Acquire);
        Holders {
            references: references_in(count),
            pins: pins_in(count),
            mappings: mappings_in(count),
        }
    }

    /// The number of pins.
    #[inline]
    pub(crate) fn pins(self) -> u32 {
        pins_in(self.count().load(Relaxed))
    }

    /// The number of pairs of a page and an entry that maps it. May be stale unless the caller
    /// excludes changes.
    #[inline]
    pub(crate) fn mappings(self) -> u32 {
        mappings_in(self.count().load(Relaxed))
    }

    /// Whether exactly `mappings` entries map pages of the folio, and `held` references of the
    /// caller are its only other holders. Another thread may take a reference by frame number at
    /// any time.
    #[inline]
    pub(crate) fn is_mapped_and_held(self, mappings: u32, held: u32) -> bool {
        let count = u64::from(mappings) * MAPPING + u64::from(held) * REFERENCE;
        self.count().load(Relaxed) == count
    }
}

/// [`FolioHandle::unmap`], which need not be inlined, because it receives words, not a handle.
///
/// # Safety
/// 1. and 2. As for [`FolioHandle::unmap`].
#[inline]
unsafe fn unmap<P: Platform>(frames: &Frames<P>, folio: Folio, pages: u32) -> Freed {
    let folio = frames.folio(folio);
    let count = folio.count();
    let result = if folio.is_anonymous() {
        count::unmap_owned(count, pages).map(|left| {
            if left == Left::Held {
                folio.orphan();
                return None;
            }
            Some(left == Left::Nothing)
        })
    } else {
        count::take(count, u64::from(pages) * MAPPING, mappings_in).map(Some)
    };
    match result.transpose() {
        // SAFETY: 1. the mappings were the caller's (obligation 1).
        Some(result) => unsafe { folio.after_taking(result) },
        // SAFETY: 1. the caller's mapping is a reference now.
        None if unsafe { folio.release() } == Freed::Yes => Freed::Yes,
        None => Freed::Unmapped,
    }
}

/// Whether the frame is a folio of one page that several entries map.
#[inline]
pub(crate) fn is_shared_page<P: Platform>(frames: &Frames<P>, frame: Frame) -> bool {
    frames.covers(frame) && {
        let meta = frames.meta(frame);
        let state = meta.state.load(Relaxed);
        state & KIND_AND_ORDER == state_of(MetaKind::Folio, Order::PAGE)
            && mappings_in(meta.count.load(Relaxed)) > 1
    }
}

/// Drops a mapping of the folio of one page in `frame`, if it is anonymous and has other mappings.
/// With `dirty`, the folio is marked dirty. For a frame of any other kind, returns `false` and
/// drops no mapping; it may also do so when another thread changes the count.
///
/// # Safety
/// 1. and 2. As for [`FolioHandle::unmap`], if this call drops the mapping.
#[inline(always)]
pub(crate) unsafe fn unmap_shared_page<P: Platform>(
    frames: &Frames<P>,
    frame: Frame,
    dirty: bool,
) -> bool {
    if !is_shared_page(frames, frame) {
        return false;
    }
    let meta = frames.meta(frame);
    if owner::is_counted_for_object(meta.word.load(Relaxed)) {
        return false;
    }
    if dirty {
        // Marked before the mapping is dropped, because the folio may then be freed and reused.
        change_flag(&meta.state, DIRTY, true);
    }
    count::unmap_one_of_several(&meta.count)
}
