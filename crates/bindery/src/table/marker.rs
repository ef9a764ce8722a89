//! Markers: entries without a page that record something.

use core::sync::atomic::Ordering;

use crate::addr::VirtRange;
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Kind, Level, Marker};
use crate::platform::Platform;

use super::cursor::{Chunks, Cursor};
use super::locking::Depth;
use super::run::{self, What};
use super::zap::clear_absent;
use super::{EntryAt, NoMemory, PageTable, TablePool};

impl<P: Platform> PageTable<'_, P> {
    /// Puts `marker` everywhere in `range`, whose entries are empty. One entry for each slot of
    /// level 2 that is covered whole, with a table on deposit, one for each page else. On failure
    /// what lies before is marked.
    pub(crate) fn mark(&self, range: VirtRange, marker: Marker) -> Result<(), NoMemory> {
        let entry = P::Arch::encode_absent(Absent::Marker(marker));
        let table = P::Arch::PMD.span();
        let mut at = range.start();
        while at < range.end() {
            let end = (at.0 & !(table - 1)).saturating_add(table).min(range.end().0);
            let part = VirtRange::raw(at.0, end);
            self.with_tables(|pool| {
                let mut cursor = self.cursor(part, Depth::Floor(Level::PTE));
                let whole = part.len() == table;
                let EntryAt { node, entry: found, .. } = cursor.entry_at(part.start());
                if whole && node.level > Level::PTE && found.is_empty() {
                    mark_slot(&mut cursor, part, entry, pool)
                } else {
                    mark_pages(&mut cursor, part, entry, pool)
                }
            })?;
            at = part.end();
        }
        Ok(())
    }

    /// Takes all of `marker` out of `range`.
    pub(crate) fn unmark(&self, range: VirtRange, marker: Marker) -> Result<(), NoMemory> {
        let wanted = Some(Absent::Marker(marker));
        let mut chunks = Chunks::of(range);
        while let Some(mut cursor) = chunks.next(self, Depth::Floor(Level::PTE), None) {
            while let Some(run) = cursor.next_run(Equal::empty())? {
                if let What::Absent(first) = run.what
                    && P::Arch::decode_absent(first) == wanted
                {
                    clear_absent(&mut cursor, &run, first);
                }
            }
        }
        Ok(())
    }
}

pub(super) fn mark_slot<'m, P: Platform>(
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
    let slots = page_table.slots(table);
    debug_assert_eq!(P::Arch::PTE.kind(run::load(slots, first)), Kind::Empty);
    // Before the first marker: who detaches tables asks for it under the table's lock.
    page_table.meta(table).note_guards();
    for slot in &slots[first.slots(count)] {
        slot.store(entry.0, Ordering::Relaxed);
    }
    cursor.counts.entries_written += u64::from(count);
    page_table.change_entry_count(table, count, 0);
    Ok(())
}
