//! The outcome of one attempt of a call.

use super::{Error, FaultError};

/// No frame was free for a page, a table or a record. The allocation changed nothing.
///
/// This is not a public error. Only [`Memory::retry`] and [`Memory::outermost`], which first
/// reclaim memory, convert it, so a public call that does not reclaim has no error to return.
///
/// [`Memory::retry`]: crate::Memory::retry
/// [`Memory::outermost`]: crate::Memory::outermost
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoMemory;

/// The reason why one attempt of a call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failure<E = Error> {
    /// No free frame: the call reclaims memory and makes another attempt.
    NoMemory,
    /// A reason that more memory would not remove. Limits of the process or of the machine
    /// ([`Error::LimitReached`], [`Error::Overcommitted`]) are such reasons, although Linux returns
    /// `ENOMEM` for them.
    Refused(E),
}

/// An error of public calls.
pub(crate) trait CallError {
    /// The error for memory that ran out although reclaim was tried.
    const OUT_OF_MEMORY: Self;
}

impl CallError for Error {
    const OUT_OF_MEMORY: Self = Self::OutOfMemory;
}

impl CallError for FaultError {
    const OUT_OF_MEMORY: Self = Self::OutOfMemory;
}

impl<E> From<NoMemory> for Failure<E> {
    #[inline]
    fn from(NoMemory: NoMemory) -> Self {
        Self::NoMemory
    }
}

impl<E: CallError> From<E> for Failure<E> {
    #[inline]
    fn from(error: E) -> Self {
        Self::Refused(error)
    }
}

impl<E: CallError> Failure<E> {
    /// The failure of a call whose second attempt would repeat its changes, so the call ends here
    /// without reclaim. Only this function bypasses [`Memory::retry`]; `docs/swap.md` lists the
    /// calls that use it.
    ///
    /// [`Memory::retry`]: crate::Memory::retry
    #[cold]
    pub(crate) fn without_second_attempt(self) -> Self {
        match self {
            Self::NoMemory => Self::Refused(E::OUT_OF_MEMORY),
            refused @ Self::Refused(_) => refused,
        }
    }
}

impl<E> Failure<E> {
    /// The same failure, refused with another error.
    #[inline]
    pub(crate) fn map<F>(self, refused: impl FnOnce(E) -> F) -> Failure<F> {
        match self {
            Self::NoMemory => Failure::NoMemory,
            Self::Refused(error) => Failure::Refused(refused(error)),
        }
    }
}
