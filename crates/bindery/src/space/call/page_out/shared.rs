//! The shared memory of a mapping.

use arrayvec::ArrayVec;

use crate::addr::{PAGE_SHIFT, PageRange, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{Failure, NoMemory};
use crate::folio::Folio;
use crate::object::ObjectState;
use crate::object::reclaim::Spare;
use crate::object::swap_out::{FOLIOS, Leaving, add_folios, swap_out as swap_out_of_object};
use crate::platform::Platform;
use crate::swap::page_set::PageSet;
use crate::table::PageTable;
use crate::table::look;
use crate::table::out_batch::OutBatch;
use crate::table::zap_chosen::{MappedFolio, ZapChoice};
use crate::vma::Vma;

use super::{PageOut, Sent, after};
use crate::space::op::Op;

/// Pages that this call has unmapped, and that may still be in the object's index.
#[derive(Debug)]
pub(super) struct UnmappedPages {
    /// A range of one table.
    here: VirtRange,
    /// The numbers of the pages, counted from the start of the range.
    pages: PageSet,
}

impl PageOut {
    /// Swaps out the folios of shared memory that only `rest` maps: up to [`FOLIOS`] huge leaves,
    /// or the pages of one table. Pages with mappings in other VMAs and pages without an entry here
    /// stay in memory, as on Linux. Linear in the number of entries of the existing tables.
    #[inline(never)]
    pub(super) fn send_shared<P: Platform>(
        &mut self,
        op: &mut Op<'_, '_, P>,
        (vma, object): (&Vma, &ObjectState),
        rest: VirtRange,
        batch: &mut OutBatch,
    ) -> Result<(), Failure> {
        let page_table = op.edit.table();
        let mut leaving = SharedOut { page_table, object, folios: ArrayVec::new(), batch };
        // The start of the rest, and the end of the pages whose folios are sent.
        let (mut left, mut sent) = (rest, rest.start());
        let before = self.unmapped.take();
        let mut before = before.filter(|before| rest.covers(before.here));
        let done = loop {
            // Skips ranges without tables in one step. Pages that a concurrent fault maps in such a
            // range stay in memory.
            let here = before.as_ref().map(|before| before.here);
            let here = here.or_else(|| op.edit.first_part(left, P::Arch::PMD.span()));
            let Some(here) = here else {
                left = after(rest, rest.end());
                break Ok(());
            };
            if before.is_none()
                && let Some(folio) = huge_folio(page_table, here)
            {
                (left, sent) = (after(rest, here.end()), here.end());
                if leaving.add_huge(folio) {
                    break Ok(());
                }
                continue;
            }
            if !leaving.folios.is_empty() {
                // These folios are unlocked before another table is locked.
                left = after(rest, here.start());
                break Ok(());
            }
            let unmapped = match before.take() {
                Some(before) => Ok(before.pages),
                None => unmap_alone(op, vma, here),
            };
            let unmapped = match unmapped {
                Ok(unmapped) => unmapped,
                Err(failure) => break Err(failure),
            };
            let first = vma.page_offset_of(here.start());
            (left, sent) = (after(rest, here.end()), here.end());
            if let Some(pages) = leaving.send_unmapped(first, unmapped) {
                left = after(rest, here.start());
                self.unmapped = Some(UnmappedPages { here, pages });
            }
            break Ok(());
        };
        leaving.send();
        self.shared = after(self.shared, left.start());
        let offset = vma.page_offset_of(rest.start()) << PAGE_SHIFT;
        self.skew = rest.start().0.wrapping_sub(offset);
        self.sent = Sent::Shared(VirtRange::raw(rest.start().0, sent.0));
        Ok(done?)
    }
}

/// Unmaps the pages whose folios are mapped only by this range of one table, with one flush.
/// Returns the numbers of the pages, counted from the start of the range.
fn unmap_alone<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    here: VirtRange,
) -> Result<PageSet, NoMemory> {
    let alone = mapped_alone(op.edit.table(), here);
    // The mutex excludes writers.
    let Some(_locked) = vma.try_read(op.platform()) else { return Ok(PageSet::EMPTY) };
    if alone.next_run(0).is_none() {
        return Ok(PageSet::EMPTY);
    }
    let frames = &op.memory().frames;
    let fate = |mapped: MappedFolio| {
        let goes = alone.has(mapped.number) && frames.folio(mapped.folio).is_of_object();
        if goes { ZapChoice::Goes } else { ZapChoice::Stays }
    };
    op.edit.zap_chosen(here, vma.dropped_protection(), fate)?;
    Ok(alone)
}

/// The pages whose folios belong to an object and are mapped only by this range of one table.
fn mapped_alone<P: Platform>(page_table: &PageTable<'_, P>, here: VirtRange) -> PageSet {
    let frames = &page_table.memory.frames;
    let mut alone = PageSet::EMPTY;
    let mut last: Option<Met> = None;
    let decide = |alone: &mut PageSet, last: Option<Met>| {
        if let Some(Met { folio, first, end, count }) = last
            && frames.folio(folio).mappings() > count
        {
            alone.remove(first, end - first);
        }
    };
    look::look(page_table, here, |looked| {
        let folio = looked.frame().and_then(|frame| frames.folio_of(frame));
        let Some(folio) = folio.filter(|folio| frames.folio(*folio).is_of_object()) else {
            return true;
        };
        let first = ((looked.range.start().0 - here.start().0) >> PAGE_SHIFT) as u32;
        let pages = looked.range.pages() as u32;
        alone.add(first, pages);
        match &mut last {
            Some(last) if last.folio == folio => {
                (last.end, last.count) = (first + pages, last.count + pages);
            }
            _ => {
                let met = Met { folio, first, end: first + pages, count: pages };
                decide(&mut alone, last.replace(met));
            }
        }
        true
    });
    decide(&mut alone, last);
    alone
}

/// The folio of a huge leaf that covers exactly this range.
fn huge_folio<P: Platform>(page_table: &PageTable<'_, P>, here: VirtRange) -> Option<Folio> {
    let mut found = None;
    look::look(page_table, here, |looked| {
        if looked.node.level > Level::PTE && looked.range == here {
            let frames = &page_table.memory.frames;
            found = looked.frame().and_then(|frame| frames.folio_of(frame));
        }
        false
    });
    found
}

/// A folio with pages mapped in a range.
struct Met {
    folio: Folio,
    /// The first mapped page.
    first: u32,
    /// The page after the last mapped one.
    end: u32,
    /// The number of mapped pages.
    count: u32,
}

/// Collects folios of shared memory and adds them to the batch.
struct SharedOut<'a, 'm, P: Platform> {
    page_table: &'a PageTable<'m, P>,
    object: &'a ObjectState,
    folios: ArrayVec<Leaving<'m, P>, FOLIOS>,
    batch: &'a mut OutBatch,
}

impl<P: Platform> SharedOut<'_, '_, P> {
    /// Adds the folio of a huge leaf, if the folio has no other mappings. Returns whether no more
    /// fit.
    fn add_huge(&mut self, folio: Folio) -> bool {
        let memory = self.page_table.memory;
        let leaving = Leaving::new(memory, self.object, folio.head);
        self.folios.extend(leaving.filter(|leaving| leaving.mappings(memory) <= folio.pages()));
        self.folios.is_full()
    }

    /// Swaps out the folios of pages that were just unmapped. The numbers in the set count from
    /// page `first` of the object. Returns the pages for which the batch has no room.
    fn send_unmapped(&mut self, first: u64, mut unmapped: PageSet) -> Option<PageSet> {
        let (memory, object) = (self.page_table.memory, self.object);
        let mut next = unmapped.next_run(0);
        while let Some(run) = next {
            let (mut page, end) = (first + u64::from(run.first), first + u64::from(run.end()));
            while page < end {
                if self.batch.room() < FOLIOS {
                    unmapped.remove(0, (page - first) as u32);
                    return Some(unmapped);
                }
                let pages = PageRange { first: page, end };
                page = add_folios(memory, object, pages, &mut self.folios, |leaving| {
                    leaving.mappings(memory) == 0
                });
                if self.folios.is_full() {
                    self.send();
                }
            }
            next = unmapped.next_run(run.end());
        }
        None
    }

    fn send(&mut self) {
        if !self.folios.is_empty() {
            let memory = self.page_table.memory;
            let (object, folios) = (self.object, &mut self.folios);
            swap_out_of_object(memory, object, folios, Spare::Nothing, self.batch);
        }
    }
}
