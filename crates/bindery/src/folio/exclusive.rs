//! The anon-exclusive bits of a folio: no other process shares the page, so a write fault may reuse
//! it.
//!
//! [`crate::frame::meta`] describes the storage of these bits: 64 pages in one word, or a flag of
//! the state for a folio of one page.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::handle::{Folio, FolioHandle, MAX_FOLIO_ORDER, change_flag};
use crate::addr::Order;
use crate::frame::Frames;
use crate::frame::meta::EXCLUSIVE;
use crate::platform::Platform;

/// The number of pages in one word of anon-exclusive bits.
pub(super) const WORD_PAGES: u32 = u64::BITS;
/// The number of words that hold the bits of the largest folio.
pub(super) const MAX_WORDS: usize = (MAX_FOLIO_ORDER.pages() / WORD_PAGES) as usize;

/// `count` bits from bit `first`; `count` is 1 to 64, and both fit in the word.
#[inline]
pub(super) const fn bits(first: u32, count: u32) -> u64 {
    (u64::MAX >> (WORD_PAGES - count)) << first
}

/// Consecutive pages of a folio that agree: either all or none are anon-exclusive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ExclusiveRun {
    pub(crate) exclusive: bool,
    /// The number of pages.
    pub(crate) count: u32,
}

/// The anon-exclusive bits of one folio. Pages are named by their index in the folio.
pub(crate) struct ExclusiveBits<'a, P: Platform>(FolioHandle<'a, P>);

impl<P: Platform> Clone for ExclusiveBits<'_, P> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for ExclusiveBits<'_, P> {}

impl<'a, P: Platform> FolioHandle<'a, P> {
    /// The folio's anon-exclusive bits.
    #[inline(always)]
    pub(crate) fn exclusive(self) -> ExclusiveBits<'a, P> {
        ExclusiveBits(self)
    }
}

impl<'a, P: Platform> ExclusiveBits<'a, P> {
    /// Whether `page` is anon-exclusive. O(1).
    #[inline]
    pub(crate) fn contains(self, page: u32) -> bool {
        self.run(page, 1).exclusive
    }

    /// Whether all `count` pages from `page` on are in the folio and anon-exclusive. O(words
    /// touched).
    #[inline]
    pub(crate) fn contains_all(self, page: u32, count: u32) -> bool {
        self.run(page, count) == ExclusiveRun { exclusive: true, count }
    }

    /// Whether `page` is anon-exclusive, and the number of consecutive pages from there, of at most
    /// `count`, that agree with it, at least 1. Zero pages, not exclusive, if `page` is not in the
    /// folio or `count` is 0; pages after the folio's end are not counted. O(words touched).
    #[inline(always)]
    pub(crate) fn run(self, page: u32, count: u32) -> ExclusiveRun {
        run(self.0.frames, self.0.folio, page, count)
    }

    /// Marks `count` pages from `page` on as anon-exclusive; ignores pages after the folio's end.
    /// One atomic instruction for each 64 pages, or a load if all are marked.
    #[inline(always)]
    pub(crate) fn set(self, page: u32, count: u32) {
        set(self.0.frames, self.0.folio, page, count);
    }

    /// Clears the marks of [`ExclusiveBits::set`] for `count` pages, at the same cost.
    #[inline(always)]
    pub(crate) fn clear(self, page: u32, count: u32) {
        clear(self.0.frames, self.0.folio, page, count);
    }

    /// Changes `count` bits from `page` on; `to` is all ones or all zeroes.
    #[inline]
    fn change(self, page: u32, count: u32, to: u64) {
        let folio = self.0.folio;
        let end = page.saturating_add(count).min(folio.pages());
        if folio.order == Order::PAGE {
            if page < end {
                change_flag(self.0.state(), EXCLUSIVE, to != 0);
            }
            return;
        }
        let mut page = page;
        while page < end {
            let first = page % WORD_PAGES;
            let pages = (end - page).min(WORD_PAGES - first);
            let word = self.word((page / WORD_PAGES) as usize);
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

    /// The number of words that hold the bits.
    #[inline]
    pub(super) fn words(self) -> usize {
        self.0.folio.pages().div_ceil(WORD_PAGES) as usize
    }

    /// The word with the bits of pages `64 * index` to `64 * index + 63`, for order 1 and above.
    #[inline]
    pub(super) fn word(self, index: usize) -> &'a AtomicU64 {
        &self.0.frames.meta(self.0.folio.head.plus(1 + index as u32)).word
    }

    /// Stores all words of a folio above order 0 that only the caller can find.
    #[inline]
    pub(super) fn write(self, value: impl Fn(usize) -> u64) {
        if self.0.folio.order > Order::PAGE {
            for index in 0..self.words() {
                self.word(index).store(value(index), Relaxed);
            }
        }
    }
}

// These functions are called rather than inlined and receive words instead of a handle, which would
// be written to the stack for each call.

fn run<P: Platform>(frames: &Frames<P>, folio: Folio, page: u32, count: u32) -> ExclusiveRun {
    let count = count.min(folio.pages().saturating_sub(page));
    if count == 0 {
        return ExclusiveRun { exclusive: false, count: 0 };
    }
    let handle = frames.folio(folio);
    if folio.order == Order::PAGE {
        let exclusive = handle.state().load(Relaxed) & EXCLUSIVE != 0;
        return ExclusiveRun { exclusive, count: 1 };
    }
    let words = handle.exclusive();
    let mut index = (page / WORD_PAGES) as usize;
    let mut word = words.word(index).load(Relaxed) >> (page % WORD_PAGES);
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
        word = words.word(index).load(Relaxed);
    }
}

fn set<P: Platform>(frames: &Frames<P>, folio: Folio, page: u32, count: u32) {
    frames.folio(folio).exclusive().change(page, count, u64::MAX);
}

fn clear<P: Platform>(frames: &Frames<P>, folio: Folio, page: u32, count: u32) {
    frames.folio(folio).exclusive().change(page, count, 0);
}
