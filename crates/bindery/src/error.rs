//! What can go wrong, with the errno that Linux gives for it.

use core::fmt;

use crate::addr::VirtAddr;
use crate::arch::ProtectionKey;

/// Why a call was refused. Whatever is refused has changed nothing, unless the operation says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The address is not a multiple of the page size.
    Unaligned(VirtAddr),
    /// The length is zero, or becomes zero when rounded up to pages.
    ZeroLength,
    /// The range leaves the addresses that user space may have.
    OutOfRange {
        /// The address behind the last permitted one.
        limit: VirtAddr,
    },
    /// A mapping longer than the whole user space was asked for.
    TooLong,
    /// The address lies below the lowest one that may be mapped.
    BelowMinimum {
        /// The lowest address that may be mapped.
        minimum: VirtAddr,
    },
    /// Something is mapped there, and the caller asked not to replace it.
    Exists(VirtAddr),
    /// Nothing is mapped at the address, and the call needs a mapping there.
    NotMapped(VirtAddr),
    /// The range runs over the end of the mapping that it begins in.
    CrossesMapping {
        /// Where the mapping ends.
        end: VirtAddr,
    },
    /// Source and destination of a move overlap.
    Overlap,
    /// The address space has as many mappings as it may have.
    TooManyMappings,
    /// There is no free stretch of addresses of that length, or the mapping cannot grow in place.
    NoRoom,
    /// Physical memory ran out; the embedder may free some and call again.
    OutOfMemory,
    /// Duplicating a mapping by a length of zero works for shared mappings only.
    NotShared,
    /// The process would have more address space or data than its limit allows.
    LimitReached,
    /// The process would have more locked memory than its limit allows.
    LockLimit,
    /// The process may lock no memory at all.
    LockForbidden,
    /// More memory would be committed than there is ([`crate::Overcommit`]).
    Overcommitted,
    /// A mapping in the range is sealed.
    Sealed(VirtAddr),
    /// What backs the mapping does not allow the access, or its seals forbid it.
    AccessDenied,
    /// An argument, or a combination of arguments, that means nothing, or nothing for such a
    /// mapping.
    Invalid,
    /// The object's seals forbid it.
    SealForbids,
    /// Somebody uses what would have to change; later may be better.
    Busy,
    /// The pages are locked into memory.
    Locked(VirtAddr),
    /// The content could not be read from what backs the mapping, or written to it.
    InputOutput,
    /// The offset or length is more than an object can have.
    TooLarge,
    /// What backs the object has no room for more.
    NoSpace,
    /// What backs the object cannot do such a thing.
    NotSupported,
    /// A touch of the page would be a signal.
    Fault(VirtAddr),
    /// The pages that were asked for could not be had now.
    TryAgain,
    /// The thread is about to be killed ([`crate::Platform::fatal_signal`]). What was done before stays
    /// done, unless the call's documentation says otherwise.
    Interrupted,
}

/// Error numbers of Linux on all three architectures (`asm-generic/errno-base.h` values).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Errno {
    /// Operation not permitted.
    EPERM = 1,
    /// No such file, or no such mapping.
    ENOENT = 2,
    /// No such process.
    ESRCH = 3,
    /// Interrupted by a signal.
    EINTR = 4,
    /// Input or output failed.
    EIO = 5,
    /// The argument is too long.
    E2BIG = 7,
    /// Bad file descriptor.
    EBADF = 9,
    /// Try again.
    EAGAIN = 11,
    /// Out of memory or address space.
    ENOMEM = 12,
    /// Permission denied.
    EACCES = 13,
    /// Bad address.
    EFAULT = 14,
    /// Busy.
    EBUSY = 16,
    /// File exists.
    EEXIST = 17,
    /// No such device.
    ENODEV = 19,
    /// Invalid argument.
    EINVAL = 22,
    /// File too large.
    EFBIG = 27,
    /// No space left.
    ENOSPC = 28,
    /// The name is too long.
    ENAMETOOLONG = 36,
    /// No such call.
    ENOSYS = 38,
    /// The offset does not fit.
    EOVERFLOW = 75,
    /// Not supported.
    EOPNOTSUPP = 95,
    /// The page's content is lost.
    EHWPOISON = 133,
}

impl Error {
    /// The errno that Linux returns for this refusal when `operation` is the call that was made.
    pub fn errno(self, operation: Operation) -> Errno {
        match self {
            Self::Unaligned(_) | Self::ZeroLength | Self::Overlap | Self::NotShared => {
                Errno::EINVAL
            }
            Self::OutOfRange { .. } | Self::TooLong => match operation {
                Operation::Mmap | Operation::Mprotect | Operation::Msync => Errno::ENOMEM,
                _ => Errno::EINVAL,
            },
            Self::BelowMinimum { .. } => Errno::EPERM,
            Self::Exists(_) => Errno::EEXIST,
            Self::NotMapped(_) => match operation {
                Operation::Mremap => Errno::EFAULT,
                _ => Errno::ENOMEM,
            },
            Self::CrossesMapping { .. } => Errno::EFAULT,
            Self::TooManyMappings
            | Self::NoRoom
            | Self::OutOfMemory
            | Self::LimitReached
            | Self::Overcommitted => Errno::ENOMEM,
            Self::LockLimit => match operation {
                Operation::Mlock => Errno::ENOMEM,
                _ => Errno::EAGAIN,
            },
            Self::LockForbidden | Self::Sealed(_) | Self::SealForbids => Errno::EPERM,
            Self::AccessDenied => Errno::EACCES,
            Self::Invalid => Errno::EINVAL,
            Self::Busy => Errno::EBUSY,
            Self::Locked(_) => match operation {
                Operation::Msync => Errno::EBUSY,
                _ => Errno::EINVAL,
            },
            Self::InputOutput => Errno::EIO,
            Self::NoSpace => Errno::ENOSPC,
            Self::NotSupported => Errno::EOPNOTSUPP,
            Self::TooLarge => match operation {
                Operation::Mmap => Errno::EOVERFLOW,
                _ => Errno::EFBIG,
            },
            Self::Fault(_) => match operation {
                // mlock(2): pages that cannot be had are as if nothing were mapped.
                Operation::Mlock => Errno::ENOMEM,
                _ => Errno::EFAULT,
            },
            Self::TryAgain => Errno::EAGAIN,
            Self::Interrupted => Errno::EINTR,
        }
    }
}

/// The calls whose errno for one and the same refusal differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// `mmap(2)`.
    Mmap,
    /// `munmap(2)`.
    Munmap,
    /// `mprotect(2)`.
    Mprotect,
    /// `mremap(2)`.
    Mremap,
    /// `madvise(2)`.
    Madvise,
    /// `brk(2)`.
    Brk,
    /// `mlock(2)` and its kin.
    Mlock,
    /// `mincore(2)`.
    Mincore,
    /// `msync(2)`.
    Msync,
    /// `mseal(2)`.
    Mseal,
    /// What is done to an object: `ftruncate(2)`, `fallocate(2)`, `fcntl(2)`.
    Object,
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
            Self::Busy => write!(f, "somebody uses what would have to change"),
            Self::Locked(at) => write!(f, "the mapping at {at} is locked into memory"),
            Self::InputOutput => write!(f, "the content could not be read or written"),
            Self::TooLarge => write!(f, "the offset or length is too large"),
            Self::NoSpace => write!(f, "what backs the object has no room for more"),
            Self::NotSupported => write!(f, "what backs the object cannot do that"),
            Self::Fault(at) => write!(f, "a touch of {at} would be a signal"),
            Self::TryAgain => write!(f, "the pages cannot be had now"),
            Self::Interrupted => write!(f, "a fatal signal ended the call"),
        }
    }
}

impl core::error::Error for Error {}

/// Why a fault could not be resolved: what the embedder turns into a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultError {
    /// Nothing is mapped there (SIGSEGV, `SEGV_MAPERR`).
    NotMapped,
    /// The mapping does not allow the access (SIGSEGV, `SEGV_ACCERR`).
    Protection,
    /// The thread has shut itself off from memory of this key (SIGSEGV, `SEGV_PKUERR`, the key in
    /// `si_pkey`).
    ProtectionKey(ProtectionKey),
    /// The page's content is lost or cannot be had (SIGBUS).
    Bus,
    /// Physical memory ran out; nothing has changed, and the access may be tried again.
    OutOfMemory,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMapped => "nothing is mapped at the address",
            Self::Protection => "the mapping does not allow the access",
            Self::ProtectionKey(_) => "the thread's rights to the protection key forbid the access",
            Self::Bus => "the page's content is lost",
            Self::OutOfMemory => "physical memory ran out",
        })
    }
}

impl core::error::Error for FaultError {}

/// Why nothing was pinned ([`crate::AddressSpace::pin`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PinError {
    /// The access would be refused, or there is no memory for the page.
    Fault(FaultError),
    /// The address space would have more memory pinned than its limit allows
    /// ([`crate::Limits::pinned`]).
    LimitReached,
    /// The folio has as many pins as it may have of such an address space.
    FolioLimit,
}

impl PinError {
    /// The errno that Linux has for it (`pin_user_pages`, and who counts what it pins).
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
