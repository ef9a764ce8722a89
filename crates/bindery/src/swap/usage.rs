//! The contents of the slots of all areas, for listings.

use core::sync::atomic::Ordering::Relaxed;

use super::area::{Area, SlotRun};
use super::bitmap::CLUSTER_SLOTS;
use super::slot_state::SlotState;
use crate::Memory;
use crate::addr::PAGE_SIZE;
use crate::platform::Platform;

/// Counts of slots by their content ([`Memory::swap_usage`]).
///
/// ```
/// use bindery::{Memory, Platform};
///
/// /// `SwapFree` of `/proc/meminfo`, in KiB.
/// fn free<P: Platform>(memory: &Memory<P>) -> u64 {
///     let usage = memory.swap_usage();
///     (usage.slots - usage.taken) * 4
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapUsage {
    /// Slots of all areas.
    pub slots: u64,
    /// Slots that are taken.
    pub taken: u64,
    /// Slots whose page is in memory as well (Linux: `SwapCached`).
    pub cached: u64,
    /// Slots with a page of one repeated word, which takes no store (zram: `same_pages`).
    pub filled: u64,
}

/// The usage of compressed memory (Linux: `mm_stat` of zram).
///
/// ```
/// use bindery::CompressedUsage;
///
/// /// The ratio of compression, in percent.
/// fn ratio(usage: &CompressedUsage) -> Option<u64> {
///     (100 * usage.bytes_compressed).checked_div(4096 * usage.pages_stored)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompressedUsage {
    /// Stored pages.
    pub pages_stored: u64,
    /// Of the stored pages, those stored raw.
    pub pages_raw: u64,
    /// Bytes of all objects.
    pub bytes_compressed: u64,
    /// Frames with objects.
    pub frames_used: u64,
    /// The maximum of `frames_used` so far.
    pub frames_used_max: u64,
}

impl CompressedUsage {
    pub(super) const NONE: Self = Self {
        pages_stored: 0,
        pages_raw: 0,
        bytes_compressed: 0,
        frames_used: 0,
        frames_used_max: 0,
    };

    /// Bytes of the frames that no object uses: holes, and the unused ends of last chunks.
    ///
    /// Context: any.
    pub fn wasted(&self) -> u64 {
        (self.frames_used * PAGE_SIZE).saturating_sub(self.bytes_compressed)
    }
}

impl<P: Platform> Memory<P> {
    /// Counts the slots of all areas by their content. It reads all cells, so that no counters have
    /// to be kept; a slot that changes during the call is counted as before or as after the change.
    ///
    /// Context: spins. Complexity: linear in the clusters of 512 slots, and the slots of those in
    /// use.
    pub fn swap_usage(&self) -> SwapUsage {
        let mut usage = SwapUsage::default();
        for (number, area) in (0..).zip(&self.swap.areas) {
            let slots = self.while_areas_stay(|| {
                let slots = if area.is_on() { area.slots() } else { 0 };
                usage.taken += area.taken().min(slots);
                slots
            });
            usage.slots += slots;
            for first in (0..slots).step_by(CLUSTER_SLOTS as usize) {
                self.while_areas_stay(|| self.count_cluster(area, number, first, &mut usage));
            }
        }
        usage
    }

    fn count_cluster(&self, area: &Area<P>, number: u8, first: u64, usage: &mut SwapUsage) {
        let Some(cluster) = area.cluster(first) else { return };
        let is_used = {
            let state = cluster.state.lock();
            state.free < state.size
        };
        if !is_used {
            return;
        }
        let run = SlotRun { area: number, first, count: CLUSTER_SLOTS };
        let Some((_, cells, _)) = self.cells(run) else { return };
        for cell in cells {
            let cell = SlotState(cell.load(Relaxed));
            usage.cached += u64::from(cell.has(SlotState::CACHED));
            usage.filled += u64::from(cell.has(SlotState::FILLED));
        }
    }

    /// The number of entries that refer to the slot.
    pub(crate) fn slot_entries(&self, area: u8, slot: u64) -> u32 {
        self.slot_state(area, slot).map_or(0, SlotState::entries)
    }

    /// Whether the slot's page is in memory, and complete.
    pub(crate) fn is_slot_resident(&self, area: u8, slot: u64) -> bool {
        let cell = self.slot_state(area, slot);
        cell.is_some_and(|cell| cell.has(SlotState::CACHED) && !cell.has(SlotState::BUSY))
    }
}
