//! Page faults: first touches, copy-on-write, pages of objects, pages in swap, and spurious faults.
//!
//! | file | contents |
//! |---|---|
//! | `slow` | [`Fault`]: a fault in a locked VMA; the loop of lock, resolve, wait, retry |
//! | `present`, `decision` | a non-empty entry; the decision about it, as a pure function |
//! | `first_touch`, `zero_page` | empty entries of anonymous memory |
//! | `object` | empty entries of mappings of objects |
//! | `frames` | mappings of frames outside the core's memory |
//! | `reuse` | makes private pages that no other process maps writable, and those that follow |
//! | `copy_on_write`, `unshare` | private pages: claim or copy; copies for pins |
//! | `swap_in`, `read_in` | swap entries: pages in the swap cache; reads of slots |
//! | `wait` | the wait, with the VMA unlocked |
//! | `try_fault` | attempts that do not wait; waits by another thread; calls in steps |
//! | `lock_wait` | waits for locks, polled |

mod copy_on_write;
mod decision;
mod first_touch;
mod frames;
mod lock_wait;
mod object;
mod present;
mod read_in;
mod reuse;
mod slow;
mod swap_in;
mod try_fault;
mod unshare;
mod wait;
mod zero_page;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, KeyRights, Permissions};
use crate::error::{Error, Failure, FaultError};
use crate::platform::Platform;

use crate::object::Wait;

use super::AddressSpace;
use crate::vma::{MappingFlags, Protection, VmaReadGuard};
pub use try_fault::{FaultPoll, FaultReady, FaultWait, TriedFault};

pub(super) use copy_on_write::folio_range;
pub(super) use first_touch::{Occupant, folio_place};
pub(super) use lock_wait::VmaLockWait;
pub(super) use object::{object_attributes, stopped};
pub(super) use present::{is_write_protecting, record_access, record_forced_write};
pub(super) use slow::{Fault, Next, Stepped};
pub(super) use swap_in::{FaultSlot, Reading, slot_at};
pub(super) use try_fault::step_fault;
pub(super) use unshare::{mapped_frame, unshare};
pub(super) use wait::wait_for_known;

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
    /// Whether a thread with these rights may access memory of a mapping with these flags.
    /// Protection keys do not restrict fetches.
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

/// The originator of the access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// A program.
    Program,
    /// The kernel, on behalf of a program.
    Kernel,
    /// A debugger, which the protection of a mapping does not stop.
    Debugger,
}

/// An access that faulted.
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultRequest {
    pub(super) addr: VirtAddr,
    pub(super) page: VirtAddr,
    pub(super) access: Access,
    rights: KeyRights,
    pub(super) origin: Origin,
}

/// The way in which a fault was resolved. The access can be retried.
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
    /// New zeroed memory is mapped in this range, which contains the address.
    New(VirtRange),
    /// The shared zero page is mapped, or the huge zero page around the address.
    ZeroPage,
    /// The page was copied, because other mappings also show it.
    Copied,
    /// Pages of the object behind the mapping are mapped in this range, which contains the address.
    Mapped(VirtRange),
    /// Pages whose content was in swap are mapped in this range, which contains the address.
    FromSwap(VirtRange),
    /// The page is exclusive or shared on purpose, and may now be written.
    MadeWritable,
    /// The entry allows the access: the TLB had an older entry, or another CPU was faster.
    Spurious,
}

/// The fault for an object's error.
pub(super) fn refused(failure: Failure) -> Failure<FaultError> {
    failure.map(
        |error| {
            if error == Error::Interrupted { FaultError::Interrupted } else { FaultError::Bus }
        },
    )
}

/// Whether a VMA with these flags allows the access.
#[inline(always)]
pub(super) fn check_access<A: Arch>(
    request: &FaultRequest,
    flags: MappingFlags,
) -> Result<(), FaultError> {
    let &FaultRequest { access, rights, .. } = request;
    if !access.is_allowed(rights, flags) {
        return Err(FaultError::ProtectionKey(flags.key()));
    }
    if flags.contains(MappingFlags::REAPED) {
        return Err(FaultError::Bus);
    }
    if !allows::<A>(flags, access) && request.origin != Origin::Debugger {
        return Err(FaultError::Protection);
    }
    Ok(())
}

/// Whether the protection of a VMA with these flags allows the access.
#[inline(always)]
pub(super) fn allows<A: Arch>(flags: MappingFlags, access: Access) -> bool {
    let allowed = flags.protection();
    // The entries of a mapping may allow more than the protection specifies.
    allowed.contains(access.protection())
        || A::implied(allowed.permissions() | Permissions::USER).contains(access.permission())
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Resolves a fault at `addr`, so that the access can be retried.
    ///
    /// A first write gets the largest folio that the policy, the mapping and its neighbors allow. A
    /// first read maps the zero page, or the huge zero page if it is in use and fits, or the
    /// object's page and the pages around it. A write to a private page with other mappings copies
    /// the page. An access just below a mapping that grows down extends the mapping. No lock is
    /// held while a file's pager works. If the mapping changes in that time, the fault starts
    /// again.
    ///
    /// Context: may sleep. Complexity: logarithmic in the number of mappings, linear in the number
    /// of pages in the folio. For a file, once more for each concurrent call that drops or stores
    /// the page.
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
    /// The errors of [`AddressSpace::fault`]; [`FaultError::ProtectionKey`], which takes precedence
    /// over all refusals of the mapping itself.
    #[inline]
    pub fn fault_with_keys(
        &self,
        addr: VirtAddr,
        access: Access,
        rights: KeyRights,
    ) -> Result<Resolved, FaultError> {
        handle_fault(self, addr, access, rights, Origin::Program)
    }

    /// As [`AddressSpace::fault_with_keys`], for an access that the kernel makes on behalf of the
    /// program in a system call. A userfaultfd serves the fault only if it serves the kernel
    /// ([`crate::UserfaultScope`]), and only a fatal signal ends the wait for its handler.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::fault_with_keys`].
    #[inline]
    pub fn fault_for_kernel(
        &self,
        addr: VirtAddr,
        access: Access,
        rights: KeyRights,
    ) -> Result<Resolved, FaultError> {
        handle_fault(self, addr, access, rights, Origin::Kernel)
    }

    /// Maps the page at `addr` as a load would, in a mapping that need not allow loads.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::fault`]; [`FaultError::Protection`] if the page is mapped by now.
    pub(super) fn map_by_force(&self, addr: VirtAddr) -> Result<Resolved, FaultError> {
        handle_fault(self, addr, Access::Read, KeyRights::ALL, Origin::Debugger)
    }

    /// The VMA that contains `addr`, locked for reading.
    #[inline]
    pub(super) fn lock_vma(&self, addr: VirtAddr) -> Option<VmaReadGuard<'_, P>> {
        self.vmas.read(self.platform(), addr)
    }
}

/// Resolves a fault at `addr`.
fn handle_fault<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: VirtAddr,
    access: Access,
    rights: KeyRights,
    origin: Origin,
) -> Result<Resolved, FaultError> {
    if addr >= space.limit() {
        return Err(FaultError::NotMapped);
    }
    let page = addr.align_down(PAGE_SIZE);
    let mut locked = space.vmas.try_read(space.platform(), page);
    // The most frequent fault, in a function dedicated to it.
    if access == Access::Write
        && let Some(guard) = locked
    {
        let flags = guard.vma().flags();
        // The slow path synchronizes the folios of executable mappings, so no further test is
        // needed here.
        let asked = MappingFlags::WRITE
            | MappingFlags::SHARED
            | MappingFlags::REAPED
            | MappingFlags::USERFAULT_MISSING;
        let asked = if P::Arch::COHERENT_FETCHES { asked } else { asked | MappingFlags::EXECUTE };
        if flags & asked == MappingFlags::WRITE
            && guard.vma().is_anonymous()
            && guard.vma().group_pointer().is_some()
            && access.is_allowed(rights, flags)
            && let Some(resolved) = Fault::new(space, guard.vma(), page, access).touch_small(flags)
        {
            return Ok(resolved);
        }
        locked = Some(guard);
    }
    let request = FaultRequest { addr, page, access, rights, origin };
    space.page_table.memory.retry(|| slow::fault_slow(space, &request, locked.take()))
}
