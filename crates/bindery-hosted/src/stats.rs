//! Counts that need no clock.

use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicU64, Ordering};

/// The work of a machine's MMUs and TLBs, and its invalidations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Accesses served by a cached translation.
    pub hits: u64,
    /// Walks through the tables.
    pub walks: u64,
    /// Translations that walks loaded into a TLB.
    pub fills: u64,
    /// Faults that the MMU reported.
    pub faults: u64,
    /// Calls of `invalidate`.
    pub invalidations: u64,
    /// Calls of `invalidate_local`.
    pub local_invalidations: u64,
    /// Other CPUs that invalidations had to interrupt.
    pub messages: u64,
    /// Base pages in the ranges of all invalidations, each counted once for all CPUs.
    pub pages_invalidated: u64,
}

impl Statistics {
    fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            hits: f(self.hits, other.hits),
            walks: f(self.walks, other.walks),
            fills: f(self.fills, other.fills),
            faults: f(self.faults, other.faults),
            invalidations: f(self.invalidations, other.invalidations),
            local_invalidations: f(self.local_invalidations, other.local_invalidations),
            messages: f(self.messages, other.messages),
            pages_invalidated: f(self.pages_invalidated, other.pages_invalidated),
        }
    }
}

impl Add for Statistics {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, u64::wrapping_add)
    }
}

/// The work between two readings.
impl Sub for Statistics {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        self.zip(earlier, u64::wrapping_sub)
    }
}

/// The work of a CPU's MMU. Stored with its TLB, under the same lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MmuCounts {
    pub(crate) hits: u64,
    pub(crate) walks: u64,
    pub(crate) fills: u64,
    pub(crate) faults: u64,
}

impl From<MmuCounts> for Statistics {
    fn from(counts: MmuCounts) -> Self {
        let MmuCounts { hits, walks, fills, faults } = counts;
        Self { hits, walks, fills, faults, ..Self::default() }
    }
}

/// The requests to the machine as a whole.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    invalidations: AtomicU64,
    local: AtomicU64,
    messages: AtomicU64,
    pages: AtomicU64,
}

impl Requests {
    pub(crate) fn invalidation(&self, messages: u64, pages: u64) {
        self.invalidations.fetch_add(1, Ordering::Relaxed);
        self.messages.fetch_add(messages, Ordering::Relaxed);
        self.pages.fetch_add(pages, Ordering::Relaxed);
    }

    pub(crate) fn local(&self, pages: u64) {
        self.local.fetch_add(1, Ordering::Relaxed);
        self.pages.fetch_add(pages, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Statistics {
        Statistics {
            invalidations: self.invalidations.load(Ordering::Relaxed),
            local_invalidations: self.local.load(Ordering::Relaxed),
            messages: self.messages.load(Ordering::Relaxed),
            pages_invalidated: self.pages.load(Ordering::Relaxed),
            ..Statistics::default()
        }
    }
}
