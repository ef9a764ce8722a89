//! Operations on slots: references of entries and of the swap cache are added and dropped, content
//! is filled and read.
//!
//! All work is done by runs of one cluster, in one span of the cluster's lock.

use core::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed},
};

use super::area::{Area, SlotRun};
use super::bitmap::CLUSTER_SLOTS;
use super::cluster::{Cluster, ClusterState, LiveCluster};
use super::content::Written;
use super::freed::{FreedCell, FreedSlots};
use super::page_set::PageSet;
use super::slot_state::{self, ClaimError, SlotState};
use crate::Memory;
use crate::addr::Order;
use crate::folio::{Folio, FolioLocked, FolioRef, SwapPlace};
use crate::platform::Platform;

/// The count of a slot is at its maximum; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooManyEntries;

/// The part of `run` in the cluster of its first slot, and the rest.
fn first_part(run: SlotRun) -> (SlotRun, SlotRun) {
    let inside = (run.first % u64::from(CLUSTER_SLOTS)) as u32;
    let count = run.count.min(CLUSTER_SLOTS - inside);
    let rest = SlotRun { first: run.first + u64::from(count), count: run.count - count, ..run };
    (SlotRun { count, ..run }, rest)
}

/// The number of the slot in its cluster.
pub(super) fn index(slot: u64) -> u32 {
    (slot % u64::from(CLUSTER_SLOTS)) as u32
}

impl<P: Platform> Memory<P> {
    #[inline]
    pub(super) fn area(&self, number: u8) -> Option<&Area<P>> {
        self.swap.areas.get(usize::from(number))
    }

    /// The cluster, cells and values of a run; `None` if it is not in one cluster.
    #[inline]
    pub(super) fn cells(&self, run: SlotRun) -> Option<(&Cluster<P>, &[AtomicU64], &[AtomicU64])> {
        let cluster = self.area(run.area)?.cluster(run.first)?;
        let (cells, values) = self.cluster_words(cluster);
        let range = index(run.first) as usize..(index(run.first) + run.count) as usize;
        Some((cluster, cells.get(range.clone())?, values.get(range)?))
    }

    /// A recent copy of a slot's cell.
    pub(crate) fn slot_state(&self, area: u8, slot: u64) -> Option<SlotState> {
        let (_, cells, _) = self.cells(SlotRun { area, first: slot, count: 1 })?;
        // Acquire, by the fence: sees earlier work on the cached folio.
        let cell = cells.first()?.load(Acquire);
        Some(SlotState(cell))
    }

    /// Makes slots with lost content, each referred to by one entry; the area is turned on for
    /// them.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn plant_slots(&self, run: SlotRun) {
        let area = self.area(run.area).expect("an area");
        if !area.is_on() {
            let slots = (run.first + u64::from(run.count)).next_multiple_of(1 << 15);
            self.plant_area(run.area, slots);
        }
        let (mut left, mut part);
        left = run;
        while left.count > 0 {
            (part, left) = first_part(left);
            let (cluster, cells, _) = self.cells(part).expect("the area reaches so far");
            let mut state = cluster.state.lock();
            state.plant(index(part.first), part.count);
            area.taken.fetch_add(u64::from(part.count), Relaxed);
            for cell in cells {
                assert_eq!(cell.load(Relaxed), SlotState::FREE.0, "the slot is taken");
                cell.store(SlotState::LOST | 1, Relaxed);
            }
        }
    }

    /// Allocates slots for `count` pages: a block of 2^`order`, or up to `most` single ones. Tries
    /// the areas by falling priority. Nothing refers to the slots yet.
    #[inline(never)]
    pub(crate) fn allocate_slots(&self, order: Order, most: u32) -> Option<SlotRun> {
        let mut below = i32::MAX;
        loop {
            let areas = self.swap.areas.iter().enumerate();
            let usable = areas.filter(|(_, area)| area.is_on() && area.may_allocate());
            let (priority, _) = usable
                .map(|(number, area)| (i32::from(area.priority()), number))
                .filter(|(priority, _)| *priority < below)
                .max()?;
            for (number, area) in self.swap.areas.iter().enumerate() {
                if area.is_on()
                    && i32::from(area.priority()) == priority
                    && let Some(run) = area.allocate(number as u8, order, most)
                {
                    return Some(run);
                }
            }
            below = priority;
        }
    }

    /// Frees slots that were allocated and not used.
    pub(crate) fn free_unused_slots(&self, run: SlotRun) {
        if run.count == 0 {
            return;
        }
        if let (Some(area), Some((cluster, _, _))) = (self.area(run.area), self.cells(run)) {
            let mut freed = FreedSlots::new(area, cluster);
            {
                let mut state = cluster.state.lock();
                (freed.first, freed.count) = (index(run.first), run.count);
                freed.give_back(&mut state);
            }
            freed.relist(run.first);
        }
    }

    /// Puts the folio into the swap cache, at slots that the caller has allocated for it. `named`
    /// of its pages, from page `first` on, get an entry each.
    pub(crate) fn send_out(
        &self,
        folio: FolioLocked<'_>,
        slots: SlotRun,
        first: u32,
        named: u32,
    ) -> SwapPlace {
        debug_assert_eq!(slots.count, folio.pages());
        let place = SwapPlace { area: slots.area, first: slots.first, cached: slots.count };
        let Some((_, cells, _)) = self.cells(slots) else { return place };
        for (page, cell) in (0..).zip(cells) {
            let entries = u32::from(page >= first && page < first + named);
            // The slots are ours: no entry refers to them, and the cache does not have them.
            let cell_now = SlotState::going_out(folio.head.plus(page), folio.order, entries);
            cell.store(cell_now.0, Relaxed);
        }
        self.frames.folio(*folio).set_swap_place(place);
        place
    }

    /// Undoes [`Memory::send_out`]: the slots are the caller's again, to be used or freed, and the
    /// folio has left the cache. No entry refers to them any more.
    pub(crate) fn call_back(&self, folio: FolioLocked<'_>, place: SwapPlace) {
        let slots = SlotRun { area: place.area, first: place.first, count: folio.pages() };
        if let Some((_, cells, _)) = self.cells(slots) {
            for cell in cells {
                // Busy, and without references: no other thread changes it.
                cell.store(SlotState::FREE.0, Relaxed);
            }
        }
        self.frames.folio(*folio).set_cached_pages(place, 0);
    }

    /// Counts those of `count` pages of a folio, from page `first` on, that are still in the cache;
    /// the caller has locked the entries that refer to their slots. A page that has left may have
    /// lost its slot to another page at the same address:
    /// 1. a folio is swapped in for one process and stays in the cache for another;
    /// 2. the first process drops a page of its part, and the slot is free if the other has dropped
    ///    it too;
    /// 3. it writes to a new page at that address, which is swapped out to the same slot.
    // Always: each fault on a page in swap asks it.
    #[inline(always)]
    pub(crate) fn pages_in_cache(
        &self,
        folio: FolioLocked<'_>,
        place: SwapPlace,
        first: u32,
        count: u32,
    ) -> u32 {
        // Read after the table's lock: the slot was free before the entry was stored.
        let all =
            self.frames.folio(*folio).swap_place().is_some_and(|now| now.cached == folio.pages());
        if all { count } else { self.count_in_cache(*folio, place, first, count) }
    }

    #[cold]
    fn count_in_cache(&self, folio: Folio, place: SwapPlace, first: u32, count: u32) -> u32 {
        let slot = |page: u32| place.first + u64::from(page);
        let stays = |page: &u32| {
            let cell = self.slot_state(place.area, slot(*page));
            cell.is_some_and(|cell| cell.frame() == Some(folio.head.plus(*page)))
        };
        (first..first + count).take_while(stays).count() as u32
    }

    /// Adds a reference of an entry to each slot of the run, or to none. The caller holds the lock
    /// of a table with entries that refer to them.
    pub(crate) fn dup_slots(&self, run: SlotRun) -> Result<(), TooManyEntries> {
        let (part, rest) = first_part(run);
        if part.count == 0 {
            return Ok(());
        }
        let Some((cluster, cells, _)) = self.cells(part) else { return Err(TooManyEntries) };
        {
            let _state = cluster.state.lock();
            if !slot_state::name_all(cells) {
                return Err(TooManyEntries);
            }
        }
        self.dup_slots(rest).inspect_err(|_| self.release_slots(part))
    }

    /// Drops a reference of an entry from each slot of the run. A slot that nothing holds any more
    /// is freed; a cached page without entries leaves the cache.
    pub(crate) fn release_slots(&self, run: SlotRun) {
        let mut left = run;
        while left.count > 0 {
            let (part, rest) = first_part(left);
            self.release_part(part);
            left = rest;
        }
    }

    #[inline(never)]
    fn release_part(&self, run: SlotRun) {
        let (Some(area), Some((cluster, cells, values))) = (self.area(run.area), self.cells(run))
        else {
            return;
        };
        let mut state = cluster.state.lock();
        let mut freed = FreedSlots::new(area, cluster);
        for (at, (cell, value)) in (index(run.first)..).zip(cells.iter().zip(values)) {
            let Some(last) = FreedCell::drop_entry(&state, cell) else { continue };
            if last.was().0 & (SlotState::STORED | SlotState::CACHED) != 0 {
                self.empty_slot(last, value);
            }
            freed.add(&mut state, at);
        }
        freed.give_back(&mut state);
        drop(state);
        freed.relist(run.first);
    }

    /// The folio of the page that the cache has for a slot, with a reference. The caller has seen
    /// an entry with the slot, which may be removed by now, even with its area. The caller holds no
    /// lock of a cluster.
    #[inline(never)]
    pub(crate) fn find_cached(&self, area: u8, slot: u64) -> Option<FolioRef<'_, P>> {
        self.while_areas_stay(|| {
            slot_state::hold_cached(
                || self.slot_state(area, slot)?.frame(),
                |frame| self.frames.try_hold(frame),
            )
        })
    }

    /// Lets the caller read slots to which it has no reference: no area that is on is freed during
    /// the call.
    // Always: it is a part of each fault on a page in swap.
    #[inline(always)]
    pub(super) fn while_areas_stay<R>(&self, look: impl FnOnce() -> R) -> R {
        self.platform().enter_read();
        let result = look();
        self.platform().leave_read();
        result
    }

    /// Claims the slots of the run, whose content is to be read into `folio`, which is fresh: the
    /// cache refers to it from now on, and the slots are busy, which keeps their area. Claims all or
    /// none. The slots are those of entries that the caller has seen, as for
    /// [`Memory::find_cached`].
    pub(super) fn claim_slots(
        &self,
        folio: FolioLocked<'_>,
        run: SlotRun,
    ) -> Result<(), ClaimError> {
        self.while_areas_stay(|| self.claim_if_named(folio, run))
    }

    fn claim_if_named(&self, folio: FolioLocked<'_>, run: SlotRun) -> Result<(), ClaimError> {
        debug_assert_eq!(run.count, folio.pages());
        let Some((cluster, cells, _)) = self.cells(run) else { return Err(ClaimError::Gone) };
        let _state = cluster.state.lock();
        // Until memory has been reclaimed, the age of a page is not needed.
        let shadow = match cells.first() {
            Some(cell) if self.clock.has_reclaimed() => SlotState(cell.load(Relaxed)).shadow(),
            _ => None,
        };
        slot_state::claim_all(cells, folio.head, folio.order)?;
        let place = SwapPlace { area: run.area, first: run.first, cached: run.count };
        self.frames.folio(*folio).set_swap_place(place);
        if let Some(shadow) = shadow {
            self.frames
                .folio(*folio)
                .reclaim_state()
                .set_age(self.clock.note_return(shadow, run.count));
        }
        Ok(())
    }

    /// Ends the work of the folio's lock holder on its slots. The pages of `put` have lost an entry
    /// that referred to their slots. Pages without references to their slots leave the cache; the
    /// others stay, no longer busy. Returns the number that stay. The caller has a reference
    /// besides the cache's.
    pub(crate) fn unlock_claimed(
        &self,
        folio: FolioLocked<'_>,
        place: SwapPlace,
        put: &PageSet,
    ) -> u32 {
        let done = |page: u32, old: SlotState| {
            SlotState((old.0 & !SlotState::BUSY) - u64::from(put.has(page)))
        };
        let cached = self.change_slots(folio, place, || false, done).cached;
        if cached < folio.pages() {
            // No other copy of the content is left.
            self.frames.folio(*folio).mark_dirty();
        }
        cached
    }

    /// Like [`Memory::unlock_claimed`], after a failed write: the slots have no content, and are no
    /// longer busy.
    pub(super) fn unlock_unwritten(&self, folio: FolioLocked<'_>, place: SwapPlace) {
        let done =
            |_: u32, old: SlotState| SlotState(old.0 & !(SlotState::BUSY | SlotState::CONTENT));
        if self.change_slots(folio, place, || false, done).cached < folio.pages() {
            // As there.
            self.frames.folio(*folio).mark_dirty();
        }
    }

    /// Evicts a folio whose content is in swap: as `written` says, or from before. If only the
    /// caller's reference and the cache's are left, the folio is the caller's, frozen, and the
    /// result is true. Otherwise it stays in the cache, its slots are no longer busy, and the
    /// caller keeps its reference.
    pub(super) fn evict(
        &self,
        folio: FolioLocked<'_>,
        place: SwapPlace,
        written: Option<&Written>,
    ) -> bool {
        let done = |page: u32, old: SlotState| {
            let content = written.map_or(0, |written| written.content(page));
            SlotState(old.0 & !SlotState::BUSY | content)
        };
        // With the cluster's lock held: a thread that finds the folio by a slot takes a reference,
        // and reads the slot again.
        self.change_slots(folio, place, || self.frames.folio(*folio).freeze(2), done).evicted
    }

    /// Removes a folio whose content could not be read from the cache; entries keep their
    /// references to its slots. The caller has a reference.
    pub(crate) fn give_up(&self, folio: FolioLocked<'_>, place: SwapPlace) {
        let uncached = |_: u32, old: SlotState| old.uncached(0);
        let changed = self.change_slots(folio, place, || false, uncached);
        if changed.cached > 0 {
            self.frames.folio(*folio).set_cached_pages(place, 0);
            self.frames.folio(*folio).release();
        }
    }

    /// Makes the slots of a cached folio busy, so that they stay its own: to be written out, or to
    /// get more references. `None`, with nothing changed, if the area is stopped, if some of its
    /// pages have left the cache or came from another folio, or if a device still writes their old
    /// content. Returns whether all content is in swap already. The caller has a reference.
    pub(crate) fn prepare_out(&self, folio: FolioLocked<'_>, place: SwapPlace) -> Option<Stored> {
        let run = SlotRun { area: place.area, first: place.first, count: folio.pages() };
        let (cluster, cells, _) = self.cells(run)?;
        let live = LiveCluster::lock(self.area(place.area)?, cluster)?;
        let stored = stored_of(live.state(), *folio, cells)?;
        make_busy(cells);
        Some(stored)
    }

    /// Like [`Memory::prepare_out`], for an unmapped folio: it may leave memory even if the area is
    /// stopped, unless something must be written to the area for that.
    pub(crate) fn prepare_eviction(
        &self,
        folio: FolioLocked<'_>,
        place: SwapPlace,
    ) -> Option<Stored> {
        let prepared = self.prepare_out(folio, place);
        prepared.or_else(|| self.prepare_dropping(folio, place).then_some(Stored::Yes))
    }

    /// Changes the cells that still refer to the folio, in one span of the cluster's lock. `freeze`
    /// decides whether the folio leaves memory.
    fn change_slots(
        &self,
        folio: FolioLocked<'_>,
        place: SwapPlace,
        freeze: impl FnOnce() -> bool,
        change: impl Fn(u32, SlotState) -> SlotState,
    ) -> Changed {
        let run = SlotRun { area: place.area, first: place.first, count: folio.pages() };
        let mut changed = Changed { cached: 0, evicted: false };
        let (Some(area), Some((cluster, cells, values))) = (self.area(run.area), self.cells(run))
        else {
            return changed;
        };
        let mut state = cluster.state.lock();
        if !self.frames.folio(*folio).is_swap_cached() {
            // All pages have left the cache since the caller looked, and the cache's reference with
            // them.
            return changed;
        }
        changed.evicted = freeze();
        let shadow = self.clock.shadow();
        let mut freed = FreedSlots::new(area, cluster);
        for (page, (cell, value)) in (0..).zip(cells.iter().zip(values)) {
            let old = SlotState(cell.load(Relaxed));
            if old.frame() != Some(folio.head.plus(page)) {
                // This page left the cache before.
                continue;
            }
            let now = change(page, old);
            if now.is_named_or_written() {
                if now.entries() == 0 {
                    // The page leaves the cache; the device will release the slot.
                    cell.store(SlotState::WRITING, Relaxed);
                    continue;
                }
                let now = if changed.evicted { now.uncached(shadow) } else { now };
                cell.store(now.0, Relaxed);
                changed.cached += 1;
                continue;
            }
            let last = FreedCell::end_work(&state, folio, (page, cell), now);
            self.forget_content(last, value);
            freed.add(&mut state, index(run.first) + page);
        }
        freed.give_back(&mut state);
        if changed.evicted {
            self.clock.note_evicted(run.count);
        } else {
            self.frames.folio(*folio).set_cached_pages(place, changed.cached);
        }
        drop(state);
        freed.relist(run.first);
        if !changed.evicted && changed.cached == 0 {
            self.frames.folio(*folio).release();
        }
        changed
    }
}

/// Whether all content of a cached folio is in swap. `None` if its slots, with these cells, may not
/// be made busy ([`Memory::prepare_out`]).
fn stored_of(_: &ClusterState, folio: Folio, cells: &[AtomicU64]) -> Option<Stored> {
    let load = |cell: &AtomicU64| SlotState(cell.load(Relaxed));
    let ours = |(page, cell): (u32, &AtomicU64)| {
        let cell = load(cell);
        cell.frame() == Some(folio.head.plus(page)) && !cell.has(SlotState::WRITING)
    };
    let stored = cells.iter().filter(|cell| load(cell).0 & SlotState::CONTENT != 0).count();
    if !(0..).zip(cells).all(ours) || stored != 0 && stored != cells.len() {
        return None;
    }
    Some(if stored == 0 { Stored::No } else { Stored::Yes })
}

/// Marks cells busy for the thread that has the folio's lock. The cluster's lock is held.
pub(super) fn make_busy<'a>(cells: impl IntoIterator<Item = &'a AtomicU64>) {
    for cell in cells {
        cell.store(cell.load(Relaxed) | SlotState::BUSY, Relaxed);
    }
}

/// Whether the content of a cached folio is in swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stored {
    /// It must be written out.
    No,
    /// It is in swap.
    Yes,
}

/// The result of [`Memory::change_slots`].
struct Changed {
    /// Pages whose slots still have references.
    cached: u32,
    evicted: bool,
}
