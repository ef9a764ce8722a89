//! `/proc/vmstat`: uses of memory, and counts of events.

use core::fmt::{self, Write};

use super::line::Columns;
use bindery::arch::Arch;
use bindery::{Memory, Platform};

/// The number of faults of all programs, counted by the embedder.
///
/// ```
/// use bindery_linux::proc::FaultCounts;
///
/// let counts = FaultCounts { all: 120, major: 3 };
/// assert!(counts.major <= counts.all);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultCounts {
    /// All faults (`pgfault`).
    pub all: u64,
    /// Faults that waited for a page to be read (`pgmajfault`).
    pub major: u64,
}

/// Writes the lines of `/proc/vmstat` for which the core has counts, in Linux's order:
/// `nr_free_pages`, `nr_anon_pages`, `nr_mapped`, `nr_file_pages`, `nr_shmem`,
/// `nr_slab_unreclaimable`, `nr_page_table_pages`, `nr_anon_transparent_hugepages`, `pswpin`,
/// `pswpout`, `pgalloc_normal`, `pgfree`, `pgfault`, `pgmajfault`, `thp_fault_alloc`,
/// `thp_collapse_alloc`, `thp_split_page`, `thp_split_pmd`, `thp_zero_page_alloc`.
///
/// All memory is one zone. The first eight are counted by this call, so that no hot path has to
/// maintain them. `nr_mlock` is missing, because pages do not record that they are locked into
/// memory.
///
/// Context: spins; otherwise any that `out` allows. Complexity: linear in the blocks of frames,
/// without a lock.
///
/// # Errors
/// Only errors of `out`.
pub fn vmstat<P: Platform>(
    memory: &Memory<P>,
    faults: FaultCounts,
    out: &mut dyn Write,
) -> fmt::Result {
    let usage = memory.frame_usage();
    let events = memory.events();
    let lines = [
        ("nr_free_pages", usage.free),
        ("nr_anon_pages", usage.anonymous),
        ("nr_mapped", usage.mapped),
        ("nr_file_pages", usage.file + usage.shared_memory),
        ("nr_shmem", usage.shared_memory),
        ("nr_slab_unreclaimable", usage.slab),
        ("nr_page_table_pages", usage.tables),
        ("nr_anon_transparent_hugepages", usage.anonymous_huge >> P::Arch::PMD.order().0),
        ("pswpin", events.pages_swapped_in),
        ("pswpout", events.pages_swapped_out),
        ("pgalloc_normal", events.frames_allocated),
        ("pgfree", events.frames_freed),
        ("pgfault", faults.all),
        ("pgmajfault", faults.major),
        ("thp_fault_alloc", events.huge_faults),
        ("thp_collapse_alloc", events.huge_collapses),
        ("thp_split_page", events.folio_splits),
        ("thp_split_pmd", events.leaf_splits),
        ("thp_zero_page_alloc", events.huge_zero_pages),
        ("swap_ra", events.swap_read_around),
        ("swap_ra_hit", events.swap_read_around_hits),
    ];
    lines.into_iter().try_for_each(|(name, number)| {
        let mut line = Columns::new();
        line.push(name);
        line.push(" ");
        line.push_decimal(number);
        line.push("\n");
        line.write_to(out)
    })
}
