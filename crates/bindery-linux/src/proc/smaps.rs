//! `/proc/self/smaps` and `/proc/self/smaps_rollup`: the resident memory of mappings.

use core::fmt::{self, Write};

use bindery::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use bindery::{AddressSpace, MappingFlags, Platform};

use super::line::{Columns, write_number, write_size};
use super::maps::Shown;
use super::naming::{FileId, Naming};
use super::tally::{Extent, Tally};

/// Writes `/proc/self/smaps`: for each mapping its line of `maps` and its resident memory. [The
/// module](super) documents which numbers are estimates.
///
/// Context: may sleep. Complexity: linear in the entries of all mappings; ranges without a page
/// table add no cost. Other operations on the address space wait while one mapping is scanned;
/// faults wait for at most 1,024 entries.
///
/// # Errors
/// Only errors of `out`, which end the listing.
pub fn smaps<P: Platform>(
    space: &AddressSpace<'_, P>,
    naming: &dyn Naming,
    out: &mut dyn Write,
) -> fmt::Result {
    let mut at = VirtAddr(0);
    while let Some(next) = smaps_entry(space, naming, at, out)? {
        at = next;
    }
    Ok(())
}

/// Writes one entry of [`smaps()`], as [`maps_entry`](super::maps_entry) writes one of `maps`.
///
/// Context: may sleep. Complexity: logarithmic in the mappings, and linear in the entries of the
/// shown mapping.
///
/// # Errors
/// Only errors of `out`, which end the entry.
pub fn smaps_entry<P: Platform>(
    space: &AddressSpace<'_, P>,
    naming: &dyn Naming,
    at: VirtAddr,
    out: &mut dyn Write,
) -> Result<Option<VirtAddr>, fmt::Error> {
    let viewed = space.view_mapping(at, |view| {
        let mut tally = Tally::default();
        tally.add(view, view.range());
        (Shown::of(space, view), tally, view.may_use_large_folios())
    });
    let Some((shown, tally, huge)) = viewed else {
        return Ok(None);
    };
    shown.write_line(naming, out)?;
    write_size(out, "Size:", shown.mapping.range.len())?;
    write_size(out, "KernelPageSize:", PAGE_SIZE)?;
    write_size(out, "MMUPageSize:", PAGE_SIZE)?;
    tally.write(Extent::Mapping, out)?;
    write_number(out, "THPeligible:", huge.into(), "\n")?;
    if space.protection_keys() > 1 {
        let key = shown.mapping.flags.key().number();
        write_number(out, "ProtectionKey:", key.into(), "\n")?;
    }
    write_flags(shown.mapping.flags, out)?;
    Ok(Some(shown.mapping.range.end()))
}

/// Writes `/proc/self/smaps_rollup`: the sums of all mappings.
///
/// Context: may sleep. Complexity: as [`smaps()`].
///
/// # Errors
/// Only errors of `out`.
pub fn smaps_rollup<P: Platform>(space: &AddressSpace<'_, P>, out: &mut dyn Write) -> fmt::Result {
    let mut tally = Tally::default();
    let mut whole: Option<VirtRange> = None;
    let mut at = VirtAddr(0);
    let mut look = |at: VirtAddr| {
        space.view_mapping(at, |view| {
            // A mapping may have grown downwards since the last step, so skip pages that were
            // already counted.
            let range = super::range(view.range().start().max(at), view.range().end());
            tally.add(view, range);
            range
        })
    };
    while let Some(range) = look(at) {
        let start = whole.map_or(range.start(), VirtRange::start);
        whole = Some(super::range(start, range.end()));
        at = range.end();
    }
    let nowhere = FileId { major: 0, minor: 0, inode: 0 };
    let whole = whole.unwrap_or_default();
    let mut line = Columns::of_mapping(whole, MappingFlags::empty(), 0, nowhere);
    line.pad_to_path();
    line.push("[rollup]\n");
    line.write_to(out)?;
    tally.write(Extent::All, out)
}

/// The letters of flags, in the order of the bits in Linux's `vm_flags`.
const LETTERS: [(MappingFlags, &str); 32] = [
    (MappingFlags::READ, "rd"),
    (MappingFlags::WRITE, "wr"),
    (MappingFlags::EXECUTE, "ex"),
    // On Linux, the file was opened for writing. Here, `mprotect` may make the mapping writable. So
    // mappings that only a seal makes read-only lack the letters.
    (MappingFlags::SHARED.union(MappingFlags::MAY_WRITE), "sh"),
    (MappingFlags::MAY_READ, "mr"),
    (MappingFlags::MAY_WRITE, "mw"),
    (MappingFlags::MAY_EXECUTE, "me"),
    (MappingFlags::SHARED, "ms"),
    (MappingFlags::GROWS_DOWN, "gd"),
    (MappingFlags::USERFAULT_MISSING, "um"),
    (MappingFlags::FRAMES, "pf"),
    (MappingFlags::MAYBE_GUARDS, "gu"),
    (MappingFlags::USERFAULT_WRITE_PROTECT, "uw"),
    (MappingFlags::LOCKED, "lo"),
    (MappingFlags::FRAMES, "io"),
    (MappingFlags::SEQUENTIAL, "sr"),
    (MappingFlags::RANDOM, "rr"),
    (MappingFlags::DONT_FORK, "dc"),
    (MappingFlags::DONT_EXPAND, "de"),
    (MappingFlags::LOCK_ON_FAULT, "lf"),
    (MappingFlags::ACCOUNT, "ac"),
    (MappingFlags::NO_RESERVE, "nr"),
    (MappingFlags::BTI, "bt"),
    (MappingFlags::WIPE_ON_FORK, "wf"),
    (MappingFlags::DONT_DUMP, "dd"),
    (MappingFlags::SOFT_DIRTY, "sd"),
    (MappingFlags::HUGE, "hg"),
    (MappingFlags::NO_HUGE, "nh"),
    (MappingFlags::MERGEABLE, "mg"),
    (MappingFlags::USERFAULT_MINOR, "ui"),
    (MappingFlags::DROPPABLE, "dp"),
    (MappingFlags::SEALED, "sl"),
];

fn write_flags(flags: MappingFlags, out: &mut dyn Write) -> fmt::Result {
    let mut line = Columns::new();
    line.push("VmFlags: ");
    for (flag, letters) in LETTERS {
        if flags.contains(flag) {
            line.push(letters);
            line.push(" ");
        }
    }
    line.push("\n");
    line.write_to(out)
}
