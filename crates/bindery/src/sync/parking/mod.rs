//! Waiting for a word to change: spinning, or asleep ([`Platform::park`]).
//!
//! Each lock on which a thread may sleep is one word with a bit that says that somebody sleeps. Two
//! rules keep a wake-up from getting lost:
//!
//! 1. *A thread sets the bit before it parks*, by a compare-exchange from a value with which it
//!    must wait. A thread that changes that value looks at the bit in the same step. Either it sees
//!    the bit, or it comes first, and then the compare-exchange fails.
//! 2. *A parking thread looks again* after it can be found: [`Platform::park`] returns at once if
//!    the word is not as expected.
//!
//! An unlocking thread wakes by the word's address alone. The word itself may be gone by then: the
//! next holder of the lock may free it.

#[cfg(all(test, loom))]
pub(crate) mod model;

use core::sync::atomic::{AtomicU32, Ordering};

use crate::platform::Platform;
use crate::sync::word::Word;

/// Lets threads wait: a platform, or the model of one.
pub(crate) trait Parking<W> {
    /// As [`Platform::park`].
    fn park(&self, word: &W, expected: u32);
    /// As [`Platform::park_for_handler`].
    fn park_for_handler(&self, word: &W, expected: u32) {
        self.park(word, expected);
    }
    /// As [`Platform::unpark`].
    fn unpark(&self, word: *const W);
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
    fn unpark(&self, word: *const AtomicU32) {
        Platform::unpark(self, word);
    }
}

/// Parks on `word`, with `bit` set in it, unless `blocked` says of the word's value that there is
/// nothing to wait for. Returns early at times: the caller looks again.
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
    // Relaxed: a thread that the change lets in acquires with its next look.
    if state == marked || word.exchange(state, marked, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    {
        parking.park(word, marked);
    }
}
