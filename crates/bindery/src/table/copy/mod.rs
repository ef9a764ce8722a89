//! `fork`: from then on both sides map the same pages, and neither may write until it has a private
//! page.

mod pinned;

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Entry, Equal, Level};
use crate::error::{Error, Failure};
use crate::folio::{Folio, LiveOwner};
use crate::interrupt;
use crate::memory::{Memory, share_frames};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::swap::SlotRun;
use crate::table::Table;

use super::cursor::{Chunks, Cursor};
use super::deposit::{LargeDeposit, free_deposit};
use super::edit::Edit;
use super::locking::Depth;
use super::run::{Run, What};
use super::span::Span;
use super::{PageTable, TablePool};
use pinned::{PinnedCopy, PinnedRun, copy_attributes};

/// Whether the child's writes are private.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Copied {
    /// Neither side may write until it has a private page.
    Private,
    /// Both sides keep writing to the same pages.
    Shared,
}

/// The child's copy of one mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ForkCopy<'o> {
    pub(crate) range: VirtRange,
    pub(crate) copied: Copied,
    /// The owner of pages that are copied immediately, and the index of the first page within that
    /// owner.
    pub(crate) owner: LiveOwner<'o>,
    pub(crate) page_offset: u64,
    /// Whether the child's copy has a userfaultfd, which needs to know the write-protected pages.
    pub(crate) userfault: bool,
}

impl ForkCopy<'_> {
    /// The child's form of the absent entry.
    fn absent<A: Arch>(&self, entry: Entry) -> Entry {
        if self.userfault { entry } else { A::strip_absent_userfault(entry) }
    }
}

/// Copies the range's entries into `child`, a tree that no other thread can reach yet, and
/// write-protects both sides if writes are private. Pinned pages of this side, including
/// `PROT_NONE` pages, are copied for the child and stay unchanged here, because the holder of the
/// pin must still see this side's writes. Entries that become stale on this side enter the gather.
/// The caller excludes faults from the range. Makes one pass over the runs; a folio's counts rise
/// once per run.
///
/// On failure, and after a fatal signal, `child` contains a part of the range, and the pages of
/// that part are write-protected here; the next write restores its permission. Fails with
/// [`Error::LimitReached`] if a slot is named by the maximum number of entries.
pub(super) fn copy_to<'m, P: Platform>(
    edit: &mut Edit<'_, 'm, P>,
    child: &PageTable<'m, P>,
    what: &ForkCopy<'_>,
) -> Result<(), Failure> {
    let mut tables = TablePool::new(edit.memory);
    let result = copy_parts(edit, child, what, &mut tables);
    tables.free_unused();
    edit.count(&tables.counts);
    result
}

/// Copies part by part. If memory is not immediately available or pages must be copied, releases
/// the locks of both sides and resumes from that point. Neither side has changed by then, except
/// that a truncation may have removed entries: the parent's VMAs are held for writing, and no other
/// thread knows the child.
fn copy_parts<'m, P: Platform>(
    edit: &mut Edit<'_, 'm, P>,
    child: &PageTable<'m, P>,
    what: &ForkCopy<'_>,
    tables: &mut TablePool<'m, P>,
) -> Result<(), Failure> {
    let parent = edit.table();
    let mut parts = Chunks::of(what.range);
    let mut reach = u64::MAX;
    let mut large = None;
    loop {
        let start;
        let stopped = {
            let Some(part) = edit.next_part(&mut parts) else { return Ok(()) };
            let part = front(parent, part, reach);
            start = part.start();
            let section = parent.read_section();
            let depth = Depth::Floor(Level::PTE);
            let mut source = edit.chunk_span(&section, &mut parts, part, depth);
            let range = source.range();
            let of_child = child.read_section();
            let mut target = child.cursor(&of_child, range, Depth::Floor(Level::PTE));
            debug_assert_eq!(target.range(), range, "the child has more than the parent");
            let (source, target) = (&mut source, &mut target);
            CopySpan { source, target, what, tables, large: &mut large, last: None }.copy()
        };
        match stopped {
            Ok(()) => reach = reach.saturating_mul(2),
            Err(CopyStop::Zeroed(at)) => {
                // One lock span can cover far more huge leaves than can be copied in it. Locking
                // reads each leaf, so the next span should cover about as many as this span has
                // copied.
                reach = at.0 - start.0;
                parts.go_on_from(at);
            }
            Err(CopyStop::Full(at)) => {
                parts.go_on_from(at);
                edit.flush_stale();
            }
            Err(CopyStop::Refused) => return Err(Failure::NoMemory),
            // The caller may swap the page in, which no reclaim replaces.
            Err(CopyStop::SlotFull) => return Err(Error::LimitReached.into()),
            Err(CopyStop::Short(at)) => {
                tables.refill()?;
                parts.go_on_from(at);
            }
            Err(CopyStop::Large(at, level)) => {
                large = Some(LargeDeposit::new(child, level)?);
                parts.go_on_from(at);
            }
            Err(CopyStop::Pinned(run)) => {
                let end = run.range.end();
                PinnedCopy { parent, child, run, what, tables }.copy()?;
                parts.go_on_from(end);
            }
        }
        interrupt::check(parent.memory.platform())?;
        // Other threads sleep while they wait for locked VMAs, but spin for a pending flush.
        if !edit.is_stale() {
            parent.memory.platform().yield_if_due();
        }
    }
}

/// The front of `part`, up to `reach` bytes and on to the end of the huge leaf there. A part that
/// begins with a leaf above level 2 contains nothing else, and stays whole.
fn front<P: Platform>(parent: &PageTable<'_, P>, part: VirtRange, reach: u64) -> VirtRange {
    if reach >= part.len() {
        return part;
    }
    let section = parent.read_section();
    let found = parent.peek(&section, part.start(), &mut Counts::default());
    if found.node.level > Level::PMD {
        return part;
    }
    let last = part.start().0.saturating_add(reach.max(1) - 1) | (P::Arch::PMD.span() - 1);
    VirtRange::raw(part.start().0, last.saturating_add(1).min(part.end().0))
}

/// The maximum number of the child's tables that are zeroed under locks. One more run may need a
/// table on each level and a table on deposit. All these tables together are at most 64 KiB.
const TABLES_ZEROED: u64 = 10;

/// The reason why a copy stops before its end.
enum CopyStop<A> {
    /// No memory was immediately available for the pages from this address on.
    Short(VirtAddr),
    /// The leaf at this address, of this level, needs a [`LargeDeposit`].
    Large(VirtAddr, Level<A>),
    /// Enough tables were zeroed for one lock span; the copy resumes at this address.
    Zeroed(VirtAddr),
    /// One flush cannot cover more marked tables; the copy resumes at this address, in another
    /// table.
    Full(VirtAddr),
    /// This run is next and must be copied.
    Pinned(PinnedRun),
    /// A folio cannot take another mapping, or a huge leaf has no deposit.
    Refused,
    /// A slot cannot take another entry.
    SlotFull,
}

/// The copy of one lock span: the locked entries of both sides.
struct CopySpan<'c, 'a, 'b, 't, 'm, P: Platform> {
    source: &'c mut Span<'a, 'm, P>,
    target: &'c mut Cursor<'b, 'm, P>,
    what: &'c ForkCopy<'c>,
    /// New tables for the child, available while locks are held.
    tables: &'c mut TablePool<'m, P>,
    /// The deposit for a leaf above level 2, after [`CopyStop::Large`].
    large: &'c mut Option<LargeDeposit<'t, 'm, P>>,
    /// The level-1 table of the last run, and the child's table for it. The next run is usually in
    /// the same table and then needs no descent.
    last: Option<(Frame, Table<'b>)>,
}

impl<'b, P: Platform> CopySpan<'_, '_, 'b, '_, '_, P> {
    fn copy(&mut self) -> Result<(), CopyStop<P::Arch>> {
        while let Some(run) = self.source.next_run(Equal::empty()).map_err(|_| CopyStop::Refused)? {
            if self.target.counts.tables_allocated >= TABLES_ZEROED && run.what != What::Empty {
                return Err(CopyStop::Zeroed(run.at));
            }
            let is_first_of_table = run.at.is_aligned(P::Arch::PMD.span());
            if is_first_of_table
                && !self.source.gather.has_room_for_mark()
                && run.what != What::Empty
            {
                return Err(CopyStop::Full(run.at));
            }
            match run.what {
                What::Empty | What::Table(_) => {}
                What::Leaf(first) if let Some(folio) = self.pinned(P::Arch::frame(first)) => {
                    let (frame, parent) = (P::Arch::frame(first), P::Arch::attributes(first));
                    return Err(self.stop_at_pinned(&run, frame, folio, parent));
                }
                What::Leaf(first) => {
                    let table = self.target_table(&run)?;
                    self.copy_leaves(&run, first, table)?;
                    if run.count == 1 && run.node.level == Level::PTE {
                        self.copy_single_pages(table)?;
                    }
                }
                What::Absent(first) => match P::Arch::decode_absent(first) {
                    Some(Absent::ProtNone { frame, userfault, .. })
                        if let Some(folio) = self.pinned(frame) =>
                    {
                        let parent = Attributes { userfault, ..Attributes::default() };
                        return Err(self.stop_at_pinned(&run, frame, folio, parent));
                    }
                    Some(Absent::ProtNone { .. } | Absent::Swap { .. } | Absent::Marker(_))
                    | None => {
                        if !self.what.absent::<P::Arch>(first).is_empty() {
                            let table = self.target_table(&run)?;
                            self.copy_absent(&run, first, table)?;
                        }
                    }
                },
            }
        }
        if self.target.counts.tables_allocated >= TABLES_ZEROED {
            return Err(CopyStop::Zeroed(self.source.range().end()));
        }
        Ok(())
    }

    /// The child's table for the run, with a deposit for a huge leaf or a similar entry.
    #[inline(always)]
    fn target_table(&mut self, run: &Run<P::Arch>) -> Result<Table<'b>, CopyStop<P::Arch>> {
        match self.last {
            Some((source, target)) if source == run.node.table.frame() => Ok(target),
            _ => self.new_target_table(run),
        }
    }

    fn new_target_table(&mut self, run: &Run<P::Arch>) -> Result<Table<'b>, CopyStop<P::Arch>> {
        let Self { target, tables, .. } = self;
        let short = |_| CopyStop::Short(run.at);
        let table = target.table_at(run.at, run.node.level, tables).map_err(short)?;
        if run.node.level == Level::PTE {
            self.last = Some((run.node.table.frame(), table));
        } else if run.node.level == Level::PMD {
            let deposit = tables.take(Level::PTE, &mut target.counts).map_err(short)?;
            target.page_table.deposit_table(table, deposit);
        } else {
            let large = self.large.take();
            large.ok_or(CopyStop::Large(run.at, run.node.level))?.give_to(table);
        }
        Ok(table)
    }

    fn copy_leaves(
        &mut self,
        run: &Run<P::Arch>,
        first: Entry,
        table: Table<'_>,
    ) -> Result<(), CopyStop<P::Arch>> {
        let Self { source, target, .. } = self;
        let memory = source.page_table.memory;
        let pages = run.pages();
        let (counts, theirs) = (&mut source.counts, &mut target.counts);
        if share_frames(memory, P::Arch::frame(first), pages, counts, theirs).is_err() {
            drop_target_deposit(target, run, table);
            return Err(CopyStop::Refused);
        }
        self.copy_present(run, table);
        Ok(())
    }

    /// Copies the single-page folios that follow a run, up to the end of its table, because a run
    /// per page would cost more than the page's copy.
    fn copy_single_pages(&mut self, table: Table<'_>) -> Result<(), CopyStop<P::Arch>> {
        let memory = self.source.page_table.memory;
        if self.source.page_table.reach.longest_run() == 1 {
            return Ok(());
        }
        let copied = self.what.copied;
        let is_unpinned_page = |frame| {
            memory.frames.folio_of(frame).is_some_and(|folio| {
                folio.pages() == 1 && (copied == Copied::Shared || !is_pinned(memory, folio))
            })
        };
        let Some(run) = self.source.next_leaves(is_unpinned_page) else { return Ok(()) };
        let entries = self.source.page_table.entries_of(&run);
        let (counts, theirs) = (&mut self.source.counts, &mut self.target.counts);
        let is_shared = |word: &&AtomicU64| {
            let frame = P::Arch::frame(Entry(word.load(Ordering::Relaxed)));
            share_frames(memory, frame, 1, counts, theirs).is_ok()
        };
        let shared = entries.iter().take_while(is_shared).count() as u32;
        // In three parts, so that only entries between two narrowed entries are flushed with them.
        let narrows = |word: &AtomicU64| {
            let entry = Entry(word.load(Ordering::Relaxed));
            copied == Copied::Private && P::Arch::write_protect(entry) != entry
        };
        let shared_entries = &entries[..shared as usize];
        let first = shared_entries.iter().position(narrows).map_or(shared, |first| first as u32);
        let end = shared_entries.iter().rposition(narrows).map_or(shared, |last| last as u32 + 1);
        for (start, end) in [(0, first), (first, end), (end, shared)] {
            if start < end {
                self.copy_present(&Run { count: end - start, ..run.rest(start) }, table);
            }
        }
        if shared < run.count { Err(CopyStop::Refused) } else { Ok(()) }
    }

    /// Copies present level-1 leaves, or one larger leaf. The folios already count the child's
    /// mappings.
    fn copy_present(&mut self, run: &Run<P::Arch>, table: Table<'_>) {
        let Self { source, target, what, .. } = self;
        let stripped = if what.userfault { 0 } else { P::Arch::USERFAULT };
        let protect = |entry| match what.copied {
            Copied::Private => P::Arch::write_protect(entry),
            Copied::Shared => entry,
        };
        let ours = source.page_table.entries_of(run);
        let theirs = &target.page_table.entries(table)[run.index.positions(run.count)];
        let mut narrowing = source.narrow_some(run);
        for (number, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
            let raw = Entry(ours.load(Ordering::Relaxed));
            let mut protected = protect(raw);
            if protected != raw {
                let old = narrowing.replace(number, raw, P::Arch::write_protect);
                protected = P::Arch::write_protect(old);
            }
            theirs.store(protected.0 & !stripped, Ordering::Relaxed);
        }
        if narrowing.narrowed() > 0 {
            source.counts.entries_written += u64::from(run.count);
        }
        target.page_table.change_entry_count(table, run.count, 0);
        target.counts.entries_written += u64::from(run.count);
    }

    /// The folio of a run whose first frame is `first`, if this side maps the folio privately and
    /// it is anonymous and pinned.
    fn pinned(&self, first: Frame) -> Option<Folio> {
        let memory = self.source.page_table.memory;
        let folio =
            memory.frames.folio_of(first).filter(|_| self.what.copied == Copied::Private)?;
        is_pinned(memory, folio).then_some(folio)
    }

    /// Acquires a reference for the copy, which keeps the pages after the locks are released.
    /// `parent` are the attributes of this side's entries.
    fn stop_at_pinned(
        &self,
        run: &Run<P::Arch>,
        first: Frame,
        folio: Folio,
        parent: Attributes,
    ) -> CopyStop<P::Arch> {
        let Some(kept) = self.source.page_table.memory.frames.folio(folio).keep() else {
            return CopyStop::Refused;
        };
        let (range, held) = (run.range(), kept.into_held());
        let userfault = parent.userfault && self.what.userfault;
        let attributes = copy_attributes(Attributes { userfault, ..parent });
        CopyStop::Pinned(PinnedRun { range, first, held, attributes })
    }

    fn copy_absent(
        &mut self,
        run: &Run<P::Arch>,
        first: Entry,
        table: Table<'_>,
    ) -> Result<(), CopyStop<P::Arch>> {
        let Self { source, target, what, .. } = self;
        let memory = source.page_table.memory;
        if let Some(Absent::ProtNone { frame, .. }) = P::Arch::decode_absent(first) {
            let pages = run.pages();
            let (counts, theirs) = (&mut source.counts, &mut target.counts);
            if share_frames(memory, frame, pages, counts, theirs).is_err() {
                drop_target_deposit(target, run, table);
                return Err(CopyStop::Refused);
            }
        }
        if let Some(Absent::Swap { device, slot, .. }) = P::Arch::decode_absent(first) {
            let slots = SlotRun { area: device, first: slot, count: run.pages() };
            if slots.dup(memory).is_err() {
                drop_target_deposit(target, run, table);
                return Err(CopyStop::SlotFull);
            }
            target.counts.swap_pages += u64::from(slots.count);
        }
        source.page_table.inherit_guards(run.node.table, table);
        let ours = source.page_table.entries(run.node.table);
        let theirs = target.page_table.entries(table);
        for index in run.index.positions(run.count) {
            let entry = P::Arch::share_absent(Entry(ours[index].load(Ordering::Relaxed)));
            ours[index].store(entry.0, Ordering::Relaxed);
            theirs[index].store(what.absent::<P::Arch>(entry).0, Ordering::Relaxed);
        }
        source.counts.entries_written += u64::from(run.count);
        target.counts.entries_written += u64::from(run.count);
        target.page_table.change_entry_count(table, run.count, 0);
        Ok(())
    }
}

/// Whether a folio is anonymous and pinned, so that its pages are copied immediately.
fn is_pinned<P: Platform>(memory: &Memory<P>, folio: Folio) -> bool {
    let handle = memory.frames.folio(folio);
    handle.pins() > 0 && handle.is_anonymous()
}

fn drop_target_deposit<P: Platform>(
    target: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    table: Table<'_>,
) {
    if run.node.level > Level::PTE {
        free_deposit(target.page_table.memory, &target.locks, table, &mut target.counts);
    }
}
