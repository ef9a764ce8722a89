//! [`Userfault`]: the handle that a handler of faults has.

use core::fmt;
use core::ptr::NonNull;

use crate::Memory;
use crate::error::Error;
use crate::platform::Platform;

use super::message::UserfaultMessage;
use super::queue::{Content, ForkIsNext, Forks};
use super::state::{UserfaultState, release};
use super::{UserfaultFeatures, UserfaultScope};

/// A userfaultfd: the queue of the faults that wait in one address space.
/// [`crate::AddressSpace::userfault`] makes one, and the calls of the address space register memory
/// with it and serve faults. Dropping it closes it: all who wait go on, and what is registered
/// counts as not registered.
///
/// All methods take `&self` and may be called from several CPUs at once; each message goes to one
/// reader.
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
///             // Somebody else may have been faster.
///             let _ = space.fill_zeroes(userfault, page, 4096, FillMode::empty());
///         }
///     }
/// }
/// ```
pub struct Userfault<'m, P: Platform> {
    memory: &'m Memory<P>,
    state: NonNull<UserfaultState>,
}

// SAFETY: a handle is a counted reference to a state of atomics and what a lock guards; a thread
// that has it may use the state from any CPU and let it go there.
unsafe impl<P: Platform> Send for Userfault<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for Userfault<'_, P> {}

impl<'m, P: Platform> Userfault<'m, P> {
    /// A new one of the address space with this number.
    pub(crate) fn new(
        memory: &'m Memory<P>,
        space: u64,
        features: UserfaultFeatures,
        scope: UserfaultScope,
    ) -> Option<Self> {
        let make = || UserfaultState::new(space, features, scope);
        let state = memory.slab().allocate_with(&memory.frames, &memory.platform, make)?;
        Some(Self { memory, state })
    }

    /// A handle to a state that is held for it.
    ///
    /// # Safety
    /// 1. The hold passes to the handle, which is the only one of the state.
    unsafe fn of_held(memory: &'m Memory<P>, state: NonNull<UserfaultState>) -> Self {
        Self { memory, state }
    }

    pub(crate) fn state(&self) -> &UserfaultState {
        // SAFETY: the handle holds it.
        unsafe { self.state.as_ref() }
    }

    pub(crate) fn pointer(&self) -> NonNull<UserfaultState> {
        self.state
    }

    /// What it was asked to do.
    ///
    /// Context: any.
    pub fn features(&self) -> UserfaultFeatures {
        self.state().features()
    }

    /// Whether [`Userfault::try_read`] has a message. It may be gone by then, if there are several
    /// readers.
    ///
    /// Context: any.
    pub fn is_readable(&self) -> bool {
        self.state().is_readable()
    }

    /// The faults that wait.
    ///
    /// Context: may sleep. Complexity: in them.
    pub fn waiting(&self) -> WaitingFaults {
        self.state().faults(&self.memory.platform)
    }

    /// How often forks and unmappings have asked whether they have prepared a message for it.
    #[cfg(any(test, feature = "measure"))]
    pub fn times_asked(&self) -> u64 {
        self.state().times_asked()
    }

    /// The next message, if there is one: faults first, then events in their order. What has made
    /// an event goes on when that is read.
    ///
    /// Context: may sleep, but not for a message.
    pub fn try_read(&self) -> Option<UserfaultMessage<'m, P>> {
        self.next(Forks::Read).unwrap_or_default()
    }

    /// As [`Userfault::try_read`], but leaves a message about a fork where it is: for callers that
    /// have to find room for the child's userfaultfd first. As long as it is not read, the fork
    /// waits.
    ///
    /// Context: may sleep, but not for a message.
    ///
    /// # Errors
    /// [`ForkIsNext`]. Another reader may have it by then.
    pub fn try_read_but_fork(&self) -> Result<Option<UserfaultMessage<'m, P>>, ForkIsNext> {
        self.next(Forks::Left)
    }

    fn next(&self, forks: Forks) -> Result<Option<UserfaultMessage<'m, P>>, ForkIsNext> {
        if !self.is_readable() {
            return Ok(None);
        }
        let read = self.state().read(&self.memory.platform, forks)?;
        Ok(read.map(|content| match content {
            Content::Fault(fault) => UserfaultMessage::Fault(fault),
            Content::Fork(child) => {
                // SAFETY: 1. the hold of the message, which was read once.
                UserfaultMessage::Fork(unsafe { Self::of_held(self.memory, child) })
            }
            Content::Remap { from, to, length } => UserfaultMessage::Remap { from, to, length },
            Content::Remove(range) => UserfaultMessage::Remove(range),
            Content::Unmap(range) => UserfaultMessage::Unmap(range),
        }))
    }

    /// The next message; waits until there is one.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if a signal came first ([`Platform::signal`]).
    pub fn read(&self) -> Result<UserfaultMessage<'m, P>, Error> {
        loop {
            let seen = self.state().messages_seen();
            if let Some(message) = self.try_read() {
                return Ok(message);
            }
            if self.memory.platform.signal() {
                return Err(Error::Interrupted);
            }
            self.state().await_message(&self.memory.platform, seen);
        }
    }
}

/// How many faults wait for a handler ([`Userfault::waiting`]).
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
    /// Those whose message nobody has read.
    pub unread: u64,
    /// All.
    pub all: u64,
}

impl<P: Platform> Drop for Userfault<'_, P> {
    fn drop(&mut self) {
        self.state().close(&self.memory.platform);
        // SAFETY: 1. the handle's own hold.
        unsafe { release(self.memory, self.state) };
    }
}

impl<P: Platform> fmt::Debug for Userfault<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Userfault").field("features", &self.features()).finish_non_exhaustive()
    }
}
