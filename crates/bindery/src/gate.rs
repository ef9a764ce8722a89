//! A lock that many may pass together or one alone: one word, nothing to allocate.
//!
//! The core's objects are not generic over the embedder's locks, so that they can be small and
//! named by plain pointers; this is their lock. Waiting is [`Platform::relax`] with [`Wait::Long`],
//! so an embedder's scheduler may run whoever is waited for; or [`Wait::Short`], for a gate that is
//! passed in read sections and held for moments alone. A waiting writer keeps new readers out.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::platform::{Platform, Wait};

/// Somebody is inside alone, or waits until the readers have gone.
const WRITER: u32 = 1 << 31;
/// What the gate guards is no more; only a writer says so.
const CLOSED: u32 = 1 << 30;

/// The lock; see the module.
#[derive(Debug)]
pub(crate) struct Gate(AtomicU32);

impl Gate {
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Enters together with other readers, unless somebody writes or the gate is closed.
    #[inline]
    pub(crate) fn try_read(&self) -> bool {
        let mut state = self.0.load(Ordering::Relaxed);
        while state & (WRITER | CLOSED) == 0 {
            match self.0.compare_exchange_weak(
                state,
                state + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(newer) => state = newer,
            }
        }
        false
    }

    /// Enters together with other readers, after the writer has left.
    pub(crate) fn read<P: Platform>(&self, platform: &P) {
        self.read_after(platform, Wait::Long);
    }

    #[inline]
    fn read_after<P: Platform>(&self, platform: &P, wait: Wait) {
        while !self.try_read() {
            platform.relax(wait);
        }
    }

    #[inline]
    pub(crate) fn end_read(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Enters alone: keeps others out and waits for those inside.
    #[inline]
    pub(crate) fn write<P: Platform>(&self, platform: &P) {
        self.write_after(platform, Wait::Long);
    }

    #[inline]
    fn write_after<P: Platform>(&self, platform: &P, wait: Wait) {
        while self.0.fetch_or(WRITER, Ordering::Acquire) & WRITER != 0 {
            while self.0.load(Ordering::Relaxed) & WRITER != 0 {
                platform.relax(wait);
            }
        }
        while self.0.load(Ordering::Acquire) & !(WRITER | CLOSED) != 0 {
            platform.relax(wait);
        }
    }

    #[inline]
    pub(crate) fn end_write(&self) {
        self.0.fetch_and(!WRITER, Ordering::Release);
    }

    /// Says to all who still come that there is nothing behind the gate any more. Called by the
    /// writer.
    pub(crate) fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::Release);
    }

    /// Does `work` together with other readers, after the writer has left.
    #[inline]
    pub(crate) fn together<P: Platform, R>(&self, platform: &P, work: impl FnOnce() -> R) -> R {
        self.read(platform);
        let result = work();
        self.end_read();
        result
    }

    /// Does `work` alone.
    #[inline]
    pub(crate) fn alone<P: Platform, R>(&self, platform: &P, work: impl FnOnce() -> R) -> R {
        self.write(platform);
        let result = work();
        self.end_write();
        result
    }

    /// As [`Gate::together`], for work that takes moments, wherever a read section may be.
    #[inline]
    pub(crate) fn together_shortly<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        // Whoever is inside is not interrupted by a waiter that spins on the same CPU.
        platform.enter_read();
        self.read_after(platform, Wait::Short);
        let result = work();
        self.end_read();
        platform.leave_read();
        result
    }

    /// As [`Gate::alone`], for work that takes moments. The gate is passed in no other way than
    /// this and [`Gate::together_shortly`].
    #[inline]
    pub(crate) fn alone_shortly<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce() -> R,
    ) -> R {
        platform.enter_read();
        self.write_after(platform, Wait::Short);
        let result = work();
        self.end_write();
        platform.leave_read();
        result
    }
}
