//! Write-protection by a userfaultfd: a bit of each entry, which allows no writes then, and markers
//! where nothing stands.
//!
//! The bit lives in leaves, `PROT_NONE` entries and swap entries, and goes where they go. Whoever
//! makes leaves writable passes over those that have it (`protect`).

use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Level, Marker};
use crate::platform::Platform;
use crate::tlb::Gather;

use super::cursor::{Chunks, Cursor};
use super::dropping::release_absent;
use super::locking::Depth;
use super::marker::mark_slot;
use super::run::{self, Run, Slots, What};
use super::zap::{clear_absent, suspend};
use super::{EntryAt, NoMemory, PageTable, TablePool};

/// Whether a run has the bit, or is one of markers.
pub(super) fn is_protected<A: Arch>(run: &Run<A>) -> bool {
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

impl<P: Platform> PageTable<'_, P> {
    /// Write-protects what stands in `range`. What is stale afterwards is in the gather. The caller
    /// keeps faults out of the range.
    pub(crate) fn userfault_protect(
        &self,
        range: VirtRange,
        gather: &mut Gather,
    ) -> Result<(), NoMemory> {
        let mut chunks = Chunks::of(range);
        while let Some(mut cursor) = chunks.next(self, Depth::Floor(Level::PTE), Some(&*gather)) {
            while let Some(run) = cursor.next_run(Equal::WRITABLE)? {
                if is_protected(&run) {
                    continue;
                }
                match run.what {
                    What::Leaf(_) => protect_leaves(&mut cursor, &run, gather),
                    What::Absent(_) => {
                        each_absent(&mut cursor, &run, P::Arch::set_absent_userfault)
                    }
                    What::Empty | What::Table(_) => {}
                }
            }
        }
        Ok(())
    }

    /// Takes the protection and its markers away from what stands in `range`. Leaves allow no
    /// more than before. The caller keeps faults out of the range.
    pub(crate) fn userfault_lift(&self, range: VirtRange) -> Result<(), NoMemory> {
        let mut chunks = Chunks::of(range);
        while let Some(mut cursor) = chunks.next(self, Depth::Floor(Level::PTE), None) {
            while let Some(run) = cursor.next_run(Equal::empty())? {
                if !is_protected(&run) {
                    continue;
                }
                match run.what {
                    What::Leaf(_) => lift_leaves(&mut cursor, &run),
                    What::Absent(first) if P::Arch::strip_absent_userfault(first).is_empty() => {
                        clear_absent(&mut cursor, &run, first);
                    }
                    What::Absent(_) => {
                        each_absent(&mut cursor, &run, P::Arch::strip_absent_userfault);
                    }
                    What::Empty | What::Table(_) => {}
                }
            }
        }
        Ok(())
    }

    /// Puts markers wherever nothing stands in `range`. On failure what lies before `reached` has
    /// them, and nothing behind it.
    pub(crate) fn userfault_mark(
        &self,
        range: VirtRange,
        reached: &mut VirtAddr,
    ) -> Result<(), NoMemory> {
        let span = P::Arch::PTE.table_span();
        let mut at = range.start();
        while at < range.end() {
            let end = (at.0 & !(span - 1)).saturating_add(span).min(range.end().0);
            let part = VirtRange::raw(at.0, end);
            self.with_tables(|pool| {
                let mut cursor = self.cursor(part, Depth::Floor(Level::PTE));
                mark_vacant(&mut cursor, part, pool)
            })?;
            at = part.end();
            *reached = at;
        }
        Ok(())
    }
}

/// Drops a run of protected pages, and leaves markers in their places.
pub(super) fn leave_markers<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    gather: &mut Gather,
) {
    let page_table = cursor.page_table;
    let slots = page_table.slots_of(run);
    let marker = P::Arch::encode_absent(Absent::Marker(Marker::UserfaultWriteProtect));
    match run.what {
        What::Leaf(first) => {
            suspend(cursor, run, gather);
            page_table.flush(gather, &mut cursor.counts);
            // After the flush: the MMU may have noted a write until then.
            let dirty = slots.iter().any(|slot| {
                let entry = Entry(slot.load(Ordering::Relaxed) | P::Arch::PRESENT);
                P::Arch::attributes(entry).dirty
            });
            let pages = run.pages();
            let frame = P::Arch::frame(first);
            page_table.memory.unmap_frames(frame, pages, dirty, &mut cursor.counts);
        }
        What::Absent(first) => {
            release_absent(page_table.memory, run.node.level, first, run.count, &mut cursor.counts);
        }
        What::Empty | What::Table(_) => return,
    }
    for slot in slots {
        slot.store(marker.0, Ordering::Relaxed);
    }
    cursor.counts.entries_written += u64::from(run.count);
}

/// Takes the permission to write, and sets the bit. In place: until the flush, either answer is
/// right, and the MMU does not look at the bit.
fn protect_leaves<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    gather: &mut Gather,
) {
    let page_table = cursor.page_table;
    page_table.mark_pending(run.node.table, gather, &mut cursor.counts);
    for slot in page_table.slots_of(run) {
        let entry = Entry(slot.load(Ordering::Relaxed));
        P::Arch::replace_entry(slot, entry, |entry| {
            Entry(P::Arch::write_protect(entry).0 | P::Arch::USERFAULT)
        });
    }
    cursor.counts.entries_read += u64::from(run.count);
    cursor.counts.entries_written += u64::from(run.count);
    gather.stale(run.range(), run.node.level);
}

fn lift_leaves<P: Platform>(cursor: &mut Cursor<'_, '_, P>, run: &Run<P::Arch>) {
    for slot in cursor.page_table.slots_of(run) {
        let entry = Entry(slot.load(Ordering::Relaxed));
        P::Arch::replace_entry(slot, entry, |entry| Entry(entry.0 & !P::Arch::USERFAULT));
    }
    cursor.counts.entries_read += u64::from(run.count);
    cursor.counts.entries_written += u64::from(run.count);
}

fn each_absent<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    change: impl Fn(Entry) -> Entry,
) {
    for slot in cursor.page_table.slots_of(run) {
        let entry = Entry(slot.load(Ordering::Relaxed));
        slot.store(change(entry).0, Ordering::Relaxed);
    }
    cursor.counts.entries_written += u64::from(run.count);
}

/// Marks what is empty in `part`, which lies under one entry of level 2.
fn mark_vacant<'m, P: Platform>(
    cursor: &mut Cursor<'_, 'm, P>,
    part: VirtRange,
    pool: &mut TablePool<'m, P>,
) -> Result<(), NoMemory> {
    let page_table = cursor.page_table;
    let entry = P::Arch::encode_absent(Absent::Marker(Marker::UserfaultWriteProtect));
    let EntryAt { node, entry: found, .. } = cursor.entry_at(part.start());
    if node.level > Level::PTE && !found.is_empty() {
        // It stands for all of the part.
        return Ok(());
    }
    if node.level > Level::PTE && part.len() == P::Arch::PTE.table_span() {
        return mark_slot(cursor, part, entry, pool);
    }
    let table = cursor.table_at(part.start(), Level::PTE, pool)?;
    let first = P::Arch::PTE.index_of(part.start());
    let slots = page_table.slots(table);
    let mut marked = 0;
    for index in first.stretch(part.pages() as u32) {
        if run::load(slots, index).is_empty() {
            slots[index.slot()].store(entry.0, Ordering::Relaxed);
            marked += 1;
        }
    }
    cursor.counts.entries_written += u64::from(marked);
    page_table.change_entry_count(table, marked, 0);
    Ok(())
}
