//! Waits for a word to change: spinning or sleeping ([`Platform::park`]).
//!
//! Each lock on which a thread may sleep is one word with a bit for sleeping threads. Two rules
//! prevent lost wake-ups:
//!
//! 1. *A thread sets the bit before it parks*, by a compare-exchange from a value that requires
//!    waiting. A thread that changes that value reads the bit in the same step. Either this thread
//!    sees the bit, or its step comes first and the compare-exchange fails.
//! 2. *A parking thread checks again* after it can be found: [`Platform::park`] returns at once if
//!    the word is not as expected.
//!
//! An unlocking thread uses only the word's address for the wake-up, because the next holder of the
//! lock may have freed the word by then.

#[cfg(all(test, any(loom, shuttle)))]
pub(crate) mod model;

use core::sync::atomic::{AtomicU32, Ordering};

use crate::platform::Platform;
use crate::sync::word::Word;

/// Parks threads: a platform, or its model.
pub(crate) trait Parking<W> {
    /// Like [`Platform::park`].
    fn park(&self, word: &W, expected: u32);
    /// Like [`Platform::park_for_handler`].
    fn park_for_handler(&self, word: &W, expected: u32) {
        self.park(word, expected);
    }
    /// Like [`Platform::park_briefly`].
    fn park_briefly(&self, word: &W, expected: u32) {
        self.park(word, expected);
    }
    /// Like [`Platform::unpark`].
    fn unpark(&self, word: *const W);
    /// Like [`Platform::might_sleep`].
    #[inline(always)]
    fn might_sleep(&self) {}
}

impl<P: Platform> Parking<AtomicU32> for P {
    #[inline]
    fn park(&self, word: &AtomicU32, expected: u32) {
        Platform::park(self, word, expected);
    }

    #[inline]
    fn park_for_handler(&self, word: &AtomicU32, expected: u32) {
        Platform::park_for_handler(self, word, expected);
    }

    #[inline]
    fn park_briefly(&self, word: &AtomicU32, expected: u32) {
        Platform::park_briefly(self, word, expected);
    }

    #[inline]
    fn unpark(&self, word: *const AtomicU32) {
        Platform::unpark(self, word);
    }

    #[inline(always)]
    fn might_sleep(&self) {
        Platform::might_sleep(self);
    }
}

/// Parks on `word`, after setting `bit` in it, if `blocked` is true for the word's value. May
/// return early; the caller checks again.
#[cold]
pub(crate) fn park_while<W: Word<u32>>(
    parking: &impl Parking<W>,
    word: &W,
    bit: u32,
    blocked: impl Fn(u32) -> bool,
) {
    let state = word.load(Ordering::Relaxed);
    if !blocked(state) {
        return;
    }
    let marked = state | bit;
    // Relaxed: a thread that may proceed after the change acquires with its next read.
    if state == marked || word.exchange(state, marked, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    {
        parking.park(word, marked);
    }
}
