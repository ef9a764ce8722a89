//! The error numbers of Linux, and the number of each refusal.

use super::Error;

/// Error numbers of Linux on all three architectures (`asm-generic/errno-base.h` values).
///
/// ```
/// use bindery::Errno;
///
/// /// The return value of a failed system call.
/// fn result(refused: Errno) -> i64 {
///     -(refused as i64)
/// }
/// assert_eq!(result(Errno::EINVAL), -22);
/// ```
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
    /// The errno that Linux returns for this refusal from `operation`.
    ///
    /// Context: any.
    pub fn errno(self, operation: Operation) -> Errno {
        match self {
            Self::Unaligned(_) | Self::ZeroLength | Self::Overlap | Self::NotShared => {
                Errno::EINVAL
            }
            Self::OutOfRange { .. } | Self::TooLong => match operation {
                Operation::Mmap | Operation::Mprotect | Operation::Msync => Errno::ENOMEM,
                Operation::Munmap
                | Operation::Mremap
                | Operation::Madvise
                | Operation::Brk
                | Operation::Mlock
                | Operation::Mincore
                | Operation::Mseal
                | Operation::Object
                | Operation::Userfault => Errno::EINVAL,
            },
            Self::BelowMinimum { .. } => Errno::EPERM,
            Self::Exists(_) => Errno::EEXIST,
            Self::NotMapped(_) => match operation {
                Operation::Mremap => Errno::EFAULT,
                Operation::Userfault => Errno::ENOENT,
                Operation::Mmap
                | Operation::Munmap
                | Operation::Mprotect
                | Operation::Madvise
                | Operation::Brk
                | Operation::Mlock
                | Operation::Mincore
                | Operation::Msync
                | Operation::Mseal
                | Operation::Object => Errno::ENOMEM,
            },
            Self::CrossesMapping { .. } => Errno::EFAULT,
            Self::TooManyMappings
            | Self::NoRoom
            | Self::OutOfMemory
            | Self::LimitReached
            | Self::Overcommitted => Errno::ENOMEM,
            Self::LockLimit => match operation {
                Operation::Mlock => Errno::ENOMEM,
                Operation::Mmap
                | Operation::Munmap
                | Operation::Mprotect
                | Operation::Mremap
                | Operation::Madvise
                | Operation::Brk
                | Operation::Mincore
                | Operation::Msync
                | Operation::Mseal
                | Operation::Object
                | Operation::Userfault => Errno::EAGAIN,
            },
            Self::LockForbidden | Self::Sealed(_) | Self::SealForbids => Errno::EPERM,
            Self::AccessDenied => match operation {
                Operation::Userfault => Errno::EPERM,
                Operation::Mmap
                | Operation::Munmap
                | Operation::Mprotect
                | Operation::Mremap
                | Operation::Madvise
                | Operation::Brk
                | Operation::Mlock
                | Operation::Mincore
                | Operation::Msync
                | Operation::Mseal
                | Operation::Object => Errno::EACCES,
            },
            Self::Invalid => Errno::EINVAL,
            Self::Busy => Errno::EBUSY,
            Self::Locked(_) => match operation {
                Operation::Msync => Errno::EBUSY,
                Operation::Mmap
                | Operation::Munmap
                | Operation::Mprotect
                | Operation::Mremap
                | Operation::Madvise
                | Operation::Brk
                | Operation::Mlock
                | Operation::Mincore
                | Operation::Mseal
                | Operation::Object
                | Operation::Userfault => Errno::EINVAL,
            },
            Self::InputOutput => Errno::EIO,
            Self::NoSpace => Errno::ENOSPC,
            Self::NotSupported => Errno::EOPNOTSUPP,
            Self::NoContent => Errno::ENODEV,
            Self::TooLarge => match operation {
                Operation::Mmap => Errno::EOVERFLOW,
                Operation::Munmap
                | Operation::Mprotect
                | Operation::Mremap
                | Operation::Madvise
                | Operation::Brk
                | Operation::Mlock
                | Operation::Mincore
                | Operation::Msync
                | Operation::Mseal
                | Operation::Object
                | Operation::Userfault => Errno::EFBIG,
            },
            Self::Fault(_) => match operation {
                // mlock(2): a page that cannot be provided is treated as not mapped.
                Operation::Mlock => Errno::ENOMEM,
                Operation::Mmap
                | Operation::Munmap
                | Operation::Mprotect
                | Operation::Mremap
                | Operation::Madvise
                | Operation::Brk
                | Operation::Mincore
                | Operation::Msync
                | Operation::Mseal
                | Operation::Object
                | Operation::Userfault => Errno::EFAULT,
            },
            Self::TryAgain => Errno::EAGAIN,
            Self::Interrupted => Errno::EINTR,
            Self::NotBuilt => match operation {
                // Advice that the kernel does not know.
                Operation::Madvise => Errno::EINVAL,
                Operation::Mmap
                | Operation::Munmap
                | Operation::Mprotect
                | Operation::Mremap
                | Operation::Brk
                | Operation::Mlock
                | Operation::Mincore
                | Operation::Msync
                | Operation::Mseal
                | Operation::Object
                | Operation::Userfault => Errno::ENOSYS,
            },
        }
    }
}

/// The calls that return different errnos for the same refusal.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{Errno, Error, Operation};
///
/// // The same refusal has another errno in another call.
/// let refusal = Error::NotMapped(VirtAddr(0x1000));
/// assert_eq!(refusal.errno(Operation::Mprotect), Errno::ENOMEM);
/// assert_eq!(refusal.errno(Operation::Mremap), Errno::EFAULT);
/// ```
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
    /// `mlock(2)` and related calls.
    Mlock,
    /// `mincore(2)`.
    Mincore,
    /// `msync(2)`.
    Msync,
    /// `mseal(2)`.
    Mseal,
    /// Calls on an object: `ftruncate(2)`, `fallocate(2)`, `fcntl(2)`.
    Object,
    /// Calls on a userfaultfd: `ioctl_userfaultfd(2)`.
    Userfault,
}
