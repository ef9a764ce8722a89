//! Write-protection by a userfaultfd: a bit in each entry, which forbids stores, and markers where
//! the range is empty.
//!
//! Leaves, `PROT_NONE` entries and swap entries have the bit, and retain it when one kind becomes
//! another. An operation that makes leaves writable skips leaves with the bit ([`super::protect`]).

use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Level, Marker, absent};
use crate::platform::Platform;

use super::super::EntryAt;
use super::super::edit::Edit;
use super::super::fill_span::FillSpan;
use super::super::run::{self, Run, What};
use super::marker::{for_each_leaf_table, mark_whole_table};
use super::protect::{EntryPolicy, agreement, decide};
use super::{Change, NoMemory, PageTable, carry_out, rewrite, rewrite_twice};

/// Whether a run has the bit, or consists of the markers of the protection.
pub(in crate::table) fn is_protected<A: Arch>(run: &Run<A>) -> bool {
    match run.what {
        What::Leaf(first) => A::attributes(first).userfault,
        What::Absent(first) => match A::decode_absent(first) {
            Some(Absent::Swap { userfault, .. } | Absent::ProtNone { userfault, .. }) => userfault,
            Some(Absent::Marker(marker)) => marker == Marker::UserfaultWriteProtect,
            None => false,
        },
        What::Empty | What::Table(_) => false,
    }
}

/// The change for a run that gets the bit. Markers of other kinds have no such bit.
fn protect<A: Arch>(run: &Run<A>) -> Change {
    match run.what {
        _ if is_protected(run) => Change::Keep,
        What::Leaf(_) => Change::WriteProtect,
        What::Absent(first) => match A::decode_absent(first) {
            Some(Absent::Swap { .. } | Absent::ProtNone { .. }) => {
                Change::AbsentBits { cleared: 0, set: absent::USERFAULT }
            }
            Some(Absent::Marker(_)) | None => Change::Keep,
        },
        What::Empty | What::Table(_) => Change::Keep,
    }
}

/// The change for a run that loses the bit.
fn lift<A: Arch>(run: &Run<A>) -> Change {
    match run.what {
        _ if !is_protected(run) => Change::Keep,
        What::Leaf(_) => Change::LiftWriteProtect,
        What::Absent(first) if A::strip_absent_userfault(first).is_empty() => Change::Release,
        What::Absent(_) => Change::AbsentBits { cleared: absent::USERFAULT, set: 0 },
        What::Empty | What::Table(_) => Change::Keep,
    }
}

/// Write-protects the pages of `range`. Stale ranges enter the gather. The caller excludes faults
/// from the range.
pub(in crate::table) fn userfault_protect<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
) -> Result<(), NoMemory> {
    rewrite(edit, range, Equal::WRITABLE, |run| protect(run)).map(|_| ())
}

/// Removes the protection from the pages of `range`, including its markers. Leaves allow no more
/// than before. The caller excludes faults from the range.
pub(in crate::table) fn userfault_lift<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
) -> Result<(), NoMemory> {
    rewrite(edit, range, Equal::empty(), |run| lift(run)).map(|_| ())
}

/// As [`userfault_lift`], and sets the pages to the permissions of `policy`, as
/// [`super::protect::protect`] does, in the same pass.
pub(in crate::table) fn userfault_lift_to<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    policy: &EntryPolicy,
) -> Result<(), NoMemory> {
    let page_table = edit.table();
    let rewritten = rewrite_twice(edit, range, agreement(policy), |span, run| {
        let lifted = lift(run);
        if lifted == Change::Release {
            return lifted;
        }
        if lifted != Change::Keep {
            carry_out(span, run, lifted);
            run.what = without_bit::<P::Arch>(run.what);
        }
        decide(page_table, run, policy)
    });
    rewritten.map(|_| ())
}

/// The contents of a run that has lost the bit.
fn without_bit<A: Arch>(what: What<'_>) -> What<'_> {
    match what {
        What::Leaf(first) => What::Leaf(Entry(first.0 & !A::USERFAULT)),
        What::Absent(first) => What::Absent(A::strip_absent_userfault(first)),
        What::Empty | What::Table(_) => what,
    }
}

/// Puts markers into the empty entries of `range`. On failure, all entries before `reached` are
/// marked, and none after it.
pub(in crate::table) fn userfault_mark<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    reached: &mut VirtAddr,
) -> Result<(), NoMemory> {
    for_each_leaf_table(page_table, range, |span, part| {
        mark_vacant(span, part)?;
        *reached = part.end();
        Ok(())
    })
}

/// Puts markers into the empty entries of `part`, which is under one level-2 entry.
fn mark_vacant<P: Platform>(
    mut span: FillSpan<'_, '_, '_, P>,
    part: VirtRange,
) -> Result<(), NoMemory> {
    let page_table = span.page_table;
    let entry = P::Arch::encode_absent(Absent::Marker(Marker::UserfaultWriteProtect));
    let EntryAt { node, entry: found, .. } = span.entry_at(part.start());
    if node.level > Level::PTE && !found.is_empty() {
        // One entry covers the whole part.
        return Ok(());
    }
    if node.level > Level::PTE && part.len() == P::Arch::PTE.table_span() {
        return mark_whole_table(span, part, entry);
    }
    let table = span.table_at(part.start(), Level::PTE)?;
    let first = P::Arch::PTE.index_of(part.start());
    let entries = page_table.entries(table);
    let mut marked = 0;
    for index in first.stretch(part.pages() as u32) {
        if run::load(entries, index).is_empty() {
            entries[index.position()].store(entry.0, Ordering::Relaxed);
            marked += 1;
        }
    }
    span.counts.entries_written += u64::from(marked);
    page_table.change_entry_count(table, marked, 0);
    Ok(())
}
