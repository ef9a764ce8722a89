//! The invalidate lock of an object (Linux: `invalidate_lock` of the mapping), and the proofs that it
//! is held.
//!
//! A fault or a read holds it for reading: the pages of the object stay where they are. A truncation, a
//! hole, a save or a collapse holds it for writing. Functions that rely on either take the proof, which
//! only a holder has.

use crate::platform::Platform;
use crate::sync::rw_lock::RwLock;

/// The lock; see the module.
#[derive(Debug)]
pub(crate) struct InvalidateLock(RwLock);

/// The lock is held for reading.
pub(crate) struct PagesStay(());

/// The lock is held for writing, or the object has no holder any more.
pub(crate) struct PagesMayGo(());

impl InvalidateLock {
    pub(super) const fn new() -> Self {
        Self(RwLock::new())
    }

    /// Does `work` with the lock held for reading.
    #[inline]
    pub(crate) fn with_read<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce(&PagesStay) -> R,
    ) -> R {
        self.0.with_read(platform, || work(&PagesStay(())))
    }

    /// Does `work` with the lock held for writing.
    #[inline]
    pub(crate) fn with_write<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce(&PagesMayGo) -> R,
    ) -> R {
        self.0.with_write(platform, || work(&PagesMayGo(())))
    }

    /// For the caller that has taken the last holder of the object away: nobody else can lock it.
    pub(super) fn without_holders(&self) -> PagesMayGo {
        PagesMayGo(())
    }
}
