//! The contents of the slots of all areas, for listings.

use core::sync::atomic::Ordering::Relaxed;

use super::Swap;
use super::area::Area;
use super::bitmap::CLUSTER_SLOTS;
use super::slot_state::SlotState;
use super::slots::while_areas_stay;
use crate::addr::PAGE_SIZE;
use crate::platform::Platform;

/// Counts of slots by their content ([`Memory::swap_usage`](crate::Memory::swap_usage)).
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

impl<P: Platform> Swap<P> {
    /// Counts the slots of all areas by their content.
    pub(super) fn usage(&self, platform: &P) -> SwapUsage {
        let mut usage = SwapUsage::default();
        for area in &self.areas {
            let slots = while_areas_stay(platform, || {
                let slots = if area.is_on() { area.slots() } else { 0 };
                usage.taken += area.taken().min(slots);
                slots
            });
            usage.slots += slots;
            for first in (0..slots).step_by(CLUSTER_SLOTS as usize) {
                while_areas_stay(platform, || area.count_cluster(platform, first, &mut usage));
            }
        }
        usage
    }

    /// The number of entries that refer to the slot.
    pub(crate) fn entries_of(&self, platform: &P, area: u8, slot: u64) -> u32 {
        self.state_of(platform, area, slot).map_or(0, SlotState::entries)
    }
}

impl<P: Platform> Area<P> {
    fn count_cluster(&self, platform: &P, first: u64, usage: &mut SwapUsage) {
        let Some(cluster) = self.cluster(first) else { return };
        let is_used = {
            let state = cluster.state.lock();
            state.free < state.size
        };
        if !is_used {
            return;
        }
        let (cells, _) = cluster.words(platform);
        for cell in cells {
            let cell = SlotState(cell.load(Relaxed));
            usage.cached += u64::from(cell.has(SlotState::CACHED));
            usage.filled += u64::from(cell.has(SlotState::FILLED));
        }
    }
}
