//! The core's reader-writer lock: one word, nothing to allocate.
//!
//! VMAs, objects and anon groups use it instead of the embedder's locks, so they are not generic over
//! these, stay small, and can be named by plain pointers. A waiting thread parks on the word
//! ([`crate::sync::parking`]), and the embedder's scheduler runs another one. A lock that is taken in read
//! sections is held only briefly, and its waiters spin. A waiting writer keeps new readers out.
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
    /// Enters together with other readers, unless somebody writes or the lock is closed.
    #[inline]
    pub(crate) fn try_read(&self) -> bool {
        let mut state = self.0.load(Ordering::Relaxed);
        while state & (WRITER | CLOSED) == 0 {
            match self.0.exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(newer) => state = newer,
            }
        }
        false
    }

    /// Enters together with other readers, after the writer has left. Nobody waits so at a lock that
    /// may be closed.
    #[inline]
    pub(crate) fn read(&self, parking: &impl Parking<W>) {
        while !self.try_read() {
            park_while(parking, &self.0, PARKED, |state| state & WRITER != 0);
        }
    }

    #[inline]
    pub(crate) fn end_read(&self, parking: &impl Parking<W>) {
        let before = self.0.sub(1, Ordering::Release);
        // The bit stays, for the writer to clear: with the last reader gone, the writer may come in,
        // leave, and free the lock before we could touch it again.
        if before & (PARKED | READERS) == PARKED | 1 {
            parking.unpark(&self.0);
        }
    }

    /// Enters alone: keeps others out and waits for those inside.
    #[inline]
    pub(crate) fn write(&self, parking: &impl Parking<W>) {
        if self.0.exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.write_after(|blocked| park_while(parking, &self.0, PARKED, blocked));
        }
    }

    /// Enters alone; `wait` is called again and again, with what the word must not be.
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

    #[inline]
    pub(crate) fn end_write(&self, parking: &impl Parking<W>) {
        // Nobody else changes this bit, and no reader comes or goes.
        let closed = self.0.load(Ordering::Relaxed) & CLOSED;
        if self.0.swap(closed, Ordering::Release) & PARKED != 0 {
            parking.unpark(&self.0);
        }
    }

    /// Says to all who still come that there is nothing behind the lock any more. Called by the
    /// writer.
    pub(crate) fn close(&self) {
        self.0.set(CLOSED, Ordering::Release);
    }

    /// Does `work` together with other readers, after the writer has left.
    #[inline]
    pub(crate) fn together<R>(&self, parking: &impl Parking<W>, work: impl FnOnce() -> R) -> R {
        self.read(parking);
        let result = work();
        self.end_read(parking);
        result
    }

    /// Does `work` alone.
    #[inline]
    pub(crate) fn alone<R>(&self, parking: &impl Parking<W>, work: impl FnOnce() -> R) -> R {
        self.write(parking);
        let result = work();
        self.end_write(parking);
        result
    }
}

impl RwLock {
    /// As [`RwLock::together`], for work that takes moments, wherever a read section may be.
    #[inline]
    pub(crate) fn together_shortly<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        // Whoever is inside is not interrupted by a waiter that spins on the same CPU.
        platform.enter_read();
        while !self.try_read() {
            platform.relax();
        }
        let result = work();
        self.end_read(platform);
        platform.leave_read();
        result
    }

    /// As [`RwLock::alone`], for work that takes moments. The lock is passed in no other way than
    /// this and [`RwLock::together_shortly`].
    #[inline]
    pub(crate) fn alone_shortly<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        platform.enter_read();
        if self.0.exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.write_after(|_| platform.relax());
        }
        let result = work();
        self.end_write(platform);
        platform.leave_read();
        result
    }
}

#[cfg(all(test, loom))]
mod loom_model;
