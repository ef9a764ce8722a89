//! Streaks: faults on consecutive pages, which may read larger folios than were swapped out.
//!
//! A slot's cell has the order of the folio that was swapped out ([`super::slot_state`]). Pages
//! that were swapped out one by one are swapped in one by one, because nothing indicates that a
//! neighbor is needed, and each must be read and decompressed. A *streak* of faults, each on the
//! page after those of the previous fault, is such an indication. A fault of a streak may read up
//! to the number of pages that the streak has read so far, so the streak at most doubles with each
//! fault:
//!
//! ```text
//! pages     0  1  2  3  ...  15    16 .. 31    32 .. 63    100
//! read by   a fault each           one fault   one fault   a fault of its own: the streak is over
//! ```
//!
//! A folio of the size that was swapped out counts as one page, because the fault needs no more of
//! the folio.
//!
//! Each online CPU has a record of its own, and all others share one. A fault in another address
//! space, and a thread that continues on another CPU, may end a streak, which costs only a few
//! faults.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::cpu;
use crate::Memory;
use crate::addr::{Order, Orders};
use crate::folio::MAX_FOLIO_ORDER;
use crate::platform::Platform;

/// The streak that the last fault belongs to.
pub(super) struct Streak {
    /// The page number after the last page read.
    next: AtomicU64,
    /// The number of pages of the streak so far.
    pages: AtomicU32,
}

/// A folio that a fault has read.
#[derive(Clone, Copy)]
pub(crate) struct ReadByFault {
    /// The number of the folio's first page.
    pub(crate) first: u64,
    /// The folio's order.
    pub(crate) order: Order,
    /// The order of the folio in which the page was swapped out.
    pub(crate) went_out: Order,
}

impl Streak {
    pub(super) const fn new() -> Self {
        Self { next: AtomicU64::new(0), pages: AtomicU32::new(0) }
    }

    /// The largest folio that a fault on the page may read because of its streak.
    fn order_at(&self, page: u64) -> Order {
        let pages = self.pages.load(Relaxed);
        match pages.checked_ilog2() {
            Some(order) if page == self.next.load(Relaxed) => {
                Order(order as u8).min(MAX_FOLIO_ORDER)
            }
            _ => Order::PAGE,
        }
    }

    fn note(&self, read: ReadByFault) {
        let ReadByFault { first, order, went_out } = read;
        let before = if self.next.load(Relaxed) == first { self.pages.load(Relaxed) } else { 0 };
        let pages = if order > went_out { order.pages() } else { 1 };
        self.pages.store(before.saturating_add(pages), Relaxed);
        self.next.store(first + u64::from(order.pages()), Relaxed);
    }
}

/// The folio orders that a fault on a page may read, if the page was swapped out in a folio of
/// order `went_out`.
#[inline]
pub(crate) fn orders_to_read<P: Platform>(
    memory: &Memory<P>,
    page: u64,
    went_out: Order,
) -> Orders {
    Orders::up_to(went_out.max(cpu::faults(memory).streak.order_at(page)))
}

/// Records a fault's read, if the policy allows folios larger than a page.
#[inline]
pub(crate) fn note_streak<P: Platform>(memory: &Memory<P>, read: ReadByFault) {
    cpu::faults(memory).streak.note(read);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(streak: &Streak, first: u64, order: Order, went_out: Order) {
        streak.note(ReadByFault { first, order, went_out });
    }

    #[test]
    fn a_streak_grows_with_its_pages() {
        let streak = Streak::new();
        assert_eq!(streak.order_at(0), Order::PAGE);
        for page in 32..48 {
            assert!(streak.order_at(page) < Order(4), "page {page}");
            read(&streak, page, Order::PAGE, Order::PAGE);
        }
        assert_eq!(streak.order_at(48), Order(4));
        read(&streak, 48, Order(4), Order::PAGE);
        assert_eq!(streak.order_at(64), Order(5));
        assert_eq!(streak.order_at(65), Order::PAGE, "beside the streak");
        read(&streak, 80, Order::PAGE, Order::PAGE);
        assert_eq!((streak.order_at(64), streak.order_at(81)), (Order::PAGE, Order::PAGE));
    }

    #[test]
    fn a_folio_of_its_old_size_counts_one() {
        let streak = Streak::new();
        read(&streak, 0, Order(9), Order(9));
        assert_eq!(streak.order_at(512), Order::PAGE);
        read(&streak, 512, Order::PAGE, Order::PAGE);
        assert_eq!(streak.order_at(513), Order(1));
        streak.pages.store(u32::MAX, Relaxed);
        read(&streak, 513, Order(1), Order::PAGE);
        assert_eq!(streak.order_at(515), MAX_FOLIO_ORDER);
    }
}
