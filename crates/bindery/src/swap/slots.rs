//! Operations on slots: adding and dropping references of entries, allocating and freeing slots.
//!
//! Each operation handles one run of one cluster while the cluster's lock is held once.

use core::sync::atomic::Ordering;

use super::Swap;
use super::area::{SlotArea, SlotRun};
use super::bitmap::CLUSTER_SLOTS;
use super::freed::{FreedCell, FreedSlots};
use super::slot_state::{self, SlotState};
use crate::Memory;
use crate::addr::Order;
use crate::folio::{Folio, FolioRef, SwapPlace};
use crate::platform::Platform;

/// The count of a slot is at its maximum, and nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooManyEntries;

/// Whether the content of a cached folio is in swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stored {
    /// The content must be written out.
    No,
    /// The content is in swap.
    Yes,
}

/// The number of the slot in its cluster.
pub(super) fn index(slot: u64) -> u32 {
    (slot % u64::from(CLUSTER_SLOTS)) as u32
}

/// Proof that its holder is in a read section. Clusters that are found with it are not freed while
/// it is borrowed.
///
/// A busy slot, or an entry that refers to a slot, also keeps its area on. A folio in the swap
/// cache whose lock the caller holds does not:
/// 1. CPU A finds the folio's slots.
/// 2. CPU B removes the last entries that refer to the slots, which are then free, and the folio
///    has left the cache.
/// 3. CPU C turns the area off and frees the clusters, after which CPU A locks one of them.
pub(super) struct AreasStay(());

/// Runs `look` in a read section, so that it may use clusters.
// Always inlined, because it is a part of each fault on a page in swap.
#[inline(always)]
pub(super) fn while_areas_stay<P: Platform, R>(
    platform: &P,
    look: impl FnOnce(&AreasStay) -> R,
) -> R {
    platform.enter_read();
    let result = look(&AreasStay(()));
    platform.leave_read();
    result
}

impl<P: Platform> Swap<P> {
    #[inline]
    pub(super) fn area(&self, number: u8) -> Option<&SlotArea<P>> {
        self.areas.get(usize::from(number))
    }
}

/// Allocates slots: a block of 2^`order`, or up to `most` single slots. Tries the areas by falling
/// priority: first those whose content surely finds room, and then all. Nothing refers to the slots
/// yet.
#[inline(never)]
pub(crate) fn allocate_slots<P: Platform>(
    memory: &Memory<P>,
    order: Order,
    most: u32,
) -> Option<SlotRun> {
    let Memory { swap, frames, .. } = memory;
    let mut passed_over = false;
    // A page that got a slot and finds no room afterwards would stay in memory, unmapped.
    let run = allocate_in(memory, order, most, |area| {
        let has_room = area.has_device() || swap.store.has_room_for(frames, order.pages());
        passed_over |= !has_room;
        has_room
    });
    // The store may still have room, and a page filled with one word needs none.
    if run.is_none() && passed_over { allocate_in(memory, order, most, |_| true) } else { run }
}

/// As [`allocate_slots`], in the areas that `accepts` returns true for.
#[inline(always)]
fn allocate_in<P: Platform>(
    memory: &Memory<P>,
    order: Order,
    most: u32,
    mut accepts: impl FnMut(&SlotArea<P>) -> bool,
) -> Option<SlotRun> {
    let areas = &memory.swap.areas;
    // Also below: other CPUs write the lists of a stopped area, from which no slots are allocated.
    let is_usable = |area: &SlotArea<P>| area.is_on() && area.may_allocate();
    let mut below = i32::MAX;
    loop {
        let usable = areas.iter().filter(|area| is_usable(area));
        let priorities = usable.map(|area| i32::from(area.priority()));
        let priority = priorities.filter(|priority| *priority < below).max()?;
        for (number, area) in (0..).zip(areas) {
            if is_usable(area)
                && i32::from(area.priority()) == priority
                && accepts(area)
                && let Some(run) = area.allocate(memory, number, order, most)
            {
                return Some(run);
            }
        }
        below = priority;
    }
}

/// A recent copy of a slot's cell.
#[inline]
pub(crate) fn state_of<P: Platform>(memory: &Memory<P>, area: u8, slot: u64) -> Option<SlotState> {
    while_areas_stay(memory.platform(), |stay| state_in(stay, memory, area, slot))
}

#[inline]
fn state_in<P: Platform>(
    stay: &AreasStay,
    memory: &Memory<P>,
    area: u8,
    slot: u64,
) -> Option<SlotState> {
    let (_, cells, _) = SlotRun { area, first: slot, count: 1 }.cells(stay, memory)?;
    // Acquire, by the fence: the caller sees earlier work on the cached folio.
    let cell = cells.first()?.load(Ordering::Acquire);
    Some(SlotState(cell))
}

/// Whether no further entry may refer to the slot.
pub(crate) fn is_slot_full<P: Platform>(memory: &Memory<P>, area: u8, slot: u64) -> bool {
    let state = state_of(memory, area, slot);
    state.is_some_and(|state| u64::from(state.entries()) >= slot_state::MAX_ENTRIES)
}

/// Whether the slot's page is in memory and complete.
pub(crate) fn is_slot_resident<P: Platform>(memory: &Memory<P>, area: u8, slot: u64) -> bool {
    let state = state_of(memory, area, slot);
    state.is_some_and(|state| state.has(SlotState::CACHED) && !state.has(SlotState::BUSY))
}

/// The folio that the cache has for a slot, with a reference. The caller has seen an entry with the
/// slot; by now, the entry may be removed and even its area may be off. The caller holds no lock of
/// a cluster.
#[inline(never)]
pub(crate) fn find_cached<P: Platform>(
    memory: &Memory<P>,
    area: u8,
    slot: u64,
) -> Option<FolioRef<'_, P>> {
    while_areas_stay(memory.platform(), |stay| {
        slot_state::hold_cached(
            || state_in(stay, memory, area, slot)?.frame(),
            |frame| memory.frames.try_hold(frame),
        )
    })
}

impl SlotRun {
    /// The slots of a folio whose pages are all in the cache.
    #[inline]
    pub(crate) fn of_folio(folio: Folio, place: SwapPlace) -> Self {
        Self { area: place.area, first: place.first, count: folio.pages() }
    }

    /// The part in the cluster of the first slot, and the rest.
    fn first_part(self) -> (Self, Self) {
        let count = self.count.min(CLUSTER_SLOTS - index(self.first));
        let first = self.first + u64::from(count);
        (Self { count, ..self }, Self { first, count: self.count - count, ..self })
    }

    /// The folio whose first page the cache has for the first slot. The caller has allocated the
    /// slot, and either holds the folio's lock or has restored its entries.
    // Always inlined, because each folio is looked up twice on its way to swap.
    #[inline(always)]
    pub(crate) fn cached_folio<P: Platform>(self, memory: &Memory<P>) -> Option<Folio> {
        let state = state_of(memory, self.area, self.first)?;
        let frame = state.frame()?;
        memory.frames.folio_of(frame).filter(|folio| folio.head == frame)
    }

    /// Whether the content of a folio is in swap. The folio's slots, which are busy, begin here.
    pub(crate) fn stored<P: Platform>(self, memory: &Memory<P>) -> Stored {
        let state = state_of(memory, self.area, self.first);
        let stored = state.is_some_and(|state| state.0 & SlotState::CONTENT != 0);
        if stored { Stored::Yes } else { Stored::No }
    }

    /// Whether a swap-out to these slots, allocated earlier, may begin: the area has not been
    /// stopped since ([`Memory::stop_swapping_to`]).
    #[inline]
    pub(crate) fn may_begin<P: Platform>(self, memory: &Memory<P>) -> bool {
        memory.swap.area(self.area).is_some_and(SlotArea::may_allocate)
    }

    /// Frees slots that were allocated and not used.
    pub(crate) fn free_unused<P: Platform>(self, memory: &Memory<P>) {
        if self.count == 0 {
            return;
        }
        while_areas_stay(memory.platform(), |stay| {
            if let (Some(area), Some((cluster, _, _))) =
                (memory.swap.area(self.area), self.cells(stay, memory))
            {
                let mut freed = FreedSlots::new(area, cluster);
                {
                    let mut state = cluster.state.lock();
                    (freed.first, freed.count) = (index(self.first), self.count);
                    freed.free_run(&mut state);
                }
                freed.relist(self.first);
            }
        });
    }

    /// Adds a reference of an entry to each slot, or to none. The caller holds the lock of a table
    /// with entries that refer to the slots.
    pub(crate) fn dup<P: Platform>(self, memory: &Memory<P>) -> Result<(), TooManyEntries> {
        let (part, rest) = self.first_part();
        if part.count == 0 {
            return Ok(());
        }
        let named = while_areas_stay(memory.platform(), |stay| {
            part.cells(stay, memory).is_some_and(|(cluster, cells, _)| {
                let _state = cluster.state.lock();
                slot_state::name_all(cells)
            })
        });
        if !named {
            return Err(TooManyEntries);
        }
        rest.dup(memory).inspect_err(|_| part.release(memory))
    }

    /// Drops a reference of an entry from each slot. A slot without any other reference is freed; a
    /// cached page without entries leaves the cache.
    pub(crate) fn release<P: Platform>(self, memory: &Memory<P>) {
        let mut left = self;
        while left.count > 0 {
            let (part, rest) = left.first_part();
            while_areas_stay(memory.platform(), |stay| part.release_part(stay, memory));
            left = rest;
        }
    }

    #[inline(never)]
    fn release_part<P: Platform>(self, stay: &AreasStay, memory: &Memory<P>) {
        let (Some(area), Some((cluster, cells, values))) =
            (memory.swap.area(self.area), self.cells(stay, memory))
        else {
            return;
        };
        let mut state = cluster.state.lock();
        let mut freed = FreedSlots::new(area, cluster);
        for (at, (cell, value)) in (index(self.first)..).zip(cells.iter().zip(values)) {
            let Some(last) = FreedCell::drop_entry(&state, cell) else { continue };
            if last.was().0 & (SlotState::STORED | SlotState::CACHED) != 0 {
                last.empty_slot(memory, value);
            }
            freed.add(&mut state, at);
        }
        freed.free_run(&mut state);
        drop(state);
        freed.relist(self.first);
    }

    /// Allocates slots with lost content, each referred to by one entry, and turns the area on for
    /// them.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn plant<P: Platform>(self, memory: &Memory<P>) {
        let area = memory.swap.area(self.area).expect("an area");
        if !area.is_on() {
            let slots = (self.first + u64::from(self.count)).next_multiple_of(1 << 15);
            memory.swap.plant_area(&memory.frames, self.area, slots);
        }
        let (mut left, mut part);
        left = self;
        while left.count > 0 {
            (part, left) = left.first_part();
            while_areas_stay(memory.platform(), |stay| {
                let (cluster, cells, _) =
                    part.cells(stay, memory).expect("the area reaches so far");
                let mut state = cluster.state.lock();
                state.plant(index(part.first), part.count);
                for cell in cells {
                    let taken = cell.swap(SlotState::LOST | 1, Ordering::Relaxed);
                    assert_eq!(taken, SlotState::FREE.0, "the slot is taken");
                }
            });
            area.relist(part.first);
        }
    }
}
