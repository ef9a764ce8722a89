//! `/proc/self/statm` and the lines about memory in `/proc/self/status`.

use core::fmt::{self, Write};

use crate::addr::{PAGE_SHIFT, VirtAddr};
use crate::platform::Platform;
use crate::space::{AddressSpace, MappingFlags};
use crate::table::look::Standing;

use super::tally::Owner;

/// What of a process is in memory, in base pages. The page of zeroes does not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Resident {
    /// Anonymous memory, copies of a file's pages among it (`RssAnon`).
    pub anonymous: u64,
    /// Pages of files (`RssFile`).
    pub file: u64,
    /// Pages of shared memory (`RssShmem`).
    pub shared: u64,
}

impl Resident {
    /// All of it (`VmRSS`).
    pub fn total(&self) -> u64 {
        self.anonymous + self.file + self.shared
    }
}

/// What of the address space is in memory.
///
/// Nothing counts pages as they come and go, which would be a write to shared memory in each fault;
/// so this looks.
///
/// Complexity: in the entries of all mappings; what has no table costs nothing. The address space's
/// mutex is held for one mapping at a time.
pub fn resident<P: Platform>(space: &AddressSpace<'_, P>) -> Resident {
    look_at_all(space).0
}

/// What is resident, and how many pages the mappings have that grow down.
fn look_at_all<P: Platform>(space: &AddressSpace<'_, P>) -> (Resident, u64) {
    let (mut resident, mut stack) = (Resident::default(), 0);
    let mut at = VirtAddr(0);
    while let Some(end) = space.look_behind(at, |vma| {
        if vma.has(MappingFlags::GROWS_DOWN) {
            stack += vma.pages();
        }
        space.table.survey(vma.range(), |stretch| {
            let Standing::Pages { folio: Some(folio), .. } = stretch.what else { return };
            *match Owner::of(space, vma, folio) {
                Owner::Anonymous => &mut resident.anonymous,
                Owner::File => &mut resident.file,
                Owner::Memory => &mut resident.shared,
            } += stretch.range.pages();
        });
        vma.range().end()
    }) {
        at = end;
    }
    (resident, stack)
}

/// Writes what `/proc/self/statm` shows, in base pages: all mappings, resident, resident of files
/// and shared memory, `text` (which the embedder knows: the pages of the program's code), 0, data
/// and stack, 0.
///
/// # Errors
/// Those of `out` alone.
///
/// Complexity: as [`resident`].
pub fn statm<P: Platform>(
    space: &AddressSpace<'_, P>,
    text: u64,
    out: &mut dyn Write,
) -> fmt::Result {
    let (resident, stack) = look_at_all(space);
    let usage = space.usage();
    let shared = resident.file + resident.shared;
    let data = usage.data + stack;
    writeln!(out, "{} {} {shared} {text} 0 {data} 0", usage.total, resident.total())
}

/// Writes those lines about memory in `/proc/self/status` that the core knows, in Linux's order:
/// `VmPeak`, `VmSize`, `VmLck`, `VmHWM`, `VmRSS`, `RssAnon`, `RssFile`, `RssShmem`, `VmData`, `VmStk`,
/// `VmPTE`, `VmSwap`. `VmHWM` is the most that was resident whenever this was asked: nothing counts
/// resident pages as they come and go.
///
/// # Errors
/// Those of `out` alone.
///
/// Complexity: as [`resident`].
pub fn status<P: Platform>(space: &AddressSpace<'_, P>, out: &mut dyn Write) -> fmt::Result {
    let (resident, stack) = look_at_all(space);
    let usage = space.usage();
    let counts = space.counts();
    let lines = [
        ("VmPeak", space.peak_total()),
        ("VmSize", usage.total),
        ("VmLck", usage.locked),
        ("VmHWM", space.observe_resident(resident.total())),
        ("VmRSS", resident.total()),
        ("RssAnon", resident.anonymous),
        ("RssFile", resident.file),
        ("RssShmem", resident.shared),
        ("VmData", usage.data),
        ("VmStk", stack),
        // One frame each.
        ("VmPTE", counts.tables_allocated.saturating_sub(counts.tables_freed)),
        ("VmSwap", 0),
    ];
    lines.into_iter().try_for_each(|(name, pages)| {
        writeln!(out, "{name}:\t{:>8} kB", pages << (PAGE_SHIFT - 10))
    })
}
