//! Words that all workers of a measurement share, even across processes.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::Problem;

/// The number of words in a pair of cache lines. The two counters and the samples of each worker
/// each start a new pair.
const WORDS_OF_A_LINE: usize = 16;

/// Memory that the children of a process share with it.
pub struct Board {
    words: NonNull<AtomicU64>,
    count: usize,
    rounds: usize,
}

// SAFETY: the words are atomics and stay mapped until the board is dropped.
unsafe impl Sync for Board {}

impl Board {
    /// A board for the samples of `workers` in `rounds`.
    ///
    /// # Errors
    /// If the host has too little memory.
    pub fn new(workers: u16, rounds: u32) -> Result<Self, Problem> {
        let rounds = (rounds as usize).next_multiple_of(WORDS_OF_A_LINE);
        let count = 2 * WORDS_OF_A_LINE + rounds * usize::from(workers);
        let bytes = NonZeroUsize::new(count * size_of::<AtomicU64>()).expect("two lines at least");
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so no other mapping changes.
        let words = unsafe { mmap_anonymous(None, bytes, protection, MapFlags::MAP_SHARED) }?;
        Ok(Self { words: words.cast(), count, rounds })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count, "the board has no word {index}");
        // SAFETY: the mapping has this number of words, initially zero, which only atomics access.
        // It stays mapped until the board is dropped.
        unsafe { self.words.add(index).as_ref() }
    }

    /// The sample of a worker in a round: nanoseconds, 0 if it is left out.
    pub fn sample(&self, worker: u16, round: u32) -> &AtomicU64 {
        let samples = 2 * WORDS_OF_A_LINE + usize::from(worker) * self.rounds;
        self.word(samples + round as usize)
    }

    /// Sleeps until `workers` have arrived `times` times, so that each worker starts its next work
    /// with a full time slice of the host's scheduler.
    pub fn sleep_until_all(&self, workers: u16, times: u64) {
        let word = self.word(0);
        word.fetch_add(1, Ordering::AcqRel);
        while word.load(Ordering::Acquire) < times * u64::from(workers) {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Spins until `workers` have arrived `times` times, so that all continue within nanoseconds.
    pub fn spin_until_all(&self, workers: u16, times: u64) {
        let word = self.word(WORDS_OF_A_LINE);
        word.fetch_add(1, Ordering::AcqRel);
        while word.load(Ordering::Acquire) < times * u64::from(workers) {
            std::hint::spin_loop();
        }
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: the board owns the mapping, and no reference outlives the board.
        let unmapped = unsafe { munmap(self.words.cast(), self.count * size_of::<AtomicU64>()) };
        unmapped.expect("the mapping is the board's");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_wait_for_each_other() {
        let board = Board::new(2, 3).unwrap();
        std::thread::scope(|scope| {
            for worker in 0..2_u16 {
                let board = &board;
                scope.spawn(move || {
                    for round in 0..3 {
                        board.sleep_until_all(2, u64::from(round) + 1);
                        board.spin_until_all(2, u64::from(round) + 1);
                        let value = u64::from(worker) * 10 + u64::from(round) + 1;
                        board.sample(worker, round).store(value, Ordering::Release);
                    }
                });
            }
        });
        let sample = |worker, round| board.sample(worker, round).load(Ordering::Acquire);
        assert_eq!([sample(0, 0), sample(0, 2), sample(1, 0), sample(1, 2)], [1, 3, 11, 13]);
    }
}
