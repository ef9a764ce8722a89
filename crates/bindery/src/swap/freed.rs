//! Freed slots: the proof that a slot is free, and slots that are freed together.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotArea;
use super::cluster::{Cluster, ClusterState};
use super::slot_state::SlotState;
use crate::Memory;
use crate::folio::FolioLocked;
use crate::platform::Platform;

/// Slots of one cluster whose cells are free. The bitmap is updated once per run.
pub(super) struct FreedSlots<'a, P: Platform> {
    pub(super) area: &'a SlotArea<P>,
    pub(super) cluster: &'a Cluster<P>,
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) relist: bool,
}

impl<'a, P: Platform> FreedSlots<'a, P> {
    pub(super) fn new(area: &'a SlotArea<P>, cluster: &'a Cluster<P>) -> Self {
        Self { area, cluster, first: 0, count: 0, relist: false }
    }

    #[inline]
    pub(super) fn add(&mut self, state: &mut ClusterState, slot: u32) {
        if self.first + self.count != slot {
            self.free_run(state);
            self.first = slot;
        }
        self.count += 1;
    }

    // Called once for each run, so that `add`, called once for each slot, stays small.
    #[inline(never)]
    pub(super) fn free_run(&mut self, state: &mut ClusterState) {
        if self.count == 0 {
            return;
        }
        state.free_run(self.first, self.count);
        self.relist = !self.cluster.is_on(Cluster::<P>::list_of(state));
        self.count = 0;
    }

    /// Moves the cluster to the list where it now belongs. The cluster's lock is not held.
    pub(super) fn relist(&self, slot: u64) {
        if self.relist {
            self.area.relist(slot);
        }
    }
}

/// The last value of a cell that the caller has freed under its cluster's lock: no thread is
/// reading the slot's content, and none will start to.
pub(super) struct FreedCell<'s> {
    was: SlotState,
    _state: PhantomData<&'s ClusterState>,
}

impl<'s> FreedCell<'s> {
    /// Drops a reference of an entry, and frees the cell if that was the last holder except the
    /// cache.
    #[inline(always)]
    pub(super) fn drop_entry(state: &'s ClusterState, cell: &AtomicU64) -> Option<Self> {
        let now = SlotState(cell.load(Relaxed)).without_entry();
        debug_assert_ne!(now.entries(), 0xffff, "a slot lost more entries than it had");
        Self::if_unheld(state, cell, now)
    }

    /// Ends a device's write to the slot, and frees the cell if that was the last holder except the
    /// cache.
    pub(super) fn end_writing(state: &'s ClusterState, cell: &AtomicU64) -> Option<Self> {
        let now = SlotState(cell.load(Relaxed) & !SlotState::WRITING);
        Self::if_unheld(state, cell, now)
    }

    /// Frees the cell if `now` has no holder except the cache; otherwise stores `now`, which may
    /// differ from the cell's value only in bits that do not belong to the holder of the folio's
    /// lock.
    #[inline(always)]
    fn if_unheld(_: &'s ClusterState, cell: &AtomicU64, now: SlotState) -> Option<Self> {
        let is_free = now.is_unheld();
        cell.store(if is_free { SlotState::FREE } else { now }.0, Relaxed);
        is_free.then_some(Self { was: now, _state: PhantomData })
    }

    /// Frees the cell of a page of a cached folio, whose value would have become `now`. The slot is
    /// busy for the holder of the folio's lock, which does not read its content.
    #[inline(always)]
    pub(super) fn end_work(
        _: &'s ClusterState,
        folio: FolioLocked<'_>,
        (page, cell): (u32, &AtomicU64),
        now: SlotState,
    ) -> Self {
        debug_assert_eq!(
            SlotState(cell.load(Relaxed)).frame(),
            Some(folio.head.plus(page)),
            "the slot is not one of the folio's"
        );
        cell.store(SlotState::FREE.0, Relaxed);
        Self { was: now, _state: PhantomData }
    }

    /// The value of the cell before it was freed.
    #[inline(always)]
    pub(super) fn was(&self) -> SlotState {
        self.was
    }

    /// Ends the use of the slot: the store frees its content, and its page leaves the cache. With
    /// its last page, the folio leaves the cache.
    #[inline(never)]
    pub(super) fn empty_slot<P: Platform>(self, memory: &Memory<P>, value: &AtomicU64) {
        let frame = self.was.frame();
        self.forget_content(memory, value);
        let Some(folio) = frame.and_then(|frame| memory.frames.folio_of(frame)) else { return };
        let handle = memory.frames.folio(folio);
        let Some(place) = handle.swap_place() else { return };
        handle.set_cached_pages(place, place.cached - 1);
        // No other copy of the content exists.
        handle.mark_dirty();
        if place.cached == 1 {
            // SAFETY: 1. the reference is the cache's, whose last page has left with this cell.
            unsafe { handle.release() };
        }
    }
}
