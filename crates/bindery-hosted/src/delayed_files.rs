//! [`DelayedFiles`]: a pager that answers when a test says so.

use std::collections::VecDeque;

use bindery::{
    KeptRead, KeptWrite, Memory, Pager, PagerError, ReadRequest, StoredBytes, WriteRequest,
};
use parking_lot::{Condvar, Mutex};

use crate::{Machine, MemoryFiles, Walk};

/// A request that a [`DelayedFiles`] has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The first page.
    pub first: u64,
    /// The number of pages.
    pub pages: u64,
    /// Whether no thread waits for them.
    pub ahead: bool,
}

/// The requests of the pager.
#[derive(Default)]
struct Requests {
    reads: VecDeque<(Asked, KeptRead)>,
    writes: VecDeque<(Asked, KeptWrite)>,
    /// Whether writes are kept, too.
    keeps_writes: bool,
    log: Vec<Asked>,
}

/// Takes the first request that `is_it` chooses.
fn take<T>(kept: &mut VecDeque<(Asked, T)>, is_it: &impl Fn(&Asked) -> bool) -> Option<T> {
    let at = kept.iter().position(|(asked, _)| is_it(asked))?;
    kept.remove(at).map(|(_, kept)| kept)
}

/// Files in memory whose reads are answered by [`DelayedFiles::answer`], in any order, or never.
/// Writes are stored at once, unless [`DelayedFiles::keep_writes`] says otherwise.
#[derive(Default)]
pub struct DelayedFiles {
    /// The content.
    pub files: MemoryFiles,
    requests: Mutex<Requests>,
    changed: Condvar,
}

impl DelayedFiles {
    /// All files are empty, and no read was asked for.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps writes from now on, or stores them at once.
    pub fn keep_writes(&self, keeps: bool) {
        self.requests.lock().keeps_writes = keeps;
    }

    /// All reads that were asked for so far.
    pub fn log(&self) -> Vec<Asked> {
        self.requests.lock().log.clone()
    }

    /// Waits until there is a read that `is_it` chooses, and takes the first of them.
    pub fn take(&self, is_it: impl Fn(&Asked) -> bool) -> KeptRead {
        let mut requests = self.requests.lock();
        loop {
            if let Some(kept) = take(&mut requests.reads, &is_it) {
                return kept;
            }
            self.changed.wait(&mut requests);
        }
    }

    /// As [`DelayedFiles::take`], without waiting.
    pub fn try_take(&self, is_it: impl Fn(&Asked) -> bool) -> Option<KeptRead> {
        take(&mut self.requests.lock().reads, &is_it)
    }

    /// Waits until `count` writes are kept.
    pub fn wait_for_writes(&self, count: usize) {
        let mut requests = self.requests.lock();
        while requests.writes.len() < count {
            self.changed.wait(&mut requests);
        }
    }

    /// Takes the first of the kept writes that `is_it` chooses.
    pub fn try_take_write(&self, is_it: impl Fn(&Asked) -> bool) -> Option<KeptWrite> {
        take(&mut self.requests.lock().writes, &is_it)
    }

    /// Answers a write: stores the pages, or fails.
    pub fn answer_write<A: Walk>(
        &self,
        memory: &Memory<Machine<A>>,
        kept: KeptWrite,
        answer: Result<(), PagerError>,
    ) {
        let Ok(request) = memory.resume_write(kept) else { return };
        let (file, first) = (request.file(), request.first_page());
        let store = |from: &[StoredBytes<'_>]| self.files.write(file, first, from);
        match answer.and_then(|()| request.with_bytes(store)) {
            Ok(()) => request.stored(),
            Err(error) => request.fail(error),
        }
    }

    /// Answers a read: with the content of the file, or a failure.
    pub fn answer<A: Walk>(
        &self,
        memory: &Memory<Machine<A>>,
        kept: KeptRead,
        answer: Result<(), PagerError>,
    ) {
        let Ok(mut request) = memory.resume_read(kept) else { return };
        let (file, first) = (request.file(), request.first_page());
        match answer.and_then(|()| request.fill(|into| self.files.read(file, first, into))) {
            Ok(()) => request.supply(),
            Err(error) => request.fail(error),
        }
    }

    /// Answers the reads and writes that are kept as a device that works does. Returns their number.
    pub fn answer_all<A: Walk>(&self, memory: &Memory<Machine<A>>) -> usize {
        let (reads, writes) = {
            let mut requests = self.requests.lock();
            (std::mem::take(&mut requests.reads), std::mem::take(&mut requests.writes))
        };
        let count = reads.len() + writes.len();
        reads.into_iter().for_each(|(_, kept)| self.answer(memory, kept, Ok(())));
        writes.into_iter().for_each(|(_, kept)| self.answer_write(memory, kept, Ok(())));
        count
    }
}

impl Pager for DelayedFiles {
    fn begin_read(&self, request: ReadRequest<'_>) {
        let asked = Asked {
            first: request.first_page(),
            pages: request.pages(),
            ahead: request.is_ahead(),
        };
        let frames: u64 = request.frames().map(|range| u64::from(range.count)).sum();
        assert_eq!(frames, asked.pages, "the frames of the request");
        let mut requests = self.requests.lock();
        requests.log.push(asked);
        requests.reads.push_back((asked, request.keep()));
        self.changed.notify_all();
    }

    fn begin_write(&self, request: WriteRequest<'_>) {
        let asked = Asked { first: request.first_page(), pages: request.pages(), ahead: false };
        let frames: u64 = request.frames().map(|range| u64::from(range.count)).sum();
        assert_eq!(frames, asked.pages, "the frames of the request");
        let bytes: usize = request.with_bytes(|from| from.iter().map(StoredBytes::len).sum());
        assert_eq!(bytes as u64, request.length(), "the bytes of the request");
        let mut requests = self.requests.lock();
        if requests.keeps_writes {
            requests.writes.push_back((asked, request.keep()));
            self.changed.notify_all();
            return;
        }
        drop(requests);
        let (file, first) = (request.file(), request.first_page());
        match request.with_bytes(|from| self.files.write(file, first, from)) {
            Ok(()) => request.stored(),
            Err(error) => request.fail(error),
        }
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.files.resize(file, size)
    }

    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        self.files.discard(file, first_page, pages)
    }

    fn removed(&self, file: u64) {
        self.files.removed(file);
    }
}
