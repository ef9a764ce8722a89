//! A fault in a locked VMA, and the loop that locks, resolves, waits and retries.

use crate::Memory;
use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Kind, Level, Marker};
use crate::error::{Failure, FaultError};
use crate::object::{ObjectState, PagesStay};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::stack_growth::grow_down_to;
use crate::space::stack_growth::prepare_group;
use crate::space::userfault::{Served, serve_by_userfault};
use crate::stats::Counts;
use crate::table::cursor::Cursor;
use crate::table::locking::Depth;
use crate::table::{EntryAt, PageTable, ReadSection};
use crate::vma::{MappingFlags, Vma, VmaReadGuard};

use super::wait::wait_unlocked;
use super::{Access, FaultRequest, Occupant, Reading, Resolved, Wait, check_access};

/// A fault on a page of a VMA that stays locked, at least for reading, for the lifetime of this
/// value.
pub(in crate::space) struct Fault<'f, 'm, P: Platform> {
    pub(in crate::space) space: &'f AddressSpace<'m, P>,
    pub(in crate::space) vma: &'f Vma,
    pub(in crate::space) page: VirtAddr,
    pub(in crate::space) access: Access,
    pub(super) tries: Tries,
}

/// The attempts of a fault to find a large folio.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tries {
    /// Memory may be collected for the folio.
    First,
    /// Memory has already been collected, or must not be.
    Last,
}

/// The result of one step of a fault.
pub(in crate::space) enum Next {
    /// The access can be retried.
    Done(Resolved),
    /// The entry has changed since it was read: read it again.
    Again,
    /// Unlock the VMA, wait, and start over.
    Wait(Wait),
}

/// The result of one step of a fault, or the reason why the fault fails.
pub(in crate::space) type Stepped = Result<Next, Failure<FaultError>>;

/// Resolves a fault of any kind. `locked` may be the VMA of the page, in which the fast path was
/// already tried.
#[inline(never)]
pub(super) fn fault_slow<P: Platform>(
    space: &AddressSpace<'_, P>,
    request: &FaultRequest,
    mut locked: Option<VmaReadGuard<'_, P>>,
) -> Result<Resolved, Failure<FaultError>> {
    let &FaultRequest { page, access, .. } = request;
    // Keeps the folio that the fault has waited for until it is mapped.
    let mut _kept = None;
    let mut tries = Tries::First;
    loop {
        let touched = locked.is_some();
        let Some(mut locked) = locked.take().or_else(|| space.lock_vma(page)) else {
            grow_down_to(space, page)?;
            continue;
        };
        let flags = locked.vma().flags();
        check_access::<P::Arch>(request, flags)?;
        if flags.intersects(MappingFlags::USERFAULT) {
            match serve_by_userfault(space, locked, request)? {
                Served::Unserved(still) => locked = still,
                Served::Again => continue,
                Served::Mapped => return Ok(Resolved::Spurious),
            }
        }
        let fault = Fault { space, vma: locked.vma(), page, access, tries };
        if access == Access::Write && !flags.contains(MappingFlags::SHARED) {
            if fault.vma.group_pointer().is_none() {
                if flags.contains(MappingFlags::MAYBE_GUARDS) && fault.is_guarded() {
                    // As on Linux, an access to a guard does not give the mapping an anon group.
                    return Err(FaultError::NotMapped.into());
                }
                // Once per mapping, because the mutex guards the mapping's anon group.
                drop(locked);
                prepare_group(space, page)?;
                continue;
            }
            if !touched
                && fault.vma.is_anonymous()
                && (P::Arch::COHERENT_FETCHES || !flags.contains(MappingFlags::EXECUTE))
                && let Some(resolved) = fault.touch_new(flags)
            {
                return Ok(resolved);
            }
        }
        match fault.resolve()? {
            Next::Done(resolved) => return Ok(resolved),
            Next::Again => {}
            Next::Wait(wait) => {
                if matches!(wait, Wait::Memory) {
                    tries = Tries::Last;
                }
                // A folio that was waited for is kept until it is mapped.
                _kept = wait_unlocked(space, locked, wait)?.or(_kept);
            }
        }
    }
}

impl<'f, 'm, P: Platform> Fault<'f, 'm, P> {
    /// A fault that collects no memory for a large folio.
    #[inline(always)]
    pub(in crate::space) fn new(
        space: &'f AddressSpace<'m, P>,
        vma: &'f Vma,
        page: VirtAddr,
        access: Access,
    ) -> Self {
        Self { space, vma, page, access, tries: Tries::Last }
    }

    /// Resolves the fault, unless it has to wait.
    #[inline(always)]
    pub(super) fn resolve(&self) -> Stepped {
        let Some(object) = self.vma.object() else { return self.resolve_in(None) };
        // Keeps the object's pages from being dropped until they are mapped.
        object
            .invalidate_lock
            .with_read(self.memory().platform(), |stay| self.resolve_in(Some((object, stay))))
    }

    /// As [`Fault::resolve`]; `None` if a writer holds the lock of the object.
    pub(super) fn try_resolve(&self) -> Result<Option<Next>, Failure<FaultError>> {
        let Some(object) = self.vma.object() else { return self.resolve_in(None).map(Some) };
        object
            .invalidate_lock
            .try_with_read(self.memory().platform(), |stay| self.resolve_in(Some((object, stay))))
            .transpose()
    }

    /// As [`Fault::resolve`], for anonymous memory, or for an object whose pages are kept.
    // Always inlined, once for each caller: otherwise the result would be copied, at the expense of
    // each fault on a page in swap.
    #[inline(always)]
    fn resolve_in(&self, object: Option<(&ObjectState, &PagesStay)>) -> Stepped {
        loop {
            // Returned unchanged: an unpacked result would be moved word by word.
            let stepped = match (self.vacant_orders(), object) {
                (Ok(orders), None) => self.first_touch(orders),
                (Ok(_), Some((object, stay))) => self.map_object(object, stay),
                // The slot is a copy, read without locks: the entry is compared when it is
                // replaced.
                (Err(Occupant::Slot(slot)), _) => self.swap_in(slot, Reading::Fault),
                (Err(Occupant::Entry(..)), None) => self.handle_present_entry(),
                (Err(Occupant::Entry(entry, level)), Some(_)) => {
                    let reused = self.reuse_copy(entry, level);
                    reused.map_or_else(|| self.handle_present_entry(), |done| Ok(Next::Done(done)))
                }
            };
            if !matches!(stepped, Ok(Next::Again)) {
                return stepped;
            }
        }
    }

    /// Whether the page has a guard marker.
    pub(super) fn is_guarded(&self) -> bool {
        let section = self.read_section();
        let EntryAt { node, entry, .. } =
            self.page_table().peek(&section, self.page, &mut Counts::default());
        node.level.kind(entry) == Kind::Absent
            && P::Arch::decode_absent(entry) == Some(Absent::Marker(Marker::Guard))
    }

    #[inline(always)]
    pub(super) fn memory(&self) -> &'m Memory<P> {
        self.space.page_table.memory
    }

    #[inline(always)]
    pub(super) fn page_table(&self) -> &'f PageTable<'m, P> {
        &self.space.page_table
    }

    /// The range of the page.
    #[inline(always)]
    pub(super) fn range(&self) -> VirtRange {
        VirtRange::raw(self.page.0, self.page.0 + PAGE_SIZE)
    }

    /// Enters a read section. No step waits while the section lives, since it borrows the fault,
    /// which borrows the guard of the VMA.
    #[inline(always)]
    pub(in crate::space) fn read_section(&self) -> ReadSection<'_, P> {
        self.page_table().read_section()
    }

    /// Locks the table of the page. No step waits while the cursor lives, for the same reason.
    #[inline(always)]
    pub(in crate::space) fn cursor<'a>(
        &'a self,
        section: &'a ReadSection<'_, P>,
    ) -> Cursor<'a, 'm, P> {
        self.cursor_of(section, self.range())
    }

    /// As [`Fault::cursor`], for a range around the page.
    #[inline(always)]
    pub(super) fn cursor_of<'a>(
        &'a self,
        section: &'a ReadSection<'_, P>,
        range: VirtRange,
    ) -> Cursor<'a, 'm, P> {
        self.page_table().cursor(section, range, Depth::Floor(Level::PTE))
    }
}
