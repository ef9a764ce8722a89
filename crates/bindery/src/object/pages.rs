//! The pages of an object: found, marked, dropped (`fetch` brings them in).
//!
//! A thread that looks up a page and uses its frame shares the invalidate lock, or holds the
//! object's *changes*, or has a write in its list ([`super::in_flight`]). A thread that drops pages
//! holds the two locks exclusively, and has waited for the writes. So a frame that was found stays
//! the page's until the caller releases its lock.

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{Frame, Orders, PAGE_SHIFT, PAGE_SIZE, PageRange};
use crate::frame::{Folio, Freed};
use crate::platform::Platform;

use super::awaited::Stop;
use super::dropping::{Piece, drop_pages};
use super::fetch::{Wanted, obtain};
use super::in_flight::Ticket;
use super::invalidate::{PagesMayGo, PagesStay};
use super::{Object, ObjectState};
use crate::bytes;
use crate::collections::page_tree::{PageFlags, PageRun, PageStretch, SwapSlot};

/// What is at `page`, and how far it goes on, at most `limit` pages: a run in consecutive
/// frames of one folio, which the first one names, or pages that are not in memory. What lies
/// after the object's end is not there, though it may be in memory already.
pub(crate) fn resident_run<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    limit: u64,
) -> (Option<Frame>, u64) {
    let within = object.size_in_pages().saturating_sub(page);
    if within == 0 {
        return (None, limit);
    }
    match run_at(memory, object, page, limit.min(within)) {
        (None, count) if count == within => (None, limit),
        found => found,
    }
}

/// The runs of `pages` that are in memory, as [`resident_run`] tells of one, from the first on, as
/// many as there is room for in `runs`. Says from where to go on; the end if they are all.
///
/// Complexity: O(h) for each run, of the height h of the index, and one step for each page there.
pub(crate) fn resident_runs<P: Platform, const N: usize>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    runs: &mut ArrayVec<PageRun, N>,
) -> u64 {
    let end = pages.end.min(object.size_in_pages());
    let cut = |frame| u64::from(memory.folio_limit(frame, u32::MAX).0);
    object.pages.look(&memory.platform, |index| {
        let mut from = pages.first;
        while !runs.is_full() {
            let Some(run) = index.next_run_cut(from, end, cut) else { return pages.end };
            from = run.page + u64::from(run.count);
            runs.push(run);
        }
        from
    })
}

/// As [`resident_run`], whatever the size.
pub(super) fn run_at<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    limit: u64,
) -> (Option<Frame>, u64) {
    let most = limit.min(u64::from(u32::MAX)) as u32;
    let cut = |frame| u64::from(memory.folio_limit(frame, most).0);
    match object.pages.look(&memory.platform, |index| index.run_cut(page, limit, cut)) {
        PageStretch::Empty(count) => (None, count),
        PageStretch::Frames(frame, count) => (Some(frame), u64::from(count)),
        PageStretch::Swapped(_, count) => (None, u64::from(count)),
    }
}

/// If `page` is in swap, whether it is in the swap cache too, and how many pages are as it is, at
/// most `limit`.
pub(crate) fn cached_run<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    limit: u64,
) -> Option<(bool, u64)> {
    if object.pages.swapped() == 0 {
        return None;
    }
    let end = page.saturating_add(limit).min(object.size_in_pages());
    let run = object.pages.look(&memory.platform, |index| index.next_swapped(page, end))?;
    if run.page != page {
        return None;
    }
    let cached = |n: u64| {
        let SwapSlot { area, slot } = run.first.plus(n);
        memory.is_slot_resident(area, slot)
    };
    let first = cached(0);
    let alike = (0..u64::from(run.count)).take_while(|n| cached(*n) == first).count();
    Some((first, alike.max(1) as u64))
}

/// How many of the `limit` pages from `page` on the object has neither in memory nor in swap. One
/// descent of the index, however many they are.
pub(crate) fn hole<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    limit: u64,
) -> u64 {
    let end = page.saturating_add(limit);
    let next = object.pages.look(&memory.platform, |index| index.next_used(page, end));
    next.unwrap_or(end) - page
}

/// How many of the pages from `first` to `end` are in swap.
#[cfg(feature = "procfs")]
pub(crate) fn swapped_pages<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    end: u64,
) -> u64 {
    if object.pages.swapped() == 0 {
        return 0;
    }
    let (mut pages, mut from) = (0, first);
    let next = |from| object.pages.look(&memory.platform, |index| index.next_swapped(from, end));
    while let Some(run) = next(from) {
        pages += u64::from(run.count);
        from = run.page + u64::from(run.count);
    }
    pages
}

/// The pages around `page`, which `frame` holds, that are in the same folio without a gap, at
/// most `below` before it and `above` from it on, by their numbers. Parts of the folio that were
/// dropped end the run.
///
/// ```text
/// folio    |f0 f1 f2 f3 f4 f5 f6 f7|
/// index    | 0  1  .  3  4  5  6  .|        around page 4: pages 3 to 6
/// ```
pub(crate) fn run_around<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    frame: Frame,
    below: u64,
    above: u64,
) -> PageRange {
    let inside = memory.frames.folio_of(frame).map_or(0, |folio| frame.0 - folio.head.0);
    let below = below.min(u64::from(inside)).min(page);
    let before = object.pages.look(&memory.platform, |index| {
        let same = |distance: u64| {
            let slot = index.get(page - distance);
            slot.is_some_and(|slot| u64::from(slot.frame.0) + distance == u64::from(frame.0))
        };
        (1..=below).take_while(|distance| same(*distance)).count() as u64
    });
    let (_, after) = resident_run(memory, object, page, above.max(1));
    PageRange::from_count(page - before, before + after)
}

/// Whether the object has `page`, in memory or in swap.
pub(crate) fn has<P: Platform>(memory: &Memory<P>, object: &ObjectState, page: u64) -> bool {
    !lacks(memory, object, page, 1)
}

/// Whether the object has none of `count` pages from `first` on, in memory or in swap.
pub(crate) fn lacks<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    count: u64,
) -> bool {
    let found = object.pages.look(&memory.platform, |index| index.run(first, count));
    found == PageStretch::Empty(count)
}

/// The frame that holds `page`, which lies within the object's size. If the page is not in memory,
/// brings it in, in a folio of the largest of `orders` (order 0 always) that fits:
/// into the object's size, between what is there, and into memory. A page of a file has to be
/// awaited. The invalidate lock is held.
///
/// # Errors
/// As [`obtain`]. Nothing is changed then.
pub(crate) fn get<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    orders: Orders,
) -> Result<Frame, Stop> {
    get_ahead(memory, object, page, orders, 1)
}

/// As [`get`], for a fault that could map `ahead` pages from `page` on: some of shared memory come
/// back from swap with it.
#[inline]
pub(crate) fn get_ahead<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    orders: Orders,
    ahead: u64,
) -> Result<Frame, Stop> {
    let ahead = if object.is_file() { 1 } else { ahead };
    let one = Wanted::one(orders, object.size_in_pages());
    let wanted = Wanted { for_fault: true, ahead, ..one };
    obtain(memory, object, page, &wanted)
}

/// Notes that `count` pages from `page` on are, or will be, written. Those of a file are saved by
/// the next `sync` then; before it was called, no entry may let them be written.
///
/// Called without locks on tables, with the invalidate lock held for reading, which it stays until
/// the pages are writable:
/// 1. CPU A marks page 3;
/// 2. CPU B saves the object: clears the mark, takes write permission away, stores the page;
/// 3. CPU A lets page 3 be written, and nobody will save that.
///
/// # Errors
/// Where one of the pages is being stored, what to wait for before the caller comes again. None is
/// marked then.
pub(crate) fn mark_dirty<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    count: u64,
) -> Result<(), Ticket> {
    if object.notices_writes() {
        if let Some(ticket) = object.pages.being_stored(&memory.platform, page, count) {
            return Err(ticket);
        }
        let known = object.pages.look(&memory.platform, |index| {
            let run = index.next_run_with(PageFlags::DIRTY, page, page.saturating_add(count));
            run.is_some_and(|run| run.page == page && u64::from(run.count) == count)
        });
        if !known {
            object.pages.change(memory, |index, _| {
                index.set_flags(page, count, PageFlags::DIRTY);
                ((), 0)
            });
        }
        return Ok(());
    }
    // Memory is not saved anywhere yet; reclaim will ask the folios.
    any_folio(memory, object, page, page.saturating_add(count), |folio| {
        memory.frames.mark_dirty(folio);
        false
    });
    Ok(())
}

/// As [`mark_dirty`] of a run whose frames are known.
///
/// # Errors
/// As there.
pub(super) fn mark_run_dirty<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    run: PageRun,
) -> Result<(), Ticket> {
    if object.notices_writes() {
        return mark_dirty(memory, object, run.page, u64::from(run.count));
    }
    for_each_part(memory, run, |_, _, folio, _| {
        memory.frames.mark_dirty(folio);
        true
    });
    Ok(())
}

/// Notes that `count` pages from `page` on may have been written behind the back of the page
/// tables: by a device that had pinned them. What the object has lost since is passed over. May
/// sleep; called without locks.
pub(crate) fn mark_written<P: Platform>(object: &Object<'_, P>, page: u64, count: u64) {
    let (memory, state) = (object.memory, object.state());
    let mark = |_: &PagesStay| mark_dirty(memory, state, page, count);
    while let Err(ticket) = state.invalidate_lock.with_read(&memory.platform, mark) {
        state.pages.wait(&memory.platform, ticket);
    }
}

/// Gives the references to `count` pages of `folio` back, which the index named until now; its
/// first page belongs at `first`. If it names no page of the folio any more, and somebody else
/// holds it, the folio belongs to nobody. No page of the folio comes or goes meanwhile. May wait
/// for the folio's lock.
pub(super) fn let_go<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    folio: Folio,
    count: u32,
    _: &PagesMayGo,
) {
    let (frames, platform) = (&memory.frames, &memory.platform);
    if frames.release_last(platform, folio, count) == Freed::Yes {
        return;
    }
    if !names(memory, object, first, folio) {
        memory.lock_folio(folio).let_go();
    }
    frames.release_pages(platform, folio, count);
}

/// Whether the index names a page of `folio`, whose first page belongs at `first`.
fn names<P: Platform>(memory: &Memory<P>, object: &ObjectState, first: u64, folio: Folio) -> bool {
    let (mut from, end) = (first, first + u64::from(folio.pages()));
    while let Some(run) = object.pages.look(&memory.platform, |index| index.next_run(from, end)) {
        // What was dropped may have come back in another folio.
        if run.frame == folio.head.plus((run.page - first) as u32) {
            return true;
        }
        from = run.page + u64::from(run.count);
    }
    false
}

/// Drops those of the pages from `first` to `end` that were neither written nor mapped since they
/// came, so that they are zeroes either way.
pub(super) fn drop_untouched<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    end: u64,
    proof: &PagesMayGo,
) {
    let (mut from, mut piece) = (first, Piece::first_of(memory));
    while let Some(run) = object.pages.look(&memory.platform, |index| index.next_run(from, end)) {
        from = run.page + u64::from(run.count);
        for_each_part(memory, run, |page, _, folio, count| {
            let frames = &memory.frames;
            if frames.mappings(folio) == 0 && frames.pins(folio) == 0 && !frames.is_dirty(folio) {
                let pages = PageRange::from_count(page, u64::from(count));
                drop_pages(memory, object, pages, &mut piece, proof);
            }
            true
        });
    }
}

/// Asks `f` about each folio that has pages from `first` to `end`, until it says yes. A folio of
/// which pages were dropped may be asked about more than once.
pub(super) fn any_folio<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    end: u64,
    mut f: impl FnMut(Folio) -> bool,
) -> bool {
    let mut from = first;
    while let Some(run) = object.pages.look(&memory.platform, |index| index.next_run(from, end)) {
        from = run.page + u64::from(run.count);
        if !for_each_part(memory, run, |_, _, folio, _| !f(folio)) {
            return true;
        }
    }
    false
}

/// Cuts a run where folios meet, and calls `f` with the first page, its frame, the folio and how
/// many pages of it, as long as it says to go on. Says whether that was to the end.
pub(super) fn for_each_part<P: Platform>(
    memory: &Memory<P>,
    run: PageRun,
    mut f: impl FnMut(u64, Frame, Folio, u32) -> bool,
) -> bool {
    let mut done = 0;
    while done < run.count {
        let frame = run.frame.plus(done);
        let (count, _) = memory.folio_limit(frame, run.count - done);
        // An index names folios alone.
        let Some(folio) = memory.frames.folio_of(frame) else { return true };
        if !f(run.page + u64::from(done), frame, folio, count.max(1)) {
            return false;
        }
        done += count.max(1);
    }
    true
}

/// Fills the bytes from `start` to `end` of the object, which lie in one page, with zeroes; if the
/// page is not there, nothing happens. It is not in swap. Called with the invalidate lock held and
/// without locks on tables. The bytes lie after the end of the file, or the caller has a change of
/// the page in the list.
pub(super) fn zero_part<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    start: u64,
    end: u64,
) {
    let page = start >> PAGE_SHIFT;
    if start >= end {
        return;
    }
    let found = object.pages.look(&memory.platform, |index| index.get(page));
    if let Some(slot) = found {
        let inside = |at: u64| (at - (page << PAGE_SHIFT)).min(PAGE_SIZE) as usize;
        // SAFETY: 1. and 2. the index names the frame, and the caller keeps the page; 3. who
        // truncates waits for pagers before.
        unsafe { bytes::zero(&memory.platform, slot.frame, inside(start)..inside(end)) };
        memory.written_by_call(slot.frame);
    }
}
