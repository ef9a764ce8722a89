//! What CPUs have counted.

use crate::atomic::{AtomicU64, Ordering, constructor};

/// What one CPU has counted. In lines of its own, since other CPUs need none of it.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Counts {
    pub(super) interrupts: AtomicU64,
    pub(super) spared: AtomicU64,
    pub(super) invalidations: AtomicU64,
    pub(super) full_flushes: AtomicU64,
}

impl Counts {
    constructor! {
        pub(super) const fn new() -> Self {
            Self {
                interrupts: AtomicU64::new(0),
                spared: AtomicU64::new(0),
                invalidations: AtomicU64::new(0),
                full_flushes: AtomicU64::new(0),
            }
        }
    }
}

/// Sums over all CPUs since the start ([`Shootdowns::counts`](super::Shootdowns::counts)).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShootdownCounts {
    /// Interrupts that were sent.
    pub interrupts: u64,
    /// Interrupts that were spared because the CPU kept the tag lazily.
    pub spared: u64,
    /// Invalidations of a range that were performed, local ones too.
    pub invalidations: u64,
    /// Flushes of everything, because a queue was full or the CPU was switching roots.
    pub full_flushes: u64,
}

impl ShootdownCounts {
    pub(super) fn sum_of<'c>(cpus: impl Iterator<Item = &'c Counts> + Clone) -> Self {
        let sum = |count: fn(&Counts) -> &AtomicU64| {
            cpus.clone().map(|cpu| count(cpu).load(Ordering::Relaxed)).sum()
        };
        Self {
            interrupts: sum(|counts| &counts.interrupts),
            spared: sum(|counts| &counts.spared),
            invalidations: sum(|counts| &counts.invalidations),
            full_flushes: sum(|counts| &counts.full_flushes),
        }
    }
}

/// Counts an event. An interrupt handler may do so in between.
pub(super) fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}
