//! [`Pager`]: the storage of a file's content.

use core::fmt;

use super::{ReadBuffer, ReadRequest, StoredBytes, WriteRequest};
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

impl PagerError {
    pub(super) const ALL: [Self; 4] =
        [Self::InputOutput, Self::NoSpace, Self::OutOfMemory, Self::NotSupported];

    /// The error's number in a word; numbers start at 1.
    pub(super) const fn number(self) -> u32 {
        self as u32 + 1
    }

    /// The error that has the number.
    pub(super) fn of_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|error| error.number() == number)
    }
}

/// A pager's lack of memory counts as the core's own, because reclaim may help.
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

/// The answer of [`Pager::make_writable`].
///
/// ```
/// use bindery::WriteAccess;
///
/// /// Consents if the blocks are reserved already, and reserves them in another call otherwise.
/// fn answer(are_reserved: bool) -> WriteAccess {
///     if are_reserved { WriteAccess::Granted } else { WriteAccess::Later }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteAccess {
    /// The pages may be written.
    Granted,
    /// The pager has to sleep first: it is asked again after [`Pager::prepare_write`].
    Later,
}

/// The answer of [`Pager::begin_prepare_write`].
///
/// ```
/// use bindery::{Memory, Platform, Preparation};
///
/// /// A pager whose device reserves blocks.
/// fn answer(are_reserved: bool) -> Preparation {
///     if are_reserved { Preparation::Complete } else { Preparation::Begun }
/// }
///
/// /// The interrupt of that device.
/// fn reserved<P: Platform>(memory: &Memory<P>) {
///     memory.wake_prepared_writers();
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Preparation {
    /// As after [`Pager::prepare_write`].
    Complete,
    /// The pager works on it, and calls [`crate::Memory::wake_prepared_writers`] at the end.
    Begun,
    /// The pager has to sleep: a thread calls [`Pager::prepare_write`].
    InThread,
}

/// The storage of files, provided by the embedder's file systems. It fills pages that are read and
/// stores pages that were written.
///
/// The pager chooses the numbers of files. An [`crate::Object`] of a file caches its pages; each
/// file has at most one object at a time, which all openers of the file share
/// ([`crate::FileSystem`]).
///
/// # Context
/// Context: may sleep. The functions are called from faults and operations, on any CPU, for
/// different files and different pages of one file at the same time.
///
/// # Locks
/// [`Pager::begin_read`], [`Pager::begin_write`], [`Pager::read`], [`Pager::write`],
/// [`Pager::prepare_write`], [`Pager::begin_prepare_write`] and [`Pager::removed`] are called without
/// any lock: neither the caller nor a thread that waits for it holds a mutex of an address space, a
/// VMA or a lock of the object. These methods may call the
/// core, with the same address space and the same object, unless that call would wait for the
/// method itself:
/// - while pages are being read, faults and reads of the same pages wait, and so does the end of
///   the object;
/// - while pages are being stored, a call that writes, drops or replaces the same pages waits, and
///   so does a `sync` of them;
/// - at a dirty limit ([`crate::DirtyLimit`]), a call that writes a page waits for stores of all
///   files of the same file system, and for calls that change their pages or sizes. The pager must
///   therefore hold none of its locks during such a call;
/// - during [`Pager::removed`], [`crate::FileSystem::file`] of the same file waits.
///
/// [`Pager::resize`] and [`Pager::discard`] are called with the object locked against other changes
/// of its size and content from outside of mappings: they must not write, resize or punch the same
/// object. No other lock is held, and none of the pages concerned is being read or stored, except
/// for reads whose result is discarded. No page becomes writable during the call: a fault of one of
/// them waits.
///
/// [`Pager::make_writable`] is called with a VMA and the object locked. It must not sleep or call
/// the core. Its locks must be spin locks that are held across no call of the core.
///
/// ```
/// use bindery::{Pager, PagerError, ReadBuffer, StoredBytes};
///
/// /// A read-only disk of zeroes.
/// struct Zeroes;
///
/// impl Pager for Zeroes {
///     fn read(&self, _file: u64, _page: u64, _into: &mut ReadBuffer) -> Result<(), PagerError> {
///         // Nothing was appended, so the pages are zeroes.
///         Ok(())
///     }
///
///     fn write(&self, _file: u64, _page: u64, _from: &[StoredBytes<'_>]) -> Result<(), PagerError>
///     {
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
    /// Starts to read pages. The pager answers during the call, or later from any thread or
    /// interrupt handler ([`ReadRequest`]). A pager for an asynchronous device implements this
    /// method: pages are then read ahead while the reader continues, and faults that do not wait
    /// ([`crate::AddressSpace::try_fault`]) seldom need another thread. The provided version calls
    /// [`Pager::read`] and answers immediately.
    ///
    /// One request covers all pages that are known to be needed and all pages read ahead. It has
    /// one piece for each folio that they fill: at most 32 pieces, of 1 to 512 pages each. No page
    /// is requested twice at the same time.
    fn begin_read(&self, mut request: ReadRequest<'_>) {
        let (file, first) = (request.file(), request.first_page());
        match request.fill(|into| self.read(file, first, into)) {
            Ok(()) => request.supply(),
            Err(error) => request.fail(error),
        }
    }

    /// The maximum number of pages that are read before they are needed, for a sequential reader
    /// (Linux: `read_ahead_kb`, 32 pages of 4 KiB by default); 0 for none, for storage that is as
    /// fast as memory. A reader that has announced its order gets up to twice as many, if one
    /// request of 32 folios holds them ([`crate::ReadPattern::Sequential`]). More than 512 count as
    /// 512. Called once, when an object of the file is created.
    fn read_ahead(&self) -> u64 {
        32
    }

    /// Appends consecutive pages of a file from `first_page` on to `into`. Pages and parts of pages
    /// that are not appended become zeroes, and so do those after the end of the file.
    ///
    /// The synchronous form of [`Pager::begin_read`], which returns when the pages are read; a
    /// pager implements one of the two. The caller, a fault or a call, waits.
    ///
    /// # Errors
    /// See [`PagerError`]; the content of `into` is then not used. If a request for more than one
    /// page fails, the core may request fewer. The provided version fails
    /// ([`PagerError::NotSupported`]).
    fn read(
        &self,
        file: u64,
        first_page: u64,
        into: &mut ReadBuffer<'_>,
    ) -> Result<(), PagerError> {
        let _ = (file, first_page, into);
        Err(PagerError::NotSupported)
    }

    /// Starts to store pages. The pager answers during the call, or later from any thread or
    /// interrupt handler ([`WriteRequest`]). A call that saves a file requests up to 32 runs of
    /// pages before it waits for the answers, so a device can work on all of them. The provided
    /// version calls [`Pager::write`] and answers immediately.
    ///
    /// No page is stored twice at the same time.
    fn begin_write(&self, request: WriteRequest<'_>) {
        let (file, first) = (request.file(), request.first_page());
        match request.with_bytes(|from| self.write(file, first, from)) {
            Ok(()) => request.stored(),
            Err(error) => request.fail(error),
        }
    }

    /// The synchronous form of [`Pager::begin_write`], which returns when the pages are stored; a
    /// pager implements one of the two. It stores consecutive pages of a file from `first_page` on:
    /// the bytes of all pieces of `from`, in order. Only a device that has pinned the pages can
    /// change these bytes during the call.
    ///
    /// # Errors
    /// See [`PagerError`]; the pages stay dirty, and some may already be stored. The provided
    /// version fails ([`PagerError::NotSupported`]).
    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        let _ = (file, first_page, from);
        Err(PagerError::NotSupported)
    }

    /// Asks whether `pages` pages of the file from `first_page` on may become writable in a shared
    /// mapping. A pager that has to reserve storage, or keeps the time of the last change, does so
    /// here (Linux: `page_mkwrite`). Called for the first write to a page through a mapping since
    /// the page was read or stored, for one page or for all pages of a huge leaf; for the first
    /// write through a further mapping; and at the end of a pin for writing whose pages have been
    /// stored since. The pages may be dirty already, with or without an earlier consent.
    ///
    /// With [`WriteAccess::Granted`] the pages become dirty. Storage that the pager has reserved for
    /// them is in use until it has stored them, until [`Pager::discard`] or [`Pager::resize`] of
    /// them, or until [`Pager::removed`]. Pages of which the embedder itself forgets changes
    /// ([`crate::Object::discard`], [`crate::Object::size_changed`],
    /// [`crate::Object::discard_failed`]) are not stored either.
    ///
    /// The provided version consents.
    ///
    /// Context: spins; the fault holds locks.
    ///
    /// # Errors
    /// See [`PagerError`]: the write fails with [`crate::FaultError::Bus`], and nothing has changed
    /// for any of the pages. If there is no space for a huge leaf, the pager is asked for one page.
    /// The end of a pin ignores the error: the store of the pages may then fail.
    fn make_writable(
        &self,
        file: u64,
        first_page: u64,
        pages: u64,
    ) -> Result<WriteAccess, PagerError> {
        let _ = (file, first_page, pages);
        Ok(WriteAccess::Granted)
    }

    /// Prepares for writes to the pages, after [`WriteAccess::Later`]: [`Pager::make_writable`]
    /// then consents, unless another thread has made that impossible in between. No promise that
    /// the fault asks again: the mapping may be gone, and a reservation would have no page. Called
    /// without locks in the thread that faults, or in another one
    /// ([`crate::FaultWait::wait`]).
    ///
    /// # Errors
    /// See [`PagerError`]; the write fails with [`crate::FaultError::Bus`]. A pager that lacks space
    /// only for a huge leaf as a whole returns no error here, but from [`Pager::make_writable`]: the
    /// fault then asks for one page.
    fn prepare_write(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        let _ = (file, first_page, pages);
        Ok(())
    }

    /// As [`Pager::prepare_write`], for a task that must not sleep ([`crate::FaultWait::poll`]). The
    /// task asks in each poll, so a pager that answers [`Preparation::Begun`] answers the same while it
    /// works, and begins nothing twice. The task may be dropped, and then asks no more.
    ///
    /// The provided version leaves the preparation to a thread.
    ///
    /// Context: spins; called without locks.
    ///
    /// # Errors
    /// As [`Pager::prepare_write`].
    fn begin_prepare_write(
        &self,
        file: u64,
        first_page: u64,
        pages: u64,
    ) -> Result<Preparation, PagerError> {
        let _ = (file, first_page, pages);
        Ok(Preparation::InThread)
    }

    /// Sets the file's size to `size` bytes. The content beyond that size is lost: if the file
    /// grows again, the added range reads as zeroes.
    ///
    /// # Errors
    /// See [`PagerError`]; the file keeps its size.
    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError>;

    /// Discards `pages` whole pages of the file from `first_page` on: the pages read as zeroes from
    /// now on and need no storage (Linux: `FALLOC_FL_PUNCH_HOLE`).
    ///
    /// # Errors
    /// See [`PagerError`]; the pages keep their content. The default is
    /// [`PagerError::NotSupported`].
    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        let _ = (file, first_page, pages);
        Err(PagerError::NotSupported)
    }

    /// Called when the object of this file no longer has a handle or mapping. Its dirty pages were
    /// stored, unless [`Pager::write`] failed.
    fn removed(&self, file: u64);
}
