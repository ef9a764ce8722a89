//! [`Userfault`]: the handle of a userfaultfd.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::ptr::NonNull;

use crate::Memory;
use crate::error::Error;
use crate::platform::Platform;

use super::message::UserfaultMessage;
use super::queue::{ForkIsNext, Forks, QueuedMessage};
use super::state::{UserfaultState, release};
use super::{Built, UserfaultFeatures, UserfaultScope};

/// A userfaultfd: the queue of the waiting faults of one address space.
/// [`crate::AddressSpace::userfault`] creates it, and the calls of the address space register
/// memory with it and serve faults. Dropping the handle closes the userfaultfd: all waiting threads
/// continue, and registered memory counts as not registered.
///
/// All methods take `&self` and may be called from several CPUs at once; each message is delivered
/// to one reader.
///
/// ```
/// use bindery::{AddressSpace, Error, FillMode, Platform, Userfault, UserfaultMessage};
///
/// /// Serves faults with zeroes, until a signal comes.
/// fn serve<P: Platform>(
///     space: &AddressSpace<'_, P>,
///     userfault: &Userfault<'_, P>,
/// ) -> Result<(), Error> {
///     loop {
///         if let UserfaultMessage::Fault(fault) = userfault.read()? {
///             let page = fault.address.align_down(4096);
///             // Another handler may have been faster.
///             let _ = space.handler(userfault).fill_zeroes(page, 4096, FillMode::empty());
///         }
///     }
/// }
/// ```
pub struct Userfault<'m, P: Platform> {
    memory: &'m Memory<P>,
    state: NonNull<UserfaultState>,
    built: Built,
}

// SAFETY: a handle is a counted reference to a state of atomics and lock-protected fields; the
// thread that owns the handle may use and release the state on any CPU.
unsafe impl<P: Platform> Send for Userfault<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for Userfault<'_, P> {}

impl<'m, P: Platform> Userfault<'m, P> {
    /// A new userfaultfd of the address space with this number.
    pub(crate) fn new(
        built: Built,
        memory: &'m Memory<P>,
        space: u64,
        features: UserfaultFeatures,
        scope: UserfaultScope,
    ) -> Option<Self> {
        let make = || UserfaultState::new(space, features, scope);
        let state = memory.slab().allocate_with(&memory.frames, make)?;
        Some(Self { memory, state, built })
    }

    /// Makes a handle for a state that is already held for it.
    ///
    /// # Safety
    /// 1. The handle takes over the hold and is the only handle of the state.
    unsafe fn of_held(&self, state: NonNull<UserfaultState>) -> Self {
        Self { memory: self.memory, state, built: self.built }
    }

    #[inline]
    pub(crate) fn state(&self) -> &UserfaultState {
        self.built.assure();
        // SAFETY: the handle holds the state.
        unsafe { self.state.as_ref() }
    }

    pub(crate) fn pointer(&self) -> NonNull<UserfaultState> {
        self.state
    }

    /// The features with which the userfaultfd was created.
    ///
    /// Context: any.
    pub fn features(&self) -> UserfaultFeatures {
        self.state().features()
    }

    /// Whether [`Userfault::try_read`] has a message. With several readers, another reader may take
    /// the message first.
    ///
    /// Context: any.
    pub fn is_readable(&self) -> bool {
        self.state().is_readable()
    }

    /// The number of waiting faults.
    ///
    /// Context: may sleep. Complexity: linear in the number of waiting faults.
    pub fn waiting(&self) -> WaitingFaults {
        self.state().faults(self.memory.platform())
    }

    /// The number of times that forks and unmappings have checked whether they have prepared a
    /// message for this userfaultfd.
    #[cfg(any(test, feature = "measure"))]
    pub fn times_asked(&self) -> u64 {
        self.state().times_asked()
    }

    /// The next message, if any: faults first, then events in order. The call that caused an event
    /// continues when the event is read.
    ///
    /// Context: may sleep, but does not wait for a message.
    pub fn try_read(&self) -> Option<UserfaultMessage<'m, P>> {
        self.next(Forks::Read).unwrap_or_default()
    }

    /// Like [`Userfault::try_read`], but does not take a message about a fork, for callers that
    /// must first make room for the child's userfaultfd. The fork waits until its message is read.
    ///
    /// Context: may sleep, but does not wait for a message.
    ///
    /// # Errors
    /// [`ForkIsNext`]. Another reader may take the fork's message before the caller does.
    pub fn try_read_but_fork(&self) -> Result<Option<UserfaultMessage<'m, P>>, ForkIsNext> {
        self.next(Forks::Left)
    }

    fn next(&self, forks: Forks) -> Result<Option<UserfaultMessage<'m, P>>, ForkIsNext> {
        if !self.is_readable() {
            return Ok(None);
        }
        let read = self.state().read(self.memory.platform(), forks)?;
        Ok(read.map(|content| match content {
            QueuedMessage::Fault(fault) => UserfaultMessage::Fault(fault),
            QueuedMessage::Fork(child) => {
                // SAFETY: 1. the hold belongs to the message, which is read once.
                UserfaultMessage::Fork(unsafe { self.of_held(child) })
            }
            QueuedMessage::Remap { from, to, length } => {
                UserfaultMessage::Remap { from, to, length }
            }
            QueuedMessage::Remove(range) => UserfaultMessage::Remove(range),
            QueuedMessage::Unmap(range) => UserfaultMessage::Unmap(range),
        }))
    }

    /// The next message; waits until one arrives.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if a signal arrived first ([`Platform::signal`]).
    pub fn read(&self) -> Result<UserfaultMessage<'m, P>, Error> {
        loop {
            let seen = self.state().messages_seen();
            if let Some(message) = self.try_read() {
                return Ok(message);
            }
            if self.memory.platform().signal() {
                return Err(Error::Interrupted);
            }
            self.state().await_message(self.memory.platform(), seen);
        }
    }
}

/// The number of faults that wait for a handler ([`Userfault::waiting`]).
///
/// ```
/// use bindery::{Platform, Userfault};
///
/// /// Whether a handler is at work.
/// fn is_busy<P: Platform>(userfault: &Userfault<'_, P>) -> bool {
///     let waiting = userfault.waiting();
///     waiting.all > waiting.unread
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WaitingFaults {
    /// The number of waiting faults whose message is unread.
    pub unread: u64,
    /// The number of all waiting faults.
    pub all: u64,
}

impl<P: Platform> Drop for Userfault<'_, P> {
    fn drop(&mut self) {
        self.state().close(self.memory.platform());
        // SAFETY: 1. the released hold is the handle's own.
        unsafe { release(self.memory, self.state) };
    }
}

impl<P: Platform> fmt::Debug for Userfault<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Userfault").field("features", &self.features()).finish_non_exhaustive()
    }
}
