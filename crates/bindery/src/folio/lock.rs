//! The lock of a folio: a bit of its `state`, separate from the lock bit of tables, so that a late
//! locker of a folio cannot disturb a table, nor the reverse.
//!
//! Only a holder of a reference or a mapping takes the lock. So the lock is free when the folio is
//! freed, and no thread locks a frame that becomes something else. The lock protects the owner and
//! the index.
//!
//! # Waiting for the lock
//! Under a table's lock or in a read section, a thread only tries it. Waiting comes below an
//! object's invalidate lock, so a holder of the folio lock only tries invalidate locks. The lock of
//! an anonymous family comes below the folio lock. A waiter parks on `state`, with [`FOLIO_PARKED`]
//! set ([`crate::sync::parking`]).
//!
//! # Removing the owner
//! A thread may remove the last mapping of an anonymous folio that another holder keeps. Then it
//! must remove the owner too, but it may hold a table's lock and so cannot wait. It sets [`ORPHAN`]
//! and [`FOLIO_LOCK`] in one step. The unlocking thread checks for the mark in the same step that
//! unlocks:
//!
//! 1. CPU A works on the owner and has the lock.
//! 2. CPU B removes the last mapping; a pin remains. B's mapping becomes a reference.
//! 3. CPU B sets both bits and sees that the lock was taken. It drops its reference, and returns.
//! 4. CPU A unlocks: it finds the mark, removes the owner, and clears mark and lock together.
//!
//! A thread that unlocks many folios clears the lock bit by one subtraction instead
//! ([`super::FolioBatch::unlock`]), and the result shows whether a mark was set. If so, it takes
//! the lock again, and unlocks as above. If another thread holds the lock by then, that thread
//! finds the mark.
//!
//! If A tested the mark before it unlocked, B could come between the two steps. If the folio is
//! mapped again before a thread acts on the mark, it has a new owner, which stays: an unmapped
//! folio is mapped only under the lock.
//!
//! Between steps 2 and 3, the folio is not mapped, and the mark is not set yet. So a thread that
//! maps a folio under the lock checks the mappings first. If there are none, the owner is stale,
//! and the folio gets a new one.
//!
//! # A lock without a guard
//! A [`FolioLock`] unlocks the folio when it is dropped. In three cases the guard is consumed and
//! the lock stays held. `docs/lock-order.md` lists the places; `tests/handovers.rs` knows them too.
//!
//! | from guard | to guard | meanwhile, the lock is |
//! |---|---|---|
//! | [`FolioLock::leave_to_batch`] | [`FolioHandle::lock_of_batch`] | a batch's, of folios that the same thread goes through once more |
//! | [`LockedFolio::into_request`] | [`FolioHandle::lock_of_request`] | a device's request's; the thread that ends the request, or takes the folio back, gets it |
//! | [`LockedFolio::into_frozen`] | none | gone with the folio, which the holder of the lock has frozen |
//!
//! A guard of any origin acts on the marks when it is dropped. A request has no guard, perhaps for
//! long, and the thread that ends it may be one that maps the folio. So the marks are acted on when
//! the lock passes to a request, and when it returns from one:
//!
//! 1. CPU A holds the lock, and unmaps the folio. Other references remain: the mark is A's to act
//!    on.
//! 2. CPU A hands the lock to a request.
//! 3. CPU B takes the lock from the request, and maps the folio.
//! 4. CPU B unlocks. It finds the mark, and the folio mapped: the old owner would stay.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::sync::atomic::Ordering;

use super::frozen::FrozenFolio;
use super::handle::{Folio, FolioHandle};
use super::owner::{FolioIndex, FolioOwner, LiveOwner, OwnerMark};
use super::reference::FolioRef;
use crate::frame::meta::{FOLIO_LOCK, FOLIO_PARKED, ORPHAN, WRITEBACK};
use crate::platform::Platform;
use crate::sync::parking::{Parking, park_while};
use crate::sync::word::Word;

/// Takes the lock, unless another thread holds it.
#[inline]
pub(super) fn try_lock(state: &impl Word<u32>) -> bool {
    state.set(FOLIO_LOCK, Ordering::Acquire) & FOLIO_LOCK == 0
}

/// Takes the lock, and sleeps while another thread holds it. `false` as soon as a device's request
/// holds it.
pub(crate) fn lock_unless_writeback<W: Word<u32>>(state: &W, parking: &impl Parking<W>) -> bool {
    parking.might_sleep();
    while !try_lock(state) {
        if state.load(Ordering::Acquire) & WRITEBACK != 0 {
            return false;
        }
        let blocked = |state| state & (FOLIO_LOCK | WRITEBACK) == FOLIO_LOCK;
        park_while(parking, state, FOLIO_PARKED, blocked);
    }
    true
}

/// Hands the lock to a device's request. Wakes the threads that wait for the lock; they then wait
/// for the device. Both bits change in one step, so a thread that parks later sees the device's.
/// Calls `disown` as [`unlock`] does.
pub(crate) fn begin_writeback<W: Word<u32>>(
    state: &W,
    parking: &impl Parking<W>,
    disown: impl Fn(),
) {
    // Acquire: as in `unlock`.
    let mut seen = state.load(Ordering::Acquire);
    loop {
        debug_assert_ne!(seen & FOLIO_LOCK, 0, "the folio was not locked");
        if seen & ORPHAN != 0 {
            disown();
        }
        let marked = seen & !(FOLIO_PARKED | ORPHAN) | WRITEBACK;
        match state.exchange(seen, marked, Ordering::Release, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => seen = now,
        }
    }
    if seen & FOLIO_PARKED != 0 {
        parking.unpark(state);
    }
}

/// Takes the lock over from a device's request. Returns whether the request still held it. Calls
/// `disown`, under the lock, if the owner is to be removed.
pub(crate) fn take_from_request(state: &impl Word<u32>, disown: impl FnOnce()) -> bool {
    let mut seen = state.load(Ordering::Relaxed);
    while seen & WRITEBACK != 0 {
        // Acquire: what was done to the folio before the request had it.
        let taken = seen & !(WRITEBACK | ORPHAN);
        match state.exchange(seen, taken, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => {
                if seen & ORPHAN != 0 {
                    disown();
                }
                return true;
            }
            Err(now) => seen = now,
        }
    }
    false
}

/// Releases the lock. Calls `disown` if the owner is to be removed; `disown` checks whether that
/// still holds, and may be called more than once.
#[inline]
pub(crate) fn unlock<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    // Acquire: the last mapping was removed before the mark was set.
    let mut seen = state.load(Ordering::Acquire);
    loop {
        debug_assert_ne!(seen & FOLIO_LOCK, 0, "the folio was not locked");
        if seen & ORPHAN != 0 {
            disown();
        }
        let free = seen & !(FOLIO_LOCK | ORPHAN | FOLIO_PARKED | WRITEBACK);
        match state.exchange(seen, free, Ordering::Release, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => seen = now,
        }
    }
    if seen & FOLIO_PARKED != 0 {
        parking.unpark(state);
    }
}

/// Releases the lock by one subtraction, which may leave the marks of other threads behind. `false`
/// if it did: the caller continues with [`see_to_marks`], unless it knows that another thread will.
#[inline(always)]
#[must_use]
pub(super) fn unlock_at_once(state: &impl Word<u32>) -> bool {
    let seen = state.sub(FOLIO_LOCK, Ordering::Release);
    debug_assert_ne!(seen & FOLIO_LOCK, 0, "the folio was not locked");
    seen & (ORPHAN | FOLIO_PARKED | WRITEBACK) == 0
}

/// Acts on the marks that [`unlock_at_once`] has left behind, as an unlocking thread does. If
/// another thread has taken the lock since, that thread acts on them when it unlocks.
#[cold]
pub(super) fn see_to_marks<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    if try_lock(state) {
        unlock(state, parking, disown);
    }
}

/// Makes the caller or the lock's holder remove the owner under the lock; never waits. The caller
/// has a reference.
#[inline]
pub(super) fn orphan<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    if state.set(FOLIO_LOCK | ORPHAN, Ordering::AcqRel) & FOLIO_LOCK == 0 {
        unlock(state, parking, disown);
    }
}

/// The lock of a folio; released on drop. Until then, the owner that it reports is the folio's. If
/// that owner is an object, the object lives: it waits for the lock before it releases the folio.
pub(crate) struct FolioLock<'a, P: Platform> {
    handle: FolioHandle<'a, P>,
}

/// The number of a folio whose lock the caller has, for functions that rely on the lock. Borrowed
/// from the guard: the lock is neither released nor handed over before the last use.
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

    /// The folio, as a proof that it is locked.
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

    /// Records that the object that owns the folio no longer refers to any page of it.
    pub(crate) fn detach_from_object(&self) {
        self.handle.detach_from_object();
    }
}

impl<'a, P: Platform> FolioLock<'a, P> {
    /// Leaves the folio locked. The batch that has it then owes a [`FolioHandle::lock_of_batch`],
    /// whose guard acts on pending marks.
    pub(crate) fn leave_to_batch(self) {
        core::mem::forget(self);
    }

    /// The folio with its lock and a reference that the caller has without a guard.
    ///
    /// # Safety
    /// 1. The reference is the caller's, which gives it to the result: no other code releases it.
    #[inline]
    pub(crate) unsafe fn with_reference(self) -> LockedFolio<'a, P> {
        let handle = self.handle;
        debug_assert_ne!(handle.references(), 0, "{:?} has no reference", handle.folio);
        LockedFolio { lock: ManuallyDrop::new(self) }
    }
}

/// A folio with its lock and a reference, on its way out of memory or back from swap. Passed on by
/// value. Dropping it unlocks the folio and drops the reference: a folio with others stays.
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

    /// As [`FolioRef::try_lock`]; the guard of the lock takes the reference, too. If the lock is
    /// taken, the reference is released.
    #[inline]
    pub(crate) fn try_into_locked(self) -> Option<LockedFolio<'a, P>> {
        // SAFETY: 1. this guard's reference, which becomes the result's or is released after the
        // attempt.
        let lock = unsafe { self.handle().try_lock() }?;
        self.leave();
        // SAFETY: 1. that of the guard, which has left it.
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

    /// As [`FolioLock::leave_to_batch`], of lock and reference ([`FolioHandle::folio_of_batch`]).
    #[inline]
    pub(crate) fn leave_to_batch(self) {
        core::mem::forget(self);
    }

    /// As [`FolioLock::leave_to_batch`]; the reference keeps its guard.
    #[inline]
    pub(crate) fn leave_lock_to_batch(self) -> FolioRef<'a, P> {
        let handle = self.lock().handle;
        core::mem::forget(self);
        FolioRef::adopt(handle)
    }

    /// Hands lock and reference to a device's request until the request is done
    /// ([`FolioHandle::lock_of_request`]). Acts on pending marks first. The thread that takes the
    /// lock from the request acts on marks that are set later.
    pub(crate) fn into_request(self) {
        let handle = self.lock().handle;
        begin_writeback(handle.state(), handle.platform(), || handle.disown());
        core::mem::forget(self);
    }

    /// Unlocks the folio, and keeps the reference.
    pub(crate) fn unlock(self) -> FolioRef<'a, P> {
        let handle = self.lock().handle;
        core::mem::forget(self);
        drop(FolioLock { handle });
        FolioRef::adopt(handle)
    }

    /// The folio was frozen with this reference as one of the last: no other thread has the folio
    /// or waits for its lock. Lock and reference are gone.
    #[inline]
    pub(crate) fn into_frozen<'f>(self, frozen: FrozenFolio<'f, P>) -> FrozenFolio<'f, P> {
        debug_assert_eq!(self.folio(), frozen.folio());
        core::mem::forget(self);
        frozen
    }
}

impl<P: Platform> LockedFolio<'_, P> {
    /// Unlocks and releases the folio, as dropping it does: the compiler shares one function among
    /// all that drop one, and each fault that reads a page from swap would call it.
    #[inline(always)]
    pub(crate) fn end(self) {
        ManuallyDrop::new(self).unlock_and_release();
    }

    #[inline(always)]
    fn unlock_and_release(&self) {
        let handle = self.lock().handle;
        unlock(handle.state(), handle.platform(), || handle.disown());
        // SAFETY: 1. this guard's, which ends. After the unlock: the reference keeps the folio
        // while it is unlocked.
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
    /// As [`FolioRef::try_lock`], for a caller whose reference has no guard, or that has none.
    ///
    /// # Safety
    /// 1. A reference, or a mapping that the caller keeps by the lock of a table, holds the folio
    ///    until the lock is dropped.
    #[inline]
    pub(crate) unsafe fn try_lock(self) -> Option<FolioLock<'a, P>> {
        let locked = try_lock(self.state());
        // Not `then_some`: a lock that was not taken must not be dropped.
        locked.then(|| FolioLock { handle: self })
    }

    /// The lock of a folio that the caller's batch has ([`FolioLock::leave_to_batch`]).
    ///
    /// # Safety
    /// 1. The batch has the lock: its guard was left to it, or it was taken by
    ///    [`super::FolioBatch`], and no guard was made of it since. Owner and index, which are
    ///    pointers, rest on that.
    pub(crate) unsafe fn lock_of_batch(self) -> FolioLock<'a, P> {
        let is_locked = self.state().load(Ordering::Relaxed) & FOLIO_LOCK != 0;
        debug_assert!(is_locked, "{:?} was not left locked", self.folio);
        FolioLock { handle: self }
    }

    /// As [`FolioHandle::lock_of_batch`], for a folio to which the batch has a reference, too.
    ///
    /// # Safety
    /// 1. As there.
    /// 2. The reference was left to the batch, too, and is in no guard.
    #[inline]
    pub(crate) unsafe fn folio_of_batch(self) -> LockedFolio<'a, P> {
        // SAFETY: 1. of the lock: obligation 1; of the reference: obligation 2.
        unsafe { self.lock_of_batch().with_reference() }
    }

    /// Acts on marks that other threads set on a folio that the caller unlocked just before
    /// ([`super::FolioBatch::unlock`]). The caller has a mapping of it.
    #[cold]
    pub(crate) fn see_to_marks(self) {
        see_to_marks(self.state(), self.platform(), || self.disown());
    }

    /// As [`FolioHandle::try_lock`], but waits for threads; not under a table's lock, and not in a
    /// read section. `None` if a device writes the folio: a thread that finds the request done
    /// unlocks it (`swap::lock_folio` waits for that too).
    ///
    /// # Safety
    /// 1. A reference of the caller's holds the folio until the lock is dropped.
    pub(crate) unsafe fn lock_unless_writeback(self) -> Option<FolioLock<'a, P>> {
        let locked = lock_unless_writeback(self.state(), self.platform());
        locked.then(|| FolioLock { handle: self })
    }

    /// Takes the folio's lock over from a device's request, if the request still holds it.
    ///
    /// # Safety
    /// 1. A reference keeps the folio until the guard is dropped: the caller's, the request's, or
    ///    that of the swap cache, which the caller keeps there.
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

    /// The folio is no longer mapped, and the caller has a reference: removes the owner now, or
    /// when the holder of the lock releases it.
    #[cold]
    pub(super) fn orphan(self) {
        orphan(self.state(), self.platform(), || self.disown());
    }

    /// Removes the owner of an anonymous folio without mappings; the lock is held.
    #[cold]
    #[inline(never)]
    fn disown(self) {
        if self.mappings() == 0 && self.is_anonymous() {
            OwnerMark::of(LiveOwner::NONE).write(self.head(), FolioIndex::NONE);
        }
    }
}
