//! The lock of an object's tree, or of all trees of a family: a lock, of which a measuring platform
//! learns how long it is held ([`Platform::tree locked`]).

use crate::platform::Platform;
use crate::sync::rw_lock::RwLock;

/// The lock; see the module.
#[derive(Debug)]
pub(crate) struct TreeLock(RwLock);

impl TreeLock {
    pub(crate) const fn new() -> Self {
        Self(RwLock::new())
    }

    /// Takes it together with others, if nobody has it alone or waits for that.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn try_read<P: Platform>(&self, platform: &P) -> bool {
        let taken = self.0.try_read();
        if taken {
            locked(platform);
        }
        taken
    }

    /// Takes it together with others.
    #[inline]
    pub(crate) fn read<P: Platform>(&self, platform: &P) {
        self.0.read(platform);
        locked(platform);
    }

    #[inline]
    pub(crate) fn end_read<P: Platform>(&self, platform: &P) {
        unlocked(platform);
        self.0.end_read(platform);
    }

    /// Takes it alone.
    #[inline]
    pub(crate) fn write<P: Platform>(&self, platform: &P) {
        self.0.write(platform);
        locked(platform);
    }

    #[inline]
    pub(crate) fn end_write<P: Platform>(&self, platform: &P) {
        unlocked(platform);
        self.0.end_write(platform);
    }

    /// Does `work` with the lock taken alone.
    #[inline]
    pub(crate) fn alone<P: Platform, R>(&self, platform: &P, work: impl FnOnce() -> R) -> R {
        self.write(platform);
        let result = work();
        self.end_write(platform);
        result
    }
}

#[inline]
fn locked<P: Platform>(_platform: &P) {
    #[cfg(any(test, feature = "measure"))]
    _platform.tree_locked();
}

#[inline]
fn unlocked<P: Platform>(_platform: &P) {
    #[cfg(any(test, feature = "measure"))]
    _platform.tree_unlocked();
}
