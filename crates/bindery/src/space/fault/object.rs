//! Faults on mappings of objects: shared memory and files.

use core::sync::atomic::{Ordering, fence};

use arrayvec::ArrayVec;

use crate::addr::{Frame, Order, Orders, PAGE_SHIFT, PAGE_SIZE, PageRange, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level};
use crate::collections::page_tree::IndexRun;
use crate::error::FaultError;
use crate::folio::Folio;
use crate::memory::{before_execution, before_execution_of};
use crate::object::{ObjectState, PagesStay, ReadPattern, Stop, mapped_write, pages};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::table::cursor::Cursor;
use crate::table::fill_span::FillSpan;
use crate::table::protect::{Watched, Writable};
use crate::table::publish::publish;
use crate::table::{EntryAt, NoMemory, PageTable, Table, TableEntry, run};
use crate::vma::{MappingAttributes, MappingFlags, Vma};

use super::copy_on_write::folio_range;
use super::first_touch::own_folio;
use super::frames::map_shown;
use super::slow::{Fault, Next, Stepped};
use super::{Access, Resolved, refused};
use crate::space::entry_policy::entry_policy;

/// A read maps the object's pages in the part of this size around the address (Linux:
/// `fault_around_bytes`), and in a longer part that continues where mapped pages end.
const FAULT_AROUND: u64 = 16 * PAGE_SIZE;

/// The number of runs of frames that a read maps under one table lock.
const RUNS: usize = 32;

impl<'m, P: Platform> Fault<'_, 'm, P> {
    /// Maps the object's page or a copy of it. The entry was empty when it was read.
    pub(in crate::space) fn map_object(&self, object: &ObjectState, _: &PagesStay) -> Stepped {
        let (memory, vma, page) = (self.memory(), self.vma, self.page);
        if let Some(shown) = object.frames() {
            return map_shown(self, shown, object.size_in_pages());
        }
        let index = vma.page_offset_of(page);
        if index >= object.size_in_pages() {
            if self.access != Access::Write {
                // Linux also maps the pages around the address before the fault fails.
                self.map_around(object, self.range())?;
            }
            return Err(FaultError::Bus.into());
        }
        let allowed = object.orders(memory, vma.flags());
        let orders = self.space.settings.used_orders(allowed, vma.flags()) | Orders::PAGE;
        let reads_swap = self.access != Access::Write && object.pages.swapped() > 0;
        let ahead = if reads_swap { mapped_ahead::<P::Arch>(vma, page) } else { 1 };
        let frame = match pages::get_ahead(memory, object, index, orders, (ahead, pattern(vma))) {
            Ok(frame) => frame,
            Err(stop) => return stopped(stop),
        };
        if self.access == Access::Write && !vma.is_shared() {
            return self.map_copy(frame);
        }
        let noticed = entry_policy(vma).writable == Writable::Noticed;
        let folio = memory.frames.folio_of(frame).ok_or(FaultError::Bus)?;
        let mut part = self.folio_part(object, frame, folio);
        if self.access == Access::Write {
            if noticed {
                part = self.range();
            }
            if let Err(stop) = mapped_write::begin(memory, object, PageRange::from_count(index, 1))
            {
                return stopped(stop);
            }
            let attributes = object_attributes(vma, self.access);
            let next = self.map_frames(part, frame_at(frame, page, part), attributes)?;
            publish(self.page_table(), part);
            return Ok(next);
        }
        self.map_around(object, part)
    }

    /// Maps the object's pages in `part`, which contains the page of the fault, and the pages
    /// around it.
    fn map_around(&self, object: &ObjectState, part: VirtRange) -> Stepped {
        let (memory, vma) = (self.memory(), self.vma);
        let served = vma.flags().intersects(MappingFlags::USERFAULT);
        let around = if served {
            part
        } else {
            lengthened(self.page_table(), vma, window_around::<P::Arch>(vma, self.page))
        };
        let start = part.start().min(around.start());
        let end = part.end().max(around.end());
        let whole = VirtRange::raw(start.0, end.0);
        let attributes = object_attributes(vma, Access::Read);
        let origin = FirstPage { start: whole.start(), page: vma.page_offset_of(whole.start()) };
        let end = origin.page + whole.pages();
        // A page with a readahead mark stays unmapped, because its fault starts the next read.
        let after = PageRange { first: vma.page_offset_of(self.page) + 1, end };
        let heeds_marks = after.first < end && !vma.flags().contains(MappingFlags::RANDOM);
        let end = if heeds_marks { object.ahead.next_mark(after) } else { end };
        let mut mapped = Next::Again;
        let mut from = origin.page;
        while from < end {
            let mut runs = ArrayVec::<IndexRun, RUNS>::new();
            from = pages::resident_runs(memory, object, PageRange { first: from, end }, &mut runs);
            let next = match runs.as_slice() {
                [] => continue,
                [run] => {
                    let range = origin.range_of(run);
                    let next = self.map_frames(range, run.frame, attributes);
                    // The pages around the address need not be mapped.
                    if range.contains(self.page) { next? } else { continue }
                }
                runs => self.map_runs(&FolioRuns { origin, runs, page: self.page }, attributes)?,
            };
            if !matches!(next, Next::Again) {
                mapped = next;
            }
        }
        publish(self.page_table(), whole);
        Ok(mapped)
    }

    /// The part of the VMA in which the pages of `folio` may be mapped in one step, if `frame`
    /// belongs at the page of the fault. The part lies under one level-2 entry and contains only
    /// pages that the object still has. In a VMA that a userfaultfd serves, the part is a single
    /// page.
    fn folio_part(&self, object: &ObjectState, frame: Frame, folio: Folio) -> VirtRange {
        let (vma, page) = (self.vma, self.page);
        if folio.order == Order::PAGE || vma.flags().intersects(MappingFlags::USERFAULT) {
            return self.range();
        }
        let part = folio_range(vma, page, frame.0 - folio.head.0, folio);
        let table = P::Arch::PMD.span();
        let slot = VirtRange::from_len(page.align_down(table), table);
        let part = slot.map_or(part, |slot| part.intersection(slot));
        let below = (page.0 - part.start().0) >> PAGE_SHIFT;
        let above = (part.end().0 - page.0) >> PAGE_SHIFT;
        let index = vma.page_offset_of(page);
        let within = PageRange { first: index.saturating_sub(below), end: index + above };
        let run = pages::run_around(self.memory(), object, index, frame, within);
        let at = |number: u64| page.0.wrapping_add(number.wrapping_sub(index) << PAGE_SHIFT);
        VirtRange::raw(at(run.first), at(run.end))
    }

    /// Maps consecutive frames of one folio from `first` on wherever an entry in `range` is empty.
    pub(in crate::space) fn map_frames(
        &self,
        range: VirtRange,
        first: Frame,
        attributes: MappingAttributes,
    ) -> Stepped {
        let memory = self.memory();
        let huge = range.len() == P::Arch::PMD.span() && first.is_aligned(P::Arch::PMD.order());
        if huge {
            let folio = memory.frames.folio_of(first).ok_or(FaultError::Bus)?;
            before_execution(memory, attributes.permissions(), folio);
            let entry = attributes.entry(first, Level::<P::Arch>::PMD);
            let mapped = self
                .page_table()
                .with_tables(range, |span| self.map_huge(span, range, folio, entry));
            // If no table is available for the deposit, small leaves suffice.
            if let Ok(Some(next)) = mapped {
                return Ok(next?);
            }
        }
        let run = IndexRun { page: 0, frame: first, count: range.pages() as u32 };
        let origin = FirstPage { start: range.start(), page: 0 };
        self.map_runs(&FolioRuns { origin, runs: &[run], page: range.start() }, attributes)
    }

    /// Maps the whole `folio` by one huge entry; `None` if a table already exists.
    fn map_huge(
        &self,
        mut span: FillSpan<'_, '_, 'm, P>,
        range: VirtRange,
        folio: Folio,
        huge: Entry,
    ) -> Result<Option<Result<Next, FaultError>>, NoMemory> {
        let (frames, page_table) = (&self.memory().frames, self.page_table());
        let EntryAt { node, entry, .. } = span.entry_at(range.start());
        if node.level < Level::PMD {
            return Ok(None);
        }
        if !entry.is_empty() {
            // Another thread has mapped a huge leaf.
            return Ok(Some(Ok(Next::Again)));
        }
        let holder = span.table_at(range.start(), Level::PMD)?;
        let deposit = span.take_deposit()?;
        if frames.folio(folio).map(range.pages() as u32).is_err() {
            span.return_deposit(deposit);
            return Ok(Some(Err(FaultError::OutOfMemory)));
        }
        let index = P::Arch::PMD.index_of(range.start());
        page_table.publish_huge(TableEntry { table: holder, index }, huge);
        page_table.deposit_table(holder, deposit);
        span.counts.entries_written += 1;
        span.counts.folios_touched += 1;
        let owner = frames.folio(folio).owner_kind();
        span.counts.mapped(owner, range.pages() as u32);
        Ok(Some(Ok(Next::Done(Resolved::Mapped(range)))))
    }

    /// Maps `runs` wherever the entry of a page is empty. The runs lie under one level-2 entry, so
    /// their table is found and locked once. Returns the result for the run that contains the page
    /// of the fault. Any other run is left out if its folio has no room for more mappings.
    fn map_runs(&self, runs: &FolioRuns<'_>, attributes: MappingAttributes) -> Stepped {
        let FolioRuns { origin, runs: all, .. } = *runs;
        let (Some(first), Some(last)) = (all.first(), all.last()) else {
            return Ok(Next::Again);
        };
        for run in all {
            before_execution_of(self.memory(), attributes.permissions(), run.frame);
        }
        let start = origin.range_of(first).start();
        let whole = VirtRange::raw(start.0, origin.range_of(last).end().0);
        let mapped = self.page_table().with_tables(whole, |mut span| {
            let EntryAt { node, entry, .. } = span.entry_at(start);
            if node.level > Level::PTE && !entry.is_empty() {
                // Another thread has mapped a huge leaf.
                return Ok(Ok(Next::Again));
            }
            let table = span.table_at(start, Level::PTE)?;
            Ok::<_, NoMemory>(self.fill_runs(&mut span, runs, attributes, table))
        });
        Ok(mapped??)
    }

    /// Fills the empty entries for `runs` in `table`, which is locked.
    #[inline(always)]
    fn fill_runs(
        &self,
        cursor: &mut Cursor<'_, 'm, P>,
        runs: &FolioRuns<'_>,
        attributes: MappingAttributes,
        table: Table<'_>,
    ) -> Result<Next, FaultError> {
        let (frames, page_table) = (&self.memory().frames, self.page_table());
        let entries = page_table.entries(table);
        // The leaf of frame 0; the leaf of any other frame takes one multiplication.
        let template = attributes.entry(Frame(0), Level::<P::Arch>::PTE);
        let faulted = runs.page_of_fault();
        let mut mapped = Ok(Next::Again);
        let (mut read, mut filled) = (0, 0);
        // A CPU that sees a leaf must see earlier writes to its page.
        fence(Ordering::Release);
        for run in runs.runs {
            let range = runs.origin.range_of(run);
            let index = P::Arch::PTE.index_of(range.start());
            let entry = P::Arch::nth_page(template, run.frame.0);
            read += u64::from(run.count == 1);
            let result = match frames.folio_of(run.frame) {
                None => Err(FaultError::Bus),
                Some(folio) if run.count > 1 => {
                    self.fill_run(cursor, (index, run.count), (folio, entry), table)
                }
                Some(_) if !run::load(entries, index).is_empty() => Ok(()),
                Some(folio) => match frames.folio(folio).map(1) {
                    Ok(()) => {
                        entries[index.position()].store(entry.0, Ordering::Relaxed);
                        cursor.counts.mapped(frames.folio(folio).owner_kind(), 1);
                        filled += 1;
                        Ok(())
                    }
                    Err(_) => Err(FaultError::OutOfMemory),
                },
            };
            if faulted.wrapping_sub(run.page) < u64::from(run.count) {
                mapped = result.map(|()| Next::Done(Resolved::Mapped(range)));
            }
        }
        page_table.change_entry_count(table, filled, 0);
        cursor.counts.folios_touched += u64::from(filled);
        cursor.counts.entries_written += u64::from(filled);
        cursor.counts.entries_read += read;
        mapped
    }

    /// Fills the empty entries among `count` entries from `begin` on in `table`, which is locked,
    /// with pages of one folio. `entry` maps the first of these pages.
    fn fill_run(
        &self,
        cursor: &mut Cursor<'_, 'm, P>,
        (begin, count): (EntryIndex, u32),
        (folio, first): (Folio, Entry),
        table: Table<'_>,
    ) -> Result<(), FaultError> {
        let (folio, page_table) = (self.memory().frames.folio(folio), self.page_table());
        let owner = folio.owner_kind();
        let end = begin + count;
        let mut at = begin;
        while at < end {
            let vacant = run::count_empty(&page_table.entries(table)[at.positions(end - at)]);
            cursor.counts.entries_read += u64::from(vacant.max(1));
            if vacant == 0 {
                at += 1;
                continue;
            }
            folio.map(vacant).map_err(|_| FaultError::OutOfMemory)?;
            cursor.counts.folios_touched += 1;
            cursor.counts.mapped(owner, vacant);
            page_table.fill(
                TableEntry { table, index: at },
                P::Arch::nth_page(first, at - begin),
                vacant,
            );
            cursor.counts.entries_written += u64::from(vacant);
            at += vacant;
        }
        Ok(())
    }

    /// Maps a copy of the object's page that is exclusive to the process.
    fn map_copy(&self, frame: Frame) -> Stepped {
        let memory = self.memory();
        let copy = own_folio(memory, self.vma, self.page, Order::PAGE).ok_or(NoMemory)?;
        memory.platform().copy(frame, copy.head, 1);
        let mut copy = Some(copy);
        let counts = Counts { bytes_copied: PAGE_SIZE, ..Counts::default() };
        self.page_table().count(&counts);
        let next = self.map_folio(self.range(), &mut copy, self.vma.flags().attributes().written());
        if let Some(copy) = copy {
            copy.discard();
        }
        next.map(|next| match next {
            Next::Done(_) => Next::Done(Resolved::Copied),
            next @ (Next::Again | Next::Wait(_)) => next,
        })
    }
}

/// The next step of a fault that has stopped at `stop` in an object.
pub(in crate::space) fn stopped(stop: Stop) -> Stepped {
    match stop {
        Stop::Wait(wait) => Ok(Next::Wait(wait)),
        Stop::Failed(failure) => Err(refused(failure)),
    }
}

/// A page of an object and the address at which it is mapped; the other pages follow in order.
#[derive(Clone, Copy)]
struct FirstPage {
    start: VirtAddr,
    page: u64,
}

impl FirstPage {
    /// The range in which a run is mapped that does not start before `page`.
    #[inline]
    fn range_of(self, run: &IndexRun) -> VirtRange {
        let start = self.start.0 + ((run.page - self.page) << PAGE_SHIFT);
        VirtRange::raw(start, start + (u64::from(run.count) << PAGE_SHIFT))
    }
}

/// Runs of pages that a fault maps, in ascending order. Each run belongs to one folio.
#[derive(Clone, Copy)]
struct FolioRuns<'r> {
    origin: FirstPage,
    runs: &'r [IndexRun],
    /// The page of the fault.
    page: VirtAddr,
}

impl FolioRuns<'_> {
    /// The number of the page of the fault.
    #[inline]
    fn page_of_fault(&self) -> u64 {
        let FirstPage { start, page } = self.origin;
        page.wrapping_add(self.page.0.wrapping_sub(start.0) >> PAGE_SHIFT)
    }
}

/// The pages around `page` that a fault on `page` maps if the object has them.
#[inline]
fn window_around<A: Arch>(vma: &Vma, page: VirtAddr) -> VirtRange {
    // If the mapping's start falls inside the window, Linux moves the window instead of shortening
    // it.
    let table = A::PMD.span();
    let first = page.align_down(FAULT_AROUND).0.max(vma.start());
    let last = (first + FAULT_AROUND).min((page.0 & !(table - 1)).saturating_add(table));
    VirtRange::raw(first, last.min(vma.end()))
}

/// The number of pages from `page` on that a read fault on `page` maps.
#[cold]
fn mapped_ahead<A: Arch>(vma: &Vma, page: VirtAddr) -> u64 {
    let served = vma.flags().intersects(MappingFlags::USERFAULT);
    let end = window_around::<A>(vma, page).end();
    if served { 1 } else { (end.0 - page.0) >> PAGE_SHIFT }
}

/// The order in which a program has announced that it will read a mapping.
#[inline]
fn pattern(vma: &Vma) -> ReadPattern {
    let flags = vma.flags();
    if flags.contains(MappingFlags::RANDOM) {
        ReadPattern::Random
    } else if flags.contains(MappingFlags::SEQUENTIAL) {
        ReadPattern::Sequential
    } else {
        ReadPattern::Unknown
    }
}

/// The frame that belongs at the start of `part`, given the frame at `page`.
fn frame_at(frame: Frame, page: VirtAddr, part: VirtRange) -> Frame {
    Frame(frame.0 - ((page.0 - part.start().0) >> PAGE_SHIFT) as u32)
}

/// The attributes of entries that map an object's pages for the first time.
pub(in crate::space) fn object_attributes(vma: &Vma, access: Access) -> MappingAttributes {
    let policy = entry_policy(vma);
    let write = access == Access::Write;
    let mut attributes = vma.flags().attributes().accessed();
    let at_once = policy.writable == Writable::All && policy.watched == Watched::No;
    if !write && !at_once || policy.writable == Writable::Exclusive {
        attributes = attributes.read_only();
    }
    if write { attributes.written() } else { attributes }
}

/// The window, up to twice as long as the stretch of mapped pages that it continues, because a
/// program that reads sequentially takes most of its faults at the beginning. The window does not
/// extend beyond the end of the table.
///
/// ```text
/// faults    1               2               3
/// mapped    |<--- 16 ---->| |<---- 32 ----->|<---- 64 ... ---->|
/// ```
fn lengthened<P: Platform>(
    page_table: &PageTable<'_, P>,
    vma: &Vma,
    window: VirtRange,
) -> VirtRange {
    let table = P::Arch::PMD.span();
    let start = window.start().0;
    let first = vma.start().max(start & !(table - 1));
    if start - first < FAULT_AROUND || vma.flags().contains(MappingFlags::RANDOM) {
        return window;
    }
    let mut length = FAULT_AROUND;
    let section = page_table.read_section();
    let mut counts = Counts::default();
    let EntryAt { node, .. } = page_table.peek(&section, window.start(), &mut counts);
    if node.level == Level::PTE {
        let entries = page_table.entries(node.table);
        let is_mapped = |before: u64| {
            let index = P::Arch::PTE.index_of(VirtAddr(start - before));
            node.level.kind(run::load(entries, index)) == Kind::Leaf
        };
        // Checks samples only: a missing page between them is harmless.
        while length <= start - first && is_mapped(PAGE_SIZE) && is_mapped(length) {
            length *= 2;
        }
    }
    page_table.count(&counts);
    let last = start.saturating_add(length).min((start & !(table - 1)).saturating_add(table));
    VirtRange::raw(start, last.min(vma.end()).max(window.end().0))
}
