//! [`WriteRequest`]: pages that a pager has to store, answered during the call or later.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::collections::page_tree::IndexRun;
use crate::frame::FrameRange;
use crate::platform::Platform;

use super::answer::{Answer, Requests};
use super::detached_batch::DetachedBatch;
use super::{PagerError, StoredBytes};

/// The maximum number of pieces in a request.
pub(super) const RUNS: usize = 32;

/// A write of adjacent runs of pages. It lies in the memory of the call that saves them and waits
/// for the answer, or in a [`DetachedBatch`].
pub(super) struct PageWrite<'r> {
    /// The pager's number of the file.
    file: u64,
    /// The runs; at least one.
    runs: &'r [IndexRun],
    /// The size of the file in bytes.
    size: u64,
    answer: Answer,
    /// The batch that contains the write, if any thread may end the batch.
    batch: Option<NonNull<DetachedBatch>>,
}

impl<'r> PageWrite<'r> {
    pub(super) fn new(file: u64, runs: &'r [IndexRun], size: u64) -> Self {
        Self { file, runs, size, answer: Answer::new(), batch: None }
    }

    /// Marks the write as a part of a batch that any thread may end.
    pub(super) fn of_batch(self, batch: NonNull<DetachedBatch>) -> Self {
        Self { batch: Some(batch), ..self }
    }

    /// The answer, if it has arrived.
    pub(super) fn answer(&self) -> Option<Result<(), PagerError>> {
        self.answer.get()
    }

    pub(super) fn runs(&self) -> &'r [IndexRun] {
        self.runs
    }
}

/// Consecutive pages of a file that a pager has to store ([`crate::Pager::begin_write`]), in pieces
/// of consecutive frames: adjacent dirty pages, in the fewest pieces that their frames allow, at
/// most 32. All pieces but the last are whole pages; the last ends with the file if its size is not
/// a multiple of the page size. The pager answers by [`WriteRequest::stored`] or
/// [`WriteRequest::fail`], exactly once, because both consume the request. A dropped request counts
/// as failed ([`PagerError::InputOutput`]).
///
/// A pager that waits for a device keeps the request as a value ([`WriteRequest::keep`]) and
/// resumes it when the device is done ([`Memory::resume_write`]), as [`crate::ReadRequest`] shows.
/// Until the answer, the pages stay in place, and no program or call changes them. Only a device
/// that has pinned them can. A second answer does not compile:
///
/// ```
/// use bindery::{PagerError, WriteRequest};
///
/// fn answer(request: WriteRequest<'_>, is_well: bool) {
///     if is_well { request.stored() } else { request.fail(PagerError::NoSpace) }
/// }
/// ```
///
/// ```compile_fail,E0382
/// use bindery::{PagerError, WriteRequest};
///
/// fn answer(request: WriteRequest<'_>, is_well: bool) {
///     request.stored();
///     if !is_well { request.fail(PagerError::NoSpace) }
/// }
/// ```
///
/// # Context
/// Context: any, including an interrupt handler. An answer stores a word and wakes threads
/// ([`Platform::unpark`]); it acquires no lock of the core.
#[must_use = "a request that is dropped has failed"]
pub struct WriteRequest<'a> {
    memory: &'a (dyn Requests + 'a),
    write: NonNull<PageWrite<'static>>,
}

// SAFETY: the fields that the request reads are constant or atomic, and `Requests` is `Sync`.
unsafe impl Send for WriteRequest<'_> {}

/// A request that a pager has kept. Its pages count as being stored until it is answered. A kept
/// request that is dropped or forgotten is never answered, so the threads that save or change the
/// pages wait forever.
#[must_use = "it is answered through Memory::resume_write"]
pub struct KeptWrite {
    write: NonNull<PageWrite<'static>>,
    /// The identity of the memory that the request belongs to.
    memory: u64,
}

// SAFETY: as above; only `Memory::resume_write` reads through the pointer.
unsafe impl Send for KeptWrite {}

impl<P: Platform> Memory<P> {
    /// Resumes a request that a pager has kept, so that the pager can answer it.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// The request itself, if it belongs to another memory.
    pub fn resume_write(&self, kept: KeptWrite) -> Result<WriteRequest<'_>, KeptWrite> {
        if kept.memory != self.answers.identity {
            return Err(kept);
        }
        Ok(WriteRequest { memory: self, write: kept.write })
    }
}

impl<'a> WriteRequest<'a> {
    /// # Safety
    /// 1. The write and its runs do not change until the write is answered. The write has no other
    ///    request.
    /// 2. Until then, the frames of the runs stay in place, and no reference forbids reading them.
    pub(super) unsafe fn new<P: Platform>(memory: &'a Memory<P>, write: &PageWrite<'_>) -> Self {
        // The type does not express the lifetime, which obligation 1 limits.
        Self { memory, write: NonNull::from(write).cast() }
    }

    fn write(&self) -> &PageWrite<'_> {
        // SAFETY: the write lives until it is answered (obligation 1 of `new`), and this is its
        // only request.
        unsafe { self.write.as_ref() }
    }

    /// The pager's number of the file.
    pub fn file(&self) -> u64 {
        self.write().file
    }

    /// The number of the first page.
    pub fn first_page(&self) -> u64 {
        self.write().runs.first().map_or(0, |run| run.page)
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.write().runs.iter().map(|run| u64::from(run.count)).sum()
    }

    /// The number of bytes to be stored; the last page may be stored in part.
    pub fn length(&self) -> u64 {
        let left = self.write().size - (self.first_page() << PAGE_SHIFT);
        left.min(self.pages() * PAGE_SIZE)
    }

    /// The frames of the pieces, in order, for a device that reads memory directly. The device must
    /// have finished with them before the answer.
    pub fn frames(&self) -> impl Iterator<Item = FrameRange> + '_ {
        self.write().runs.iter().map(|run| FrameRange { first: run.frame, count: run.count })
    }

    /// Shows the bytes of the pieces to `store`.
    pub fn with_bytes<R>(&self, store: impl FnOnce(&[StoredBytes<'_>]) -> R) -> R {
        let write = self.write();
        let bytes = |run: &IndexRun| {
            let left = write.size - (run.page << PAGE_SHIFT);
            let length = left.min(u64::from(run.count) * PAGE_SIZE) as usize;
            // SAFETY: 1. the direct map shows the bytes of the run's frames, which are consecutive
            // (obligation 1 of `Platform`, and `Frames::new` checked where two ranges touch). They
            // stay in place until the answer. 2. No reference to the bytes exists (obligation 2 of
            // `new`).
            unsafe { self.memory.stored(run, length) }
        };
        let pieces: ArrayVec<StoredBytes<'_>, RUNS> = write.runs.iter().map(bytes).collect();
        store(&pieces)
    }

    /// Answers that the pages are stored.
    pub fn stored(self) {
        self.answer(Ok(()));
    }

    /// Answers that the pages could not be stored, or only in part. They become dirty again.
    pub fn fail(self, error: PagerError) {
        self.answer(Err(error));
    }

    /// Keeps the request, so that it can be answered later.
    pub fn keep(self) -> KeptWrite {
        let kept = KeptWrite { write: self.write, memory: self.memory.identity() };
        core::mem::forget(self);
        kept
    }

    fn answer(self, result: Result<(), PagerError>) {
        let (memory, write) = (self.memory, self.write);
        core::mem::forget(self);
        // SAFETY: 1. the write lives until it is answered (obligation 1 of `new`), and this was its
        // only request.
        unsafe { memory.answer_write(write, result) }
    }
}

/// As [`super::answer::Requests::answer_write`].
///
/// # Safety
/// 1. As for [`super::answer::Requests::answer_write`].
pub(super) unsafe fn answer_write<P: Platform>(
    memory: &Memory<P>,
    write: NonNull<PageWrite<'static>>,
    result: Result<(), PagerError>,
) {
    let batch = {
        // SAFETY: the write lives until it is answered (obligation 1).
        let write = unsafe { write.as_ref() };
        let batch = write.batch;
        // From here on a thread may free the write, unless it is a part of a batch.
        write.answer.give(result);
        batch
    };
    if let Some(batch) = batch {
        // SAFETY: 1. the batch has counted this answer.
        unsafe { super::detached_batch::answer(memory, batch) };
    }
    memory.answers.completions.note(memory.platform());
}

impl Drop for WriteRequest<'_> {
    fn drop(&mut self) {
        // SAFETY: 1. as in `answer`.
        unsafe { self.memory.answer_write(self.write, Err(PagerError::InputOutput)) }
    }
}

impl fmt::Debug for WriteRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteRequest")
            .field("file", &self.file())
            .field("first_page", &self.first_page())
            .field("pages", &self.pages())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for KeptWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptWrite").finish_non_exhaustive()
    }
}
