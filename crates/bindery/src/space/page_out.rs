//! `MADV_PAGEOUT`: the anonymous pages of a range go to swap, and shared memory does.

use arrayvec::ArrayVec;

use crate::addr::{PAGE_SHIFT, PageRange, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{Failure, NoMemory};
use crate::folio::Folio;
use crate::interrupt;
use crate::object::ObjectState;
use crate::object::reclaim::Spare;
use crate::object::swap_out::{FOLIOS, Leaving, add_folios, swap_out};
use crate::platform::Platform;
use crate::swap::page_set::PageSet;
use crate::table::PageTable;
use crate::table::cursor::Chunks;
use crate::table::locking::Depth;
use crate::table::out_batch::OutBatch;
use crate::table::victims::{SwapOutStop, Victims};
use crate::table::zap_chosen::{Fate, Mapped};
use crate::tlb::Gather;
use crate::vma::Vma;

use super::AddressSpace;

impl<P: Platform> AddressSpace<'_, P> {
    /// Sends the anonymous folios that are mapped in `part` alone to swap, table by table: one
    /// flush for each part that one set of locks serves. The VMA is locked for reading: a fault in
    /// it waits for the folio that it wants, and for no other. Ends early where no slots are left.
    // Not one of the commoner kinds of advice, and long.
    #[inline(never)]
    pub(super) fn page_out(
        &self,
        vma: &Vma,
        part: VirtRange,
        gather: &mut Gather,
    ) -> Result<(), Failure> {
        let memory = self.page_table.memory;
        let attributes = vma.flags().attributes();
        let mut chunks = Chunks::of(self.without_shared_huge_edges(part));
        let mut batch = OutBatch::new();
        let mut victims = Victims::ALL;
        // The mutex keeps writers out.
        let Some(locked) = vma.try_read(self.platform()) else { return Ok(()) };
        loop {
            let stop = {
                let Some(mut cursor) =
                    chunks.next(&self.page_table, Depth::Floor(Level::PTE), Some(&*gather))
                else {
                    break;
                };
                PageTable::swap_out(&mut cursor, attributes, &mut victims, &mut batch, gather)
            };
            batch.write_out(memory);
            match stop? {
                SwapOutStop::End => {}
                SwapOutStop::Full(at) => chunks.go_on_from(at),
                SwapOutStop::Cut(folio, at) => {
                    if !self.split_if_alone(at) {
                        victims.leave(folio);
                    }
                    chunks.go_on_from(at);
                }
                SwapOutStop::NoSlots => break,
            }
            interrupt::check(self.platform())?;
        }
        drop(locked);
        Ok(())
    }

    /// Sends the folios of shared memory that are mapped in `part` alone to swap, table by table. As
    /// on Linux, what other VMAs map too stays, and so does what nobody has touched here. Linear in
    /// the entries of the tables that are there.
    #[inline(never)]
    pub(super) fn page_out_shared(
        &self,
        vma: &Vma,
        object: &ObjectState,
        part: VirtRange,
        gather: &mut Gather,
    ) -> Result<(), Failure> {
        if !object.may_be_swapped() {
            return Ok(());
        }
        let mut leaving =
            SharedOut { page_table: &self.page_table, object, folios: ArrayVec::new() };
        let (mut left, span) = (part, P::Arch::PMD.span());
        // Stretches without tables are passed over in one step. A page that a fault maps there
        // meanwhile stays.
        while let Some(here) = self.page_table.first_part(left, span, Some(&*gather)) {
            interrupt::check(self.platform())?;
            if let Some(folio) = self.huge_folio(here) {
                leaving.add_huge(folio);
            } else {
                // No folio is locked while another table is.
                leaving.send();
                let unmapped = self.unmap_alone(vma, here, gather)?;
                leaving.send_unmapped(vma.page_offset_of(here.start()), &unmapped);
            }
            left = VirtRange::raw(here.end().0, part.end().0);
        }
        leaving.send();
        Ok(())
    }

    /// The folio that a huge leaf maps at all of the range.
    fn huge_folio(&self, here: VirtRange) -> Option<Folio> {
        let mut found = None;
        self.page_table.look(here, |looked| {
            if looked.node.level > Level::PTE && looked.range == here {
                let frames = &self.page_table.memory.frames;
                found = looked.frame().and_then(|frame| frames.folio_of(frame));
            }
            false
        });
        found
    }

    /// Unmaps the pages of a range in one table whose folios are mapped there alone, with one flush.
    /// Says which those are, counted from its start.
    fn unmap_alone(
        &self,
        vma: &Vma,
        here: VirtRange,
        gather: &mut Gather,
    ) -> Result<PageSet, NoMemory> {
        let alone = self.mapped_alone(here);
        // The mutex keeps writers out.
        let Some(_locked) = vma.try_read(self.platform()) else { return Ok(PageSet::EMPTY) };
        if alone.next_run(0).is_none() {
            return Ok(PageSet::EMPTY);
        }
        let frames = &self.page_table.memory.frames;
        let fate = |mapped: Mapped| {
            let goes = alone.has(mapped.number) && frames.folio(mapped.folio).is_of_object();
            if goes { Fate::Goes } else { Fate::Stays }
        };
        self.page_table.zap_chosen(here, vma.dropped_protection(), gather, fate)?;
        Ok(alone)
    }

    /// Which pages of a range in one table belong to folios of objects that are mapped there alone.
    fn mapped_alone(&self, here: VirtRange) -> PageSet {
        let frames = &self.page_table.memory.frames;
        let mut alone = PageSet::EMPTY;
        let mut last: Option<Met> = None;
        let decide = |alone: &mut PageSet, last: Option<Met>| {
            if let Some(Met { folio, first, end, count }) = last
                && frames.folio(folio).mappings() > count
            {
                alone.remove(first, end - first);
            }
        };
        self.page_table.look(here, |looked| {
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
}

/// A folio of which pages are mapped in a range.
struct Met {
    folio: Folio,
    /// The first that is mapped.
    first: u32,
    /// The one after the last.
    end: u32,
    /// How many are.
    count: u32,
}

/// Folios of shared memory on their way out.
struct SharedOut<'a, 'm, P: Platform> {
    page_table: &'a PageTable<'m, P>,
    object: &'a ObjectState,
    folios: ArrayVec<Leaving<'m, P>, FOLIOS>,
}

impl<P: Platform> SharedOut<'_, '_, P> {
    /// Adds a folio that a huge leaf maps, if nothing else does.
    fn add_huge(&mut self, folio: Folio) {
        let memory = self.page_table.memory;
        let leaving = Leaving::new(memory, self.object, folio.head);
        self.folios.extend(leaving.filter(|leaving| leaving.mappings(memory) <= folio.pages()));
        if self.folios.is_full() {
            self.send();
        }
    }

    /// Sends the folios of pages to swap that were unmapped just now; the set counts from page
    /// `first` of the object on.
    fn send_unmapped(&mut self, first: u64, unmapped: &PageSet) {
        let (memory, object) = (self.page_table.memory, self.object);
        let mut next = unmapped.next_run(0);
        while let Some(run) = next {
            let (mut page, end) = (first + u64::from(run.first), first + u64::from(run.end()));
            while page < end {
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
        self.send();
    }

    fn send(&mut self) {
        if !self.folios.is_empty() {
            let mut batch = OutBatch::new();
            let memory = self.page_table.memory;
            swap_out(memory, self.object, &mut self.folios, Spare::Nothing, &mut batch);
            batch.write_out(memory);
        }
    }
}
