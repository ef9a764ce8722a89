//! Collapse: one large folio replaces many folios of an object (Linux: `collapse_file`).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::{Order, Orders, PageRange};
use crate::arch::Arch;
use crate::error::{Error, Failure, NoMemory};
use crate::events::RareEvents;
use crate::folio::{FOLIO_ORDERS, FolioIndex, FreshFolio, MAX_FOLIO_ORDER};
use crate::interrupt;
use crate::platform::Platform;
use crate::rmap::{WalkLocking, WalkProgress, for_each_sight};
use crate::vma::MappingFlags;

use super::backing::Accounting;
use super::detached_batch::settle_written;
use super::fetch::{Wanted, demand};
use super::invalidate::PagesMayGo;
use super::mappings::{self, MappingCopies};
use super::pages;
use super::placed_folio::PlacedFolio;
use super::polled_wait::{ObjectWait, PolledWait};
use super::swap_in::swap_in;
use super::transfers::Reads;
use super::wait::Stop;
use super::{Object, ObjectState};

/// Moves the pages that a huge leaf maps, from `first` on, into one folio, and loads those that are
/// not in memory. They are unmapped everywhere, and the next access maps them with a huge leaf.
/// Does nothing if they are already in one folio. `most_missing`, for background work, limits the
/// number of pages that may have to be loaded. May sleep; called without locks on VMAs.
///
/// # Errors
/// [`Error::Invalid`] if the pages do not begin at a multiple of their number, or extend past the
/// object's end, or if shared memory has none of them; [`Error::Busy`] if more than `most_missing`
/// are missing, if a userfaultfd serves the missing pages, or if background work has nothing to do;
/// [`Error::TryAgain`] if one is pinned; [`Error::OutOfMemory`], [`Error::NoSpace`], and for a file
/// the pager's error. An error changes nothing.
pub(crate) fn collapse<P: Platform>(
    handle: &Object<'_, P>,
    first: u64,
    most_missing: Option<u32>,
) -> Result<(), Failure> {
    let pages = pages_of_leaf::<P>(first);
    let collapse = || collapse_unstored(handle.memory, handle.state(), pages, most_missing);
    // Other threads' fetches may continue: while the changes are held, all pages are present.
    handle.change_pages(pages, Reads::Stay, collapse)
}

/// As [`collapse`] on demand, for a caller that must not wait. Returns the event to wait for before
/// the next attempt: until then nothing has changed, except that pages were loaded.
///
/// # Errors
/// As [`collapse`].
pub(crate) fn try_collapse<'m, P: Platform>(
    handle: &Object<'m, P>,
    first: u64,
) -> Result<Option<ObjectWait<'m, P>>, Failure> {
    let (memory, object, pages) = (handle.memory, handle.state(), pages_of_leaf::<P>(first));
    // Pages whose answers have arrived need no wait.
    settle_written(memory);
    let collapse = || collapse_unstored(memory, object, pages, None);
    match handle.try_change_pages(pages, Reads::Stay, collapse) {
        Ok(()) => Ok(None),
        Err(Stop::Failed(failure)) => Err(failure),
        Err(Stop::Wait(wait)) => {
            let platform = memory.platform();
            let swapped =
                object.pages.look(platform, |index| index.next_swapped(pages.first, pages.end));
            let page = swapped.map_or(first, |run| run.page);
            Ok(Some(ObjectWait::new(handle.clone(), PolledWait::of_call(memory, wait), page)))
        }
    }
}

/// The pages that a huge leaf maps, from `first` on.
fn pages_of_leaf<P: Platform>(first: u64) -> PageRange {
    PageRange::from_count(first, u64::from(order_of_leaf::<P>().pages()))
}

/// The changes are held, and the pager is storing none of the pages.
fn collapse_unstored<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    most_missing: Option<u32>,
) -> Result<(), Stop> {
    let PageRange { first, end } = pages;
    if !first.is_multiple_of(end - first) || end > object.size_in_pages() {
        return Err(Error::Invalid.into());
    }
    if object.is_file() {
        // Pages in storage are fetched before the invalidate lock excludes other threads. While the
        // changes are held, the fetched pages are not dropped again.
        for page in first..end {
            // As in `bring_in`: reclaim may evict pages while others are read.
            interrupt::check(memory.platform())?;
            let ahead = end - page;
            demand(memory, object, page, &Wanted { ahead, ..Wanted::one(Orders::default(), end) })?;
        }
    }
    bring_in(memory, object, pages, most_missing)?;
    let collapse = |proof: &PagesMayGo| collapse_alone(memory, object, first, most_missing, proof);
    object.invalidate_lock.with_write(memory.platform(), collapse).map_err(Stop::from)
}

/// Swaps the pages in; for background work, leaves them in swap and fails. The changes are held, so
/// present pages stay, except during a wait: reclaim may then evict pages that were already read. A
/// fatal signal therefore ends the loop.
fn bring_in<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    most_missing: Option<u32>,
) -> Result<(), Stop> {
    let next =
        || object.pages.look(memory.platform(), |index| index.next_swapped(pages.first, pages.end));
    while object.pages.swapped() > 0
        && let Some(run) = next()
    {
        if most_missing.is_some() {
            return Err(Error::Busy.into());
        }
        interrupt::check(memory.platform())?;
        swap_in(memory, object, run.page, FOLIO_ORDERS)?;
    }
    Ok(())
}

/// The order of the pages that a huge leaf maps, limited to the maximum folio order.
fn order_of_leaf<P: Platform>() -> Order {
    P::Arch::PMD.order().min(MAX_FOLIO_ORDER)
}

/// The changes are held, and the pager is storing none of the pages.
fn collapse_alone<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    most_missing: Option<u32>,
    proof: &PagesMayGo,
) -> Result<(), Failure> {
    let frames = &memory.frames;
    let order = order_of_leaf::<P>();
    let count = u64::from(order.pages());
    let pages = PageRange::from_count(first, count);
    let (found, run) = pages::run_at(memory, object, first, count);
    let folio = found.and_then(|frame| frames.folio_of(frame));
    if run == count && folio.is_some_and(|folio| folio.order == order) {
        return if most_missing.is_some() { Err(Error::Busy.into()) } else { Ok(()) };
    }
    if found.is_none() && run == count && !object.is_file() {
        return Err(Error::Invalid.into());
    }
    let missing = count - present(memory, object, first, first + count);
    if most_missing.is_some_and(|most| missing > u64::from(most)) {
        return Err(Error::Busy.into());
    }
    if missing > 0 && is_served(memory, object, first, count) {
        return Err(Error::Busy.into());
    }
    memory.may_wait();
    let folio = frames.new_folio(order).ok_or(NoMemory)?;
    RareEvents::note(&memory.rare.huge_collapses);
    let committed = if object.accounting() == Accounting::PerPage { missing } else { 0 };
    let ready = object.commit(memory, committed).map_err(|_| Failure::from(Error::NoSpace));
    let ready = ready.and_then(|()| {
        let prepared = object
            .pages
            .change_with_nodes(memory, |index, nodes| (index.prepare(first, count, nodes), 0));
        prepared.map_err(|error| {
            object.uncommit(memory, committed);
            error.into()
        })
    });
    if let Err(failure) = ready {
        folio.discard();
        return Err(failure);
    }
    mappings::unmap(memory, object, pages, MappingCopies::Kept, proof);
    // Pins come through mappings, so no pin can be added now.
    if pages::any_folio(memory, object, pages, |folio| frames.folio(folio).pins() > 0) {
        object.pages.change(memory, |index, nodes| (index.prune(first, count, nodes), 0));
        object.uncommit(memory, committed);
        folio.discard();
        return Err(Error::TryAgain.into());
    }
    replace(memory, object, first, folio, proof);
    Ok(())
}

/// Whether, in some mapping, a userfaultfd serves a missing page among the `count` pages from
/// `first` on: the new folio would fill that page without the userfaultfd.
fn is_served<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    count: u64,
) -> bool {
    let pages = [PageRange::from_count(first, count)];
    let mut served = false;
    let walked = for_each_sight(memory, object, &pages, WalkLocking::Wait, |hit, _| {
        served |= hit.vma.has(MappingFlags::USERFAULT_MISSING);
        WalkProgress { until: hit.range.end(), entries: 1 }
    });
    debug_assert!(walked.is_ok(), "it waits for locks");
    served
}

/// The number of pages from `first` to `end` that are in memory.
fn present<P: Platform>(memory: &Memory<P>, object: &ObjectState, first: u64, end: u64) -> u64 {
    let (mut present, mut from) = (0, first);
    while let Some(run) = object.pages.look(memory.platform(), |index| index.next_run(from, end)) {
        present += u64::from(run.count);
        from = run.page + u64::from(run.count);
    }
    present
}

/// Replaces all pages from `first` on, which are mapped nowhere, by `folio`, which is fresh. Cannot
/// fail, because the index is prepared.
fn replace<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    folio: FreshFolio<'_, P>,
    proof: &PagesMayGo,
) {
    let frames = &memory.frames;
    let end = first + u64::from(folio.pages());
    folio.set_owner(object.as_owner(), FolioIndex::new(first));
    // In one step: only a frozen or fresh folio may have fewer references than the index has for
    // it.
    let pages = folio.pages();
    let folio = folio.publish(pages);
    let mut from = first;
    while from < end {
        // This is one folio, so it has no more pages than the new folio.
        let (found, run) = pages::run_at(memory, object, from, end - from);
        let (to, count) = (folio.head.plus((from - first) as u32), run.max(1) as u32);
        let old = found.and_then(|frame| Some((frame, frames.folio_of(frame)?)));
        match old {
            Some((frame, _)) => frames.platform().copy(frame, to, count),
            None => frames.platform().zero(to, count),
        }
        object.pages.change(memory, |index, _| {
            if old.is_some() {
                index.replace(from, to, count);
                return ((), 0);
            }
            index.set(from, to, count);
            ((), i64::from(count))
        });
        if let Some((frame, old)) = old {
            let old_first = from - u64::from(frame.0 - old.head.0);
            if frames.folio(old).is_dirty() {
                frames.folio(folio).mark_dirty();
            }
            let old = PlacedFolio { memory, object, folio: old, first: old_first };
            // SAFETY: 1. the index referred to this run, whose pages the new folio has replaced.
            unsafe { old.release_dropped(count, &mut memory.free_batch(), proof) };
        }
        from += u64::from(count);
    }
}
