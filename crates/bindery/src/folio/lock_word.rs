//! The bits of a folio's `state` that are its lock, as functions of the word. [`super::lock`]
//! describes the lock.

use core::sync::atomic::Ordering;

use crate::frame::meta::{FOLIO_LOCK, FOLIO_PARKED, ORPHAN, WRITEBACK};
use crate::sync::parking::{Parking, park_while};
use crate::sync::word::Word;

/// Takes the lock, unless another thread holds it.
#[inline]
pub(super) fn try_lock(state: &impl Word<u32>) -> bool {
    state.set(FOLIO_LOCK, Ordering::Acquire) & FOLIO_LOCK == 0
}

/// Takes the lock; sleeps while another thread holds it. Returns `false` as soon as a device's
/// request holds the lock.
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

/// Marks a lock that a thread holds, as a thread does that parks, for a task that must not sleep.
/// Returns the value that the word has until then. `None` if the lock is free or a device's.
pub(crate) fn mark_held(state: &impl Word<u32>) -> Option<u32> {
    loop {
        let seen = state.load(Ordering::Relaxed);
        if seen & (FOLIO_LOCK | WRITEBACK) != FOLIO_LOCK {
            return None;
        }
        let marked = seen | FOLIO_PARKED;
        // Relaxed: the task acquires when it locks.
        if seen == marked
            || state.exchange(seen, marked, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            return Some(marked);
        }
    }
}

/// Hands the lock to a device's request. Wakes the threads that wait for the lock; they then wait
/// for the device. Both bits change in one step, so a thread that parks later sees the writeback
/// bit. Calls `disown` as [`unlock`] does.
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

/// Takes the lock from a device's request. Returns whether the request still held it. Calls
/// `disown`, under the lock, if the owner is to be removed.
pub(crate) fn take_from_request(state: &impl Word<u32>, disown: impl FnOnce()) -> bool {
    let mut seen = state.load(Ordering::Relaxed);
    while seen & WRITEBACK != 0 {
        // Acquire: changes to the folio before the request received the lock.
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

/// Releases the lock. Calls `disown` if the owner is to be removed; `disown` checks whether the
/// removal is still due and may be called more than once.
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

/// Releases the lock by one subtraction, which does not process marks of other threads. Returns
/// `false` if marks remain: the caller continues with [`see_to_marks`], unless another thread is
/// certain to process them.
#[inline(always)]
#[must_use]
pub(super) fn unlock_at_once(state: &impl Word<u32>) -> bool {
    let seen = state.sub(FOLIO_LOCK, Ordering::Release);
    debug_assert_ne!(seen & FOLIO_LOCK, 0, "the folio was not locked");
    seen & (ORPHAN | FOLIO_PARKED | WRITEBACK) == 0
}

/// Processes the marks that [`unlock_at_once`] has left, as an unlocking thread does. If another
/// thread has taken the lock since, that thread processes them when it unlocks.
#[cold]
pub(super) fn see_to_marks<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    if try_lock(state) {
        unlock(state, parking, disown);
    }
}

/// Removes the owner under the lock, or lets the lock's holder remove it; never waits. The caller
/// has a reference.
#[inline]
pub(super) fn orphan<W: Word<u32>>(state: &W, parking: &impl Parking<W>, disown: impl Fn()) {
    if state.set(FOLIO_LOCK | ORPHAN, Ordering::AcqRel) & FOLIO_LOCK == 0 {
        unlock(state, parking, disown);
    }
}
