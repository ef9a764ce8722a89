//! The other sides of all waits: the pager, and the swap device.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bindery::{Memory, PagerError};
use bindery_hosted::{DelayedFiles, SwapFile, SwapService, served_in_place};

use super::world::P;
use crate::support::kernel::Numbers;

/// A device that no machine uses. It is never freed, as the core requires.
static FREE: Mutex<Option<&SwapFile>> = Mutex::new(None);

fn device() -> &'static SwapFile {
    FREE.lock().unwrap().take().unwrap_or_else(|| {
        let device = SwapFile::new(2048, SwapService::InOrder).expect("a temporary file");
        Box::leak(Box::new(device))
    })
}

pub struct Server<'m> {
    pub memory: &'m Memory<P>,
    pub files: &'m DelayedFiles,
    pub device: &'static SwapFile,
    numbers: RefCell<Numbers>,
    /// The answers so far that were errors, to reads and to writes.
    pub failed_reads: Cell<u64>,
    pub failed_writes: Cell<u64>,
    /// Whether the device's next transfer fails.
    fails_next: Arc<AtomicBool>,
    /// The device's failed transfers before this machine.
    failed_before: u64,
    /// Whether the pager lacks memory at times. A step then reclaims, and may sleep for that.
    lacks_memory: bool,
    /// Whether every answer is a success.
    pub is_kind: Cell<bool>,
}

fn count(cell: &Cell<u64>) {
    cell.set(cell.get() + 1);
}

impl<'m> Server<'m> {
    pub fn new(memory: &'m Memory<P>, files: &'m DelayedFiles, lacks_memory: bool) -> Self {
        let [failed_reads, failed_writes] = [const { Cell::new(0) }; 2];
        let (numbers, is_kind) = (RefCell::new(Numbers(1)), Cell::new(false));
        let device = device();
        let fails_next = Arc::new(AtomicBool::new(false));
        let fails = Arc::clone(&fails_next);
        device.fail(move |_| fails.swap(false, Ordering::Relaxed));
        let failed_before = device.counts().failed;
        Self {
            memory,
            files,
            device,
            numbers,
            failed_reads,
            failed_writes,
            fails_next,
            failed_before,
            lacks_memory,
            is_kind,
        }
    }

    /// Makes the following answers those of the seed.
    pub fn seed(&self, seed: u64) {
        *self.numbers.borrow_mut() = Numbers(seed);
    }

    pub fn below(&self, limit: u64) -> u64 {
        self.numbers.borrow_mut().below(limit)
    }

    /// Runs `work`, whose thread answers by `serve` in place of its sleeps.
    pub fn with<R>(&self, serve: impl Fn() -> bool, work: impl FnOnce() -> R) -> R {
        let serve = || {
            assert!(serve(), "a call sleeps, and nothing is left that could wake it");
            true
        };
        served_in_place(&serve, work)
    }

    /// Runs a step or a poll, which never sleeps until an answer comes.
    pub fn without_sleep<R>(&self, work: impl FnOnce() -> R) -> R {
        let serve = || {
            assert!(self.lacks_memory, "a step sleeps until an answer comes");
            assert!(self.serve(), "a step sleeps, and no answer is left to come");
            true
        };
        served_in_place(&serve, work)
    }

    /// Gives one answer. Returns whether there was a request.
    pub fn serve(&self) -> bool {
        let first = self.below(3);
        (first..first + 3)
            .any(|kind| if kind % 3 == 0 { self.serve_device() } else { self.answer() })
    }

    /// The device's transfers that have failed so far.
    pub fn failed_swaps(&self) -> u64 {
        self.device.counts().failed - self.failed_before
    }

    pub fn serve_device(&self) -> bool {
        let fails = !self.is_kind.get() && self.device.waiting() > 0 && self.below(16) == 0;
        self.fails_next.store(fails, Ordering::Relaxed);
        self.device.serve_one(self.memory)
    }

    /// The pager answers one request.
    pub fn answer(&self) -> bool {
        let error = match self.below(24) {
            _ if self.is_kind.get() => None,
            0 | 1 => Some(PagerError::InputOutput),
            2 if self.lacks_memory => Some(PagerError::OutOfMemory),
            _ => None,
        };
        let of_writes = self.below(2) == 0;
        [of_writes, !of_writes].iter().any(|&write| self.answer_some(write, error))
    }

    fn answer_some(&self, of_write: bool, error: Option<PagerError>) -> bool {
        let left = Cell::new(self.below(4));
        let chosen = |_: &_| {
            left.set(left.get().wrapping_sub(1));
            left.get() == u64::MAX
        };
        let answer = error.map_or(Ok(()), Err);
        if of_write {
            let kept = self.files.try_take_write(chosen);
            let Some(kept) = kept.or_else(|| self.files.try_take_write(|_| true)) else {
                return false;
            };
            if error.is_some() {
                count(&self.failed_writes);
            }
            self.files.answer_write(self.memory, kept, answer);
        } else {
            let kept = self.files.try_take(chosen).or_else(|| self.files.try_take(|_| true));
            let Some(kept) = kept else { return false };
            if error.is_some() {
                count(&self.failed_reads);
            }
            self.files.answer(self.memory, kept, answer);
        }
        true
    }

    /// The pager and the device answer everything, and keep nothing from now on.
    pub fn be_kind(&self) {
        self.is_kind.set(true);
        self.files.keep_reads(false);
        self.files.keep_writes(false);
        while self.serve() {}
    }

    /// Leaves the device to the next machine. It is idle.
    pub fn end(self) {
        *FREE.lock().unwrap() = Some(self.device);
    }
}
