//! Faults on mappings of objects: shared memory and files.

use crate::addr::{Frame, Order, Orders, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Attributes, Entry, Level, Permissions};
use crate::error::{Failure, FaultError};
use crate::frame::Folio;
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
        let mut mapped = Step::Again;
        let mut at = whole.start();
        while at < whole.end() {
            let limit = (whole.end().0 - at.0) >> PAGE_SHIFT;
            let (found, count) = pages::resident_run(memory, object, vma.page_offset_of(at), limit);
            let end = at.offset(count.clamp(1, limit) << PAGE_SHIFT);
            if let Some(first) = found {
                let part = VirtRange::raw(at.0, end.0);
                let step = self.map_frames(vma, part, first, Access::Read)?;
                if part.contains(page) {
                    mapped = step;
                }
            }
            at = end;
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
        if vma.flags().intersects(MappingFlags::USERFAULT) {
            return VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        }
        let part = super::folio_range(vma, page, frame.0 - folio.head.0, folio);
        let table = P::Arch::PMD.span();
        let slot = VirtRange::from_len(page.align_down(table), table);
        let part = slot.map_or(part, |slot| part.intersection(slot));
        let below = (page.0 - part.start().0) >> PAGE_SHIFT;
        let above = (part.end().0 - page.0) >> PAGE_SHIFT;
        let index = vma.page_offset_of(page);
        let run = pages::run_around(self.page_table.memory, object, index, frame, below, above);
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
        let folio = self.page_table.memory.frames.folio_of(first).ok_or(FaultError::Bus)?;
        self.page_table.memory.before_execution(attributes.permissions, folio);
        let huge = range.len() == P::Arch::PMD.span() && first.is_aligned(P::Arch::PMD.order());
        if huge {
            let entry = P::Arch::page_entry(first, Level::PMD, attributes);
            let mapped =
                self.page_table.with_tables(|pool| self.map_huge(range, folio, entry, pool));
            // Where there is no table for its deposit, small leaves will do.
            if let Ok(Some(step)) = mapped {
                return Ok(step.accepted()?);
            }
        }
        let entry = P::Arch::page_entry(first, Level::PTE, attributes);
        let mapped = self.page_table.with_tables(|pool| self.map_small(range, folio, entry, pool));
        Ok(mapped?.accepted()?)
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
        if self.page_table.memory.frames.map(folio, range.pages() as u32).is_err() {
            pool.put(deposit);
            return Ok(Some(Step::Refused(FaultError::OutOfMemory)));
        }
        let index = P::Arch::PMD.index_of(range.start());
        self.page_table.publish_huge(holder, index, huge);
        self.page_table.deposit_table(holder, deposit);
        cursor.counts.entries_written += 1;
        cursor.counts.folios_touched += 1;
        let owner = self.page_table.memory.frames.owner_kind(folio);
        cursor.counts.mapped(owner, range.pages() as u32);
        Ok(Some(Step::Done(Resolved::Mapped(range))))
    }

    /// Maps the pages of `folio` that continue `first` one by one, wherever the entry is empty.
    fn map_small(
        &self,
        range: VirtRange,
        folio: Folio,
        first: Entry,
        pool: &mut TablePool<'m, P>,
    ) -> Result<Step, NoMemory> {
        let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
        let EntryAt { node, entry, .. } = cursor.entry_at(range.start());
        if node.level > Level::PTE && !entry.is_empty() {
            // A huge leaf has come between.
            return Ok(Step::Again);
        }
        let table = cursor.table_at(range.start(), Level::PTE, pool)?;
        let begin = P::Arch::PTE.index_of(range.start());
        let end = begin + range.pages() as u32;
        let owner = self.page_table.memory.frames.owner_kind(folio);
        let mut at = begin;
        while at < end {
            let vacant = run::count_empty(&self.page_table.slots(table)[at.slots(end - at)]);
            cursor.counts.entries_read += u64::from(vacant.max(1));
            if vacant == 0 {
                at += 1;
                continue;
            }
            if self.page_table.memory.frames.map(folio, vacant).is_err() {
                return Ok(Step::Refused(FaultError::OutOfMemory));
            }
            cursor.counts.folios_touched += 1;
            cursor.counts.mapped(owner, vacant);
            let part = P::Arch::nth_page(first, at - begin);
            self.page_table.fill(table, at, part, vacant, &mut cursor.counts);
            at += vacant;
        }
        Ok(Step::Done(Resolved::Mapped(range)))
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
                memory.frames.discard(self.platform(), copy);
                step
            }
        }
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
