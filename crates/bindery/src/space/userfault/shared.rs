//! Shared memory: the object gets the pages that a handler supplies, and `UFFDIO_CONTINUE` maps
//! pages that the object already holds.

use crate::addr::{Frame, Order, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, Level, Permissions};
use crate::error::{Error, Failure};
use crate::folio::{Folio, FreshFolio};
use crate::object::{ObjectState, Stop, pages, supply};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::call::populate::{Populate, Want};
use crate::space::fault::{Access, Fault, Next, folio_place, object_attributes};
use crate::space::op::VmaOp;
use crate::space::sleep::MaySleep;
use crate::space::userfault::install::is_occupied;
use crate::stats::Counts;
use crate::table::publish::publish;
use crate::table::{EntryAt, run};
use crate::vma::{MappingFlags, Vma};

use super::fill::{Fill, FillMode, PartialFill};
use super::handler::UserfaultHandler;

/// A filled folio on its way to an object.
pub(super) struct SuppliedPage<'m, P: Platform> {
    pub(super) folio: Folio,
    /// The folio, until the object owns it.
    pub(super) fresh: Option<FreshFolio<'m, P>>,
}

/// The object of the VMA, if it is shared memory.
pub(super) fn memory_of(vma: &Vma) -> Option<&ObjectState> {
    vma.object().filter(|object| object.is_shared_memory())
}

impl<P: Platform> UserfaultHandler<'_, '_, P> {
    /// Maps the object's pages behind `length` bytes at `to`, where nothing is mapped, and wakes
    /// the faults that wait for them (`UFFDIO_CONTINUE`).
    ///
    /// Context: may sleep. Complexity: linear in the number of runs.
    ///
    /// # Errors
    /// As [`UserfaultHandler::fill_copy`]; [`Error::Invalid`] if the mapping is not of shared
    /// memory or extends beyond the end of the memory; [`Error::Fault`] for a page that the memory
    /// does not have.
    pub fn fill_present(
        self,
        to: VirtAddr,
        length: u64,
        mode: FillMode,
    ) -> Result<(), PartialFill> {
        let Self { space, userfault } = self;
        let (memory, fill) = (space.page_table.memory, Fill { space, userfault, mode });
        let mut call = MaySleep::new(space);
        // Keeps the folio that a device has read until it is mapped.
        let mut _kept = None;
        fill.pages(to, length, |at, end| {
            memory.retry(|| {
                loop {
                    let range = VirtRange::raw(at.0, end.0);
                    let fill = Fill { space: &call, userfault, mode };
                    let wait = match fill.in_vma(at, end, |op| op.map_present(range, mode)) {
                        Ok(end) => return Ok(end),
                        Err(Stop::Failed(failure)) => return Err(failure),
                        Err(Stop::Wait(wait)) => wait,
                    };
                    let kept = call.wait(wait);
                    _kept = kept.map_err(|failure| failure.map(|_| Error::Fault(at)))?;
                }
            })
        })
    }
}

/// Maps the folio that a collapse has created in `range`. As on Linux, no handler is involved.
pub(in crate::space) fn populate_collapsed<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
) -> Result<(), Failure> {
    // Keeps the folio that a device has read until it is mapped.
    let mut _kept = None;
    let mut call = MaySleep::new(space);
    loop {
        let locked = call.lock_vma(range.start()).ok_or(Error::NotMapped(range.start()))?;
        let vma = locked.vma();
        if !vma.has(MappingFlags::USERFAULT_MINOR) || !vma.range().covers(range) {
            break;
        }
        let map = |op: &VmaOp<'_, '_, P>| op.map_present(range, FillMode::empty());
        let wait = match call.operate_in(locked, map) {
            Ok(_) => return Ok(()),
            Err(Stop::Failed(failure)) => return Err(failure),
            Err(Stop::Wait(wait)) => wait,
        };
        _kept = call.wait(wait)?;
    }
    Ok(Populate::all_of(range, Want::Usual).finish(space)?)
}

/// The frame of the object behind the VMA at `page`. Allocates or swaps in the page. The caller
/// holds the invalidate lock.
pub(super) fn frame_of_object<P: Platform>(
    fault: &Fault<'_, '_, P>,
    object: &ObjectState,
) -> Result<Frame, Stop> {
    let (memory, vma) = (fault.space.page_table.memory, fault.vma);
    let index = vma.page_offset_of(fault.page);
    if index >= object.size_in_pages() {
        return Err(Error::Fault(fault.page).into());
    }
    let orders = object.orders(memory, vma.flags());
    pages::get(memory, object, index, orders)
}

/// Whether the object behind the VMA has a page at that index, in memory or in swap; `None` beyond
/// the object's end.
pub(super) fn object_has<P: Platform>(fault: &Fault<'_, '_, P>) -> Option<bool> {
    let object = fault.vma.object()?;
    let index = fault.vma.page_offset_of(fault.page);
    let has = || pages::has(fault.space.page_table.memory, object, index);
    (index < object.size_in_pages()).then(has)
}

impl<P: Platform> VmaOp<'_, '_, P> {
    /// The number of pages from the start of `range` whose entries are empty, in one table; one
    /// page if its entry is a marker that a page may replace.
    ///
    /// # Errors
    /// [`Error::Exists`] for a huge leaf.
    fn vacant_pages(&self, range: VirtRange) -> Result<u64, Error> {
        let at = range.start();
        let section = self.page_table().read_section();
        let EntryAt { node, index, entry } =
            self.page_table().peek(&section, at, &mut Counts::default());
        if is_occupied::<P::Arch>(entry) {
            // As on Linux, an error of the source takes precedence over a page that is in the
            // way.
            return if node.level > Level::PTE { Err(Error::Exists(at)) } else { Ok(0) };
        }
        if !entry.is_empty() {
            return Ok(1);
        }
        let span = P::Arch::PTE.table_span();
        let table_end = at.align_down(span).0.saturating_add(span);
        let pages = (table_end.min(range.end().0) - at.0) >> PAGE_SHIFT;
        if node.level > Level::PTE {
            return Ok(pages);
        }
        let entries = &self.page_table().entries(node.table)[index.positions(pages as u32)];
        Ok(u64::from(run::count_empty(entries)))
    }

    /// Maps a run of the object's pages at the start of `range` and returns its end.
    fn map_present(&self, range: VirtRange, mode: FillMode) -> Result<VirtAddr, Stop> {
        let object = memory_of(self.vma).ok_or(Error::Invalid)?;
        object
            .invalidate_lock
            .with_read(self.space.platform(), |_| self.map_present_of(object, range, mode))
    }

    /// As [`VmaOp::map_present`]; the caller keeps the object's pages from being dropped.
    fn map_present_of(
        &self,
        object: &ObjectState,
        range: VirtRange,
        mode: FillMode,
    ) -> Result<VirtAddr, Stop> {
        let (space, vma, at) = (self.space, self.vma, range.start());
        let memory = space.page_table.memory;
        let index = vma.page_offset_of(at);
        if index >= object.size_in_pages() {
            return Err(Error::Invalid.into());
        }
        let vacant = self.vacant_pages(range)?;
        if vacant == 0 {
            return Err(Error::Exists(at).into());
        }
        let (mut found, mut count) = pages::resident_run(memory, object, index, vacant);
        if found.is_none() && pages::has(memory, object, index) {
            let orders = object.orders(memory, vma.flags());
            match pages::get(memory, object, index, orders) {
                Ok(_) => (found, count) = pages::resident_run(memory, object, index, vacant),
                Err(Stop::Failed(Failure::Refused(_))) => return Err(Error::Fault(at).into()),
                Err(stop) => return Err(stop),
            }
        }
        let first = found.ok_or(Error::Fault(at))?;
        let part = VirtRange::raw(at.0, at.0 + (count.min(vacant) << PAGE_SHIFT));
        self.map_supplied(object, part, first, mode)?;
        Ok(part.end())
    }

    /// Maps consecutive pages of one of the object's folios, from `first` on.
    fn map_supplied(
        &self,
        object: &ObjectState,
        part: VirtRange,
        first: Frame,
        mode: FillMode,
    ) -> Result<(), Failure> {
        let (space, vma) = (self.space, self.vma);
        self.lift_markers(part)?;
        let mut attributes =
            object_attributes(vma, if vma.is_shared() { Access::Write } else { Access::Read });
        if mode.contains(FillMode::WRITE_PROTECT) {
            attributes = attributes.write_protected();
        }
        if attributes.permissions().contains(Permissions::WRITE) {
            let (index, count) = (vma.page_offset_of(part.start()), part.pages());
            // No pager stores shared memory, so there is no store to wait for.
            let marked = pages::mark_dirty(space.page_table.memory, object, index, count);
            debug_assert!(marked.is_ok());
        }
        let fault = Fault::new(space, vma, part.start(), Access::Read);
        let mapped = fault.map_frames(part, first, attributes);
        publish(&space.page_table, part);
        match mapped {
            Ok(Next::Done(_)) => Ok(()),
            // Another thread was faster.
            Ok(_) => Err(Error::Exists(part.start()).into()),
            Err(_) => Err(Failure::NoMemory),
        }
    }

    /// The order of the folio for the object at `at`: the largest that fits the range, the mapping,
    /// the entries and the object.
    pub(super) fn supplied_order(
        &self,
        object: &ObjectState,
        at: VirtAddr,
        end: VirtAddr,
    ) -> Result<Order, Error> {
        let (space, vma) = (self.space, self.vma);
        let memory = space.page_table.memory;
        let vacant = self.vacant_pages(VirtRange::raw(at.0, end.0))?;
        let index = vma.page_offset_of(at);
        let left = object.size_in_pages().saturating_sub(index).min(vacant);
        let mut orders =
            space.settings.used_orders(object.orders(memory, vma.flags()), vma.flags());
        while let Some(order) = orders.take_largest() {
            let count = u64::from(order.pages());
            let aligned = folio_place(at, order).is_some_and(|range| range.start() == at)
                && index.is_multiple_of(count);
            if aligned && count <= left && pages::lacks(memory, object, index, count) {
                return Ok(order);
            }
        }
        Ok(Order::PAGE)
    }

    /// Adds a filled folio to the object behind `at` and maps it. Returns the end of the folio, or
    /// `at` if a smaller one may fit.
    pub(super) fn fill_shared(
        &self,
        object: &ObjectState,
        at: VirtAddr,
        mode: FillMode,
        supplied: &mut SuppliedPage<'_, P>,
    ) -> Result<VirtAddr, Failure> {
        let (space, vma) = (self.space, self.vma);
        let memory = space.page_table.memory;
        let Folio { head, order, .. } = supplied.folio;
        let part = VirtRange::raw(at.0, at.0 + order.bytes());
        let index = vma.page_offset_of(at);
        let pages = u64::from(order.pages());
        object.invalidate_lock.with_read(space.platform(), |_| {
            if index >= object.size_in_pages() {
                return Err(Error::Fault(at).into());
            }
            if supplied.fresh.is_some() {
                let vacant = self.vacant_pages(part)?;
                let fits = vacant >= pages && pages <= object.size_in_pages() - index;
                if fits {
                    supply::supply(memory, object, index, &mut supplied.fresh)?;
                }
                if supplied.fresh.is_some() {
                    return if order > Order::PAGE {
                        Ok(at)
                    } else {
                        Err(Error::Exists(at).into())
                    };
                }
                memory.frames.folio(supplied.folio).mark_dirty();
            }
            // The object received the folio before memory was available to map it, and may have
            // dropped it since.
            if pages::resident_run(memory, object, index, pages) == (Some(head), pages) {
                self.map_supplied(object, part, head, mode)?;
            }
            Ok(part.end())
        })
    }

    /// Runs `work` with the end of the range, cut off at the end of the object, which no truncation
    /// moves meanwhile.
    ///
    /// # Errors
    /// [`Error::Fault`] if nothing of the range is left; the errors of `work`.
    // Always inlined: anonymous memory, which has no end, pays for one load.
    #[inline(always)]
    pub(super) fn before_end<R, E: From<Error>>(
        &self,
        at: VirtAddr,
        end: VirtAddr,
        work: impl FnOnce(VirtAddr) -> Result<R, E>,
    ) -> Result<R, E> {
        match self.vma.object() {
            None => work(end),
            Some(object) => self.before_end_of(object, (at, end), work),
        }
    }

    /// As [`VmaOp::before_end`], for a mapping of an object.
    #[cold]
    #[inline(never)]
    fn before_end_of<R, E: From<Error>>(
        &self,
        object: &ObjectState,
        (at, end): (VirtAddr, VirtAddr),
        work: impl FnOnce(VirtAddr) -> Result<R, E>,
    ) -> Result<R, E> {
        object
            .invalidate_lock
            .with_read(self.memory().platform(), |_| work(self.end_of_object(at, end)?))
    }

    /// The part of a range in the VMA, cut off at the end of the object.
    ///
    /// # Errors
    /// [`Error::Fault`] if nothing is left.
    pub(super) fn end_of_object(&self, at: VirtAddr, end: VirtAddr) -> Result<VirtAddr, Error> {
        let Some(object) = self.vma.object() else { return Ok(end) };
        let left = object.size_in_pages().saturating_sub(self.vma.page_offset_of(at));
        if left == 0 {
            return Err(Error::Fault(at));
        }
        Ok(at.offset(left << PAGE_SHIFT).min(end))
    }
}
