//! `MADV_PAGEOUT`: swaps out the anonymous pages and the shared memory of a range.

use super::cold_or_free::without_shared_huge_edges;
use crate::space::folio::split_if_alone;
use crate::table::look;
use arrayvec::ArrayVec;

use crate::addr::{PAGE_SHIFT, PageRange, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{Failure, NoMemory};
use crate::folio::Folio;
use crate::interrupt;
use crate::object::ObjectState;
use crate::object::reclaim::Spare;
use crate::object::swap_out::{FOLIOS, Leaving, add_folios, swap_out as swap_out_of_object};
use crate::platform::Platform;
use crate::swap::page_set::PageSet;
use crate::table::PageTable;
use crate::table::cursor::Chunks;
use crate::table::locking::Depth;
use crate::table::out_batch::OutBatch;
use crate::table::swap_out;
use crate::table::swap_out_scan::{SwapOutScan, SwapOutStop};
use crate::table::zap_chosen::{MappedFolio, ZapChoice};
use crate::vma::Vma;

use crate::space::op::Op;

/// Swaps out the anonymous folios that only `part` maps, table by table, with one flush per set of
/// table locks. Locks the VMA only for reading and only while entries change, so a concurrent fault
/// waits at most for the folio that it needs. Ends early if no slots are free.
// Long and rare: inlining the function would slow common advice down.
#[inline(never)]
pub(in crate::space) fn page_out<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
) -> Result<(), Failure> {
    let memory = op.memory();
    let attributes = vma.flags().attributes().get();
    let mut chunks = Chunks::of(without_shared_huge_edges(op.edit.table(), part));
    let mut batch = OutBatch::new();
    let mut scan = SwapOutScan::ALL;
    loop {
        let stop = {
            // The mutex excludes writers.
            let Some(_locked) = vma.try_read(op.platform()) else { return Ok(()) };
            let Some(next) = op.edit.next_part(&mut chunks) else { break };
            let section = op.edit.table().read_section();
            let depth = Depth::Floor(Level::PTE);
            let mut span = op.edit.chunk_span(&section, &mut chunks, next, depth);
            swap_out::swap_out(&mut span, attributes, &mut scan, &mut batch)
        };
        // Called with the VMA unlocked, because a device may have to work or be waited for.
        batch.write_out(memory);
        match stop? {
            SwapOutStop::End => {}
            SwapOutStop::Full(at) => chunks.go_on_from(at),
            SwapOutStop::Cut(folio, at) => {
                if !split_if_alone(op.edit.table(), at) {
                    scan.leave(folio);
                }
                chunks.go_on_from(at);
            }
            SwapOutStop::NoSlots => break,
        }
        interrupt::check(op.platform())?;
    }
    Ok(())
}

/// Swaps out the folios of shared memory that only `part` maps, table by table. Pages with mappings
/// in other VMAs and pages without an entry here stay in memory, as on Linux. Linear in the number
/// of entries of the existing tables.
#[inline(never)]
pub(in crate::space) fn page_out_shared<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    object: &ObjectState,
    part: VirtRange,
) -> Result<(), Failure> {
    if !object.may_be_swapped() {
        return Ok(());
    }
    let page_table = op.edit.table();
    let mut leaving = SharedOut { page_table, object, folios: ArrayVec::new() };
    let (mut left, span) = (part, P::Arch::PMD.span());
    // Skips ranges without tables in one step. Pages that a concurrent fault maps in such a range
    // stay in memory.
    while let Some(here) = op.edit.first_part(left, span) {
        interrupt::check(op.platform())?;
        if let Some(folio) = huge_folio(page_table, here) {
            leaving.add_huge(folio);
        } else {
            // Unlocks the collected folios before another table is locked.
            leaving.send();
            let unmapped = unmap_alone(op, vma, here)?;
            leaving.send_unmapped(vma.page_offset_of(here.start()), &unmapped);
        }
        left = VirtRange::raw(here.end().0, part.end().0);
    }
    leaving.send();
    Ok(())
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

/// Collects folios of shared memory and swaps them out in batches.
struct SharedOut<'a, 'm, P: Platform> {
    page_table: &'a PageTable<'m, P>,
    object: &'a ObjectState,
    folios: ArrayVec<Leaving<'m, P>, FOLIOS>,
}

impl<P: Platform> SharedOut<'_, '_, P> {
    /// Adds the folio of a huge leaf, if the folio has no other mappings.
    fn add_huge(&mut self, folio: Folio) {
        let memory = self.page_table.memory;
        let leaving = Leaving::new(memory, self.object, folio.head);
        self.folios.extend(leaving.filter(|leaving| leaving.mappings(memory) <= folio.pages()));
        if self.folios.is_full() {
            self.send();
        }
    }

    /// Swaps out the folios of pages that were just unmapped. The numbers in the set count from
    /// page `first` of the object.
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
            swap_out_of_object(memory, self.object, &mut self.folios, Spare::Nothing, &mut batch);
            batch.write_out(memory);
        }
    }
}
