//! The wait of a fault, with the VMA unlocked, for one of the events of [`Wait`].

use crate::error::{Failure, FaultError};
use crate::folio::FolioRef;
use crate::object::{ForHandler, Wait};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::vma::VmaReadGuard;

use super::refused;

/// Unlocks the VMA and waits. No [`Fault`](super::Fault) in the VMA and no cursor can still exist,
/// because both borrow the guard. The returned reference keeps the folio that the page needs until
/// the fault has mapped it.
///
/// # Errors
/// The fault for the error of the pager or the device; [`FaultError::Interrupted`] for a handler.
#[cold]
pub(super) fn wait_unlocked<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    locked: VmaReadGuard<'_, P>,
    wait: Wait,
) -> Result<Option<FolioRef<'m, P>>, Failure<FaultError>> {
    wait_for_known(space, locked, wait)
}

/// As [`wait_unlocked`], for a caller that knows the kind of wait.
// Always inlined, so that a fault served by a handler omits the other kinds.
#[inline(always)]
pub(in crate::space) fn wait_for_known<'m, P: Platform, H: ForHandler>(
    space: &AddressSpace<'m, P>,
    locked: VmaReadGuard<'_, P>,
    wait: Wait<H>,
) -> Result<Option<FolioRef<'m, P>>, Failure<FaultError>> {
    let for_handler = matches!(wait, Wait::Handler(..));
    let object = if for_handler { None } else { space.object_of(locked.vma()) };
    drop(locked);
    let is_major = wait.is_major();
    let memory = space.page_table.memory;
    let failed = if for_handler { interrupted } else { refused };
    let kept = wait.wait_for_known(memory, object.as_ref()).map_err(failed)?;
    if is_major && kept.is_some() {
        memory.note_major_fault();
    }
    Ok(kept)
}

/// The fault error for a wait that a signal has ended.
fn interrupted(failure: Failure) -> Failure<FaultError> {
    failure.map(|_| FaultError::Interrupted)
}
