//! [`Completions`]: threads that wait for a device, and tasks that wait for locks of VMAs, woken by
//! completions from any context.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(not(all(test, any(loom, shuttle))))]
use core::sync::atomic::fence;

#[cfg(all(test, any(loom, shuttle)))]
use crate::sync::model::sync::atomic::fence;

use crate::sync::parking::Parking;
use crate::sync::word::Word;

/// The word on which threads that wait for a device or a pager park, or tasks that wait for a lock
/// of one of an address space's VMAs, whose release completes it. While a thread waits, the word
/// changes with each completion and whenever a thread has processed completions. Otherwise
/// completions only read the word, so CPUs with separate requests do not contend for its cache
/// line.
///
/// The fences prevent a thread from sleeping forever:
/// 1. Thread A finds that its request has not completed.
/// 2. The device completes the request and finds no waiting thread.
/// 3. Thread A counts itself as waiting and parks.
///
/// Thread A counts itself before its last check of the request, and the device checks for waiting
/// threads after its change. With a fence between the two steps on each side, at least one side
/// sees the other's step.
pub(crate) struct Completions<W = AtomicU32> {
    word: W,
    /// The number of threads that wait or are about to wait.
    waiting: W,
}

impl Completions {
    pub(crate) const fn new() -> Self {
        Self { word: AtomicU32::new(0), waiting: AtomicU32::new(0) }
    }
}

impl<W: Word<u32>> Completions<W> {
    /// The words, at zero.
    #[cfg(all(test, any(loom, shuttle)))]
    pub(crate) fn of_words(word: impl Fn(u32) -> W) -> Self {
        Self { word: word(0), waiting: word(0) }
    }

    /// Wakes the waiting threads, after the state that they wait for has changed. May be called in
    /// any context.
    pub(crate) fn note(&self, parking: &impl Parking<W>) {
        fence(SeqCst);
        if self.waiting.load(Relaxed) > 0 {
            // Release: a thread that sees the word change also sees the state change.
            self.word.add(1, Release);
            parking.unpark(&self.word);
        }
    }

    /// Counts the caller as waiting, before it checks the state: from then on the word changes with
    /// each completion.
    pub(crate) fn enter(&self) {
        self.waiting.add(1, Relaxed);
        fence(SeqCst);
    }

    /// Ends [`Completions::enter`].
    pub(crate) fn leave(&self) {
        self.waiting.sub(1, Relaxed);
    }

    /// The word's value before a check of the state, for a caller that has entered, and the word
    /// itself. Acquire: if the state changes after the check, the word changes as well.
    pub(crate) fn word(&self) -> (&W, u32) {
        (&self.word, self.word.load(Acquire))
    }

    /// As [`Completions::wait`], but waits at most once, and only briefly. Returns whether it waited
    /// and nothing completed in that time.
    pub(crate) fn wait_briefly(
        &self,
        parking: &impl Parking<W>,
        is_over: &mut dyn FnMut() -> bool,
    ) -> bool {
        parking.might_sleep();
        self.enter();
        let (word, seen) = self.word();
        let waits = !is_over();
        if waits {
            parking.park_briefly(word, seen);
        }
        let is_quiet = waits && word.load(Acquire) == seen;
        self.leave();
        is_quiet
    }

    /// Waits until `is_over`.
    pub(crate) fn wait(&self, parking: &impl Parking<W>, is_over: &mut dyn FnMut() -> bool) {
        parking.might_sleep();
        self.enter();
        loop {
            let (word, seen) = self.word();
            if is_over() {
                break;
            }
            parking.park(word, seen);
        }
        self.leave();
    }
}
