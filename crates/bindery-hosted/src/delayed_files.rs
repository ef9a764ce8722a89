//! [`DelayedFiles`]: a pager that answers when a test says so.

use std::collections::VecDeque;

use bindery::{KeptRead, Memory, Pager, PagerError, ReadRequest, StoredBytes};
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
    kept: VecDeque<(Asked, KeptRead)>,
    log: Vec<Asked>,
}

impl Requests {
    fn take(&mut self, is_it: &impl Fn(&Asked) -> bool) -> Option<KeptRead> {
        let at = self.kept.iter().position(|(asked, _)| is_it(asked))?;
        self.kept.remove(at).map(|(_, kept)| kept)
    }
}

/// Files in memory whose reads are answered by [`DelayedFiles::answer`], in any order, or never.
/// Writes are stored at once.
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

    /// All requests so far.
    pub fn log(&self) -> Vec<Asked> {
        self.requests.lock().log.clone()
    }

    /// Waits until there is a request that `is_it` chooses, and takes the first of them.
    pub fn take(&self, is_it: impl Fn(&Asked) -> bool) -> KeptRead {
        let mut requests = self.requests.lock();
        loop {
            if let Some(kept) = requests.take(&is_it) {
                return kept;
            }
            self.changed.wait(&mut requests);
        }
    }

    /// As [`DelayedFiles::take`], without waiting.
    pub fn try_take(&self, is_it: impl Fn(&Asked) -> bool) -> Option<KeptRead> {
        self.requests.lock().take(&is_it)
    }

    /// The number of requests that are not answered, and were not taken.
    pub fn waiting(&self) -> usize {
        self.requests.lock().kept.len()
    }

    /// Answers a request: with the content of the file, or a failure.
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

    /// Answers the requests that are not answered with the content of the files. Returns their
    /// number.
    pub fn answer_all<A: Walk>(&self, memory: &Memory<Machine<A>>) -> usize {
        let kept = std::mem::take(&mut self.requests.lock().kept);
        let count = kept.len();
        kept.into_iter().for_each(|(_, kept)| self.answer(memory, kept, Ok(())));
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
        requests.kept.push_back((asked, request.keep()));
        self.changed.notify_all();
    }

    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        self.files.write(file, first_page, from)
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
