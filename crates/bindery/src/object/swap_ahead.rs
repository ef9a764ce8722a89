//! Swap-ahead: pages of shared memory that are swapped in together with a faulting one.
//!
//! A read fault maps the pages that the object has around the address. So the following pages that
//! are cheap to swap in, from compressed memory or filled with one repeated word, are swapped in
//! and mapped with the faulting page, because a fault for each of them would cost more. The number
//! of pages depends on the order of the faults:
//!
//! | the fault is | pages swapped in |
//! |---|---|
//! | where the last one's pages ended | twice the last number, at most 16 |
//! | elsewhere | only the page |
//!
//! Large folios need no swap-ahead: if the policy allows them, they are swapped in as a whole. If
//! memory is short, swap-ahead is disabled.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::Memory;
use crate::addr::Orders;
use crate::platform::Platform;

use super::ObjectState;
use super::will_need::{Sources, bring_in};

/// The maximum number of pages, including the faulting one.
const MOST: u32 = 16;

/// The record of an object's last fault that swapped pages in. Concurrent faults may overwrite each
/// other's values, in which case too few pages are swapped in, or some that are not needed.
pub(super) struct SwapAhead {
    /// The page of the next fault if the faults are in order.
    next: AtomicU64,
    /// The number of pages that the last fault was allowed.
    pages: AtomicU32,
}

impl SwapAhead {
    pub(super) const fn new() -> Self {
        Self { next: AtomicU64::new(u64::MAX), pages: AtomicU32::new(0) }
    }

    /// The number of pages to swap in for a fault on `page`, which could map `most` pages.
    fn allowed(&self, page: u64, most: u64) -> u64 {
        let in_order = self.next.load(Relaxed) == page;
        let pages = if in_order { (2 * self.pages.load(Relaxed)).clamp(1, MOST) } else { 1 };
        self.pages.store(pages, Relaxed);
        let allowed = u64::from(pages).min(most);
        self.next.store(page + allowed, Relaxed);
        allowed
    }
}

/// Swaps in pages after `page`, which a fault has swapped in and from which the fault could map
/// `most` pages. The invalidate lock is held.
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
        && let Some(next) = bring_in(memory, object, at, orders, Sources::Memory)
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
