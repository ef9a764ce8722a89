//! [`CachedFolio`]: a locked folio in the swap cache.
//!
//! Each operation runs while the lock of the cluster that contains the slots is held once.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::cluster::{ClusterState, LiveCluster};
use super::cpu;
use super::filled_pages::FilledPages;
use super::freed::{FreedCell, FreedSlots};
use super::page_set::PageSet;
use super::slot_state::SlotState;
use super::slots::state_of;
use super::slots::{AreasStay, Stored, index, while_areas_stay};
use crate::Memory;
use crate::folio::{Folio, FolioHandle, FolioLocked, FrozenFolio, LockedFolio, SwapPlace};
use crate::platform::Platform;

/// A locked folio in the swap cache, together with the place of its slots.
///
/// The existence of this value implies:
/// 1. The caller has the folio's lock. A reference or a mapping, in addition to the cache, keeps
///    the folio.
/// 2. The folio was at this place when the caller checked. Pages may have left the cache since
///    then, in which case their cells no longer refer to the folio.
pub(crate) struct CachedFolio<'a, P: Platform> {
    pub(super) memory: &'a Memory<P>,
    pub(super) folio: FolioLocked<'a>,
    pub(super) place: SwapPlace,
}

impl<P: Platform> Clone for CachedFolio<'_, P> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for CachedFolio<'_, P> {}

// Rare calls take a copy, because a borrow would put the original on the stack of each fault.
impl<'a, P: Platform> CachedFolio<'a, P> {
    /// The folio at a place that the caller has read from the folio's metadata or assigned to it.
    #[inline(always)]
    pub(crate) fn new(memory: &'a Memory<P>, folio: FolioLocked<'a>, place: SwapPlace) -> Self {
        Self { memory, folio, place }
    }

    /// The folio, if it has slots.
    #[inline(always)]
    pub(crate) fn find(memory: &'a Memory<P>, folio: FolioLocked<'a>) -> Option<Self> {
        let place = memory.frames.folio(*folio).swap_place()?;
        Some(Self { memory, folio, place })
    }

    /// Puts the folio into the swap cache, at slots that the caller has allocated for it. `named`
    /// of its pages, from page `first` on, get one entry each.
    pub(crate) fn send_out(
        memory: &'a Memory<P>,
        folio: FolioLocked<'a>,
        slots: SlotRun,
        first: u32,
        named: u32,
    ) -> Self {
        debug_assert_eq!(slots.count, folio.pages());
        let place = SwapPlace { area: slots.area, first: slots.first, cached: slots.count };
        let this = Self { memory, folio, place };
        while_areas_stay(memory.platform(), |stay| {
            let Some((_, cells, _)) = slots.cells(stay, memory) else { return };
            for (page, cell) in (0..).zip(cells) {
                let entries = u32::from(page >= first && page < first + named);
                // The slots belong to the caller: no entry refers to them, and they are not in the
                // cache.
                let cell_now = SlotState::going_out(folio.head.plus(page), folio.order, entries);
                cell.store(cell_now.0, Relaxed);
            }
            this.handle().set_swap_place(place);
        });
        this
    }

    /// Undoes [`CachedFolio::send_out`]: the slots belong to the caller again, to be used or freed,
    /// and the folio has left the cache. No entry refers to the slots any longer.
    pub(crate) fn call_back(&self) {
        while_areas_stay(self.memory.platform(), |stay| {
            let Some((_, cells, _)) = self.slots().cells(stay, self.memory) else { return };
            for cell in cells {
                // The cell is busy and without references, so no other thread changes it.
                cell.store(SlotState::FREE.0, Relaxed);
            }
        });
        self.handle().set_cached_pages(self.place, 0);
    }

    #[inline(always)]
    pub(super) fn handle(&self) -> FolioHandle<'a, P> {
        self.memory.frames.folio(*self.folio)
    }

    /// The slots of all pages.
    #[inline]
    pub(super) fn slots(&self) -> SlotRun {
        SlotRun::of_folio(*self.folio, self.place)
    }

    /// Counts those of the `count` pages from page `first` on that are still in the cache; the
    /// caller has locked the entries that refer to their slots. A page that has left may have lost
    /// its slot to another page at the same address:
    /// 1. A folio is swapped in for one process and stays in the cache for another.
    /// 2. The first process drops a page of its part, and the slot becomes free if the other has
    ///    dropped it too.
    /// 3. The first process writes to a new page at that address, which is swapped out to the same
    ///    slot.
    // Always inlined, because each fault on a page in swap calls it.
    #[inline(always)]
    pub(crate) fn pages_in_cache(&self, first: u32, count: u32) -> u32 {
        // Read after the table's lock was acquired: the slot was free before the entry was stored.
        let all = self.handle().swap_place().is_some_and(|now| now.cached == self.folio.pages());
        if all { count } else { self.count_in_cache(first, count) }
    }

    #[cold]
    fn count_in_cache(self, first: u32, count: u32) -> u32 {
        let SwapPlace { area, first: slot, .. } = self.place;
        let stays = |page: &u32| {
            let state = state_of(self.memory, area, slot + u64::from(*page));
            state.is_some_and(|state| state.frame() == Some(self.folio.head.plus(*page)))
        };
        (first..first + count).take_while(stays).count() as u32
    }

    /// Ends the lock holder's work on the folio's slots. The pages in `put` have lost an entry that
    /// referred to their slots. Pages without references to their slots leave the cache; the others
    /// stay and are no longer busy. Returns the number of pages that stay.
    pub(crate) fn unlock(self, put: &PageSet) -> u32 {
        let done = |page: u32, old: SlotState| {
            SlotState((old.0 & !SlotState::BUSY) - u64::from(put.has(page)))
        };
        let cached = self.change(|| None, done).cached;
        if cached < self.folio.pages() {
            // No other copy of the content exists.
            self.handle().mark_dirty();
        }
        cached
    }

    /// Like [`CachedFolio::unlock`], but after a failed write: the slots have no content and are no
    /// longer busy.
    pub(super) fn unlock_unwritten(self) {
        let done =
            |_: u32, old: SlotState| SlotState(old.0 & !(SlotState::BUSY | SlotState::CONTENT));
        if self.change(|| None, done).cached < self.folio.pages() {
            // No other copy of the content exists.
            self.handle().mark_dirty();
        }
    }

    /// Evicts the folio at that place, whose content is in swap, either as `written` describes or
    /// from an earlier write. If only the references of the caller and the cache are left, the
    /// caller receives the folio, frozen. Otherwise the folio stays in the cache, its slots are no
    /// longer busy, and it is unlocked and released.
    pub(super) fn evict(
        memory: &'a Memory<P>,
        leaving: LockedFolio<'a, P>,
        place: SwapPlace,
        written: Option<&FilledPages>,
    ) -> Option<FrozenFolio<'a, P>> {
        let done = |page: u32, old: SlotState| {
            let content = written.map_or(0, |written| written.content(page));
            SlotState(old.0 & !SlotState::BUSY | content)
        };
        // With the cluster's lock held, because a thread that finds the folio by a slot takes a
        // reference and reads the slot again.
        let handle = memory.frames.folio(leaving.folio());
        // SAFETY: 1. one reference belongs to the guard, which ends below; the other belongs to the
        // cache, which drops the folio while the cluster's lock is still held.
        let freeze = || unsafe { handle.freeze(2) };
        let cached = CachedFolio::new(memory, leaving.locked(), place);
        let frozen = cached.change(freeze, done).frozen?;
        Some(leaving.into_frozen(frozen))
    }

    /// Removes from the cache the folio, whose content could not be read; entries keep their
    /// references to its slots.
    pub(crate) fn give_up(&self) {
        let changed = self.change(|| None, |_, old| old.uncached(0));
        if changed.cached > 0 {
            self.handle().set_cached_pages(self.place, 0);
            // SAFETY: 1. the reference is the cache's, and the last page has left the cache.
            unsafe { self.handle().release() };
        }
    }

    /// Makes the slots busy so that the folio keeps them, to be written out or to get more
    /// references. `None`, with nothing changed, if the area is stopped, if some pages have left
    /// the cache or came from another folio, or if a device is still writing their old content.
    /// Returns whether all content is already in swap.
    pub(super) fn prepare_out(&self) -> Option<Stored> {
        while_areas_stay(self.memory.platform(), |stay| {
            let (cluster, cells, _) = self.slots().cells(stay, self.memory)?;
            let live = LiveCluster::lock(self.memory.swap.area(self.place.area)?, cluster)?;
            let stored = stored_of(live.state(), *self.folio, cells)?;
            make_busy(cells);
            Some(stored)
        })
    }

    /// Like [`CachedFolio::prepare_out`], for an unmapped folio, which may leave memory even if the
    /// area is stopped, unless the area would have to be written to.
    pub(crate) fn prepare_eviction(&self) -> Option<Stored> {
        let prepared = self.prepare_out();
        prepared.or_else(|| self.prepare_dropping().then_some(Stored::Yes))
    }

    /// Whether the content is in swap; the slots are busy.
    pub(crate) fn stored(&self) -> Stored {
        self.slots().stored(self.memory)
    }

    /// Whether the folio, whose slots are busy, may be written out: a store that has refused since
    /// the last free would refuse again.
    pub(crate) fn may_be_written(&self, stored: Stored) -> bool {
        let Memory { swap, frames, .. } = self.memory;
        stored == Stored::Yes || swap.takes_content(frames, self.place.area)
    }

    /// Changes the cells that still refer to the folio, while the cluster's lock is held once.
    /// `freeze` decides whether the folio leaves memory.
    fn change<'f>(
        &self,
        freeze: impl FnOnce() -> Option<FrozenFolio<'f, P>>,
        change: impl Fn(u32, SlotState) -> SlotState,
    ) -> Changed<'f, P> {
        while_areas_stay(self.memory.platform(), |stay| self.change_in(stay, freeze, change))
    }

    fn change_in<'f>(
        &self,
        stay: &AreasStay,
        freeze: impl FnOnce() -> Option<FrozenFolio<'f, P>>,
        change: impl Fn(u32, SlotState) -> SlotState,
    ) -> Changed<'f, P> {
        let (memory, folio, run) = (self.memory, self.folio, self.slots());
        let mut changed = Changed { cached: 0, frozen: None };
        let (Some(area), Some((cluster, cells, values))) =
            (memory.swap.area(run.area), run.cells(stay, memory))
        else {
            return changed;
        };
        let mut state = cluster.state.lock();
        if !self.handle().is_swap_cached() {
            // All pages have left the cache since the caller checked, and with them the cache's
            // reference.
            return changed;
        }
        changed.frozen = freeze();
        let is_frozen = changed.frozen.is_some();
        let shadow = cpu::shadow(memory);
        let mut freed = FreedSlots::new(area, cluster);
        for (page, (cell, value)) in (0..).zip(cells.iter().zip(values)) {
            let old = SlotState(cell.load(Relaxed));
            if old.frame() != Some(folio.head.plus(page)) {
                // This page had already left the cache.
                continue;
            }
            let now = change(page, old);
            if now.is_named_or_written() {
                if now.entries() == 0 {
                    // The page leaves the cache; the device will release the slot.
                    cell.store(SlotState::WRITING, Relaxed);
                    continue;
                }
                let now = if is_frozen { now.uncached(shadow) } else { now };
                cell.store(now.0, Relaxed);
                changed.cached += 1;
                continue;
            }
            FreedCell::end_work(&state, folio, (page, cell), now).forget_content(memory, value);
            freed.add(&mut state, index(run.first) + page);
        }
        freed.free_run(&mut state);
        if is_frozen {
            cpu::note_evicted(memory, run.count);
        } else {
            self.handle().set_cached_pages(self.place, changed.cached);
        }
        drop(state);
        freed.relist(run.first);
        if !is_frozen && changed.cached == 0 {
            // SAFETY: 1. the reference is the cache's, and the last page has left the cache.
            unsafe { self.handle().release() };
        }
        changed
    }
}

/// Whether all content of a cached folio is in swap, given the cells of its slots. `None` if the
/// slots must not be made busy ([`CachedFolio::prepare_out`]).
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

/// The result of [`CachedFolio::change`].
struct Changed<'f, P: Platform> {
    /// The number of pages whose slots still have references.
    cached: u32,
    /// The folio, if it leaves memory.
    frozen: Option<FrozenFolio<'f, P>>,
}
