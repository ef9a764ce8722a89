//! The core's reader-writer lock: one word, without allocation.
//!
//! VMAs, objects and anon groups use it instead of the embedder's locks, so these records are not
//! generic over the locks, remain small, and can be referred to by plain pointers. A waiting thread
//! parks on the word ([`crate::sync::parking`]), and the embedder's scheduler runs another thread.
//! A lock that is acquired in read sections is held only briefly, and its waiters spin. A waiting
//! writer blocks new readers. A thread that has slept in vain joins a line, in which the threads
//! enter in order ([`mod@line`]).
//!
//! ```text
//! 31      30      29      28      27 ... 24  23 ... 20  19 ........ 0
//! WRITER  CLOSED  PARKED  QUEUED  next       turn       readers inside
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU32, Ordering};

use crate::platform::Platform;
use crate::sync::completions::Completions;
use crate::sync::parking::{Parking, park_while};
use crate::sync::word::Word;

mod line;

use line::Mode;

/// A writer holds the lock or waits for the readers to leave.
const WRITER: u32 = 1 << 31;
/// The guarded record is being freed; only a writer sets it.
const CLOSED: u32 = 1 << 30;
/// A thread may be parked on the word. A parked thread is blocked by a writer, by readers or by the
/// line; the step that ends the last of these finds the bit.
const PARKED: u32 = 1 << 29;
/// Threads are in the line ([`mod@line`]), and only the first of them may enter.
const QUEUED: u32 = 1 << 28;
/// One reader.
const READER: u32 = 1;
/// The number of readers: at most a million at once, far more threads than a process has.
const READERS: u32 = (1 << 20) - 1;
/// A thread that is not in the line may not enter, for reading or for writing.
const BLOCKED: u32 = WRITER | CLOSED | QUEUED;

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

    /// Locks for reading, shared with other readers, unless a writer has the lock, threads are in
    /// its line, or the lock is closed.
    #[inline]
    pub(crate) fn try_read<'a, K: Parking<W>>(
        &'a self,
        parking: &'a K,
    ) -> Option<ReadGuard<'a, K, W>> {
        // Not a closure: if the lock was not acquired, no guard must exist that would unlock it.
        if self.enter_read() { Some(ReadGuard { lock: self, parking }) } else { None }
    }

    /// Whether [`RwLock::try_read`] would lock, for a task that must not sleep. If it would not, marks
    /// the lock as a thread does that parks, so the step that lets readers in again wakes the word.
    pub(crate) fn poll_read(&self) -> Readable<'_, W> {
        loop {
            let state = self.0.load(Ordering::Relaxed);
            if state & CLOSED != 0 {
                return Readable::Never;
            }
            if state & BLOCKED == 0 {
                return Readable::Now;
            }
            let marked = state | PARKED;
            // Relaxed: the task acquires when it locks.
            if state == marked
                || self.0.exchange(state, marked, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                return Readable::Later(&self.0, marked);
            }
        }
    }

    /// Whether a task or a thread has marked the lock, to be woken.
    #[inline]
    pub(crate) fn is_marked(&self) -> bool {
        self.0.load(Ordering::Relaxed) & PARKED != 0
    }

    /// Locks for writing if the lock is free and unmarked.
    pub(crate) fn try_write<'a, K: Parking<W>>(
        &'a self,
        parking: &'a K,
    ) -> Option<WriteGuard<'a, K, W>> {
        let entered = self.0.exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed);
        // Not a closure, as in `try_read`.
        if entered.is_ok() { Some(WriteGuard { lock: self, parking }) } else { None }
    }

    /// Locks for reading after the writer has left. Only for a lock that is never closed.
    #[inline]
    pub(crate) fn read<'a, K: Parking<W>>(&'a self, parking: &'a K) -> ReadGuard<'a, K, W> {
        parking.might_sleep();
        if !self.enter_read() {
            self.enter_after(parking, Mode::Read);
        }
        ReadGuard { lock: self, parking }
    }

    /// Locks for writing: blocks others and waits for the readers to leave.
    #[inline]
    pub(crate) fn write<'a, K: Parking<W>>(&'a self, parking: &'a K) -> WriteGuard<'a, K, W> {
        parking.might_sleep();
        if self.0.exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.write_after(parking);
        }
        WriteGuard { lock: self, parking }
    }

    /// Locks for writing, unless another writer has the lock or waits for it, threads are in its
    /// line, or the lock is closed. If readers hold the lock, blocks further readers and calls
    /// `goes_on` until the last reader has left or `goes_on` returns false; in the latter case,
    /// restores the lock. So continuously overlapping readers do not block the caller forever.
    #[cold]
    pub(crate) fn try_write_while<'a, K: Parking<W>>(
        &'a self,
        parking: &'a K,
        mut goes_on: impl FnMut() -> bool,
    ) -> Option<WriteGuard<'a, K, W>> {
        let mut state = self.0.load(Ordering::Relaxed);
        loop {
            if state & BLOCKED != 0 {
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
            // If the last reader leaves now, the exchange fails and the caller has the lock.
            let left = state & !(WRITER | PARKED);
            if self.0.exchange(state, left, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                if state & PARKED != 0 {
                    parking.unpark(&self.0);
                }
                return None;
            }
        }
    }

    /// Runs `work` with the lock held for reading.
    #[inline]
    pub(crate) fn with_read<K: Parking<W>, R>(&self, parking: &K, work: impl FnOnce() -> R) -> R {
        let _guard = self.read(parking);
        work()
    }

    /// Runs `work` with the lock held for writing.
    #[inline]
    pub(crate) fn with_write<K: Parking<W>, R>(&self, parking: &K, work: impl FnOnce() -> R) -> R {
        let _guard = self.write(parking);
        work()
    }

    /// A new guard for a lock that the caller has left locked for writing
    /// ([`WriteGuard::leave_locked`]).
    ///
    /// # Safety
    /// 1. The caller left the lock locked for writing, and creates at most one guard for it.
    #[inline]
    pub(crate) unsafe fn written<'a, K: Parking<W>>(
        &'a self,
        parking: &'a K,
    ) -> WriteGuard<'a, K, W> {
        WriteGuard { lock: self, parking }
    }

    /// A new guard for a lock that the caller has left locked for reading
    /// ([`ReadGuard::leave_locked`]).
    ///
    /// # Safety
    /// 1. The caller is one of the readers.
    /// 2. It creates only one guard for each read lock that it has left locked.
    pub(crate) unsafe fn left<'a, K: Parking<W>>(&'a self, parking: &'a K) -> ReadGuard<'a, K, W> {
        ReadGuard { lock: self, parking }
    }

    /// Whether readers hold the lock. A closed lock gets no new readers.
    #[inline]
    pub(crate) fn has_readers(&self) -> bool {
        // Acquire: the caller sees the readers' accesses.
        self.0.load(Ordering::Acquire) & READERS != 0
    }

    /// Whether any thread other than the caller, which is a reader, holds the lock.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn is_shared(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 1
    }

    /// Whether the lock was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Adds a reader, unless a writer has the lock, threads are in its line, or the lock is closed.
    #[inline]
    fn enter_read(&self) -> bool {
        let mut state = self.0.load(Ordering::Relaxed);
        while state & BLOCKED == 0 {
            match self.0.exchange(state, state + READER, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(newer) => state = newer,
            }
        }
        false
    }

    /// Locks for writing when this requires waiting, for threads or for readers.
    #[cold]
    fn write_after<K: Parking<W>>(&self, parking: &K) {
        self.enter_after(parking, Mode::Write);
        while self.0.load(Ordering::Acquire) & READERS != 0 {
            park_while(parking, &self.0, PARKED, |state| state & READERS != 0);
        }
    }

    /// Enters when this requires waiting: as a reader, or as the only writer, beside readers that
    /// have not left yet. A thread that is blocked again after it has slept joins the line.
    #[cold]
    fn enter_after<K: Parking<W>>(&self, parking: &K, mode: Mode) {
        let mut place = None;
        let mut has_slept = false;
        loop {
            let state = self.0.load(Ordering::Relaxed);
            if !line::is_blocked(state, place) {
                let entered = line::enter(state, place, mode);
                if self.0.exchange(state, entered, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    if state & !entered & PARKED != 0 {
                        parking.unpark(&self.0);
                    }
                    return;
                }
            } else if has_slept
                && place.is_none()
                && let Some((joined, last)) = line::join(state)
            {
                // Relaxed: the thread acquires when it enters.
                let attempt = self.0.exchange(state, joined, Ordering::Relaxed, Ordering::Relaxed);
                place = attempt.is_ok().then_some(last);
            } else {
                park_while(parking, &self.0, PARKED, |state| line::is_blocked(state, place));
                has_slept = true;
            }
        }
    }

    /// Unlocks for a writer beside whose lock other threads have joined the line or parked.
    #[cold]
    fn leave_write<K: Parking<W>>(&self, parking: &K) {
        loop {
            let state = self.0.load(Ordering::Relaxed);
            let left = state & !(WRITER | PARKED);
            if self.0.exchange(state, left, Ordering::Release, Ordering::Relaxed).is_ok() {
                if state & PARKED != 0 {
                    parking.unpark(&self.0);
                }
                return;
            }
        }
    }
}

impl RwLock {
    /// Runs `work` with the lock held for reading, in any context that allows a read section.
    /// `work` is brief, and a waiter spins.
    #[inline]
    pub(crate) fn with_read_spinning<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        // A waiter that spins on the same CPU must not preempt the holder.
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

    /// Like [`RwLock::with_read_spinning`], for writing. A lock that is acquired by these two
    /// functions is acquired by no others.
    #[inline]
    pub(crate) fn with_write_spinning<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        platform.enter_read();
        if self.0.exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.write_after_spinning(platform);
        }
        let guard = WriteGuard { lock: self, parking: platform };
        let result = work();
        drop(guard);
        platform.leave_read();
        result
    }

    #[cold]
    fn write_after_spinning<P: Platform>(&self, platform: &P) {
        loop {
            let state = self.0.load(Ordering::Relaxed);
            let blocked = state | WRITER;
            if state & WRITER == 0
                && self.0.exchange(state, blocked, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                break;
            }
            platform.relax();
        }
        while self.0.load(Ordering::Acquire) & READERS != 0 {
            platform.relax();
        }
    }
}

/// Whether a lock can be locked for reading ([`RwLock::poll_read`]).
pub(crate) enum Readable<'a, W = AtomicU32> {
    /// It can.
    Now,
    /// When the word no longer has this value. The core wakes the threads that park on the word.
    Later(&'a W, u32),
    /// The lock is closed.
    Never,
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
        // The writer clears the bit. After the last reader has left, the writer may lock, unlock,
        // and free the lock before this thread could access it again.
        if before & (PARKED | READERS) == PARKED | 1 {
            self.parking.unpark(word);
        }
    }
}

impl<K: Parking<W>, W: Word<u32>> ReadGuard<'_, K, W> {
    /// Leaves the lock locked; [`RwLock::left`] restores a guard.
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
    /// Closes the lock, which remains locked forever: later attempts see that it no longer guards
    /// anything.
    pub(crate) fn close(self) {
        self.lock.0.set(CLOSED, Ordering::Release);
        core::mem::forget(self);
    }

    /// Leaves the lock locked; [`RwLock::written`] restores a guard.
    #[inline]
    pub(crate) fn leave_locked(self) {
        core::mem::forget(self);
    }

    /// Unlocks. If the lock is marked, also wakes the tasks that wait on the word of `polled`
    /// instead of the lock's word, because the lock may be freed before they look at it. `polled` is
    /// called before the lock is free. Only for a lock that readers only try: a thread that leaves
    /// the line does not wake these tasks.
    #[inline]
    pub(crate) fn unlock_for<'p>(self, polled: impl FnOnce() -> &'p Completions<W>)
    where
        W: 'p,
    {
        let Self { lock, parking } = self;
        core::mem::forget(self);
        if lock.0.exchange(WRITER, 0, Ordering::Release, Ordering::Relaxed).is_err() {
            let polled = polled();
            lock.leave_write(parking);
            polled.note(parking);
        }
    }
}

impl<K: Parking<W>, W: Word<u32>> Drop for WriteGuard<'_, K, W> {
    #[inline]
    fn drop(&mut self) {
        if self.lock.0.exchange(WRITER, 0, Ordering::Release, Ordering::Relaxed).is_err() {
            self.lock.leave_write(self.parking);
        }
    }
}

#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model_of_tasks;
#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
