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

/// The number of pages that are compared in one read section.
const AT_ONCE: u32 = 16;

impl<P: Platform> CachedFolio<'_, P> {
    /// Writes the content of the folio, whose slots are busy, to the area's store. Returns whether
    /// all pages were stored; no page is stored if one of them does not fit or an entry maps the
    /// folio. `written` is empty.
    // An out parameter, because returning the set would copy it for each folio.
    pub(super) fn write_out(&self, written: &mut FilledPages) -> bool {
        let (memory, run) = (self.memory, self.slots());
        if !self.is_unmapped() {
            return false;
        }
        // Base pages are the most frequent folios, and for them the loops cost more than the
        // lookup.
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

    /// Writes the content of several pages, as [`CachedFolio::write_out`].
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
                // SAFETY: 1. the pages before this one are stored, and their values are set. 2. The
                // slots are busy for this thread, which is not loading them.
                unsafe { self.forget_stored(written, sorted) };
                return false;
            };
            run.set_value(self.memory, sorted, handle);
            next += 1;
            // Compressing a large folio takes longer than other threads should have to wait.
            frames.platform().yield_if_due();
        }
        true
    }

    /// Sets the values of the leading pages of a part that are filled with one repeated word.
    /// Returns the first page that is not, or the end of the part. No entry maps the folio.
    // In one read section with the lookup, which serves all pages of the part.
    #[inline(always)]
    fn sort_part(&self, part: Range<u32>, written: &mut FilledPages) -> Option<u32> {
        let platform = self.memory.platform();
        while_areas_stay(platform, |stay| {
            let (_, _, values) = self.slots().cells(stay, self.memory)?;
            let values = values.get(part.start as usize..part.end as usize)?;
            for (page, value) in (part.start..).zip(values) {
                let frame = self.folio.head.plus(page);
                // SAFETY: 1. No entry maps the folio, and no entry can be added while the folio is
                // locked. A pin for writing makes its page exclusive, and the slot of an exclusive
                // page is free, so the page's folio is not written out. Hence no thread writes to
                // the page.
                let word = unsafe { same_filled::word_of(platform.direct_map(frame)) };
                let Some(word) = word else { return Some(page) };
                value.store(word, Relaxed);
                written.filled.add(page, 1);
            }
            Some(part.end)
        })
    }

    /// Frees the store's content of those of the first `pages` pages that are not filled with one
    /// word.
    ///
    /// # Safety
    /// 1. The values of the pages' slots are handles of the store, and the slots' cells do not say
    ///    so yet.
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

    /// Finds the pages of the folio that are filled with one repeated word, stores the words in the
    /// pages' slots, which are busy, and marks the slots. Finds none if an entry maps the folio.
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
            // Content on the device needs no value, because the slot is its address.
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

    /// Whether no entry maps the folio, nor can while the folio is locked.
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
    /// Frees the store's content of the slot. `value` is the value word of the slot.
    #[inline(always)]
    pub(super) fn forget_content<P: Platform>(self, memory: &Memory<P>, value: &AtomicU64) {
        if self.was().has(SlotState::STORED) {
            let handle = value.swap(0, Relaxed);
            // SAFETY: 1. only the thread that exchanges the handle has it, and the cluster's lock
            // is held.
            // 2. No thread loads the content of a freed slot.
            unsafe { memory.swap.forget(&memory.frames, handle) };
        }
    }
}

impl SlotRun {
    /// The cluster of the run and the run's cells and values. `None` if the run is not in one
    /// cluster.
    #[inline]
    pub(super) fn cells<'s, P: Platform>(
        self,
        stay: &'s AreasStay,
        memory: &'s Memory<P>,
    ) -> Option<(&'s Cluster<P>, &'s [AtomicU64], &'s [AtomicU64])> {
        let cluster = memory.swap.area(self.area)?.cluster(stay, self.first)?;
        // SAFETY: 1. the cluster belongs to the memory's swap.
        let (cells, values) = unsafe { cluster.words(memory.platform()) };
        let range = index(self.first) as usize..(index(self.first) + self.count) as usize;
        Some((cluster, cells.get(range.clone())?, values.get(range)?))
    }

    /// Sets the value of the slot of a page. The slot is busy, which keeps the area on. The call
    /// has its own read section, because the work on the pages' content between two calls may take
    /// long.
    #[inline]
    fn set_value<P: Platform>(self, memory: &Memory<P>, page: u32, value: u64) {
        while_areas_stay(memory.platform(), |stay| {
            let Some((_, _, words)) = self.cells(stay, memory) else { return };
            if let Some(word) = words.get(page as usize) {
                word.store(value, Relaxed);
            }
        });
    }

    /// The cell and the value of the slot of a page. The slot is busy, as for
    /// [`SlotRun::set_value`].
    #[inline]
    fn content_of<P: Platform>(self, memory: &Memory<P>, page: u32) -> Option<(SlotState, u64)> {
        while_areas_stay(memory.platform(), |stay| {
            let (_, cells, values) = self.cells(stay, memory)?;
            let (cell, value) = (cells.get(page as usize)?, values.get(page as usize)?);
            Some((SlotState(cell.load(Relaxed)), value.load(Relaxed)))
        })
    }

    /// The number of pages from `page` on whose slots contain zeroes. The slots are busy.
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
        // SAFETY: 1. for both calls: a cluster has its two frames from `turn_on` until it is freed;
        // the frames are the platform's by the caller's obligation 1.
        unsafe { (words(platform, frames), words(platform, frames.plus(1))) }
    }
}

/// Fills a page with one repeated word.
///
/// # Safety
/// 1. The page belongs to a claimed folio.
#[inline]
unsafe fn fill_page<P: Platform>(platform: &P, page: Frame, word: u64) {
    // SAFETY: 1. no entry maps a claimed folio, and its content is accessed only by atomics.
    same_filled::fill(unsafe { words(platform, page) }, word);
}

/// The 512 words of a frame.
///
/// # Safety
/// 1. The frame belongs to a cluster, or to a locked folio that no entry maps. While the result is
///    used, the frame is accessed only as aligned 64-bit atomics.
#[inline]
unsafe fn words<P: Platform>(platform: &P, frame: Frame) -> &[AtomicU64] {
    let start = platform.direct_map(frame).cast::<AtomicU64>();
    // SAFETY: the direct map shows all 4,096 bytes of the frame for as long as the platform lives
    // (obligation 1 of `Platform`), aligned to 4,096; the caller's obligation 1.
    unsafe { core::slice::from_raw_parts(start.as_ptr(), CLUSTER_SLOTS as usize) }
}

/// A folio in the swap cache, locked and fresh, whose content has yet to be read. The existence of
/// this value implies:
/// - its slots are claimed and therefore busy, which keeps their area on and their content stored;
/// - the number of slots equals the number of pages, because [`ClaimedFolio::claim`] takes it from
///   the folio;
/// - no entry maps the folio, because a thread that finds it waits for its lock.
///
/// Dropping this value leaves the slots busy.
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

    /// The slots that hold the content.
    pub(crate) fn slots(&self) -> SlotRun {
        self.slots
    }

    /// Puts a fresh folio into the swap cache, at the slots from `first` on, one for each of its
    /// pages, so that they can be read into it. `None` if a slot is in the cache or is no longer
    /// referred to; the folio is then freed.
    // Always inlined, because each fault on a page in swap calls this.
    #[inline(always)]
    pub(crate) fn claim(
        memory: &'a Memory<P>,
        fresh: FreshFolio<'a, P>,
        area: u8,
        first: u64,
    ) -> Option<Self> {
        // Published first, so that a thread that finds the folio by a slot finds it with a count.
        let locked = fresh.publish_for_swap_cache()?;
        let slots = SlotRun { area, first, count: locked.folio().pages() };
        if claim_slots(memory, locked.locked(), slots).is_err() {
            abandon(memory, locked);
            return None;
        }
        Some(Self { locked, slots })
    }

    /// Reads the content. If the content is lost, the folio leaves the cache and is released.
    // Always inlined, because each fault on a page in swap calls this.
    #[inline(always)]
    pub(crate) fn load(self, memory: &Memory<P>) -> Option<LockedFolio<'a, P>> {
        // SAFETY: 1. `claim` has claimed the slots, and `self` was the only handle.
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
                // SAFETY: 1. the folio is claimed, with one slot for each page.
                unsafe { fill_page(memory.platform(), frame, value) };
            }
        }
    }

    fn cached<'b>(&'b self, memory: &'b Memory<P>) -> CachedFolio<'b, P> {
        CachedFolio::new(memory, self.locked.locked(), self.slots.place())
    }

    /// The locked folio, once its content is complete or a device's request will read the content.
    pub(super) fn into_locked(self) -> LockedFolio<'a, P> {
        self.locked
    }

    /// Removes the folio from the cache and releases it; the slots keep their content.
    #[cold]
    pub(super) fn give_up(self, memory: &Memory<P>) {
        self.cached(memory).give_up();
    }
}

/// Reads the content of the slots in compressed memory into the folio's frames. Returns whether the
/// content could be read. [`ClaimedFolio::begin_device_read`] reads a device's content.
///
/// # Safety
/// 1. The slots are claimed for the folio, which no entry maps; a [`ClaimedFolio`] guarantees both.
unsafe fn load_folio<P: Platform>(
    memory: &Memory<P>,
    folio: FolioLocked<'_>,
    run: SlotRun,
) -> bool {
    let head = folio.head;
    let are_zeroes = while_areas_stay(memory.platform(), |stay| {
        let (_, cells, values) = run.cells(stay, memory)?;
        let filled = |cell: &AtomicU64| SlotState(cell.load(Relaxed)).has(SlotState::FILLED);
        // Base pages are the most frequent folios, and for them the loops cost more than the
        // checks.
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
    // SAFETY: 1. the caller's obligation 1.
    unsafe { load_pages(memory, folio, run) }
}

/// Like [`load_folio`], from compressed memory, page by page.
///
/// # Safety
/// 1. As for [`load_folio`].
// A separate function, so that a page of zeroes does not pay for the registers that this function
// saves.
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
            // This page is zeroes, whatever the cells contain by now.
            let zeroes = run.zeroes_from(memory, page).max(1);
            memory.platform().zero(frame, zeroes);
            page += zeroes;
            continue;
        }
        if cell.has(SlotState::FILLED) {
            // SAFETY: 1. the page belongs to the folio, which is claimed (obligation 1).
            unsafe { fill_page(memory.platform(), frame, value) };
        } else {
            // SAFETY: 1. the slot is busy and has stored content. 2. As above.
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

/// Claims the slots of the run, whose content will be read into `folio`, which is fresh. From now
/// on the cache refers to the folio, and the slots are busy, which keeps their area on. Claims
/// either all slots or none. The slots are those of entries that the caller has seen, as for
/// [`super::find_cached`].
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

/// Frees a folio that has not entered the swap cache.
#[cold]
fn abandon<P: Platform>(memory: &Memory<P>, locked: LockedFolio<'_, P>) {
    // SAFETY: 1. the released reference was published for the cache, which does not have the folio;
    // the other reference is dropped with the lock.
    unsafe { memory.frames.folio(locked.folio()).release() };
}
