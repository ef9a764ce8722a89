//! Calls that stop instead of waiting and continue later: the result of a step, and the wait.
//!
//! No lock is held during the wait, as in a blocking call (docs/lock-order.md). A call can
//! therefore return the wait wherever it would block. The state of a call is the rest of its range.

use core::fmt;
use core::sync::atomic::AtomicU32;

use super::lock_wait::LockWait;
use super::swap_off::SwapInWait;
use crate::addr::VirtAddr;
use crate::error::{Failure, FaultError};
use crate::object::{ObjectWait, PageReady, ParkedOn, Polled, PolledWait};
use crate::platform::Platform;
use crate::space::fault::{FaultPoll, FaultReady, FaultWait};
use crate::userfault::{Ending, PolledEvent, PolledMessage, WaitSignals};

/// The result of a step of a call, such as [`Populate::step`].
///
/// [`Populate::step`]: crate::Populate::step
#[derive(Debug)]
pub enum Step<'s, 'm, P: Platform> {
    /// The call is complete.
    Done,
    /// The call has to wait before its next step.
    Blocked(CallWait<'s, 'm, P>),
}

/// The event that a call has to wait for, as a [`FaultWait`]. The wait holds no lock and no
/// request, so it may be moved to another thread and may be queued. After a poll it may keep a
/// reference to the page, which then stays in memory. Dropping the value cancels the wait: nothing is read for the call, unless a poll has started the read. Writes that a step has
/// started continue. The message of an event to a userfaultfd, which the step has sent, is
/// withdrawn unless it was read, and the next step sends it again. But the message about a change
/// that has been made, such as an unmapping, belongs to [`crate::PendingEvents`]: it stays sent,
/// and the next step waits for its reader again.
///
/// Context of the drop: may sleep, like the drop of an [`crate::Object`].
#[derive(Debug)]
#[must_use = "the next step would find the same"]
pub struct CallWait<'s, 'm, P: Platform>(CallEvent<'s, 'm, P>);

/// The event that ends a wait.
#[derive(Debug)]
enum CallEvent<'s, 'm, P: Platform> {
    /// The wait of a fault.
    Fault(FaultWait<'s, 'm, P>),
    /// The wait for pages of an object: it ends when a pager or a device has read or stored the
    /// pages, or when a change of the pages is over.
    Object(ObjectWait<'m, P>),
    /// The wait for a page in swap, which no fault needs.
    SwapIn(SwapInWait<'s, 'm, P>),
    /// The wait for a free request of a swap device.
    Request(PolledWait<'m, P>),
    /// The wait until a handler has read the message of an event.
    Message(PolledMessage<'m, P>),
    /// As above, for an event whose message belongs to the call.
    Event(PolledEvent<'m, P>),
    /// The wait for a lock, before the step.
    Lock(LockWait<'s, 'm, P>),
}

/// The progress of a wait ([`CallWait::poll`]).
#[derive(Debug)]
pub enum CallPoll<'w, 'm, P: Platform> {
    /// The wait is over, and the call continues with this value.
    Ready(CallReady<'m, P>),
    /// Nothing can be done until this word changes.
    Pending(ParkedOn<'w>),
    /// Only a thread that may sleep can continue, by [`CallWait::wait`].
    NeedsThread,
}

/// The end of a wait, for the next step of the call: either the page that was read, which stays in
/// memory until that step has used it, or the error. The end of a write, of a wait for a free
/// request of a swap device, or of a wait for the reader of a message carries no further
/// information. The end of a wait for a lock is the end of the wait before it.
#[must_use = "the call would not know how the wait has ended"]
pub struct CallReady<'m, P: Platform>(pub(in crate::space) CallEnd<'m, P>);

/// The way in which a wait has ended.
pub(in crate::space) enum CallEnd<'m, P: Platform> {
    /// The end of a fault's wait for this page.
    Fault(VirtAddr, Result<FaultReady<'m, P>, FaultError>),
    /// The end of a wait for a page of an object or in swap.
    Object(PageReady<'m, P>),
    /// The end of a wait that brings nothing: for a request of a swap device, or for a lock.
    Nothing,
    /// The end of a wait for the reader of a message.
    Message(Ending),
}

impl<'m, P: Platform> CallReady<'m, P> {
    /// The end of a wait for a page of an object or in swap.
    pub(super) fn of_object(self) -> Option<PageReady<'m, P>> {
        match self.0 {
            CallEnd::Object(page) => Some(page),
            CallEnd::Fault(..) | CallEnd::Nothing | CallEnd::Message(_) => None,
        }
    }
}

impl<'s, 'm, P: Platform> CallWait<'s, 'm, P> {
    pub(in crate::space) fn new(wait: FaultWait<'s, 'm, P>) -> Self {
        Self(CallEvent::Fault(wait))
    }

    /// The wait, which keeps the page of the wait before it if it is for a lock: otherwise reclaim
    /// could take the page, and the call would wait for it again.
    pub(in crate::space) fn keeping(self, last: Option<FaultReady<'m, P>>) -> Self {
        let mut event = self.0;
        if let (CallEvent::Fault(wait), Some(last)) = (&mut event, last) {
            wait.keep(last);
        }
        Self(event)
    }

    pub(super) fn for_object(wait: ObjectWait<'m, P>) -> Self {
        Self(CallEvent::Object(wait))
    }

    /// The wait for a page in swap.
    pub(super) fn for_swap_in(wait: SwapInWait<'s, 'm, P>) -> Self {
        Self(CallEvent::SwapIn(wait))
    }

    /// The wait for a free request of a swap device.
    pub(super) fn for_request(wait: PolledWait<'m, P>) -> Self {
        Self(CallEvent::Request(wait))
    }

    /// The wait for the reader of a queued message.
    pub(in crate::space) fn for_message(message: PolledMessage<'m, P>) -> Self {
        Self(CallEvent::Message(message))
    }

    /// The wait for the reader of the message of an event that belongs to the call.
    pub(in crate::space) fn for_event(event: PolledEvent<'m, P>) -> Self {
        Self(CallEvent::Event(event))
    }

    /// The wait for a lock.
    pub(super) fn for_lock(wait: LockWait<'s, 'm, P>) -> Self {
        Self(CallEvent::Lock(wait))
    }

    /// Waits, and performs the work that the call cannot perform without waiting, as
    /// [`FaultWait::wait`].
    ///
    /// Context: may sleep.
    pub fn wait(self) -> CallReady<'m, P> {
        CallReady(match self.0 {
            CallEvent::Fault(wait) => CallEnd::Fault(wait.page(), wait.wait()),
            CallEvent::Object(wait) => CallEnd::Object(wait.wait()),
            CallEvent::SwapIn(wait) => CallEnd::Object(wait.wait()),
            CallEvent::Request(wait) => {
                wait.wait_for_request();
                CallEnd::Nothing
            }
            CallEvent::Message(message) => {
                // As in a blocking call, a fatal signal ends only the wait.
                CallEnd::Message(message.wait(WaitSignals::FatalSignal))
            }
            CallEvent::Event(event) => CallEnd::Message(event.wait()),
            CallEvent::Lock(wait) => wait.wait(),
        })
    }

    /// Advances the wait as far as possible without sleeping, as [`FaultWait::poll`].
    ///
    /// Context: may sleep only where [`FaultWait::poll`] may; otherwise spins. Also tries
    /// [`Platform::Mutex`]. Complexity: as [`FaultWait::poll`].
    pub fn poll(&mut self) -> CallPoll<'_, 'm, P> {
        match &mut self.0 {
            CallEvent::Fault(wait) => {
                let page = wait.page();
                let ready = |result| CallPoll::Ready(CallReady(CallEnd::Fault(page, result)));
                match wait.poll() {
                    Ok(FaultPoll::Ready(kept)) => ready(Ok(kept)),
                    Ok(FaultPoll::Pending(parked)) => CallPoll::Pending(parked),
                    Ok(FaultPoll::NeedsThread) => CallPoll::NeedsThread,
                    Err(error) => ready(Err(error)),
                }
            }
            CallEvent::Object(wait) => poll_page(wait.poll()),
            CallEvent::SwapIn(wait) => poll_page(wait.poll()),
            CallEvent::Request(wait) => match wait.poll(None) {
                Ok(Polled::Pending(parked)) => CallPoll::Pending(parked),
                Ok(Polled::NeedsThread) => CallPoll::NeedsThread,
                // The wait has no error.
                Ok(Polled::Ready(_)) | Err(_) => CallPoll::Ready(CallReady(CallEnd::Nothing)),
            },
            CallEvent::Message(message) => poll_message(message.ending(), message.parked()),
            CallEvent::Event(event) => poll_message(event.ending(), event.parked()),
            CallEvent::Lock(wait) => wait.poll(),
        }
    }

    /// Whether the wait is for a pager or a swap device to read content, as
    /// [`FaultWait::is_for_storage`], or to store it.
    ///
    /// Context: any.
    pub fn is_for_storage(&self) -> bool {
        match &self.0 {
            CallEvent::Fault(wait) => wait.is_for_storage(),
            CallEvent::Object(wait) => wait.is_for_storage(),
            CallEvent::SwapIn(_) | CallEvent::Request(_) => true,
            CallEvent::Message(_) | CallEvent::Event(_) | CallEvent::Lock(_) => false,
        }
    }
}

/// The progress of a wait for a page.
fn poll_page<'w, 'm, P: Platform>(
    polled: Result<Polled<'w, 'm, P>, Failure>,
) -> CallPoll<'w, 'm, P> {
    let ready = |page| CallPoll::Ready(CallReady(CallEnd::Object(page)));
    match polled {
        Ok(Polled::Pending(parked)) => CallPoll::Pending(parked),
        Ok(Polled::NeedsThread) => CallPoll::NeedsThread,
        Ok(Polled::Ready(kept)) => ready(Ok(kept)),
        Err(error) => ready(Err(error)),
    }
}

/// The progress of a wait for the reader of a message.
fn poll_message<'w, 'm, P: Platform>(
    ending: Option<Ending>,
    (word, expected): (&'w AtomicU32, u32),
) -> CallPoll<'w, 'm, P> {
    match ending {
        Some(ending) => CallPoll::Ready(CallReady(CallEnd::Message(ending))),
        None => CallPoll::Pending(ParkedOn::new(word, expected)),
    }
}

impl<P: Platform> fmt::Debug for CallReady<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("CallReady");
        match &self.0 {
            CallEnd::Fault(page, result) => {
                debug.field("page", page).field("error", &result.as_ref().err());
            }
            CallEnd::Object(result) => {
                debug.field("error", &result.as_ref().err());
            }
            CallEnd::Nothing | CallEnd::Message(_) => {}
        }
        debug.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread other than the caller may perform the wait.
    fn _moves<P: Platform>(wait: CallWait<'_, '_, P>, ready: CallReady<'_, P>) {
        fn is_send(_: impl Send) {}
        is_send(wait);
        is_send(ready);
    }
}
