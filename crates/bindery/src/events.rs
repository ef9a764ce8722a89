//! Rare events of memory, counted for `/proc/vmstat`.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, VirtAddr};
use crate::arch::{Arch, Symptom};

/// Counts of rare events so far ([`crate::Memory::events`]).
///
/// ```
/// use bindery::{Memory, Platform};
///
/// fn in_use<P: Platform>(memory: &Memory<P>) -> u64 {
///     let events = memory.events();
///     events.frames_allocated - events.frames_freed
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Events {
    /// Frames that were allocated, for any use.
    pub frames_allocated: u64,
    /// Frames that were freed.
    pub frames_freed: u64,
    /// Huge folios that a fault on anonymous memory allocated and mapped by one huge leaf.
    pub huge_faults: u64,
    /// Huge folios that were allocated to collapse smaller ones.
    pub huge_collapses: u64,
    /// Folios that were split into smaller ones.
    pub folio_splits: u64,
    /// Huge leaves that were replaced by a table.
    pub leaf_splits: u64,
    /// Huge zero pages: 0 or 1.
    pub huge_zero_pages: u64,
    /// Base pages whose content was read from a swap area.
    pub pages_swapped_in: u64,
    /// Base pages whose content was written to a swap area.
    pub pages_swapped_out: u64,
    /// Faults that read content from a swap area or through a pager. Pages filled with one repeated
    /// word count as read; pages that another thread has already read do not (Linux: `pgmajfault`).
    pub major_faults: u64,
    /// Folios that received a new reference during swap-out and were therefore mapped again (Linux:
    /// `EBUSY` of an unmapping).
    pub swap_out_busy: u64,
    /// Base pages that were read ahead by a fault on another page (Linux: `swap_ra`).
    pub swap_read_around: u64,
    /// The part of `swap_read_around` that faults used later (Linux: `swap_ra_hit`).
    pub swap_read_around_hits: u64,
    /// Read requests that failed on a swap device.
    pub swap_read_errors: u64,
    /// Write requests that failed on a swap device.
    pub swap_write_errors: u64,
    /// Faults whose entry allowed the access and needed no change: [`crate::Resolved::Spurious`]
    /// and [`crate::Resolution::Retry`].
    pub spurious_faults: u64,
    /// The longest sequence of spurious faults at one address, with no write to an entry of the
    /// address space in between. A sequence longer than the number of CPUs means that the machine
    /// is not set up as the entries require, or that invalidations are lost. `check::machine`, with
    /// the feature `check`, tests both.
    pub repeated_faults: u64,
}

/// Counters of one CPU, or of all CPUs without own counters.
#[derive(Default)]
pub(crate) struct FrequentEvents {
    /// Base pages whose content was read from a swap area.
    pub(crate) swapped_in: AtomicU64,
    /// Base pages whose content was written to a swap area.
    pub(crate) swapped_out: AtomicU64,
    /// Faults that read content.
    pub(crate) major_faults: AtomicU64,
    /// As in [`Events`], and so are those below.
    pub(crate) huge_faults: AtomicU64,
    pub(crate) swap_out_busy: AtomicU64,
    pub(crate) swap_read_around: AtomicU64,
    pub(crate) swap_read_around_hits: AtomicU64,
}

impl FrequentEvents {
    pub(crate) const fn new() -> Self {
        let [swapped_in, swapped_out, major_faults, huge_faults] = [const { AtomicU64::new(0) }; 4];
        let [swap_out_busy, swap_read_around, swap_read_around_hits] =
            [const { AtomicU64::new(0) }; 3];
        Self {
            swapped_in,
            swapped_out,
            major_faults,
            huge_faults,
            swap_out_busy,
            swap_read_around,
            swap_read_around_hits,
        }
    }
}

/// The counters of rare events.
#[derive(Default)]
pub(crate) struct RareEvents {
    /// The counters of CPUs without own counters.
    pub(crate) frequent: FrequentEvents,
    pub(crate) huge_collapses: AtomicU64,
    pub(crate) folio_splits: AtomicU64,
    pub(crate) leaf_splits: AtomicU64,
    pub(crate) huge_zero_pages: AtomicU64,
    pub(crate) swap_read_errors: AtomicU64,
    pub(crate) swap_write_errors: AtomicU64,
    pub(crate) repeats: Repeats,
}

impl RareEvents {
    /// Counts an event.
    pub(crate) fn note(event: &AtomicU64) {
        event.fetch_add(1, Ordering::Relaxed);
    }

    /// All counts, including the frames counted by the allocator and the counters of individual
    /// CPUs.
    pub(crate) fn read<'a>(
        &'a self,
        frames_allocated: u64,
        frames_freed: u64,
        of_cpus: impl Iterator<Item = &'a FrequentEvents>,
    ) -> Events {
        let read = |event: &AtomicU64| event.load(Ordering::Relaxed);
        let mut sums = Events::default();
        for cpu in of_cpus.chain([&self.frequent]) {
            sums.pages_swapped_in += read(&cpu.swapped_in);
            sums.pages_swapped_out += read(&cpu.swapped_out);
            sums.major_faults += read(&cpu.major_faults);
            sums.huge_faults += read(&cpu.huge_faults);
            sums.swap_out_busy += read(&cpu.swap_out_busy);
            sums.swap_read_around += read(&cpu.swap_read_around);
            sums.swap_read_around_hits += read(&cpu.swap_read_around_hits);
        }
        Events {
            frames_allocated,
            frames_freed,
            huge_collapses: read(&self.huge_collapses),
            folio_splits: read(&self.folio_splits),
            leaf_splits: read(&self.leaf_splits),
            huge_zero_pages: read(&self.huge_zero_pages),
            swap_read_errors: read(&self.swap_read_errors),
            swap_write_errors: read(&self.swap_write_errors),
            spurious_faults: read(&self.repeats.spurious),
            repeated_faults: read(&self.repeats.most),
            ..sums
        }
    }
}

/// A fault that changed nothing: its address, and the number of entries written so far in its tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Unchanged {
    pub(crate) root: Frame,
    pub(crate) page: VirtAddr,
    /// The number of entries written in the tree so far. If this number rises, the next fault
    /// starts a new sequence, because `mprotect` in a loop causes a spurious fault each time.
    pub(crate) written: u64,
}

/// Counts repeated faults that change nothing. CPUs may overwrite each other's records, which can
/// only shorten a sequence.
#[derive(Default)]
pub(crate) struct Repeats {
    spurious: AtomicU64,
    /// The longest sequence.
    most: AtomicU64,
    /// The current sequence.
    row: AtomicU64,
    place: AtomicU64,
    written: AtomicU64,
}

/// A number of repeats that no working machine reaches: each CPU may have one after each change of
/// an entry.
pub(crate) const TOO_MANY_REPEATS: u64 = 4096;

impl Repeats {
    /// Records a fault.
    ///
    /// # Panics
    /// In debug builds, with the usual causes, if the same fault has occurred [`TOO_MANY_REPEATS`]
    /// times.
    #[cold]
    pub(crate) fn note<A: Arch>(&self, fault: &Unchanged) {
        let Unchanged { root, page, written } = *fault;
        let place = page.0 ^ u64::from(root.0);
        self.spurious.fetch_add(1, Ordering::Relaxed);
        let is_same = self.place.swap(place, Ordering::Relaxed) == place;
        let is_same = self.written.swap(written, Ordering::Relaxed) == written && is_same;
        let row = if is_same { self.row.load(Ordering::Relaxed) + 1 } else { 1 };
        self.row.store(row, Ordering::Relaxed);
        self.most.fetch_max(row, Ordering::Relaxed);
        debug_assert!(
            row < TOO_MANY_REPEATS,
            "{row} faults in a row at {page}, whose entry allows the access: {}",
            Causes::<A>(PhantomData)
        );
    }
}

/// The possible causes of a fault that repeats forever.
struct Causes<A>(PhantomData<A>);

impl<A: Arch> fmt::Display for Causes<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for symptom in [Symptom::DataFaulted, Symptom::WritableCodeFaulted] {
            if let Some((bit, _)) = A::control_bit(symptom) {
                write!(f, "{bit}; or ")?;
            }
        }
        f.write_str(
            "Platform::invalidate_local does nothing; or another root is loaded; or the fault is \
             none of the tables (a reserved bit, alignment). check::machine finds out",
        )
    }
}
