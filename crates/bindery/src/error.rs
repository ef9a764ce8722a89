//! What can go wrong, with the errno that Linux gives for it.

use core::fmt;

use crate::addr::VirtAddr;

/// Why a call was refused. Whatever is refused has changed nothing, unless the verb says otherwise.
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
}

/// Error numbers of Linux on all three architectures (`asm-generic/errno-base.h` values).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Errno {
    /// Operation not permitted.
    EPERM = 1,
    /// Out of memory or address space.
    ENOMEM = 12,
    /// Bad address.
    EFAULT = 14,
    /// File exists.
    EEXIST = 17,
    /// Invalid argument.
    EINVAL = 22,
}

impl Error {
    /// The errno that Linux returns for this refusal when `verb` is the call that was made.
    pub fn errno(self, verb: Verb) -> Errno {
        match self {
            Self::Unaligned(_) | Self::ZeroLength | Self::Overlap | Self::NotShared => {
                Errno::EINVAL
            }
            Self::OutOfRange { .. } | Self::TooLong => match verb {
                Verb::Mmap | Verb::Mprotect => Errno::ENOMEM,
                Verb::Munmap | Verb::Mremap => Errno::EINVAL,
            },
            Self::BelowMinimum { .. } => Errno::EPERM,
            Self::Exists(_) => Errno::EEXIST,
            Self::NotMapped(_) => match verb {
                Verb::Mremap => Errno::EFAULT,
                _ => Errno::ENOMEM,
            },
            Self::CrossesMapping { .. } => Errno::EFAULT,
            Self::TooManyMappings | Self::NoRoom | Self::OutOfMemory => Errno::ENOMEM,
        }
    }
}

/// The calls whose errno for one and the same refusal differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    /// `mmap(2)`.
    Mmap,
    /// `munmap(2)`.
    Munmap,
    /// `mprotect(2)`.
    Mprotect,
    /// `mremap(2)`.
    Mremap,
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
            Self::Bus => "the page's content is lost",
            Self::OutOfMemory => "physical memory ran out",
        })
    }
}

impl core::error::Error for FaultError {}
