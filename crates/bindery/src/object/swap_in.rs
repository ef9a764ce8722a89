//! Swaps in shared memory, as the largest folio that the slots and the policy allow.
//!
//! The caller keeps pages from leaving the index: it holds either the invalidate lock for reading
//! or the changes. So no page in swap is dropped, and no page is swapped out. Two calls that need
//! the same page meet at its slot: one claims the slot, and the other finds the folio in the swap
//! cache and waits for the folio's lock. A fault or a call waits for a lock or a device after it
//! has released its own locks; only a call whose effect must be atomic keeps its locks
//! ([`swap_in_here`]).
//!
//! A page that is swapped in frees its slot immediately and counts as dirty, as on Linux. So writes
//! to shared memory need no tracking: no slot ever holds content that is older than that of a page
//! in memory.

use crate::Memory;
use crate::addr::{Order, Orders};
use crate::collections::page_tree::{PageIndex, SwapSlot, SwappedRun};
use crate::error::{Error, Failure, NoMemory};
use crate::folio::{FOLIO_ORDERS, FreshFolio};
use crate::platform::Platform;
use crate::swap::content::ClaimedFolio;
use crate::swap::device_read::Load;
use crate::swap::{SlotRun, find_cached};

use super::ObjectState;
use super::placed_folio::PlacedFolio;
use super::wait::{Stop, Wait};

/// The location of a page before the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Swapped {
    /// The page was not in swap.
    No,
    /// The page was also in the swap cache, or another thread has read it.
    Cached,
    /// The page was only in swap.
    Read,
}

/// Swaps in `page` if it is in swap; the caller then checks the index again. `orders` are the
/// permitted orders of the folio (bit n: order n; order 0 always). May sleep, but does not wait for
/// a device.
///
/// # Errors
/// [`Error::OutOfMemory`]; [`Error::InputOutput`] if the content is lost. [`Stop::Wait`] if a
/// device has to read the page, or another thread holds the folio's lock. The index has not
/// changed.
#[cold]
#[inline(never)]
pub(super) fn swap_in<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    orders: Orders,
) -> Result<Swapped, Stop> {
    let look = |index: &PageIndex| index.swapped(page);
    let Some(slot) = object.pages.look(memory.platform(), look) else { return Ok(Swapped::No) };
    let Some(cached) = find_cached(memory, slot.area, slot.slot) else {
        let swapped = read_in(memory, object, page, slot, orders)?;
        if swapped == Swapped::Read && memory.clock.has_reclaimed() {
            note_way(memory, object, page);
        }
        return Ok(swapped);
    };
    // The folio's lock is held while the folio is written out or read.
    let Some(lock) = cached.try_lock() else {
        return Err(Stop::Wait(Wait::SwapCache { area: slot.area, slot: slot.slot }));
    };
    if let Some(place) = memory.frames.folio(*cached).swap_place()
        && let Some(number) = slot.slot.checked_sub(place.first)
        && number < u64::from(cached.pages())
        && place.area == slot.area
        && let Some(first) = page.checked_sub(number)
    {
        PlacedFolio { memory, object, folio: *cached, first }.swap_in(place, &lock);
    }
    Ok(Swapped::Cached)
}

/// As [`swap_in`], but waits for the device with the caller's locks held, for a call whose effect
/// must be atomic for other threads ([`super::fetch::FetchPurpose::Change`]). The caller holds no
/// VMA's lock.
///
/// # Errors
/// [`Error::OutOfMemory`]; [`Error::InputOutput`].
#[cold]
pub(super) fn swap_in_here<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    orders: Orders,
) -> Result<Swapped, Failure> {
    // The folio that was read is held until the index has it.
    let mut _kept = None;
    loop {
        match swap_in(memory, object, page, orders) {
            Ok(swapped) => return Ok(swapped),
            Err(Stop::Failed(failure)) => return Err(failure),
            Err(Stop::Wait(wait)) => _kept = wait.wait(memory, None)?,
        }
    }
}

/// Records that an access caused the read of `page`, if memory has been short before.
fn note_way<P: Platform>(memory: &Memory<P>, object: &ObjectState, page: u64) {
    let slot = object.pages.look(memory.platform(), |index| index.get(page));
    let held = slot.and_then(|slot| memory.frames.try_hold(slot.frame));
    if let Some(folio) = held {
        let first = page & !u64::from(folio.pages() - 1);
        memory.clock.passing.note_way(&memory.frames, *folio, object.place_of(first));
    }
}

/// Reads the content of the slots around the page into a fresh folio, or starts the read.
///
/// # Errors
/// As [`swap_in`].
pub(super) fn read_in<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    slot: SwapSlot,
    orders: Orders,
) -> Result<Swapped, Stop> {
    let mut orders = orders & FOLIO_ORDERS | Orders::PAGE;
    while let Some((order, run)) = next_run(memory, object, page, slot, &mut orders) {
        memory.may_wait();
        let Some(fresh) = memory.frames.new_folio(order) else { continue };
        match read_folio(memory, object, fresh, run, slot.slot) {
            Ok(()) => return Ok(Swapped::Read),
            Err(UnreadPage::Wait(wait)) => return Err(Stop::Wait(wait)),
            Err(UnreadPage::Content) if order == Order::PAGE => {
                return Err(Error::InputOutput.into());
            }
            Err(UnreadPage::Slots) if order == Order::PAGE => {
                // Another thread is reading the page or has read it.
                memory.platform().relax();
                return Ok(Swapped::Cached);
            }
            Err(UnreadPage::Slots | UnreadPage::Content) => {}
        }
    }
    Err(NoMemory.into())
}

/// The largest run around `page`, which is in `slot`, that could be read into one folio of an order
/// from `orders`. Removes that order and all larger orders from `orders`. The runs of pages and
/// slots have the same length.
pub(super) fn next_run<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    slot: SwapSlot,
    orders: &mut Orders,
) -> Option<(Order, SwappedRun)> {
    while let Some(order) = orders.take_largest() {
        let first = order.align_down(page);
        let Some(start) = slot.slot.checked_sub(page - first) else { continue };
        let at = SwapSlot { slot: start, ..slot };
        let run = SwappedRun { page: first, first: at, count: order.pages() };
        if order == Order::PAGE || names_run(memory, object, run) {
            return Some((order, run));
        }
    }
    None
}

/// Whether the index refers to these slots for these pages.
fn names_run<P: Platform>(memory: &Memory<P>, object: &ObjectState, run: SwappedRun) -> bool {
    let end = run.page + u64::from(run.count);
    let look = |index: &PageIndex| index.next_swapped(run.page, end) == Some(run);
    object.pages.look(memory.platform(), look)
}

pub(super) fn slots_of(run: SwappedRun) -> SlotRun {
    SlotRun { area: run.first.area, first: run.first.slot, count: run.count }
}

/// The reason why nothing was read.
enum UnreadPage {
    /// A slot is in the cache or about to be added to it.
    Slots,
    /// The content is lost.
    Content,
    /// The caller has to wait, without locks.
    Wait(Wait),
}

fn read_folio<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    fresh: FreshFolio<'_, P>,
    run: SwappedRun,
    wanted: u64,
) -> Result<(), UnreadPage> {
    let slots = slots_of(run);
    let claimed =
        ClaimedFolio::claim(memory, fresh, slots.area, slots.first).ok_or(UnreadPage::Slots)?;
    let folio = claimed.folio();
    let locked = if memory.swap.is_on_device(slots.area) {
        match claimed.begin_device_read(memory, wanted) {
            Load::Done(locked) => locked,
            Load::Lost => return Err(UnreadPage::Content),
            Load::Full => return Err(UnreadPage::Wait(Wait::SwapRequest { area: slots.area })),
            Load::Begun(read) => {
                if memory.clock.has_reclaimed() {
                    let place = object.place_of(run.page);
                    memory.clock.passing.note_way(&memory.frames, folio, place);
                }
                return Err(UnreadPage::Wait(Wait::SwapRead(read)));
            }
        }
    } else {
        claimed.load(memory).ok_or(UnreadPage::Content)?
    };
    PlacedFolio { memory, object, folio, first: run.page }.swap_in(slots.place(), locked.lock());
    Ok(())
}
