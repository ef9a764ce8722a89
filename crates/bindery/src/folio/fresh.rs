//! The lifetime of a folio, and its beginning: a fresh folio, which only its creator can find.
//!
//! The thread that removes the last mapping, reference or pin frees the folio. The count is one
//! word ([`super::count`]), so exactly one thread removes the last, and that thread sees it in the
//! result:
//!
//! ```text
//!            references  mappings
//! new_folio       0          0      fresh: only the fault that allocated it knows it
//! FreshFolio::map 0         16      ... and maps all 16 pages
//! map             0         32      fork: the child maps them too
//! try_hold        1         32      reclaim found it by its frame number
//! unmap           1         16      the child exits
//! unmap           1          0      the parent exits; the folio stays, but loses its owner
//! release         0          0      freed
//! ```
//!
//! [`FreshFolio::discard`] frees a fresh folio that is not needed. Each of these methods consumes
//! the value, so a folio that is mapped or published is neither overwritten nor freed as a fresh
//! one. While the count is zero, only the creator accesses the metadata, by plain stores.
//! Afterwards all accesses are atomic.
//!
//! A thread that adds a mapping or a reference has another one, holds the lock of a table with a
//! mapping, or adds only to a nonzero count ([`super::reference`]). So only the store that
//! publishes a fresh folio raises the count from zero. Removing one releases the caller's accesses
//! to the folio's bytes, and freeing acquires them. So the next owner's writes follow all those
//! accesses.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Deref;
use core::sync::atomic::Ordering::Relaxed;

use super::count::{self, MAPPING, REFERENCE};
use super::exclusive::{WORD_PAGES, bits};
use super::handle::{Folio, FolioHandle, MAX_FOLIO_ORDER};
use super::lock::LockedFolio;
use super::owner::{FolioIndex, LiveOwner, OwnerMark};
use crate::addr::Order;
use crate::frame::meta::{EXCLUSIVE, KIND_AND_ORDER, MetaKind, state_of};
use crate::frame::{AllocateFor, Frames};
use crate::platform::Platform;

/// A folio that only its creator can find: neither mapped nor published. Its frames leak unless the
/// folio is mapped, published or discarded.
#[must_use = "a fresh folio must be mapped, published or discarded"]
pub(crate) struct FreshFolio<'a, P: Platform>(FolioHandle<'a, P>);

impl<P: Platform> Deref for FreshFolio<'_, P> {
    type Target = Folio;

    #[inline(always)]
    fn deref(&self) -> &Folio {
        &self.0.folio
    }
}

impl<P: Platform> Frames<P> {
    /// The fresh folio with the number that the caller has recorded.
    ///
    /// # Safety
    /// 1. The number is that of a fresh folio of the caller, which no other thread can find. From
    ///    here on, any other value of it is only left ([`FreshFolio::leave`]).
    #[inline(always)]
    pub(crate) unsafe fn fresh(&self, folio: Folio) -> FreshFolio<'_, P> {
        FreshFolio(self.folio(folio))
    }

    /// A fresh folio, which only the caller can find. Its count is zero until the folio is mapped
    /// ([`FreshFolio::map`]) or published ([`FreshFolio::publish`]); [`FreshFolio::discard`] frees
    /// a folio that is neither. The folio is not dirty and not locked, no page is anon-exclusive,
    /// and the contents are unspecified. `None` if there is no memory, or `order` is above
    /// [`MAX_FOLIO_ORDER`].
    ///
    /// Does not sleep. O(pages): the head is written to each tail.
    pub(crate) fn new_folio(&self, order: Order) -> Option<FreshFolio<'_, P>> {
        let fresh = self.new_exclusive_folio(order)?;
        fresh.0.exclusive().clear(0, fresh.0.folio.pages());
        Some(fresh)
    }

    /// As [`Frames::new_folio`], with every page anon-exclusive, for one process's anonymous
    /// memory.
    #[inline(always)]
    pub(crate) fn new_exclusive_folio(&self, order: Order) -> Option<FreshFolio<'_, P>> {
        allocate(self, order).map(|folio| FreshFolio(self.folio(folio)))
    }
}

/// [`Frames::new_exclusive_folio`], called rather than inlined, because a number is returned in
/// registers but a handle is not.
fn allocate<P: Platform>(frames: &Frames<P>, order: Order) -> Option<Folio> {
    if order > MAX_FOLIO_ORDER {
        return None;
    }
    let folio = Folio::of(frames.allocate(order, AllocateFor::Use)?, order);
    let head = frames.meta(folio.head);
    let exclusive = if order == Order::PAGE { EXCLUSIVE } else { 0 };
    if order > Order::PAGE {
        write_tails(frames, folio);
    }
    frames.folio(folio).exclusive().write(|_| bits(0, folio.pages().min(WORD_PAGES)));
    head.state.store(state_of(MetaKind::Folio, order) | exclusive, Relaxed);
    Some(folio)
}

impl<'a, P: Platform> FreshFolio<'a, P> {
    /// The number of the folio, for a record that cannot borrow the frames, or a loop in which
    /// values would cost more. [`Frames::fresh`] restores the value.
    #[inline(always)]
    pub(crate) fn leave(self) -> Folio {
        self.0.folio
    }

    /// Publishes the folio, without an owner, with two references: one for the swap cache and one
    /// for the result, which also has the folio's lock. Discards the folio if its lock is held,
    /// which would be a bug: no thread can lock a folio that it cannot find.
    #[inline(always)]
    pub(crate) fn publish_for_swap_cache(self) -> Option<LockedFolio<'a, P>> {
        // SAFETY: 1. the folio is published with references below, before the lock can be dropped.
        let Some(lock) = (unsafe { self.0.try_lock() }) else {
            self.discard();
            return None;
        };
        lock.set_owner(LiveOwner::NONE, FolioIndex::NONE);
        count::publish(self.0.count(), 2 * REFERENCE);
        // SAFETY: 1. the second of the references that were just published.
        Some(unsafe { lock.with_reference() })
    }
}

impl<P: Platform> FreshFolio<'_, P> {
    /// Frees the folio. A folio that is no longer fresh is counted in
    /// [`crate::frame::Allocator::refused`].
    pub(crate) fn discard(self) {
        let FolioHandle { frames, folio } = self.0;
        let count = self.0.count().load(Relaxed);
        debug_assert_eq!(count, 0, "{folio:?} is not fresh");
        let state = self.0.state().load(Relaxed) & KIND_AND_ORDER;
        if count == 0 && state == state_of(MetaKind::Folio, folio.order) {
            // SAFETY: 1. and 2. the folio was never mapped or published, because mapping or
            // publishing consumes the value; so only its creator can find it, and frees it here.
            unsafe { frames.free(folio.head, folio.order) };
        } else {
            frames.refuse();
        }
    }

    /// Records the owner of the folio, and the index of its first page there. The owner outlives
    /// the folio's mappings. For any other folio, use [`super::FolioLock::set_owner`].
    #[inline]
    pub(crate) fn set_owner(&self, owner: LiveOwner<'_>, index: FolioIndex) {
        let folio = self.0.folio;
        debug_assert_eq!(self.0.count().load(Relaxed), 0, "{folio:?} is not fresh");
        OwnerMark::of(owner).write(self.0.head(), index);
    }

    /// Publishes the folio with `pages` mappings, by one store. Returns its number.
    #[inline]
    pub(crate) fn map(self, pages: u32) -> Folio {
        debug_assert!(pages >= 1 && pages <= self.0.folio.pages());
        count::publish(self.0.count(), u64::from(pages) * MAPPING);
        self.0.folio
    }

    /// Publishes the folio, by one store, with `references` references: one for each page of it in
    /// an object's index. Returns its number.
    #[inline]
    pub(crate) fn publish(self, references: u32) -> Folio {
        debug_assert!(references >= 1 && references <= self.0.folio.pages());
        count::publish(self.0.count(), u64::from(references) * REFERENCE);
        self.0.folio
    }
}

/// Writes the tails of a folio that only the caller can find.
// Never inlined: its loop needs more registers than a caller has free.
#[inline(never)]
pub(super) fn write_tails<P: Platform>(frames: &Frames<P>, folio: Folio) {
    let Folio { head, order, .. } = folio;
    let state = state_of(MetaKind::Tail, order);
    for page in 1..order.pages() {
        let tail = frames.meta(head.plus(page));
        tail.owner.store(head.0, Relaxed);
        tail.state.store(state, Relaxed);
    }
}
