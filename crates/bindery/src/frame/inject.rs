//! Allocations that fail on purpose, so that tests can run out of memory at every point.
//!
//! ```text
//! for n in 0.. {
//!     frames.fail_after(Some(n));       // n allocations succeed, then none does
//!     let result = operation();
//!     frames.fail_after(None);
//!     // ... the state is valid, whatever the result ...
//!     if frames.failed_on_purpose() == 0 { break }   // the operation needs no more than n
//! }
//! ```

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::Allocator;
use crate::platform::Platform;

/// `left` of an allocator that does not fail on purpose.
const NEVER: u64 = u64::MAX;

/// Which allocations fail.
pub(super) struct Inject {
    /// Allocations that still succeed.
    left: AtomicU64,
    /// After one failure, all succeed again.
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

    fn set(&self, after: Option<u64>, once: bool) {
        if after.is_some() {
            self.failed.store(0, Relaxed);
        }
        self.once.store(once, Relaxed);
        self.left.store(after.unwrap_or(NEVER), Relaxed);
    }

    fn fails(&self) -> bool {
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

impl<P: Platform> Allocator<P> {
    /// Lets the next `after` allocations (blocks, folios, slab objects; each counts as one)
    /// succeed and all later ones fail; with `None`, none fails any more. Starts the count of
    /// [`Allocator::failed_on_purpose`] again.
    pub fn fail_after(&self, after: Option<u64>) {
        self.inject.set(after, false);
    }

    /// As [`Allocator::fail_after`], but only one allocation fails, the one after the next `after`
    /// ones.
    pub fn fail_once_after(&self, after: Option<u64>) {
        self.inject.set(after, true);
    }

    /// How many allocations have failed on purpose since the last call of the two above, `None`
    /// not counted: it only ends the failing.
    pub fn failed_on_purpose(&self) -> u64 {
        self.inject.failed.load(Relaxed)
    }

    /// Asked once for each allocation.
    pub(super) fn fails_on_purpose(&self) -> bool {
        self.inject.fails()
    }
}
