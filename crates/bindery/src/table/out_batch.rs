//! Folios on their way to swap, from the removal of their entries until the write.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{Order, PAGE_SHIFT, VirtAddr};
use crate::folio::{Folio, FolioLocked};
use crate::platform::Platform;
use crate::swap::page_set::PageSet;
use crate::swap::slots::Stored;
use crate::swap::{
    AllInUse, CachedFolio, SlotRun, TakeRequest, allocate_slots, finish_own_writes, try_write_out,
};

/// The slots of swapped-out folios, and the address at which the first page of the first folio was
/// mapped; addresses and slots rise together.
#[derive(Clone, Copy)]
pub(super) struct OutRun {
    pub(super) slots: SlotRun,
    pub(super) at: VirtAddr,
}

/// The time at which a folio in swap-out entered the swap cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InCache {
    /// At the start of the folio's swap-out.
    New,
    /// At the folio's swap-in: other entries still refer to its slots.
    Before,
}

impl InCache {
    /// The references that the cache holds while the folio is mapped.
    pub(super) const fn references(self) -> u32 {
        matches!(self, Self::Before) as u32
    }
}

/// The maximum number of runs per lock span: with folios of 64 KiB and more, the runs of two
/// tables.
const RUNS: usize = u64::BITS as usize;
/// The maximum number of folios that one flush drops.
const LAZY: usize = 32;

/// Folios that have lost their entries and are to be written out. They are locked and in the swap
/// cache, and the holder of the batch holds a reference to each.
pub(crate) struct OutBatch {
    pub(super) runs: ArrayVec<OutRun, RUNS>,
    /// One bit per run, set if the run's folios were in the swap cache before.
    before: u64,
    /// Single slots that were allocated but not yet used.
    spare: Option<SlotRun>,
    /// The runs before this one are unmapped.
    pub(super) settled: usize,
    /// Folios that are dropped after the next flush, with their pages (`MADV_FREE`).
    pub(super) lazy: ArrayVec<(Folio, u32), LAZY>,
    /// Whether some of the folios had other references when they were to be unmapped, so that they
    /// stay in the cache.
    kept: bool,
}

impl OutBatch {
    pub(crate) fn new() -> Self {
        let (runs, lazy) = (ArrayVec::new(), ArrayVec::new());
        Self { runs, before: 0, spare: None, settled: 0, lazy, kept: false }
    }

    /// The time at which the folios of a run entered the cache.
    pub(super) fn in_cache(&self, run: usize) -> InCache {
        if self.before >> run & 1 == 0 { InCache::New } else { InCache::Before }
    }

    pub(super) fn is_full(&self) -> bool {
        self.runs.is_full()
    }

    /// The number of further runs for which the batch has room.
    pub(crate) fn room(&self) -> usize {
        self.runs.remaining_capacity()
    }

    /// Whether the batch has no room for further folios to drop or to write out.
    pub(crate) fn is_due(&self) -> bool {
        self.runs.is_full() || self.lazy.is_full()
    }

    /// The number of base pages in swap-out.
    pub(crate) fn pages(&self) -> u64 {
        let runs: u64 = self.runs.iter().map(|run| u64::from(run.slots.count)).sum();
        runs + self.lazy.iter().map(|(_, pages)| u64::from(*pages)).sum::<u64>()
    }

    /// Called after the flush of all address spaces concerned. The folios lose the mappings of
    /// their former entries. A folio with other references stays in the swap cache, to which the
    /// entries refer. Returns the number of base pages of lazy folios that were freed.
    ///
    /// # Safety
    /// 1. These flushes are complete.
    pub(crate) unsafe fn unmap_deferred<P: Platform>(&mut self, memory: &Memory<P>) -> u64 {
        let mut dropped = 0;
        let mut batch = memory.free_batch();
        for (folio, pages) in self.lazy.drain(..) {
            // SAFETY: 1. their entries were cleared, and each folio is visited once; 2. the
            // caller's obligation 1.
            unsafe { memory.frames.folio(folio).unmap_into(&mut batch, pages, || false) };
            dropped += u64::from(pages);
        }
        for number in self.settled..self.runs.len() {
            let (OutRun { slots, .. }, in_cache) = (self.runs[number], self.in_cache(number));
            let mut done = 0;
            while done < slots.count {
                let first = slots.first + u64::from(done);
                let here = SlotRun { first, count: 1, ..slots };
                let Some(folio) = here.cached_folio(memory) else { break };
                let pages = memory.frames.folio(folio).mappings();
                // SAFETY: 1. entries of swap slots have replaced them; 2. the caller's obligation
                // 1; 3. the cache's references.
                let unmapped =
                    unsafe { memory.frames.folio(folio).unmap_all(pages, in_cache.references()) };
                if !unmapped {
                    // SAFETY: 1. and 2. as above; nothing was dropped.
                    unsafe { self.keep(memory, folio, pages, in_cache) };
                }
                done += folio.pages();
            }
        }
        self.settled = self.runs.len();
        dropped
    }

    /// Drops the `pages` mappings of a folio that has lost its entries but has other references.
    /// The folio stays in the cache.
    ///
    /// # Safety
    /// 1. Entries of swap slots have replaced these mappings, which are dropped only here.
    /// 2. The mappings were flushed.
    #[cold]
    pub(super) unsafe fn keep<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        folio: Folio,
        pages: u32,
        in_cache: InCache,
    ) {
        self.kept = true;
        // The references of the cache and of `write_out`. If the addition is refused, the mappings
        // keep the folio.
        if memory.frames.folio(folio).add_references(2 - in_cache.references()).is_ok() {
            // SAFETY: 1. and 2. the caller's obligations 1 and 2.
            unsafe { memory.frames.folio(folio).unmap(pages) };
        }
    }

    /// Frees the single slots that are left if their area was stopped since. Called for each table
    /// that was locked, so that a batch of many tables does not fill a stopped area. Within one
    /// table the slots stay in use: a look for each page would cost 63 instructions.
    pub(super) fn drop_stopped<P: Platform>(&mut self, memory: &Memory<P>) {
        let stopped = self.spare.take_if(|run| !run.may_begin(memory));
        stopped.into_iter().for_each(|run| run.free_unused(memory));
    }

    /// Slots for a folio. Single slots are allocated for many folios at once.
    #[inline]
    pub(crate) fn slots<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        order: Order,
        left: u32,
    ) -> Option<SlotRun> {
        if order > Order::PAGE {
            return allocate_slots(memory, order, 1);
        }
        let run = match self.spare.take() {
            Some(run) => run,
            None => allocate_slots(memory, Order::PAGE, left.max(1))?,
        };
        if run.count > 1 {
            self.spare = Some(SlotRun { first: run.first + 1, count: run.count - 1, ..run });
        }
        Some(SlotRun { count: 1, ..run })
    }

    #[inline(always)]
    pub(crate) fn add(&mut self, slots: SlotRun, at: VirtAddr, in_cache: InCache) {
        let number = self.runs.len();
        if let Some(last) = self.runs[self.settled..].last_mut()
            && self.before >> (number - 1) == u64::from(in_cache.references())
            && last.slots.area == slots.area
            && last.slots.first + u64::from(last.slots.count) == slots.first
            && last.at.0.wrapping_add(u64::from(last.slots.count) << PAGE_SHIFT) == at.0
        {
            last.slots.count += slots.count;
            return;
        }
        // The batch has room, since `is_full` was checked.
        if self.runs.try_push(OutRun { slots, at }).is_ok() {
            self.before |= u64::from(in_cache.references()) << number;
        }
    }

    /// Writes the folios out and frees those that no fault has claimed by then. May sleep; called
    /// without table locks. Returns the number of freed pages.
    pub(crate) fn write_out<P: Platform>(&mut self, memory: &Memory<P>) -> u64 {
        self.write(memory, TakeRequest::Awaits).0
    }

    /// As [`OutBatch::write_out`], but waits for no request of a device. The first folio that needs
    /// one and gets none stays in the swap cache, unlocked, and so do the later ones that need a
    /// request: [`write_out_slots`] writes them out. Sleeps only if a device does in
    /// [`crate::SwapDevice::submit`]. Returns the address of the first folio that stays, as
    /// [`OutBatch::add`] was told.
    ///
    /// [`write_out_slots`]: crate::swap::unwritten::write_out_slots
    pub(crate) fn try_write_out<P: Platform>(&mut self, memory: &Memory<P>) -> Option<VirtAddr> {
        self.write(memory, TakeRequest::IfFree).1
    }

    fn write<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        mut take: TakeRequest,
    ) -> (u64, Option<VirtAddr>) {
        if let Some(spare) = self.spare.take() {
            spare.free_unused(memory);
        }
        let (mut freed, mut left) = (0, None);
        let mut batch = memory.free_batch();
        let enough = memory.enough_free_frames();
        let kept = core::mem::take(&mut self.kept);
        let before = core::mem::take(&mut self.before);
        for (number, run) in self.runs.drain(..).enumerate() {
            let mut slot = run.slots.first;
            let end = slot + u64::from(run.slots.count);
            let is_new = before >> number & 1 == 0;
            while slot < end {
                let here = SlotRun { first: slot, count: 1, ..run.slots };
                let Some(folio) = here.cached_folio(memory) else {
                    // The folio's entries were restored, and no entry refers to the slot.
                    here.free_unused(memory);
                    slot += 1;
                    continue;
                };
                let stored = if is_new { Stored::No } else { here.stored(memory) };
                let pages = u64::from(folio.pages());
                slot += pages;
                // SAFETY: 1. and 2. the folios of runs were left to this batch, each with a
                // reference, and each is visited once.
                let leaving = unsafe { memory.frames.folio(folio).folio_of_batch() };
                if kept && stays_in_cache(memory, leaving.locked()) {
                    continue;
                }
                let frozen = match try_write_out(memory, leaving, stored, take) {
                    Ok(frozen) => frozen,
                    Err(AllInUse { .. }) => {
                        let done = slot - pages - run.slots.first;
                        let at = run.at.0.wrapping_add(done << PAGE_SHIFT);
                        left = left.or(Some(VirtAddr(at)));
                        take = TakeRequest::Never;
                        None
                    }
                };
                if let Some(frozen) = frozen {
                    frozen.free_into(&mut batch);
                    freed += pages;
                    if memory.frames.listed_frame_count() < enough {
                        // The frames freed here may have to hold the next folio.
                        batch.free_all();
                    }
                }
            }
        }
        self.settled = 0;
        drop(batch);
        (freed + finish_own_writes(memory), left)
    }
}

/// Whether a folio that is being evicted has references besides those of the cache and the caller,
/// so that a device may write to the folio. The entries that refer to its slots then find it in the
/// cache.
fn stays_in_cache<P: Platform>(memory: &Memory<P>, folio: FolioLocked<'_>) -> bool {
    let handle = memory.frames.folio(*folio);
    if handle.pins() == 0 && handle.references() == 2 {
        return false;
    }
    if let Some(cached) = CachedFolio::find(memory, folio) {
        cached.unlock(&PageSet::EMPTY);
    }
    true
}
