//! Populates ranges: maps pages before the first access.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, KeyRights};
use crate::error::{Error, FaultError};
use crate::interrupt;
use crate::platform::Platform;
use crate::table::look;

use crate::space::AddressSpace;
use crate::space::fault::{Access, Resolved};
use crate::vma::{MappingFlags, Protection, Vma};

/// The number of level-1 tables searched for missing pages between two checks for a fatal signal.
const PIECE: u64 = 2;

/// The access that populated pages must allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::space) enum Want {
    /// The access that `mlock` prepares: writes to private writable mappings, reads of others.
    Usual,
    /// Reads (`MADV_POPULATE_READ`).
    Readable,
    /// Writes; pages are mapped as if written (`MADV_POPULATE_WRITE`).
    Writable,
}

impl Want {
    /// The access to fault pages of a mapping with; `None` if the mapping does not allow it.
    fn access(self, vma: &Vma) -> Option<Access> {
        let protection = vma.protection();
        let readable = protection.contains(Protection::READ).then_some(Access::Read);
        let writable = protection.contains(Protection::WRITE).then_some(Access::Write);
        let executable = protection.contains(Protection::EXECUTE).then_some(Access::Execute);
        match self {
            Self::Usual if !vma.is_shared() && writable.is_some() => writable,
            Self::Usual => readable.or(writable).or(executable),
            Self::Readable => readable,
            Self::Writable => writable,
        }
    }
}

/// Populates `range` as `mlock` does.
pub(in crate::space) fn populate<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
) -> Result<(), Error> {
    populate_as(space, range, Want::Usual)
}

/// Populates `range`. Skips present pages in runs. Stops at the first page that cannot be
/// mapped. Also stops for a fatal signal, which it checks for before each fault, and before
/// each [`PIECE`] tables that it searches.
pub(in crate::space) fn populate_as<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    want: Want,
) -> Result<(), Error> {
    let mut at = range.start();
    while at < range.end() {
        let (part, access) = {
            let vmas = space.vmas.lock();
            let Some(vma) = vmas.view().at(at) else { return Err(Error::NotMapped(at)) };
            if vma.has(MappingFlags::SECRET) {
                // Linux populates by pinning pages, and secret pages cannot be pinned.
                return Err(if want == Want::Usual { Error::Fault(at) } else { Error::Invalid });
            }
            let part = VirtRange::raw(at.0, vma.end().min(range.end().0));
            let frames = vma.has(MappingFlags::FRAMES);
            if frames && want != Want::Usual {
                return Err(Error::Invalid);
            }
            if want == Want::Usual && (frames || vma.has(MappingFlags::LOCK_ON_FAULT)) {
                at = part.end();
                continue;
            }
            (part, want.access(vma).ok_or(Error::Invalid))
        };
        let access = match (access, want) {
            (Ok(access), _) => access,
            (Err(_), Want::Usual) => return Err(Error::Fault(at)),
            (Err(error), _) => return Err(error),
        };
        at = populate_part(space, part, access)?;
    }
    Ok(())
}

/// Maps all of a new mapping of frames that are not the core's, as far as their source has them.
pub(in crate::space) fn populate_frames<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    flags: MappingFlags,
) -> Result<(), Error> {
    let protection = flags.protection();
    let shared = flags.contains(MappingFlags::SHARED);
    // A write to a private mapping would copy the page.
    let access = if protection.contains(Protection::WRITE) && shared {
        Access::Write
    } else if protection.contains(Protection::READ) {
        Access::Read
    } else if protection.contains(Protection::EXECUTE) {
        Access::Execute
    } else {
        return Ok(());
    };
    populate_part(space, range, access).map(|_| ())
}

/// Faults the missing pages of `part` in. `part` lay in one mapping when it was looked up.
fn populate_part<P: Platform>(
    space: &AddressSpace<'_, P>,
    part: VirtRange,
    access: Access,
) -> Result<VirtAddr, Error> {
    let mut at = part.start();
    while at < part.end() {
        interrupt::check(space.platform())?;
        let piece = PIECE * P::Arch::PMD.span();
        let end = VirtAddr(part.end().0.min(at.0.saturating_add(piece)));
        at =
            look::skip_present(&space.page_table, VirtRange::raw(at.0, end.0), access.permission());
        if at >= end {
            continue;
        }
        at = match space.fault_for_kernel(at, access, KeyRights::ALL) {
            Ok(Resolved::New(range) | Resolved::Mapped(range)) => range.end().max(at),
            Ok(_) => at.offset(PAGE_SIZE),
            Err(FaultError::OutOfMemory) => return Err(Error::OutOfMemory),
            Err(FaultError::Interrupted) => return Err(Error::Interrupted),
            Err(FaultError::Bus) => return Err(Error::Fault(at)),
            Err(FaultError::NotMapped | FaultError::Protection | FaultError::ProtectionKey(_)) => {
                return Err(Error::Fault(at));
            }
        };
    }
    Ok(part.end())
}
