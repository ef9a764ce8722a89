//! The guards of a VMA's lock.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::mem::ManuallyDrop;
use core::ptr::NonNull;

use crate::platform::Platform;
use crate::sync::rw_lock::{ReadGuard, WriteGuard};

use super::Vma;

/// A VMA that is locked for reading: it is not removed, and its bounds, flags and tables do not
/// change.
#[must_use = "dropping the guard unlocks the VMA"]
pub(crate) struct VmaReadGuard<'a, P: Platform> {
    vma: &'a Vma,
    _guard: ReadGuard<'a, P>,
}

impl<'a, P: Platform> VmaReadGuard<'a, P> {
    #[inline]
    pub(super) fn new(vma: &'a Vma, guard: ReadGuard<'a, P>) -> Self {
        Self { vma, _guard: guard }
    }

    /// The VMA, while the guard exists.
    #[inline]
    pub(crate) fn vma(&self) -> &Vma {
        self.vma
    }

    /// Whether another thread holds or waits for the VMA's lock.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn is_shared(&self) -> bool {
        self.vma.lock.is_shared()
    }

    /// Leaves the VMA locked; the returned value unlocks it.
    pub(crate) fn leave_locked(self) -> ReadLockedVma {
        self._guard.leave_locked();
        ReadLockedVma(NonNull::from(self.vma))
    }
}

/// A VMA that is locked for reading until [`ReadLockedVma::unlock`] is called. The VMA and its
/// address space are not freed, because a thread that removes a VMA waits for its readers.
#[must_use = "it stays locked"]
pub(crate) struct ReadLockedVma(NonNull<Vma>);

impl ReadLockedVma {
    /// Whether this is `vma`.
    pub(crate) fn is(&self, vma: &Vma) -> bool {
        self.0 == NonNull::from(vma)
    }

    /// Unlocks the VMA.
    pub(crate) fn unlock<P: Platform>(self, platform: &P) {
        // SAFETY: a VMA is freed after its removal, which waits for the lock held here
        // (`Vma::lock_write`, `Vma::wait_for_readers`).
        let vma = unsafe { self.0.as_ref() };
        // SAFETY: 1. this is the only guard that was left locked; 2. it is consumed here.
        drop(unsafe { vma.lock.left(platform) });
    }
}

/// A VMA that is locked for writing: no fault is in progress in it. Removing the VMA consumes the
/// guard.
#[must_use = "dropping the guard unlocks the VMA"]
pub(crate) struct VmaWriteGuard<'a, P: Platform> {
    vma: &'a Vma,
    guard: ManuallyDrop<WriteGuard<'a, P>>,
}

impl<'a, P: Platform> VmaWriteGuard<'a, P> {
    #[inline]
    pub(super) fn new(vma: &'a Vma, guard: WriteGuard<'a, P>) -> Self {
        Self { vma, guard: ManuallyDrop::new(guard) }
    }

    /// The VMA and the guard of its lock.
    #[inline]
    fn into_parts(self) -> (&'a Vma, WriteGuard<'a, P>) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once: `this` is not dropped, and is not used again.
        (this.vma, unsafe { ManuallyDrop::take(&mut this.guard) })
    }

    #[inline]
    pub(crate) fn vma(&self) -> &'a Vma {
        self.vma
    }

    /// Marks the VMA as removed for threads that still find it.
    pub(crate) fn remove(self) -> &'a Vma {
        let (vma, guard) = self.into_parts();
        guard.close();
        vma
    }

    /// Leaves the VMA locked; [`Vma::written`] restores a guard.
    #[inline]
    pub(crate) fn leave_locked(self) {
        self.into_parts().1.leave_locked();
    }
}

impl<P: Platform> Drop for VmaWriteGuard<'_, P> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken once, because the guard is being dropped; `into_parts` forgets it.
        let guard = unsafe { ManuallyDrop::take(&mut self.guard) };
        let vma = self.vma;
        // SAFETY: the address space and therefore its tree are alive: they are borrowed by the
        // caller, which holds the mutex (`Vma::lock_write`). A guard of a VMA that was never shared
        // is consumed by its removal, and never dropped. Called with the VMA locked.
        guard.unlock_for(|| unsafe { &vma.tree().as_ref().lock_waits });
    }
}

impl<P: Platform> core::ops::Deref for VmaWriteGuard<'_, P> {
    type Target = Vma;

    #[inline]
    fn deref(&self) -> &Vma {
        self.vma
    }
}
