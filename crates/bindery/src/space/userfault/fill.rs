//! Pages supplied by a handler: copies (`UFFDIO_COPY`) and zeroes (`UFFDIO_ZEROPAGE`).
//!
//! The copy is made into fresh folios before anything is locked, because the source may fault and
//! may itself wait for a handler. The VMA is then locked and checked again, and the folio is mapped
//! where the entry is empty.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;

use bitflags::bitflags;

use crate::addr::{Order, Orders, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Level, Marker};
use crate::error::{Error, Failure, FaultError, NoMemory};
use crate::folio::FreshFolio;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::AddressSpace;
use crate::space::fault::{Access, Fault, Next, Occupant, Resolved, folio_place};
use crate::space::op::VmaOp;
use crate::space::stack_growth::prepare_group;
use crate::space::userfault::install::is_occupied;
use crate::space::userfault::userfault_range;
use crate::stats::Counts;
use crate::userfault::Userfault;
use crate::vma::{MappingAttributes, MappingFlags, VmaReadGuard};

use super::handler::UserfaultHandler;
use super::is_served;
use super::register::takes_pages;
use super::shared::{SuppliedPage, memory_of};

bitflags! {
    /// How pages are filled (`UFFDIO_COPY_MODE_*`, `UFFDIO_ZEROPAGE_MODE_*`).
    ///
    /// # Context
    /// Context: any.
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{AddressSpace, FillMode, PartialFill, Platform, Userfault};
    ///
    /// /// Supplies zeroes. The handler wakes the waiting threads later, for many ranges at once.
    /// fn supply<P: Platform>(
    ///     space: &AddressSpace<'_, P>,
    ///     userfault: &Userfault<'_, P>,
    ///     at: VirtAddr,
    /// ) -> Result<(), PartialFill> {
    ///     space.handler(userfault).fill_zeroes(at, 2 << 20, FillMode::DONT_WAKE)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct FillMode: u8 {
        /// The faults that wait for the pages are not woken.
        const DONT_WAKE = 1 << 0;
        /// The pages are write-protected.
        const WRITE_PROTECT = 1 << 1;
    }
}

/// A call on a userfaultfd that ended early.
///
/// ```
/// use bindery::{Errno, Operation, PartialFill};
///
/// /// The result field of an ioctl's structure: bytes, or a negative errno.
/// fn reported(partial: PartialFill) -> i64 {
///     if partial.done > 0 {
///         return partial.done as i64;
///     }
///     -(partial.error.errno(Operation::Userfault) as i64)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartialFill {
    /// The number of completed bytes.
    pub done: u64,
    /// The reason why the next page was not completed.
    pub error: Error,
}

impl fmt::Display for PartialFill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes were done: {}", self.done, self.error)
    }
}

impl core::error::Error for PartialFill {}

impl From<Error> for PartialFill {
    fn from(error: Error) -> Self {
        Self { done: 0, error }
    }
}

/// Supplies the content of pages. Receives the offset from the start of the range and a buffer
/// within one page.
///
/// ```
/// use bindery::FillSource;
///
/// let content = [7; 4096];
/// let mut copy = |offset: u64, bytes: &mut [u8]| {
///     let offset = offset as usize;
///     bytes.copy_from_slice(&content[offset..offset + bytes.len()]);
///     Ok(())
/// };
/// let _source: &mut FillSource<'_> = &mut copy;
/// ```
pub type FillSource<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), FaultError> + 'a;

/// The number of bytes per page, in the type of slice lengths.
const PAGE: usize = PAGE_SIZE as usize;

impl<'m, P: Platform> UserfaultHandler<'_, 'm, P> {
    /// Fills the pages of `length` bytes at `to`, where nothing is mapped, with the content that
    /// `source` supplies, and wakes the faults that wait for them (`UFFDIO_COPY`). `source`
    /// receives the offset from the start and a buffer within one page. `source` is called without
    /// locks and may itself fault. It supplies up to a large folio, or 32 pages, before the first
    /// of these pages is mapped, so it must not read any of the pages that it is supplying.
    ///
    /// Large folios are used where the range, the policy and the mapping allow.
    ///
    /// Context: may sleep. Complexity: linear in the number of pages.
    ///
    /// # Errors
    /// [`PartialFill`] with the number of completed bytes and [`Error::Unaligned`],
    /// [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::TryAgain`] while the address space
    /// changes; [`Error::NotMapped`] if the range does not lie in one registered mapping;
    /// [`Error::Invalid`] if the pages are to be write-protected and the mapping is not registered
    /// for that, if the mapping is neither anonymous nor shared memory or was reaped, or if the
    /// userfaultfd belongs to another address space; [`Error::Exists`] if something is already
    /// mapped; [`Error::Fault`] if `source` failed, or beyond the end of shared memory;
    /// [`Error::OutOfMemory`]; [`Error::Interrupted`] for a fatal signal.
    pub fn fill_copy(
        self,
        to: VirtAddr,
        length: u64,
        mode: FillMode,
        source: &mut FillSource<'_>,
    ) -> Result<(), PartialFill> {
        self.fill_copy_by(to, length, mode, (FillOrder::Together, source))
    }

    /// As [`UserfaultHandler::fill_copy`], but the caller chooses how far copying runs ahead of
    /// mapping.
    ///
    /// Context: may sleep. Complexity: as [`UserfaultHandler::fill_copy`] with
    /// [`FillOrder::Together`]; linear in the number of pages with [`FillOrder::PageByPage`].
    ///
    /// # Errors
    /// As [`UserfaultHandler::fill_copy`].
    pub fn fill_copy_by(
        self,
        to: VirtAddr,
        length: u64,
        mode: FillMode,
        (batches, source): (FillOrder, &mut FillSource<'_>),
    ) -> Result<(), PartialFill> {
        let Self { space, userfault } = self;
        let fill = Fill { space, userfault, mode };
        fill.pages(to, length, |at, end| {
            let (order, count) = match fill.in_vma(at, end, |op| op.next_fill(at, end))? {
                _ if batches == FillOrder::PageByPage => (Order::PAGE, 1),
                NextFill::Folio(order) => (order, 1),
                NextFill::Pages(count) => (Order::PAGE, count),
            };
            if count > 1 {
                let source = |page: VirtAddr, bytes: &mut [u8]| source(page.0 - to.0, bytes);
                return fill.copy_pages(at, count, source);
            }
            let folio = fill.new_folio(order)?;
            let filled = fill.copy_in(&folio, |inside, piece| source(at.0 - to.0 + inside, piece));
            if filled.is_err() {
                folio.discard();
                return Err(Error::Fault(at));
            }
            fill.count_copied(folio.pages());
            fill.map_folio(at, end, folio)
        })
    }

    /// Maps zeroes in `length` bytes at `to`, where nothing is mapped, and wakes the faults that
    /// wait for them (`UFFDIO_ZEROPAGE`). Anonymous memory gets the zero page, in runs, and the
    /// huge zero page where it fits. Shared memory gets zeroed pages.
    ///
    /// Context: may sleep. Complexity: linear in the number of runs.
    ///
    /// # Errors
    /// As [`UserfaultHandler::fill_copy`], without the errors of the source.
    pub fn fill_zeroes(self, to: VirtAddr, length: u64, mode: FillMode) -> Result<(), PartialFill> {
        let Self { space, userfault } = self;
        let fill = Fill { space, userfault, mode };
        fill.pages(to, length, |at, end| {
            let map = |op: &VmaOp<'_, 'm, P>| match op.vma.is_shared() {
                true => Ok(None),
                false => op.map_zeroes(at, end).map(Some),
            };
            if let Some(end) = space.page_table.memory.retry(|| fill.in_vma(at, end, map))? {
                return Ok(end);
            }
            let next = fill.in_vma(at, end, |op| op.next_fill(at, end))?;
            let folio = fill.new_folio(next.order())?;
            space.platform().zero(folio.head, folio.pages());
            fill.map_folio(at, end, folio)
        })
    }

    /// Makes accesses to `length` bytes at `to`, where nothing is mapped, fail with
    /// [`FaultError::Bus`], and wakes the faults that wait there (`UFFDIO_POISON`). A call that
    /// unmaps or drops the contents removes the poison, and so does a supplied page.
    ///
    /// Context: may sleep. Complexity: linear in the number of pages.
    ///
    /// # Errors
    /// As [`UserfaultHandler::fill_copy`], without the errors of the source; [`Error::Fault`]
    /// beyond the end of shared memory.
    pub fn fill_poison(self, to: VirtAddr, length: u64, mode: FillMode) -> Result<(), PartialFill> {
        let poison = P::Arch::encode_absent(Absent::Marker(Marker::Poison));
        let Self { space, userfault } = self;
        let fill = Fill { space, userfault, mode };
        fill.pages(to, length, |at, end| {
            space.page_table.memory.retry(|| {
                fill.in_vma(at, end, |op| {
                    op.before_end(at, end, |end| op.install(VirtRange::raw(at.0, end.0), poison))
                })
            })
        })
    }
}

/// One call that fills pages, for a userfaultfd.
pub(super) struct Fill<'f, 'm, P: Platform> {
    pub(super) space: &'f AddressSpace<'m, P>,
    pub(super) userfault: &'f Userfault<'f, P>,
    pub(super) mode: FillMode,
}

impl<'m, P: Platform> Fill<'_, 'm, P> {
    /// A fresh folio of this order, or of the smallest order.
    // Always inlined: a call would return the folio in memory, once per page.
    #[inline(always)]
    pub(super) fn new_folio(&self, order: Order) -> Result<FreshFolio<'m, P>, Error> {
        let memory = self.space.page_table.memory;
        memory.may_wait();
        if let Some(fresh) = memory.frames.new_exclusive_folio(order) {
            return Ok(fresh);
        }
        memory.retry(|| Ok(memory.frames.new_exclusive_folio(Order::PAGE).ok_or(NoMemory)?))
    }

    /// Fills a fresh folio. The caller counts the copied pages.
    pub(super) fn copy_in(
        &self,
        folio: &FreshFolio<'_, P>,
        mut source: impl FnMut(u64, &mut [u8]) -> Result<(), FaultError>,
    ) -> Result<(), FaultError> {
        let length = u64::from(folio.pages()) * PAGE_SIZE;
        let bytes = self.space.platform().direct_map(folio.head).as_ptr();
        // SAFETY: the direct map shows the bytes of the folio's frames, which are consecutive
        // (obligation 1 of `Platform`, and `Frames::new` checked that where two ranges touch);
        // memory always holds some bytes. The folio is fresh: no other thread finds it until it is
        // mapped or supplied.
        let bytes = unsafe { core::slice::from_raw_parts_mut(bytes, length as usize) };
        for (offset, page) in (0..).step_by(PAGE).zip(bytes.chunks_mut(PAGE)) {
            source(offset, page)?;
        }
        Ok(())
    }

    /// Counts the pages whose content came from a source, once per batch.
    pub(super) fn count_copied(&self, pages: u32) {
        let bytes_copied = u64::from(pages) * PAGE_SIZE;
        self.space.page_table.count(&Counts { bytes_copied, ..Counts::default() });
    }

    /// Calls `work` to fill pages from an address up to an end at most, until all `length` bytes at
    /// `to` are complete, and wakes the faults that wait for the completed pages.
    pub(super) fn pages(
        &self,
        to: VirtAddr,
        length: u64,
        mut work: impl FnMut(VirtAddr, VirtAddr) -> Result<VirtAddr, Error>,
    ) -> Result<(), PartialFill> {
        let state = self.userfault.state();
        if state.is_changing() {
            return Err(Error::TryAgain.into());
        }
        let range = userfault_range(self.space, to, length)?;
        let platform = self.space.platform();
        let mut at = range.start();
        let mut result = Ok(());
        while at < range.end() {
            let next = crate::interrupt::check(platform).and_then(|()| work(at, range.end()));
            match next {
                Ok(next) => at = next,
                Err(error) => {
                    result = Err(PartialFill { done: at.0 - to.0, error });
                    break;
                }
            }
        }
        if at > range.start() && !self.mode.contains(FillMode::DONT_WAKE) {
            state.wake(platform, VirtRange::raw(to.0, at.0));
        }
        result
    }

    /// Runs `work` in the VMA of the range, locked for reading.
    ///
    /// # Errors
    /// The errors of [`Fill::lock`] and of `work`.
    #[inline(always)]
    pub(super) fn in_vma<R, E: From<Error>>(
        &self,
        at: VirtAddr,
        end: VirtAddr,
        work: impl FnOnce(&VmaOp<'_, 'm, P>) -> Result<R, E>,
    ) -> Result<R, E> {
        let locked = self.lock(at, end)?;
        self.space.operate_in(locked, work)
    }

    /// Locks the VMA of the range for reading, if the VMA is registered and may be filled. As on
    /// Linux, the VMA may be registered with another userfaultfd of the address space.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotMapped`] and [`Error::TryAgain`], as
    /// [`UserfaultHandler::fill_copy`].
    fn lock(&self, at: VirtAddr, end: VirtAddr) -> Result<VmaReadGuard<'_, P>, Error> {
        let space = self.space;
        if !space.owns_userfault(self.userfault) {
            return Err(Error::Invalid);
        }
        loop {
            let locked = space.lock_vma(at).ok_or(Error::NotMapped(at))?;
            let vma = locked.vma();
            // Checked with the VMA locked: a change that began earlier is visible, and a later
            // change waits.
            if self.userfault.state().is_changing() {
                return Err(Error::TryAgain);
            }
            if vma.end() < end.0 || !is_served(vma) {
                return Err(Error::NotMapped(at));
            }
            // Read once, because the compiler does not merge loads of an atomic word.
            let flags = vma.flags();
            let protects = flags.contains(MappingFlags::USERFAULT_WRITE_PROTECT);
            let refused = self.mode.contains(FillMode::WRITE_PROTECT) && !protects;
            // Write-protection without messages is for files, too, whose pages come from a pager.
            if refused || flags.contains(MappingFlags::REAPED) || !takes_pages(vma) {
                return Err(Error::Invalid);
            }
            if flags.contains(MappingFlags::SHARED) || vma.group_pointer().is_some() {
                return Ok(locked);
            }
            drop(locked);
            space.page_table.memory.retry::<_, Error>(|| Ok(prepare_group(space, at)?))?;
        }
    }

    /// Maps a filled folio or discards it. Returns the end of the folio, or `at` if a smaller one
    /// may fit.
    fn map_folio(
        &self,
        at: VirtAddr,
        end: VirtAddr,
        folio: FreshFolio<'m, P>,
    ) -> Result<VirtAddr, Error> {
        let memory = self.space.page_table.memory;
        let mut supplied = SuppliedPage { folio: *folio, fresh: Some(folio) };
        let done = memory.retry(|| {
            self.in_vma(at, end, |op| match memory_of(op.vma).filter(|_| op.vma.is_shared()) {
                Some(object) => op.fill_shared(object, at, self.mode, &mut supplied),
                None => op.fill_private(at, self.mode, &mut supplied),
            })
        });
        // None of the folio's pages is mapped.
        if let Some(folio) = supplied.fresh {
            folio.discard();
        }
        done
    }
}

impl<P: Platform> VmaOp<'_, '_, P> {
    /// The next batch at `at`: the largest folio that fits, or base pages.
    fn next_fill(&self, at: VirtAddr, end: VirtAddr) -> Result<NextFill, Error> {
        let (space, vma) = (self.space, self.vma);
        let end = self.end_of_object(at, end)?;
        if let Some(object) = memory_of(vma).filter(|_| vma.is_shared()) {
            return self.supplied_order(object, at, end).map(NextFill::Folio);
        }
        let order = match Fault::new(space, vma, at, Access::Write).vacant_orders() {
            Err(Occupant::Entry(entry, level))
                if level > Level::PTE && is_occupied::<P::Arch>(entry) =>
            {
                return Err(Error::Exists(at));
            }
            // As on Linux, an error of the source takes precedence over a page that is in the
            // way.
            Err(_) => return Ok(NextFill::Folio(Order::PAGE)),
            Ok(orders) if vma.is_anonymous() => largest_at(orders, at, end),
            Ok(_) => Order::PAGE,
        };
        if order > Order::PAGE {
            return Ok(NextFill::Folio(order));
        }
        Ok(NextFill::Pages(self.pages_together(at, end)))
    }

    /// Maps a fresh, filled folio. Returns the end of the folio, or `at` if a smaller one may fit.
    fn fill_private(
        &self,
        at: VirtAddr,
        mode: FillMode,
        supplied: &mut SuppliedPage<'_, P>,
    ) -> Result<VirtAddr, Failure> {
        let (space, vma, folio) = (self.space, self.vma, supplied.folio);
        let range = VirtRange::raw(at.0, at.0 + folio.order.bytes());
        self.lift_markers(range)?;
        let owner = AnonGroup::as_owner(vma.group());
        if let Some(fresh) = &supplied.fresh {
            fresh.set_owner(owner, vma.folio_index_at(at));
        }
        let fault = Fault::new(space, vma, at, Access::Write);
        self.before_end(at, range.end(), |end| {
            if end < range.end() {
                return Ok(at);
            }
            match fault.map_folio(range, &mut supplied.fresh, self.fill_attributes(mode)) {
                Ok(Next::Done(_)) => Ok(range.end()),
                Ok(_) if folio.order > Order::PAGE => Ok(at),
                Ok(_) => Err(Error::Exists(at).into()),
                Err(_) => Err(Failure::NoMemory),
            }
        })
    }

    /// Maps zero pages from `at` on, or the huge zero page where it fits. Returns the end of the
    /// mapped part.
    fn map_zeroes(&self, at: VirtAddr, end: VirtAddr) -> Result<VirtAddr, Failure> {
        let huge = folio_place(at, self.space.page_table.memory.huge_order());
        let fault = Fault::new(self.space, self.vma, at, Access::Read);
        self.before_end(at, end, |end| {
            if let Some(range) = huge.filter(|range| range.start() == at && range.end() <= end)
                && fault.zero_orders() != Orders::PAGE
                && let Some(Next::Done(Resolved::ZeroPage)) = fault.map_huge_zero_page()
            {
                return Ok(range.end());
            }
            self.install(VirtRange::raw(at.0, end.0), self.zero_entry())
        })
    }

    /// The attributes of the entries of filled pages.
    pub(super) fn fill_attributes(&self, mode: FillMode) -> MappingAttributes {
        let written = self.vma.flags().attributes().written();
        if mode.contains(FillMode::WRITE_PROTECT) { written.write_protected() } else { written }
    }
}

/// The distance by which [`UserfaultHandler::fill_copy_by`] copies ahead of the mapped pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillOrder {
    /// Several pages are copied before the first of them is mapped.
    Together,
    /// Each page is mapped before the next is copied, so the source may read pages that this call
    /// has already filled.
    PageByPage,
}

/// The next batch of a fill.
enum NextFill {
    /// A folio of this order.
    Folio(Order),
    /// This number of base pages; zero if an entry has since been filled.
    Pages(u32),
}

impl NextFill {
    fn order(&self) -> Order {
        match self {
            Self::Folio(order) => *order,
            Self::Pages(_) => Order::PAGE,
        }
    }
}

/// The largest of `orders` whose folio starts at `at` and does not extend beyond `end`.
fn largest_at(mut orders: Orders, at: VirtAddr, end: VirtAddr) -> Order {
    while let Some(order) = orders.take_largest() {
        let range = folio_place(at, order);
        if range.is_some_and(|range| range.start() == at && range.end() <= end) {
            return order;
        }
    }
    Order::PAGE
}
