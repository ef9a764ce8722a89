//! Readahead: reads pages of a file before they are needed, for a reader that accesses them in
//! order.
//!
//! The page index shows the progress of a reader. A missing page that follows present ones
//! continues their run: the core requests a *window* of pages at once, twice as long as the run
//! before it (Linux: `page_cache_ra_order`, and `try_context_readahead` for a file that several
//! threads read). So no state per open file is needed, and each of several readers has its own
//! window. If fewer pages precede the missing page than the access needs, the reader is considered
//! random and gets only the pages that it requests. A window shrinks as reclaim evicts the pages
//! behind the reader.
//!
//! A pager that keeps requests ([`super::ReadRequest::keep`]) reads while the reader computes. The
//! first page of a window that the reader has not requested gets a *mark*. The access that reaches
//! the mark starts the read of the next window and does not wait:
//!
//! ```text
//! asked for    |p|             p is missing: waits
//! window       |p m . .|       mark at m
//! access to m          |n . . . . .|               twice the pages from m on; mark at n
//! access to n                      |o . . . . . . . . . . .|
//! ```
//!
//! A mark is at the first page of a folio, so a large folio is still mapped as a whole. An object
//! has few marks, stored in words without a lock. A lost mark costs one wait.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use crate::Memory;
use crate::addr::{Orders, PAGE_SHIFT, PageRange};
use crate::collections::page_tree::{PageIndex, PageStretch};
use crate::error::NoMemory;
use crate::interrupt;
use crate::platform::Platform;

use super::Object;
use super::ObjectState;
use super::ask::Fetch;
use super::fetch::Wanted;
use super::in_flight::InFlight;
use super::page_read::RequestKept;
use super::pages::lacks;
use super::read_end::settle_answered;
use super::state::pages_of;
use crate::vma::MappingFlags;

/// The order in which a reader accesses the pages of a file (`posix_fadvise(2)`).
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
    /// Unknown: pages are read ahead of a reader that accesses them in order (`POSIX_FADV_NORMAL`).
    #[default]
    Unknown,
    /// In order: a window has its full length from the start, and twice as many pages if 32 folios
    /// hold them (`POSIX_FADV_SEQUENTIAL`).
    Sequential,
    /// At random: nothing is read ahead (`POSIX_FADV_RANDOM`).
    Random,
}

/// The number of marks of an object.
const MARKS: usize = 4;
/// The bits of a mark's word that hold the length of its window.
const LENGTH_BITS: u32 = 12;
/// The maximum size of a window in pages.
const LONGEST: u64 = 512;
/// The shortest window, in pages.
const SHORTEST: u64 = 4;

/// The marks of an object.
pub(crate) struct ReadAhead {
    /// The maximum number of pages that the pager wants to read ahead.
    limit: u64,
    /// Whether a mark was ever set.
    used: AtomicBool,
    /// The index of the mark that is replaced next.
    oldest: AtomicU32,
    words: [AtomicU64; MARKS],
}

/// A mark, and the window that begins there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadAheadWindow {
    /// The index of the window's mark in the table.
    place: usize,
    word: u64,
}

impl ReadAheadWindow {
    fn mark(self) -> u64 {
        self.word >> LENGTH_BITS
    }

    fn length(self) -> u64 {
        self.word & ((1 << LENGTH_BITS) - 1)
    }
}

impl ReadAhead {
    pub(super) const fn new(limit: u64) -> Self {
        Self {
            limit,
            used: AtomicBool::new(false),
            oldest: AtomicU32::new(0),
            words: [const { AtomicU64::new(0) }; MARKS],
        }
    }

    /// The window whose mark is the first one in `pages`.
    #[inline]
    pub(super) fn window_in(&self, pages: PageRange) -> Option<ReadAheadWindow> {
        // For a pager that answers immediately and so leaves no marks, this check is the only cost.
        if self.used.load(Relaxed) { self.find(pages) } else { None }
    }

    #[cold]
    fn find(&self, pages: PageRange) -> Option<ReadAheadWindow> {
        let windows = self
            .words
            .iter()
            .enumerate()
            .map(|(place, word)| ReadAheadWindow { place, word: word.load(Relaxed) });
        windows
            .filter(|window| window.word != 0 && (pages.first..pages.end).contains(&window.mark()))
            .min_by_key(|window| window.mark())
    }

    /// The first mark in `pages`, or their end.
    #[inline]
    pub(crate) fn next_mark(&self, pages: PageRange) -> u64 {
        self.window_in(pages).map_or(pages.end, ReadAheadWindow::mark)
    }

    /// Removes a mark. Returns false if another thread was faster.
    fn take(&self, window: ReadAheadWindow) -> bool {
        self.words[window.place % MARKS].compare_exchange(window.word, 0, Relaxed, Relaxed).is_ok()
    }

    /// Marks the first page of a window, in place of the oldest mark.
    pub(super) fn set(&self, window: PageRange) {
        let length = (window.end - window.first).min((1 << LENGTH_BITS) - 1);
        let free = self.words.iter().position(|word| word.load(Relaxed) == 0);
        let place = free.unwrap_or_else(|| self.oldest.fetch_add(1, Relaxed) as usize % MARKS);
        self.words[place].store(window.first << LENGTH_BITS | length, Relaxed);
        self.used.store(true, Relaxed);
    }
}

impl ReadPattern {
    /// The maximum size of a window in pages, for a pager that wants `limit`.
    fn longest(self, limit: u64) -> u64 {
        match self {
            Self::Unknown => limit.min(LONGEST),
            Self::Sequential => limit.saturating_mul(2).min(LONGEST),
            Self::Random => 0,
        }
    }
}

/// The number of pages to request from the pager, from the missing `page` on; at least `needed`.
pub(super) fn window<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    wanted: &Wanted<'_>,
) -> u64 {
    let needed = wanted.ahead;
    let longest = wanted.pattern.longest(object.ahead.limit);
    if longest <= needed {
        return needed;
    }
    let length = match wanted.pattern {
        ReadPattern::Random => 0,
        ReadPattern::Sequential => longest,
        ReadPattern::Unknown => {
            let before = stretch_before(memory, object, page);
            // A neighbor may be in memory by chance, unless the last call has read it.
            let is_next = object.last_read.load(Relaxed).wrapping_add(1) == page;
            if before > needed || before > 0 && is_next {
                (2 * before).next_power_of_two().max(SHORTEST)
            } else {
                0
            }
        }
    };
    let length = length.min(longest).max(needed);
    // Pages that no access needs yet leave memory for needed ones.
    if memory.has_room_for(length) { length } else { needed }
}

/// The approximate number of pages before `page` that are present without a gap, estimated by
/// checking pages at doubling distances.
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

/// The window to be read next, because an access has reached a mark.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NextWindow {
    reached: ReadAheadWindow,
    orders: Orders,
    /// Upper bound for the end of a folio, in pages.
    end: u64,
    pattern: ReadPattern,
}

/// The window that an access to the present `pages` must start to read.
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
    /// Starts to read the window, unless another thread has. Called without locks. May sleep.
    pub(super) fn begin<P: Platform>(self, object: &Object<'_, P>) {
        let (memory, state) = (object.memory, object.state());
        if !state.ahead.take(self.reached) {
            return;
        }
        let longest = self.pattern.longest(state.ahead.limit);
        let length = (2 * self.reached.length()).min(longest);
        let first = self.reached.mark() + self.reached.length();
        let end = (first + length).min(self.end).min(state.size_in_pages());
        if first >= end || !memory.has_room_for(length) {
            return;
        }
        let begun = Fetch::ahead(PageRange { first, end }, self.orders).begin(object);
        if let Ok(Some((pages, RequestKept::Yes))) = begun {
            state.ahead.set(pages);
        }
    }
}

impl<P: Platform> Object<'_, P> {
    /// Sets the order in which calls through this handle, and through clones made from now on, read
    /// a file (`posix_fadvise(2)` of an open file). Mappings have an order of their own
    /// (`madvise(2)`).
    ///
    /// Context: any.
    pub fn set_read_pattern(&mut self, pattern: ReadPattern) {
        self.pattern = pattern;
    }

    /// Starts to read the missing pages of a file in `length` bytes from `offset` on, unless memory
    /// is short. Waits for the pager only if it answers during [`crate::Pager::begin_read`]; an
    /// error is reported to the access that needs the page. Does nothing for an object that is not
    /// a file, or for a length of 0. A fatal signal ends the call early. (Linux: `readahead(2)`,
    /// `POSIX_FADV_WILLNEED` of `posix_fadvise(2)`, which read at most one window of the range.)
    ///
    /// Context: may sleep. Complexity: one request for each 32 folios, plus one lookup in the page
    /// index for each run of pages.
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

/// Starts the read of the first missing pages. Returns the page to continue at; `None` if memory is
/// short or the pager has already failed.
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
                let reads = |_: &mut _, in_flight: &mut InFlight, _: &_| in_flight.busy_until(from);
                if let Some(end) = state.pages.alone(memory.platform(), reads) {
                    // Another call reads or changes these pages.
                    from = end;
                    continue;
                }
                let begun = Fetch::ahead(PageRange::from_count(from, count), orders).begin(object);
                return match begun {
                    Err(NoMemory) => None,
                    Ok(None) => Some(from + 1),
                    Ok(Some((pages, RequestKept::Yes))) => Some(pages.end),
                    Ok(Some((pages, RequestKept::No))) => {
                        settle_answered(memory);
                        // A pager that has failed immediately fails for the rest, too.
                        (!lacks(memory, state, pages.first, 1)).then_some(pages.end)
                    }
                };
            }
        }
    }
    Some(pages.end)
}
