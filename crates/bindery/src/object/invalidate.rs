//! The invalidate lock of an object (Linux: `invalidate_lock` of the mapping), and the proofs that
//! it is held.
//!
//! A fault or a read holds the lock for reading, which keeps the object's pages in the index. A
//! truncation, a hole, a save or a collapse holds it for writing. Functions that rely on either
//! mode take the matching proof, which only a holder has.

use crate::platform::Platform;
use crate::sync::rw_lock::{Readable, RwLock, WriteGuard};

/// The number of [`Platform::relax`] rounds for which a writer that only tries the lock waits for
/// readers: longer than a fault that maps present pages, and shorter than a fault that sleeps.
const PATIENCE: u32 = 128;

/// The invalidate lock; see the module.
#[derive(Debug)]
pub(crate) struct InvalidateLock(RwLock);

/// Proof that the lock is held for reading.
pub(crate) struct PagesStay(());

/// Proof that the lock is held for writing.
pub(crate) struct PagesMayGo(PagesStay);

impl PagesMayGo {
    /// Proof that the pages that the holder does not drop stay, as for a reader.
    pub(super) fn rest_stays(&self) -> &PagesStay {
        &self.0
    }
}

/// The lock is held for writing until the guard is dropped.
#[must_use = "dropping the guard unlocks"]
pub(super) struct InvalidateGuard<'a, P: Platform> {
    pub(super) proof: PagesMayGo,
    _guard: WriteGuard<'a, P>,
}

impl InvalidateLock {
    pub(super) const fn new() -> Self {
        Self(RwLock::new())
    }

    /// Runs `work` with the lock held for reading.
    #[inline]
    pub(crate) fn with_read<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce(&PagesStay) -> R,
    ) -> R {
        self.0.with_read(platform, || work(&PagesStay(())))
    }

    /// As [`InvalidateLock::with_read`], unless a writer has the lock or is waiting for it.
    pub(crate) fn try_with_read<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce(&PagesStay) -> R,
    ) -> Option<R> {
        let _guard = self.0.try_read(platform)?;
        Some(work(&PagesStay(())))
    }

    /// Whether [`InvalidateLock::try_with_read`] would lock, for a task that must not sleep. Marks
    /// the lock otherwise. Never closed.
    pub(crate) fn poll_read(&self) -> Readable<'_> {
        self.0.poll_read()
    }

    /// Runs `work` with the lock held for writing.
    #[inline]
    pub(crate) fn with_write<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce(&PagesMayGo) -> R,
    ) -> R {
        self.0.with_write(platform, || work(&PagesMayGo(PagesStay(()))))
    }

    /// Locks for writing, unless another writer has the lock or is waiting for it. Waits at most
    /// [`PATIENCE`] rounds for readers, because one of them may be waiting for a lock that the
    /// caller holds.
    pub(super) fn try_write<'a, P: Platform>(
        &'a self,
        platform: &'a P,
    ) -> Option<InvalidateGuard<'a, P>> {
        let mut left = PATIENCE;
        let guard = self.0.try_write_while(platform, || {
            platform.relax();
            // Retried after a failure that was caused by readers that came or left in between.
            left = left.saturating_sub(1);
            left > 0
        })?;
        Some(InvalidateGuard { proof: PagesMayGo(PagesStay(())), _guard: guard })
    }
}
