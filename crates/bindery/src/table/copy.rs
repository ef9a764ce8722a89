//! What `fork` does to entries: both sides map the same pages from now on, and neither may write
//! until it has a page of its own.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::arch::{self, Arch, Attributes, Entry, Equal, absent};
use crate::frame::Owner;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::tlb::Gather;

use super::cursor::{Cursor, Supply, Whole};
use super::leaf::replace;
use super::lock::Depth;
use super::run::{Run, What};
use super::{OutOfMemory, PageTable, new_table};

/// Whether the child's writes are its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Copied {
    /// They are: neither side may write until it has a page of its own.
    Private,
    /// Both sides go on writing to the same pages.
    Shared,
}

/// What a child gets of one mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Copy {
    pub(crate) range: VirtRange,
    pub(crate) copied: Copied,
    /// To whom pages belong that are copied at once, and the offset of the first page there.
    pub(crate) group: Option<NonNull<AnonGroup>>,
    pub(crate) page_offset: u64,
}

impl<P: Platform> PageTable<'_, P> {
    /// Copies what the range maps into `child`, a tree that nobody else can reach yet, and
    /// write-protects both sides where writes are private. Pinned pages of this side are copied for
    /// the other, and stay as they are: who pinned them must go on seeing this side's writes. What
    /// is stale here afterwards is in the gather. The caller keeps faults out of the range. One pass
    /// over the runs; a folio is counted up once a run.
    ///
    /// On failure `child` has a part, and the pages of that part are write-protected here; the
    /// next write gets its permission back.
    pub(crate) fn copy_to(
        &self,
        child: &Self,
        what: &Copy,
        gather: &mut Gather,
    ) -> Result<(), OutOfMemory> {
        for chunk in self.chunks(what.range) {
            let mut source = self.cursor(chunk, Depth::Floor(1));
            let mut target = child.cursor(chunk, Depth::Floor(1));
            while let Some(run) = source.next_run(Equal::empty(), Whole::Enter)? {
                match run.what {
                    What::Empty | What::Table(_) => {}
                    What::Leaf(first) if is_pinned(&source, first, what) => {
                        copy_pages(&mut source, &mut target, &run, first, what)?;
                    }
                    What::Leaf(first) => {
                        copy_leaves(&mut source, &mut target, &run, first, what.copied, gather)?;
                    }
                    What::Absent(first) => copy_absent(&mut source, &mut target, &run, first)?,
                }
            }
        }
        Ok(())
    }
}

/// The child's table for the run, with a reserve for a huge leaf or its like.
fn target_table<P: Platform>(
    target: &mut Cursor<'_, '_, P>,
    run: &Run,
) -> Result<crate::addr::Frame, OutOfMemory> {
    let table = target.table_at(run.at, run.node.level, &mut Supply::Frames)?;
    if run.node.level > 1 {
        let tables = target.tables;
        let reserve = new_table(tables.memory, 1, &mut target.counts).ok_or(OutOfMemory)?;
        tables.push_reserve(table, reserve);
    }
    Ok(table)
}

fn copy_leaves<P: Platform>(
    source: &mut Cursor<'_, '_, P>,
    target: &mut Cursor<'_, '_, P>,
    run: &Run,
    first: Entry,
    copied: Copied,
    gather: &mut Gather,
) -> Result<(), OutOfMemory> {
    let table = target_table(target, run)?;
    let memory = source.tables.memory;
    let pages = run.pages::<P::Arch>();
    if let Err(error) = memory.share_frames(P::Arch::frame(first), pages, &mut source.counts) {
        drop_target_reserve(target, run, table);
        return Err(error);
    }
    let ours = source.tables.slots(run.node.table);
    let theirs = target.tables.slots(table);
    let mut narrowed = false;
    for index in run.index as usize..(run.index + run.count) as usize {
        let raw = Entry(ours[index].load(Ordering::Relaxed));
        let mut protected =
            if copied == Copied::Private { P::Arch::write_protect(raw) } else { raw };
        if protected != raw {
            let old = replace::<P::Arch>(&ours[index], raw, P::Arch::write_protect);
            protected = P::Arch::write_protect(old);
            narrowed = true;
        }
        // The child's area has no userfaultfd.
        let copy = protected.0 & !P::Arch::USERFAULT;
        theirs[index].store(copy, Ordering::Relaxed);
    }
    target.tables.change_live(table, run.count, 0);
    target.counts.entries_written += u64::from(run.count);
    if narrowed {
        source.counts.entries_written += u64::from(run.count);
        gather.stale(run.range::<P::Arch>(), run.node.level);
    }
    Ok(())
}

/// Whether somebody has pinned the folio of the run, a private one of this side alone.
fn is_pinned<P: Platform>(source: &Cursor<'_, '_, P>, first: Entry, what: &Copy) -> bool {
    let frames = &source.tables.memory.frames;
    let folio = frames.folio_of(P::Arch::frame(first));
    what.copied == Copied::Private
        && folio.is_some_and(|folio| frames.pins(folio) > 0 && frames.is_anonymous(folio))
}

/// Gives the child pages of its own, with what is in this side's.
fn copy_pages<P: Platform>(
    source: &mut Cursor<'_, '_, P>,
    target: &mut Cursor<'_, '_, P>,
    run: &Run,
    first: Entry,
    what: &Copy,
) -> Result<(), OutOfMemory> {
    let memory = source.tables.memory;
    let permissions = P::Arch::attributes(first).permissions;
    let old = P::Arch::frame(first);
    for page in 0..run.pages::<P::Arch>() {
        let at = run.at.offset(u64::from(page) * PAGE_SIZE);
        let table = target.table_at(at, 1, &mut Supply::Frames)?;
        let copy = memory.frames.new_folio(0).ok_or(OutOfMemory)?;
        memory.platform.copy(old.plus(page), copy.head, 1);
        target.counts.bytes_copied += PAGE_SIZE;
        let index = what.page_offset + ((at.0 - what.range.start().0) >> PAGE_SHIFT);
        memory.frames.set_owner(copy, what.group.map_or(Owner::Nobody, Owner::Group), index);
        memory.frames.first_map(copy, 1);
        let attributes = Attributes {
            permissions,
            accessed: true,
            dirty: true,
            soft_dirty: true,
            userfault: false,
        };
        let leaf = P::Arch::leaf(copy.head, 1, attributes);
        target.tables.fill(table, arch::index_of::<P::Arch>(at, 1), leaf, 1, &mut target.counts);
    }
    Ok(())
}

fn copy_absent<P: Platform>(
    source: &mut Cursor<'_, '_, P>,
    target: &mut Cursor<'_, '_, P>,
    run: &Run,
    first: Entry,
) -> Result<(), OutOfMemory> {
    if absent::strip_userfault::<P::Arch>(first).is_empty() {
        return Ok(());
    }
    let table = target_table(target, run)?;
    let memory = source.tables.memory;
    if let Some(absent::Absent::Hidden { frame, .. }) = absent::decode::<P::Arch>(first) {
        let pages = run.pages::<P::Arch>();
        if let Err(error) = memory.share_frames(frame, pages, &mut source.counts) {
            drop_target_reserve(target, run, table);
            return Err(error);
        }
    }
    let ours = source.tables.slots(run.node.table);
    let theirs = target.tables.slots(table);
    for index in run.index as usize..(run.index + run.count) as usize {
        let entry = absent::share::<P::Arch>(Entry(ours[index].load(Ordering::Relaxed)));
        ours[index].store(entry.0, Ordering::Relaxed);
        theirs[index].store(absent::strip_userfault::<P::Arch>(entry).0, Ordering::Relaxed);
    }
    source.counts.entries_written += u64::from(run.count);
    target.counts.entries_written += u64::from(run.count);
    target.tables.change_live(table, run.count, 0);
    Ok(())
}

fn drop_target_reserve<P: Platform>(
    target: &mut Cursor<'_, '_, P>,
    run: &Run,
    table: crate::addr::Frame,
) {
    if run.node.level > 1
        && let Some(reserve) = target.tables.pop_reserve(table)
    {
        super::free_table(target.tables.memory, reserve, &mut target.counts);
    }
}
