//! Locks that a test holds, so that other calls find them taken.

use crate::addr::VirtAddr;
use crate::platform::Platform;
use crate::{AddressSpace, Object};

/// Runs `work` with the mutex of the address space held.
pub fn with_mutex<P: Platform, R>(space: &AddressSpace<'_, P>, work: impl FnOnce() -> R) -> R {
    let _guard = space.vmas.lock();
    work()
}

/// Runs `work` with the VMA at `at` locked for writing, as by a memory call.
///
/// # Panics
/// If no VMA exists there.
pub fn with_vma_written<P: Platform, R>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    work: impl FnOnce() -> R,
) -> R {
    let guard = space.vmas.lock();
    let vma = guard.view().at(at).unwrap_or_else(|| panic!("no mapping at {at}"));
    let _locked = vma.lock_write(space.platform());
    work()
}

/// Runs `work` with the VMA at `at` locked for reading, as by a fault.
///
/// # Panics
/// If no VMA exists there.
pub fn with_vma_read<P: Platform, R>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    work: impl FnOnce() -> R,
) -> R {
    let _locked =
        space.vmas.read(space.platform(), at).unwrap_or_else(|| panic!("no mapping at {at}"));
    work()
}

/// Runs `work` with the lock of the family of the anon group at `at` held.
///
/// # Panics
/// If no VMA with an anon group exists there.
pub fn with_family_locked<P: Platform, R>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    work: impl FnOnce() -> R,
) -> R {
    let locked = space.vmas.read(space.platform(), at);
    let group = locked.as_ref().and_then(|locked| locked.vma().group());
    let group = group.unwrap_or_else(|| panic!("no anon group at {at}"));
    let _locked = group.family_lock().write(space.platform());
    work()
}

/// Runs `work` with the `invalidate_lock` of the object held for writing, as by a truncation.
pub fn with_pages_locked<P: Platform, R>(object: &Object<'_, P>, work: impl FnOnce() -> R) -> R {
    object.state().invalidate_lock.with_write(object.memory.platform(), |_| work())
}

/// Runs `work` with the changes of the object held, as by another call that writes or resizes it.
pub fn with_changes_held<P: Platform, R>(object: &Object<'_, P>, work: impl FnOnce() -> R) -> R {
    object.with_changes_held(work)
}
