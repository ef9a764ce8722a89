//! `MADV_WILLNEED`: loads pages of a range before they are used.
//!
//! | the content is in | effect |
//! |---|---|
//! | compressed memory, or an equally fast device | maps private pages; swaps shared memory in |
//! | another device | starts a read into the swap cache without waiting for it |
//! | the swap cache, or a request under way | none |
//! | a file | starts reads of the missing pages ([`Object::read_ahead`]) |
//!
//! The call maps compressed pages, although Linux leaves them in the swap cache. Since their
//! content is available when the call returns, a later fault would only write the entry, at ten
//! times the cost. Mapping a page also frees its slot and the compressed copy.
//!
//! The call is advice. If memory is short, the call ends without an error instead of evicting
//! pages. It skips lost pages and pages that another thread has locked: an access that needs such a
//! page gets the error or waits. No lock is held between runs.

use crate::addr::{Orders, PAGE_SIZE, PageRange, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Kind};
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::object::{Object, Wait};
use crate::platform::Platform;
use crate::swap::early_read::{Begun, Cause, EarlySource};
use crate::table::PageTable;
use crate::table::look;
use crate::vma::Vma;

use crate::vmas::Parts;

use crate::space::AddressSpace;
use crate::space::fault::{Access, Fault, FaultSlot, Next, Reading, Resolved, slot_at};
use crate::space::sleep::MaySleep;

/// The number of entries read between two checks for a fatal signal.
const LOOKS: u32 = 1024;
/// The number of an object's pages requested between two checks.
const PAGES: u64 = 64;

/// The result of one part of the range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WillNeedEnd {
    /// The whole part is complete.
    Whole,
    /// The call stopped because memory is short.
    Short,
}

/// Pages of an object behind a part of the range.
struct ObjectPart<'m, P: Platform> {
    object: Object<'m, P>,
    pages: PageRange,
    /// The orders that the folios of these pages may have.
    orders: Orders,
}

/// The result of an attempt to swap in one run.
enum Announced {
    /// Continue at this address.
    Next(VirtAddr),
    /// Memory is short.
    Short,
    /// A device must read the run first, with the VMA unlocked.
    Wait(Wait),
}

/// The result of a search for a page in swap.
enum FoundInSwap {
    Page(VirtAddr),
    /// No page below this address is in swap.
    NoneBefore(VirtAddr),
}

/// Loads the pages of `range`. Linear in the number of entries and of runs that are read.
///
/// # Errors
/// [`Error::NotMapped`] if the range has holes, after the mapped parts were loaded;
/// [`Error::Interrupted`].
#[cold]
pub(in crate::space) fn will_need<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
) -> Result<(), Error> {
    let mut parts = Parts::of(range);
    let mut ended = WillNeedEnd::Whole;
    loop {
        let (part, object) = {
            let vmas = space.vmas.lock();
            let Some((vma, part)) = parts.next(vmas.view()) else { break };
            (part, ObjectPart::of(space, vma, part))
        };
        // The call reports holes even if memory was short.
        if ended == WillNeedEnd::Whole && space.counts().swap_pages as i64 > 0 {
            ended = bring_in_private(space, part)?;
        }
        if let Some(object) = object
            && ended == WillNeedEnd::Whole
        {
            ended = object.bring_in()?;
        }
    }
    parts.end()
}

impl<'m, P: Platform> ObjectPart<'m, P> {
    /// The pages behind a part of a VMA. `None` for private memory, and for shared memory without
    /// pages in swap.
    fn of(space: &AddressSpace<'m, P>, vma: &Vma, part: VirtRange) -> Option<Self> {
        let state = vma.object().filter(|object| object.is_file() || object.pages.swapped() > 0)?;
        let orders = state.orders(space.page_table.memory, vma.flags());
        let orders = space.settings.used_orders(orders, vma.flags());
        let pages = PageRange::from_count(vma.page_offset_of(part.start()), part.pages());
        Some(Self { object: space.object_of(vma)?, pages, orders })
    }

    /// Swaps the pages in, or starts to read them.
    fn bring_in(&self) -> Result<WillNeedEnd, Error> {
        let PageRange { mut first, end } = self.pages;
        while first < end {
            interrupt::check(self.object.memory.platform())?;
            match self.object.bring_in(PageRange { first, end }, self.orders, PAGES) {
                Some(next) => first = next,
                None => return Ok(WillNeedEnd::Short),
            }
        }
        Ok(WillNeedEnd::Whole)
    }
}

/// Swaps in the pages to which the entries of a part of one VMA refer.
fn bring_in_private<P: Platform>(
    space: &AddressSpace<'_, P>,
    part: VirtRange,
) -> Result<WillNeedEnd, Error> {
    let mut at = part.start();
    let mut call = MaySleep::new(space);
    // The page that a device has read last, and its folio, which is kept until it is mapped.
    let (mut read, mut _kept) = (None, None);
    while at < part.end() {
        interrupt::check(call.platform())?;
        // Another thread has unmapped the rest.
        let Some(locked) = call.lock_vma(at) else { break };
        let rest = VirtRange::raw(at.0, part.end().0).intersection(locked.vma().range());
        let page = match next_in_swap(&call.page_table, rest) {
            FoundInSwap::Page(page) => page,
            FoundInSwap::NoneBefore(end) => {
                at = end;
                continue;
            }
        };
        let was_read = read == Some(page);
        let fault = Fault::new(&call, locked.vma(), page, Access::Read);
        at = match bring_in(&fault, was_read) {
            Announced::Next(next) => next,
            Announced::Short => return Ok(WillNeedEnd::Short),
            Announced::Wait(wait) => {
                drop(locked);
                // A wait for a request reads nothing.
                if !matches!(wait, Wait::SwapRequest { .. }) {
                    read = Some(page);
                }
                match call.wait(wait) {
                    Ok(kept) if !was_read => {
                        _kept = kept;
                        page
                    }
                    // Lost content is an error only for an access that needs the content.
                    Ok(_) | Err(_) => page.offset(PAGE_SIZE),
                }
            }
        };
    }
    Ok(WillNeedEnd::Whole)
}

/// Swaps in the run around the page, or starts to read the run. `was_read`: a device has read the
/// page for this call.
fn bring_in<P: Platform>(fault: &Fault<'_, '_, P>, was_read: bool) -> Announced {
    let (page_table, page) = (&fault.space.page_table, fault.page);
    let memory = page_table.memory;
    let next = Announced::Next(page.offset(PAGE_SIZE));
    let mut orders = fault.swap_in_orders();
    if !memory.has_room_for(u64::from(orders.largest().pages())) {
        return Announced::Short;
    }
    let Some(slot) = slot_at(page_table, page) else { return next };
    let Some(state) = slot.state else { return next };
    match memory.swap.source_of(slot.area, state) {
        EarlySource::Cache if !was_read => next,
        EarlySource::Cache | EarlySource::Memory | EarlySource::SynchronousDevice => {
            map_announced(fault, slot)
        }
        EarlySource::Device if !memory.swap.has_free_request(slot.area) => next,
        EarlySource::Device => {
            while let Some((order, slots)) = fault.next_run(slot, &mut orders) {
                if slots.begin_read(memory, order, Cause::Advice) == Begun::Yes {
                    let size = PAGE_SIZE << order.0;
                    return Announced::Next(page.align_down(size).offset(size));
                }
            }
            next
        }
    }
}

/// Maps a page and the run around it, unless a device must read the page first.
fn map_announced<P: Platform>(fault: &Fault<'_, '_, P>, slot: FaultSlot) -> Announced {
    let next = fault.page.offset(PAGE_SIZE);
    match fault.swap_in(slot, Reading::Advice) {
        Ok(Next::Done(Resolved::FromSwap(range))) => Announced::Next(range.end().max(next)),
        Ok(Next::Wait(wait)) => Announced::Wait(wait),
        // Another thread was faster, or the content is lost.
        Ok(Next::Done(_) | Next::Again) | Err(Failure::Refused(_)) => Announced::Next(next),
        Err(Failure::NoMemory) => Announced::Short,
    }
}

/// Finds the first page of `range` that is in swap, in the first [`LOOKS`] entries.
fn next_in_swap<P: Platform>(page_table: &PageTable<'_, P>, range: VirtRange) -> FoundInSwap {
    let (mut looks, mut found) = (0, FoundInSwap::NoneBefore(range.end()));
    look::look(page_table, range, |looked| {
        looks += 1;
        let absent = looked.node.level.kind(looked.raw) == Kind::Absent;
        if absent && matches!(P::Arch::decode_absent(looked.raw), Some(Absent::Swap { .. })) {
            found = FoundInSwap::Page(looked.range.start());
            return false;
        }
        if looks == LOOKS {
            found = FoundInSwap::NoneBefore(looked.range.end());
        }
        looks < LOOKS
    });
    found
}
