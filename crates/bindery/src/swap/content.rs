//! The content of slots: written out from the frames of a folio, and read into them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::{SlotArea, SlotRun};
use super::bitmap::CLUSTER_SLOTS;
use super::cached_folio::CachedFolio;
use super::cluster::Cluster;
use super::cpu;
use super::filled_pages::FilledPages;
use super::freed::FreedCell;
use super::page_set::PageSet;
use super::same_filled;
use super::slot_state::{self, ClaimError, SlotState};
use super::slots::{AreasStay, index, while_areas_stay};
use crate::Memory;
use crate::addr::Frame;
use crate::folio::{Folio, FolioLocked, FreshFolio, LockedFolio, SwapPlace};
use crate::platform::Platform;

/// Pages that are compared in one read section.
const AT_ONCE: u32 = 16;

impl<P: Platform> CachedFolio<'_, P> {
    /// Writes the content of the folio, whose slots are busy, to the area's store. Returns whether
    /// all pages were stored; none is stored if one does not fit, or an entry maps the folio.
    /// `written` is empty.
    // An out parameter: the set would be copied for each folio.
    pub(super) fn write_out(&self, written: &mut FilledPages) -> bool {
        let (memory, run) = (self.memory, self.slots());
        if !self.is_unmapped() {
            return false;
        }
        // A base page is the most frequent folio: the loops cost it more than the look-up.
        let done =
            if run.count == 1 { self.write_base_page(written) } else { self.write_pages(written) };
        if done {
            cpu::note_swapped_out(memory, run.count);
        }
        done
    }

    /// As [`CachedFolio::write_pages`], for a base page.
    #[inline(always)]
    fn write_base_page(&self, written: &mut FilledPages) -> bool {
        let Memory { swap, frames, .. } = self.memory;
        let head = self.folio.head;
        // SAFETY: 1. as in `sort_part`.
        let value = match unsafe { same_filled::word_of(frames.platform().direct_map(head)) } {
            Some(word) => {
                written.filled.add(0, 1);
                word
            }
            // SAFETY: 1. and 2. as in `sort_part`.
            None => match unsafe { swap.store(frames, head) } {
                Some(handle) => {
                    frames.platform().yield_if_due();
                    handle
                }
                None => return false,
            },
        };
        self.slots().set_value(self.memory, 0, value);
        true
    }

    /// Writes the content of the pages, as [`CachedFolio::write_out`].
    fn write_pages(&self, written: &mut FilledPages) -> bool {
        let Memory { swap, frames, .. } = self.memory;
        let run = self.slots();
        let mut next = 0;
        while next < run.count {
            let end = run.count.min(next + AT_ONCE);
            let Some(sorted) = self.sort_part(next..end, written) else { return false };
            next = sorted;
            if sorted == end {
                continue;
            }
            // SAFETY: 1. and 2. as in `sort_part`.
            let Some(handle) = (unsafe { swap.store(frames, self.folio.head.plus(sorted)) }) else {
                // SAFETY: 1. the pages before are stored, and their values set. 2. The slots are
                // busy for this thread, which does not load.
                unsafe { self.forget_stored(written, sorted) };
                return false;
            };
            run.set_value(self.memory, sorted, handle);
            next += 1;
            // Compressing a large folio takes longer than other threads may have to wait.
            frames.platform().yield_if_due();
        }
        true
    }

    /// Sets the values of the first pages of a part that one repeated word fills. Returns the first
    /// page that none fills, or the end of the part. No entry maps the folio.
    // In the section of the look-up, which serves all pages of the part.
    #[inline(always)]
    fn sort_part(&self, part: Range<u32>, written: &mut FilledPages) -> Option<u32> {
        let platform = self.memory.platform();
        while_areas_stay(platform, |stay| {
            let (_, _, values) = self.slots().cells(stay, self.memory)?;
            let values = values.get(part.start as usize..part.end as usize)?;
            for (page, value) in (part.start..).zip(values) {
                let frame = self.folio.head.plus(page);
                // SAFETY: 1. No entry maps the folio, and none comes to map it, since it is locked.
                // A pin for writing makes its page exclusive, and the slot of an exclusive page is
                // free, so that its folio is not written out: no thread writes to it.
                let word = unsafe { same_filled::word_of(platform.direct_map(frame)) };
                let Some(word) = word else { return Some(page) };
                value.store(word, Relaxed);
                written.filled.add(page, 1);
            }
            Some(part.end)
        })
    }

    /// Frees the store's content of the first `pages` pages that no word fills.
    ///
    /// # Safety
    /// 1. The values of their slots are handles of the store, which their cells do not name.
    /// 2. No thread loads the content.
    #[cold]
    #[inline(never)]
    unsafe fn forget_stored(&self, written: &FilledPages, pages: u32) {
        let Memory { swap, frames, .. } = self.memory;
        for page in (0..pages).filter(|page| !written.is_filled(*page)) {
            let Some((_, handle)) = self.slots().content_of(self.memory, page) else { return };
            // SAFETY: 1. and 2. the caller's obligations 1 and 2.
            unsafe { swap.forget(frames, handle) };
        }
    }

    /// Finds the pages of the folio that one repeated word fills, and stores the words and marks in
    /// their slots, which are busy. Finds none if an entry maps the folio.
    pub(super) fn sort_pages(&self) -> FilledPages {
        let mut written = FilledPages::NOTHING;
        let (platform, head) = (self.memory.platform(), self.folio.head);
        let run = self.slots();
        if !self.is_unmapped() {
            return written;
        }
        for page in 0..run.count {
            // SAFETY: 1. as in `sort_part`.
            let word = unsafe { same_filled::word_of(platform.direct_map(head.plus(page))) };
            // Content on the device needs no value: the slot is its address.
            run.set_value(self.memory, page, word.unwrap_or(0));
            written.filled.add(page, u32::from(word.is_some()));
        }
        while_areas_stay(platform, |stay| {
            let Some((cluster, cells, _)) = run.cells(stay, self.memory) else { return };
            // Other threads may change the count of entries under the lock.
            let _state = cluster.state.lock();
            for (_, cell) in (0..).zip(cells).filter(|(page, _)| written.is_filled(*page)) {
                cell.fetch_or(SlotState::FILLED, Relaxed);
            }
        });
        written
    }

    /// Whether no entry maps the folio, nor will while it is locked.
    #[inline]
    fn is_unmapped(&self) -> bool {
        let unmapped = self.handle().mappings() == 0;
        debug_assert!(unmapped, "{:?} is written out, and mapped", self.folio);
        unmapped
    }

    /// The result of the last [`CachedFolio::sort_pages`].
    pub(super) fn sorted_pages(&self) -> FilledPages {
        let mut filled = PageSet::EMPTY;
        while_areas_stay(self.memory.platform(), |stay| {
            let Some((_, cells, _)) = self.slots().cells(stay, self.memory) else { return };
            for (page, cell) in (0..).zip(cells) {
                filled.add(page, u32::from(SlotState(cell.load(Relaxed)).has(SlotState::FILLED)));
            }
        });
        FilledPages { filled }
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
    pub(super) fn cells<'s, P: Platform>(
        self,
        stay: &'s AreasStay,
        memory: &'s Memory<P>,
    ) -> Option<(&'s Cluster<P>, &'s [AtomicU64], &'s [AtomicU64])> {
        let cluster = memory.swap.area(self.area)?.cluster(stay, self.first)?;
        // SAFETY: 1. the cluster is of the memory's swap.
        let (cells, values) = unsafe { cluster.words(memory.platform()) };
        let range = index(self.first) as usize..(index(self.first) + self.count) as usize;
        Some((cluster, cells.get(range.clone())?, values.get(range)?))
    }

    /// Sets the value of the slot of a page, which is busy: that keeps the area. In a read section
    /// of its own: work on the pages' content, between two calls, may be long.
    #[inline]
    fn set_value<P: Platform>(self, memory: &Memory<P>, page: u32, value: u64) {
        while_areas_stay(memory.platform(), |stay| {
            let Some((_, _, words)) = self.cells(stay, memory) else { return };
            if let Some(word) = words.get(page as usize) {
                word.store(value, Relaxed);
            }
        });
    }

    /// The cell and the value of the slot of a page, which is busy, as [`SlotRun::set_value`].
    #[inline]
    fn content_of<P: Platform>(self, memory: &Memory<P>, page: u32) -> Option<(SlotState, u64)> {
        while_areas_stay(memory.platform(), |stay| {
            let (_, cells, values) = self.cells(stay, memory)?;
            let (cell, value) = (cells.get(page as usize)?, values.get(page as usize)?);
            Some((SlotState(cell.load(Relaxed)), value.load(Relaxed)))
        })
    }

    /// The number of pages from `page` on whose slots, which are busy, have zeroes.
    fn zeroes_from<P: Platform>(self, memory: &Memory<P>, page: u32) -> u32 {
        while_areas_stay(memory.platform(), |stay| {
            let Some((_, cells, values)) = self.cells(stay, memory) else { return 0 };
            let pages = cells.iter().zip(values).skip(page as usize);
            let is_zero = |(cell, value): &(&AtomicU64, &AtomicU64)| {
                SlotState(cell.load(Relaxed)).has(SlotState::FILLED) && value.load(Relaxed) == 0
            };
            pages.take_while(is_zero).count() as u32
        })
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
        // SAFETY: 1. of both: a cluster has its two frames from `turn_on` until it is freed; they
        // are the platform's by the caller's obligation 1.
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
        for page in 0..self.slots.count {
            if let Some((cell, value)) = self.slots.content_of(memory, page)
                && cell.has(SlotState::FILLED)
            {
                let frame = self.locked.folio().head.plus(page);
                // SAFETY: 1. the folio is claimed, for one slot a page.
                unsafe { fill_page(memory.platform(), frame, value) };
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
    let are_zeroes = while_areas_stay(memory.platform(), |stay| {
        let (_, cells, values) = run.cells(stay, memory)?;
        let filled = |cell: &AtomicU64| SlotState(cell.load(Relaxed)).has(SlotState::FILLED);
        // A base page is the commonest folio: the loops cost it more than the checks.
        Some(if let ([cell], [value]) = (cells, values) {
            value.load(Relaxed) == 0 && filled(cell)
        } else {
            values.iter().fold(0, |any, value| any | value.load(Relaxed)) == 0
                && cells.iter().all(filled)
        })
    });
    let Some(are_zeroes) = are_zeroes else { return false };
    if are_zeroes {
        memory.platform().zero(head, run.count);
        cpu::note_swapped_in(memory, run.count);
        return true;
    }
    // The values of a device's slots are not handles of the store.
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
    let mut page = 0;
    while page < run.count {
        let Some((cell, value)) = run.content_of(memory, page) else { return false };
        let frame = head.plus(page);
        if cell.has(SlotState::FILLED) && value == 0 {
            // This page has zeroes, whatever the cells say by now.
            let zeroes = run.zeroes_from(memory, page).max(1);
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
/// refers to it from now on, and the slots are busy, which keeps their area. Claims all or none.
/// The slots are those of entries that the caller has seen, as for [`super::find_cached`].
fn claim_slots<P: Platform>(
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    run: SlotRun,
) -> Result<(), ClaimError> {
    while_areas_stay(memory.platform(), |stay| claim_if_named(stay, memory, folio, run))
}

fn claim_if_named<P: Platform>(
    stay: &AreasStay,
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    run: SlotRun,
) -> Result<(), ClaimError> {
    let Some((cluster, cells, _)) = run.cells(stay, memory) else { return Err(ClaimError::Gone) };
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
    // SAFETY: 1. the one published for the cache, which does not have the folio; the other is
    // dropped with the lock.
    unsafe { memory.frames.folio(locked.folio()).release() };
}
