//! Bringing pages of an object into memory.
//!
//! ```text
//! folio    allocated --> filled (zeroes, the pager, or what is written anyway) --> in the index
//!                                              '-> somebody was faster: given back
//! ```
//!
//! No lock is held while the pager works but those that keep pages from being dropped (`pages`).
//! A folio is filled before it is put into the index, so nobody sees it half filled, and of two who
//! bring in the same page one comes too late.

use core::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT};
use crate::bytes;
use crate::error::Error;
use crate::frame::{Folio, MAX_FOLIO_ORDER, Owner};
use crate::platform::Platform;

use super::ObjectState;
use super::index::Stretch;
use super::state::Accounting;

/// Folios that one call of the pager fills at the most.
const FOLIOS: usize = 32;
/// The orders that there are.
const ORDERS: u16 = (2 << MAX_FOLIO_ORDER) - 1;

/// How a page shall be brought in.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// The orders that its folio may have; bit n for order n. Order 0 always.
    pub(super) orders: u16,
    /// Folios end here at the latest, in pages.
    pub(super) end: u64,
    /// So many pages from it on will be used too: the pager is asked for them at the same time.
    pub(super) ahead: u64,
    /// What will be written at which offset: a folio of which nothing else is left needs no other
    /// content before.
    pub(super) bytes: (u64, &'a [u8]),
}

impl Wanted<'_> {
    /// One folio of these orders, which ends at page `end` at the latest.
    pub(super) const fn one(orders: u16, end: u64) -> Self {
        Self { orders, end, ahead: 1, bytes: (0, &[]) }
    }

    /// Whether all of `count` pages from `first` on will be written.
    fn overwrites(&self, first: u64, count: u64) -> Option<&[u8]> {
        let (offset, bytes) = self.bytes;
        let start = (first << PAGE_SHIFT).checked_sub(offset)? as usize;
        bytes.get(start..)?.get(..(count << PAGE_SHIFT) as usize)
    }
}

/// A folio on its way into the index.
struct Fresh {
    first: u64,
    folio: Folio,
}

impl Fresh {
    fn end(&self) -> u64 {
        self.first + u64::from(self.folio.pages())
    }
}

/// The frame that holds `page`, which is brought in if it is not in memory. May sleep where the
/// object is a file.
///
/// # Errors
/// [`Error::OutOfMemory`]; [`Error::NoSpace`] where no more may be promised; what the pager says.
pub(super) fn obtain<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    wanted: &Wanted<'_>,
) -> Result<Frame, Error> {
    loop {
        let found = object.pages.look(&memory.platform, |index| index.get(page));
        if let Some(slot) = found {
            return Ok(slot.frame);
        }
        let brought = bring_in(memory, object, page, wanted);
        if brought.is_err() && wanted.ahead > 1 {
            // Perhaps only because of the others.
            bring_in(memory, object, page, &Wanted { ahead: 1, ..*wanted })?;
        } else {
            brought?;
        }
        // It is there now, whoever was faster.
    }
}

/// Brings in a page that was not in memory when it was looked for, in the largest folio that can be
/// had; nothing where somebody else has done so in between.
fn bring_in<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    wanted: &Wanted<'_>,
) -> Result<(), Error> {
    let mut orders = wanted.orders & ORDERS | 1;
    let mut failure = Error::OutOfMemory;
    while let Some(order) = take_largest(&mut orders) {
        let first = page & !((1 << order) - 1);
        if order > 0 && !fits(memory, object, first, order, wanted.end) {
            continue;
        }
        let behind = page.saturating_add(wanted.ahead).min(wanted.end);
        match bring_in_from(memory, object, first, order, behind, wanted) {
            Ok(()) => return Ok(()),
            // A smaller one may do.
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn take_largest(orders: &mut u16) -> Option<u8> {
    let order = (u16::BITS - 1).checked_sub(orders.leading_zeros())? as u8;
    *orders &= !(1 << order);
    Some(order)
}

/// Whether 2^`order` pages from `first` on, a multiple of that, end in time, and none is there.
fn fits<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    order: u8,
    end: u64,
) -> bool {
    let count = 1 << order;
    let vacant = || object.pages.look(&memory.platform, |index| index.run(first, count));
    first.is_multiple_of(count) && first + count <= end && vacant() == Stretch::Empty(count)
}

/// Brings in a folio of that order from `first` on and, of a file, others up to page `behind`. Fails
/// only where the first cannot be had.
fn bring_in_from<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    order: u8,
    behind: u64,
    wanted: &Wanted<'_>,
) -> Result<(), Error> {
    let folio = allocate(memory, object, order)?;
    let mut fresh = ArrayVec::<Fresh, FOLIOS>::new();
    fresh.push(Fresh { first, folio });
    let overwritten = wanted.overwrites(first, u64::from(folio.pages()));
    if object.is_file() && overwritten.is_none() {
        let behind = behind.min(object.size_in_pages());
        while !fresh.is_full()
            && let Some(next) = following(memory, object, &fresh, behind, wanted.orders)
        {
            fresh.push(next);
        }
    }
    let filled = match overwritten {
        Some(bytes) => {
            bytes::write(&memory.platform, folio.head, 0, bytes);
            Ok(())
        }
        None => fill(memory, object, &fresh),
    };
    let mut result = filled;
    for (number, fresh) in fresh.iter().enumerate() {
        let added = if filled.is_ok() { add(memory, object, fresh) } else { Ok(Added::No) };
        if added != Ok(Added::Yes) {
            give_back(memory, object, fresh.folio);
        }
        if number == 0 {
            result = result.and(added.map(|_| ()));
        }
    }
    result
}

/// The largest folio that may follow the last of `fresh`, if there is anything to be brought in up
/// to page `behind`.
fn following<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    fresh: &[Fresh],
    behind: u64,
    orders: u16,
) -> Option<Fresh> {
    let first = fresh.last()?.end();
    let mut orders = orders & ORDERS | 1;
    while let Some(order) = take_largest(&mut orders) {
        if fits(memory, object, first, order, behind)
            && let Ok(folio) = allocate(memory, object, order)
        {
            return Some(Fresh { first, folio });
        }
    }
    None
}

/// How many pages of a folio of that order count as promised as they come.
fn promised(object: &ObjectState, order: u8) -> u64 {
    if object.accounting() == Accounting::PerPage { 1 << order } else { 0 }
}

/// A folio that nobody else knows, promised.
fn allocate<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    order: u8,
) -> Result<Folio, Error> {
    let promised = promised(object, order);
    object.promise(memory, promised).map_err(|_| Error::NoSpace)?;
    memory.may_wait();
    let folio = memory.frames.new_folio(order);
    if folio.is_none() {
        object.unpromise(memory, promised);
    }
    folio.ok_or(Error::OutOfMemory)
}

/// Undoes [`allocate`].
fn give_back<P: Platform>(memory: &Memory<P>, object: &ObjectState, folio: Folio) {
    memory.frames.discard(&memory.platform, folio);
    object.unpromise(memory, promised(object, folio.order));
}

/// Gives folios that nobody else knows, and that follow each other, their content.
fn fill<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    fresh: &[Fresh],
) -> Result<(), Error> {
    let Some(first) = fresh.first().map(|fresh| fresh.first) else { return Ok(()) };
    let start = first << PAGE_SHIFT;
    let size = object.size();
    let Some((pager, file)) = object.file().filter(|_| start < size) else {
        for Fresh { folio, .. } in fresh {
            memory.platform.zero(folio.head, folio.pages());
        }
        return Ok(());
    };
    let mut pieces = ArrayVec::<&mut [u8], FOLIOS>::new();
    for Fresh { folio, .. } in fresh {
        let length = (folio.pages() as usize) << PAGE_SHIFT;
        let window = memory.platform.window(folio.head).as_ptr();
        // SAFETY: the window shows the bytes of the folio's frames, which are consecutive
        // (obligation 1 of `Platform`, and `Frames::new` looked where two ranges touch); memory
        // always holds some bytes. The folio is fresh: until it is in the index, nobody else has a
        // way to them, and no two folios share any.
        pieces.push(unsafe { core::slice::from_raw_parts_mut(window, length) });
    }
    pager.read(file, first, &mut pieces)?;
    // Whatever the storage has behind the end is not the file's.
    let mut left = size - start;
    for piece in &mut pieces {
        let inside = left.min(piece.len() as u64);
        piece[inside as usize..].fill(0);
        left -= inside;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Added {
    Yes,
    /// One of the pages is there already.
    No,
}

/// Puts a folio, which is filled, into the index, which holds it from then on.
fn add<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    fresh: &Fresh,
) -> Result<Added, Error> {
    let frames = &memory.frames;
    let Fresh { first, folio } = *fresh;
    let pages = folio.pages();
    let count = u64::from(pages);
    frames.set_fresh_owner(folio, Owner::Object(NonNull::from(object)), first);
    frames.clear_exclusive(folio, 0, pages);
    let added = object.pages.change_with_nodes(memory, |index, nodes| {
        if index.run(first, count) != Stretch::Empty(count) {
            return (Ok(Added::No), 0);
        }
        if let Err(error) = index.prepare(first, count, nodes) {
            return (Err(error), 0);
        }
        // Nothing can fail any more. One reference for each page that the index will name, before
        // anybody finds it there.
        frames.publish(folio, pages);
        index.set(first, folio.head, pages);
        (Ok(Added::Yes), count as i64)
    });
    added.map_err(|_| Error::OutOfMemory)
}
