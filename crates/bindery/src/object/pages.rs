//! The pages of an object: lookup, marking and removal (`fetch` allocates and reads pages).
//!
//! A thread that looks up a page and uses its frame holds the invalidate lock for reading, holds
//! the object's *changes*, or has a write in the object's list ([`super::in_flight`]). A thread
//! that drops pages holds both locks exclusively and has waited for the writes. So a frame that was
//! found still holds the page until the caller releases its lock.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{Frame, Orders, PAGE_SHIFT, PAGE_SIZE, PageRange};
use crate::folio::Folio;
use crate::memory::{folio_limit, written_by_call};
use crate::platform::Platform;
use crate::swap;

use super::ObjectState;
use super::dropping::{DropPiece, drop_pages};
use super::fetch::{FetchPurpose, Wanted, obtain};
use super::invalidate::{PagesMayGo, PagesStay};
use super::read_ahead::ReadPattern;
use super::unsaved::Room;
use super::wait::{Stop, Wait};
use crate::bytes;
use crate::collections::page_tree::{IndexRun, PageFlags, PageIndex, PageStretch, SwapSlot};

/// The run at `page`, of at most `limit` pages: either consecutive frames of one folio, named by
/// the first frame, or pages that are not in memory. Pages after the object's end count as absent,
/// though they may already be in memory.
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

/// The runs of `pages` that are in memory, in the form of [`resident_run`], in ascending order,
/// until `runs` is full. Returns the page to continue at, or the end if all runs were found.
///
/// Complexity: one step for each page, plus O(h) for each 64 pages and for each run of several
/// pages, where h is the height of the index.
pub(crate) fn resident_runs<P: Platform, const N: usize>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    runs: &mut ArrayVec<IndexRun, N>,
) -> u64 {
    let end = pages.end.min(object.size_in_pages());
    let cut = |frame| u64::from(folio_limit(memory, frame, u32::MAX).0);
    let done = object.pages.look(memory.platform(), |index| {
        index.each_run_cut(pages.first, end, cut, |run| {
            runs.push(run);
            !runs.is_full()
        })
    });
    if done < end { done } else { pages.end }
}

/// As [`resident_run`], regardless of the object's size.
pub(super) fn run_at<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    limit: u64,
) -> (Option<Frame>, u64) {
    let most = limit.min(u64::from(u32::MAX)) as u32;
    let cut = |frame| u64::from(folio_limit(memory, frame, most).0);
    match object.pages.look(memory.platform(), |index| index.run_cut(page, limit, cut)) {
        PageStretch::Empty(count) => (None, count),
        PageStretch::Frames(frame, count) => (Some(frame), u64::from(count)),
        PageStretch::Swapped(_, count) => (None, u64::from(count)),
    }
}

/// If `page` is in swap, returns whether it is also in the swap cache, and the length of the run in
/// the same state, at most `limit`.
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
    let run = object.pages.look(memory.platform(), |index| index.next_swapped(page, end))?;
    if run.page != page {
        return None;
    }
    let cached = |n: u64| {
        let SwapSlot { area, slot } = run.first.plus(n);
        swap::is_slot_resident(memory, area, slot)
    };
    let first = cached(0);
    let alike = (0..u64::from(run.count)).take_while(|n| cached(*n) == first).count();
    Some((first, alike.max(1) as u64))
}

/// The number of pages from `page` on, at most `limit`, before the first page that the object has
/// in memory or in swap. One descent of the index, whatever the limit.
pub(crate) fn hole<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    limit: u64,
) -> u64 {
    let end = page.saturating_add(limit);
    let next = object.pages.look(memory.platform(), |index| index.next_used(page, end));
    next.unwrap_or(end) - page
}

/// The number of pages from `first` to `end` that are in swap.
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
    let next = |from| object.pages.look(memory.platform(), |index| index.next_swapped(from, end));
    while let Some(run) = next(from) {
        pages += u64::from(run.count);
        from = run.page + u64::from(run.count);
    }
    pages
}

/// The pages around `page`, which is in `frame`, that are contiguous in the same folio, limited to
/// `within`. Dropped parts of the folio end the run.
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
    within: PageRange,
) -> PageRange {
    let inside = memory.frames.folio_of(frame).map_or(0, |folio| frame.0 - folio.head.0);
    let below = u64::from(inside).min(page.saturating_sub(within.first));
    let before = object.pages.look(memory.platform(), |index| {
        let same = |distance: u64| {
            let slot = index.get(page - distance);
            slot.is_some_and(|slot| u64::from(slot.frame.0) + distance == u64::from(frame.0))
        };
        (1..=below).take_while(|distance| same(*distance)).count() as u64
    });
    let (_, after) = resident_run(memory, object, page, within.end.saturating_sub(page).max(1));
    PageRange::from_count(page - before, before + after)
}

/// Whether the object has `page` in memory or in swap.
pub(crate) fn has<P: Platform>(memory: &Memory<P>, object: &ObjectState, page: u64) -> bool {
    !lacks(memory, object, page, 1)
}

/// Whether the object has none of the `count` pages from `first` on in memory or in swap.
pub(crate) fn lacks<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    count: u64,
) -> bool {
    let found = object.pages.look(memory.platform(), |index| index.run(first, count));
    found == PageStretch::Empty(count)
}

/// The frame that holds `page`, which lies within the object's size. If the page is not in memory,
/// loads it in a folio of the largest of `orders` (order 0 always) that fits into the object's
/// size, the gap between present pages, and free memory. For a page of a file, the caller must
/// wait. The invalidate lock is held.
///
/// # Errors
/// As [`obtain`]. An error changes nothing.
pub(crate) fn get<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    orders: Orders,
) -> Result<Frame, Stop> {
    get_ahead(memory, object, page, orders, (1, ReadPattern::Random))
}

/// As [`get`], for a fault that could map `ahead` pages from `page` on: pages of shared memory
/// among them may be swapped in with `page`. Pages of a file are read ahead according to the
/// pattern.
#[inline]
pub(crate) fn get_ahead<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    orders: Orders,
    (ahead, pattern): (u64, ReadPattern),
) -> Result<Frame, Stop> {
    let ahead = if object.is_file() { 1 } else { ahead };
    let one = Wanted::one(orders, object.size_in_pages());
    let wanted = Wanted { purpose: FetchPurpose::Fault, ahead, pattern, ..one };
    obtain(memory, object, page, &wanted)
}

/// Marks `count` pages from `page` on as dirty because they were or will be written. For a file,
/// the next `sync` then saves them. An entry may allow writes only after this call.
///
/// Called without locks on tables. The invalidate lock is held for reading and stays held until the
/// pages are writable. Otherwise, this could happen:
/// 1. CPU A marks page 3;
/// 2. CPU B saves the object: clears the mark, removes write permission, stores the page;
/// 3. CPU A allows writes to page 3, and no later `sync` saves the write.
///
/// # Errors
/// If one of the pages is being stored, a wait for the end of the write, after which the caller
/// retries. No page is marked in that case.
pub(crate) fn mark_dirty<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    count: u64,
) -> Result<(), Wait> {
    if object.notices_writes() {
        if let Some(ticket) = object.pages.being_stored(memory.platform(), page, count) {
            return Err(Wait::Pager(ticket));
        }
        let known = object.pages.look(memory.platform(), |index| {
            let run = index.next_dirty(page, page.saturating_add(count));
            run.is_some_and(|(run, flags)| {
                // A page that has failed to be stored is tried again once it is written.
                run.page == page && u64::from(run.count) == count && flags == PageFlags::DIRTY
            })
        });
        if !known {
            object.pages.change(memory, |index, _| {
                index.set_flags(page, count, PageFlags::DIRTY);
                ((), 0)
            });
        }
        return Ok(());
    }
    // Shared memory has no storage to save to; reclaim checks the folios themselves.
    any_folio(memory, object, PageRange::from_count(page, count), |folio| {
        memory.frames.folio(folio).mark_dirty();
        false
    });
    Ok(())
}

/// Whether the pages of a file may become dirty now. Pages that are all dirty already always may.
/// Called before [`mark_dirty`], by callers that can wait.
///
/// # Errors
/// Too many pages are dirty, and some must be stored first.
// Not inlined, because shared memory does not need it.
#[inline(never)]
pub(crate) fn may_dirty<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
) -> Result<(), Wait> {
    if object.room_for_dirty(memory) == Room::Yes {
        return Ok(());
    }
    let mut from = pages.first;
    while from < pages.end {
        let next = |index: &PageIndex| index.next_dirty(from, pages.end);
        match object.pages.look(memory.platform(), next) {
            Some((run, _)) if run.page == from => from += u64::from(run.count),
            _ => return Err(Wait::DirtyLimit),
        }
    }
    Ok(())
}

/// As [`mark_dirty`], for a run whose frames are known.
///
/// # Errors
/// As [`mark_dirty`].
pub(super) fn mark_run_dirty<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    run: IndexRun,
) -> Result<(), Wait> {
    if object.notices_writes() {
        return mark_dirty(memory, object, run.page, u64::from(run.count));
    }
    for_each_part(memory, run, |_, _, folio, _| {
        memory.frames.folio(folio).mark_dirty();
        true
    });
    Ok(())
}

/// Drops those of the pages that were neither written nor mapped since they were allocated; they
/// read as zeroes with or without the drop.
pub(super) fn drop_untouched<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    PageRange { mut first, end }: PageRange,
    proof: &PagesMayGo,
) {
    let mut piece = DropPiece::first_of(memory);
    while let Some(run) = object.pages.look(memory.platform(), |index| index.next_run(first, end)) {
        first = run.page + u64::from(run.count);
        for_each_part(memory, run, |page, _, folio, count| {
            let frames = &memory.frames;
            if frames.folio(folio).mappings() == 0
                && frames.folio(folio).pins() == 0
                && !frames.folio(folio).is_dirty()
            {
                let pages = PageRange::from_count(page, u64::from(count));
                drop_pages(memory, object, pages, &mut piece, proof);
            }
            true
        });
    }
}

/// Calls `f` with each folio that has some of the pages, until `f` returns true. A folio that has
/// lost some of its pages may be passed more than once.
pub(super) fn any_folio<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    PageRange { mut first, end }: PageRange,
    mut f: impl FnMut(Folio) -> bool,
) -> bool {
    while let Some(run) = object.pages.look(memory.platform(), |index| index.next_run(first, end)) {
        first = run.page + u64::from(run.count);
        if !for_each_part(memory, run, |_, _, folio, _| !f(folio)) {
            return true;
        }
    }
    false
}

/// Splits a run at folio boundaries and calls `f` with each part's first page, its frame, the folio
/// and the number of pages, until `f` returns false. Returns whether the end was reached.
pub(super) fn for_each_part<P: Platform>(
    memory: &Memory<P>,
    run: IndexRun,
    mut f: impl FnMut(u64, Frame, Folio, u32) -> bool,
) -> bool {
    let mut done = 0;
    while done < run.count {
        let frame = run.frame.plus(done);
        // All frames in an index belong to folios.
        let Some(folio) = memory.frames.folio_of(frame) else { return true };
        let left = folio.head.0 + folio.pages() - frame.0;
        let count = left.min(run.count - done);
        if !f(run.page + u64::from(done), frame, folio, count) {
            return false;
        }
        done += count;
    }
    true
}

/// Zeroes the bytes from `start` to `end` of the object, which lie in one page. Does nothing if the
/// page is not present. The page is not in swap. Called without locks on tables. Either the bytes
/// lie after the end of the file, or the caller has a change of the page in the list.
pub(super) fn zero_part<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    start: u64,
    end: u64,
    _stay: &PagesStay,
) {
    let page = start >> PAGE_SHIFT;
    if start >= end {
        return;
    }
    let found = object.pages.look(memory.platform(), |index| index.get(page));
    if let Some(slot) = found {
        let inside = |at: u64| (at - (page << PAGE_SHIFT)).min(PAGE_SIZE) as usize;
        // SAFETY: 1. and 2. the index holds the frame, and the page stays (`_stay`); 3. pagers
        // borrow no bytes after the end of a file, nor those of a page with a change in the list.
        unsafe { bytes::zero(memory.platform(), slot.frame, inside(start)..inside(end)) };
        written_by_call(memory, slot.frame);
    }
}
