//! [`ReadRequest`]: pages that a pager has to read, answered during the call or later.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::Memory;
use crate::addr::PageRange;
use crate::frame::FrameRange;
use crate::platform::Platform;

use super::answer::Requests;
use super::page_read::{PageRead, Taker};
use super::{PagerError, ReadBuffer};

/// Consecutive pages of a file that a pager has to read ([`crate::Pager::begin_read`]). The pager
/// fills them and answers by [`ReadRequest::supply`] or [`ReadRequest::fail`], exactly once,
/// because both consume the request. A dropped request counts as failed
/// ([`PagerError::InputOutput`]).
///
/// A pager that waits for a device keeps the request as a value ([`ReadRequest::keep`]) and resumes
/// it when the device is done ([`Memory::resume_read`]):
///
/// ```
/// use std::collections::VecDeque;
/// use std::sync::Mutex;
///
/// use bindery::{KeptRead, Memory, Pager, PagerError, Platform, ReadRequest, StoredBytes};
///
/// /// A device with a queue.
/// #[derive(Default)]
/// struct Disk(Mutex<VecDeque<KeptRead>>);
///
/// impl Pager for Disk {
///     fn begin_read(&self, request: ReadRequest<'_>) {
///         // Here a driver would pass the frames of `request.frames()` to the device.
///         self.0.lock().unwrap().push_back(request.keep());
///     }
///
///     fn write(&self, _: u64, _: u64, _: &[StoredBytes<'_>]) -> Result<(), PagerError> {
///         Err(PagerError::NotSupported)
///     }
///
///     fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
///         Err(PagerError::NotSupported)
///     }
///
///     fn removed(&self, _: u64) {}
/// }
///
/// /// The interrupt of the device: it is done with its first request.
/// fn interrupt<P: Platform>(memory: &Memory<P>, disk: &Disk) {
///     let kept = disk.0.lock().unwrap().pop_front();
///     if let Some(Ok(mut request)) = kept.map(|kept| memory.resume_read(kept)) {
///         request.fill(|bytes| bytes.append_all(0));
///         request.supply();
///     }
/// }
/// ```
///
/// A second answer does not compile, nor does an answer to a request that is kept:
///
/// ```
/// use bindery::{PagerError, ReadRequest};
///
/// fn answer(request: ReadRequest<'_>, is_well: bool) {
///     if is_well { request.supply() } else { request.fail(PagerError::InputOutput) }
/// }
/// ```
///
/// ```compile_fail,E0382
/// use bindery::{PagerError, ReadRequest};
///
/// fn answer(request: ReadRequest<'_>, is_well: bool) {
///     request.supply();
///     if !is_well { request.fail(PagerError::InputOutput) }
/// }
/// ```
///
/// ```compile_fail,E0382
/// use bindery::{KeptRead, ReadRequest};
///
/// fn answer(request: ReadRequest<'_>) -> KeptRead {
///     let kept = request.keep();
///     request.supply();
///     kept
/// }
/// ```
///
/// # Context
/// Context: any, including an interrupt handler. An answer stores a few words and wakes threads
/// ([`Platform::unpark`]); it acquires no lock of the core. The caller moves the bytes.
#[must_use = "a request that is dropped has failed"]
pub struct ReadRequest<'a> {
    memory: &'a (dyn Requests + 'a),
    read: NonNull<PageRead>,
    /// Set if the pager keeps the request during [`crate::Pager::begin_read`].
    is_kept: Option<&'a AtomicBool>,
}

// SAFETY: the request is the only way to access the frames and the fields of the read that it
// changes; all other fields of the read are constant or atomic. `Requests` is `Sync`.
unsafe impl Send for ReadRequest<'_> {}

/// A request that a pager has kept. It holds its pages and the object until it is answered. A kept
/// request that is dropped or forgotten is never answered, so the threads that wait for its pages,
/// and the last holder of the object, wait forever. It is resumed once:
///
/// ```
/// use bindery::{KeptRead, Memory, Platform};
///
/// fn interrupt<P: Platform>(memory: &Memory<P>, kept: KeptRead) {
///     if let Ok(request) = memory.resume_read(kept) {
///         request.supply();
///     }
/// }
/// ```
///
/// ```compile_fail,E0382
/// use bindery::{KeptRead, Memory, Platform};
///
/// fn interrupt<P: Platform>(memory: &Memory<P>, kept: KeptRead) {
///     for _ in 0..2 {
///         if let Ok(request) = memory.resume_read(kept) {
///             request.supply();
///         }
///     }
/// }
/// ```
#[must_use = "it is answered through Memory::resume_read"]
pub struct KeptRead {
    read: NonNull<PageRead>,
    /// The identity of the memory that the request belongs to.
    memory: u64,
}

// SAFETY: as above; only `Memory::resume_read` reads through the pointer.
unsafe impl Send for KeptRead {}

impl<P: Platform> Memory<P> {
    /// Resumes a request that a pager has kept, so that the pager can answer it.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// The request itself, if it belongs to another memory.
    pub fn resume_read(&self, kept: KeptRead) -> Result<ReadRequest<'_>, KeptRead> {
        if kept.memory != self.answers.identity {
            return Err(kept);
        }
        Ok(ReadRequest { memory: self, read: kept.read, is_kept: None })
    }
}

impl<'a> ReadRequest<'a> {
    /// # Safety
    /// 1. The read was begun, belongs to this memory and has no other request.
    pub(super) unsafe fn new<P: Platform>(
        memory: &'a Memory<P>,
        read: NonNull<PageRead>,
        is_kept: &'a AtomicBool,
    ) -> Self {
        Self { memory, read, is_kept: Some(is_kept) }
    }

    fn read(&self) -> &PageRead {
        // SAFETY: a read that was begun lives until it is answered, and this is its only request
        // (obligation 1 of `new`; a kept request replaces it).
        unsafe { self.read.as_ref() }
    }

    /// The pager's number of the file.
    pub fn file(&self) -> u64 {
        // SAFETY: the object lives until the read is settled, which happens after the answer.
        unsafe { self.read().object().as_ref() }.file_number().unwrap_or(0)
    }

    /// The number of the first page.
    pub fn first_page(&self) -> u64 {
        self.read().pages().first
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        let PageRange { first, end } = self.read().pages();
        end - first
    }

    /// Whether no call and no fault needs the pages yet. A device with priorities serves other
    /// requests first.
    pub fn is_ahead(&self) -> bool {
        self.read().taker() == Taker::Any
    }

    /// The frames of the pages, in order, one piece for each folio, for a device that writes to
    /// memory directly. The device must have finished with them before the answer.
    /// [`ReadRequest::has_filled`] then reports how much it has written.
    pub fn frames(&self) -> impl Iterator<Item = FrameRange> + '_ {
        let frames =
            |folio: crate::folio::Folio| FrameRange { first: folio.head, count: folio.pages() };
        self.read().fresh().iter().map(move |fresh| frames(fresh.folio))
    }

    /// Notes that a device has written the first `bytes` bytes of the frames. The other bytes,
    /// which belong to the frames' last owner, are zeroed. A number beyond the size of the pages
    /// counts as that size.
    pub fn has_filled(&mut self, bytes: usize) {
        self.read().filled().set(bytes);
    }

    /// Calls `fill` to write the bytes, from the first unfilled one on. Bytes that `fill` does not
    /// append become zeroes, and so do those after the end of the file.
    pub fn fill<R>(&mut self, fill: impl FnOnce(&mut ReadBuffer<'_>) -> R) -> R {
        let read = self.read();
        // SAFETY: 1. this is the request, borrowed exclusively while the buffer lives.
        let mut buffer = unsafe { self.memory.buffer(read) };
        let result = fill(&mut buffer);
        read.filled().set(buffer.filled());
        result
    }

    /// Answers that the pages have their content.
    pub fn supply(self) {
        self.answer(Ok(()));
    }

    /// Answers that the pages cannot be read. A thread that waits for them receives the error; if
    /// the request was for more pages than the thread needs, the core may first request fewer. The
    /// error of a read ahead is not reported; the next access requests the page again.
    pub fn fail(self, error: PagerError) {
        self.answer(Err(error));
    }

    /// Keeps the request, so that it can be answered later.
    pub fn keep(self) -> KeptRead {
        let kept = KeptRead { read: self.read, memory: self.memory.identity() };
        if let Some(is_kept) = self.is_kept {
            is_kept.store(true, Ordering::Relaxed);
        }
        core::mem::forget(self);
        kept
    }

    fn answer(self, result: Result<(), PagerError>) {
        let (memory, read) = (self.memory, self.read);
        core::mem::forget(self);
        // SAFETY: 1. this consumes the only request of a read that was begun.
        unsafe { memory.answer_read(read, result) };
    }
}

impl Drop for ReadRequest<'_> {
    fn drop(&mut self) {
        // SAFETY: 1. as in `answer`.
        unsafe { self.memory.answer_read(self.read, Err(PagerError::InputOutput)) };
    }
}

impl fmt::Debug for ReadRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadRequest")
            .field("file", &self.file())
            .field("first_page", &self.first_page())
            .field("pages", &self.pages())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for KeptRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptRead").finish_non_exhaustive()
    }
}
