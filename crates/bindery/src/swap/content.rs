//! The content of slots: written out from the frames of a folio, and read into them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::{SlotArea, SlotRun};
use super::bitmap::CLUSTER_SLOTS;
use super::cached_folio::CachedFolio;
use super::cluster::Cluster;
use super::cpu;
use super::freed::FreedCell;
use super::page_set::PageSet;
use super::same_filled;
use super::slot_state::{self, ClaimError, SlotState};
use super::slots::{index, while_areas_stay};
use crate::Memory;
use crate::addr::Frame;
use crate::folio::{Folio, FolioLocked, FreshFolio, LockedFolio, SwapPlace};
use crate::platform::Platform;

impl<P: Platform> CachedFolio<'_, P> {
    /// Writes the content of the folio, whose slots are busy, to the area's store. Returns whether
    /// all pages were stored; none is stored if one does not fit, or an entry maps the folio.
    /// `written` is empty.
    // An out parameter: the set would be copied for each folio.
    pub(super) fn write_out(&self, written: &mut Written) -> bool {
        let (memory, folio, run) = (self.memory, self.folio, self.slots());
        let Memory { swap, frames, .. } = memory;
        let Some((_, _, values)) = run.cells(memory) else { return false };
        if !self.is_unmapped() {
            return false;
        }
        for (page, value) in (0..).zip(values) {
            let frame = folio.head.plus(page);
            // SAFETY: 1. No entry maps the folio, and none comes to map it, since it is locked. A pin
            // for writing makes its page exclusive, and the slot of an exclusive page is free, so
            // that its folio is not written out: no thread writes to it.
            match unsafe { same_filled::word_of(frames.platform().direct_map(frame)) } {
                Some(word) => {
                    value.store(word, Relaxed);
                    written.filled.add(page, 1);
                }
                // SAFETY: 1. and 2. as above.
                None => match unsafe { swap.store(frames, frame) } {
                    Some(handle) => {
                        value.store(handle, Relaxed);
                        // Compressing a large folio takes longer than other threads may have to
                        // wait.
                        frames.platform().yield_if_due();
                    }
                    None => {
                        let before = (0..page).filter(|page| !written.filled.has(*page));
                        before.for_each(|page| {
                            let handle = values[page as usize].load(Relaxed);
                            // SAFETY: 1. stored above, and not marked in the cell. 2. Busy for this
                            // thread, which does not load.
                            unsafe { swap.forget(frames, handle) };
                        });
                        return false;
                    }
                },
            }
        }
        cpu::note_swapped_out(memory, run.count);
        true
    }

    /// Finds the pages of the folio that one repeated word fills, and stores the words and marks in
    /// their slots, which are busy. Finds none if an entry maps the folio.
    pub(super) fn sort_pages(&self) -> Written {
        let mut written = Written::NOTHING;
        let (platform, head) = (self.memory.platform(), self.folio.head);
        let Some((cluster, cells, values)) = self.slots().cells(self.memory) else {
            return written;
        };
        if !self.is_unmapped() {
            return written;
        }
        for (page, value) in (0..).zip(values) {
            // SAFETY: 1. as in `write_out`.
            let word = unsafe { same_filled::word_of(platform.direct_map(head.plus(page))) };
            // Content on the device needs no value: the slot is its address.
            value.store(word.unwrap_or(0), Relaxed);
            written.filled.add(page, u32::from(word.is_some()));
        }
        // Other threads may change the count of entries under the lock.
        let _state = cluster.state.lock();
        for (_, cell) in (0..).zip(cells).filter(|(page, _)| written.is_filled(*page)) {
            cell.fetch_or(SlotState::FILLED, Relaxed);
        }
        written
    }

    /// Whether no entry maps the folio, nor comes to map it while it is locked.
    #[inline]
    fn is_unmapped(&self) -> bool {
        let unmapped = self.handle().mappings() == 0;
        debug_assert!(unmapped, "{:?} is written out, and mapped", self.folio);
        unmapped
    }

    /// The result of the last [`CachedFolio::sort_pages`].
    pub(super) fn sorted_pages(&self) -> Written {
        let mut filled = PageSet::EMPTY;
        if let Some((_, cells, _)) = self.slots().cells(self.memory) {
            for (page, cell) in (0..).zip(cells) {
                filled.add(page, u32::from(SlotState(cell.load(Relaxed)).has(SlotState::FILLED)));
            }
        }
        Written { filled }
    }
}

impl FreedCell<'_> {
    /// Frees the store's content of the slot; `value` is the slot's.
    #[inline(always)]
    pub(super) fn forget_content<P: Platform>(self, memory: &Memory<P>, value: &AtomicU64) {
        if self.was().has(SlotState::STORED) {
            let handle = value.swap(0, Relaxed);
            // SAFETY: 1. only the thread that exchanges it has it, and the cluster's lock is held.
            // 2. No thread loads the content of a freed slot.
            unsafe { memory.swap.forget(&memory.frames, handle) };
        }
    }
}

impl SlotRun {
    /// The cluster, cells and values; `None` if the run is not in one cluster.
    #[inline]
    pub(super) fn cells<P: Platform>(
        self,
        memory: &Memory<P>,
    ) -> Option<(&Cluster<P>, &[AtomicU64], &[AtomicU64])> {
        let cluster = memory.swap.area(self.area)?.cluster(self.first)?;
        // SAFETY: 1. the cluster is of the memory's swap.
        let (cells, values) = unsafe { cluster.words(memory.platform()) };
        let range = index(self.first) as usize..(index(self.first) + self.count) as usize;
        Some((cluster, cells.get(range.clone())?, values.get(range)?))
    }
}

impl<P: Platform> Cluster<P> {
    /// The words of the cells and of the values.
    ///
    /// # Safety
    /// 1. The cluster belongs to the memory of `platform`.
    #[inline]
    unsafe fn words<'a>(&'a self, platform: &'a P) -> (&'a [AtomicU64], &'a [AtomicU64]) {
        let frames = Frame(self.frames.load(Relaxed));
        // SAFETY: 1. of both: a cluster has its two frames from `turn_on` until it is freed; they are
        // the platform's by the caller's obligation 1.
        unsafe { (words(platform, frames), words(platform, frames.plus(1))) }
    }
}

/// Fills a page with one word.
///
/// # Safety
/// 1. It is one of a claimed folio.
#[inline]
unsafe fn fill_page<P: Platform>(platform: &P, page: Frame, word: u64) {
    // SAFETY: 1. no entry maps a claimed folio, and its content is accessed by atomics only.
    same_filled::fill(unsafe { words(platform, page) }, word);
}

/// The 512 words of a frame.
///
/// # Safety
/// 1. The frame is one of a cluster, or of a locked folio that no entry maps: as long as the result
///    is used, it is accessed only as aligned 64-bit atomics.
#[inline]
unsafe fn words<P: Platform>(platform: &P, frame: Frame) -> &[AtomicU64] {
    let start = platform.direct_map(frame).cast::<AtomicU64>();
    // SAFETY: the direct map shows all 4,096 bytes of the frame for as long as the platform lives
    // (obligation 1 of `Platform`), aligned to 4,096; the caller's obligation 1.
    unsafe { core::slice::from_raw_parts(start.as_ptr(), CLUSTER_SLOTS as usize) }
}

#[inline]
fn content(cells: &[AtomicU64], values: &[AtomicU64], page: u32) -> (SlotState, u64) {
    (SlotState(cells[page as usize].load(Relaxed)), values[page as usize].load(Relaxed))
}

/// A folio in the swap cache, locked and fresh, whose content is to be read. Having one means:
/// - its slots are claimed, and so busy, which keeps their area and their content;
/// - they are one for each page: [`ClaimedFolio::claim`] takes their number from the folio;
/// - no entry maps the folio: a thread that finds it waits for its lock.
///
/// Dropping it leaves the slots busy.
#[must_use = "the slots stay busy until the content is read or given up"]
pub(crate) struct ClaimedFolio<'a, P: Platform> {
    locked: LockedFolio<'a, P>,
    slots: SlotRun,
}

impl<'a, P: Platform> ClaimedFolio<'a, P> {
    /// The folio.
    pub(crate) fn folio(&self) -> Folio {
        self.locked.folio()
    }

    /// The slots, which have the content.
    pub(crate) fn slots(&self) -> SlotRun {
        self.slots
    }

    /// Puts a fresh folio into the swap cache, for the slots from `first` on, one for each of its
    /// pages, which are to be read into it. `None` if a slot is in the cache or not referred to any
    /// more; the folio is freed.
    // Always: each fault on a page in swap does it.
    #[inline(always)]
    pub(crate) fn claim(
        memory: &'a Memory<P>,
        fresh: FreshFolio<'a, P>,
        area: u8,
        first: u64,
    ) -> Option<Self> {
        // Published first: a thread that finds the folio by a slot finds it counted.
        let locked = fresh.publish_for_swap_cache()?;
        let slots = SlotRun { area, first, count: locked.folio().pages() };
        if claim_slots(memory, locked.locked(), slots).is_err() {
            abandon(memory, locked);
            return None;
        }
        Some(Self { locked, slots })
    }

    /// Reads the content. If it is lost, the folio leaves the cache and is released.
    // Always: each fault on a page in swap does it.
    #[inline(always)]
    pub(crate) fn load(self, memory: &Memory<P>) -> Option<LockedFolio<'a, P>> {
        // SAFETY: 1. `claim` has claimed them, and `self` was the only handle.
        if unsafe { load_folio(memory, self.locked.locked(), self.slots) } {
            return Some(self.locked);
        }
        self.cached(memory).give_up();
        None
    }

    /// Fills the pages whose slots hold one repeated word.
    pub(super) fn fill_filled_pages(&self, memory: &Memory<P>) {
        let Some((_, cells, values)) = self.slots.cells(memory) else { return };
        for (page, (cell, value)) in (0..).zip(cells.iter().zip(values)) {
            if SlotState(cell.load(Relaxed)).has(SlotState::FILLED) {
                let frame = self.locked.folio().head.plus(page);
                // SAFETY: 1. the folio is claimed, for one slot a page.
                unsafe { fill_page(memory.platform(), frame, value.load(Relaxed)) };
            }
        }
    }

    fn cached<'b>(&'b self, memory: &'b Memory<P>) -> CachedFolio<'b, P> {
        CachedFolio::new(memory, self.locked.locked(), self.slots.place())
    }

    /// The locked folio, once its content is complete, or a device's request is to read it.
    pub(super) fn into_locked(self) -> LockedFolio<'a, P> {
        self.locked
    }

    /// Takes the folio out of the cache, and releases it; the slots keep their content.
    #[cold]
    pub(super) fn give_up(self, memory: &Memory<P>) {
        self.cached(memory).give_up();
    }
}

/// Reads the content of the slots in compressed memory into the folio's frames. Returns whether
/// it could be read. [`ClaimedFolio::begin_device_read`] reads a device's content.
///
/// # Safety
/// 1. The slots are claimed for the folio, which no entry maps: a [`ClaimedFolio`] has both.
unsafe fn load_folio<P: Platform>(
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    run: SlotRun,
) -> bool {
    let head = folio.head;
    let Some((_, cells, values)) = run.cells(memory) else { return false };
    let filled = |cell: &AtomicU64| SlotState(cell.load(Relaxed)).has(SlotState::FILLED);
    // A base page is the commonest folio: the loops cost it more than the checks.
    let are_zeroes = if let ([cell], [value]) = (cells, values) {
        value.load(Relaxed) == 0 && filled(cell)
    } else {
        values.iter().fold(0, |any, value| any | value.load(Relaxed)) == 0
            && cells.iter().all(filled)
    };
    if are_zeroes {
        memory.platform().zero(head, run.count);
        cpu::note_swapped_in(memory, run.count);
        return true;
    }
    // The values of a device's slots are no handles of the store.
    if memory.swap.area(run.area).is_some_and(SlotArea::has_device) {
        return false;
    }
    // SAFETY: 1. passed on.
    unsafe { load_pages(memory, folio, run) }
}

/// Like [`load_folio`], from compressed memory, page by page.
///
/// # Safety
/// 1. As there.
// Separate: a page of zeroes must not pay for the registers that this saves.
#[inline(never)]
unsafe fn load_pages<P: Platform>(
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    run: SlotRun,
) -> bool {
    let head = folio.head;
    let Memory { swap, frames, .. } = memory;
    let Some((_, cells, values)) = run.cells(memory) else { return false };
    let mut page = 0;
    while page < run.count {
        let (cell, value) = content(cells, values, page);
        let frame = head.plus(page);
        if cell.has(SlotState::FILLED) && value == 0 {
            let zeroes = (page..run.count)
                .take_while(|page| {
                    let (cell, value) = content(cells, values, *page);
                    cell.has(SlotState::FILLED) && value == 0
                })
                .count() as u32;
            memory.platform().zero(frame, zeroes);
            page += zeroes;
            continue;
        }
        if cell.has(SlotState::FILLED) {
            // SAFETY: 1. of the folio, which is claimed (obligation 1).
            unsafe { fill_page(memory.platform(), frame, value) };
        } else {
            // SAFETY: 1. the slot is busy, and has stored content. 2. As above.
            let load = || unsafe { swap.load(frames, value, frame) };
            if !cell.has(SlotState::STORED) || !load() {
                return false;
            }
        }
        page += 1;
    }
    cpu::note_swapped_in(memory, run.count);
    true
}

/// Claims the slots of the run, whose content is to be read into `folio`, which is fresh: the cache
/// refers to it from now on, and the slots are busy, which keeps their area. Claims all or none. The
/// slots are those of entries that the caller has seen, as for [`super::find_cached`].
fn claim_slots<P: Platform>(
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    run: SlotRun,
) -> Result<(), ClaimError> {
    while_areas_stay(memory.platform(), || claim_if_named(memory, folio, run))
}

fn claim_if_named<P: Platform>(
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    run: SlotRun,
) -> Result<(), ClaimError> {
    let Some((cluster, cells, _)) = run.cells(memory) else { return Err(ClaimError::Gone) };
    let _state = cluster.state.lock();
    // Until memory has been reclaimed, the age of a page is not needed.
    let shadow = match cells.first() {
        Some(cell) if memory.clock.has_reclaimed() => SlotState(cell.load(Relaxed)).shadow(),
        _ => None,
    };
    slot_state::claim_all(cells, folio.head, folio.order)?;
    let place = SwapPlace { area: run.area, first: run.first, cached: run.count };
    let handle = memory.frames.folio(*folio);
    handle.set_swap_place(place);
    if let Some(shadow) = shadow {
        handle.reclaim_state().set_age(cpu::note_return(memory, shadow, run.count));
    }
    Ok(())
}

/// Frees a folio that has not come into the swap cache.
#[cold]
fn abandon<P: Platform>(memory: &Memory<P>, locked: LockedFolio<'_, P>) {
    // The cache's reference; the caller's is dropped with the lock.
    memory.frames.folio(locked.folio()).release();
}

/// The place of each of a folio's pages after a write.
pub(crate) struct Written {
    /// The pages that one repeated word fills; the area's store has the others.
    filled: PageSet,
}

impl Written {
    pub(super) const NOTHING: Self = Self { filled: PageSet::EMPTY };

    /// The content bits for the page's cell.
    pub(super) fn content(&self, page: u32) -> u64 {
        if self.filled.has(page) { SlotState::FILLED } else { SlotState::STORED }
    }

    pub(super) fn is_filled(&self, page: u32) -> bool {
        self.filled.has(page)
    }

    /// The number of the folio's pages that are in the store.
    pub(super) fn in_store(&self, folio: Folio) -> u32 {
        (0..folio.pages()).filter(|page| !self.filled.has(*page)).count() as u32
    }
}
