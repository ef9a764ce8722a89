//! Allocations that fail on purpose, so that tests can run out of memory at every point.
//!
//! ```text
//! for n in 0.. {
//!     frames.inject.fail_after(Some(n));       // n allocations succeed, then none does
//!     let result = operation();
//!     frames.inject.fail_after(None);
//!     // ... the state is valid, whatever the result ...
//!     if frames.inject.failed() == 0 { break }   // the operation needs no more than n
//! }
//! ```

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The value of `left` when no allocation fails on purpose.
const NEVER: u64 = u64::MAX;

/// The allocations that fail.
pub(crate) struct Inject {
    /// Allocations that still succeed.
    left: AtomicU64,
    /// Whether all allocations succeed again after one failure.
    once: AtomicBool,
    failed: AtomicU64,
}

impl Inject {
    pub(super) const fn new() -> Self {
        Self {
            left: AtomicU64::new(NEVER),
            once: AtomicBool::new(false),
            failed: AtomicU64::new(0),
        }
    }

    /// Makes all allocations after the next `after` ones fail (blocks, folios, slab objects; each
    /// counts as one). With `None`, no further allocation fails. Resets the count of
    /// [`Inject::failed`].
    pub(crate) fn fail_after(&self, after: Option<u64>) {
        self.set(after, false);
    }

    /// As [`Inject::fail_after`], but fails only one allocation, after the next `after` ones.
    pub(crate) fn fail_once_after(&self, after: Option<u64>) {
        self.set(after, true);
    }

    /// The number of allocations that have failed on purpose since the last call of the two
    /// functions above; a call with `None` does not count.
    pub(crate) fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    fn set(&self, after: Option<u64>, once: bool) {
        if after.is_some() {
            self.failed.store(0, Relaxed);
        }
        self.once.store(once, Relaxed);
        self.left.store(after.unwrap_or(NEVER), Relaxed);
    }

    /// Whether this allocation fails. Called once for each allocation.
    pub(super) fn fails(&self) -> bool {
        let exhausted = if self.once.load(Relaxed) { NEVER } else { 0 };
        let before = self.left.fetch_update(Relaxed, Relaxed, |left| match left {
            NEVER => None,
            0 => Some(exhausted),
            more => Some(more - 1),
        });
        let fails = before == Ok(0);
        if fails {
            self.failed.fetch_add(1, Relaxed);
        }
        fails
    }
}
