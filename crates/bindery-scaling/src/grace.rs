//! Grace periods: each CPU counts the read sections that it has left, and any CPU advances the one
//! number that a free reads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crate::machine::MAX_CPUS;

/// Sections that a CPU leaves between two attempts to advance. A CPU counts on its own cache lines
/// and fetches the shared lines only for an attempt, because the machine's own cost must not
/// distort the measurement.
const INTERVAL: u64 = 256;

/// Data in its own pair of cache lines, since a CPU fetches lines in pairs.
#[repr(align(128))]
pub struct Apart<T>(pub T);

/// A CPU's part.
struct Record {
    /// The sections that the CPU has left. Only the CPU writes it.
    left: AtomicU64,
    /// Whether a worker runs on the CPU. Otherwise the CPU is in no section.
    runs: AtomicBool,
}

/// The read sections of a machine.
pub struct Sections {
    records: Box<[Apart<Record>]>,
    /// The grace periods that have passed.
    passed: Apart<AtomicU64>,
    /// The counts at the start of the current period. The lock holder advances the period.
    begun: Apart<Mutex<[u64; MAX_CPUS as usize]>>,
}

impl Sections {
    /// The sections of `cpus` CPUs that do not run yet.
    pub fn new(cpus: u16) -> Self {
        let record = |_| Apart(Record { left: AtomicU64::new(0), runs: AtomicBool::new(false) });
        Self {
            records: (0..cpus).map(record).collect(),
            passed: Apart(AtomicU64::new(0)),
            begun: Apart(Mutex::new([0; MAX_CPUS as usize])),
        }
    }

    /// A worker starts or stops using the CPU. Returns whether a worker used it before.
    pub fn set_running(&self, cpu: u16, runs: bool) -> bool {
        let before = self.records[usize::from(cpu)].0.runs.swap(runs, Ordering::SeqCst);
        // The mark must be visible before the CPU's first section reads a pointer.
        fence(Ordering::SeqCst);
        before
    }

    /// The CPU has left its outermost section.
    pub fn leave(&self, cpu: u16) {
        let left = &self.records[usize::from(cpu)].0.left;
        let count = left.load(Ordering::Relaxed) + 1;
        left.store(count, Ordering::Release);
        if count.is_multiple_of(INTERVAL) {
            self.advance();
        }
    }

    /// The number of the period that is over once all current sections have ended. The current
    /// period may have begun before some of them.
    pub fn period(&self) -> u64 {
        // Sections that saw the caller's unlinked items began before the fence.
        fence(Ordering::SeqCst);
        self.passed.0.load(Ordering::Acquire) + 2
    }

    /// Whether a period of [`Sections::period`] is over.
    pub fn has_passed(&self, period: u64) -> bool {
        self.passed.0.load(Ordering::Acquire) >= period
    }

    /// Ends the current period if each running CPU has left two sections since its start. One
    /// section is not enough, since the store of its count may become visible after loads of the
    /// next section.
    pub fn advance(&self) {
        let Ok(mut begun) = self.begun.0.try_lock() else { return };
        fence(Ordering::SeqCst);
        let has_left = |(record, then): (&Apart<Record>, &u64)| {
            !record.0.runs.load(Ordering::Acquire)
                || record.0.left.load(Ordering::Acquire) >= *then + 2
        };
        if !self.records.iter().zip(begun.iter()).all(has_left) {
            return;
        }
        self.passed.0.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        for (record, then) in self.records.iter().zip(begun.iter_mut()) {
            *then = record.0.left.load(Ordering::Acquire);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_waits_for_running_sections() {
        let sections = Sections::new(4);
        sections.set_running(0, true);
        sections.set_running(3, true);
        let period = sections.period();
        // CPU 0 leaves sections; CPU 3 may still be in its first.
        (0..1_000).for_each(|_| sections.leave(0));
        assert!(!sections.has_passed(period));
        (0..2).for_each(|_| sections.leave(3));
        (0..1_000).for_each(|_| sections.leave(0));
        assert!(!sections.has_passed(period), "the period under way began too early to count");
        sections.set_running(3, false);
        (0..1_000).for_each(|_| sections.leave(0));
        assert!(sections.has_passed(period));
    }
}
