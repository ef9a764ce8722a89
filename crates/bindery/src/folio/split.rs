//! Splitting a folio into smaller ones, in place.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering::Relaxed;

use super::count::{self, MAPPING, REFERENCE, mappings_in};
use super::exclusive::{MAX_WORDS, WORD_PAGES, bits};
use super::fresh;
use super::handle::{Folio, FolioHandle};
use super::owner::is_anonymous;
use crate::addr::Order;
use crate::frame::meta::{
    DIRTY, EXCLUSIVE, FETCHABLE, MetaKind, ORDER_MASK, SHARED_EIGHTHS, state_of,
};
use crate::platform::Platform;

/// The reason why a folio was not split. The folio is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SplitError {
    /// The parts would not be smaller than the folio.
    Order,
    /// A reference other than the caller's exists, or the caller has no reference.
    References,
    /// The sum of the pages' mappings differs from the folio's count.
    Mappings,
}

impl<P: Platform> FolioHandle<'_, P> {
    /// Releases one reference to each of the parts of 2^`order` pages that the folio was cut into.
    ///
    /// # Safety
    /// 1. The caller owns these references.
    pub(super) unsafe fn release_parts(self, order: Order) {
        for first in (0..self.folio.pages()).step_by(order.pages() as usize) {
            let part = Folio::of(self.folio.head.plus(first), order);
            // SAFETY: 1. the caller's reference (obligation 1); each part is visited once.
            unsafe { self.frames.folio(part).release() };
        }
    }

    /// Splits the folio into folios of `order`. The caller holds one reference to each part and
    /// releases it (thereby freeing the parts without mappings).
    ///
    /// ```text
    /// before  | order 4, 1 reference, 16 pages, mappings 4+4+0+0 ...         |
    /// after   | order 2: 1, 4 | order 2: 1, 4 | order 2: 1, 0 | order 2: 1, 0 |
    /// ```
    ///
    /// The caller holds the only reference, and prevents others from mapping, unmapping or changing
    /// the folio by holding the locks of all tables that map it. `mappings_of` returns the number
    /// of entries that map a page, by its index; it is called twice.
    ///
    /// No lock prevents references by number:
    /// 1. CPU A reads the count: one reference, its own;
    /// 2. CPU B, which has a frame's number, adds a reference and works on a folio of 16 pages;
    /// 3. CPU A splits that folio into four.
    ///
    /// So the count is frozen at zero first, by a compare-exchange that fails after step 2. Each
    /// part is published separately, after all its metadata is written.
    ///
    /// Each part inherits the dirty and fetchable flags, its pages' anon-exclusive bits, and the
    /// owner, with its own first index; an anonymous part without mappings has no owner. The first
    /// part keeps the folio's lock and place on the LRU list; the others have neither. O(pages).
    ///
    /// # Errors
    ///
    /// Each case of [`SplitError`]; nothing has changed.
    pub(crate) fn split(
        self,
        order: Order,
        mappings_of: impl Fn(u32) -> u32,
    ) -> Result<(), SplitError> {
        if order >= self.folio.order {
            return Err(SplitError::Order);
        }
        let head = self.head();
        let count = head.count.load(Relaxed);
        if count as u32 != 1 {
            return Err(SplitError::References);
        }
        let sum: u64 = (0..self.folio.pages()).map(|page| u64::from(mappings_of(page))).sum();
        if sum != u64::from(mappings_in(count)) {
            return Err(SplitError::Mappings);
        }
        if !count::take_all(&head.count, count) {
            return Err(SplitError::References);
        }

        // The parts' words overwrite the folio's.
        let mut exclusive = [0u64; MAX_WORDS];
        for (index, word) in exclusive.iter_mut().enumerate().take(self.exclusive().words()) {
            *word = self.exclusive().word(index).load(Relaxed);
        }
        let inherited = head.state.load(Relaxed) & (DIRTY | FETCHABLE);
        let (owner, index) = (head.owner.load(Relaxed), head.word.load(Relaxed));
        for first in (0..self.folio.pages()).step_by(order.pages() as usize) {
            let part = Folio::of(self.folio.head.plus(first), order);
            let mapped: u64 =
                (first..first + part.pages()).map(|page| u64::from(mappings_of(page))).sum();
            let mine = |word: usize| {
                let at = first as usize / WORD_PAGES as usize + word;
                exclusive[at] >> (first % WORD_PAGES) & bits(0, part.pages().min(WORD_PAGES))
            };
            let flag = if order == Order::PAGE && mine(0) != 0 { EXCLUSIVE } else { 0 };
            let part = self.frames.folio(part);
            let meta = part.head();
            if first == 0 {
                // The caller may hold the lock.
                let kept = |state: u32| state & !(ORDER_MASK | SHARED_EIGHTHS);
                let change = |state| kept(state) | state_of(MetaKind::Folio, order) | flag;
                let _ = head.state.fetch_update(Relaxed, Relaxed, |state| Some(change(state)));
            } else {
                meta.reset(MetaKind::Folio, order);
                meta.state.store(state_of(MetaKind::Folio, order) | inherited | flag, Relaxed);
                meta.owner.store(owner, Relaxed);
                meta.word.store(index.wrapping_add(u64::from(first)), Relaxed);
            }
            if mapped == 0 && is_anonymous(index) {
                meta.owner.store(0, Relaxed);
                meta.word.store(0, Relaxed);
            }
            fresh::write_tails(self.frames, part.folio);
            part.exclusive().write(mine);
            count::publish(&meta.count, mapped * MAPPING + REFERENCE);
        }
        Ok(())
    }
}
