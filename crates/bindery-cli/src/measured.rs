//! The hosted machine, with a meter in its read sections.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use bindery::addr::{Frame, PAGE_SIZE};
use bindery::platform::{GracePeriod, Platform, Work};
use bindery_hosted::{Machine, Walk, pass_on};

/// Work of one kind in the current section of the calling CPU, and the maximum of any section.
#[derive(Debug, Default)]
struct Gauge {
    now: AtomicU64,
    most: AtomicU64,
}

impl Gauge {
    fn add(&self, amount: u64) {
        self.now.fetch_add(amount, Relaxed);
    }

    fn end(&self) {
        self.most.fetch_max(self.now.swap(0, Relaxed), Relaxed);
    }

    /// The maximum since the last call.
    fn take(&self) -> u64 {
        self.most.swap(0, Relaxed)
    }
}

/// A hosted machine that adds up the work from the outermost `enter_read` to the outermost
/// `leave_read`, and from the first to the last held lock of the reverse map. Tables are locked
/// only in read sections, so no table lock covers more work. One thread uses the machine at a time.
pub struct Measured<A: Walk> {
    machine: Machine<A>,
    depth: AtomicU64,
    entries: Gauge,
    tables: Gauge,
    bytes: Gauge,
    /// The number of reverse-map locks held, and the entries examined under them.
    trees: AtomicU64,
    tree_entries: Gauge,
    sections: AtomicU64,
    waits: AtomicU64,
    /// Whether a reader elsewhere is in its section.
    reader: AtomicBool,
}

/// The maximum work of a call in one section or under one lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Longest {
    /// Entries, index slots and VMAs examined in one section.
    pub entries: u64,
    /// Tables marked as detached in one section.
    pub tables_marked: u64,
    /// Bytes zeroed or copied in one section, in whole frames.
    pub bytes: u64,
    /// Entries and VMAs examined while a lock of the reverse map was held.
    pub reverse_map_entries: u64,
    /// Sections in all.
    pub sections: u64,
    /// Grace periods that the call waited for.
    pub grace_periods: u64,
    /// Tables, one frame each, that still wait for a grace period when the call returns while a
    /// reader elsewhere stays in its section.
    pub tables_deferred: u64,
    /// Records of mappings, anon groups and areas that also wait then, at most 512 bytes each.
    pub records_deferred: u64,
}

impl<A: Walk> Measured<A> {
    /// Puts meters into a machine.
    pub fn new(machine: Machine<A>) -> Self {
        Self {
            machine,
            depth: AtomicU64::new(0),
            entries: Gauge::default(),
            tables: Gauge::default(),
            bytes: Gauge::default(),
            trees: AtomicU64::new(0),
            tree_entries: Gauge::default(),
            sections: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            reader: AtomicBool::new(false),
        }
    }

    /// The work since the last call. Not for use inside a section.
    pub fn take(&self) -> Longest {
        Longest {
            entries: self.entries.take(),
            tables_marked: self.tables.take(),
            bytes: self.bytes.take(),
            reverse_map_entries: self.tree_entries.take(),
            sections: self.sections.swap(0, Relaxed),
            grace_periods: self.waits.swap(0, Relaxed),
            tables_deferred: 0,
            records_deferred: 0,
        }
    }

    /// Makes a reader elsewhere stay in its section or leave it. While the reader stays, deferred
    /// items are freed only by a thread that waits for the reader.
    pub fn set_reader(&self, stays: bool) {
        self.reader.store(stays, Relaxed);
    }

    fn moved(&self, frames: u32) {
        if self.depth.load(Relaxed) > 0 {
            self.bytes.add(u64::from(frames) * PAGE_SIZE);
        }
    }
}

// SAFETY: the inner machine meets all obligations; this wrapper only counts.
unsafe impl<A: Walk> Platform for Measured<A> {
    type Arch = A;
    type Mutex = <Machine<A> as Platform>::Mutex;
    type SpinLock = <Machine<A> as Platform>::SpinLock;

    pass_on! { machine:
        direct_map invalidate invalidate_local invalidate_kernel publish_entries cpu relax park unpark
        grace_period seed fatal_signal allocation_may_wait might_sleep frames_released
    }

    fn zero(&self, first: Frame, count: u32) {
        self.moved(count);
        self.machine.zero(first, count);
    }

    fn copy(&self, from: Frame, to: Frame, count: u32) {
        self.moved(count);
        self.machine.copy(from, to, count);
    }

    fn enter_read(&self) {
        self.machine.enter_read();
        self.depth.fetch_add(1, Relaxed);
    }

    fn leave_read(&self) {
        if self.depth.fetch_sub(1, Relaxed) == 1 {
            self.sections.fetch_add(1, Relaxed);
            self.entries.end();
            self.tables.end();
            self.bytes.end();
        }
        self.machine.leave_read();
    }

    fn synchronize(&self) {
        self.waits.fetch_add(1, Relaxed);
        self.machine.synchronize();
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        !self.reader.load(Relaxed) && self.machine.is_over(period)
    }

    fn worked(&self, work: Work) {
        if self.depth.load(Relaxed) > 0 {
            self.entries.add(work.entries);
            self.tables.add(work.tables_marked);
        }
        if self.trees.load(Relaxed) > 0 {
            self.tree_entries.add(work.entries);
        }
    }

    fn tree_locked(&self) {
        self.trees.fetch_add(1, Relaxed);
    }

    fn tree_unlocked(&self) {
        if self.trees.fetch_sub(1, Relaxed) == 1 {
            self.tree_entries.end();
        }
    }
}

/// Compiles the core for this platform, so that the program and its tests need not compile it
/// again.
#[cfg(all(debug_assertions, not(test)))]
pub fn instances() {
    use bindery::arch::{AArch64, Riscv64, X86_64};
    use bindery_hosted::instances::core_for;

    core_for::<Measured<X86_64<4>>>();
    core_for::<Measured<AArch64>>();
    core_for::<Measured<Riscv64<4>>>();
}

#[cfg(test)]
mod tests {
    use bindery::arch::X86_64;
    use bindery_hosted::Config;

    use super::*;

    #[test]
    fn the_longest_hold_includes_nested_ones() {
        let measured = Measured::new(Machine::<X86_64>::new(Config::default()));
        let (first, _) = measured.machine.frames();
        measured.zero(first, 4);
        let work = |entries| measured.worked(Work { entries, tables_marked: 1 });
        measured.enter_read();
        work(3);
        measured.enter_read();
        work(4);
        measured.leave_read();
        measured.zero(first, 1);
        measured.leave_read();
        measured.tree_locked();
        work(1);
        measured.enter_read();
        work(5);
        measured.leave_read();
        measured.tree_unlocked();
        let expected = Longest {
            entries: 7,
            tables_marked: 2,
            bytes: PAGE_SIZE,
            reverse_map_entries: 6,
            sections: 2,
            ..Longest::default()
        };
        assert_eq!(measured.take(), expected);
        assert_eq!(measured.take(), Longest::default());
    }
}
