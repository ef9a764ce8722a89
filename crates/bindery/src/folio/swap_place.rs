//! The swap slots of a folio that is in the swap cache, in the metadata of its head.
//!
//! ```text
//! next      31 ........................ 0    slot of the first page, low bits
//!
//! previous  31 ... 21   20 ... 11   10 ... 6   5 ... 0
//!           spare       in cache    area       slot, high bits
//! ```
//!
//! [`SWAP_CACHED`] in `state` tells whether these fields are valid. *In cache* counts the pages
//! whose slots still refer to them; when it drops to zero, the folio leaves the cache. The slots of
//! a folio are consecutive and lie in one cluster. The cluster's lock guards both words and the
//! flag.

use core::sync::atomic::Ordering::Relaxed;

use super::handle::FolioHandle;
use crate::frame::meta::{FrameMeta, SWAP_CACHED};
use crate::platform::Platform;

const HIGH_BITS: u32 = 6;
const AREA_SHIFT: u32 = HIGH_BITS;
const AREA_BITS: u32 = 5;
const CACHED_SHIFT: u32 = AREA_SHIFT + AREA_BITS;

/// The location of a folio's content in swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SwapPlace {
    /// The swap area, 0 to 31.
    pub(crate) area: u8,
    /// The slot of the folio's first page, below 2^38.
    pub(crate) first: u64,
    /// The number of its pages in the swap cache.
    pub(crate) cached: u32,
}

impl<P: Platform> FolioHandle<'_, P> {
    /// Whether the folio is in the swap cache. Possibly stale unless the caller has the folio's
    /// lock.
    #[inline]
    pub(crate) fn is_swap_cached(self) -> bool {
        self.state().load(Relaxed) & SWAP_CACHED != 0
    }

    /// The folio's slots, if it is in the swap cache. A guess, unless the caller has the folio's
    /// lock or its cluster's.
    #[inline]
    pub(crate) fn swap_place(self) -> Option<SwapPlace> {
        if !self.is_swap_cached() {
            return None;
        }
        let head = self.head();
        let (low, rest) = (head.next.load(Relaxed), head.previous.load(Relaxed));
        let high = u64::from(rest & ((1 << HIGH_BITS) - 1));
        Some(SwapPlace {
            area: (rest >> AREA_SHIFT & ((1 << AREA_BITS) - 1)) as u8,
            first: u64::from(low) | high << 32,
            cached: rest >> CACHED_SHIFT,
        })
    }

    /// Records the folio's slots and marks it cached. The caller has stored the folio in the slots,
    /// but no other thread has found it through them yet.
    #[inline]
    pub(crate) fn set_swap_place(self, place: SwapPlace) {
        let head = self.head();
        place.write(head);
        head.state.fetch_or(SWAP_CACHED, Relaxed);
    }

    /// Records that `cached` pages of the folio remain in the cache. The cluster's lock is held.
    #[inline]
    pub(crate) fn set_cached_pages(self, place: SwapPlace, cached: u32) {
        if cached > 0 {
            SwapPlace { cached, ..place }.write(self.head());
        } else {
            self.state().fetch_and(!SWAP_CACHED, Relaxed);
        }
    }
}

impl SwapPlace {
    #[inline]
    fn write(self, head: &FrameMeta) {
        let high = (self.first >> 32) as u32;
        head.next.store(self.first as u32, Relaxed);
        let rest = high | u32::from(self.area) << AREA_SHIFT | self.cached << CACHED_SHIFT;
        head.previous.store(rest, Relaxed);
    }
}
