//! The lock of an object's tree, or of all trees of a family: a reader-writer lock. It reports its
//! hold times to a measuring platform (`Platform::tree_locked`, with the feature `measure`).

use crate::platform::Platform;
use crate::sync::rw_lock::{ReadGuard, RwLock, WriteGuard};

/// The lock; see the module.
#[derive(Debug)]
pub(crate) struct TreeLock(RwLock);

impl TreeLock {
    pub(crate) const fn new() -> Self {
        Self(RwLock::new())
    }

    /// Locks for reading, unless a writer has the lock or waits for it.
    pub(crate) fn try_read<'a, P: Platform>(
        &'a self,
        platform: &'a P,
    ) -> Option<TreeReadGuard<'a, P>> {
        let guard = self.0.try_read(platform)?;
        Some(TreeReadGuard { held: Measured::new(platform), _guard: guard })
    }

    /// Locks for reading.
    #[inline]
    pub(crate) fn read<'a, P: Platform>(&'a self, platform: &'a P) -> TreeReadGuard<'a, P> {
        let guard = self.0.read(platform);
        TreeReadGuard { held: Measured::new(platform), _guard: guard }
    }

    /// Locks for writing.
    #[inline]
    pub(crate) fn write<'a, P: Platform>(&'a self, platform: &'a P) -> TreeWriteGuard<'a, P> {
        let guard = self.0.write(platform);
        TreeWriteGuard { held: Measured::new(platform), _guard: guard }
    }

    /// Locks for writing if the lock is free and no thread waits for it.
    pub(crate) fn try_write<'a, P: Platform>(
        &'a self,
        platform: &'a P,
    ) -> Option<TreeWriteGuard<'a, P>> {
        let guard = self.0.try_write(platform)?;
        Some(TreeWriteGuard { held: Measured::new(platform), _guard: guard })
    }

    /// Runs `work` with the lock held for writing.
    #[inline]
    pub(crate) fn with_write<P: Platform, R>(&self, platform: &P, work: impl FnOnce() -> R) -> R {
        let _guard = self.write(platform);
        work()
    }
}

/// The lock is held for reading until the guard is dropped.
#[must_use = "dropping the guard unlocks"]
pub(crate) struct TreeReadGuard<'a, P: Platform> {
    // Dropped first: the platform is informed before the lock is free.
    #[allow(dead_code, reason = "works by being dropped")]
    held: Measured<'a, P>,
    _guard: ReadGuard<'a, P>,
}

/// The lock is held for writing until the guard is dropped.
#[must_use = "dropping the guard unlocks"]
pub(crate) struct TreeWriteGuard<'a, P: Platform> {
    #[allow(dead_code, reason = "works by being dropped")]
    held: Measured<'a, P>,
    _guard: WriteGuard<'a, P>,
}

/// Informs a measuring platform while the lock is held, and when it is released.
struct Measured<'a, P: Platform>(
    #[cfg_attr(not(any(test, feature = "measure")), expect(dead_code))] &'a P,
);

impl<'a, P: Platform> Measured<'a, P> {
    #[inline]
    fn new(platform: &'a P) -> Self {
        #[cfg(any(test, feature = "measure"))]
        platform.tree_locked();
        Self(platform)
    }
}

impl<P: Platform> Drop for Measured<'_, P> {
    #[inline]
    fn drop(&mut self) {
        #[cfg(any(test, feature = "measure"))]
        self.0.tree_unlocked();
    }
}
