//! Fetch: loads pages of an object into memory.
//!
//! ```text
//! folio    allocated --> filled (zeroes, the pager, or the bytes of a write) --> in the page index
//!                                              '-> another thread was faster: freed
//! ```
//!
//! [`obtain`] immediately loads a page that needs no pager, under the caller's locks. For a page
//! that the pager has, it returns a [`Fetch`], which the caller performs after it has released all
//! locks. While the pager works, a record of the read is in the object's list
//! ([`super::in_flight`]).
//!
//! A folio is filled before it is inserted into the page index, so no thread sees it partially
//! filled. If two threads load the same page, the later one frees its folio.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::ptr::NonNull;

use crate::Memory;
use crate::addr::{Frame, Order, Orders, PAGE_SHIFT, PageRange};
use crate::error::{Error, Failure, NoMemory};
use crate::folio::{FOLIO_ORDERS, Folio, FreshFolio};
use crate::platform::Platform;

use super::ObjectState;
use super::ask::Fetch;
use super::backing::Accounting;
use super::read_ahead::{ReadPattern, next_window, window};
use super::supply::add;
use super::swap_ahead::swap_in_ahead;
use super::swap_in::{Swapped, swap_in, swap_in_here};
use super::wait::{Stop, Wait};
use crate::collections::page_tree::{PageIndex, PageStretch};

/// The way in which a page is loaded.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// The orders allowed for the folio; bit n for order n. Order 0 is always allowed.
    pub(super) orders: Orders,
    /// Upper bound for the end of a folio, in pages.
    pub(super) end: u64,
    /// The number of pages, starting with this one, that are expected to be used: all of them are
    /// requested from the pager at once. For a fault on shared memory, this many can be mapped at
    /// once.
    pub(super) ahead: u64,
    /// The data of a write. A folio that the data fills completely needs no other content first.
    pub(super) writing: Option<Writing<'a>>,
    /// Frames that must stay free. The call fails as if none were free
    /// ([`Memory::set_fault_reserve`]) and reclaims rather than use them.
    pub(super) reserve: u64,
    /// The call that needs the page.
    pub(super) purpose: FetchPurpose,
    /// Whether later pages are read ahead.
    pub(super) pattern: ReadPattern,
}

/// The call that needs a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FetchPurpose {
    /// A fault: reading the page from swap counts as a major fault.
    Fault,
    /// A call that starts over after a wait.
    Read,
    /// A write or a preallocation, with the changes held. They stay held while a swap device works,
    /// so that other calls see all of the write or nothing.
    Change,
}

/// Called with an offset, an address and a length: copies up to `length` bytes of the write's data,
/// from that offset on, to the address. Returns the number of bytes copied.
pub(super) type WriteSource<'a> = dyn Fn(usize, NonNull<u8>, usize) -> usize + 'a;

/// A write and its progress.
#[derive(Clone, Copy)]
pub(super) struct Writing<'a> {
    /// The range still to be written, in bytes of the object.
    pub(super) at: u64,
    pub(super) end: u64,
    /// The number of bytes of the write that are already written.
    pub(super) done: usize,
    pub(super) source: &'a WriteSource<'a>,
    /// The number of bytes filled in a new folio, which begins at the start of the remaining range.
    pub(super) filled: &'a Cell<Option<Moved>>,
}

/// The number of bytes moved, and whether the source or the target stopped early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Moved {
    pub(super) count: usize,
    pub(super) stopped: bool,
}

impl<'a> Wanted<'a> {
    /// One folio of these orders that ends at or before page `end`, without readahead.
    pub(super) const fn one(orders: Orders, end: u64) -> Self {
        let (purpose, pattern) = (FetchPurpose::Read, ReadPattern::Random);
        Self { orders, end, ahead: 1, writing: None, reserve: 0, purpose, pattern }
    }

    /// The write, if all of `count` pages from `first` on will be written.
    fn overwrites(&self, first: u64, count: u64) -> Option<Writing<'a>> {
        let (start, end) = (first << PAGE_SHIFT, (first + count) << PAGE_SHIFT);
        self.writing.filter(|writing| writing.at <= start && end <= writing.end)
    }
}

/// The frame that holds `page`. Loads the page if it is not in memory and needs no pager. The
/// caller holds the invalidate lock or the changes.
///
/// # Errors
/// [`Error::OutOfMemory`], also if the reserve would be used; [`Error::NoSpace`] if no more may be
/// committed; [`Error::InputOutput`] if the content was in swap and is lost. [`Stop::Wait`] if the
/// page has to come from the pager, or from a swap device unless the call is a
/// [`FetchPurpose::Change`].
pub(super) fn obtain<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    wanted: &Wanted<'_>,
) -> Result<Frame, Stop> {
    loop {
        let found = object.pages.look(memory.platform(), |index| index.get(page));
        if let Some(slot) = found {
            if let Some(next) = next_window(object, PageRange::from_count(page, 1), wanted) {
                return Err(Wait::ReadAhead(next).into());
            }
            return Ok(slot.frame);
        }
        if object.pages.swapped() > 0 {
            let found = match wanted.purpose {
                FetchPurpose::Fault | FetchPurpose::Read => {
                    swap_in(memory, object, page, wanted.orders)?
                }
                FetchPurpose::Change => swap_in_here(memory, object, page, wanted.orders)?,
            };
            if found == Swapped::Read && wanted.purpose == FetchPurpose::Fault {
                memory.note_major_fault();
                swap_in_ahead(memory, object, page, wanted.ahead, wanted.orders);
            }
            if found != Swapped::No {
                continue;
            }
        }
        let stored = stored_pages(object);
        if page < stored && wanted.overwrites(page, 1).is_none() {
            return Err(await_page(memory, object, page, wanted));
        }
        make(memory, object, page, stored, wanted)?;
        // The page is present now, loaded by this call or another.
    }
}

/// Makes sure that [`obtain`] of `page` will not have to wait for the pager, for as long as the
/// page is not dropped.
///
/// # Errors
/// [`Stop::Wait`] with the read to wait for.
pub(super) fn demand<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    wanted: &Wanted<'_>,
) -> Result<(), Stop> {
    let present = || object.pages.look(memory.platform(), |index| index.get(page).is_some());
    if page >= stored_pages(object) || wanted.overwrites(page, 1).is_some() || present() {
        return Ok(());
    }
    Err(await_page(memory, object, page, wanted))
}

/// The number of pages, from the object's start, that the pager stores.
fn stored_pages(object: &ObjectState) -> u64 {
    if object.is_file() { object.size_in_pages() } else { 0 }
}

#[cold]
fn await_page<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    wanted: &Wanted<'_>,
) -> Stop {
    let Wanted { ahead: needed, orders, end, reserve, .. } = *wanted;
    let ahead = window(memory, object, page, wanted);
    Stop::Wait(Wait::Pages(Fetch { page, needed, ahead, orders, end, reserve }))
}

/// Loads a page that the lookup did not find, in the largest folio possible without the pager,
/// which stores the pages below `stored`. Does nothing if another thread loaded the page first.
///
/// # Errors
/// As [`obtain`]. If the source of the write yields no byte, the error is unspecified, and
/// [`Writing::filled`] is set to 0.
fn make<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    stored: u64,
    wanted: &Wanted<'_>,
) -> Result<(), Stop> {
    let mut orders = wanted.orders & FOLIO_ORDERS | Orders::PAGE;
    let mut failure = Failure::NoMemory;
    while let Some(order) = orders.take_largest() {
        let (first, count) = (order.align_down(page), u64::from(order.pages()));
        let overwritten = wanted.overwrites(first, count);
        let vacant = |index: &PageIndex| index.run(first, count) == PageStretch::Empty(count);
        let fits = order == Order::PAGE
            || first + count <= wanted.end && object.pages.look(memory.platform(), vacant);
        if !fits || first < stored && overwritten.is_none() {
            continue;
        }
        let folio = match allocate(memory, object, order, wanted.reserve) {
            Ok(folio) => folio,
            // A smaller folio may succeed.
            Err(error) => {
                failure = error;
                continue;
            }
        };
        let filled = match overwritten {
            None => {
                memory.platform().zero(folio.head, folio.pages());
                None
            }
            Some(writing) => {
                let filled = writing.fill(memory, first, *folio);
                if filled.count == 0 {
                    discard(memory, object, folio);
                    writing.filled.set(Some(filled));
                    return Err(failure.into());
                }
                if filled.stopped && first < stored {
                    // The part of the page that was not written has to come from the pager.
                    discard(memory, object, folio);
                    return Err(await_page(memory, object, page, wanted));
                }
                Some((writing, filled))
            }
        };
        let head = folio.head;
        match add(memory, object, Fresh { first, folio }, None) {
            Ok(_) => {
                let found = object.pages.look(memory.platform(), |index| index.get(first));
                if let Some((writing, filled)) = filled
                    && found.is_some_and(|slot| slot.frame == head)
                {
                    writing.filled.set(Some(filled));
                }
                return Ok(());
            }
            Err(error) => failure = error,
        }
    }
    Err(failure.into())
}

impl Writing<'_> {
    /// Copies this folio's part of the write into a folio that no other thread knows and whose
    /// first page is `first`. Returns the number of bytes. The rest is filled with zeroes.
    fn fill<P: Platform>(&self, memory: &Memory<P>, first: u64, folio: Folio) -> Moved {
        let whole = (folio.pages() as usize) << PAGE_SHIFT;
        let bytes = memory.platform().direct_map(folio.head);
        let before = ((first << PAGE_SHIFT) - self.at) as usize;
        let count = (self.source)(self.done + before, bytes, whole).min(whole);
        if count < whole {
            // SAFETY: the direct map shows the folio's bytes, to which only this thread has access.
            unsafe { bytes.add(count).write_bytes(0, whole - count) };
        }
        Moved { count, stopped: count < whole }
    }
}

/// A folio about to be inserted into the index.
pub(super) struct Fresh<'m, P: Platform> {
    pub(super) first: u64,
    pub(super) folio: FreshFolio<'m, P>,
}

/// The number of pages that a folio of that order commits on insertion.
pub(super) fn committed(object: &ObjectState, order: Order) -> u64 {
    if object.accounting() == Accounting::PerPage { u64::from(order.pages()) } else { 0 }
}

/// Allocates and commits a folio that no other thread knows. `reserve` frames stay free.
pub(super) fn allocate<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    order: Order,
    reserve: u64,
) -> Result<FreshFolio<'m, P>, Failure> {
    let enough = reserve.saturating_add(u64::from(order.pages()));
    // A drain of the fronts beside the first count may hide frames from it.
    if reserve > 0
        && !memory.frames.has_free_frames(enough)
        && memory.frames.free_frames_at_most() < enough
    {
        return Err(Failure::NoMemory);
    }
    let committed = committed(object, order);
    object.commit(memory, committed).map_err(|_| Error::NoSpace)?;
    memory.may_wait();
    let Some(fresh) = memory.frames.new_folio(order) else {
        object.uncommit(memory, committed);
        return Err(NoMemory.into());
    };
    Ok(fresh)
}

/// Undoes [`allocate`].
pub(super) fn discard<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    folio: FreshFolio<'_, P>,
) {
    let committed = committed(object, folio.order);
    folio.discard();
    object.uncommit(memory, committed);
}
