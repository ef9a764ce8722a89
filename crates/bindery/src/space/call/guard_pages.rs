//! Guard pages (`MADV_GUARD_INSTALL`, `MADV_GUARD_REMOVE`): accesses raise a signal. Since guards
//! are entries, they need no mappings of their own.

use crate::addr::VirtRange;
use crate::arch::Marker;
use crate::error::{Error, Failure, NoMemory};
use crate::platform::Platform;
use crate::table::zap::Flush;
use crate::vma::{MappingFlags, Vma};

use crate::space::op::Op;

/// Drops the contents of `part` and guards it. A level-2 span inside `part` takes one entry.
pub(in crate::space) fn install<'op, P: Platform>(
    op: &mut Op<'op, '_, P>,
    vma: &'op Vma,
    part: VirtRange,
) -> Result<(), Failure> {
    if vma.has(MappingFlags::LOCKED) {
        return Err(Error::Invalid.into());
    }
    if vma.is_anonymous() {
        // Linux also creates the anon group at this point, and the group determines whether
        // mappings merge.
        op.vmas.prepare_group(vma)?;
    }
    let vma = vma.lock_write(op.platform());
    op.edit.uncharge_before_unlock();
    op.vmas.change_flags(&vma, vma.flags() | MappingFlags::MAYBE_GUARDS);
    let zapped = op.edit.zap(part, part, Flush::BeforeUnlock);
    op.edit.flush();
    let done = zapped.and_then(|()| op.edit.mark(part, Marker::Guard));
    drop(vma);
    Ok(done?)
}

/// Removes the guards of `part`. The next access to each page faults it in.
pub(in crate::space) fn remove<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
) -> Result<(), NoMemory> {
    let _locked = vma.lock_write(op.platform());
    op.edit.unmark(part, Marker::Guard)
}
