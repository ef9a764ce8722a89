//! Intentional differences from Linux, each with its reason. After such a difference the states
//! differ, so a sequence is compared only up to that step.
//!
//! # A refused call leaves no trace
//! Linux splits mappings at the ends of a range before it knows whether the call will fail (because
//! of a limit, or of a seal further on), but does not merge them again. By then, `mremap` has
//! already unmapped its destination. The core checks first and fails before it has changed
//! anything.
//!
//! Likewise, Linux gives a mapping an anon group before it knows whether a userfaultfd's request
//! for pages there will fail. Such a mapping cannot merge with a mapping of another anon group and
//! stays counted as committed when it becomes read-only.
//!
//! # A moved mapping merges with its neighbors
//! `mremap` removes the userfaultfd from the mapping that it moves. Linux does so after the move
//! and then no longer merges the mapping with its neighbors. If the mapping was already merged with
//! registered neighbors, Linux removes their userfaultfd as well.
//!
//! # Unlocked memory does not count as locked
//! `mremap` with `MREMAP_DONTUNMAP` unlocks the mapping that it leaves. Linux does not decrement
//! the count of locked pages, which stays too high until the process ends. If the moved part was
//! merged with the remaining part, Linux unlocks both.
//!
//! # Inaccessible memory is not collapsed
//! Linux collapses memory with no permissions too. No TLB holds entries for such memory, so the
//! collapse has no benefit. The core refuses, as for untouched memory.
//!
//! # Memory served by a userfaultfd is not collapsed
//! Linux collapses registered memory that has no missing and no write-protected pages. It unmaps
//! pages of shared memory before it finds that one is missing, and checks one page too far for
//! registered mappings. The core refuses and changes nothing.
//!
//! # Unknown advice is refused
//! On Linux 6.18, `process_madvise` of no bytes accepts any advice. Linux 7.2 refuses unknown
//! advice, and so does the core.
//!
//! # A cut huge leaf leaves small ones
//! If a part of a huge page of shared memory changes, Linux unmaps the whole page, and faults map
//! the rest again. The core leaves the rest mapped.
//!
//! # The huge zero page is not private memory
//! Linux gives a mapping an anon group when it maps the huge zero page. Such a mapping stays
//! counted as committed when it becomes read-only. Linux also collapses zero pages that were only
//! read.
//!
//! # Pages in swap
//! Each side chooses the pages in memory; [`super::swapped`] compares them.
//!
//! # Pages of `fallocate` are present
//! Linux allocates and counts these pages (`st_blocks`) but zeroes them only at the first touch.
//! Until then, `mincore` does not report the pages and fault-around does not map them. The core
//! zeroes the pages at once.

use super::names::{ADVICE, FALLOC_FL_PUNCH_HOLE, MADV_COLLAPSE, MADV_HUGEPAGE, MREMAP_DONTUNMAP};
use super::observation::{
    ANONYMOUS, Area, Observation, Outcome, Presence, Snapshot, Stretch, letter,
};
use super::operation::{Operation, OperationKind};
use super::place::PAGE;

/// Truncates both observation lists at their first difference if the difference is intentional.
pub fn level(operations: &[Operation], linux: &mut Vec<Observation>, ours: &mut Vec<Observation>) {
    let differs = linux.iter().zip(ours.iter()).position(|(linux, ours)| linux != ours);
    let Some(place) = differs else { return };
    let (theirs, now) = (&linux[place], &ours[place]);
    let Some(operation) = operations.get(theirs.step) else { return };
    let before = ours[..place].iter().rev().find(|before| before.process == now.process);
    let huge = wants_huge_pages(operations, theirs.step);
    let refuses = collapses_prot_none(operation, before)
        || collapses_what_is_served(operations, operation)
        || huge && collapses_zeroes(operation, before)
        || advises_of_nothing(operation);
    if theirs.outcome != now.outcome && !refuses {
        return;
    }
    let by_intent = refuses
        || leaves_a_trace(operation, theirs, now, before)
        || counts_what_is_unlocked(operation, theirs, now)
        || (huge || used_a_userfaultfd(operations, theirs.step)) && joins_less(theirs, now)
        || forgets_neighbors(operation, theirs, now)
        || (allocated_before(operations, &linux[..place])
            || collapsed_before(operations, theirs.step))
            && sees_less(theirs, now);
    if by_intent {
        linux.truncate(place);
        ours.truncate(place);
    }
}

/// Whether both calls failed with the same error and Linux differs because of changes before the
/// failure.
fn leaves_a_trace(
    operation: &Operation,
    theirs: &Observation,
    now: &Observation,
    before: Option<&Observation>,
) -> bool {
    let refused = match theirs.outcome {
        Outcome::Returned(-4095..0) => true,
        // `brk` reports an error by returning the old end.
        Outcome::Returned(end) => {
            operation.operation == OperationKind::Brk && end as u64 != operation.arguments[0]
        }
        _ => false,
    };
    let unchanged = before.is_some_and(|before| before.snapshot == now.snapshot);
    let only_cut = joined(&theirs.snapshot.areas) == joined(&now.snapshot.areas)
        && Snapshot { areas: now.snapshot.areas.clone(), ..theirs.snapshot.clone() }
            == now.snapshot;
    refused && (only_cut || unchanged && operation.operation == OperationKind::Mremap)
}

/// Whether the operation gives advice that is unknown to Linux, for zero bytes.
fn advises_of_nothing(operation: &Operation) -> bool {
    let known = ADVICE.iter().any(|(advice, _)| *advice == operation.arguments[1]);
    let nothing = operation.ranges.iter().all(|(_, length)| *length == 0);
    operation.operation == OperationKind::ProcessMadvise && nothing && !known
}

/// The advice that an operation gives.
pub fn advice(operation: &Operation) -> Option<u64> {
    match operation.operation {
        OperationKind::Madvise => Some(operation.arguments[2]),
        OperationKind::ProcessMadvise => Some(operation.arguments[1]),
        _ => None,
    }
}

/// Whether inaccessible memory may have been collapsed.
fn collapses_prot_none(operation: &Operation, before: Option<&Observation>) -> bool {
    let accessible = letter(b"rd") | letter(b"wr") | letter(b"ex");
    let is_prot_none = |area: &Area| area.letters & accessible == 0;
    let areas = before.map(|before| &before.snapshot.areas);
    advice(operation) == Some(MADV_COLLAPSE)
        && areas.is_some_and(|areas| areas.iter().any(is_prot_none))
}

/// Whether memory registered with a userfaultfd may have been collapsed.
fn collapses_what_is_served(operations: &[Operation], operation: &Operation) -> bool {
    let registers = |earlier: &Operation| earlier.operation == OperationKind::Register;
    advice(operation) == Some(MADV_COLLAPSE) && operations.iter().any(registers)
}

/// Whether zeroes may have been collapsed.
fn collapses_zeroes(operation: &Operation, before: Option<&Observation>) -> bool {
    let stretches = before.map(|before| &before.snapshot.stretches);
    let is_zero = |stretch: &Stretch| stretch.presence == Presence::Zero;
    advice(operation) == Some(MADV_COLLAPSE)
        && stretches.is_some_and(|stretches| stretches.iter().any(is_zero))
}

/// Whether huge pages of private memory may exist.
fn wants_huge_pages(operations: &[Operation], step: usize) -> bool {
    operations.iter().take(step).any(|operation| advice(operation) == Some(MADV_HUGEPAGE))
}

/// Whether the only difference is that Linux counts more pages as locked, after a call that
/// unlocks.
fn counts_what_is_unlocked(operation: &Operation, theirs: &Observation, now: &Observation) -> bool {
    let unlocks = operation.operation == OperationKind::Mremap
        && operation.arguments[3] & MREMAP_DONTUNMAP != 0;
    let unlocked = |areas: &[Area]| {
        let lock = letter(b"lo");
        let all = areas.iter().map(|area| Area { letters: area.letters & !lock, ..*area });
        joined(&all.collect::<Vec<_>>())
    };
    let (linux, ours) = (&theirs.snapshot, &now.snapshot);
    let more = linux.counters.locked > ours.counters.locked;
    let mut corrected = linux.clone();
    corrected.counters.locked = ours.counters.locked;
    if linux.areas != ours.areas && unlocked(&linux.areas) == unlocked(&ours.areas) {
        corrected.areas.clone_from(&ours.areas);
    }
    unlocks && more && corrected == *ours
}

/// Whether memory was registered with a userfaultfd, or pages were requested of it.
fn used_a_userfaultfd(operations: &[Operation], step: usize) -> bool {
    let kinds = operations.iter().take(step + 1).map(|operation| operation.operation);
    kinds
        .filter(|kind| *kind != OperationKind::Agree)
        .any(|kind| kind.userfault_request().is_some())
}

/// Whether the only difference is that Linux keeps mergeable mappings apart, or counts more of them
/// as committed.
fn joins_less(theirs: &Observation, now: &Observation) -> bool {
    let (linux, ours) = (&theirs.snapshot, &now.snapshot);
    let uncounted = |areas: &[Area]| {
        let account = letter(b"ac");
        let all = areas.iter().map(|area| Area { letters: area.letters & !account, ..*area });
        joined(&all.collect::<Vec<_>>())
    };
    uncounted(&linux.areas) == uncounted(&ours.areas)
        && Snapshot { areas: ours.areas.clone(), ..linux.clone() } == *ours
}

/// Whether the only difference is that Linux has removed the userfaultfd from neighbors too.
fn forgets_neighbors(operation: &Operation, theirs: &Observation, now: &Observation) -> bool {
    let (linux, ours) = (&theirs.snapshot, &now.snapshot);
    let unserved = |areas: &[Area]| {
        let served = letter(b"um") | letter(b"uw") | letter(b"ui");
        let all = areas.iter().map(|area| Area { letters: area.letters & !served, ..*area });
        joined(&all.collect::<Vec<_>>())
    };
    operation.operation == OperationKind::Mremap
        && unserved(&linux.areas) == unserved(&ours.areas)
        && Snapshot { areas: ours.areas.clone(), ..linux.clone() } == *ours
}

/// Whether pages were allocated in advance.
fn allocated_before(operations: &[Operation], linux: &[Observation]) -> bool {
    linux.iter().filter(|seen| seen.outcome == Outcome::Returned(0)).any(|seen| {
        operations.get(seen.step).is_some_and(|operation| {
            let hole = operation.arguments[1] & FALLOC_FL_PUNCH_HOLE != 0;
            operation.operation == OperationKind::Fallocate && !hole
        })
    })
}

/// Whether a huge leaf of shared memory may exist.
fn collapsed_before(operations: &[Operation], step: usize) -> bool {
    operations.iter().take(step).any(|operation| advice(operation) == Some(MADV_COLLAPSE))
}

/// Whether the only difference is that Linux has or reports fewer pages of objects.
fn sees_less(theirs: &Observation, now: &Observation) -> bool {
    let pages = |stretches: &[Stretch]| -> Vec<(u64, Presence)> {
        let all = stretches.iter().flat_map(|stretch| {
            let addresses = (stretch.start..stretch.end).step_by(PAGE as usize);
            addresses.map(|at| (at, stretch.presence))
        });
        all.collect()
    };
    let (linux_has, we_have) = (pages(&theirs.snapshot.stretches), pages(&now.snapshot.stretches));
    let more = we_have.iter().filter(|page| !linux_has.contains(page));
    let fewer_pages = linux_has.iter().all(|page| we_have.contains(page))
        && more.into_iter().all(|(_, presence)| *presence == Presence::Object);
    let fewer_bits = theirs.data.len() == now.data.len()
        && theirs.data.iter().zip(&now.data).all(|(theirs, ours)| theirs & !ours == 0);
    let else_alike =
        Snapshot { stretches: now.snapshot.stretches.clone(), ..theirs.snapshot.clone() }
            == now.snapshot;
    fewer_pages && fewer_bits && else_alike
}

/// Mappings, with equal neighbors merged.
fn joined(areas: &[Area]) -> Vec<Area> {
    let mut joined: Vec<Area> = Vec::new();
    for area in areas {
        match joined.last_mut() {
            Some(last) if continues(last, area) => last.end = area.end,
            _ => joined.push(*area),
        }
    }
    joined
}

fn continues(low: &Area, high: &Area) -> bool {
    let alike = (low.letters, low.backing) == (high.letters, high.backing);
    let offset = low.offset + (low.end - low.start);
    low.end == high.start && alike && (low.backing == ANONYMOUS || offset == high.offset)
}
