//! The lock of a folio: a bit of its `state`, separate from the lock bit of tables, so that a
//! thread with an outdated folio number cannot disturb a table's lock, nor the reverse.
//!
//! Only a holder of a reference or a mapping takes the lock. So the lock is free when the folio is
//! freed, and no thread locks a frame that has been reused for another purpose. The lock protects
//! the owner and the index.
//!
//! # Waiting for the lock
//! Under a table's lock or in a read section, a thread only tries the lock. A waiting acquisition
//! ranks below an object's invalidate lock, so a holder of the folio lock only tries invalidate
//! locks. The lock of an anonymous family ranks below the folio lock. A waiter parks on `state`,
//! with [`FOLIO_PARKED`] set ([`crate::sync::parking`]).
//!
//! # Removing the owner
//! A thread may remove the last mapping of an anonymous folio that still has another holder. Then
//! the thread must also remove the owner, but it may hold a table's lock and so cannot wait.
//! Therefore it sets [`ORPHAN`] and [`FOLIO_LOCK`] in one step. The unlocking thread checks for the
//! mark in the same step that unlocks:
//!
//! 1. CPU A holds the lock and works on the owner.
//! 2. CPU B removes the last mapping; a pin remains. B's mapping becomes a reference.
//! 3. CPU B sets both bits and sees that the lock was held. It drops its reference and returns.
//! 4. CPU A unlocks: it finds the mark, removes the owner, and clears mark and lock together.
//!
//! A thread that unlocks many folios clears the lock bit by one subtraction instead
//! ([`super::FolioBatch::unlock`]), whose result shows whether a mark was set. If so, the thread
//! takes the lock again and unlocks as above. If another thread holds the lock by then, that thread
//! finds the mark.
//!
//! If A tested the mark before it unlocked, B could set it between the two steps. If the folio is
//! mapped again before a thread acts on the mark, it has a new owner, which is retained: an
//! unmapped folio is mapped only under the lock.
//!
//! Between steps 2 and 3, the folio is not mapped, and the mark is not set yet. So a thread that
//! maps a folio under the lock checks the mappings first. If the folio has no mapping, its owner is
//! stale, and the thread sets a new one.
//!
//! # A lock without a guard
//! A [`FolioLock`] unlocks the folio when it is dropped. In three cases the guard is consumed and
//! the lock remains held. `docs/lock-order.md` lists the places; `tests/handovers.rs` checks that
//! list.
//!
//! | from guard | to guard | meanwhile, the lock is |
//! |---|---|---|
//! | [`FolioLock::leave_to_batch`] | [`FolioHandle::lock_of_batch`] | a batch's, of folios that the same thread goes through once more |
//! | [`LockedFolio::into_request`] | [`FolioHandle::lock_of_request`] | a device's request's; the thread that ends the request, or takes the folio back, gets it |
//! | [`LockedFolio::into_frozen`] | none | gone with the folio, which the holder of the lock has frozen |
//!
//! Every guard acts on the marks when it is dropped, however it was obtained. A request may hold
//! the lock for a long time without a guard, and the thread that completes the request may be about
//! to map the folio. So the marks are processed when the lock passes to a request and when the lock
//! returns from it. Otherwise:
//!
//! 1. CPU A holds the lock and unmaps the folio. Other references remain: A has to act on the mark.
//! 2. CPU A hands the lock to a request.
//! 3. CPU B takes the lock from the request and maps the folio.
//! 4. CPU B unlocks. It finds the mark and a mapped folio, so the old owner would be retained.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::sync::atomic::{AtomicU32, Ordering};

use super::frozen::FrozenFolio;
use super::handle::{Folio, FolioHandle};
use super::lock_word::{
    begin_writeback, lock_unless_writeback, mark_held, orphan, see_to_marks, take_from_request,
    try_lock, unlock,
};
use super::owner::{FolioIndex, FolioOwner, LiveOwner, OwnerMark};
use super::reference::FolioRef;
use crate::frame::meta::{FOLIO_LOCK, WRITEBACK};
#[cfg(doc)]
use crate::frame::meta::{FOLIO_PARKED, ORPHAN};
use crate::platform::Platform;

/// The lock of a folio; released on drop. Until then, the owner that the guard reports is the
/// folio's. An owning object remains alive, because it waits for the lock before it releases the
/// folio.
pub(crate) struct FolioLock<'a, P: Platform> {
    handle: FolioHandle<'a, P>,
}

/// The number of a folio that the caller has locked, for functions that rely on the lock. The value
/// borrows the guard, so the lock is neither released nor handed over before its last use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FolioLocked<'l> {
    folio: Folio,
    _guard: PhantomData<&'l ()>,
}

impl Deref for FolioLocked<'_> {
    type Target = Folio;

    #[inline(always)]
    fn deref(&self) -> &Folio {
        &self.folio
    }
}

impl<P: Platform> FolioLock<'_, P> {
    #[inline]
    pub(crate) fn folio(&self) -> Folio {
        self.handle.folio
    }

    /// The folio's number, as a proof that the folio is locked.
    #[inline(always)]
    pub(crate) fn locked(&self) -> FolioLocked<'_> {
        FolioLocked { folio: self.handle.folio, _guard: PhantomData }
    }

    /// The folio's owner, and the index of its first page there. An anon group is valid only while
    /// the folio is mapped, and only in a read section that began before the caller saw the
    /// mapping.
    pub(crate) fn owner(&self) -> FolioOwner {
        self.handle.owner()
    }

    /// Sets another owner of the folio, and the index of its first page there.
    pub(crate) fn set_owner(&self, owner: LiveOwner<'_>, index: FolioIndex) {
        OwnerMark::of(owner).write(self.handle.head(), index);
    }

    /// As [`FolioLock::set_owner`], for a caller that sets one owner for many folios.
    #[inline]
    pub(crate) fn give_to(&self, owner: OwnerMark, index: FolioIndex) {
        owner.write(self.handle.head(), index);
    }

    /// Records that the owning object no longer refers to any page of the folio.
    pub(crate) fn detach_from_object(&self) {
        self.handle.detach_from_object();
    }
}

impl<'a, P: Platform> FolioLock<'a, P> {
    /// Leaves the folio locked. The batch with the lock must later call
    /// [`FolioHandle::lock_of_batch`], whose guard acts on pending marks.
    pub(crate) fn leave_to_batch(self) {
        core::mem::forget(self);
    }

    /// The folio with its lock and a reference of the caller's that has no guard.
    ///
    /// # Safety
    /// 1. The caller owns the reference and transfers it to the result; no other code releases it.
    #[inline]
    pub(crate) unsafe fn with_reference(self) -> LockedFolio<'a, P> {
        let handle = self.handle;
        debug_assert_ne!(handle.references(), 0, "{:?} has no reference", handle.folio);
        LockedFolio { lock: ManuallyDrop::new(self) }
    }
}

/// A folio with its lock and a reference, being evicted or read from swap. Passed by value.
/// Dropping the value unlocks the folio and drops the reference; the folio is freed only if it has
/// no other holder.
#[must_use = "dropping it unlocks and releases the folio"]
pub(crate) struct LockedFolio<'a, P: Platform> {
    lock: ManuallyDrop<FolioLock<'a, P>>,
}

impl<'a, P: Platform> FolioRef<'a, P> {
    /// Takes the folio's lock, unless another thread holds it. Never waits.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<FolioLock<'_, P>> {
        // SAFETY: 1. this guard's reference, which the lock borrows.
        unsafe { self.handle().try_lock() }
    }

    /// The word on which a task waits that has found the lock held by a thread, and its value until
    /// the thread unlocks ([`mark_held`]). The task keeps the reference meanwhile: a thread that
    /// holds the only one may free the folio without a wake-up.
    pub(crate) fn parked_on_lock(&self) -> Option<(&'a AtomicU32, u32)> {
        let state = self.handle().state();
        Some((state, mark_held(state)?))
    }

    /// As [`FolioRef::try_lock`], but the lock's guard also takes over the reference. If the lock
    /// is held, the reference is released.
    #[inline]
    pub(crate) fn try_into_locked(self) -> Option<LockedFolio<'a, P>> {
        // SAFETY: 1. this guard's reference, which passes to the result or is released after the
        // attempt.
        let lock = unsafe { self.handle().try_lock() }?;
        self.leave();
        // SAFETY: 1. the reference of this guard, which has relinquished it.
        Some(unsafe { lock.with_reference() })
    }
}

impl<'a, P: Platform> LockedFolio<'a, P> {
    #[inline]
    pub(crate) fn folio(&self) -> Folio {
        self.lock.handle.folio
    }

    /// The lock.
    #[inline(always)]
    pub(crate) fn lock(&self) -> &FolioLock<'a, P> {
        &self.lock
    }

    /// As [`FolioLock::locked`].
    #[inline(always)]
    pub(crate) fn locked(&self) -> FolioLocked<'_> {
        self.lock.locked()
    }

    /// As [`FolioLock::owner`].
    pub(crate) fn owner(&self) -> FolioOwner {
        self.lock.owner()
    }

    /// As [`FolioLock::leave_to_batch`], for both the lock and the reference
    /// ([`FolioHandle::folio_of_batch`]).
    #[inline]
    pub(crate) fn leave_to_batch(self) {
        core::mem::forget(self);
    }

    /// As [`FolioLock::leave_to_batch`]; the reference remains in its guard.
    #[inline]
    pub(crate) fn leave_lock_to_batch(self) -> FolioRef<'a, P> {
        let handle = self.lock().handle;
        core::mem::forget(self);
        FolioRef::adopt(handle)
    }

    /// Hands lock and reference to a device's request until the request completes
    /// ([`FolioHandle::lock_of_request`]). Acts on pending marks first. The thread that takes the
    /// lock from the request acts on marks that are set later.
    pub(crate) fn into_request(self) {
        let handle = self.lock().handle;
        begin_writeback(handle.state(), handle.platform(), || handle.disown());
        core::mem::forget(self);
    }

    /// Unlocks the folio and retains the reference.
    pub(crate) fn unlock(self) -> FolioRef<'a, P> {
        let handle = self.lock().handle;
        core::mem::forget(self);
        drop(FolioLock { handle });
        FolioRef::adopt(handle)
    }

    /// Consumes the guard after the folio was frozen with this reference as one of its last
    /// holders: no other thread has the folio or waits for its lock. The lock and the reference no
    /// longer exist.
    #[inline]
    pub(crate) fn into_frozen<'f>(self, frozen: FrozenFolio<'f, P>) -> FrozenFolio<'f, P> {
        debug_assert_eq!(self.folio(), frozen.folio());
        core::mem::forget(self);
        frozen
    }
}

impl<P: Platform> LockedFolio<'_, P> {
    /// Unlocks and releases the folio, as dropping this value does. Inlined, unlike the drop: the
    /// compiler shares one drop function among all callers, and each fault that reads a page from
    /// swap would call it.
    #[inline(always)]
    pub(crate) fn end(self) {
        ManuallyDrop::new(self).unlock_and_release();
    }

    #[inline(always)]
    fn unlock_and_release(&self) {
        let handle = self.lock().handle;
        unlock(handle.state(), handle.platform(), || handle.disown());
        // SAFETY: 1. this guard's reference, which ends here. Released after the unlock, because
        // the reference holds the folio while it is unlocked.
        unsafe { handle.release() };
    }
}

impl<P: Platform> Drop for LockedFolio<'_, P> {
    fn drop(&mut self) {
        self.unlock_and_release();
    }
}

impl<P: Platform> Drop for FolioLock<'_, P> {
    fn drop(&mut self) {
        unlock(self.handle.state(), self.handle.platform(), || self.handle.disown());
    }
}

impl<'a, P: Platform> FolioHandle<'a, P> {
    /// As [`FolioRef::try_lock`], for a caller that has no reference or whose reference has no
    /// guard.
    ///
    /// # Safety
    /// 1. Until the lock is dropped, the folio is held by a reference, or by a mapping that the
    ///    caller keeps by a table's lock.
    #[inline]
    pub(crate) unsafe fn try_lock(self) -> Option<FolioLock<'a, P>> {
        let locked = try_lock(self.state());
        // Not `then_some`: a lock that was not taken must not be dropped.
        locked.then(|| FolioLock { handle: self })
    }

    /// The lock of a folio that the caller's batch has ([`FolioLock::leave_to_batch`]).
    ///
    /// # Safety
    /// 1. The batch has the lock: a guard left it to the batch, or [`super::FolioBatch`] acquired
    ///    it, and no guard was made of it since. The validity of the owner and index, which are
    ///    pointers, depends on this.
    pub(crate) unsafe fn lock_of_batch(self) -> FolioLock<'a, P> {
        let is_locked = self.state().load(Ordering::Relaxed) & FOLIO_LOCK != 0;
        debug_assert!(is_locked, "{:?} was not left locked", self.folio);
        FolioLock { handle: self }
    }

    /// As [`FolioHandle::lock_of_batch`], for a folio to which the batch also has a reference.
    ///
    /// # Safety
    /// 1. As for [`FolioHandle::lock_of_batch`].
    /// 2. The reference was also left to the batch and is in no guard.
    #[inline]
    pub(crate) unsafe fn folio_of_batch(self) -> LockedFolio<'a, P> {
        // SAFETY: 1. of the lock: obligation 1; of the reference: obligation 2.
        unsafe { self.lock_of_batch().with_reference() }
    }

    /// Acts on marks that other threads set on a folio that the caller has just unlocked
    /// ([`super::FolioBatch::unlock`]). The caller has a mapping of the folio.
    #[cold]
    pub(crate) fn see_to_marks(self) {
        see_to_marks(self.state(), self.platform(), || self.disown());
    }

    /// As [`FolioHandle::try_lock`], but waits for other threads. Not called under a table's lock
    /// or in a read section. Returns `None` if a device writes the folio; the thread that finds the
    /// request completed unlocks the folio (`swap::lock_folio` also waits for that).
    ///
    /// # Safety
    /// 1. A reference of the caller holds the folio until the lock is dropped.
    pub(crate) unsafe fn lock_unless_writeback(self) -> Option<FolioLock<'a, P>> {
        let locked = lock_unless_writeback(self.state(), self.platform());
        locked.then(|| FolioLock { handle: self })
    }

    /// Takes the folio's lock from a device's request, if the request still holds it.
    ///
    /// # Safety
    /// 1. A reference holds the folio until the guard is dropped: the caller's, the request's, or
    ///    the swap cache's, which the caller keeps in the cache.
    pub(crate) unsafe fn lock_of_request(self) -> Option<FolioLock<'a, P>> {
        // The bit was set when a guard was consumed, and exactly one thread clears it.
        let state = self.state();
        let taken = take_from_request(state, || self.disown());
        taken.then(|| FolioLock { handle: self })
    }

    /// Whether a device's request has the folio's lock.
    pub(crate) fn is_under_writeback(self) -> bool {
        self.state().load(Ordering::Acquire) & WRITEBACK != 0
    }

    /// Removes the owner, now or when the lock's holder releases the lock. The folio is no longer
    /// mapped, and the caller has a reference.
    #[cold]
    pub(super) fn orphan(self) {
        orphan(self.state(), self.platform(), || self.disown());
    }

    /// Removes the owner of an anonymous folio without mappings. The caller holds the lock.
    #[cold]
    #[inline(never)]
    fn disown(self) {
        if self.mappings() == 0 && self.is_anonymous() {
            OwnerMark::of(LiveOwner::NONE).write(self.head(), FolioIndex::NONE);
        }
    }
}
