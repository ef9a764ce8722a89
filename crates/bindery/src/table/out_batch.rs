//! Folios on their way to swap: what was taken out of tables, until it is written out.

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{Order, PAGE_SHIFT, VirtAddr};
use crate::frame::Folio;
use crate::platform::Platform;
use crate::swap::SlotRun;
use crate::swap::slots::Stored;

/// Slots that folios go out to, and where the first page of the first folio was mapped; addresses
/// and slots rise together.
#[derive(Clone, Copy)]
pub(super) struct OutRun {
    pub(super) slots: SlotRun,
    pub(super) at: VirtAddr,
}

/// The most runs of one hold of the locks: with folios of 64 KiB and more, those of two tables.
const RUNS: usize = 64;

/// Folios that have lost their entries and are to be written out: locked, in the swap cache, with a
/// reference of the holder of this.
pub(crate) struct OutBatch {
    pub(super) runs: ArrayVec<OutRun, RUNS>,
    /// Single slots that were allocated and are not used yet.
    spare: Option<SlotRun>,
    /// Up to here the runs are unmapped.
    pub(super) settled: usize,
}

impl OutBatch {
    pub(crate) fn new() -> Self {
        Self { runs: ArrayVec::new(), spare: None, settled: 0 }
    }

    pub(super) fn is_full(&self) -> bool {
        self.runs.is_full()
    }

    /// Slots for a folio. Single ones are allocated for many folios at once.
    #[inline]
    pub(crate) fn slots<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        order: Order,
        left: u32,
    ) -> Option<SlotRun> {
        if order > Order::PAGE {
            return memory.allocate_slots(order, 1);
        }
        let run = match self.spare.take() {
            Some(run) => run,
            None => memory.allocate_slots(Order::PAGE, left.max(1))?,
        };
        if run.count > 1 {
            self.spare = Some(SlotRun { first: run.first + 1, count: run.count - 1, ..run });
        }
        Some(SlotRun { count: 1, ..run })
    }

    pub(crate) fn add(&mut self, slots: SlotRun, at: VirtAddr) {
        if let Some(last) = self.runs[self.settled..].last_mut()
            && last.slots.area == slots.area
            && last.slots.first + u64::from(last.slots.count) == slots.first
            && last.at.0.wrapping_add(u64::from(last.slots.count) << PAGE_SHIFT) == at.0
        {
            last.slots.count += slots.count;
            return;
        }
        // There is room: `is_full` was asked.
        let _ = self.runs.try_push(OutRun { slots, at });
    }

    /// Writes the folios out, and frees those that nobody wants meanwhile. May sleep; called
    /// without locks on tables. Returns how many pages were freed.
    pub(crate) fn write_out<P: Platform>(&mut self, memory: &Memory<P>) -> u64 {
        if let Some(spare) = self.spare.take() {
            memory.free_unused_slots(spare);
        }
        let mut freed = 0;
        let mut batch = memory.free_batch();
        for run in self.runs.drain(..) {
            let mut slot = run.slots.first;
            let end = slot + u64::from(run.slots.count);
            while slot < end {
                let folio = memory.cached_folio(run.slots.area, slot);
                let Some(folio) = folio else {
                    // Its entries were restored, and nothing names the slot.
                    memory.free_unused_slots(SlotRun { first: slot, count: 1, ..run.slots });
                    slot += 1;
                    continue;
                };
                slot += u64::from(folio.pages());
                if memory.write_out_locked(folio, Stored::No) {
                    memory.frames.free_frozen_into(&mut batch, folio);
                    freed += u64::from(folio.pages());
                    if memory.shortage() > 0 {
                        // The next may have to be stored in these.
                        batch.give_back();
                    }
                }
            }
        }
        self.settled = 0;
        drop(batch);
        freed + memory.finish_swap_writes()
    }
}

impl<P: Platform> Memory<P> {
    /// The folio that the cache has for a slot that is its first, and that was allocated by the
    /// caller: the caller has the folio's lock, or has restored its entries.
    pub(super) fn cached_folio(&self, area: u8, slot: u64) -> Option<Folio> {
        let frame = self.swap_cell(area, slot)?.frame()?;
        self.frames.folio_of(frame).filter(|folio| folio.head == frame)
    }
}
