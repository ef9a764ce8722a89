//! `/proc/self/statm` and the lines about memory in `/proc/self/status`.

use core::fmt::{self, Write};

use bindery::addr::PAGE_SHIFT;
use bindery::{AddressSpace, LargeFolios, Platform};

use super::line::Columns;

/// Writes `/proc/self/statm`, in base pages: all mappings, resident pages, resident pages of files
/// and shared memory, `text` (the pages of the program's code, which the embedder knows), 0, data
/// and stack, 0.
///
/// Context: any that `out` allows. Complexity: constant.
///
/// # Errors
/// Only errors of `out`.
pub fn statm<P: Platform>(
    space: &AddressSpace<'_, P>,
    text: u64,
    out: &mut dyn Write,
) -> fmt::Result {
    let (resident, usage) = (space.resident(), space.usage());
    let shared = resident.file + resident.shared;
    let data = usage.data + usage.stack;
    let mut line = Columns::new();
    for number in [usage.total, resident.total(), shared, text, 0, data] {
        line.push_decimal(number);
        line.push(" ");
    }
    line.push("0\n");
    line.write_to(out)
}

/// Writes the lines about memory of `/proc/self/status`, in Linux's order: `VmPeak`, `VmSize`,
/// `VmLck`, `VmPin`, `VmHWM`, `VmRSS`, `RssAnon`, `RssFile`, `RssShmem`, `VmData`, `VmStk`,
/// `VmPTE`, `VmSwap`, `THP_enabled`. `VmHWM` is updated before each call that unmaps pages, and by
/// this function.
///
/// Context: any that `out` allows. Complexity: constant.
///
/// # Errors
/// Only errors of `out`.
pub fn status<P: Platform>(space: &AddressSpace<'_, P>, out: &mut dyn Write) -> fmt::Result {
    let resident = space.resident();
    let usage = space.usage();
    let counts = space.counts();
    let lines = [
        ("VmPeak", space.peak_total()),
        ("VmSize", usage.total),
        ("VmLck", usage.locked),
        ("VmPin", usage.pinned),
        ("VmHWM", space.resident_peak()),
        ("VmRSS", resident.total()),
        ("RssAnon", resident.anonymous),
        ("RssFile", resident.file),
        ("RssShmem", resident.shared),
        ("VmData", usage.data),
        ("VmStk", usage.stack),
        // Each table occupies one frame.
        ("VmPTE", counts.tables_allocated.saturating_sub(counts.tables_freed)),
        ("VmSwap", counts.swap_pages),
    ];
    lines.into_iter().try_for_each(|(name, pages)| {
        writeln!(out, "{name}:\t{:>8} kB", pages << (PAGE_SHIFT - 10))
    })?;
    let enabled = space.large_folios() != LargeFolios::Never;
    writeln!(out, "THP_enabled:\t{}", u8::from(enabled))
}
