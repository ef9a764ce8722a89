//! The errors of operations.
//!
//! | file | contents |
//! |---|---|
//! | `errno` | the number that Linux returns for each error, by operation |
//! | `failure` | the outcome of one attempt of a call: a lack of memory, or an error |

mod errno;
mod failure;

pub use errno::{Errno, Operation};
pub(crate) use failure::{CallError, Failure, NoMemory};

use core::fmt;

use crate::addr::VirtAddr;
use crate::arch::ProtectionKey;

/// The reason for a failure. A failed call has changed nothing, unless the operation's
/// documentation says otherwise.
///
/// ```
/// use bindery::{Errno, Error, Operation};
///
/// assert_eq!(Error::OutOfMemory.errno(Operation::Mmap), Errno::ENOMEM);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The address is not a multiple of the page size.
    Unaligned(VirtAddr),
    /// The length is zero, or becomes zero when rounded up to pages.
    ZeroLength,
    /// The range extends beyond the addresses of user space.
    OutOfRange {
        /// The end of the permitted addresses, exclusive.
        limit: VirtAddr,
    },
    /// The requested mapping is longer than the whole user space.
    TooLong,
    /// The address is below the lowest one that may be mapped.
    BelowMinimum {
        /// The lowest address that may be mapped.
        minimum: VirtAddr,
    },
    /// The range has a mapping, and the caller asked not to replace it.
    Exists(VirtAddr),
    /// The call needs a mapping at the address, but none exists.
    NotMapped(VirtAddr),
    /// The range extends beyond the mapping in which it begins.
    CrossesMapping {
        /// The end of the mapping.
        end: VirtAddr,
    },
    /// Source and destination of a move overlap.
    Overlap,
    /// The address space has the maximum number of mappings.
    TooManyMappings,
    /// No free range of addresses is long enough, or the mapping cannot grow in place.
    NoRoom,
    /// Physical memory ran out. The embedder may free memory and retry.
    OutOfMemory,
    /// Only shared mappings can be duplicated by a length of zero.
    NotShared,
    /// The process would exceed its limit of address space or data.
    LimitReached,
    /// The process would exceed its limit of locked memory.
    LockLimit,
    /// The process may not lock any memory.
    LockForbidden,
    /// The request would exceed the limit of committed memory ([`crate::Overcommit`]).
    Overcommitted,
    /// A mapping in the range is sealed.
    Sealed(VirtAddr),
    /// The object behind the mapping does not allow the access, or its seals forbid it.
    AccessDenied,
    /// An argument or a combination of arguments is invalid, in general or for such a mapping.
    Invalid,
    /// The object's seals forbid it.
    SealForbids,
    /// The memory to be changed is in use; a later call may succeed.
    Busy,
    /// The pages are locked into memory.
    Locked(VirtAddr),
    /// The content could not be read from, or written to, the object's storage.
    InputOutput,
    /// The offset or length exceeds an object's maximum.
    TooLarge,
    /// The object's storage has no room for more.
    NoSpace,
    /// The object's storage does not support the operation.
    NotSupported,
    /// The object shows the frames of a device and has no content that a call could change.
    NoContent,
    /// An access to the page would raise a signal.
    Fault(VirtAddr),
    /// The requested pages are not available now.
    TryAgain,
    /// The thread is about to be killed ([`crate::Platform::fatal_signal`]). The completed work is
    /// not undone, unless the call's documentation says otherwise.
    Interrupted,
    /// The build excludes the operation, which requires a feature of the crate.
    NotBuilt,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned(addr) => write!(f, "{addr} is not a multiple of the page size"),
            Self::ZeroLength => write!(f, "the length is zero"),
            Self::OutOfRange { limit } => {
                write!(f, "the range leaves user space, which ends at {limit}")
            }
            Self::TooLong => write!(f, "the length exceeds the whole user space"),
            Self::BelowMinimum { minimum } => {
                write!(f, "the address is below {minimum}, the lowest that may be mapped")
            }
            Self::Exists(addr) => write!(f, "{addr} is mapped already"),
            Self::NotMapped(addr) => write!(f, "nothing is mapped at {addr}"),
            Self::CrossesMapping { end } => {
                write!(f, "the range runs over the mapping's end at {end}")
            }
            Self::Overlap => write!(f, "source and destination overlap"),
            Self::TooManyMappings => write!(f, "the address space has too many mappings"),
            Self::NoRoom => write!(f, "there is no room for the mapping"),
            Self::OutOfMemory => write!(f, "physical memory ran out"),
            Self::NotShared => write!(f, "only shared mappings can be duplicated"),
            Self::LimitReached => write!(f, "the process may not have more memory"),
            Self::LockLimit => write!(f, "the process may not lock more memory"),
            Self::LockForbidden => write!(f, "the process may not lock memory"),
            Self::Overcommitted => write!(f, "more memory would be committed than there is"),
            Self::Sealed(at) => write!(f, "the mapping at {at} is sealed"),
            Self::AccessDenied => write!(f, "what backs the mapping does not allow that access"),
            Self::Invalid => write!(f, "the arguments mean nothing for such a mapping"),
            Self::SealForbids => write!(f, "a seal of the object forbids it"),
            Self::Busy => write!(f, "the memory to be changed is in use"),
            Self::Locked(at) => write!(f, "the mapping at {at} is locked into memory"),
            Self::InputOutput => write!(f, "the content could not be read or written"),
            Self::TooLarge => write!(f, "the offset or length is too large"),
            Self::NoSpace => write!(f, "what backs the object has no room for more"),
            Self::NotSupported => write!(f, "what backs the object cannot do that"),
            Self::NoContent => write!(f, "the object shows a device, and has no content"),
            Self::Fault(at) => write!(f, "a touch of {at} would be a signal"),
            Self::TryAgain => write!(f, "the pages cannot be had now"),
            Self::Interrupted => write!(f, "a fatal signal ended the call"),
            Self::NotBuilt => write!(f, "the build leaves the operation out"),
        }
    }
}

impl core::error::Error for Error {}

/// The reason why a fault could not be resolved; the embedder turns it into a signal.
///
/// ```
/// use bindery::FaultError;
///
/// fn signal(error: FaultError) -> &'static str {
///     match error {
///         FaultError::Bus => "SIGBUS",
///         FaultError::OutOfMemory => "none: free memory, and repeat the fault",
///         _ => "SIGSEGV",
///     }
/// }
/// assert_eq!(signal(FaultError::NotMapped), "SIGSEGV");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultError {
    /// No mapping exists at the address (SIGSEGV, `SEGV_MAPERR`).
    NotMapped,
    /// The mapping does not allow the access (SIGSEGV, `SEGV_ACCERR`).
    Protection,
    /// The thread's protection keys deny the access (SIGSEGV, `SEGV_PKUERR`, the key in `si_pkey`).
    ProtectionKey(ProtectionKey),
    /// The page's content is lost or not available (SIGBUS).
    Bus,
    /// Physical memory ran out; nothing has changed, and the access may be retried.
    OutOfMemory,
    /// A signal arrived while the fault waited for a userfaultfd's handler ([`crate::Userfault`]).
    /// Nothing has changed; the embedder handles the signal, and the access may be retried.
    Interrupted,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMapped => "nothing is mapped at the address",
            Self::Protection => "the mapping does not allow the access",
            Self::ProtectionKey(_) => "the thread's rights to the protection key forbid the access",
            Self::Bus => "the page's content is lost",
            Self::OutOfMemory => "physical memory ran out",
            Self::Interrupted => "a signal came while the fault waited",
        })
    }
}

impl core::error::Error for FaultError {}

/// The reason why nothing was pinned ([`crate::AddressSpace::pin`]).
///
/// ```
/// use bindery::{Errno, FaultError, PinError};
///
/// assert_eq!(PinError::Fault(FaultError::NotMapped).errno(), Errno::EFAULT);
/// assert_eq!(PinError::LimitReached.errno(), Errno::ENOMEM);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PinError {
    /// The access would be refused, or memory for the page is lacking.
    Fault(FaultError),
    /// The address space would exceed its limit of pinned memory ([`crate::Limits::pinned`]).
    LimitReached,
    /// The folio has the maximum number of pins that such an address space may use.
    FolioLimit,
}

impl PinError {
    /// The errno that Linux returns for this reason (`pin_user_pages` and its callers).
    ///
    /// Context: any.
    pub fn errno(self) -> Errno {
        match self {
            Self::Fault(FaultError::OutOfMemory) | Self::LimitReached | Self::FolioLimit => {
                Errno::ENOMEM
            }
            Self::Fault(_) => Errno::EFAULT,
        }
    }
}

impl From<FaultError> for PinError {
    fn from(error: FaultError) -> Self {
        Self::Fault(error)
    }
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(error) => error.fmt(f),
            Self::LimitReached => f.write_str("the process may not have more memory pinned"),
            Self::FolioLimit => f.write_str("the folio may not be pinned more often"),
        }
    }
}

impl core::error::Error for PinError {}
