//! Pages that a program has announced (`MADV_WILLNEED`): shared memory is swapped in before an
//! access needs it, unless memory is short; for a file, the pager starts to read the pages.

use crate::Memory;
use crate::addr::{Orders, PageRange};
use crate::collections::page_tree::{PageIndex, SwapSlot};
use crate::error::Failure;
use crate::folio::FOLIO_ORDERS;
use crate::platform::Platform;
use crate::swap;
use crate::swap::early_read::{Begun, Cause, EarlySource};

use super::read_ahead::read_missing;
use super::swap_in::{next_run, read_in, slots_of, swap_in_here};
use super::wait::Stop;
use super::{Object, ObjectState};

impl<P: Platform> Object<'_, P> {
    /// Swaps in the first `most` of `pages`, or starts to, while the invalidate lock is held once.
    /// For a file, starts to read the missing pages. Returns the page to continue at; `None` if
    /// memory is short.
    pub(crate) fn bring_in(&self, pages: PageRange, orders: Orders, most: u64) -> Option<u64> {
        let (memory, object) = (self.memory, self.state());
        if object.is_file() {
            return read_missing(self, pages, orders);
        }
        let PageRange { first, end } = pages;
        object.invalidate_lock.with_read(memory.platform(), |_| {
            let next = |index: &PageIndex| index.next_swapped_up_to(first, end, most);
            let run = object.pages.look(memory.platform(), next);
            let Some(run) = run else { return Some(end) };
            let end = run.page + u64::from(run.count);
            let mut page = run.page;
            while page < end {
                page = bring_in(memory, object, page, orders, Sources::All)?;
            }
            Some(page)
        })
    }
}

/// The sources that pages may come from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sources {
    /// Any source; reads from slow sources are only started.
    All,
    /// Compressed memory.
    Memory,
}

/// Swaps in the run around `page` if it is in swap, or starts to. Returns the page to continue at;
/// `None` if memory is short or the page has another source. The invalidate lock is held.
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
    // The run may be in memory by now, and its slots may have another owner.
    let look = |index: &PageIndex| index.swapped(page);
    let Some(slot) = object.pages.look(memory.platform(), look) else { return Some(page + 1) };
    match swap::source_of_slot(memory, slot.area, slot.slot) {
        Some(EarlySource::Device | EarlySource::SynchronousDevice)
            if sources == Sources::Memory =>
        {
            None
        }
        Some(EarlySource::Memory | EarlySource::SynchronousDevice) => {
            match read_in(memory, object, page, slot, orders) {
                Err(Stop::Failed(Failure::NoMemory)) => None,
                // Lost content is an error only for an access that needs it.
                Ok(_) | Err(Stop::Failed(Failure::Refused(_))) => Some(page + 1),
                Err(Stop::Wait(wait)) => {
                    if let Ok(_kept) = wait.wait(memory, None) {
                        // The folio is now in the swap cache.
                        let _ = swap_in_here(memory, object, page, orders);
                    }
                    Some(page + 1)
                }
            }
        }
        Some(EarlySource::Device) if memory.swap.has_free_request(slot.area) => {
            Some(begin(memory, object, page, slot, &mut orders))
        }
        Some(EarlySource::Device | EarlySource::Cache) | None => Some(page + 1),
    }
}

/// Starts to read the run around `page`. Returns the page after the run.
fn begin<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    page: u64,
    slot: SwapSlot,
    orders: &mut Orders,
) -> u64 {
    while let Some((order, run)) = next_run(memory, object, page, slot, orders) {
        if slots_of(run).begin_read(memory, order, Cause::Advice) == Begun::Yes {
            return run.page + u64::from(run.count);
        }
    }
    page + 1
}
