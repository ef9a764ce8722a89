//! Locks of an object that a task finds taken before it begins a step of a call.
//!
//! A task only looks at the lock. It marks it, as a thread does that parks, so that the writer that
//! leaves wakes the lock's word. Readers of these locks are brief, and no task waits for them.

use crate::platform::Platform;
use crate::sync::rw_lock::Readable;

use super::{Object, ParkedOn};

/// A lock that a call on an object takes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ObjectLock {
    /// Of the calls that change size or content: a write may hold it while a device works.
    Changes,
    /// The `invalidate_lock`.
    Pages,
}

impl ObjectLock {
    /// The word that changes when the writer leaves; `None` if no writer has the lock.
    pub(crate) fn poll<'o, P: Platform>(self, object: &'o Object<'_, P>) -> Option<ParkedOn<'o>> {
        let state = object.state();
        let found = match self {
            Self::Changes => state.changes.poll_read(),
            Self::Pages => state.invalidate_lock.poll_read(),
        };
        match found {
            Readable::Later(word, expected) => Some(ParkedOn::new(word, expected)),
            Readable::Now | Readable::Never => None,
        }
    }

    /// Sleeps until no writer has the lock.
    pub(crate) fn wait<P: Platform>(self, object: &Object<'_, P>) {
        let (state, platform) = (object.state(), object.memory.platform());
        match self {
            Self::Changes => state.changes.with_read(platform, || ()),
            Self::Pages => state.invalidate_lock.with_read(platform, |_| ()),
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl<P: Platform> Object<'_, P> {
    /// Runs `work` with the changes held.
    pub(crate) fn with_changes_held<R>(&self, work: impl FnOnce() -> R) -> R {
        self.state().changes.with_write(self.memory.platform(), work)
    }
}
