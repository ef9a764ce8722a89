//! Markers: entries without a page that record something.

use core::sync::atomic::Ordering;

use crate::addr::VirtRange;
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Kind, Level, Marker};
use crate::platform::Platform;

use super::super::edit::Edit;
use super::super::fill_span::FillSpan;
use super::super::run::{self, What};
use super::super::{EntryAt, TableEntry};
use super::{Change, NoMemory, PageTable, rewrite};

/// Puts `marker` everywhere in `range`, whose entries are empty: into one level-2 entry, with a
/// table on deposit, if the range covers that entry completely; otherwise into one entry per page.
/// On failure, the front of the range is marked.
pub(in crate::table) fn mark<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    marker: Marker,
) -> Result<(), NoMemory> {
    let entry = P::Arch::encode_absent(Absent::Marker(marker));
    for_each_leaf_table(page_table, range, |mut span, part| {
        let whole = part.len() == P::Arch::PMD.span();
        let EntryAt { node, entry: found, .. } = span.entry_at(part.start());
        if whole && node.level > Level::PTE && found.is_empty() {
            mark_whole_table(span, part, entry)
        } else {
            mark_pages(span, part, entry)
        }
    })
}

/// Removes every `marker` from `range`. No TLB holds markers.
pub(in crate::table) fn unmark<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    marker: Marker,
) -> Result<(), NoMemory> {
    let wanted = Some(Absent::Marker(marker));
    let unmarked = rewrite(edit, range, Equal::empty(), |run| match run.what {
        What::Absent(first) if P::Arch::decode_absent(first) == wanted => Change::Release,
        What::Absent(_) | What::Leaf(_) | What::Empty | What::Table(_) => Change::Keep,
    });
    unmarked.map(|_| ())
}

/// Calls `visit` for each part of `range` under one level-2 entry, with the part locked, until
/// `visit` fails for a reason other than a lack of tables.
#[inline]
pub(super) fn for_each_leaf_table<'m, P: Platform>(
    page_table: &PageTable<'m, P>,
    range: VirtRange,
    mut visit: impl FnMut(FillSpan<'_, '_, 'm, P>, VirtRange) -> Result<(), NoMemory>,
) -> Result<(), NoMemory> {
    let span = P::Arch::PTE.table_span();
    let mut at = range.start();
    while at < range.end() {
        let end = (at.0 & !(span - 1)).saturating_add(span).min(range.end().0);
        let part = VirtRange::raw(at.0, end);
        page_table.with_tables(part, |span| visit(span, part))?;
        at = part.end();
    }
    Ok(())
}

/// Puts one marker into the empty level-2 entry that covers `part`, with a table on deposit.
pub(super) fn mark_whole_table<P: Platform>(
    mut span: FillSpan<'_, '_, '_, P>,
    part: VirtRange,
    entry: Entry,
) -> Result<(), NoMemory> {
    let page_table = span.page_table;
    let table = span.table_at(part.start(), Level::PMD)?;
    let deposit = span.take_deposit()?;
    let index = P::Arch::PMD.index_of(part.start());
    page_table.deposit_table(table, deposit);
    page_table.meta(table).note_guards();
    page_table.publish_huge(TableEntry { table, index }, entry);
    span.counts.entries_written += 1;
    Ok(())
}

/// Puts a marker into each entry of `part`, which lies in one level-1 table.
fn mark_pages<P: Platform>(
    mut span: FillSpan<'_, '_, '_, P>,
    part: VirtRange,
    entry: Entry,
) -> Result<(), NoMemory> {
    let page_table = span.page_table;
    let table = span.table_at(part.start(), Level::PTE)?;
    let first = P::Arch::PTE.index_of(part.start());
    let count = part.pages() as u32;
    let entries = page_table.entries(table);
    debug_assert_eq!(P::Arch::PTE.kind(run::load(entries, first)), Kind::Empty);
    // Recorded before the first marker, because detaching tests for guards under the table's lock.
    page_table.meta(table).note_guards();
    for word in &entries[first.positions(count)] {
        word.store(entry.0, Ordering::Relaxed);
    }
    span.counts.entries_written += u64::from(count);
    page_table.change_entry_count(table, count, 0);
    Ok(())
}
