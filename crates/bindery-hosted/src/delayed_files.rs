//! [`DelayedFiles`]: a pager that answers on a test's command.

use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

use bindery::{
    KeptRead, KeptWrite, Memory, Pager, PagerError, ReadRequest, StoredBytes, WriteRequest,
};
use parking_lot::{Condvar, Mutex};

use crate::{Machine, MemoryFiles, Walk};

/// A request that a [`DelayedFiles`] holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The first page.
    pub first: u64,
    /// The number of pages.
    pub pages: u64,
    /// Whether the pages are readahead, for which no thread waits.
    pub ahead: bool,
}

/// The requests of the pager.
#[derive(Debug, Default)]
struct Requests {
    reads: VecDeque<(Asked, KeptRead)>,
    writes: VecDeque<(Asked, KeptWrite)>,
    keeps_reads: bool,
    keeps_writes: bool,
    /// The number of requests that a thread is answering ([`DelayedFiles::serve`]).
    in_service: usize,
    /// Whether the threads are to end.
    is_over: bool,
    /// Changes with each request that is served.
    served: usize,
    log: Vec<Asked>,
    /// One in this number of writes fails; none with 0.
    fails: u64,
    /// The number of writes so far.
    stored: u64,
}

/// A request in service.
enum Served {
    Read(KeptRead),
    Write(KeptWrite),
}

impl Requests {
    /// Takes some request.
    fn take_any(&mut self) -> Option<Served> {
        // Picks requests in no particular order.
        self.served += 7;
        let chosen = self.served;
        let (reads, writes) = (self.reads.len(), self.writes.len());
        let at = chosen.checked_rem(reads + writes)?;
        if at < reads {
            self.reads.remove(at).map(|(_, kept)| Served::Read(kept))
        } else {
            self.writes.remove(at - reads).map(|(_, kept)| Served::Write(kept))
        }
    }

    /// Counts a write. Returns whether it is to fail.
    fn next_fails(&mut self) -> bool {
        self.stored += 1;
        self.fails > 0 && self.stored.is_multiple_of(self.fails)
    }

    fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty() && self.in_service == 0
    }
}

/// Removes and returns the first request that `is_it` chooses.
fn take<T>(kept: &mut VecDeque<(Asked, T)>, is_it: &impl Fn(&Asked) -> bool) -> Option<T> {
    let at = kept.iter().position(|(asked, _)| is_it(asked))?;
    kept.remove(at).map(|(_, kept)| kept)
}

/// Files in memory. A request is answered at once, or kept until a test answers it
/// ([`DelayedFiles::answer`]), in any order, or never. [`DelayedFiles::new`] keeps reads.
#[derive(Debug, Default)]
pub struct DelayedFiles {
    /// The content.
    pub files: MemoryFiles,
    requests: Mutex<Requests>,
    changed: Condvar,
}

impl DelayedFiles {
    /// Keeps reads. All files are empty, and no read was requested.
    pub fn new() -> Self {
        let files = Self::default();
        files.keep_reads(true);
        files
    }

    /// Keeps reads from now on, or answers them at once.
    pub fn keep_reads(&self, keeps: bool) {
        self.requests.lock().keeps_reads = keeps;
    }

    /// Answers kept requests, each after a pause and in no particular order, until
    /// [`DelayedFiles::stop`]. Any number of threads may serve requests.
    pub fn serve<A: Walk>(&self, memory: &Memory<Machine<A>>, pause: Duration) {
        loop {
            let served = {
                let mut requests = self.requests.lock();
                loop {
                    if let Some(served) = requests.take_any() {
                        requests.in_service += 1;
                        break served;
                    }
                    if requests.is_over {
                        return;
                    }
                    self.changed.wait(&mut requests);
                }
            };
            thread::sleep(pause);
            match served {
                Served::Read(kept) => self.answer(memory, kept, Ok(())),
                Served::Write(kept) => self.answer_write(memory, kept, Ok(())),
            }
            self.requests.lock().in_service -= 1;
            self.changed.notify_all();
        }
    }

    /// Ends the threads that serve, once no request is left.
    pub fn stop(&self) {
        self.requests.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Waits until the threads that serve have answered all requests.
    pub fn wait_until_idle(&self) {
        let mut requests = self.requests.lock();
        while !requests.is_idle() {
            self.changed.wait(&mut requests);
        }
    }

    /// Keeps writes from now on, or stores them at once.
    pub fn keep_writes(&self, keeps: bool) {
        self.requests.lock().keeps_writes = keeps;
    }

    /// All reads that were requested so far.
    pub fn log(&self) -> Vec<Asked> {
        self.requests.lock().log.clone()
    }

    /// Waits until a read that `is_it` chooses is kept, and takes the first such read.
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
        match answer {
            Ok(()) => self.store(request),
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
        let Ok(request) = memory.resume_read(kept) else { return };
        match answer {
            Ok(()) => self.read_into(request),
            Err(error) => request.fail(error),
        }
    }

    /// One in `every` writes fails from now on; none with 0.
    pub fn fail_writes(&self, every: u64) {
        self.requests.lock().fails = every;
    }

    fn store(&self, request: WriteRequest<'_>) {
        if self.requests.lock().next_fails() {
            return request.fail(PagerError::InputOutput);
        }
        let (file, first) = (request.file(), request.first_page());
        match request.with_bytes(|from| self.files.write(file, first, from)) {
            Ok(()) => request.stored(),
            Err(error) => request.fail(error),
        }
    }

    fn read_into(&self, mut request: ReadRequest<'_>) {
        let (file, first) = (request.file(), request.first_page());
        match request.fill(|into| self.files.read(file, first, into)) {
            Ok(()) => request.supply(),
            Err(error) => request.fail(error),
        }
    }

    /// Answers all kept reads and writes successfully. Returns their number.
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
        if requests.keeps_reads {
            requests.reads.push_back((asked, request.keep()));
            self.changed.notify_all();
            return;
        }
        drop(requests);
        self.read_into(request);
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
        self.store(request);
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
