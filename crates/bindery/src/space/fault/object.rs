//! Faults on mappings of objects: shared memory and files.

use arrayvec::ArrayVec;

use crate::addr::{Frame, Order, Orders, PAGE_SHIFT, PAGE_SIZE, PageRange, VirtAddr, VirtRange};
use crate::arch::{Arch, Attributes, Entry, Level, Permissions};
use crate::collections::page_tree::PageRun;
use crate::error::{Failure, FaultError};
use crate::folio::Folio;
use crate::object::PagesStay;
use crate::object::{Awaited, ObjectState, Stop, pages};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::stats::Counts;
use crate::table::leaf::user_attributes;
use crate::table::locking::Depth;
use crate::table::protect::{Watched, Writable};
use crate::table::{EntryAt, NoMemory, TablePool, run};
use crate::vma::{MappingFlags, Vma};

use super::first_touch::written_attributes;
use super::{Access, Resolved, Step, refused};

/// A read maps what the object has in the part of this size around the address (Linux:
/// `fault_around_bytes`).
const FAULT_AROUND: u64 = 16 * PAGE_SIZE;

/// How many runs of frames a read maps with the table locked once: all of the pages around it.
const RUNS: usize = 16;

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// The entry of `page` was empty when it was read: maps what the object has there, or a copy of
    /// it.
    pub(in crate::space) fn map_object(
        &self,
        vma: &Vma,
        object: &ObjectState,
        page: VirtAddr,
        access: Access,
        _: &PagesStay,
    ) -> Result<Step, Failure<FaultError>> {
        let memory = self.page_table.memory;
        let index = vma.page_offset_of(page);
        if index >= object.size_in_pages() {
            if access != Access::Write {
                // As Linux, which looks around first.
                self.map_around(vma, object, VirtRange::raw(page.0, page.0 + PAGE_SIZE), page)?;
            }
            return Err(FaultError::Bus.into());
        }
        let orders =
            self.used_orders(object.orders(memory, vma.flags()), vma.flags()) | Orders::PAGE;
        let reads_swap = access != Access::Write && object.pages.swapped() > 0;
        let ahead = if reads_swap { mapped_ahead::<P::Arch>(vma, page) } else { 1 };
        let frame = match pages::get_ahead(memory, object, index, orders, ahead) {
            Ok(frame) => frame,
            Err(Stop::Await(awaited)) => return Ok(Step::Await(awaited)),
            Err(Stop::Failed(failure)) => return Err(refused(failure)),
        };
        if access == Access::Write && !vma.is_shared() {
            return self.map_copy(vma, page, frame);
        }
        let noticed = vma.entry_policy().writable == Writable::Noticed;
        let folio = memory.frames.folio_of(frame).ok_or(FaultError::Bus)?;
        let mut part = self.folio_part(vma, object, page, frame, folio);
        if access == Access::Write {
            if noticed {
                part = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
            }
            if let Err(ticket) = pages::mark_dirty(memory, object, index, 1) {
                return Ok(Step::Await(Awaited::End(ticket)));
            }
            let step = self.map_frames(vma, part, frame_at(frame, page, part), access)?;
            self.published(part);
            return Ok(step);
        }
        self.map_around(vma, object, part, page)
    }

    /// Maps what the object has in `part`, a stretch around `page`, and in the pages around that.
    fn map_around(
        &self,
        vma: &Vma,
        object: &ObjectState,
        part: VirtRange,
        page: VirtAddr,
    ) -> Result<Step, Failure<FaultError>> {
        let memory = self.page_table.memory;
        let served = vma.flags().intersects(MappingFlags::USERFAULT);
        let around = if served { part } else { window_around::<P::Arch>(vma, page) };
        let start = part.start().min(around.start());
        let end = part.end().max(around.end());
        let whole = VirtRange::raw(start.0, end.0);
        let attributes = object_attributes(vma, Access::Read);
        let origin = Origin { start: whole.start(), page: vma.page_offset_of(whole.start()) };
        let end = origin.page + whole.pages();
        let mut mapped = Step::Again;
        let mut from = origin.page;
        while from < end {
            let mut runs = ArrayVec::<PageRun, RUNS>::new();
            from = pages::resident_runs(memory, object, PageRange { first: from, end }, &mut runs);
            let step = match runs.as_slice() {
                [] => continue,
                [run] => self.map_frames_as(origin.range_of(run), run.frame, attributes)?,
                runs => self.map_runs(origin, runs, attributes, page)?.accepted()?,
            };
            let with_page = runs.iter().any(|run| origin.range_of(run).contains(page));
            mapped = if with_page { step } else { mapped };
        }
        self.published(whole);
        Ok(mapped)
    }

    /// Where the pages of `folio`, of which `frame` is to be mapped at `page`, may be mapped at
    /// once: in the VMA, under one entry of level 2, and only those around `page` that the object
    /// has still. A userfaultfd serves each page by itself.
    fn folio_part(
        &self,
        vma: &Vma,
        object: &ObjectState,
        page: VirtAddr,
        frame: Frame,
        folio: Folio,
    ) -> VirtRange {
        if folio.order == Order::PAGE || vma.flags().intersects(MappingFlags::USERFAULT) {
            return VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        }
        let part = super::folio_range(vma, page, frame.0 - folio.head.0, folio);
        let table = P::Arch::PMD.span();
        let slot = VirtRange::from_len(page.align_down(table), table);
        let part = slot.map_or(part, |slot| part.intersection(slot));
        let below = (page.0 - part.start().0) >> PAGE_SHIFT;
        let above = (part.end().0 - page.0) >> PAGE_SHIFT;
        let index = vma.page_offset_of(page);
        let within = PageRange { first: index.saturating_sub(below), end: index + above };
        let run = pages::run_around(self.page_table.memory, object, index, frame, within);
        let at = |number: u64| page.0.wrapping_add(number.wrapping_sub(index) << PAGE_SHIFT);
        VirtRange::raw(at(run.first), at(run.end))
    }

    /// Maps consecutive frames of one folio from `first` on in `range`, wherever the entry is
    /// empty.
    fn map_frames(
        &self,
        vma: &Vma,
        range: VirtRange,
        first: Frame,
        access: Access,
    ) -> Result<Step, Failure<FaultError>> {
        self.map_frames_as(range, first, object_attributes(vma, access))
    }

    /// As [`AddressSpace::map_frames`], with these attributes.
    pub(in crate::space) fn map_frames_as(
        &self,
        range: VirtRange,
        first: Frame,
        attributes: Attributes,
    ) -> Result<Step, Failure<FaultError>> {
        let memory = self.page_table.memory;
        let huge = range.len() == P::Arch::PMD.span() && first.is_aligned(P::Arch::PMD.order());
        if huge {
            let folio = memory.frames.folio_of(first).ok_or(FaultError::Bus)?;
            memory.before_execution(attributes.permissions, folio);
            let entry = P::Arch::page_entry(first, Level::PMD, attributes);
            let mapped =
                self.page_table.with_tables(|pool| self.map_huge(range, folio, entry, pool));
            // Where there is no table for its deposit, small leaves will do.
            if let Ok(Some(step)) = mapped {
                return Ok(step.accepted()?);
            }
        }
        let run = PageRun { page: 0, frame: first, count: range.pages() as u32 };
        let origin = Origin { start: range.start(), page: 0 };
        Ok(self.map_runs(origin, &[run], attributes, range.start())?.accepted()?)
    }

    /// Maps all of `folio` by one huge entry; `None` if there is a table already.
    fn map_huge(
        &self,
        range: VirtRange,
        folio: Folio,
        huge: Entry,
        pool: &mut TablePool<'m, P>,
    ) -> Result<Option<Step>, NoMemory> {
        let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
        let EntryAt { node, entry, .. } = cursor.entry_at(range.start());
        if node.level < Level::PMD {
            return Ok(None);
        }
        if !entry.is_empty() {
            // A huge leaf has come between.
            return Ok(Some(Step::Again));
        }
        let holder = cursor.table_at(range.start(), Level::PMD, pool)?;
        let deposit = pool.take(Level::PTE, &mut cursor.counts)?;
        if self.page_table.memory.frames.folio(folio).map(range.pages() as u32).is_err() {
            pool.put(deposit);
            return Ok(Some(Step::Refused(FaultError::OutOfMemory)));
        }
        let index = P::Arch::PMD.index_of(range.start());
        self.page_table.publish_huge(holder, index, huge);
        self.page_table.deposit_table(holder, deposit);
        cursor.counts.entries_written += 1;
        cursor.counts.folios_touched += 1;
        let owner = self.page_table.memory.frames.folio(folio).owner_kind();
        cursor.counts.mapped(owner, range.pages() as u32);
        Ok(Some(Step::Done(Resolved::Mapped(range))))
    }

    /// Maps `runs`, each of one folio, wherever the entry of a page is empty. They rise, and lie under
    /// one entry of level 2: their table is found and locked once. Returns the outcome for the run with
    /// `page`. Any other run is left out if its folio has no room for more mappings.
    fn map_runs(
        &self,
        origin: Origin,
        runs: &[PageRun],
        attributes: Attributes,
        page: VirtAddr,
    ) -> Result<Step, Failure<FaultError>> {
        let memory = self.page_table.memory;
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
            return Ok(Step::Again);
        };
        for run in runs {
            let folio = memory.frames.folio_of(run.frame).ok_or(FaultError::Bus)?;
            memory.before_execution(attributes.permissions, folio);
        }
        let start = origin.range_of(first).start();
        let whole = VirtRange::raw(start.0, origin.range_of(last).end().0);
        let mapped = self.page_table.with_tables(|pool| {
            let mut cursor = self.page_table.cursor(whole, Depth::Floor(Level::PTE));
            let EntryAt { node, entry, .. } = cursor.entry_at(start);
            if node.level > Level::PTE && !entry.is_empty() {
                // A huge leaf has come between.
                return Ok(Step::Again);
            }
            let table = cursor.table_at(start, Level::PTE, pool)?;
            let mut mapped = Step::Again;
            for run in runs {
                let range = origin.range_of(run);
                let step = self.fill_run(range, run.frame, attributes, table, &mut cursor.counts);
                if range.contains(page) {
                    mapped = step;
                }
            }
            Ok::<_, NoMemory>(mapped)
        });
        Ok(mapped?)
    }

    /// Fills the empty entries of `range` in `table`, which is locked, with frames of one folio from
    /// `first` on.
    fn fill_run(
        &self,
        range: VirtRange,
        first: Frame,
        attributes: Attributes,
        table: Frame,
        counts: &mut Counts,
    ) -> Step {
        let frames = &self.page_table.memory.frames;
        let Some(folio) = frames.folio_of(first) else {
            return Step::Refused(FaultError::Bus);
        };
        let first = P::Arch::page_entry(first, Level::PTE, attributes);
        let begin = P::Arch::PTE.index_of(range.start());
        let end = begin + range.pages() as u32;
        let owner = frames.folio(folio).owner_kind();
        let mut at = begin;
        while at < end {
            let vacant = run::count_empty(&self.page_table.slots(table)[at.slots(end - at)]);
            counts.entries_read += u64::from(vacant.max(1));
            if vacant == 0 {
                at += 1;
                continue;
            }
            if frames.folio(folio).map(vacant).is_err() {
                return Step::Refused(FaultError::OutOfMemory);
            }
            counts.folios_touched += 1;
            counts.mapped(owner, vacant);
            let entry = P::Arch::nth_page(first, at - begin);
            self.page_table.fill(table, at, entry, vacant, counts);
            at += vacant;
        }
        Step::Done(Resolved::Mapped(range))
    }

    /// Maps a copy of the object's page, which is the program's own.
    fn map_copy(
        &self,
        vma: &Vma,
        page: VirtAddr,
        frame: Frame,
    ) -> Result<Step, Failure<FaultError>> {
        let memory = self.page_table.memory;
        let copy = self.own_folio(vma, page, Order::PAGE).ok_or(NoMemory)?;
        memory.platform.copy(frame, copy.head, 1);
        let counts = Counts { bytes_copied: PAGE_SIZE, ..Counts::default() };
        self.page_table.stats.add(&counts);
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let step = self.map_folio(range, copy, written_attributes(vma.flags()));
        match step {
            Ok(Step::Done(_)) => Ok(Step::Done(Resolved::Copied)),
            step => {
                memory.frames.fresh(copy).discard(self.platform());
                step
            }
        }
    }
}

/// Where pages of an object are mapped: `page` at `start`, and the others as far from it.
#[derive(Clone, Copy)]
struct Origin {
    start: VirtAddr,
    page: u64,
}

impl Origin {
    /// Where a run that does not begin before `page` is mapped.
    #[inline]
    fn range_of(self, run: &PageRun) -> VirtRange {
        let start = self.start.0 + ((run.page - self.page) << PAGE_SHIFT);
        VirtRange::raw(start, start + (u64::from(run.count) << PAGE_SHIFT))
    }
}

/// The pages around `page` that a fault on it maps if the object has them.
#[inline]
fn window_around<A: Arch>(vma: &Vma, page: VirtAddr) -> VirtRange {
    // As Linux: what the mapping's beginning cuts off is added at the end.
    let table = A::PMD.span();
    let first = page.align_down(FAULT_AROUND).0.max(vma.start());
    let last = (first + FAULT_AROUND).min((page.0 & !(table - 1)).saturating_add(table));
    VirtRange::raw(first, last.min(vma.end()))
}

/// How many pages from `page` on a fault maps that reads it.
#[cold]
fn mapped_ahead<A: Arch>(vma: &Vma, page: VirtAddr) -> u64 {
    let served = vma.flags().intersects(MappingFlags::USERFAULT);
    let end = window_around::<A>(vma, page).end();
    if served { 1 } else { (end.0 - page.0) >> PAGE_SHIFT }
}

/// The frame that belongs at the beginning of `part`, given the one at `page`.
fn frame_at(frame: Frame, page: VirtAddr, part: VirtRange) -> Frame {
    Frame(frame.0 - ((page.0 - part.start().0) >> PAGE_SHIFT) as u32)
}

/// What entries say that map an object's pages for the first time.
pub(in crate::space) fn object_attributes(vma: &Vma, access: Access) -> Attributes {
    let policy = vma.entry_policy();
    let write = access == Access::Write;
    let mut permissions = policy.permissions;
    let at_once = policy.writable == Writable::All && policy.watched == Watched::No;
    if !write && !at_once || policy.writable == Writable::Exclusive {
        permissions -= Permissions::WRITE;
    }
    Attributes {
        accessed: true,
        dirty: write,
        soft_dirty: write,
        ..user_attributes(permissions, policy.key)
    }
}
