//! The numbers of free frames at which an embedder's reclaimer wakes and sleeps.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::Error;

/// See [`crate::Memory::set_watermarks`].
pub(super) struct Watermarks {
    low: AtomicU64,
    high: AtomicU64,
}

impl Watermarks {
    /// No watermarks.
    pub(super) const fn new() -> Self {
        Self { low: AtomicU64::new(0), high: AtomicU64::new(0) }
    }

    pub(super) fn set(&self, low: u64, high: u64, total: u64) -> Result<(), Error> {
        if low > high || high > total / 2 {
            return Err(Error::Invalid);
        }
        self.low.store(low, Relaxed);
        self.high.store(high, Relaxed);
        Ok(())
    }

    pub(super) fn low(&self) -> u64 {
        self.low.load(Relaxed)
    }

    pub(super) fn high(&self) -> u64 {
        self.high.load(Relaxed)
    }
}
