//! What `fork` does to entries: both sides map the same pages from now on, and neither may write
//! until it has a page of its own.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Absent, Arch, Attributes, Entry, Equal, Permissions, absent};
use crate::frame::{Folio, Owner};
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::tlb::Gather;

use super::cursor::{Cursor, Whole};
use super::leaf::replace;
use super::lock::Depth;
use super::run::{Run, What};
use super::{OutOfMemory, PageTable, TablePool};

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

impl<'m, P: Platform> PageTable<'m, P> {
    /// Copies what the range maps into `child`, a tree that nobody else can reach yet, and
    /// write-protects both sides where writes are private. Pinned pages of this side, hidden ones
    /// too, are copied for the other, and stay as they are: who pinned them must go on seeing this
    /// side's writes. What is stale here afterwards is in the gather. The caller keeps faults out of
    /// the range. One pass over the runs; a folio is counted up once a run.
    ///
    /// On failure `child` has a part, and the pages of that part are write-protected here; the
    /// next write gets its permission back.
    pub(crate) fn copy_to(
        &self,
        child: &Self,
        what: &Copy,
        gather: &mut Gather,
    ) -> Result<(), OutOfMemory> {
        let mut supplies = Supplies { tables: TablePool::new(self.memory), page: None };
        let mut chunks = self.chunks_beside(what.range);
        let mut result = Ok(());
        while result.is_ok()
            && let Some(chunk) = chunks.next(self, Some(&*gather))
        {
            result = self.copy_chunk(child, chunk, what, gather, &mut supplies);
        }
        supplies.give_back(self);
        result
    }

    /// Copies a chunk. Where there is no memory at once, lets the locks of both sides go, waits for
    /// it, and goes on where it stopped: neither side has changed meanwhile, since the parent's VMAs
    /// are held for writing and nobody else knows the child.
    fn copy_chunk(
        &self,
        child: &Self,
        chunk: VirtRange,
        what: &Copy,
        gather: &mut Gather,
        supplies: &mut Supplies<'m, P>,
    ) -> Result<(), OutOfMemory> {
        let mut left = chunk;
        loop {
            let stopped = {
                let own = Some(&*gather);
                let mut source = self.cursor_beside(left, Depth::Floor(1), own);
                let mut target = child.cursor(left, Depth::Floor(1));
                copy_locked(&mut source, &mut target, what, gather, supplies)
            };
            match stopped {
                Ok(()) => return Ok(()),
                Err(Stop::Refused) => return Err(OutOfMemory),
                Err(Stop::Short(at)) => {
                    supplies.refill(self.memory)?;
                    left = VirtRange::raw(at.0, chunk.end().0);
                }
            }
        }
    }
}

/// What a copy takes while locks are held.
struct Supplies<'m, P: Platform> {
    tables: TablePool<'m, P>,
    /// For the copy of a pinned page.
    page: Option<Folio>,
}

impl<'m, P: Platform> Supplies<'m, P> {
    fn refill(&mut self, memory: &'m Memory<P>) -> Result<(), OutOfMemory> {
        self.tables.refill()?;
        if self.page.is_none() {
            memory.may_wait();
            self.page = Some(memory.frames.new_folio(0).ok_or(OutOfMemory)?);
        }
        Ok(())
    }

    fn page(&mut self, memory: &Memory<P>) -> Option<Folio> {
        self.page.take().or_else(|| memory.frames.new_folio(0))
    }

    fn give_back(mut self, tables: &PageTable<'m, P>) {
        if let Some(page) = self.page {
            tables.memory.frames.discard(&tables.memory.platform, page);
        }
        self.tables.give_back();
        tables.stats.add(&self.tables.counts);
    }
}

/// Why a copy stops before its end.
enum Stop {
    /// There was no memory at once for what comes from this address on.
    Short(VirtAddr),
    /// A folio cannot be mapped once more, or a huge leaf has no reserve.
    Refused,
}

fn copy_locked<'m, P: Platform>(
    source: &mut Cursor<'_, 'm, P>,
    target: &mut Cursor<'_, 'm, P>,
    what: &Copy,
    gather: &mut Gather,
    supplies: &mut Supplies<'m, P>,
) -> Result<(), Stop> {
    while let Some(run) =
        source.next_run(Equal::empty(), Whole::Enter).map_err(|_| Stop::Refused)?
    {
        match run.what {
            What::Empty | What::Table(_) => {}
            What::Leaf(first) if is_pinned(source, P::Arch::frame(first), what) => {
                let permissions = P::Arch::attributes(first).permissions;
                let page = |frame| shown::<P::Arch>(frame, permissions);
                copy_pages(source, target, &run, P::Arch::frame(first), page, what, supplies)?;
            }
            What::Leaf(first) => {
                let table = target_table(target, &run, supplies)?;
                copy_leaves(source, target, &run, (table, first), what.copied, gather)?;
            }
            What::Absent(first) => match absent::decode::<P::Arch>(first) {
                Some(Absent::Hidden { frame, .. }) if is_pinned(source, frame, what) => {
                    let page = hidden::<P::Arch>;
                    copy_pages(source, target, &run, frame, page, what, supplies)?;
                }
                _ if absent::strip_userfault::<P::Arch>(first).is_empty() => {}
                _ => {
                    let table = target_table(target, &run, supplies)?;
                    copy_absent(source, target, &run, (table, first))?;
                }
            },
        }
    }
    Ok(())
}

/// The child's table for the run, with a reserve for a huge leaf or its like.
fn target_table<'m, P: Platform>(
    target: &mut Cursor<'_, 'm, P>,
    run: &Run,
    supplies: &mut Supplies<'m, P>,
) -> Result<Frame, Stop> {
    let short = |_| Stop::Short(run.at);
    let table = target.table_at(run.at, run.node.level, &mut supplies.tables).map_err(short)?;
    if run.node.level > 1 {
        let reserve = supplies.tables.take(1, &mut target.counts).map_err(short)?;
        target.tables.push_reserve(table, reserve);
    }
    Ok(table)
}

fn copy_leaves<P: Platform>(
    source: &mut Cursor<'_, '_, P>,
    target: &mut Cursor<'_, '_, P>,
    run: &Run,
    (table, first): (Frame, Entry),
    copied: Copied,
    gather: &mut Gather,
) -> Result<(), Stop> {
    let memory = source.tables.memory;
    let pages = run.pages::<P::Arch>();
    if memory.share_frames(P::Arch::frame(first), pages, &mut source.counts).is_err() {
        drop_target_reserve(target, run, table);
        return Err(Stop::Refused);
    }
    let ours = source.tables.slots(run.node.table);
    let theirs = target.tables.slots(table);
    let mut narrowed = false;
    for index in run.index as usize..(run.index + run.count) as usize {
        let raw = Entry(ours[index].load(Ordering::Relaxed));
        let mut protected =
            if copied == Copied::Private { P::Arch::write_protect(raw) } else { raw };
        if protected != raw {
            source.tables.mark_pending(run.node.table, gather, &mut source.counts);
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

/// Whether somebody has pinned the folio of a run that begins with `first`, a private one of this
/// side alone.
fn is_pinned<P: Platform>(source: &Cursor<'_, '_, P>, first: Frame, what: &Copy) -> bool {
    let frames = &source.tables.memory.frames;
    let folio = frames.folio_of(first);
    what.copied == Copied::Private
        && folio.is_some_and(|folio| frames.pins(folio) > 0 && frames.is_anonymous(folio))
}

/// The child's entry for a page of its own.
fn shown<A: Arch>(frame: Frame, permissions: Permissions) -> Entry {
    let attributes =
        Attributes { permissions, accessed: true, dirty: true, soft_dirty: true, userfault: false };
    A::leaf(frame, 1, attributes)
}

/// The child's entry for a page of its own, where the mapping allows nothing.
fn hidden<A: Arch>(frame: Frame) -> Entry {
    absent::encode::<A>(Absent::Hidden {
        frame,
        accessed: true,
        dirty: true,
        soft_dirty: true,
        userfault: false,
    })
}

/// Gives the child pages of its own, with what is in this side's from `old` on; `entry` makes the
/// child's entries.
fn copy_pages<'m, P: Platform>(
    source: &mut Cursor<'_, 'm, P>,
    target: &mut Cursor<'_, 'm, P>,
    run: &Run,
    old: Frame,
    entry: impl Fn(Frame) -> Entry,
    what: &Copy,
    supplies: &mut Supplies<'m, P>,
) -> Result<(), Stop> {
    let memory = source.tables.memory;
    for page in 0..run.pages::<P::Arch>() {
        let at = run.at.offset(u64::from(page) * PAGE_SIZE);
        let short = Stop::Short(at);
        let Ok(table) = target.table_at(at, 1, &mut supplies.tables) else { return Err(short) };
        let Some(copy) = supplies.page(memory) else { return Err(short) };
        memory.platform.copy(old.plus(page), copy.head, 1);
        target.counts.bytes_copied += PAGE_SIZE;
        let index = what.page_offset + ((at.0 - what.range.start().0) >> PAGE_SHIFT);
        memory.frames.set_fresh_owner(copy, what.group.map_or(Owner::Nobody, Owner::Group), index);
        memory.frames.first_map(copy, 1);
        let index = arch::index_of::<P::Arch>(at, 1);
        target.tables.fill(table, index, entry(copy.head), 1, &mut target.counts);
    }
    Ok(())
}

fn copy_absent<P: Platform>(
    source: &mut Cursor<'_, '_, P>,
    target: &mut Cursor<'_, '_, P>,
    run: &Run,
    (table, first): (Frame, Entry),
) -> Result<(), Stop> {
    let memory = source.tables.memory;
    if let Some(Absent::Hidden { frame, .. }) = absent::decode::<P::Arch>(first) {
        let pages = run.pages::<P::Arch>();
        if memory.share_frames(frame, pages, &mut source.counts).is_err() {
            drop_target_reserve(target, run, table);
            return Err(Stop::Refused);
        }
    }
    source.tables.inherit_guards(run.node.table, table);
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

fn drop_target_reserve<P: Platform>(target: &mut Cursor<'_, '_, P>, run: &Run, table: Frame) {
    if run.node.level > 1
        && let Some(reserve) = target.tables.pop_reserve(table)
    {
        super::free_table(target.tables.memory, reserve, &mut target.counts);
    }
}
