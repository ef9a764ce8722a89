//! The lock of a folio: a bit of its `state`, separate from the lock bit of tables, so that a late
//! locker of a folio cannot disturb a table, nor the reverse.
//!
//! Only a holder of a reference or a mapping takes the lock. So nobody has it when the folio is
//! freed, and no frame that becomes something else has a locker. The lock protects the owner and
//! the index.
//!
//! # Who may wait for it
//! Under a table's lock or in a read section, a thread only tries it. Waiting comes below an
//! object's invalidate lock, so a holder of the folio lock only tries invalidate locks. The lock of
//! an anonymous family comes below the folio lock. A waiter parks on `state`, with [`FOLIO_PARKED`]
//! set ([`crate::sync::parking`]).
//!
//! # An owner that goes
//! A thread that removes the last mapping of an anonymous folio, which stays because another holder
//! exists, must remove the owner too. But it may be under a table's lock and so cannot wait. It
//! sets [`ORPHAN`] and [`FOLIO_LOCK`] in one step. The unlocking thread looks for the mark in the
//! same step that unlocks:
//!
//! 1. CPU A works on the owner and has the lock.
//! 2. CPU B removes the last mapping; a pin remains. B's mapping becomes a reference.
//! 3. CPU B sets both bits and sees that the lock was taken. It drops its reference, and returns.
//! 4. CPU A unlocks: it finds the mark, removes the owner, and clears mark and lock together.
//!
//! A thread that unlocks many folios takes the lock bit away by one subtraction instead
//! ([`super::Numbered::unlock`]), and sees by the result whether a mark was there. If so, it takes
//! the lock again, and unlocks as above. If another thread has the lock by then, that one finds the
//! mark.
//!
//! If A tested the mark before it unlocked, B could come between the two steps. If the folio is
//! mapped again before anybody acts on the mark, it has a new owner, which stays: an unmapped folio
//! is mapped only under the lock.

use core::sync::atomic::Ordering;

use super::Frames;
use super::folio::Folio;
use super::meta::{FOLIO_LOCK, FOLIO_PARKED, ORPHAN, WRITEBACK};
use super::owner::{FolioOwner, Owner, OwnerMark};
use crate::platform::Platform;
use crate::sync::parking::{Parking, park_while};
use crate::sync::word::Word;

/// Takes the lock, unless somebody has it.
#[inline]
pub(super) fn try_lock(state: &impl Word<u32>) -> bool {
    state.set(FOLIO_LOCK, Ordering::Acquire) & FOLIO_LOCK == 0
}

/// Takes the lock, asleep while a thread has it. Says no as soon as it is a device's request that
/// has it.
pub(crate) fn lock_unless_writeback<W: Word<u32>>(state: &W, parking: &impl Parking<W>) -> bool {
    while !try_lock(state) {
        if state.load(Ordering::Acquire) & WRITEBACK != 0 {
            return false;
        }
        let blocked = |state| state & (FOLIO_LOCK | WRITEBACK) == FOLIO_LOCK;
        park_while(parking, state, FOLIO_PARKED, blocked);
    }
    true
}

/// Hands the lock to a device's request. Those who wait for the lock are woken, to wait for the
/// device. In one step with the bit: a thread that parks after it finds it.
pub(crate) fn begin_writeback<W: Word<u32>>(state: &W, parking: &impl Parking<W>) {
    let mut seen = state.load(Ordering::Relaxed);
    loop {
        debug_assert_ne!(seen & FOLIO_LOCK, 0, "the folio was not locked");
        let marked = seen & !FOLIO_PARKED | WRITEBACK;
        match state.exchange(seen, marked, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => seen = now,
        }
    }
    if seen & FOLIO_PARKED != 0 {
        parking.unpark(state);
    }
}

/// Takes the lock over from a device's request. Says whether that still had it.
pub(crate) fn take_from_request(state: &impl Word<u32>) -> bool {
    let mut seen = state.load(Ordering::Relaxed);
    while seen & WRITEBACK != 0 {
        // Acquire: what was done to the folio before the request had it.
        let taken = seen & !WRITEBACK;
        match state.exchange(seen, taken, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
    false
}

/// Gives the lock back. Calls `disown` where the owner should go; it looks whether that still
/// holds, and may be called more than once.
#[inline]
pub(crate) fn unlock<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    // Acquire: the mark came after the last mapping had gone.
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

/// Gives the lock back by one subtraction, which may leave the marks of others behind. `false` if it
/// did: the caller goes on with [`see_to_marks`], unless it knows that somebody else will.
#[inline(always)]
#[must_use]
pub(super) fn unlock_at_once(state: &impl Word<u32>) -> bool {
    let seen = state.sub(FOLIO_LOCK, Ordering::Release);
    debug_assert_ne!(seen & FOLIO_LOCK, 0, "the folio was not locked");
    seen & (ORPHAN | FOLIO_PARKED | WRITEBACK) == 0
}

/// Sees to the marks that [`unlock_at_once`] has left behind, as an unlocking thread does. A thread
/// that has the lock meanwhile does so when it unlocks.
#[cold]
pub(super) fn see_to_marks<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    if try_lock(state) {
        unlock(state, parking, disown);
    }
}

/// Has the owner taken away under the lock, by the caller or by its holder; never waits. The caller
/// has a reference.
#[inline]
pub(super) fn orphan<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    if state.set(FOLIO_LOCK | ORPHAN, Ordering::AcqRel) & FOLIO_LOCK == 0 {
        unlock(state, parking, disown);
    }
}

/// The lock of a folio; given back when this is dropped. For as long, the owner that it tells is
/// the folio's, and if that is an object, the object lives: it waits for the lock before it lets
/// the folio go.
pub(crate) struct FolioLock<'a, P: Platform> {
    frames: &'a Frames<P>,
    platform: &'a P,
    folio: Folio,
}

impl<P: Platform> FolioLock<'_, P> {
    /// Whom the folio belongs to, and the index of its first page there. An anon group is only
    /// to be trusted while the folio is mapped, and in a read section that began before that was
    /// seen.
    pub(crate) fn owner(&self, platform: &P) -> FolioOwner {
        self.frames.owner(platform, self.folio)
    }

    /// Gives the folio to another owner, with the index of its first page there.
    pub(crate) fn set_owner(&self, owner: Owner, index: u64) {
        self.frames.write_owner(self.folio, owner, index);
    }

    /// As [`FolioLock::set_owner`], for a caller that gives many folios to one owner.
    #[inline]
    pub(crate) fn give_to(&self, owner: OwnerMark, index: u64) {
        self.frames.write_owner_mark(self.folio.head, owner, index);
    }

    /// The object that owns the folio names no page of it any more.
    pub(crate) fn let_go(&self) {
        self.frames.let_go(self.folio);
    }
}

impl<P: Platform> FolioLock<'_, P> {
    /// Leaves the folio locked; [`Frames::folio_left_locked`] makes another guard of it.
    pub(crate) fn leave_locked(self) {
        core::mem::forget(self);
    }
}

impl<P: Platform> Drop for FolioLock<'_, P> {
    fn drop(&mut self) {
        let state = &self.frames.meta(self.folio.head).state;
        unlock(state, self.platform, || self.frames.disown(self.folio));
    }
}

impl<P: Platform> Frames<P> {
    /// Takes the folio's lock, unless somebody has it. Never waits. The caller has a reference, or
    /// keeps a mapping, until the lock is dropped.
    #[inline]
    pub(crate) fn try_lock_folio<'a>(
        &'a self,
        platform: &'a P,
        folio: Folio,
    ) -> Option<FolioLock<'a, P>> {
        let locked = try_lock(&self.meta(folio.head).state);
        // Not `then_some`: a lock that was not taken must not be dropped.
        locked.then(|| FolioLock { frames: self, platform, folio })
    }

    /// The lock of a folio that the caller has left locked ([`FolioLock::leave_locked`]).
    ///
    /// # Safety
    /// 1. The caller has the lock: it, or the thread that handed the folio to it, left it locked,
    ///    or holds a guard of it. Owner and index, which are pointers, rest on that.
    /// 2. Of all guards that exist meanwhile, one is dropped, and the others are left locked.
    pub(crate) unsafe fn folio_left_locked<'a>(
        &'a self,
        platform: &'a P,
        folio: Folio,
    ) -> FolioLock<'a, P> {
        debug_assert!(self.is_folio_locked(folio), "{folio:?} was not left locked");
        FolioLock { frames: self, platform, folio }
    }

    /// Sees to what others have left to do for a folio that was unlocked a moment ago
    /// ([`super::Numbered::unlock`]). The caller has a mapping of it.
    #[cold]
    pub(crate) fn see_to_marks(&self, platform: &P, folio: Folio) {
        see_to_marks(&self.meta(folio.head).state, platform, || self.disown(folio));
    }

    fn is_folio_locked(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.load(Ordering::Relaxed) & FOLIO_LOCK != 0
    }

    /// As [`Frames::try_lock_folio`], but waits for threads; not under a table's lock, and not in a
    /// read section. `None` where a device writes the folio: a thread that finds the request done
    /// unlocks it ([`Memory::lock_folio`](crate::Memory::lock_folio) waits for that too).
    pub(crate) fn lock_folio_unless_writeback<'a>(
        &'a self,
        platform: &'a P,
        folio: Folio,
    ) -> Option<FolioLock<'a, P>> {
        let locked = lock_unless_writeback(&self.meta(folio.head).state, platform);
        locked.then(|| FolioLock { frames: self, platform, folio })
    }

    /// The lock of the folio, which the caller has left locked, belongs to a device's request until
    /// that is done.
    pub(crate) fn begin_writeback(&self, platform: &P, folio: Folio) {
        begin_writeback(&self.meta(folio.head).state, platform);
    }

    /// Takes the folio's lock over from a device's request, if that still has it: the caller has
    /// left it locked then.
    pub(crate) fn take_from_request(&self, folio: Folio) -> bool {
        take_from_request(&self.meta(folio.head).state)
    }

    /// Whether a device's request has the folio's lock.
    pub(crate) fn is_under_writeback(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.load(Ordering::Acquire) & WRITEBACK != 0
    }

    /// Nobody maps the folio any more, and the caller has a reference: the owner goes now, or when
    /// the holder of the lock releases it.
    #[cold]
    pub(super) fn orphan(&self, platform: &P, folio: Folio) {
        orphan(&self.meta(folio.head).state, platform, || self.disown(folio));
    }

    /// Takes the owner of an anonymous folio that nobody maps away; the lock is held.
    #[cold]
    #[inline(never)]
    fn disown(&self, folio: Folio) {
        if self.mappings(folio) == 0 && self.is_anonymous(folio) {
            self.write_owner(folio, Owner::Nobody, 0);
        }
    }
}
