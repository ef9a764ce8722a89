//! Folios: blocks of 1 to 512 pages of user memory with one reference count.
//!
//! Invariants 14 to 21 of `docs/invariants.md` are about folios.
//!
//! The thread that removes the last mapping, reference or pin frees the folio. The count is one
//! word ([`super::count`]), so that is exactly one thread, and the thread knows it:
//!
//! ```text
//!            references  mappings
//! new_folio       0          0      fresh: only the fault that allocated it knows it
//! first_map       0         16      ... and maps all 16 pages
//! map             0         32      fork: the child maps them too
//! try_hold        1         32      reclaim found it by its frame number
//! unmap           1         16      the child exits
//! unmap           1          0      the parent exits; the folio stays, but loses its owner
//! release         0          0      freed
//! ```
//!
//! [`Frames::discard`] frees a fresh folio that is not needed. While the count is zero, only its
//! maker touches the metadata, by plain stores. From then on all accesses are atomic.
//!
//! A thread that adds a mapping or a reference has one already, or holds the lock of a table that
//! has one, or adds to a count that is not zero ([`super::reference`]). So the count rises from
//! zero only by the one store that publishes a fresh folio. Removing one releases the caller's
//! accesses to the folio's bytes, and freeing acquires them. So the next owner's writes come after
//! all of them.

use core::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use super::meta::{DIRTY, EXCLUSIVE, FETCHABLE, Kind, LAZY, READ_AROUND, state_of};
use super::{AllocateFor, Frames, reference};
use crate::addr::{Frame, Order, Orders};
use crate::platform::Platform;

/// The largest order of a folio: 512 pages, 2 MiB.
pub const MAX_FOLIO_ORDER: Order = Order(9);

/// The orders that a folio can have.
pub(crate) const FOLIO_ORDERS: Orders = Orders::up_to(MAX_FOLIO_ORDER);

/// Pages in one word of anon-exclusive bits.
pub(super) const WORD_PAGES: u32 = u64::BITS;
pub(super) const MAX_WORDS: usize = (MAX_FOLIO_ORDER.pages() / WORD_PAGES) as usize;

/// A block of 2^order pages that users may map. Only a name: it keeps nothing alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct Folio {
    /// The first frame, aligned to the folio's size.
    pub(crate) head: Frame,
    /// Base-2 logarithm of the number of pages, at most [`MAX_FOLIO_ORDER`].
    pub(crate) order: Order,
}

impl Folio {
    /// How many pages it has, 1 to 512.
    #[inline]
    pub const fn pages(self) -> u32 {
        self.order.pages()
    }

    /// How many words of anon-exclusive bits it has.
    #[inline]
    pub(super) fn words(self) -> usize {
        (self.pages() as usize).div_ceil(WORD_PAGES as usize)
    }
}

/// Whether a call dropped the folio's last holder, so that the folio is free now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Freed {
    /// Others still map or hold it.
    No,
    /// The caller has dropped the last mapping of an anonymous folio, and other holders remain.
    Unmapped,
    /// Its frames are back in the allocator.
    Yes,
}

/// `count` bits from bit `first`; `count` is 1 to 64, and both fit in the word.
#[inline]
pub(super) const fn bits(first: u32, count: u32) -> u64 {
    (u64::MAX >> (WORD_PAGES - count)) << first
}

/// Consecutive pages of a folio that are all anon-exclusive or all not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ExclusiveRun {
    pub(crate) exclusive: bool,
    /// How many they are.
    pub(crate) count: u32,
}

impl<P: Platform> Frames<P> {
    /// A fresh folio, which only the caller knows: its count stays zero until it is mapped
    /// ([`Frames::first_map`]) or published ([`Frames::publish`]); [`Frames::discard`] frees one
    /// that is neither. Not dirty, not locked, no page anon-exclusive, contents unspecified. `None`
    /// if there is no memory, or `order` is above [`MAX_FOLIO_ORDER`].
    ///
    /// Does not sleep. O(pages): each tail learns its head.
    pub(crate) fn new_folio(&self, order: Order) -> Option<Folio> {
        let folio = self.new_exclusive_folio(order)?;
        self.clear_exclusive(folio, 0, folio.pages());
        Some(folio)
    }

    /// As [`Frames::new_folio`], with every page anon-exclusive: for one process's anonymous
    /// memory.
    pub(crate) fn new_exclusive_folio(&self, order: Order) -> Option<Folio> {
        if order > MAX_FOLIO_ORDER {
            return None;
        }
        let folio = Folio { head: self.allocate(order, AllocateFor::Use)?, order };
        let head = self.meta(folio.head);
        let exclusive = if order == Order::PAGE { EXCLUSIVE } else { 0 };
        self.write_tails(folio);
        self.write_words(folio, |_| bits(0, folio.pages().min(WORD_PAGES)));
        head.state.store(state_of(Kind::Folio, order) | exclusive, Relaxed);
        Some(folio)
    }

    /// Frees a fresh folio, which was neither mapped nor published.
    pub(crate) fn discard(&self, platform: &P, folio: Folio) {
        let count = self.meta(folio.head).count.load(Relaxed);
        debug_assert_eq!(count, 0, "{folio:?} is not fresh");
        if count == 0 {
            // SAFETY: 1. and 2. it was never mapped nor published, so only the caller knows it.
            unsafe { self.free(platform, folio.head, folio.order) };
        } else {
            self.refuse();
        }
    }

    pub(super) fn write_tails(&self, folio: Folio) {
        let state = state_of(Kind::Tail, folio.order);
        for page in 1..folio.pages() {
            let tail = self.meta(folio.head.plus(page));
            tail.owner.store(folio.head.0, Relaxed);
            tail.state.store(state, Relaxed);
        }
    }

    /// Stores all anon-exclusive words of a folio above order 0 that only the caller knows.
    pub(super) fn write_words(&self, folio: Folio, value: impl Fn(usize) -> u64) {
        if folio.order > Order::PAGE {
            for index in 0..folio.words() {
                self.word(folio, index).store(value(index), Relaxed);
            }
        }
    }

    /// The word with the anon-exclusive bits of pages `64 * index` and on; order 1 and above.
    #[inline]
    pub(super) fn word(&self, folio: Folio, index: usize) -> &AtomicU64 {
        &self.meta(folio.head.plus(1 + index as u32)).word
    }

    /// The folio that `frame` is a page of. `None` for anything else: tables, zero pages, free
    /// memory, frames outside of the managed memory. O(1).
    ///
    /// The answer lasts only while the caller keeps the folio from being freed or split.
    #[inline]
    pub(crate) fn folio_of(&self, frame: Frame) -> Option<Folio> {
        reference::guess(self, frame)
    }

    /// Whether `page` (an index in the folio) is anon-exclusive. O(1).
    #[inline]
    pub(crate) fn is_exclusive(&self, folio: Folio, page: u32) -> bool {
        self.exclusive_run(folio, page, 1).exclusive
    }

    /// Whether all `count` pages from `page` (an index in the folio) on are in the folio and
    /// anon-exclusive. O(words touched).
    #[inline]
    pub(crate) fn are_exclusive(&self, folio: Folio, page: u32, count: u32) -> bool {
        self.exclusive_run(folio, page, count) == ExclusiveRun { exclusive: true, count }
    }

    /// Whether `page` (an index in the folio) is anon-exclusive, and how many of the `count` pages
    /// from there agree with it, at least 1. Zero pages, not exclusive, if `page` is not in the
    /// folio or `count` is 0; pages after the folio's end are not counted. O(words touched).
    pub(crate) fn exclusive_run(&self, folio: Folio, page: u32, count: u32) -> ExclusiveRun {
        let count = count.min(folio.pages().saturating_sub(page));
        if count == 0 {
            return ExclusiveRun { exclusive: false, count: 0 };
        }
        if folio.order == Order::PAGE {
            let exclusive = self.meta(folio.head).state.load(Relaxed) & EXCLUSIVE != 0;
            return ExclusiveRun { exclusive, count: 1 };
        }
        let mut index = (page / WORD_PAGES) as usize;
        let mut word = self.word(folio, index).load(Relaxed) >> (page % WORD_PAGES);
        let exclusive = word & 1 != 0;
        let mut run = 0;
        let mut room = WORD_PAGES - page % WORD_PAGES;
        loop {
            let equal = if exclusive { word.trailing_ones() } else { word.trailing_zeros() };
            run += equal.min(room);
            if equal < room || run >= count {
                return ExclusiveRun { exclusive, count: run.min(count) };
            }
            index += 1;
            room = WORD_PAGES;
            word = self.word(folio, index).load(Relaxed);
        }
    }

    /// Marks `count` pages from `page` (an index in the folio) anon-exclusive; pages after the
    /// folio's end are ignored. One atomic instruction for each 64 pages, none if they are marked
    /// already.
    pub(crate) fn set_exclusive(&self, folio: Folio, page: u32, count: u32) {
        self.change_exclusive(folio, page, count, u64::MAX);
    }

    /// As [`Frames::set_exclusive`], but the pages are no longer anon-exclusive.
    pub(crate) fn clear_exclusive(&self, folio: Folio, page: u32, count: u32) {
        self.change_exclusive(folio, page, count, 0);
    }

    /// `to` is all ones or all zeroes.
    #[inline]
    fn change_exclusive(&self, folio: Folio, page: u32, count: u32, to: u64) {
        let end = page.saturating_add(count).min(folio.pages());
        if folio.order == Order::PAGE {
            if page < end {
                self.change_state_flag(folio, EXCLUSIVE, to != 0);
            }
            return;
        }
        let mut page = page;
        while page < end {
            let first = page % WORD_PAGES;
            let pages = (end - page).min(WORD_PAGES - first);
            let word = self.word(folio, (page / WORD_PAGES) as usize);
            let mask = bits(first, pages);
            let old = word.load(Relaxed);
            if (old ^ to) & mask == 0 {
                // No change: do not write the cache line.
            } else if to == 0 {
                word.fetch_and(!mask, Relaxed);
            } else {
                word.fetch_or(mask, Relaxed);
            }
            page += pages;
        }
    }

    #[inline]
    pub(super) fn change_state_flag(&self, folio: Folio, flag: u32, set: bool) {
        let state = &self.meta(folio.head).state;
        if (state.load(Relaxed) & flag != 0) == set {
            return;
        }
        if set {
            state.fetch_or(flag, Relaxed);
        } else {
            state.fetch_and(!flag, Relaxed);
        }
    }

    /// Marks the folio dirty. Only a load if it is dirty already.
    #[inline]
    pub(crate) fn mark_dirty(&self, folio: Folio) {
        self.change_state_flag(folio, DIRTY, true);
    }

    /// Whether the folio was written since [`Frames::clear_dirty`].
    #[inline]
    pub(crate) fn is_dirty(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.load(Relaxed) & DIRTY != 0
    }

    /// Whether instruction fetches see the folio's content.
    pub(crate) fn is_fetchable(&self, folio: Folio) -> bool {
        // Acquire: the synchronization of the thread that set it comes before the caller's entry.
        self.meta(folio.head).state.load(Acquire) & FETCHABLE != 0
    }

    /// Records that instruction fetches see the folio's content.
    pub(crate) fn mark_fetchable(&self, folio: Folio) {
        self.meta(folio.head).state.fetch_or(FETCHABLE, Release);
    }

    /// Records that the folio was written since. After the store: a CPU that makes an executable
    /// entry concurrently either comes after this, or belongs to a program that executes memory
    /// that another call is writing.
    pub(crate) fn clear_fetchable(&self, folio: Folio) {
        self.change_state_flag(folio, FETCHABLE, false);
    }

    /// Records that the folio's content may be dropped unless it is written first (`MADV_FREE`).
    pub(crate) fn mark_lazy(&self, folio: Folio) {
        self.change_state_flag(folio, DIRTY, false);
        self.change_state_flag(folio, LAZY, true);
    }

    /// Whether the folio's content may be dropped, unless it was written since
    /// [`Frames::mark_lazy`].
    pub(crate) fn is_lazy(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.load(Relaxed) & LAZY != 0
    }

    /// Records that readahead brought the folio in from swap, because another page was wanted.
    pub(crate) fn mark_read_around(&self, folio: Folio) {
        self.change_state_flag(folio, READ_AROUND, true);
    }

    /// Returns and clears the mark of [`Frames::mark_read_around`]. The caller has the folio's
    /// lock.
    #[inline]
    pub(crate) fn take_read_around(&self, folio: Folio) -> bool {
        let is_noted = self.meta(folio.head).state.load(Relaxed) & READ_AROUND != 0;
        if is_noted {
            self.change_state_flag(folio, READ_AROUND, false);
        }
        is_noted
    }

    /// Clears the dirty mark: the content is about to be saved, and later writes count as new.
    #[inline]
    #[cfg_attr(not(test), expect(dead_code, reason = "reclaim will need it"))]
    pub(crate) fn clear_dirty(&self, folio: Folio) {
        self.change_state_flag(folio, DIRTY, false);
    }
}
