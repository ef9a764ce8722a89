//! Swaps in all pages of one swap area (an address space's part of `swapoff(2)`), or of a range.

use core::convert::Infallible;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Kind};
use crate::error::{Error, Failure, FaultError};
use crate::interrupt;
use crate::object::{PageReady, Polled, PolledWait, Wait};
use crate::platform::Platform;
use crate::swap::{SwapArea, is_slot_full};
use crate::table::PageTable;
use crate::table::look;

use crate::space::fault::{Fault, Next, Reading, refused, slot_at};
use crate::space::sleep::MaySleep;
use crate::space::{Access, AddressSpace};

impl<P: Platform> AddressSpace<'_, P> {
    /// Swaps in every page that the address space has in the swap area, run by run, so that
    /// [`Memory::swap_off`](crate::Memory::swap_off) can remove the area. Call
    /// [`Memory::stop_swapping_to`](crate::Memory::stop_swapping_to) first; otherwise reclaim may
    /// swap pages out to the area during the call. A concurrent fork may copy entries to a child,
    /// which needs its own call. No lock is held between runs.
    ///
    /// Context: may sleep. Complexity: linear in the number of runs of swap entries, and in the
    /// number of entries of the mappings.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Fault`] if the area has lost a page, which stays lost;
    /// [`Error::Interrupted`] for a signal. Pages that were already swapped in stay in memory, and
    /// the other pages stay usable.
    pub fn swap_in_area(&self, area: &SwapArea) -> Result<(), Error> {
        let in_area = |device, _| device == area.number;
        bring_back(self, interrupt::check_any, |at| next_in_swap(self, at, in_area))
    }
}

/// Swaps in the pages of a range of one mapping. The caller holds no lock.
///
/// # Errors
/// As [`AddressSpace::swap_in_area`], but only a fatal signal interrupts it.
#[cold]
pub(in crate::space) fn swap_in_range<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
) -> Result<(), Error> {
    bring_back(space, interrupt::check, |at| next_of_range(space, range, at))
}

/// The first page of `range` from `at` on that is in swap.
fn next_of_range<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    at: VirtAddr,
) -> Option<VirtAddr> {
    let _guard = space.vmas.lock();
    let rest = VirtRange::raw(range.start().max(at).0, range.end().0);
    first_in_swap(&space.page_table, rest, |_, _| true)
}

/// The wait for a page in swap, of a call that swaps in a range in steps.
#[derive(Debug)]
pub(in crate::space) struct SwapInWait<'s, 'm, P: Platform> {
    space: &'s AddressSpace<'m, P>,
    page: VirtAddr,
    wait: PolledWait<'m, P>,
}

impl<'s, 'm, P: Platform> SwapInWait<'s, 'm, P> {
    /// Swaps in the pages of a range, up to the first for which it has to wait. Returns that wait;
    /// `None` if no page is left in swap. The caller holds no lock.
    ///
    /// # Errors
    /// As [`swap_in_range`].
    #[cold]
    pub(super) fn next(
        space: &'s AddressSpace<'m, P>,
        range: VirtRange,
    ) -> Result<Option<Self>, Error> {
        let mut at = range.start();
        Self::after(space, &mut at, interrupt::check, |at| next_of_range(space, range, at))
    }

    /// As [`SwapInWait::next`], for the pages from `at` on that are in the area. Advances `at` to
    /// the page that has to be waited for.
    ///
    /// # Errors
    /// As [`AddressSpace::swap_in_area`].
    pub(super) fn next_in_area(
        space: &'s AddressSpace<'m, P>,
        area: u8,
        at: &mut VirtAddr,
    ) -> Result<Option<Self>, Error> {
        let next = |at| next_in_swap(space, at, |device, _| device == area);
        Self::after(space, at, interrupt::check_any, next)
    }

    /// Swaps in each page that `next` returns, as [`bring_back`], up to the first for which it has
    /// to wait.
    fn after(
        space: &'s AddressSpace<'m, P>,
        at: &mut VirtAddr,
        check: fn(&P) -> Result<(), Error>,
        next: impl Fn(VirtAddr) -> Option<VirtAddr>,
    ) -> Result<Option<Self>, Error> {
        let wait = swap_in_each(space, at, check, next, |wait| Ok(Some(wait)))?;
        let of_call = |wait| PolledWait::of_call(space.page_table.memory, wait);
        Ok(wait.map(|wait| Self { space, page: *at, wait: of_call(wait) }))
    }

    /// Waits in the thread.
    ///
    /// # Errors
    /// As [`swap_in_range`].
    pub(super) fn wait(self) -> PageReady<'m, P> {
        let Self { space, page, wait } = self;
        match wait.into_wait() {
            Some(wait) => MaySleep::new(space).wait(wait),
            // The thread's own read of the page replaces the one that was given up.
            None => {
                Ok(swap_in_range(space, VirtRange::raw(page.0, page.0 + PAGE_SIZE))
                    .map(|()| None)?)
            }
        }
    }

    /// Continues the wait, as [`PolledWait::poll`].
    ///
    /// # Errors
    /// As [`PolledWait::poll`].
    pub(super) fn poll(&mut self) -> Result<Polled<'_, 'm, P>, Failure> {
        self.wait.poll(None)
    }
}

/// Swaps in the pages whose slots have the maximum number of entries, so that a child can share the
/// pages themselves. The caller holds no lock.
///
/// # Errors
/// As [`AddressSpace::swap_in_area`], but only a fatal signal interrupts it.
#[cold]
pub(super) fn swap_in_full_slots<P: Platform>(space: &AddressSpace<'_, P>) -> Result<(), Error> {
    let memory = space.page_table.memory;
    let is_full = |device, slot| is_slot_full(memory, device, slot);
    bring_back(space, interrupt::check, |at| next_in_swap(space, at, is_full))
}

/// Swaps in each page that `next` returns, until `next` returns `None` or `check` fails. `next`
/// receives the previous page.
fn bring_back<P: Platform>(
    space: &AddressSpace<'_, P>,
    check: fn(&P) -> Result<(), Error>,
    next: impl Fn(VirtAddr) -> Option<VirtAddr>,
) -> Result<(), Error> {
    let mut call = MaySleep::new(space);
    // Keeps a folio that a device has read in the cache until the folio is mapped.
    let mut _kept = None;
    swap_in_each(space, &mut VirtAddr(0), check, next, |wait| {
        _kept = call.wait(wait).map_err(refused)?;
        Ok(None::<Infallible>)
    })?;
    Ok(())
}

/// Swaps in each page that `next` returns for `at`, which starts the search and then becomes that
/// page. Calls `waits` with each event to wait for. Ends as soon as `waits` returns a value, or with
/// `None` once no page is left.
fn swap_in_each<P: Platform, W>(
    space: &AddressSpace<'_, P>,
    at: &mut VirtAddr,
    check: fn(&P) -> Result<(), Error>,
    next: impl Fn(VirtAddr) -> Option<VirtAddr>,
    mut waits: impl FnMut(Wait) -> Result<Option<W>, Failure<FaultError>>,
) -> Result<Option<W>, Error> {
    let memory = space.page_table.memory;
    while let Some(page) = next(*at) {
        check(space.platform())?;
        *at = page;
        let attempt = || bring_back_page(space, page)?.map_or(Ok(None), &mut waits);
        let stop = memory.retry(attempt).map_err(|error| error_at(page, error))?;
        if stop.is_some() {
            return Ok(stop);
        }
    }
    Ok(None)
}

/// The error of a call for a page that cannot be swapped in.
fn error_at(page: VirtAddr, error: FaultError) -> Error {
    if error == FaultError::OutOfMemory { Error::OutOfMemory } else { Error::Fault(page) }
}

/// Swaps in a page, or returns the event to wait for before the next attempt.
fn bring_back_page<P: Platform>(
    space: &AddressSpace<'_, P>,
    page: VirtAddr,
) -> Result<Option<Wait>, Failure<FaultError>> {
    let Some(locked) = space.lock_vma(page) else { return Ok(None) };
    let Some(slot) = slot_at(&space.page_table, page) else { return Ok(None) };
    let fault = Fault::new(space, locked.vma(), page, Access::Read);
    match fault.swap_in(slot, Reading::SwapOff)? {
        Next::Done(_) | Next::Again => Ok(None),
        Next::Wait(wait) => Ok(Some(wait)),
    }
}

/// The first page from `at` on whose area and slot `wanted` accepts.
fn next_in_swap<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    wanted: impl Fn(u8, u64) -> bool,
) -> Option<VirtAddr> {
    let vmas = space.vmas.lock();
    let mut at = at;
    while let Some(vma) = vmas.view().first_ending_after(at.0) {
        let range = VirtRange::raw(vma.start().max(at.0), vma.end());
        let found = first_in_swap(&space.page_table, range, &wanted);
        if found.is_some() {
            return found;
        }
        at = VirtAddr(vma.end());
    }
    None
}

/// The first page of `range` that is in swap, in an area and a slot that `wanted` accepts. The
/// caller holds the mutex.
fn first_in_swap<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    wanted: impl Fn(u8, u64) -> bool,
) -> Option<VirtAddr> {
    let mut found = None;
    look::look(page_table, range, |looked| {
        let (level, start) = (looked.node.level, looked.range.start());
        if level.kind(looked.raw) == Kind::Absent
            && let Some(Absent::Swap { device, slot, .. }) = P::Arch::decode_absent(looked.raw)
        {
            // A huge entry refers to consecutive slots.
            let first = slot + ((start.0 & (level.span() - 1)) >> PAGE_SHIFT);
            let page = (0..looked.range.pages()).find(|page| wanted(device, first + page));
            found = page.map(|page| start.offset(page << PAGE_SHIFT));
        }
        found.is_none()
    });
    found
}
