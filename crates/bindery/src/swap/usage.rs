//! The contents of the slots of all areas, for listings.

use core::sync::atomic::Ordering::Relaxed;

use super::SlotRun;
use super::bitmap::CLUSTER_SLOTS;
use super::slot_state::SlotState;
use super::slots::{AreasStay, while_areas_stay};
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
    /// The number of slots of all areas.
    pub slots: u64,
    /// The number of taken slots.
    pub taken: u64,
    /// The number of slots whose page is also in memory (Linux: `SwapCached`).
    pub cached: u64,
    /// The number of slots whose page is filled with one repeated word and needs no store (zram:
    /// `same_pages`).
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
    /// The number of stored pages.
    pub pages_stored: u64,
    /// The number of stored pages that are not compressed.
    pub pages_raw: u64,
    /// The total size of all objects, in bytes.
    pub bytes_compressed: u64,
    /// The number of frames that contain objects.
    pub frames_used: u64,
    /// The maximum of `frames_used` so far. While CPUs are online, the value may be too high by up
    /// to 32 frames for each of them.
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

    /// The number of bytes of the frames that no object uses: holes, and the unused ends of last
    /// chunks.
    ///
    /// Context: any.
    pub fn wasted(&self) -> u64 {
        (self.frames_used * PAGE_SIZE).saturating_sub(self.bytes_compressed)
    }
}

/// Counts the slots of all areas by their content.
pub(super) fn usage<P: Platform>(memory: &Memory<P>) -> SwapUsage {
    let platform = memory.platform();
    let mut usage = SwapUsage::default();
    for (area, number) in memory.swap.areas.iter().zip(0..) {
        let slots = while_areas_stay(platform, |_| if area.is_on() { area.slots() } else { 0 });
        usage.slots += slots;
        for first in (0..slots).step_by(CLUSTER_SLOTS as usize) {
            let run = SlotRun { area: number, first, count: CLUSTER_SLOTS };
            while_areas_stay(platform, |stay| count_cluster(stay, run, memory, &mut usage));
        }
        // Another area, with more slots, may have been turned on under this number.
        usage.taken = usage.taken.min(usage.slots);
    }
    usage
}

/// Counts the slots of a cluster.
fn count_cluster<P: Platform>(
    stay: &AreasStay,
    run: SlotRun,
    memory: &Memory<P>,
    usage: &mut SwapUsage,
) {
    let Some((cluster, cells, _)) = run.cells(stay, memory) else { return };
    let taken = cluster.state.lock().taken();
    usage.taken += u64::from(taken);
    for cell in cells.iter().filter(|_| taken > 0) {
        let cell = SlotState(cell.load(Relaxed));
        usage.cached += u64::from(cell.has(SlotState::CACHED));
        usage.filled += u64::from(cell.has(SlotState::FILLED));
    }
}
