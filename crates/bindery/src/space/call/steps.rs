//! Calls that stop where they would wait, and go on: the result of a step, and the wait.
//!
//! No lock is held during the wait, as in a call that blocks (docs/lock-order.md). So a call can
//! give the wait away at the places at which it would block. Its state is the rest of its range.

use core::fmt;

use crate::addr::VirtAddr;
use crate::error::FaultError;
use crate::object::{Object, ParkedOn, Polled, PolledWait};
use crate::platform::Platform;
use crate::space::fault::{FaultPoll, FaultReady, FaultWait};

/// The result of a step of a call, for instance of [`Populate::step`].
///
/// [`Populate::step`]: crate::Populate::step
#[expect(
    clippy::large_enum_variant,
    reason = "a kernel without a heap of its own makes calls, too"
)]
#[derive(Debug)]
pub enum Step<'s, 'm, P: Platform> {
    /// The call is done.
    Done,
    /// The call has to wait before its next step.
    Blocked(CallWait<'s, 'm, P>),
}

/// The thing that a call has to wait for, as a [`FaultWait`]. It may be moved to another thread,
/// and may lie in a queue: it holds no lock and no request. Dropping it cancels the wait: nothing
/// is read for the call, unless a poll has begun it. Writes that a step has begun go on.
///
/// Context of the drop: may sleep, like the drop of an [`crate::Object`].
#[derive(Debug)]
#[must_use = "the next step would find the same"]
pub struct CallWait<'s, 'm, P: Platform>(CallEvent<'s, 'm, P>);

/// The event that ends a wait.
#[derive(Debug)]
enum CallEvent<'s, 'm, P: Platform> {
    /// That of a fault.
    Fault(FaultWait<'s, 'm, P>),
    /// A pager has stored pages of the object, or a change of them is over.
    Pager(Object<'m, P>, PolledWait<'m, P>),
}

/// How far a wait has come ([`CallWait::poll`]).
#[derive(Debug)]
pub enum CallPoll<'w, 'm, P: Platform> {
    /// It is over: the call goes on with this.
    Ready(CallReady<'m, P>),
    /// There is nothing to do until this changes.
    Pending(ParkedOn<'w>),
    /// Only a thread that may sleep can go on, by [`CallWait::wait`].
    NeedsThread,
}

/// The end of a wait, for the next step of the call: the page that was read, which stays in memory
/// until that step has mapped it, or the error. The end of a write says nothing more.
#[must_use = "the call would not know how the wait has ended"]
pub struct CallReady<'m, P: Platform> {
    /// The page of a fault, and the end of its wait.
    pub(super) fault: Option<(VirtAddr, Result<FaultReady<'m, P>, FaultError>)>,
}

impl<'s, 'm, P: Platform> CallWait<'s, 'm, P> {
    pub(super) fn new(wait: FaultWait<'s, 'm, P>) -> Self {
        Self(CallEvent::Fault(wait))
    }

    /// A wait for the pager of the object, or for a change of its pages.
    pub(crate) fn for_pager(object: Object<'m, P>, wait: PolledWait<'m, P>) -> Self {
        Self(CallEvent::Pager(object, wait))
    }

    /// Waits, and does the work that the call cannot do without waiting, as [`FaultWait::wait`].
    ///
    /// Context: may sleep.
    pub fn wait(self) -> CallReady<'m, P> {
        match self.0 {
            CallEvent::Fault(wait) => CallReady { fault: Some((wait.page(), wait.wait())) },
            CallEvent::Pager(object, wait) => {
                if let Some(wait) = wait.into_wait() {
                    // The end of a record is no error.
                    let _ = wait.wait(object.memory, Some(&object));
                }
                CallReady { fault: None }
            }
        }
    }

    /// Goes on with the wait as far as possible without sleeping, as [`FaultWait::poll`].
    ///
    /// Context: may sleep only if the pager sleeps in [`crate::Pager::begin_read`], or the device
    /// in [`crate::SwapDevice::submit`]; otherwise spins. Complexity: as there.
    pub fn poll(&mut self) -> CallPoll<'_, 'm, P> {
        match &mut self.0 {
            CallEvent::Fault(wait) => {
                let page = wait.page();
                let ready = |result| CallPoll::Ready(CallReady { fault: Some((page, result)) });
                match wait.poll() {
                    Ok(FaultPoll::Ready(kept)) => ready(Ok(kept)),
                    Ok(FaultPoll::Pending(parked)) => CallPoll::Pending(parked),
                    Ok(FaultPoll::NeedsThread) => CallPoll::NeedsThread,
                    Err(error) => ready(Err(error)),
                }
            }
            CallEvent::Pager(object, wait) => match wait.poll(Some(object)) {
                Ok(Polled::Pending(parked)) => CallPoll::Pending(parked),
                Ok(Polled::NeedsThread) => CallPoll::NeedsThread,
                Ok(Polled::Ready(_)) | Err(_) => CallPoll::Ready(CallReady { fault: None }),
            },
        }
    }

    /// Whether content is read from a pager or a swap device, as [`FaultWait::is_for_storage`], or
    /// stored by a pager.
    ///
    /// Context: any.
    pub fn is_for_storage(&self) -> bool {
        match &self.0 {
            CallEvent::Fault(wait) => wait.is_for_storage(),
            CallEvent::Pager(..) => true,
        }
    }
}

impl<P: Platform> fmt::Debug for CallReady<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallReady")
            .field("page", &self.fault.as_ref().map(|(page, _)| page))
            .field("error", &self.fault.as_ref().and_then(|(_, result)| result.as_ref().err()))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wait is performed by another thread than the one that makes the call.
    fn _moves<P: Platform>(wait: CallWait<'_, '_, P>, ready: CallReady<'_, P>) {
        fn is_send(_: impl Send) {}
        is_send(wait);
        is_send(ready);
    }
}
