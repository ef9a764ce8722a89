//! Folios of any place on their way out: one flush for each address space.
//!
//! ```text
//! hand      | folio in space A | folio in space B | folio in space A | ...
//! tables    | entries change   | entries change   | entries change   |  each under its table's lock
//! flush     |                                                        | A | B |
//! unmap     | all folios
//! write out | all folios, no lock but theirs
//! ```
//!
//! Between the change of the entries and the flush, the tables are marked as pending, so that
//! nobody concludes anything from them ([`crate::tlb`]). The folios are locked: a fault that finds
//! a swap entry waits. The VMAs are locked for reading, so that they and their address spaces stay;
//! nothing is waited for meanwhile.

use arrayvec::ArrayVec;

use crate::Memory;
use crate::arch::Arch;
use crate::object::reclaim::Looked;
use crate::platform::Platform;
use crate::rmap::RmapHit;
use crate::stats::Counts;
use crate::table::PageTable;
use crate::table::locking::Depth;
use crate::table::out_batch::OutBatch;
use crate::table::victims::Victims;
use crate::tlb::Gather;
use crate::vma::{MappingFlags, ReadLockedVma};
use crate::{addr::VirtRange, arch::Level};

/// Folios of a batch that is due to be written out.
const FOLIOS: u64 = 32;
/// The most address spaces that have folios in one batch; a gather for each is on the stack, 600
/// bytes.
const SPACES: usize = 4;
/// The most VMAs.
const VMAS: usize = 32;
/// Frames that the hand passes before a batch is written out that is not full: others may wait for
/// the VMAs.
const FRAMES: u64 = 1024;

/// What was taken out of the tables of one address space, and is not flushed yet.
struct Space<'m, P: Platform> {
    page_table: PageTable<'m, P>,
    gather: Gather,
}

/// Folios of any place; see the module.
pub(super) struct Batch<'m, P: Platform> {
    memory: &'m Memory<P>,
    out: OutBatch,
    spaces: ArrayVec<Space<'m, P>, SPACES>,
    vmas: ArrayVec<ReadLockedVma, VMAS>,
    folios: u64,
    /// Pages that are on their way.
    pages: u64,
    /// Where the hand stood when the batch began.
    began: u64,
    /// The hand has passed over a folio that might go if it is not locked into memory any more.
    pub(super) passed_over: bool,
    /// Something stays that another look may free: it was used, or another thread had it locked.
    pub(super) later: bool,
}

impl<'m, P: Platform> Batch<'m, P> {
    pub(super) fn new(memory: &'m Memory<P>) -> Self {
        let (spaces, vmas) = (ArrayVec::new(), ArrayVec::new());
        Self {
            memory,
            out: OutBatch::new(),
            spaces,
            vmas,
            folios: 0,
            pages: 0,
            began: 0,
            passed_over: false,
            later: false,
        }
    }

    /// Takes note of a look at folios that are not of a batch. Says how many pages it has freed.
    pub(super) fn note(&mut self, looked: Looked) -> u64 {
        self.later |= looked.later;
        looked.freed
    }

    /// What it collects in, while nothing is collected.
    pub(super) fn idle(&mut self) -> &mut OutBatch {
        debug_assert!(self.is_empty());
        &mut self.out
    }

    /// A folio was looked at in this turn, or in the one before the last: a bit does not tell. Frees
    /// nothing.
    pub(super) fn leave_to_next_turn(&mut self) -> u64 {
        self.later = true;
        0
    }

    /// Whether nothing is to be finished.
    pub(super) fn is_empty(&self) -> bool {
        self.vmas.is_empty() && self.pages == 0
    }

    /// Pages that are on their way.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Makes swap entries of what is cold in the table around the hit, unless the VMA is locked
    /// into memory, or changed by another thread at the moment. Says whether it is locked into memory.
    pub(super) fn take_window(&mut self, hit: &RmapHit<'_, 'm, P>, victims: &mut Victims) -> bool {
        if !self.vmas.iter().any(|vma| vma.is(hit.vma)) {
            if self.vmas.is_full() {
                self.unmap();
            }
            let Some(vma) = hit.vma.try_read(&self.memory.platform) else {
                self.later = true;
                return false;
            };
            // `mlock` sets the flag with the VMA locked for writing, and brings the pages in that
            // are out by then. Without the lock:
            // 1. CPU A finds the VMA not locked into memory.
            // 2. CPU B locks it into memory, finds all pages there, and returns.
            // 3. CPU A sends a page out.
            if hit.vma.has(MappingFlags::LOCKED) {
                return true;
            }
            let _ = self.vmas.try_push(vma.leave_locked());
        }
        let number = self.space_of(hit);
        let Some(space) = self.spaces.get_mut(number) else { return false };
        let gather = &mut space.gather;
        let mut cursor =
            hit.page_table.cursor_beside(window(hit), Depth::Floor(Level::PTE), Some(&*gather));
        let attributes = hit.vma.flags().attributes();
        let _ =
            PageTable::swap_out_deferred(&mut cursor, attributes, victims, &mut self.out, gather);
        self.later |= victims.may_find_more();
        self.folios += cursor.counts.folios_touched;
        self.pages = self.out.pages();
        false
    }

    /// The number of the hit's address space in the batch.
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
        // gone (`unmap`): a thread that drops the address space waits for that.
        let page_table = unsafe { PageTable::from_state(self.memory, hit.vma.tree()) };
        let _ = self.spaces.try_push(Space { page_table, gather: Gather::new() });
        self.spaces.len() - 1
    }

    /// Whether it is to be written out, with the hand after `scanned` frames.
    pub(super) fn is_due(&mut self, scanned: u64) -> bool {
        if self.vmas.is_empty() {
            self.began = scanned;
        }
        self.folios >= FOLIOS || self.out.is_due() || scanned - self.began >= FRAMES
    }

    fn flush(&mut self) {
        for Space { page_table, gather } in &mut self.spaces {
            let mut counts = Counts::default();
            page_table.flush(gather, &mut counts);
            page_table.stats.add(&counts);
        }
    }

    /// Flushes, unmaps the folios, and lets the VMAs go. Says how many pages were freed.
    fn unmap(&mut self) -> u64 {
        self.flush();
        let dropped = self.out.unmap_deferred(self.memory);
        self.spaces.clear();
        for vma in self.vmas.drain(..) {
            vma.unlock(&self.memory.platform);
        }
        dropped
    }

    /// Writes the batch out; called without locks. Says how many pages were freed.
    pub(super) fn finish(&mut self) -> u64 {
        let wanted = self.pages;
        let dropped = self.unmap();
        (self.folios, self.pages) = (0, 0);
        let freed = dropped + self.out.write_out(self.memory);
        // The others are pinned, or the store has refused them, or a device writes them. And what
        // was not looked at because these were enough may go in their place.
        self.later |= freed < wanted;
        freed
    }
}

/// What one table maps of the VMA around the hit.
fn window<P: Platform>(hit: &RmapHit<'_, '_, P>) -> VirtRange {
    let span = P::Arch::PMD.span();
    let start = hit.range.start().align_down(span);
    let end = hit.range.end().0.checked_next_multiple_of(span).unwrap_or(hit.range.end().0);
    VirtRange::raw(start.0, end).intersection(hit.vma.range())
}
