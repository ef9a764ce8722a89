//! What `fork` does to entries: both sides map the same pages from now on, and neither may write
//! until it has a page of its own.

use core::sync::atomic::Ordering;

use crate::addr::VirtRange;
use crate::arch::{Arch, Entry, Equal, absent};
use crate::platform::Platform;
use crate::tlb::Gather;

use super::cursor::{Cursor, Supply, Whole};
use super::leaf::replace;
use super::lock::Depth;
use super::run::{Run, What};
use super::{OutOfMemory, PageTable, new_table};

impl<P: Platform> PageTable<'_, P> {
    /// Copies what `range` maps into `child`, a tree that nobody else can reach yet, and
    /// write-protects both sides. What is stale here afterwards is in the gather. The caller keeps
    /// faults out of the range. One pass over the runs; a folio is counted up once a run.
    ///
    /// On failure `child` has a part, and the pages of that part are write-protected here; the
    /// next write gets its permission back.
    pub(crate) fn copy_to(
        &self,
        child: &Self,
        range: VirtRange,
        gather: &mut Gather,
    ) -> Result<(), OutOfMemory> {
        for chunk in self.chunks(range) {
            let mut source = self.cursor(chunk, Depth::Floor(1));
            let mut target = child.cursor(chunk, Depth::Floor(1));
            while let Some(run) = source.next_run(Equal::empty(), Whole::Enter)? {
                match run.what {
                    What::Empty | What::Table(_) => {}
                    What::Leaf(first) => {
                        copy_leaves(&mut source, &mut target, &run, first, gather)?
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
        let mut protected = P::Arch::write_protect(raw);
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
