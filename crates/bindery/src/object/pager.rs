//! [`Pager`]: the storage of a file's content.

use core::fmt;

use super::{ReadBuffer, StoredBytes};
use crate::error::{Error, Failure};

/// The reason for a pager's failure.
///
/// ```
/// use std::io;
///
/// use bindery::PagerError;
///
/// fn convert(error: &io::Error) -> PagerError {
///     match error.kind() {
///         io::ErrorKind::StorageFull => PagerError::NoSpace,
///         io::ErrorKind::OutOfMemory => PagerError::OutOfMemory,
///         _ => PagerError::InputOutput,
///     }
/// }
/// assert_eq!(convert(&io::ErrorKind::StorageFull.into()), PagerError::NoSpace);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PagerError {
    /// The content could not be read or written (`EIO`).
    InputOutput,
    /// The storage is full (`ENOSPC`).
    NoSpace,
    /// Memory ran out; the call may be repeated.
    OutOfMemory,
    /// The storage does not support the operation (`EOPNOTSUPP`).
    NotSupported,
}

/// The pager's want of memory is the call's: reclaim may help, as it does with the core's own.
impl From<PagerError> for Failure {
    fn from(error: PagerError) -> Self {
        match error {
            PagerError::InputOutput => Error::InputOutput.into(),
            PagerError::NoSpace => Error::NoSpace.into(),
            PagerError::OutOfMemory => Self::NoMemory,
            PagerError::NotSupported => Error::NotSupported.into(),
        }
    }
}

impl fmt::Display for PagerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InputOutput => "the content could not be read or written",
            Self::NoSpace => "the storage is full",
            Self::OutOfMemory => "memory ran out",
            Self::NotSupported => "the storage cannot do that",
        })
    }
}

impl core::error::Error for PagerError {}

/// Storage that files live in, as the embedder's file systems know it: it fills pages of memory
/// that are read, and takes back what was written.
///
/// Files have numbers that are the pager's own affair. An [`crate::Object`] of a file caches its
/// pages; there is at most one for each file at a time, which all who open the file share.
///
/// # Context
/// Context: may sleep. The functions are called from faults and operations, on any CPU, for
/// different files and different pages of one file at the same time.
///
/// # Locks
/// [`Pager::read`], [`Pager::write`] and [`Pager::removed`] are called without any lock: no mutex
/// of an address space, no VMA and no lock of the object is held, by the caller or by a thread that
/// waits for it. They may call the core, with the same address space and the same object, as long
/// as that does not wait for themselves:
/// - while pages are being read, a fault or a read of the same pages waits;
/// - while pages are being stored, a call that writes, drops or replaces the same pages waits, and
///   so does a `sync` of them.
///
/// [`Pager::resize`] and [`Pager::discard`] are called with the object locked against other changes
/// of its size and content from outside of mappings: they must not write, resize or punch the same
/// object. No other lock is held, and none of the pages concerned is being read or stored, but for
/// reads whose result nobody will use.
///
/// ```
/// use bindery::{Pager, PagerError, ReadBuffer, StoredBytes};
///
/// /// A disk without content that nobody can write.
/// struct Zeroes;
///
/// impl Pager for Zeroes {
///     fn read(&self, _file: u64, _page: u64, _into: &mut ReadBuffer) -> Result<(), PagerError> {
///         // Nothing was appended, so the pages are zeroes.
///         Ok(())
///     }
///
///     fn write(&self, _file: u64, _page: u64, _from: &[StoredBytes<'_>]) -> Result<(), PagerError> {
///         Err(PagerError::NotSupported)
///     }
///
///     fn resize(&self, _file: u64, _size: u64) -> Result<(), PagerError> {
///         Err(PagerError::NotSupported)
///     }
///
///     fn removed(&self, _file: u64) {}
/// }
/// ```
pub trait Pager: Send + Sync {
    /// Appends consecutive pages of a file from `first_page` on to `into`. Pages and parts of pages
    /// that it does not append are zeroes, and so is what lies after the end of the file.
    ///
    /// Asked for as many pages at once as are known to be needed, in as few pieces as there are
    /// folios that they go into: at most 32, of 1 to 512 pages each. No page is asked for twice at
    /// the same time, unless what the first call brings is out of date: the file was cut or punched
    /// there meanwhile.
    ///
    /// # Errors
    /// As [`PagerError`] says; whatever is in `into` then is not used. Where more than one page was
    /// asked for, fewer may be asked for next.
    fn read(&self, file: u64, first_page: u64, into: &mut ReadBuffer<'_>)
    -> Result<(), PagerError>;

    /// Stores consecutive pages of a file from `first_page` on: the bytes of all of `from`, one
    /// piece after the other. All pieces but the last are whole pages; the last ends with the file
    /// if that is not a multiple of the page size. Nobody changes these bytes meanwhile, unless a
    /// device does that has pinned them.
    ///
    /// Called with as many pages as were written next to each other, in as few pieces as their
    /// frames allow, at most 32. No page is stored twice at the same time.
    ///
    /// # Errors
    /// As [`PagerError`] says; the pages remain to be written then, and may be stored in part.
    fn write(&self, file: u64, first_page: u64, from: &[StoredBytes<'_>])
    -> Result<(), PagerError>;

    /// The file has `size` bytes now. What is cut off is gone: should the file grow again, it
    /// reads as zeroes.
    ///
    /// # Errors
    /// As [`PagerError`] says; the file keeps its size then.
    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError>;

    /// So many whole pages of the file from `first_page` on read as zeroes from now on, and need no
    /// storage (Linux: `FALLOC_FL_PUNCH_HOLE`).
    ///
    /// # Errors
    /// As [`PagerError`] says; the pages keep their content then. [`PagerError::NotSupported`]
    /// unless the pager says more.
    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        let _ = (file, first_page, pages);
        Err(PagerError::NotSupported)
    }

    /// Nobody has the object of this file any more: neither handles nor mappings. What was written
    /// has been stored, unless [`Pager::write`] refused it.
    fn removed(&self, file: u64);
}
