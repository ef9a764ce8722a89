//! Which pages are read beside one that a fault wants, and their way into the swap cache.
//!
//! A device that has to seek, or to be asked, is as good as done with eight pages when it is done
//! with one. So a fault also begins to read the pages around it, at addresses, of the same VMA: what
//! lay together in memory is used together, wherever its slots are. Nobody waits for them. A later
//! fault finds them in the swap cache, and reclaim drops those that no fault wants.
//!
//! How many follows from how many of the last were wanted:
//!
//! | hits since the last window | the next window, in pages |
//! |---|---|
//! | none, and the page is not beside the last | 1: the page alone |
//! | none, and it is | 2 |
//! | more | the hits and 2, rounded up to a power of two |
//!
//! A window is at least half of the last, and at most 2^`page-cluster`. There is one account for all
//! address spaces.
//!
//! A folio that is read so is locked, and *under writeback*, as one that is written: its lock
//! belongs to the request, and whoever finds that done settles the slot ([`super::writeback`]).

use core::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, Release},
};

use super::area::{Area, SlotRun};
use super::cell::Cell;
use super::device::SwapOperation;
use super::page_set::PageSet;
use super::writeback::FolioTransfer;
use crate::Memory;
use crate::addr::Order;
use crate::events::RareEvents;
use crate::frame::swap_place::SwapPlace;
use crate::frame::{FolioIndex, Owner};
use crate::platform::Platform;

/// The largest window: no more requests may be under way.
const MOST_PAGES: u32 = super::requests::REQUESTS as u32 / 2;
/// As on Linux: eight pages.
const CLUSTER: u8 = 3;

/// The account of the last windows.
pub(super) struct ReadAround {
    /// The areas on whose devices pages are read around others, a bit for each. A fault looks here
    /// first: on compressed memory this one load is all that reading around costs it.
    areas: AtomicU32,
    /// The binary logarithm of the largest window.
    cluster: AtomicU32,
    /// The number of the page around which the last window was, or that was wanted from it last.
    last: AtomicU64,
    /// Pages of it.
    window: AtomicU32,
    /// Pages that were read around others, and that were wanted since.
    hits: AtomicU32,
}

/// Pages to be read, of consecutive numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pub(crate) first: u64,
    pub(crate) pages: u32,
}

impl ReadAround {
    pub(super) const fn new() -> Self {
        let cluster = AtomicU32::new(CLUSTER as u32);
        let (window, hits) = (AtomicU32::new(0), AtomicU32::new(0));
        Self { areas: AtomicU32::new(0), cluster, last: AtomicU64::new(0), window, hits }
    }

    /// Notes that an area is on, or off again. The caller has the lock of the areas.
    pub(super) fn set_area(&self, number: usize, reads_around: bool) {
        let bit = 1 << number;
        let old = self.areas.load(Relaxed) & !bit;
        self.areas.store(if reads_around { old | bit } else { old }, Relaxed);
    }

    /// The window around a page that has to be read.
    fn around(&self, page: u64) -> Window {
        let most = (1 << self.cluster.load(Relaxed).min(31)).min(MOST_PAGES);
        let last = self.last.swap(page, Relaxed);
        let hits = self.hits.swap(0, Relaxed);
        let pages = window_of(hits, page.abs_diff(last) == 1, self.window.load(Relaxed), most);
        self.window.store(pages, Relaxed);
        let before = match page {
            _ if page == last.wrapping_add(1) => 0,
            _ if page.wrapping_add(1) == last => pages - 1,
            _ => (pages - 1) / 2,
        };
        Window { first: page.saturating_sub(u64::from(before)), pages }
    }
}

/// How many pages a window has.
fn window_of(hits: u32, beside: bool, last: u32, most: u32) -> u32 {
    let wanted = match hits {
        0 if beside => 2,
        0 => 1,
        hits => hits.saturating_add(2).min(most).next_power_of_two(),
    };
    wanted.max(last / 2).min(most).max(1)
}

impl<P: Platform> Memory<P> {
    /// How many pages a fault may read from a swap device at most: 2^`order` (Linux:
    /// `vm.page-cluster`). 3 at first, and 0 for the page alone. Pages of compressed memory, and of
    /// devices that are synchronous, are read alone. More than 16 are never read.
    ///
    /// Context: any.
    pub fn set_page_cluster(&self, order: u8) {
        self.swap.around.cluster.store(u32::from(order), Relaxed);
    }

    /// What [`Memory::set_page_cluster`] has set.
    ///
    /// Context: any.
    pub fn page_cluster(&self) -> u8 {
        self.swap.around.cluster.load(Relaxed) as u8
    }

    /// Whether pages are read around others on the area's device.
    #[inline]
    pub(crate) fn reads_around(&self, area: u8) -> bool {
        self.swap.around.areas.load(Relaxed).checked_shr(area.into()).unwrap_or(0) & 1 != 0
    }

    /// The pages to be read around one whose slot is in an area that [`Memory::reads_around`]
    /// names, if any are. Numbers of pages.
    pub(crate) fn window_around(&self, page: u64) -> Option<Window> {
        Some(self.swap.around.around(page)).filter(|window| window.pages > 1)
    }

    /// Begins to read a slot that an entry named a moment ago, into the swap cache. Says whether
    /// more may be read: there is memory, and room in the device's table.
    pub(crate) fn begin_read_around(&self, area: u8, slot: u64) -> bool {
        let run = SlotRun { area, first: slot, count: 1 };
        if self.shortage() > 0 {
            return false;
        }
        let Some(folio) = self.frames.new_folio(Order::PAGE) else { return false };
        let Some(lock) = self.frames.try_lock_folio(&self.platform, folio) else {
            self.frames.discard(&self.platform, folio);
            return false;
        };
        self.frames.set_fresh_owner(folio, Owner::Nobody, FolioIndex::NONE);
        // The cache's reference, and the request's.
        self.frames.publish_two(folio);
        if self.claim_slots(folio, run).is_err() {
            drop(lock);
            self.frames.release_pages(&self.platform, folio, 2);
            return true;
        }
        let place = SwapPlace { area, first: slot, cached: 1 };
        // The slot is busy: it keeps the area, and what it has.
        let stored = self.swap_cell(area, slot).is_some_and(|cell| cell.has(Cell::STORED));
        let device = self.area(area).and_then(|area| Some((area, area.device()?)));
        let request =
            device.filter(|_| stored).map(|(area, device)| (area, device, area.requests.take()));
        let Some((area, device, Some(number))) = request else {
            self.give_up(folio, place);
            drop(lock);
            self.frames.release(&self.platform, folio);
            return !stored;
        };
        RareEvents::note(&self.rare.swap_read_around);
        area.requests.begin_around(number, folio.head);
        self.swap.reading.fetch_add(1, Relaxed);
        self.frames.mark_read_around(folio);
        // From here on, the folio is the request's.
        lock.with_reference().into_request();
        let what = FolioTransfer { operation: SwapOperation::Read, number, folio, place };
        self.submit_pieces(area, device, &what, |_| true);
        true
    }

    /// A device is done with a page that was read around another. Lock and reference are the
    /// caller's now. Where it could not be read, its slot has the content as before.
    pub(super) fn finish_read_around(&self, area: &Area<P>, number: u32) {
        let read = area.requests.result(number) == Some(true);
        if let Some(folio) = self.frames.folio_of(area.requests.head(number)) {
            let lock = self.frames.lock_of_request(&self.platform, folio);
            debug_assert!(lock.is_some(), "a folio that a device reads is not taken back");
            match self.frames.swap_place(folio) {
                Some(place) if read => {
                    self.rare.pages_swapped_in.fetch_add(1, Relaxed);
                    self.settle_slots(folio, place, &PageSet::EMPTY);
                }
                Some(place) => self.give_up(folio, place),
                None => {}
            }
            drop(lock);
            self.frames.release(&self.platform, folio);
        }
        area.requests.free(number);
        // Release: the folio is unlocked.
        self.swap.reading.fetch_sub(1, Release);
    }

    /// A fault wants the page of that number, which is in the cache since another page was wanted.
    #[cold]
    pub(crate) fn note_hit_of_read_around(&self, page: u64) {
        RareEvents::note(&self.rare.swap_read_around_hits);
        self.swap.around.hits.fetch_add(1, Relaxed);
        self.swap.around.last.store(page, Relaxed);
    }
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
        let around = ReadAround::new();
        let window = |first, pages| Window { first, pages };
        assert_eq!(around.around(100), window(100, 1));
        assert_eq!(around.around(101), window(101, 2));
        around.hits.store(1, Relaxed);
        assert_eq!(around.around(102), window(102, 4), "on");
        around.hits.store(3, Relaxed);
        assert_eq!(around.around(101), window(94, 8), "back");
        assert_eq!(around.around(500), window(499, 4), "elsewhere");
        assert_eq!(around.around(0), window(0, 2), "at the beginning");
    }
}
