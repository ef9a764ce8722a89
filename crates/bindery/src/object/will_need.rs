//! Shared memory that a program has announced (`MADV_WILLNEED`): it comes back from swap before an
//! access needs it, as long as memory is not short.

use crate::Memory;
use crate::addr::{Orders, PageRange};
use crate::collections::page_tree::{PageIndex, SwapSlot};
use crate::error::Failure;
use crate::frame::FOLIO_ORDERS;
use crate::platform::Platform;
use crate::swap::early_read::{Begun, Cause, Source};

use super::swap_in::{next_run, read_in, slots_of};
use super::{Object, ObjectState};

impl<P: Platform> Object<'_, P> {
    /// Brings in what it has in swap of the first of `pages`, or begins to: so many pages are looked
    /// at under one hold of the invalidate lock. Returns where to go on; `None` if memory is short.
    pub(crate) fn bring_in(&self, pages: PageRange, orders: Orders, most: u64) -> Option<u64> {
        let (memory, object) = (self.memory, self.state());
        let PageRange { first, end } = pages;
        object.invalidate_lock.with_read(&memory.platform, |_| {
            let next = |index: &PageIndex| index.next_swapped(first, end);
            let run = object.pages.look(&memory.platform, next);
            let Some(run) = run else { return Some(end) };
            let end = run.page + u64::from(run.count).min(most);
            let mut page = run.page;
            while page < end {
                page = bring_in(memory, object, page, orders, Sources::All)?;
            }
            Some(page)
        })
    }
}

/// Where pages may come from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sources {
    /// From anywhere; reads that would have to be waited for are begun.
    All,
    /// From compressed memory, or a device as fast.
    Fast,
}

/// Brings in the run around `page` if that is in swap, or begins to. Returns where to go on; `None`
/// if memory is short, or the page would come from elsewhere. The invalidate lock is held.
pub(super) fn bring_in<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    orders: Orders,
    sources: Sources,
) -> Option<u64> {
    let mut orders = orders & FOLIO_ORDERS | Orders::PAGE;
    if !memory.has_room_for(u64::from(orders.largest().pages())) {
        return None;
    }
    // The run of before may be in memory by now, and its slots another's.
    let look = |index: &PageIndex| index.swapped(page);
    let Some(slot) = object.pages.look(&memory.platform, look) else { return Some(page + 1) };
    match memory.source_of_slot(slot.area, slot.slot) {
        Some(Source::Memory) => match read_in(memory, object, page, slot, orders) {
            Err(Failure::NoMemory) => None,
            // What is lost is the error of the access that needs it.
            Ok(_) | Err(Failure::Refused(_)) => Some(page + 1),
        },
        Some(Source::Device) if sources == Sources::Fast => None,
        Some(Source::Device) if memory.has_free_request(slot.area) => {
            Some(begin(memory, object, page, slot, &mut orders))
        }
        Some(Source::Device | Source::Cache) | None => Some(page + 1),
    }
}

/// Begins to read the run around `page`. Returns the page after it.
fn begin<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    slot: SwapSlot,
    orders: &mut Orders,
) -> u64 {
    while let Some((order, run)) = next_run(memory, object, page, slot, orders) {
        if memory.begin_read(slots_of(run), order, Cause::Advice) == Begun::Yes {
            return run.page + u64::from(run.count);
        }
    }
    page + 1
}
