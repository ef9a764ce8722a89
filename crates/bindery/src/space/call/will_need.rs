//! `MADV_WILLNEED`: what a range has in swap comes in before it is used.
//!
//! | where the content is | what the call does |
//! |---|---|
//! | compressed memory, or a device as fast | private pages are mapped; shared memory has its pages again |
//! | another device | the read is begun, into the swap cache; the call waits for none |
//! | the swap cache, or on its way there or out | nothing |
//!
//! Compressed pages are mapped, though Linux leaves them in the swap cache: their content is there
//! when the call returns, so a fault would only write the entry, for ten times the cost. A mapped
//! page has also given its slot up, and the compressed copy is freed.
//!
//! The call is advice. It ends without an error where memory is short, so it evicts nothing, and
//! passes over what another thread has locked and what is lost: the access that needs the page
//! waits, or gets the error. No lock is held from one run to the next.

use crate::addr::{Orders, PAGE_SIZE, PageRange, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Kind};
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::object::Object;
use crate::platform::Platform;
use crate::swap::early_read::{Begun, Cause, Source};
use crate::table::PageTable;
use crate::vma::Vma;

use crate::vmas::Parts;

use super::madvise::shared_memory;
use crate::space::AddressSpace;
use crate::space::fault::{Access, Fault, Next, Reading, Resolved, Slot, slot_at};

/// Entries that are looked at between two checks for a fatal signal.
const LOOKS: u32 = 1024;
/// Pages of an object that are asked for between two checks.
const PAGES: u64 = 64;

/// How a part of the range has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// All of it was looked at.
    Whole,
    /// Memory is short.
    Short,
}

/// Pages of shared memory.
struct SharedPart<'m, P: Platform> {
    object: Object<'m, P>,
    pages: PageRange,
    /// The orders that their folios may have.
    orders: Orders,
}

/// What a search for a page in swap has found.
enum Found {
    Page(VirtAddr),
    /// None before this address.
    NoneBefore(VirtAddr),
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Brings in what `range` has in swap. Linear in the entries, and in the runs that come in.
    ///
    /// # Errors
    /// [`Error::NotMapped`] if the range has holes, after the mapped parts are done;
    /// [`Error::Interrupted`].
    #[cold]
    pub(in crate::space) fn will_need(&self, range: VirtRange) -> Result<(), Error> {
        let mut parts = Parts::of(range);
        let mut ended = Ended::Whole;
        loop {
            let (part, shared) = {
                let vmas = self.vmas.lock();
                let Some((vma, part)) = parts.next(vmas.view()) else { break };
                (part, self.shared_part(vma, part))
            };
            // Holes are reported all the same.
            if ended == Ended::Whole && self.counts().swap_pages as i64 > 0 {
                ended = self.bring_in_private(part)?;
            }
            if let Some(shared) = shared
                && ended == Ended::Whole
            {
                ended = self.bring_in_shared(&shared)?;
            }
        }
        parts.end()
    }

    /// What a part of a VMA shows of shared memory of which some is in swap.
    fn shared_part(&self, vma: &Vma, part: VirtRange) -> Option<SharedPart<'m, P>> {
        let state = shared_memory(vma).filter(|object| object.pages.swapped() > 0)?;
        let orders = state.orders(self.page_table.memory, vma.flags());
        let orders = self.used_orders(orders, vma.flags());
        let pages = PageRange::from_count(vma.page_offset_of(part.start()), part.pages());
        Some(SharedPart { object: self.object_of(vma)?, pages, orders })
    }

    /// Brings in what the entries of a part of one VMA have in swap.
    fn bring_in_private(&self, part: VirtRange) -> Result<Ended, Error> {
        let mut at = part.start();
        while at < part.end() {
            interrupt::check(self.platform())?;
            // What has been unmapped meanwhile needs nothing.
            let Some(locked) = self.lock_vma(at) else { break };
            let rest = VirtRange::raw(at.0, part.end().0).intersection(locked.vma().range());
            at = match next_in_swap(&self.page_table, rest) {
                Found::NoneBefore(end) => end,
                Found::Page(page) => match self.bring_in(locked.vma(), page) {
                    Some(next) => next,
                    None => return Ok(Ended::Short),
                },
            };
        }
        Ok(Ended::Whole)
    }

    /// Brings in the run around `page`, or begins to. Returns where to go on; `None` if memory is
    /// short. The VMA is locked for reading.
    fn bring_in(&self, vma: &Vma, page: VirtAddr) -> Option<VirtAddr> {
        let memory = self.page_table.memory;
        let next = page.offset(PAGE_SIZE);
        let fault = Fault::new(self, vma, page, Access::Read);
        let mut orders = fault.swap_in_orders();
        if !memory.has_room_for(u64::from(orders.largest().pages())) {
            return None;
        }
        let Some(slot) = slot_at(&self.page_table, page) else { return Some(next) };
        let Some(cell) = slot.cell else { return Some(next) };
        match memory.source_of(slot.area, cell) {
            Source::Cache => Some(next),
            Source::Memory => map_announced(&fault, slot),
            Source::Device if !memory.has_free_request(slot.area) => Some(next),
            Source::Device => {
                while let Some((order, slots)) = fault.next_run(slot, &mut orders) {
                    if memory.begin_read(slots, order, Cause::Advice) == Begun::Yes {
                        let size = PAGE_SIZE << order.0;
                        return Some(page.align_down(size).offset(size));
                    }
                }
                Some(next)
            }
        }
    }

    /// Brings in what an object has in swap of these pages.
    fn bring_in_shared(&self, shared: &SharedPart<'m, P>) -> Result<Ended, Error> {
        let SharedPart { object, pages, orders } = shared;
        let PageRange { mut first, end } = *pages;
        while first < end {
            interrupt::check(self.platform())?;
            match object.bring_in(PageRange { first, end }, *orders, PAGES) {
                Some(next) => first = next,
                None => return Ok(Ended::Short),
            }
        }
        Ok(Ended::Whole)
    }
}

/// Maps a page that needs no device, with the run around it. Returns the address to continue at;
/// `None` if there is no memory.
fn map_announced<P: Platform>(fault: &Fault<'_, '_, P>, slot: Slot) -> Option<VirtAddr> {
    let next = fault.page.offset(PAGE_SIZE);
    match fault.swap_in(slot, Reading::Advice) {
        Ok(Next::Done(Resolved::FromSwap(range))) => Some(range.end().max(next)),
        // The area has got a slower device meanwhile.
        Ok(Next::Wait(wait)) => {
            drop(wait.wait(fault.space.memory(), None));
            Some(next)
        }
        // Another thread was faster, or the content is lost.
        Ok(Next::Done(_) | Next::Again) | Err(Failure::Refused(_)) => Some(next),
        Err(Failure::NoMemory) => None,
    }
}

/// The first page of `range` that is in swap, of as many entries as may be looked at at once.
fn next_in_swap<P: Platform>(page_table: &PageTable<'_, P>, range: VirtRange) -> Found {
    let (mut looks, mut found) = (0, Found::NoneBefore(range.end()));
    page_table.look(range, |looked| {
        looks += 1;
        let absent = looked.node.level.kind(looked.raw) == Kind::Absent;
        if absent && matches!(P::Arch::decode_absent(looked.raw), Some(Absent::Swap { .. })) {
            found = Found::Page(looked.range.start());
            return false;
        }
        if looks == LOOKS {
            found = Found::NoneBefore(looked.range.end());
        }
        looks < LOOKS
    });
    found
}
