//! Pages of shared memory that come back from swap with one that a fault reads.
//!
//! A fault that reads maps what the object has around the page. So pages after it that are cheap to
//! bring back, of compressed memory or filled by a word, come back with it and are mapped at once:
//! a fault for each of them would cost more than they do. How many follows from the order of the
//! faults:
//!
//! | the fault is | pages that come back |
//! |---|---|
//! | where the last one's pages ended | twice as many as the last time, at most 16 |
//! | elsewhere | the page alone |
//!
//! Large folios need none of this: where the policy has them, they come back whole. None comes back
//! where memory is short.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::Memory;
use crate::addr::Orders;
use crate::platform::Platform;

use super::ObjectState;
use super::will_need::{Sources, bring_in};

/// The most pages, that needed by the fault included.
const MOST: u32 = 16;

/// The account of an object's last fault that brought pages back. Faults on several CPUs may mix
/// theirs: then fewer pages come back, or some that nothing needs.
pub(super) struct SwapAhead {
    /// The page where the next fault in order would be.
    next: AtomicU64,
    /// How many pages the last one was allowed.
    pages: AtomicU32,
}

impl SwapAhead {
    pub(super) const fn new() -> Self {
        Self { next: AtomicU64::new(u64::MAX), pages: AtomicU32::new(0) }
    }

    /// How many pages may come back for a fault on `page`, of `most` that it could map.
    fn allowed(&self, page: u64, most: u64) -> u64 {
        let in_order = self.next.load(Relaxed) == page;
        let pages = if in_order { (2 * self.pages.load(Relaxed)).clamp(1, MOST) } else { 1 };
        self.pages.store(pages, Relaxed);
        let allowed = u64::from(pages).min(most);
        self.next.store(page + allowed, Relaxed);
        allowed
    }
}

/// A fault has brought `page` back, and could map `most` pages from it on. Brings back pages after
/// it. The invalidate lock is held.
#[cold]
pub(super) fn swap_in_ahead<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    most: u64,
    orders: Orders,
) {
    let end = page + object.swap_ahead.allowed(page, most);
    let mut at = page + 1;
    while at < end
        && let Some(next) = bring_in(memory, object, at, orders, Sources::Fast)
    {
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_in_order_and_begin_again_elsewhere() {
        let ahead = SwapAhead::new();
        let mut page = 0;
        for pages in [1, 2, 4, 8, 16, 16] {
            assert_eq!(ahead.allowed(page, 16), pages);
            page += pages;
        }
        assert_eq!(ahead.allowed(page, 3), 3, "the mapping ends");
        assert_eq!(ahead.allowed(page + 3, 16), 16);
        assert_eq!(ahead.allowed(page, 16), 1, "back");
        assert_eq!(ahead.allowed(5, 16), 1);
        assert_eq!(ahead.allowed(7, 16), 1, "every second page");
    }
}
