//! Readahead: pages of a file are read before they are needed, for a reader that goes through it in
//! order.
//!
//! The page index tells how far a reader has come. A page that is missing after others that are
//! present continues them: the pager is asked for a *window* of pages at once, twice as long as the
//! stretch before (Linux: `page_cache_ra_order`, and `try_context_readahead` for a file that several
//! threads read). So no state of an open file is needed, and each of several readers has its window.
//! A page without a predecessor is a reader that jumps: it gets what it asks for. A window shrinks as
//! reclaim takes the pages that it had.
//!
//! A pager that keeps requests ([`super::ReadRequest::keep`]) reads while the reader computes. The
//! first page of a window that the reader has not asked for gets a *mark*. The access that reaches it
//! begins to read the next window, and waits for nothing:
//!
//! ```text
//! asked for    |p|             p is missing: waits
//! window       |p m . .|       mark at m
//! access to m          |n . . . . . . .|     the next window, mark at n
//! access to n                          |o . . . . . . . . . . . . . . .|
//! ```
//!
//! The marks of an object are few, in words without a lock. One that is lost costs a wait.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use crate::Memory;
use crate::addr::{Orders, PAGE_SHIFT, PageRange};
use crate::collections::page_tree::{PageIndex, PageStretch};
use crate::interrupt;
use crate::platform::Platform;

use super::Object;
use super::ObjectState;
use super::fetch::{Fetch, Wanted};
use super::page_read::Kept;
use super::pages::lacks;
use super::state::pages_of;
use crate::vma::MappingFlags;

/// The order in which a reader takes the pages of a file (`posix_fadvise(2)`).
///
/// ```
/// use bindery::{Object, Platform, ReadPattern};
///
/// /// `POSIX_FADV_RANDOM`.
/// fn reads_at_random<P: Platform>(file: &mut Object<'_, P>) {
///     file.set_read_pattern(ReadPattern::Random);
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReadPattern {
    /// Unknown: pages are read ahead of a reader that goes in order (`POSIX_FADV_NORMAL`).
    #[default]
    Unknown,
    /// In order: the window is twice as long, and has its whole length at once
    /// (`POSIX_FADV_SEQUENTIAL`).
    Sequential,
    /// At random: nothing is read ahead (`POSIX_FADV_RANDOM`).
    Random,
}

/// The number of marks of an object.
const MARKS: usize = 4;
/// The bits of a mark's word that hold the length of its window.
const LENGTH_BITS: u32 = 12;
/// The most pages of a window.
const LONGEST: u64 = 512;
/// The shortest window, in pages.
const SHORTEST: u64 = 4;

/// The marks of an object.
pub(crate) struct ReadAhead {
    /// Whether it has had a mark.
    used: AtomicBool,
    /// The mark that is replaced next.
    oldest: AtomicU32,
    words: [AtomicU64; MARKS],
}

/// A mark, and the window that begins there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Where the window lies in the table of marks.
    place: usize,
    word: u64,
}

impl Window {
    fn mark(self) -> u64 {
        self.word >> LENGTH_BITS
    }

    fn length(self) -> u64 {
        self.word & ((1 << LENGTH_BITS) - 1)
    }
}

impl ReadAhead {
    pub(super) const fn new() -> Self {
        Self {
            used: AtomicBool::new(false),
            oldest: AtomicU32::new(0),
            words: [const { AtomicU64::new(0) }; MARKS],
        }
    }

    /// The window whose mark is the first one in `pages`.
    #[inline]
    pub(super) fn window_in(&self, pages: PageRange) -> Option<Window> {
        // A pager that answers at once leaves no marks: then this is all.
        if self.used.load(Relaxed) { self.find(pages) } else { None }
    }

    #[cold]
    fn find(&self, pages: PageRange) -> Option<Window> {
        let windows = self
            .words
            .iter()
            .enumerate()
            .map(|(place, word)| Window { place, word: word.load(Relaxed) });
        windows
            .filter(|window| window.word != 0 && (pages.first..pages.end).contains(&window.mark()))
            .min_by_key(|window| window.mark())
    }

    /// The first mark in `pages`, or their end.
    #[inline]
    pub(crate) fn next_mark(&self, pages: PageRange) -> u64 {
        self.window_in(pages).map_or(pages.end, Window::mark)
    }

    /// Removes a mark. Returns false if another thread was faster.
    fn take(&self, window: Window) -> bool {
        self.words[window.place % MARKS].compare_exchange(window.word, 0, Relaxed, Relaxed).is_ok()
    }

    /// Marks the first page of a window, in place of the oldest mark.
    fn set(&self, window: PageRange) {
        let length = (window.end - window.first).min((1 << LENGTH_BITS) - 1);
        let free = self.words.iter().position(|word| word.load(Relaxed) == 0);
        let place = free.unwrap_or_else(|| self.oldest.fetch_add(1, Relaxed) as usize % MARKS);
        self.words[place].store(window.first << LENGTH_BITS | length, Relaxed);
        self.used.store(true, Relaxed);
    }
}

impl ReadPattern {
    /// The most pages of a window, for a pager that wants `limit`.
    fn longest(self, limit: u64) -> u64 {
        match self {
            Self::Unknown => limit.min(LONGEST),
            Self::Sequential => limit.saturating_mul(2).min(LONGEST),
            Self::Random => 0,
        }
    }
}

/// The number of pages from `page` on, which is missing, to ask the pager for: at least the `needed`.
pub(super) fn window<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    wanted: &Wanted<'_>,
) -> u64 {
    let needed = wanted.ahead;
    let Some((pager, _)) = object.file() else { return needed };
    let longest = wanted.pattern.longest(pager.read_ahead());
    if longest <= needed {
        return needed;
    }
    let length = match wanted.pattern {
        ReadPattern::Random => 0,
        ReadPattern::Sequential => longest,
        ReadPattern::Unknown => match stretch_before(memory, object, page) {
            0 => 0,
            before => (2 * before).next_power_of_two().max(SHORTEST),
        },
    };
    let length = length.min(longest).max(needed);
    // Pages that nothing needs yet leave memory for those that are.
    if memory.has_room_for(length) { length } else { needed }
}

/// About how many pages before `page` are present without a gap: looks at pages at doubling distances.
fn stretch_before<P: Platform>(memory: &Memory<P>, object: &ObjectState, page: u64) -> u64 {
    object.pages.look(memory.platform(), |index: &PageIndex| {
        let is_present = |distance: &u64| {
            page.checked_sub(*distance).is_some_and(|page| index.get(page).is_some())
        };
        let distances = core::iter::successors(Some(1), |distance| Some(distance * 2));
        distances
            .take_while(|distance| *distance <= LONGEST)
            .take_while(is_present)
            .last()
            .unwrap_or(0)
    })
}

/// Marks the part of a window that the reader has not asked for: the pages after the `needed` ones.
pub(super) fn mark(object: &ObjectState, window: PageRange, needed: u64) {
    let first = window.first.saturating_add(needed);
    if first < window.end {
        object.ahead.set(PageRange { first, end: window.end });
    }
}

/// An access has reached a mark: the window after it is to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NextWindow {
    reached: Window,
    orders: Orders,
    /// Upper bound for the end of a folio, in pages.
    end: u64,
    pattern: ReadPattern,
}

/// The window that an access to `pages`, which are present, has to begin to read.
#[inline]
pub(super) fn next_window(
    object: &ObjectState,
    pages: PageRange,
    wanted: &Wanted<'_>,
) -> Option<NextWindow> {
    let reached = object.ahead.window_in(pages)?;
    let Wanted { orders, end, pattern, .. } = *wanted;
    (pattern != ReadPattern::Random).then_some(NextWindow { reached, orders, end, pattern })
}

impl NextWindow {
    /// Begins to read it, unless another thread has. Called without locks. May sleep.
    pub(super) fn begin<P: Platform>(self, object: &Object<'_, P>) {
        let (memory, state) = (object.memory, object.state());
        if !state.ahead.take(self.reached) {
            return;
        }
        let Some((pager, _)) = state.file() else { return };
        let longest = self.pattern.longest(pager.read_ahead());
        let length = (2 * self.reached.length()).min(longest);
        let first = self.reached.mark() + self.reached.length();
        let end = (first + length).min(self.end).min(state.size_in_pages());
        if first >= end || !memory.has_room_for(length) {
            return;
        }
        if !lacks(memory, state, first, 1) {
            // Another reader was here: the next access looks on.
            state.ahead.set(PageRange { first, end });
            return;
        }
        let begun = Fetch::ahead(PageRange { first, end }, self.orders).begin(object);
        if let Some((pages, Kept::Yes)) = begun {
            state.ahead.set(pages);
        }
    }
}

impl<P: Platform> Object<'_, P> {
    /// Sets the order in which calls of this handle, and of its clones from now on, read a file
    /// (`posix_fadvise(2)` of an open file). Mappings have an order of their own (`madvise(2)`).
    ///
    /// Context: any.
    pub fn set_read_pattern(&mut self, pattern: ReadPattern) {
        self.pattern = pattern;
    }

    /// Begins to read the missing pages of a file in `length` bytes from `offset` on, unless memory is
    /// short. Waits for a pager only if that answers during [`crate::Pager::begin_read`]; an error is
    /// reported to the access that needs the page. Does nothing for an object that is not a file.
    /// (Linux: `readahead(2)`, `POSIX_FADV_WILLNEED` of `posix_fadvise(2)`.)
    ///
    /// Context: may sleep. Complexity: one request for each 32 folios, and a look at the page index for
    /// each run of pages.
    pub fn read_ahead(&self, offset: u64, length: u64) {
        let state = self.state();
        if !state.is_file() || length == 0 {
            return;
        }
        let (first, end) = (offset >> PAGE_SHIFT, pages_of(offset.saturating_add(length)));
        let orders = state.orders(self.memory, MappingFlags::empty());
        let pages = PageRange { first, end: end.min(state.size_in_pages()) };
        let mut from = pages.first;
        while from < pages.end
            && interrupt::check(self.memory.platform()).is_ok()
            && let Some(next) = read_missing(self, PageRange { first: from, ..pages }, orders)
        {
            from = next;
        }
    }
}

/// Begins to read the first missing ones of the pages. Returns the page to continue at; `None` if
/// memory is short.
pub(super) fn read_missing<P: Platform>(
    object: &Object<'_, P>,
    pages: PageRange,
    orders: Orders,
) -> Option<u64> {
    let (memory, state) = (object.memory, object.state());
    let end = pages.end.min(state.size_in_pages());
    let mut from = pages.first;
    while from < end {
        match state.pages.look(memory.platform(), |index| index.run(from, end - from)) {
            PageStretch::Frames(_, count) | PageStretch::Swapped(_, count) => {
                from += u64::from(count);
            }
            PageStretch::Empty(count) => {
                let count = count.min(LONGEST);
                if !memory.has_room_for(count) {
                    return None;
                }
                let begun = Fetch::ahead(PageRange::from_count(from, count), orders).begin(object);
                // A page that another call reads is passed over.
                return Some(begun.map_or(from + 1, |(begun, _)| begun.end));
            }
        }
    }
    Some(pages.end)
}
