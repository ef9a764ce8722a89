//! The core's reader-writer lock: one word, nothing to allocate.
//!
//! VMAs, objects and anon groups use it instead of the embedder's locks, so they are not generic
//! over these, stay small, and can be named by plain pointers. A waiting thread parks on the word
//! ([`crate::sync::parking`]), and the embedder's scheduler runs another one. A lock that is taken
//! in read sections is held only briefly, and its waiters spin. A waiting writer keeps new readers
//! out.
//!
//! ```text
//! 31      30      29      28 ........ 0
//! WRITER  CLOSED  PARKED  readers inside
//! ```

use core::sync::atomic::{AtomicU32, Ordering};

use crate::platform::Platform;
use crate::sync::parking::{Parking, park_while};
use crate::sync::word::Word;

/// Somebody is inside alone, or waits until the readers have gone.
const WRITER: u32 = 1 << 31;
/// What the lock guards is no more; only a writer says so.
const CLOSED: u32 = 1 << 30;
/// Somebody may be parked on the word. Set beside [`WRITER`] alone, and cleared with it.
const PARKED: u32 = 1 << 29;
/// The readers inside.
const READERS: u32 = PARKED - 1;

/// The lock; see the module.
#[derive(Debug)]
pub(crate) struct RwLock<W = AtomicU32>(W);

impl RwLock {
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl<W: Word<u32>> RwLock<W> {
    /// Unlocked; the word is 0.
    pub(crate) const fn of_word(word: W) -> Self {
        Self(word)
    }

    /// Locks for reading, together with other readers, unless somebody writes or the lock is
    /// closed.
    #[inline]
    pub(crate) fn try_read<'a, K: Parking<W>>(
        &'a self,
        parking: &'a K,
    ) -> Option<ReadGuard<'a, K, W>> {
        // Not a closure: the guard must not exist, and unlock, where there is no lock.
        if self.enter_read() { Some(ReadGuard { lock: self, parking }) } else { None }
    }

    /// Locks for reading after the writer has left. Nobody waits so for a lock that may be closed.
    #[inline]
    pub(crate) fn read<'a, K: Parking<W>>(&'a self, parking: &'a K) -> ReadGuard<'a, K, W> {
        while !self.enter_read() {
            park_while(parking, &self.0, PARKED, |state| state & WRITER != 0);
        }
        ReadGuard { lock: self, parking }
    }

    /// Locks for writing: keeps others out and waits for the readers inside.
    #[inline]
    pub(crate) fn write<'a, K: Parking<W>>(&'a self, parking: &'a K) -> WriteGuard<'a, K, W> {
        if self.0.exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.write_after(|blocked| park_while(parking, &self.0, PARKED, blocked));
        }
        WriteGuard { lock: self, parking }
    }

    /// Locks for writing, unless another writer is inside, or waits to be, or the lock is closed.
    /// Where readers are inside, keeps further ones out and calls `goes_on` until the last has
    /// left, or it says no: then the lock is as it was found. So readers that always overlap do not
    /// keep the caller out forever.
    #[cold]
    pub(crate) fn try_write_while<'a, K: Parking<W>>(
        &'a self,
        parking: &'a K,
        mut goes_on: impl FnMut() -> bool,
    ) -> Option<WriteGuard<'a, K, W>> {
        let mut state = self.0.load(Ordering::Relaxed);
        loop {
            if state & (WRITER | CLOSED) != 0 {
                return None;
            }
            let entered = state | WRITER;
            match self.0.exchange(state, entered, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(newer) => state = newer,
            }
        }
        loop {
            state = self.0.load(Ordering::Acquire);
            if state & READERS == 0 {
                return Some(WriteGuard { lock: self, parking });
            }
            if goes_on() {
                continue;
            }
            // The last reader may go meanwhile: then the exchange fails, and the lock is ours.
            let left = state & READERS;
            if self.0.exchange(state, left, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                if state & PARKED != 0 {
                    parking.unpark(&self.0);
                }
                return None;
            }
        }
    }

    /// Does `work` with the lock held for reading.
    #[inline]
    pub(crate) fn with_read<K: Parking<W>, R>(&self, parking: &K, work: impl FnOnce() -> R) -> R {
        let _guard = self.read(parking);
        work()
    }

    /// Does `work` with the lock held for writing.
    #[inline]
    pub(crate) fn with_write<K: Parking<W>, R>(&self, parking: &K, work: impl FnOnce() -> R) -> R {
        let _guard = self.write(parking);
        work()
    }

    /// The guard of a lock that the caller has for writing, and has forgotten the guard of
    /// ([`WriteGuard::leave_locked`]).
    ///
    /// # Safety
    /// 1. The caller left the lock locked for writing, and makes one guard of it at most.
    #[inline]
    pub(crate) unsafe fn written<'a, K: Parking<W>>(
        &'a self,
        parking: &'a K,
    ) -> WriteGuard<'a, K, W> {
        WriteGuard { lock: self, parking }
    }

    /// The guard of a lock that the caller has for reading, and has forgotten the guard of
    /// ([`ReadGuard::leave_locked`]).
    ///
    /// # Safety
    /// 1. The caller is one of the readers.
    /// 2. It makes one guard for each that it has left.
    pub(crate) unsafe fn left<'a, K: Parking<W>>(&'a self, parking: &'a K) -> ReadGuard<'a, K, W> {
        ReadGuard { lock: self, parking }
    }

    /// Whether readers are inside. Of a closed lock: none comes any more.
    #[inline]
    pub(crate) fn has_readers(&self) -> bool {
        // Acquire: what they have done.
        self.0.load(Ordering::Acquire) & READERS != 0
    }

    /// One reader more, unless somebody writes or the lock is closed.
    #[inline]
    fn enter_read(&self) -> bool {
        let mut state = self.0.load(Ordering::Relaxed);
        while state & (WRITER | CLOSED) == 0 {
            match self.0.exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(newer) => state = newer,
            }
        }
        false
    }

    /// Locks for writing where that means to wait; `wait` is called again and again, with what the
    /// word must not be.
    #[cold]
    fn write_after(&self, mut wait: impl FnMut(fn(u32) -> bool)) {
        loop {
            let state = self.0.load(Ordering::Relaxed);
            if state & WRITER != 0 {
                wait(|state| state & WRITER != 0);
            } else if self
                .0
                .exchange(state, state | WRITER, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                break;
            }
        }
        while self.0.load(Ordering::Acquire) & READERS != 0 {
            wait(|state| state & READERS != 0);
        }
    }
}

impl RwLock {
    /// Does `work` with the lock held for reading, wherever a read section may be. `work` takes
    /// moments, and a waiter spins.
    #[inline]
    pub(crate) fn with_read_spinning<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        // A waiter that spins on the same CPU must not interrupt the holder.
        platform.enter_read();
        while !self.enter_read() {
            platform.relax();
        }
        let guard = ReadGuard { lock: self, parking: platform };
        let result = work();
        drop(guard);
        platform.leave_read();
        result
    }

    /// As [`RwLock::with_read_spinning`], for writing. A lock that is taken so is taken in these
    /// two ways alone.
    #[inline]
    pub(crate) fn with_write_spinning<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        platform.enter_read();
        if self.0.exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.write_after(|_| platform.relax());
        }
        let guard = WriteGuard { lock: self, parking: platform };
        let result = work();
        drop(guard);
        platform.leave_read();
        result
    }
}

/// The lock is held for reading until the guard is dropped.
#[must_use = "dropping the guard unlocks"]
pub(crate) struct ReadGuard<'a, K: Parking<W>, W: Word<u32> = AtomicU32> {
    lock: &'a RwLock<W>,
    parking: &'a K,
}

impl<K: Parking<W>, W: Word<u32>> Drop for ReadGuard<'_, K, W> {
    #[inline(always)]
    fn drop(&mut self) {
        let word = &self.lock.0;
        let before = word.sub(1, Ordering::Release);
        // The bit stays, for the writer to clear: with the last reader gone, the writer may come
        // in, leave, and free the lock before we could touch it again.
        if before & (PARKED | READERS) == PARKED | 1 {
            self.parking.unpark(word);
        }
    }
}

impl<K: Parking<W>, W: Word<u32>> ReadGuard<'_, K, W> {
    /// Leaves the lock locked; [`RwLock::left`] makes another guard of it.
    pub(crate) fn leave_locked(self) {
        core::mem::forget(self);
    }
}

/// The lock is held for writing until the guard is dropped.
#[must_use = "dropping the guard unlocks"]
pub(crate) struct WriteGuard<'a, K: Parking<W>, W: Word<u32> = AtomicU32> {
    lock: &'a RwLock<W>,
    parking: &'a K,
}

impl<K: Parking<W>, W: Word<u32>> WriteGuard<'_, K, W> {
    /// Tells all who still come that the lock guards nothing any more; it stays locked forever.
    pub(crate) fn close(self) {
        self.lock.0.set(CLOSED, Ordering::Release);
        core::mem::forget(self);
    }

    /// Leaves the lock locked; [`RwLock::written`] makes another guard of it.
    #[inline]
    pub(crate) fn leave_locked(self) {
        core::mem::forget(self);
    }
}

impl<K: Parking<W>, W: Word<u32>> Drop for WriteGuard<'_, K, W> {
    #[inline]
    fn drop(&mut self) {
        // No reader comes or goes while the lock is held, so nothing but the waiters' bit is lost.
        if self.lock.0.swap(0, Ordering::Release) & PARKED != 0 {
            self.parking.unpark(&self.lock.0);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_model;
