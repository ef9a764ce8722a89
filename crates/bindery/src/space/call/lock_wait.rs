//! The waits of steps for locks that another thread has.
//!
//! A step looks at the mutex of the address space, or at a lock of the object, before it does
//! anything, with no other lock held. If another thread has the lock, the step stops, and the task
//! waits as in a fault ([`crate::space::fault`]): it takes no lock while it waits, and competes for
//! the lock in the next step. So a task that is dropped takes no wake-up away.
//!
//! The step does not keep the lock that it has looked at. If another thread takes it in between, the
//! step sleeps until that thread releases it. The functions of a step take and release the mutex
//! several times, and flush, free and copy without it.

use core::fmt;

use crate::object::{Object, ObjectLock, ParkedOn};
use crate::platform::Platform;
use crate::space::AddressSpace;

use super::steps::{CallEnd, CallPoll, CallReady, CallWait};

/// A wait until another thread has released a lock.
pub(super) struct LockWait<'s, 'm, P: Platform> {
    lock: StepLock<'s, 'm, P>,
    /// The end of the step's last wait, which the next step needs.
    kept: Option<CallEnd<'m, P>>,
}

/// The lock.
enum StepLock<'s, 'm, P: Platform> {
    /// The mutex of the address space.
    Mutex(&'s AddressSpace<'m, P>),
    Object(Object<'m, P>, ObjectLock),
}

impl<'s, 'm, P: Platform> LockWait<'s, 'm, P> {
    /// Sleeps until the lock is free.
    pub(super) fn wait(self) -> CallEnd<'m, P> {
        match &self.lock {
            StepLock::Mutex(space) => drop(space.vmas.lock()),
            StepLock::Object(object, lock) => lock.wait(object),
        }
        self.kept.unwrap_or(CallEnd::Nothing)
    }

    /// Checks whether the lock is free.
    pub(super) fn poll(&mut self) -> CallPoll<'_, 'm, P> {
        let parked = match &self.lock {
            StepLock::Mutex(space) if !space.vmas.is_locked() => None,
            StepLock::Mutex(space) => match space.vmas.mutex_parked_on() {
                Some((word, expected)) => Some(ParkedOn::new(word, expected)),
                None => return CallPoll::NeedsThread,
            },
            StepLock::Object(object, lock) => lock.poll(object),
        };
        match parked {
            Some(parked) => CallPoll::Pending(parked),
            None => CallPoll::Ready(CallReady(self.kept.take().unwrap_or(CallEnd::Nothing))),
        }
    }
}

/// The wait for a lock of the object, if another thread has it. `ready` is as for
/// [`AddressSpace::wait_for_mutex`].
pub(super) fn wait_for_object<'m, P: Platform>(
    object: &Object<'m, P>,
    lock: ObjectLock,
    ready: &mut Option<CallReady<'m, P>>,
) -> Option<CallWait<'m, 'm, P>> {
    lock.poll(object)?;
    let kept = ready.take().map(|ready| ready.0);
    Some(CallWait::for_lock(LockWait { lock: StepLock::Object(object.clone(), lock), kept }))
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// The wait for the mutex of the address space, if another thread has it; see
    /// `docs/lock-order.md`. The steps of calls on an address space begin with this look. A task that
    /// must not sleep makes it before a call whose first half is no step, such as
    /// [`AddressSpace::begin_munmap`]:
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{AddressSpace, CallReady, CallWait, Error, PendingEvents, Platform};
    ///
    /// /// `wait_for` polls the wait, or gives it to a thread that may block.
    /// async fn unmap<'s, 'm, P: Platform>(
    ///     space: &'s AddressSpace<'m, P>, at: VirtAddr,
    ///     wait_for: impl AsyncFn(CallWait<'s, 'm, P>) -> CallReady<'m, P>,
    /// ) -> (Result<(), Error>, PendingEvents<'m, P>) {
    ///     let mut ready = None;
    ///     while let Some(wait) = space.wait_for_mutex(&mut ready) {
    ///         ready = Some(wait_for(wait).await);
    ///     }
    ///     space.begin_munmap(at, 4096)
    /// }
    /// ```
    ///
    /// `ready` is the end of the caller's last wait, for the step that the caller was about to take.
    /// The wait for the mutex takes it over, and ends with it. If the mutex is free, `ready` stays.
    ///
    /// The look takes nothing: another thread may take the mutex before the call does. Then the call
    /// sleeps.
    ///
    /// Context: spins. Also tries [`Platform::Mutex`]. Complexity: constant.
    pub fn wait_for_mutex(
        &self,
        ready: &mut Option<CallReady<'m, P>>,
    ) -> Option<CallWait<'_, 'm, P>> {
        if !self.vmas.is_locked() {
            return None;
        }
        let kept = ready.take().map(|ready| ready.0);
        Some(CallWait::for_lock(LockWait { lock: StepLock::Mutex(self), kept }))
    }
}

impl<P: Platform> fmt::Debug for LockWait<'_, '_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lock = match &self.lock {
            StepLock::Mutex(_) => None,
            StepLock::Object(_, lock) => Some(lock),
        };
        f.debug_struct("LockWait").field("of_object", &lock).finish_non_exhaustive()
    }
}
