//! Which TLBs may hold what, and the gather: flush first, free afterwards.
//!
//! An address space remembers the CPUs that have loaded it ([`Presence`]). What an operation takes
//! out of a table collects in a [`Gather`]: the addresses to invalidate and the tables that were
//! unhooked. The gather's promise is the order:
//!
//! 1. entries are cleared (the caller, under the table locks);
//! 2. [`Gather::flush`] makes every CPU that may hold the old entries forget them;
//! 3. only then [`Gather::finish`] waits for readers without locks, and gives back what was
//!    unhooked.
//!
//! Step 2 before step 3 is what invariant 1 stands on. Without it:
//! 1. CPU A unmaps a page and frees its frame; CPU B's TLB still has the translation;
//! 2. CPU A hands the frame to another process;
//! 3. CPU B's program writes to the old address, into the other process' memory.

use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::addr::{Frame, VirtRange};
use crate::arch::{self, Arch};
use crate::platform::{Cpu, CpuSet, Invalidation, MAX_CPUS, Platform, Tables};
use crate::stats::Counts;

/// What a CPU's TLB holds of an address space after the CPU has switched away from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leftovers {
    /// Translations may remain (tagged with an ASID or PCID): keep sending invalidations.
    Kept,
    /// The switch flushed them.
    Flushed,
}

/// The CPUs whose TLBs may hold translations of one address space.
pub(crate) struct Presence {
    cpus: [AtomicU64; MAX_CPUS / 64],
}

impl Presence {
    pub(crate) const fn new() -> Self {
        Self { cpus: [const { AtomicU64::new(0) }; MAX_CPUS / 64] }
    }

    /// Called on `cpu` before it loads the root.
    pub(crate) fn enter(&self, cpu: Cpu) {
        let cpu = usize::from(cpu.0) % MAX_CPUS;
        let bit = 1 << (cpu % 64);
        if self.cpus[cpu / 64].load(Ordering::Relaxed) & bit == 0 {
            self.cpus[cpu / 64].fetch_or(bit, Ordering::SeqCst);
        }
        // Pairs with the fence in `snapshot`: either the invalidator sees this CPU, or this CPU's
        // walker sees the entries that the invalidator has written.
        fence(Ordering::SeqCst);
    }

    /// Called on `cpu` after it has loaded another root. Only the CPU itself takes its bit out:
    /// were it done for it, a CPU that loads the root at that moment would be missed.
    pub(crate) fn leave(&self, cpu: Cpu, leftovers: Leftovers) {
        if leftovers == Leftovers::Flushed {
            let cpu = usize::from(cpu.0) % MAX_CPUS;
            self.cpus[cpu / 64].fetch_and(!(1 << (cpu % 64)), Ordering::SeqCst);
        }
    }

    fn snapshot(&self) -> CpuSet {
        fence(Ordering::SeqCst);
        let mut bits = [0; MAX_CPUS / 64];
        for (word, cpus) in bits.iter_mut().zip(&self.cpus) {
            *word = cpus.load(Ordering::Relaxed);
        }
        CpuSet::from_bits(bits)
    }
}

/// Sends `what` to all CPUs that may hold translations under `root`.
pub(crate) fn invalidate<P: Platform>(
    platform: &P,
    root: Frame,
    presence: &Presence,
    what: &Invalidation,
    counts: &mut Counts,
) {
    platform.publish_entries();
    let cpus = presence.snapshot();
    if cpus.is_empty() {
        counts.invalidations_saved += 1;
        return;
    }
    counts.invalidations += 1;
    counts.pages_invalidated += what.range.pages();
    platform.invalidate(root, &cpus, what);
}

/// When the TLBs forget what a verb takes out of its tables.
///
/// Anonymous memory waits for the end of the verb: whoever else looks for its pages takes the
/// address space's mutex first. Who takes pages away from an object, or saves them, comes through
/// the reverse map with no lock of the address space but those of its tables, and believes what it
/// reads there. So what is in no table any more must be in no TLB by the time the table's lock is
/// given back:
/// 1. CPU A hides or unhooks a file's page and gives the lock back without a flush;
/// 2. CPU B saves the file: the page is mapped nowhere, so nobody need forget it, and is stored;
/// 3. CPU C writes to it through what its TLB remembers. Nobody will save that.
///
/// (With a truncation for CPU B, the page belongs to somebody else by then.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flush {
    /// When the caller flushes the gather.
    Later,
    /// Before the locks of the tables are given back ([`crate::table::PageTable::settle`]).
    AtOnce,
}

/// What is still to be invalidated, and the tables that may be freed afterwards.
#[must_use = "what was gathered has to be flushed and finished"]
pub(crate) struct Gather {
    range: Option<VirtRange>,
    /// The lowest level at which a translation changed.
    level: u8,
    tables: Tables,
    /// Unhooked tables, linked through their metadata; what stands in them still counts as mapped.
    pub(crate) unhooked: Option<Frame>,
}

impl Gather {
    pub(crate) const fn new() -> Self {
        Self { range: None, level: u8::MAX, tables: Tables::Unchanged, unhooked: None }
    }

    /// Translations in `range`, of entries at `level`, are stale now.
    #[inline]
    pub(crate) fn stale(&mut self, range: VirtRange, level: u8) {
        self.level = self.level.min(level);
        self.range = Some(match self.range {
            None => range,
            Some(old) => {
                VirtRange::raw(old.start().0.min(range.start().0), old.end().0.max(range.end().0))
            }
        });
    }

    /// Tables that translated `range` are no longer where they were. They may have held leaves of
    /// any level.
    pub(crate) fn stale_tables(&mut self, range: VirtRange) {
        self.stale(range, 1);
        self.tables = Tables::Changed;
    }

    /// Makes every TLB forget what is stale; nothing where nothing is.
    pub(crate) fn flush<P: Platform>(
        &mut self,
        platform: &P,
        root: Frame,
        presence: &Presence,
        counts: &mut Counts,
    ) {
        if let Some(range) = self.range.take() {
            let what = Invalidation {
                range,
                stride: arch::span::<P::Arch>(self.level.min(P::Arch::LARGEST_LEAF)),
                tables: self.tables,
            };
            invalidate(platform, root, presence, &what, counts);
            self.level = u8::MAX;
            self.tables = Tables::Unchanged;
        }
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.range.is_some()
    }

    /// Takes over what another gather holds.
    pub(crate) fn absorb<P: Platform>(&mut self, memory: &crate::Memory<P>, other: Self) {
        if let Some(range) = other.range {
            self.stale(range, other.level);
            if other.tables == Tables::Changed {
                self.tables = Tables::Changed;
            }
        }
        let mut next = other.unhooked;
        while let Some(table) = next {
            next = crate::table::link(memory.frames.meta(table).next.load(Ordering::Relaxed));
            crate::table::zap::gather_table(memory, self, table);
        }
    }
}
