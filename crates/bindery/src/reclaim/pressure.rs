//! Batches of folios from any address spaces, swapped out with one flush for each space.
//!
//! ```text
//! hand      | folio in space A | folio in space B | folio in space A | ...
//! tables    | entries change   | entries change   | entries change   | each under its table's lock
//! flush     |                                                        | A | B |
//! unmap     | all folios
//! write out | all folios, no lock but theirs
//! ```
//!
//! Between the change of the entries and the flush, the tables are marked as pending, so that no
//! other CPU relies on their entries ([`crate::tlb`]). The folios are locked, so a fault that finds
//! a swap entry waits. The VMAs are locked for reading, so that the VMAs and their address spaces
//! stay; the batch waits for nothing while it holds these locks.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::Frame;
use crate::arch::Arch;
use crate::object::reclaim::LookedAt;
use crate::platform::Platform;
use crate::rmap::RmapHit;
use crate::table::PageTable;
use crate::table::edit::Edit;
use crate::table::locking::Depth;
use crate::table::out_batch::OutBatch;
use crate::table::swap_out::swap_out_deferred;
use crate::table::swap_out_scan::SwapOutScan;
use crate::tlb::Gather;
use crate::vma::{MappingFlags, ReadLockedVma};
use crate::{addr::VirtRange, arch::Level};

/// The number of folios at which a batch is due to be written out.
const FOLIOS: u64 = 32;
/// The maximum number of address spaces in one batch. Each has a gather of 600 bytes on the stack.
const SPACES: usize = 4;
/// The maximum number of VMAs in one batch.
const VMAS: usize = 32;
/// The maximum number of dirty folios of files that a batch remembers.
const DIRTY: usize = 16;
/// The number of frames that the hand may pass before a batch that is not full is written out,
/// because other threads may be waiting for the VMAs.
const FRAMES: u64 = 1024;

/// Entries that were removed from the tables of one address space and are not flushed yet.
struct Space<'m, P: Platform> {
    page_table: PageTable<'m, P>,
    gather: Gather,
}

/// A batch of folios from any address space; see the module.
pub(super) struct EvictionBatch<'m, P: Platform> {
    pub(super) memory: &'m Memory<P>,
    out: OutBatch,
    spaces: ArrayVec<Space<'m, P>, SPACES>,
    vmas: ArrayVec<ReadLockedVma, VMAS>,
    folios: u64,
    /// The number of pages in flight.
    pages: u64,
    /// The number of pages freed since the batch began that no call has returned yet.
    dropped: u64,
    /// The position of the hand when the batch began.
    began: u64,
    /// The first frames of dirty folios of files, which are stored when no lock is held.
    pub(super) dirty: ArrayVec<Frame, DIRTY>,
    /// Whether the hand has skipped a folio that may be reclaimable if it is no longer locked into
    /// memory.
    pub(super) passed_over: bool,
    /// Whether a folio stays that another attempt may free, because it was used or another thread
    /// had it locked.
    pub(super) later: bool,
}

impl<'m, P: Platform> EvictionBatch<'m, P> {
    pub(super) fn new(memory: &'m Memory<P>) -> Self {
        let (spaces, vmas) = (ArrayVec::new(), ArrayVec::new());
        Self {
            memory,
            out: OutBatch::new(),
            spaces,
            vmas,
            folios: 0,
            pages: 0,
            dropped: 0,
            began: 0,
            dirty: ArrayVec::new(),
            passed_over: false,
            later: false,
        }
    }

    /// Records the result for folios outside the batch. Returns the number of pages freed.
    pub(super) fn note(&mut self, looked: LookedAt) -> u64 {
        self.later |= looked.later;
        looked.freed
    }

    /// The batch's output, for use while the batch is empty.
    pub(super) fn idle(&mut self) -> &mut OutBatch {
        debug_assert!(self.is_empty());
        &mut self.out
    }

    /// Records a folio that was examined in this turn or in the turn before the last, which one bit
    /// cannot distinguish. Frees nothing.
    pub(super) fn leave_to_next_turn(&mut self) -> u64 {
        self.later = true;
        0
    }

    /// Whether the batch has nothing to finish.
    pub(super) fn is_empty(&self) -> bool {
        self.vmas.is_empty() && self.pages == 0
    }

    /// The number of pages in flight.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Replaces the mappings of the cold folios in the table around the hit with swap entries,
    /// unless the VMA is locked into memory or another thread is changing it. Returns whether the
    /// VMA is locked into memory.
    pub(super) fn take_window(
        &mut self,
        hit: &RmapHit<'_, 'm, P>,
        scan: &mut SwapOutScan<'_>,
    ) -> bool {
        if !self.vmas.iter().any(|vma| vma.is(hit.vma)) {
            if self.vmas.is_full() {
                self.dropped += self.unmap();
            }
            let Some(vma) = hit.vma.try_read(self.memory.platform()) else {
                self.later = true;
                return false;
            };
            // `mlock` sets the flag with the VMA locked for writing, and swaps in the pages that
            // are swapped out at that time. Without the lock, this could happen:
            // 1. CPU A finds the VMA not locked into memory.
            // 2. CPU B locks the VMA into memory, finds all pages present, and returns.
            // 3. CPU A swaps a page out.
            if hit.vma.has(MappingFlags::LOCKED) {
                return true;
            }
            let _ = self.vmas.try_push(vma.leave_locked());
        }
        let number = self.space_of(hit);
        let Some(space) = self.spaces.get_mut(number) else { return false };
        let mut edit = Edit::new(&hit.page_table, &mut space.gather);
        let section = hit.page_table.read_section();
        let mut span = edit.span(&section, window(hit), Depth::Floor(Level::PTE));
        let attributes = hit.vma.flags().attributes().get();
        let _ = swap_out_deferred(&mut span, attributes, scan, &mut self.out);
        self.later |= scan.may_find_more();
        self.folios += span.counts.folios_touched;
        self.pages = self.out.pages();
        false
    }

    /// The index of the hit's address space in the batch.
    fn space_of(&mut self, hit: &RmapHit<'_, 'm, P>) -> usize {
        let root = hit.page_table.root;
        if let Some(number) = self.spaces.iter().position(|space| space.page_table.root == root) {
            return number;
        }
        if self.spaces.is_full() {
            self.flush();
            self.spaces.clear();
        }
        // SAFETY: the batch has a VMA of the address space locked for reading until the handle is
        // dropped (`unmap`), and a thread that drops the address space waits until the VMA is
        // unlocked.
        let page_table = unsafe { PageTable::from_state(self.memory, hit.vma.tree()) };
        let _ = self.spaces.try_push(Space { page_table, gather: Gather::new() });
        self.spaces.len() - 1
    }

    /// Whether the batch must be written out once the hand has passed `scanned` frames.
    pub(super) fn is_due(&mut self, scanned: u64) -> bool {
        if self.vmas.is_empty() {
            self.began = scanned;
        }
        self.folios >= FOLIOS || self.out.is_due() || scanned - self.began >= FRAMES
    }

    fn flush(&mut self) {
        for Space { page_table, gather } in &mut self.spaces {
            Edit::new(page_table, gather).flush_stale();
        }
    }

    /// Flushes, unmaps the folios and unlocks the VMAs. Returns the number of pages freed.
    fn unmap(&mut self) -> u64 {
        self.flush();
        // SAFETY: 1. the flush above covers all address spaces whose entries were cleared.
        let dropped = unsafe { self.out.unmap_deferred(self.memory) };
        self.spaces.clear();
        for vma in self.vmas.drain(..) {
            vma.unlock(self.memory.platform());
        }
        dropped
    }

    /// Writes the batch out; called without locks. Returns the number of pages freed.
    pub(super) fn finish(&mut self) -> u64 {
        let wanted = self.pages;
        let dropped = core::mem::take(&mut self.dropped) + self.unmap();
        (self.folios, self.pages) = (0, 0);
        let freed = dropped + self.out.write_out(self.memory);
        // The other folios are pinned, were refused by the store, or are being written by a device.
        // Folios that were not examined, because the batch seemed large enough, may be swapped out
        // in their place.
        self.later |= freed < wanted;
        freed
    }
}

/// The range of the VMA that the page table around the hit covers.
fn window<P: Platform>(hit: &RmapHit<'_, '_, P>) -> VirtRange {
    let span = P::Arch::PMD.span();
    let start = hit.range.start().align_down(span);
    let end = hit.range.end().0.checked_next_multiple_of(span).unwrap_or(hit.range.end().0);
    VirtRange::raw(start.0, end).intersection(hit.vma.range())
}
