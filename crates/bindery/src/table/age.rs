//! Changes of the bits that record use: accessed, dirty, soft-dirty, and the permission to write
//! that goes with watching for the next store.

use core::sync::atomic::Ordering;

use crate::addr::VirtRange;
use crate::arch::{
    self, Absent, AbsentFormat, Arch, Attributes, Entry, EntryIndex, Equal, Level, Marker, absent,
};
use crate::frame::Folio;
use crate::platform::Platform;
use crate::tlb::Gather;

use super::cursor::{Chunks, Cursor};
use super::locking::Depth;
use super::run::{Run, Slots, What};
use super::zap::clear_absent;
use super::{NoMemory, PageTable};

/// What leaves shall forget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Forget {
    /// That they were used (`MADV_COLD`).
    Accessed,
    /// That they were used and written, and what is in swap altogether (`MADV_FREE`).
    Use,
    /// That they were written since, and that they may be (`clear_refs`): the next store faults.
    SoftDirty,
    /// That they were written, and that they may be: before the content is saved.
    Dirty,
}

impl Forget {
    fn of(self, old: Attributes) -> Attributes {
        let mut new = old;
        match self {
            Self::Accessed => new.accessed = false,
            Self::Use => (new.accessed, new.dirty) = (false, false),
            Self::SoftDirty => {
                new.soft_dirty = false;
                new.permissions -= arch::Permissions::WRITE;
            }
            Self::Dirty => {
                new.dirty = false;
                new.permissions -= arch::Permissions::WRITE;
            }
        }
        new
    }
}

impl<P: Platform> PageTable<'_, P> {
    /// Lets the leaves of `range` forget. `concerned` is asked about each run of one folio, with
    /// the number of its pages, and says whether they shall. What is stale afterwards is in the
    /// gather. Returns how many leaves had something to forget.
    pub(crate) fn forget(
        &self,
        range: VirtRange,
        forget: Forget,
        gather: &mut Gather,
        mut concerned: impl FnMut(Option<Folio>, u32) -> bool,
    ) -> Result<u64, NoMemory> {
        let mut changed = 0;
        let mut chunks = Chunks::of(range);
        while let Some(mut cursor) = chunks.next(self, Depth::Floor(Level::PTE), Some(&*gather)) {
            while let Some(run) = cursor.next_run(Equal::empty())? {
                match run.what {
                    What::Leaf(first) => {
                        let folio = self.memory.frames.folio_of(P::Arch::frame(first));
                        if concerned(folio, run.pages()) {
                            changed += forget_leaves(&mut cursor, &run, forget, gather);
                        }
                    }
                    What::Absent(first) if forget == Forget::SoftDirty => {
                        forget_absent(&mut cursor, &run, first);
                    }
                    What::Absent(first) if forget == Forget::Use && vanishes::<P>(first) => {
                        clear_absent(&mut cursor, &run, first);
                    }
                    What::Empty | What::Table(_) | What::Absent(_) => {}
                }
            }
        }
        Ok(changed)
    }
}

/// Lets the leaves of a run forget. Returns how many had something to forget.
pub(super) fn forget_leaves<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    forget: Forget,
    gather: &mut Gather,
) -> u64 {
    let level = run.node.level;
    match forget {
        // The commonest, of every folio that reclaim looks at: one bit, wherever the leaf is.
        Forget::Accessed => change_leaves(cursor, run, gather, |raw, _| P::Arch::mark_unused(raw)),
        Forget::Use | Forget::SoftDirty | Forget::Dirty => {
            change_leaves(cursor, run, gather, |raw, index| {
                let contig = level == Level::PTE && P::Arch::is_contig(raw);
                let entry =
                    if level == Level::PTE { P::Arch::clear_contig(raw, index) } else { raw };
                let attributes = forget.of(P::Arch::attributes(entry));
                let leaf = P::Arch::page_entry(P::Arch::frame(entry), level, attributes);
                if contig { P::Arch::set_contig(leaf, index) } else { leaf }
            })
        }
    }
}

/// Changes the leaves of a run, as they are in memory. Returns how many have changed.
#[inline(always)]
fn change_leaves<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    gather: &mut Gather,
    change: impl Fn(Entry, EntryIndex) -> Entry,
) -> u64 {
    let page_table = cursor.page_table;
    let mut changed = 0;
    for (slot, index) in page_table.slots_of(run).iter().zip(run.index.stretch(run.count)) {
        let raw = Entry(slot.load(Ordering::Relaxed));
        if change(raw, index) == raw {
            continue;
        }
        if changed == 0 {
            page_table.mark_pending(run.node.table, gather, &mut cursor.counts);
        }
        P::Arch::replace_entry(slot, raw, |raw| change(raw, index));
        changed += 1;
    }
    cursor.counts.entries_read += u64::from(run.count);
    cursor.counts.entries_written += changed;
    if changed > 0 {
        gather.stale(run.range(), run.node.level);
    }
    changed
}

/// Lets the pages of the run forget that they were used, be they leaves or those of a mapping without
/// access.
pub(super) fn forget_use<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    gather: &mut Gather,
) {
    if matches!(run.what, What::Leaf(_)) {
        forget_leaves(cursor, run, Forget::Accessed, gather);
        return;
    }
    // Only software reads them.
    for slot in cursor.page_table.slots_of(run) {
        let entry = Entry(slot.load(Ordering::Relaxed));
        if P::Arch::is_prot_none(entry) {
            slot.store(entry.0 & !absent::ACCESSED, Ordering::Relaxed);
        }
    }
    cursor.counts.entries_written += u64::from(run.count);
}

/// Whether the entry names content that is nowhere in memory: to bring it in would be more work than
/// a new page is.
fn vanishes<P: Platform>(entry: Entry) -> bool {
    match P::Arch::decode_absent(entry) {
        Some(Absent::Swap { .. } | Absent::Marker(Marker::Poison)) => true,
        Some(
            Absent::Marker(Marker::UserfaultWriteProtect | Marker::Guard) | Absent::ProtNone { .. },
        )
        | None => false,
    }
}

fn forget_absent<P: Platform>(cursor: &mut Cursor<'_, '_, P>, run: &Run<P::Arch>, first: Entry) {
    if matches!(P::Arch::decode_absent(first), Some(Absent::Marker(_)) | None) {
        return;
    }
    let slots = cursor.page_table.slots(run.node.table);
    for slot in &slots[run.index.slots(run.count)] {
        slot.fetch_and(!absent::SOFT_DIRTY, Ordering::Relaxed);
    }
    cursor.counts.entries_written += u64::from(run.count);
}
