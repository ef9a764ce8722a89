//! Read-around: reads the pages around a faulting page into the swap cache.
//!
//! A device with seek or request latency reads eight pages in nearly the time of one. So a fault
//! also starts to read the pages at the addresses around it, in the same VMA: pages at neighboring
//! addresses tend to be used together, wherever their slots are. No thread waits for these reads. A
//! later fault finds the pages in the swap cache, and reclaim drops those that no fault needs.
//!
//! The number of pages depends on how many pages of the last window were used:
//!
//! | hits since the last window | the next window, in pages |
//! |---|---|
//! | none, and the page is not beside the last | 1: only the page |
//! | none, and it is | 2 |
//! | more | the hits and 2, rounded up to a power of two |
//!
//! A window is at least half as large as the last one, and has at most 2^`page-cluster` pages. Each
//! online CPU has a record of its own, and all others share one.
//!
//! [`super::early_read`] performs the reads.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::early_read::{Begun, Cause};
use super::streak::{ReadByFault, note_streak};
use super::{Swap, cpu};
use crate::Memory;
use crate::addr::Order;
use crate::events::RareEvents;
use crate::platform::Platform;

/// The largest window, limited by the number of requests in flight.
const MOST_PAGES: u32 = super::requests::REQUESTS as u32 / 2;
/// Eight pages, like Linux.
const CLUSTER: u8 = 3;

/// The places and the limit of read-around. Faults only read them.
pub(super) struct ReadAround {
    /// The areas whose devices use read-around, one bit each. A fault checks this first, so on
    /// compressed memory, read-around costs it only this load.
    areas: AtomicU32,
    /// The areas on devices, one bit each.
    devices: AtomicU32,
    /// The binary logarithm of the largest window.
    cluster: AtomicU32,
}

/// The last windows of one CPU.
pub(super) struct LastWindows {
    /// The page number of the last window's center, or of that window's page that was needed last.
    last: AtomicU64,
    /// The size of the last window, in pages.
    window: AtomicU32,
    /// The number of window pages that were used since.
    hits: AtomicU32,
}

/// The location of an area's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ContentPlace {
    /// Compressed memory, or none because the area is off.
    Memory,
    /// A device that reads about as fast as memory.
    SynchronousDevice,
    /// Another device.
    Device,
}

/// Pages to be read, with consecutive numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadAroundWindow {
    pub(crate) first: u64,
    pub(crate) pages: u32,
}

impl ReadAround {
    pub(super) const fn new() -> Self {
        let cluster = AtomicU32::new(CLUSTER as u32);
        Self { areas: AtomicU32::new(0), devices: AtomicU32::new(0), cluster }
    }

    /// Records the location of the content of an area that is on, or that the area is off. The
    /// caller holds the lock of the areas.
    pub(super) fn set_area(&self, number: usize, kind: ContentPlace) {
        let set = |areas: &AtomicU32, is_one: bool| {
            let bit = 1 << number;
            let old = areas.load(Relaxed) & !bit;
            areas.store(if is_one { old | bit } else { old }, Relaxed);
        };
        set(&self.areas, kind == ContentPlace::Device);
        set(&self.devices, matches!(kind, ContentPlace::Device | ContentPlace::SynchronousDevice));
    }

    /// The number of pages in the largest window.
    fn most_pages(&self) -> u32 {
        (1 << self.cluster.load(Relaxed).min(31)).min(MOST_PAGES)
    }
}

impl LastWindows {
    pub(super) const fn new() -> Self {
        let (window, hits) = (AtomicU32::new(0), AtomicU32::new(0));
        Self { last: AtomicU64::new(0), window, hits }
    }

    /// The window around a page that has to be read, of at most `most` pages.
    fn around(&self, page: u64, most: u32) -> ReadAroundWindow {
        let last = self.last.swap(page, Relaxed);
        let hits = self.hits.swap(0, Relaxed);
        let pages = window_of(hits, page.abs_diff(last) == 1, self.window.load(Relaxed), most);
        self.window.store(pages, Relaxed);
        let before = match page {
            _ if page == last.wrapping_add(1) => 0,
            _ if page.wrapping_add(1) == last => pages - 1,
            _ => (pages - 1) / 2,
        };
        ReadAroundWindow { first: page.saturating_sub(u64::from(before)), pages }
    }
}

/// The size of the next window, in pages.
fn window_of(hits: u32, beside: bool, last: u32, most: u32) -> u32 {
    let wanted = match hits {
        0 if beside => 2,
        0 => 1,
        hits => hits.saturating_add(2).min(most).next_power_of_two(),
    };
    wanted.max(last / 2).min(most).max(1)
}

impl<P: Platform> Swap<P> {
    /// Sets the largest window to 2^`order` pages.
    pub(super) fn set_page_cluster(&self, order: u8) {
        self.around.cluster.store(u32::from(order), Relaxed);
    }

    /// The order set by [`Swap::set_page_cluster`].
    pub(super) fn page_cluster(&self) -> u8 {
        self.around.cluster.load(Relaxed) as u8
    }

    /// Whether an area is on a device.
    #[inline]
    pub(super) fn has_devices(&self) -> bool {
        self.around.devices.load(Relaxed) != 0
    }

    /// Whether the area's device uses read-around.
    #[inline]
    pub(crate) fn reads_around(&self, area: u8) -> bool {
        self.around.areas.load(Relaxed).checked_shr(area.into()).unwrap_or(0) & 1 != 0
    }

    /// Whether the area is on a device, from which a page is read with the VMA unlocked.
    #[inline]
    pub(crate) fn is_on_device(&self, area: u8) -> bool {
        self.around.devices.load(Relaxed).checked_shr(area.into()).unwrap_or(0) & 1 != 0
    }
}

/// The page numbers to read around a page whose slot is in an area with read-around
/// ([`Swap::reads_around`]), if any.
pub(crate) fn window_around<P: Platform>(
    memory: &Memory<P>,
    page: u64,
) -> Option<ReadAroundWindow> {
    let most = memory.swap.around.most_pages();
    Some(cpu::faults(memory).windows.around(page, most)).filter(|window| window.pages > 1)
}

/// Records a fault on page `page`, which read-around has put into the cache.
#[cold]
pub(crate) fn note_hit_of_read_around<P: Platform>(memory: &Memory<P>, page: u64) {
    RareEvents::note(&cpu::frequent_events(memory).swap_read_around_hits);
    let windows = &cpu::faults(memory).windows;
    windows.hits.fetch_add(1, Relaxed);
    windows.last.store(page, Relaxed);
    let (order, went_out) = (Order::PAGE, Order::PAGE);
    note_streak(memory, ReadByFault { first: page, order, went_out });
}

/// Starts to read a slot, to which an entry referred a moment ago, into the swap cache. Returns
/// whether more may be read, because memory and a request are free.
pub(crate) fn begin_read_around<P: Platform>(memory: &Memory<P>, area: u8, slot: u64) -> bool {
    let run = SlotRun { area, first: slot, count: 1 };
    memory.frames.has_free_frames(memory.enough_free_frames())
        && run.begin_read(memory, Order::PAGE, Cause::Around) != Begun::NoRoom
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_with_hits_and_shrink_by_half() {
        assert_eq!(window_of(0, false, 0, 8), 1);
        assert_eq!(window_of(0, true, 1, 8), 2);
        assert_eq!(window_of(1, true, 2, 8), 4);
        assert_eq!(window_of(3, false, 4, 8), 8);
        assert_eq!(window_of(100, false, 8, 8), 8);
        assert_eq!(window_of(u32::MAX, false, 8, 8), 8);
        assert_eq!([8, 4, 2, 1].map(|last| window_of(0, false, last, 8)), [4, 2, 1, 1]);
        assert_eq!(window_of(100, true, 8, 1), 1, "it is turned off");
    }

    #[test]
    fn windows_go_where_the_pages_are_wanted() {
        let windows = LastWindows::new();
        let around = |page| windows.around(page, ReadAround::new().most_pages());
        let window = |first, pages| ReadAroundWindow { first, pages };
        assert_eq!(around(100), window(100, 1));
        assert_eq!(around(101), window(101, 2));
        windows.hits.store(1, Relaxed);
        assert_eq!(around(102), window(102, 4), "on");
        windows.hits.store(3, Relaxed);
        assert_eq!(around(101), window(94, 8), "back");
        assert_eq!(around(500), window(499, 4), "elsewhere");
        assert_eq!(around(0), window(0, 2), "at the beginning");
    }
}
