//! The private pages of a mapping, and the folios that wait for a request of a device.

use arrayvec::ArrayVec;

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Kind, Level};
use crate::error::Failure;
use crate::platform::Platform;
use crate::swap::unwritten::write_out_slots;
use crate::swap::{AllInUse, SlotRun};
use crate::table::PageTable;
use crate::table::cursor::Chunks;
use crate::table::locking::Depth;
use crate::table::look;
use crate::table::out_batch::OutBatch;
use crate::table::swap_out;
use crate::table::swap_out_scan::{SwapOutScan, SwapOutStop};
use crate::vma::Vma;

use super::{PageOut, Sent, after};
use crate::space::AddressSpace;
use crate::space::call::cold_or_free::without_shared_huge_edges;
use crate::space::call::madvise::shared_memory;
use crate::space::folio::split_if_alone;
use crate::space::op::Op;

/// The maximum number of runs of slots that one look at the entries collects.
const RUNS: usize = 32;

/// Slots of pages that are mapped one after another, and the address of the first page.
struct RunAt {
    at: VirtAddr,
    slots: SlotRun,
}

impl RunAt {
    /// Whether the run continues with this one.
    fn continues(&self, next: &Self) -> bool {
        let count = u64::from(self.slots.count);
        self.slots.area == next.slots.area
            && self.slots.first + count == next.slots.first
            && self.at.0 + (count << PAGE_SHIFT) == next.at.0
    }
}

impl PageOut {
    /// Swaps out the anonymous folios that only `rest` maps, in one set of table locks, with one
    /// flush. Locks the VMA only for reading and only while entries change, so a concurrent fault
    /// waits at most for the folio that it needs. Skips the rest if no slots are free.
    // Long and rare: inlining the function would slow common advice down.
    #[inline(never)]
    pub(super) fn send_private<P: Platform>(
        &mut self,
        op: &mut Op<'_, '_, P>,
        vma: &Vma,
        rest: VirtRange,
        batch: &mut OutBatch,
    ) -> Result<(), Failure> {
        if let Some((folio, at)) = self.cut.take()
            && at == rest.start()
            && !split_if_alone(op.edit.table(), at)
        {
            self.unsplittable = Some(folio);
        }
        let mut scan = SwapOutScan::ALL;
        if let Some(folio) = self.unsplittable {
            scan.leave(folio);
        }
        let mut chunks = Chunks::of(without_shared_huge_edges(op.edit.table(), rest));
        // The mutex excludes writers.
        let Some(_locked) = vma.try_read(op.platform()) else {
            self.private = after(self.private, rest.end());
            return Ok(());
        };
        let Some(next) = op.edit.next_part(&mut chunks) else {
            self.private = after(self.private, rest.end());
            return Ok(());
        };
        let attributes = vma.flags().attributes().get();
        let (stop, end) = {
            let section = op.edit.table().read_section();
            let depth = Depth::Floor(Level::PTE);
            let mut span = op.edit.chunk_span(&section, &mut chunks, next, depth);
            let end = span.range().end();
            (swap_out::swap_out(&mut span, attributes, &mut scan, batch), end)
        };
        self.sent = Sent::Private(VirtRange::raw(next.start().0, end.0));
        let next = match stop? {
            SwapOutStop::End => end,
            SwapOutStop::Full(at) => at,
            SwapOutStop::Cut(folio, at) => {
                self.cut = Some((folio, at));
                at
            }
            SwapOutStop::NoSlots => rest.end(),
        };
        self.private = after(self.private, next);
        Ok(())
    }

    /// Writes out the folios of earlier sets of locks that still wait for a request.
    ///
    /// # Errors
    /// [`AllInUse`] if some of them have to wait on.
    #[inline]
    pub(super) fn write_rest<P: Platform>(
        &mut self,
        space: &AddressSpace<'_, P>,
    ) -> Result<(), AllInUse> {
        if self.unwritten.range().is_empty() { Ok(()) } else { self.write_some(space) }
    }

    #[cold]
    #[inline(never)]
    fn write_some<P: Platform>(&mut self, space: &AddressSpace<'_, P>) -> Result<(), AllInUse> {
        while !self.unwritten.range().is_empty() {
            let (runs, end) = unwritten_runs(space, self.unwritten);
            for RunAt { at, mut slots } in runs {
                let first = slots.first;
                let written = write_out_slots(space.page_table.memory, &mut slots);
                let next = at.offset((slots.first - first) << PAGE_SHIFT);
                self.unwritten = self.unwritten.from(next);
                written?;
            }
            self.unwritten = self.unwritten.from(end);
        }
        Ok(())
    }
}

/// The slots of the pages in swap, and the address up to which these are all.
fn unwritten_runs<P: Platform>(
    space: &AddressSpace<'_, P>,
    sent: Sent,
) -> (ArrayVec<RunAt, RUNS>, VirtAddr) {
    let vmas = space.vmas.lock();
    match (vmas.view().first_in(sent.range()), sent) {
        // Another thread has unmapped the pages.
        (None, _) => (ArrayVec::new(), sent.range().end()),
        (Some(vma), Sent::Private(range)) => {
            runs_of_entries(&space.page_table, vma.range().intersection(range))
        }
        (Some(vma), Sent::Shared(range)) => {
            runs_of_object(space, vma, vma.range().intersection(range))
        }
    }
}

/// The slots to which the entries refer.
fn runs_of_entries<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
) -> (ArrayVec<RunAt, RUNS>, VirtAddr) {
    let (mut runs, mut end) = (ArrayVec::<RunAt, RUNS>::new(), range.end());
    look::look(page_table, range, |looked| {
        if looked.node.level.kind(looked.raw) != Kind::Absent {
            return true;
        }
        let Some(Absent::Swap { device, slot, .. }) = P::Arch::decode_absent(looked.raw) else {
            return true;
        };
        let (at, span) = (looked.range.start(), looked.node.level.span());
        let first = slot + ((at.0 & (span - 1)) >> PAGE_SHIFT);
        let slots = SlotRun { area: device, first, count: looked.range.pages() as u32 };
        let run = RunAt { at, slots };
        if let Some(last) = runs.last_mut()
            && last.continues(&run)
        {
            last.slots.count += run.slots.count;
            return true;
        }
        let full = runs.try_push(run).is_err();
        if full {
            end = at;
        }
        !full
    });
    (runs, end)
}

/// The first slots to which the index of the object refers, for the pages mapped in the range.
fn runs_of_object<P: Platform>(
    space: &AddressSpace<'_, P>,
    vma: &Vma,
    range: VirtRange,
) -> (ArrayVec<RunAt, RUNS>, VirtAddr) {
    let mut runs = ArrayVec::new();
    let Some(object) = shared_memory(vma) else { return (runs, range.end()) };
    let first = vma.page_offset_of(range.start());
    let found = object
        .pages
        .look(space.platform(), |index| index.next_swapped(first, first + range.pages()));
    let Some(found) = found else { return (runs, range.end()) };
    let at = range.start().offset((found.page - first) << PAGE_SHIFT);
    let slots = SlotRun { area: found.first.area, first: found.first.slot, count: found.count };
    runs.push(RunAt { at, slots });
    (runs, at.offset(u64::from(found.count) << PAGE_SHIFT))
}
