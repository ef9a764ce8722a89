//! [`Fetch`]: requests pages from the pager.
//!
//! A fetch allocates the largest folio that fits around the page, and further folios for the
//! following pages that are expected to be used, up to [`super::read_buffer::FOLIOS`]. If memory is
//! short or the pager fails, the fetch requests fewer pages.

use crate::Memory;
use crate::addr::{Order, Orders, PageRange};
use crate::collections::page_tree::{PageIndex, PageStretch};
use crate::error::{Failure, NoMemory};
use crate::folio::{FOLIO_ORDERS, FolioRef};
use crate::platform::Platform;

use super::fetch::{Fresh, allocate};
use super::in_flight::InTheWay;
use super::page_read::{FollowedRead, NewRead, RequestKept, Taker};
use super::pages::lacks;
use super::read_end::{settle_answered, wait_for_reads_ahead};
use super::state::pages_of;
use super::transfers::Refused;
use super::{Object, ObjectState};

/// Pages that the pager must supply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    /// The page that is needed.
    pub(super) page: u64,
    /// The number of pages, starting with this one, that the call needs.
    pub(super) needed: u64,
    /// The number of pages, starting with this one, that are expected to be used.
    pub(super) ahead: u64,
    /// The orders allowed for the folios.
    pub(super) orders: Orders,
    /// Upper bound for the end of a folio, in pages.
    pub(super) end: u64,
    /// Frames that must stay free. The fetch fails rather than use them.
    pub(super) reserve: u64,
}

impl Fetch {
    /// Pages that no thread needs yet.
    pub(super) fn ahead(pages: PageRange, orders: Orders) -> Self {
        let PageRange { first, end } = pages;
        Self { page: first, needed: 0, ahead: end - first, orders, end, reserve: 0 }
    }

    /// Requests the pages from the pager. The returned reference holds the fetched folio. `None`
    /// tells the caller to check again: the page was present, another call fetched it, or a
    /// truncation canceled the read. Called without locks. May sleep.
    ///
    /// # Errors
    /// The pager's error; [`Failure::NoMemory`]; the error for no commitment left.
    pub(super) fn serve<'m, P: Platform>(
        &self,
        object: &Object<'m, P>,
    ) -> Result<Option<FolioRef<'m, P>>, Failure> {
        let (platform, state) = (object.memory.platform(), object.state());
        settle_answered(object.memory);
        // Checked before a folio is allocated that may not be needed.
        let page = PageRange::from_count(self.page, 1);
        if let Some(in_the_way) = state.pages.keeps_from_reading(platform, page) {
            wait_for_end(object.memory, state, page, in_the_way);
            return Ok(None);
        }
        if !lacks(object.memory, state, self.page, 1) {
            return Ok(None);
        }
        match self.fetch(object.memory, state) {
            // The pages after the needed one may have caused the error.
            Err(_) if self.ahead > 1 => self.only_page().fetch(object.memory, state),
            result => result,
        }
    }

    /// Starts to read the pages; no thread waits for them. Returns the pages being read and whether
    /// the pager has kept the request. `None` if the first page is not needed or is already being
    /// read.
    ///
    /// # Errors
    /// [`NoMemory`]: not even a record or a single page could be allocated.
    pub(super) fn begin<P: Platform>(
        &self,
        object: &Object<'_, P>,
    ) -> Result<Option<(PageRange, RequestKept)>, NoMemory> {
        let (memory, state) = (object.memory, object.state());
        settle_answered(memory);
        let mut read = NewRead::new(memory, state, Taker::Any)?;
        self.add_following(&mut read, self.page);
        let pages = read.pages();
        if pages.first == pages.end {
            let is_free = fits(memory, state, self.page, Order::PAGE, self.end);
            return if is_free { Err(NoMemory) } else { Ok(None) };
        }
        let begun = read.begin(|index, size| self.is_needed(index, size, pages));
        Ok(begun.ok().map(|begun| (pages, begun.leave())))
    }

    /// Starts to read the page and those expected to be used, for a wait that follows the read.
    /// `None` tells the caller to check again.
    ///
    /// # Errors
    /// [`Failure::NoMemory`]; the error for no commitment left.
    pub(super) fn begin_followed<'m, P: Platform>(
        &self,
        object: &Object<'m, P>,
    ) -> Result<Option<FollowedRead<'m, P>>, Failure> {
        let (memory, state) = (object.memory, object.state());
        let mut orders = self.orders & FOLIO_ORDERS | Orders::PAGE;
        let mut failure = Failure::NoMemory;
        while let Some(order) = orders.take_largest() {
            let first = order.align_down(self.page);
            if order > Order::PAGE && !fits(memory, state, first, order, self.end_within(state)) {
                continue;
            }
            let read = match self.draw_up(memory, state, (first, order), Taker::Follower) {
                Ok(read) => read,
                Err(error) => {
                    failure = error;
                    continue;
                }
            };
            let (pages, rest) = (read.pages(), self.rest_of(&read));
            let begun = read.begin(|index, size| self.is_needed(index, size, pages));
            let Ok(begun) = begun else { return Ok(None) };
            let (kept, followed) = begun.follow();
            mark_rest(state, rest, kept);
            return Ok(Some(followed));
        }
        Err(failure)
    }

    /// The same fetch, limited to its page, in a folio of one page.
    pub(super) fn only_page(self) -> Self {
        Self { ahead: 1, needed: 1, orders: Orders::PAGE, ..self }
    }

    /// The bound for the end of a folio, limited to the file's current size.
    fn end_within(&self, object: &ObjectState) -> u64 {
        self.end.min(object.size_in_pages())
    }

    /// Whether a read of `pages` is still needed. The file has `size` bytes. If a truncation has
    /// left the end of the read beyond that size, the read would insert zeroes into the index for
    /// pages that a later growth gives content.
    fn is_needed(&self, index: &PageIndex, size: u64, pages: PageRange) -> bool {
        index.get(self.page).is_none() && pages.end <= pages_of(size)
    }

    /// The part of the read's folios that no access has requested.
    fn rest_of<P: Platform>(&self, read: &NewRead<'_, '_, P>) -> Option<PageRange> {
        if self.ahead <= self.needed {
            return None;
        }
        let first = read.folio_from(self.page.saturating_add(self.needed))?;
        Some(PageRange { first, end: read.pages().end })
    }

    /// Prepares a read of the folio of that order that begins at `first`, and of further folios
    /// after it.
    fn draw_up<'o, 'm, P: Platform>(
        &self,
        memory: &'m Memory<P>,
        object: &'o ObjectState,
        (first, order): (u64, Order),
        taker: Taker,
    ) -> Result<NewRead<'o, 'm, P>, Failure> {
        let mut read = NewRead::new(memory, object, taker)?;
        read.push(Fresh { first, folio: allocate(memory, object, order, self.reserve)? });
        self.add_following(&mut read, first + u64::from(order.pages()));
        Ok(read)
    }

    /// Fetches the page in the largest folio possible.
    fn fetch<'m, P: Platform>(
        &self,
        memory: &'m Memory<P>,
        object: &ObjectState,
    ) -> Result<Option<FolioRef<'m, P>>, Failure> {
        let mut orders = self.orders & FOLIO_ORDERS | Orders::PAGE;
        let mut failure = Failure::NoMemory;
        while let Some(order) = orders.take_largest() {
            let first = order.align_down(self.page);
            if order > Order::PAGE && !fits(memory, object, first, order, self.end_within(object)) {
                continue;
            }
            match self.fetch_from(memory, object, first, order) {
                Ok(kept) => return Ok(kept),
                // A smaller folio may succeed.
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Fetches a folio of that order from `first` on, and further folios after it. Fails only if
    /// the first folio cannot be fetched.
    fn fetch_from<'m, P: Platform>(
        &self,
        memory: &'m Memory<P>,
        object: &ObjectState,
        first: u64,
        order: Order,
    ) -> Result<Option<FolioRef<'m, P>>, Failure> {
        let read = self.draw_up(memory, object, (first, order), Taker::Beginner)?;
        let (pages, rest) = (read.pages(), self.rest_of(&read));
        match read.begin(|index, size| self.is_needed(index, size, pages)) {
            Ok(begun) => {
                let (kept, result) = begun.finish(self.page);
                if result.is_ok() {
                    mark_rest(object, rest, kept);
                }
                result
            }
            Err(Refused::NotNeeded) => Ok(None),
            Err(Refused::Busy(in_the_way)) => {
                wait_for_end(memory, object, pages, in_the_way);
                Ok(None)
            }
        }
    }

    /// Adds folios for the pages from `next` on that are expected to be used.
    fn add_following<P: Platform>(&self, read: &mut NewRead<'_, '_, P>, mut next: u64) {
        let (memory, object) = (read.memory, read.object);
        let after = self.page.saturating_add(self.ahead).min(self.end_within(object));
        while !read.is_full()
            && let Some(fresh) = following(memory, object, next, after, self.orders)
        {
            next = fresh.first + u64::from(fresh.folio.pages());
            read.push(fresh);
        }
    }
}

/// Marks the folios that no access has requested, if the pager has kept the request.
fn mark_rest(object: &ObjectState, rest: Option<PageRange>, kept: RequestKept) {
    if let (Some(rest), RequestKept::Yes) = (rest, kept) {
        object.ahead.set(rest);
    }
}

/// Waits for the end of the record that blocks a fetch of the pages.
fn wait_for_end<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    in_the_way: InTheWay,
) {
    match in_the_way {
        InTheWay::Thread(ticket) => object.pages.wait(memory, ticket),
        InTheWay::ReadAhead => wait_for_reads_ahead(memory, object, pages),
    }
}

/// Whether the 2^`order` pages from `first` on end at or before `end`, and none of them is present
/// or being fetched. `first` must be a multiple of 2^`order`.
fn fits<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    order: Order,
    end: u64,
) -> bool {
    let count = u64::from(order.pages());
    let vacant = |index: &PageIndex| index.run(first, count) == PageStretch::Empty(count);
    let pages = PageRange::from_count(first, count);
    let free = || object.pages.is_free_for_reading(memory.platform(), pages, vacant);
    first.is_multiple_of(count) && first + count <= end && free()
}

/// The largest folio that may begin at page `first`, if `first` is before `after` and the page
/// still has to be read.
fn following<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    first: u64,
    after: u64,
    orders: Orders,
) -> Option<Fresh<'m, P>> {
    let mut orders = orders & FOLIO_ORDERS | Orders::PAGE;
    while let Some(order) = orders.take_largest() {
        if fits(memory, object, first, order, after)
            && let Ok(folio) = allocate(memory, object, order, 0)
        {
            return Some(Fresh { first, folio });
        }
    }
    None
}
