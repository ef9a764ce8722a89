//! Markers: entries without a page that record something.

use core::sync::atomic::Ordering;

use crate::addr::VirtRange;
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Kind, Level, Marker};
use crate::platform::Platform;

use super::super::cursor::Cursor;
use super::super::edit::Edit;
use super::super::locking::Depth;
use super::super::run::{self, What};
use super::super::{EntryAt, TablePool};
use super::{Change, NoMemory, PageTable, rewrite};

/// Puts `marker` everywhere in `range`, whose entries are empty: into one entry of level 2 that the
/// range covers whole, with a table on deposit, or into one entry for each page. On failure the
/// front of the range is marked.
pub(in crate::table) fn mark<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    marker: Marker,
) -> Result<(), NoMemory> {
    let entry = P::Arch::encode_absent(Absent::Marker(marker));
    for_each_leaf_table(page_table, range, |cursor, part, pool| {
        let whole = part.len() == P::Arch::PMD.span();
        let EntryAt { node, entry: found, .. } = cursor.entry_at(part.start());
        if whole && node.level > Level::PTE && found.is_empty() {
            mark_whole_table(cursor, part, entry, pool)
        } else {
            mark_pages(cursor, part, entry, pool)
        }
    })
}

/// Removes all of `marker` from `range`. No TLB knows of markers.
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

/// Calls `visit` for each part of `range` that lies under one entry of level 2, with a cursor over
/// the part, until it fails for more than tables.
#[inline]
pub(super) fn for_each_leaf_table<'m, P: Platform>(
    page_table: &PageTable<'m, P>,
    range: VirtRange,
    mut visit: impl FnMut(
        &mut Cursor<'_, 'm, P>,
        VirtRange,
        &mut TablePool<'m, P>,
    ) -> Result<(), NoMemory>,
) -> Result<(), NoMemory> {
    let span = P::Arch::PTE.table_span();
    let mut at = range.start();
    while at < range.end() {
        let end = (at.0 & !(span - 1)).saturating_add(span).min(range.end().0);
        let part = VirtRange::raw(at.0, end);
        page_table.with_tables(|pool| {
            let mut cursor = page_table.cursor(part, Depth::Floor(Level::PTE));
            visit(&mut cursor, part, pool)
        })?;
        at = part.end();
    }
    Ok(())
}

/// Puts one marker into the empty entry of level 2 that covers `part`, with a table on deposit.
pub(super) fn mark_whole_table<'m, P: Platform>(
    cursor: &mut Cursor<'_, 'm, P>,
    part: VirtRange,
    entry: Entry,
    pool: &mut TablePool<'m, P>,
) -> Result<(), NoMemory> {
    let page_table = cursor.page_table;
    let table = cursor.table_at(part.start(), Level::PMD, pool)?;
    let deposit = pool.take(Level::PTE, &mut cursor.counts)?;
    let index = P::Arch::PMD.index_of(part.start());
    page_table.deposit_table(table, deposit);
    page_table.meta(table).note_guards();
    page_table.publish_huge(table, index, entry);
    cursor.counts.entries_written += 1;
    Ok(())
}

/// Puts a marker into each entry of `part`, which lies in one table of level 1.
fn mark_pages<'m, P: Platform>(
    cursor: &mut Cursor<'_, 'm, P>,
    part: VirtRange,
    entry: Entry,
    pool: &mut TablePool<'m, P>,
) -> Result<(), NoMemory> {
    let page_table = cursor.page_table;
    let table = cursor.table_at(part.start(), Level::PTE, pool)?;
    let first = P::Arch::PTE.index_of(part.start());
    let count = part.pages() as u32;
    let entries = page_table.slots(table);
    debug_assert_eq!(P::Arch::PTE.kind(run::load(entries, first)), Kind::Empty);
    // Before the first marker: detaching tests it under the table's lock.
    page_table.meta(table).note_guards();
    for slot in &entries[first.slots(count)] {
        slot.store(entry.0, Ordering::Relaxed);
    }
    cursor.counts.entries_written += u64::from(count);
    page_table.change_entry_count(table, count, 0);
    Ok(())
}
