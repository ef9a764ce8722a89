//! Files whose pager can be held in the middle of a call until a test releases it.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use bindery::{Pager, PagerError, ReadBuffer, StoredBytes};
use bindery_hosted::MemoryFiles;

/// The time after which a held call counts as hung. The test makes other calls in between.
const HANGS: Duration = Duration::from_secs(60);

/// A request to a pager.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Io {
    Read,
    Write,
    Discard,
    /// Only of a [`super::reserving_pager::ReservingFiles`], like the next one.
    MakeWritable,
    PrepareWrite,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    #[default]
    Free,
    /// The next call for this page is held.
    Chosen(Io, u64),
    /// The chosen call is held.
    Held,
    /// The held call may continue.
    Released,
    /// The test did not release it in time.
    HeldForTooLong,
}

/// Files in memory; one call can be held.
#[derive(Default)]
pub struct HeldFiles {
    pub files: MemoryFiles,
    phase: Mutex<Phase>,
    changed: Condvar,
    /// The number of next writes that fail.
    pub failures: Mutex<u64>,
    /// All requests: the first page, and the number of pages.
    pub asked: Mutex<Vec<(Io, u64, u64)>>,
}

impl HeldFiles {
    pub fn new() -> Self {
        Self::default()
    }

    /// Holds the next call for `page`.
    pub fn hold_next(&self, io: Io, page: u64) {
        *self.phase.lock().unwrap() = Phase::Chosen(io, page);
    }

    /// Waits until the chosen call is held. The pager has then read the content that it will return
    /// but has written nothing.
    pub fn wait_until_held(&self) {
        let phase = self.phase.lock().unwrap();
        let (phase, _) = self
            .changed
            .wait_timeout_while(phase, HANGS, |phase| matches!(phase, Phase::Chosen(..)))
            .unwrap();
        assert_eq!(*phase, Phase::Held, "the pager was not asked");
    }

    /// Releases the held call. Panics if the release is too late, which means that the calls in
    /// between have waited for the held call.
    #[track_caller]
    pub fn release(&self) {
        let mut phase = self.phase.lock().unwrap();
        assert_eq!(*phase, Phase::Held, "somebody waited for the pager");
        *phase = Phase::Released;
        self.changed.notify_all();
    }

    /// Like [`HeldFiles::release`], but also holds the next call for `page`.
    #[track_caller]
    pub fn release_and_hold_next(&self, io: Io, page: u64) {
        let mut phase = self.phase.lock().unwrap();
        assert_eq!(*phase, Phase::Held, "somebody waited for the pager");
        *phase = Phase::Chosen(io, page);
        self.changed.notify_all();
    }

    /// The number of requests for `page`.
    pub fn times(&self, io: Io, page: u64) -> usize {
        let asked = self.asked.lock().unwrap();
        let concerns = |(what, first, count): &&(Io, u64, u64)| {
            *what == io && (*first..first + count).contains(&page)
        };
        asked.iter().filter(concerns).count()
    }

    /// Logs a request, and holds the call if it was chosen.
    pub fn enter(&self, io: Io, first: u64, count: u64) {
        self.asked.lock().unwrap().push((io, first, count));
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = |page| (first..first + count).contains(&page);
        match *phase {
            Phase::Chosen(what, page) if what == io && chosen(page) => *phase = Phase::Held,
            _ => return,
        }
        self.changed.notify_all();
        let (mut phase, timeout) = self
            .changed
            .wait_timeout_while(phase, HANGS, |phase| *phase == Phase::Held)
            .unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            *phase = Phase::HeldForTooLong;
        }
    }
}

fn pages(pieces: impl Iterator<Item = usize>) -> u64 {
    pieces.map(|length| length.div_ceil(4096) as u64).sum()
}

/// A copy of the bytes.
pub fn stored_content(piece: &StoredBytes<'_>) -> Vec<u8> {
    let mut bytes = vec![0; piece.len()];
    piece.copy_to(0, &mut bytes);
    bytes
}

impl Pager for HeldFiles {
    fn read(
        &self,
        file: u64,
        first_page: u64,
        into: &mut ReadBuffer<'_>,
    ) -> Result<(), PagerError> {
        self.files.read(file, first_page, into)?;
        self.enter(Io::Read, first_page, into.length() as u64 / 4096);
        Ok(())
    }

    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        let before: Vec<Vec<u8>> = from.iter().map(stored_content).collect();
        self.enter(Io::Write, first_page, pages(from.iter().map(|piece| piece.len())));
        assert!(from.iter().map(stored_content).eq(before), "the bytes have changed");
        let mut failures = self.failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return Err(PagerError::InputOutput);
        }
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
