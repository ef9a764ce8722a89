//! The auditor: verifies the invariants of a whole system and reports the first violation and its
//! location.
//!
//! The auditor is for tests, debug builds and the analysis of abnormal behavior. The system must be
//! quiet: no operation and no fault runs during the audit, and `spaces` contains all address spaces
//! that allocate frames from the memory.
//!
//! `docs/invariants.md` numbers the invariants and names the function here that verifies each:
//!
//! | invariants | verified in |
//! |---|---|
//! | 10 to 13: frames and free lists; nothing leaks | `frames` |
//! | 14 to 21: references, mappings and owners of folios | `frames`, `owners` |
//! | 5, 23 to 33: tables, entries and contiguous runs; permissions never wider than the VMA's | `tree` |
//! | 34 to 40: VMAs, the reverse map, accounts | `tree`, `owners` |
//! | 41 to 45, 57 to 59: objects, their mappings, committed memory | `objects` |
//! | 46 to 50: kernel areas, their frames, their tables | `kernel` |
//! | 60 to 62: swap slots, their entries, the swap cache | `swap` |
//! | 54: items that wait for readers are in no tree, and are not lost | `deferred` |
//!
//! [`machine()`] is another test, for the first boot: it checks that the processor's control bits
//! have the values that the page tables need.
//!
//! Invariants 1 to 9 concern TLBs and past events. The hosted machine's strict TLB and the tests'
//! shadow contents verify them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod deferred;
mod frames;
mod kernel;
mod machine;
mod objects;
mod owners;
mod swap;
mod tree;
mod violation;

use core::sync::atomic::AtomicU64;

use crate::addr::{Frame, VirtAddr};
use crate::kernel_map::Area;
use crate::object::{drop_answered, settle_written};
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::{AddressSpace, Resident};
use crate::table::TreeState;
use crate::{KernelMap, Memory};

use deferred::WaitingItems;
pub use machine::{AccessBy, AccessFault, Accesses, MachineError, MachineReport, machine};
pub use violation::Violation;

/// The extent of a successful audit.
///
/// ```
/// use bindery::check::{Report, Violation, check, scratch_words};
/// use bindery::{AddressSpace, Memory, Platform};
///
/// /// While nothing runs.
/// fn audit<P: Platform>(
///     memory: &Memory<P>,
///     space: &AddressSpace<'_, P>,
/// ) -> Result<Report, Violation> {
///     let mut scratch = vec![0; scratch_words(memory)];
///     check(memory, &[space], &mut scratch)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// VMAs.
    pub mappings: u64,
    /// Tables, including those on deposit.
    pub tables: u64,
    /// Base pages mapped, including `PROT_NONE` ones; a page that is mapped twice counts twice.
    pub pages: u64,
    /// Folios.
    pub folios: u64,
    /// Objects: shared memory and files.
    pub objects: u64,
    /// Pages of objects that are in memory.
    pub object_pages: u64,
    /// Free frames.
    pub free_frames: u64,
}

/// The number of words of scratch memory that an audit of `memory` needs: one for each frame.
///
/// Context: any.
pub fn scratch_words<P: Platform>(memory: &Memory<P>) -> usize {
    memory.frames.span().count as usize
}

/// Verifies all invariants. `spaces` contains all address spaces of `memory`, no other call runs,
/// and pagers have answered all requests. Drops pages that were read ahead and never requested.
/// `scratch` has at least [`scratch_words`] words, with any content.
///
/// Context: may sleep. Complexity: linear in the frames and in the entries of all tables.
///
/// # Errors
/// The first violation.
pub fn check<P: Platform>(
    memory: &Memory<P>,
    spaces: &[&AddressSpace<'_, P>],
    scratch: &mut [u32],
) -> Result<Report, Violation> {
    check_with_kernel(memory, spaces, &[], scratch)
}

/// Like [`check`], for a system with kernel maps: `kernel` contains all of them.
///
/// Context: may sleep. Complexity: as [`check`], plus linear in the pages of all areas.
///
/// # Errors
/// The first violation.
pub fn check_with_kernel<P: Platform>(
    memory: &Memory<P>,
    spaces: &[&AddressSpace<'_, P>],
    kernel: &[&KernelMap<'_, P>],
    scratch: &mut [u32],
) -> Result<Report, Violation> {
    let needed = scratch_words(memory);
    let Some(tally) = scratch.get_mut(..needed) else {
        return Err(Violation::ScratchTooSmall { needed });
    };
    tally.fill(0);
    // Their pages are in no index, and no thread waits for them.
    drop_answered(memory);
    settle_written(memory);
    let mut audit = Audit {
        memory,
        first: memory.frames.span().first,
        tally,
        groups: 0,
        waiting: WaitingItems::default(),
        resident: Resident::default(),
        swap_entries: 0,
        report: Report::default(),
    };
    for space in spaces {
        audit.space(space)?;
        audit.accounts(space)?;
    }
    audit.deferred()?;
    let trees = (memory.slab::<TreeState>().objects(&memory.frames), spaces.len() as u64);
    let groups =
        (memory.slab::<AnonGroup>().objects(&memory.frames), audit.groups + audit.waiting.groups);
    for (allocated, used) in [groups, trees] {
        if allocated != used {
            return Err(Violation::LeakedGroups { allocated, used });
        }
    }
    let mut areas = audit.waiting.areas;
    for map in kernel {
        areas += audit.kernel_map(map)?;
    }
    let allocated = memory.slab::<Area>().objects(&memory.frames);
    if allocated != areas {
        return Err(Violation::LeakedAreas { allocated, used: areas });
    }
    audit.objects(spaces)?;
    audit.frames()?;
    audit.swap()?;
    Ok(audit.report)
}

/// The findings of an audit so far.
struct Audit<'a, 'm, P: Platform> {
    memory: &'m Memory<P>,
    /// The first frame of the tally.
    first: Frame,
    /// For each frame, the number of entries that map it; for tables, the number of times they were
    /// found.
    tally: &'a mut [u32],
    /// The anon groups found.
    groups: u64,
    /// Records that wait for a grace period.
    waiting: WaitingItems,
    /// The pages that the current address space maps.
    resident: Resident,
    /// Entries that refer to swap slots, in pages.
    swap_entries: u64,
    report: Report,
}

impl<'m, P: Platform> Audit<'_, 'm, P> {
    /// The entries of a table. For a frame that is not a table, the entries of an empty table.
    fn entries(&self, table: Frame) -> &'m [AtomicU64] {
        static EMPTY: [AtomicU64; 512] = [const { AtomicU64::new(0) }; 512];
        let frames = &self.memory.frames;
        if !frames.manages(table) || !frames.table(table).is_table() {
            return &EMPTY;
        }
        // SAFETY: 1. the frame's metadata was checked above; 2. no other thread runs.
        unsafe { self.memory.table_entries(table) }
    }

    /// The areas of a kernel map, in rising order.
    fn areas<'k>(&self, map: &'k KernelMap<'_, P>) -> impl Iterator<Item = &'k Area> + use<'k, P> {
        // SAFETY: 1. no other call runs during an audit.
        unsafe { map.areas() }
    }

    /// The area in use of a kernel map that contains `at`.
    fn area_of<'k>(&self, map: &'k KernelMap<'_, P>, at: VirtAddr) -> Option<&'k Area> {
        // SAFETY: 1. as in `areas`.
        unsafe { map.owner_of(at) }
    }

    /// The tally of `frame`, if it belongs to the memory.
    fn count(&mut self, frame: Frame) -> Option<&mut u32> {
        let index = frame.0.checked_sub(self.first.0)?;
        self.tally.get_mut(index as usize)
    }
}
