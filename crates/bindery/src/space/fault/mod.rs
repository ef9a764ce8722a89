//! Page faults: first touches, copies on write, and spurious faults.

mod copy_on_write;
mod first_touch;
mod look_again;
mod object;
mod swap_in;
mod zero_page;

use crate::addr::{Orders, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, KeyRights, Kind, Marker, Permissions};
use crate::error::{Failure, FaultError};
use crate::object::Awaited;
use crate::platform::{Invalidation, Platform, Tables};
use crate::table::{EntryAt, ReadSection};

use super::AddressSpace;
use super::userfault::Served;
use super::vma::{MappingFlags, Protection, Vma, VmaReadGuard};

pub(super) use copy_on_write::folio_range;
pub(super) use first_touch::{Occupant, folio_place, written_attributes};
pub(super) use object::object_attributes;
pub(super) use swap_in::{Reading, Slot};
pub(super) use zero_page::read_attributes;

/// The access that faulted.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{Access, AddressSpace, FaultError, Platform, Resolved};
///
/// fn touch<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> Result<Resolved, FaultError> {
///     space.fault(at, Access::Write)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

impl Access {
    /// Whether a thread with these rights may do so to memory of a mapping with these flags. Keys
    /// say nothing of fetches.
    #[inline]
    fn is_allowed(self, rights: KeyRights, flags: MappingFlags) -> bool {
        match self {
            Self::Read => rights.may_load(flags.key()),
            Self::Write => rights.may_store(flags.key()),
            Self::Execute => true,
        }
    }

    fn protection(self) -> Protection {
        match self {
            Self::Read => Protection::READ,
            Self::Write => Protection::WRITE,
            Self::Execute => Protection::EXECUTE,
        }
    }

    pub(super) fn permission(self) -> Permissions {
        match self {
            Self::Read => Permissions::READ,
            Self::Write => Permissions::WRITE,
            Self::Execute => Permissions::EXECUTE,
        }
    }
}

/// Who makes the access that faulted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// A program.
    Program,
    /// The kernel, on behalf of one.
    Kernel,
}

/// A fault.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) addr: VirtAddr,
    pub(super) page: VirtAddr,
    pub(super) access: Access,
    rights: KeyRights,
    pub(super) origin: Origin,
}

/// A page, and the access that it is wanted for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageAccess {
    pub(super) page: VirtAddr,
    pub(super) access: Access,
}

/// How a fault was resolved, so that the access can be repeated.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{Access, AddressSpace, FaultError, Platform, Resolved};
///
/// /// Whether a touch of the page was a major fault, as `getrusage(2)` counts them.
/// fn is_major<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> Result<bool, FaultError> {
///     Ok(matches!(space.fault(at, Access::Read)?, Resolved::FromSwap(_)))
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Resolved {
    /// New zeroed memory is mapped in this range, which holds the address.
    New(VirtRange),
    /// The shared zero page is mapped, or the huge one around the address.
    ZeroPage,
    /// The page was copied, because others see it too.
    Copied,
    /// Pages of the object that backs the mapping are mapped in this range, which holds the
    /// address.
    Mapped(VirtRange),
    /// Pages are mapped in this range, which holds the address, whose content was in swap.
    FromSwap(VirtRange),
    /// The page is exclusive, or shared on purpose, and may be written now.
    MadeWritable,
    /// The entry allows the access: the TLB had an older one, or another CPU was faster.
    Spurious,
}

/// What to do about an entry that is not empty.
pub(super) enum Step {
    Done(Resolved),
    /// The page cannot be mapped.
    Refused(FaultError),
    /// The entry is empty by now: begin again.
    Again,
    /// Every page here that is exclusive, or shared on purpose, may become writable.
    Reuse(VirtRange),
    /// This page may become writable, and it has to be noted that it was written.
    Note,
    /// The page must be copied.
    Copy,
    /// A huge folio must come into the place of the huge zero page.
    FillHuge,
    /// The page is write-protected, and no userfaultfd is to be told of a write to it.
    Lift,
    /// A page that is not there is write-protected, and is read.
    MapProtected,
    /// The object does not have the page, or has it stored at the moment: begin again when this was
    /// waited for, without locks.
    Await(Awaited),
    /// No block for a large folio is free: begin again when memory was collected, without locks.
    Collect,
}

impl Step {
    /// The step, or why there is none.
    fn accepted(self) -> Result<Self, FaultError> {
        if let Self::Refused(error) = self { Err(error) } else { Ok(self) }
    }
}

/// What came of a fault whose VMA was locked.
enum Outcome {
    Resolved(Resolved),
    /// Let the VMA go, wait, and come again.
    Await(Awaited),
    /// Let the VMA go, collect memory, and come again.
    Collect,
}

/// How often a fault has looked for a large folio.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tries {
    /// Memory may be collected for it.
    First,
    /// That was done already.
    Last,
}

/// The fault for an object's error.
pub(super) fn refused(failure: Failure) -> Failure<FaultError> {
    failure.map(|_| FaultError::Bus)
}

/// Whether a VMA with these flags allows the access.
#[inline(always)]
fn check_access<A: Arch>(fault: &Fault, flags: MappingFlags) -> Result<(), FaultError> {
    let &Fault { access, rights, .. } = fault;
    if !access.is_allowed(rights, flags) {
        return Err(FaultError::ProtectionKey(flags.key()));
    }
    if flags.contains(MappingFlags::REAPED) {
        return Err(FaultError::Bus);
    }
    let allowed = flags.protection();
    if !allowed.contains(access.protection()) {
        // What the entries of such a mapping say may imply more than was asked for.
        let permissions = allowed.permissions() | Permissions::USER;
        if !A::implied(permissions).contains(access.permission()) {
            return Err(FaultError::Protection);
        }
    }
    Ok(())
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Resolves a fault at `addr`, so that the access can be repeated.
    ///
    /// A first write takes the largest folio that the policy, the mapping and its neighbors allow.
    /// A first read maps the zero page, the huge one if that is used and fits, or what the object
    /// has there and around it. A write to a private page that others see too copies it. An access
    /// just below a mapping that grows down extends it. While a file's pager works, no lock is
    /// held, and the mapping may change; then the fault starts again.
    ///
    /// Context: may sleep. Complexity: logarithmic in the mappings, linear in the pages of the
    /// folio. For a file, once more for each call on it that drops the page meanwhile, or has it
    /// stored.
    ///
    /// # Errors
    /// As [`FaultError`] says; an error changes nothing.
    #[inline]
    pub fn fault(&self, addr: VirtAddr, access: Access) -> Result<Resolved, FaultError> {
        self.fault_with_keys(addr, access, KeyRights::ALL)
    }

    /// As [`AddressSpace::fault`], for a thread with these `rights` to the memory of each
    /// protection key.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As there; [`FaultError::ProtectionKey`], which comes before all refusals of the mapping
    /// itself.
    #[inline]
    pub fn fault_with_keys(
        &self,
        addr: VirtAddr,
        access: Access,
        rights: KeyRights,
    ) -> Result<Resolved, FaultError> {
        self.fault_from(addr, access, rights, Origin::Program)
    }

    /// As [`AddressSpace::fault_with_keys`], of an access that the kernel makes on behalf of the
    /// program, in a system call. Of a userfaultfd, it is served only if that serves the kernel
    /// ([`crate::UserfaultScope`]), and only a fatal signal ends the wait for its handler.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn fault_for_kernel(
        &self,
        addr: VirtAddr,
        access: Access,
        rights: KeyRights,
    ) -> Result<Resolved, FaultError> {
        self.fault_from(addr, access, rights, Origin::Kernel)
    }

    fn fault_from(
        &self,
        addr: VirtAddr,
        access: Access,
        rights: KeyRights,
        origin: Origin,
    ) -> Result<Resolved, FaultError> {
        if addr >= self.limit() {
            return Err(FaultError::NotMapped);
        }
        let page = addr.align_down(PAGE_SIZE);
        let mut locked = self.try_lock_vma(page);
        // The commonest fault, in a function that does nothing else.
        if access == Access::Write
            && let Some(guard) = locked
        {
            let (vma, flags) = (guard.vma(), guard.vma().flags());
            // Folios for executable mappings are synchronized on the longer way, which costs no
            // further test here.
            let asked = MappingFlags::WRITE
                | MappingFlags::SHARED
                | MappingFlags::REAPED
                | MappingFlags::USERFAULT_MISSING;
            let asked =
                if P::Arch::COHERENT_FETCHES { asked } else { asked | MappingFlags::EXECUTE };
            if flags & asked == MappingFlags::WRITE
                && vma.is_anonymous()
                && vma.group_pointer().is_some()
                && access.is_allowed(rights, flags)
                && let Some(resolved) = self.touch_small(vma, page, flags)
            {
                return Ok(resolved);
            }
            locked = Some(guard);
        }
        let fault = Fault { addr, page, access, rights, origin };
        self.page_table.memory.retry(|| self.fault_beside(&fault, locked.take()))
    }

    /// As [`AddressSpace::fault`], of any kind; `locked` may be the VMA of the page, in which the
    /// commonest fault was tried already.
    #[inline(never)]
    fn fault_beside(
        &self,
        fault: &Fault,
        mut locked: Option<VmaReadGuard<'_, P>>,
    ) -> Result<Resolved, Failure<FaultError>> {
        let &Fault { page, access, .. } = fault;
        // What was fetched for the page stays until it is mapped.
        let mut _kept = None;
        let mut tries = Tries::First;
        loop {
            let touched = locked.is_some();
            let Some(mut locked) = locked.take().or_else(|| self.lock_vma(page)) else {
                self.grow_down_to(page)?;
                continue;
            };
            let vma = locked.vma();
            let flags = vma.flags();
            check_access::<P::Arch>(fault, flags)?;
            if flags.intersects(MappingFlags::USERFAULT) {
                match self.serve_by_userfault(locked, fault) {
                    Served::GoOn(still) => locked = still,
                    Served::LookAgain => continue,
                    Served::Mapped => return Ok(Resolved::Spurious),
                    Served::Refused(error) => return Err(error.into()),
                }
            }
            let private = !flags.contains(MappingFlags::SHARED);
            if access == Access::Write && private {
                if vma.group_pointer().is_none() {
                    if vma.has(MappingFlags::MAYBE_GUARDS) && self.is_guarded(page) {
                        // As Linux: a guard leaves no trace of who ran into it.
                        return Err(FaultError::NotMapped.into());
                    }
                    // Once for each mapping: who owns its pages is settled under the mutex.
                    drop(locked);
                    self.prepare_group(page)?;
                    continue;
                }
                if !touched
                    && vma.is_anonymous()
                    && (P::Arch::COHERENT_FETCHES || !flags.contains(MappingFlags::EXECUTE))
                    && let Some(resolved) = self.touch_new(vma, page, flags)
                {
                    return Ok(resolved);
                }
            }
            let outcome = match vma.object() {
                None => {
                    let fill = |orders| self.first_touch(vma, page, access, orders, tries);
                    self.resolve(vma, PageAccess { page, access }, tries, fill)
                }
                // Keeps the object's pages where they are until they are mapped.
                Some(object) => object.invalidate_lock.with_read(self.platform(), |proof| {
                    let fill = |_| self.map_object(vma, object, page, access, proof);
                    self.resolve(vma, PageAccess { page, access }, tries, fill)
                }),
            };
            let awaited = match outcome? {
                Outcome::Resolved(resolved) => return Ok(resolved),
                Outcome::Await(awaited) => awaited,
                Outcome::Collect => {
                    drop(locked);
                    self.page_table.memory.collect();
                    tries = Tries::Last;
                    continue;
                }
            };
            let object = self.object_of(vma);
            drop(locked);
            if let Some(object) = object {
                _kept = awaited.wait(&object).map_err(refused)?;
                if _kept.is_some() {
                    self.page_table.memory.note_major_fault();
                }
            }
        }
    }

    /// Resolves a fault in a locked VMA; `fill` maps what is missing.
    fn resolve(
        &self,
        vma: &Vma,
        wanted: PageAccess,
        tries: Tries,
        fill: impl Fn(Orders) -> Result<Step, Failure<FaultError>>,
    ) -> Result<Outcome, Failure<FaultError>> {
        let PageAccess { page, access } = wanted;
        loop {
            let step = match self.vacant_orders(vma, page, access) {
                Ok(orders) => fill(orders)?,
                // What it says now counts: it is looked at again where it is replaced.
                Err(Occupant::Slot(slot)) => self.swap_in(vma, wanted, slot, Reading::Fault)?,
                Err(Occupant::Entry(..)) => self.look_again(vma, page, access)?,
            };
            let step = match step {
                Step::Reuse(range) => Step::Done(self.reuse(vma, page, range)?),
                Step::Note => self.note_write(vma, page)?,
                Step::Copy => self.copy(vma, page)?.map_or(Step::Again, Step::Done),
                Step::FillHuge => self.fill_huge(vma, page, tries)?,
                Step::Lift => self.lift_protection(page)?,
                Step::MapProtected => self.map_protected_page(vma, page)?,
                step @ (Step::Done(_)
                | Step::Refused(_)
                | Step::Again
                | Step::Await(_)
                | Step::Collect) => step,
            };
            match step {
                Step::Done(resolved) => return Ok(Outcome::Resolved(resolved)),
                Step::Refused(error) => return Err(error.into()),
                Step::Await(awaited) => return Ok(Outcome::Await(awaited)),
                Step::Collect => return Ok(Outcome::Collect),
                Step::Again
                | Step::Reuse(_)
                | Step::Note
                | Step::Copy
                | Step::FillHuge
                | Step::Lift
                | Step::MapProtected => {}
            }
        }
    }

    /// Whether `page` has a guard marker, whose VMA is locked.
    fn is_guarded(&self, page: VirtAddr) -> bool {
        let section = ReadSection::enter(self.platform());
        let EntryAt { node, entry, .. } =
            self.page_table.peek(&section, page, &mut crate::stats::Counts::default());
        node.level.kind(entry) == Kind::Absent
            && P::Arch::decode_absent(entry) == Some(Absent::Marker(Marker::Guard))
    }

    /// The VMA that holds `addr`, locked for reading.
    #[inline]
    pub(super) fn lock_vma(&self, addr: VirtAddr) -> Option<VmaReadGuard<'_, P>> {
        self.try_lock_vma(addr).or_else(|| self.lock_vma_of_writer(addr))
    }

    /// As [`AddressSpace::lock_vma`], unless a writer is at work.
    #[inline(always)]
    pub(super) fn try_lock_vma(&self, addr: VirtAddr) -> Option<VmaReadGuard<'_, P>> {
        let _section = ReadSection::enter(self.platform());
        // Reading locks the VMA into the index, so it outlives the section.
        let vma = self.vma(self.vmas.find_at_or_before(addr.0)?);
        let locked = vma.try_read(self.platform())?;
        vma.range().contains(addr).then_some(locked)
    }

    /// A writer is at work, or there is really nothing: the mutex knows.
    #[cold]
    fn lock_vma_of_writer(&self, addr: VirtAddr) -> Option<VmaReadGuard<'_, P>> {
        let mm = self.mmap_lock.lock();
        let vma = self.first_ending_after(&mm, addr.0).filter(|vma| vma.start() <= addr.0);
        let locked = vma.and_then(|vma| vma.try_read(self.platform()));
        drop(mm);
        locked
    }

    /// New entries are written: the walkers may see them now. Where the MMU may remember that
    /// there was nothing, this CPU flushes at once; others fault once more.
    pub(super) fn published(&self, range: VirtRange) {
        self.platform().publish_entries();
        if P::Arch::INVALID_MAY_BE_CACHED {
            self.forget_locally(range);
        }
    }

    fn forget_locally(&self, range: VirtRange) {
        // A remembered "nothing there" may concern an entry of any level.
        let tables =
            if P::Arch::INVALID_MAY_BE_CACHED { Tables::Changed } else { Tables::Unchanged };
        let what = Invalidation { range, stride: PAGE_SIZE, tables };
        self.platform().invalidate_local(self.page_table.root, &what);
    }
}
