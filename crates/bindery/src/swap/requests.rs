//! The requests of an area that a device has: a table of 32, each for one folio.
//!
//! A folio with word-filled pages is written in *pieces*, the runs between them; one request counts
//! them. Nothing is allocated when memory is short, and a thread that finds the table full waits
//! for the device.
//!
//! ```text
//! take        a bit in `taken`                      thread
//! begin       folio, 1 piece: the submitter's own
//! add         one piece more, before each submit
//! complete    one piece less                        any context
//!             the last of one that nobody waits for: a bit in `done`
//! take_done   `done` is emptied                     thread
//! free        the bit in `taken` goes
//! ```
//!
//! The submitter's own piece keeps a request from completing before all of it is submitted. Each
//! bit of `done` is taken by one thread, which then has the folio's lock. The reader of a page
//! waits for its request, which therefore has no bit; a request of read-around has one.
//!
//! A completion touches the request last when it counts its piece, or sets the bit. From then on
//! another request may have the number.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::device::SwapOperation;
use crate::addr::Frame;
use crate::sync::parking::Parking;
use crate::sync::word::Word;

/// The number of folios of an area that may be in flight.
pub(super) const REQUESTS: usize = 32;

/// In `pieces`: one of them failed.
const FAILED: u32 = 1 << 31;
/// In `pieces`: a read for which no thread waits.
const AROUND: u32 = 1 << 30;
const COUNT: u32 = !(FAILED | AROUND);

/// A folio in flight.
struct Request<W> {
    /// The folio's head.
    head: W,
    /// The slot of its first page.
    slot: W,
    /// The number of incomplete pieces, [`FAILED`] and [`AROUND`].
    pieces: W,
}

/// The table of an area.
pub(super) struct Requests<W = AtomicU32, const N: usize = REQUESTS> {
    taken: W,
    done: W,
    table: [Request<W>; N],
}

impl Requests {
    pub(super) const fn new() -> Self {
        let table = [const {
            Request { head: AtomicU32::new(0), slot: AtomicU32::new(0), pieces: AtomicU32::new(0) }
        }; REQUESTS];
        Self { taken: AtomicU32::new(0), done: AtomicU32::new(0), table }
    }
}

impl<W: Word<u32>, const N: usize> Requests<W, N> {
    /// A table of words of another type.
    #[cfg(all(test, loom))]
    pub(super) fn of_words(word: impl Fn(u32) -> W) -> Self {
        let request = |_| Request { head: word(0), slot: word(0), pieces: word(0) };
        Self { taken: word(0), done: word(0), table: core::array::from_fn(request) }
    }

    fn request(&self, number: u32) -> &Request<W> {
        &self.table[number as usize % N]
    }

    /// Takes a request, if one is free.
    pub(super) fn take(&self) -> Option<u32> {
        let mut taken = self.taken.load(Relaxed);
        loop {
            let number = taken.trailing_ones();
            if number as usize >= N {
                return None;
            }
            // Acquire: all work on the previous request is over.
            match self.taken.exchange(taken, taken | 1 << number, Acquire, Relaxed) {
                Ok(_) => return Some(number),
                Err(now) => taken = now,
            }
        }
    }

    /// Whether [`Requests::take`] would find one; may be outdated.
    pub(super) fn has_free(&self) -> bool {
        (self.taken.load(Relaxed).trailing_ones() as usize) < N
    }

    /// Frees a request that is complete, or was not begun.
    pub(super) fn free(&self, number: u32) {
        // The bit is set, so this clears it.
        self.taken.sub(1 << number, Release);
    }

    /// Assigns the request to this folio and its slots from `slot` on, with the submitter's own
    /// piece.
    pub(super) fn begin(&self, number: u32, head: Frame, slot: u64) {
        let request = self.request(number);
        request.head.store(head.0, Relaxed);
        // An area has at most 2^30.
        request.slot.store(slot as u32, Relaxed);
        request.pieces.store(1, Relaxed);
    }

    /// Like [`Requests::begin`], for a read for which no thread waits.
    pub(super) fn begin_around(&self, number: u32, head: Frame) {
        let request = self.request(number);
        request.head.store(head.0, Relaxed);
        request.pieces.store(AROUND | 1, Relaxed);
    }

    /// Whether [`Requests::begin_around`] began it.
    pub(super) fn is_around(&self, number: u32) -> bool {
        self.request(number).pieces.load(Relaxed) & AROUND != 0
    }

    /// Counts one more submitted piece.
    pub(super) fn add_piece(&self, number: u32) {
        // Relaxed: the submitter's own piece keeps the count from zero.
        self.request(number).pieces.add(1, Relaxed);
    }

    /// Completes a piece, in any context.
    pub(super) fn complete(&self, number: u32, operation: SwapOperation, failed: bool) {
        let pieces = &self.request(number).pieces;
        if failed {
            pieces.set(FAILED, Relaxed);
        }
        // Release: the transfer comes before. Acquire: so do those of the other pieces.
        let before = pieces.sub(1, AcqRel);
        let awaited = operation == SwapOperation::Read && before & AROUND == 0;
        if before & COUNT == 1 && !awaited {
            self.done.set(1 << number, Release);
        }
    }

    /// Whether all pieces of the caller's request were transferred; `None` while one is left.
    pub(super) fn result(&self, number: u32) -> Option<bool> {
        // Acquire: the frames hold the data that the device has read.
        let pieces = self.request(number).pieces.load(Acquire);
        (pieces & COUNT == 0).then_some(pieces & FAILED == 0)
    }

    /// Takes the completed writes, and the completed reads for which no thread waits: one bit each.
    pub(super) fn take_done(&self) -> u32 {
        if self.done.load(Relaxed) == 0 { 0 } else { self.done.swap(0, Acquire) }
    }

    /// Whether the device is idle, and all its completions were processed.
    pub(super) fn is_idle(&self) -> bool {
        // Acquire: all work on the folios is over, too.
        self.taken.load(Acquire) == 0
    }

    /// The folio's head.
    pub(super) fn head(&self, number: u32) -> Frame {
        Frame(self.request(number).head.load(Relaxed))
    }

    /// The slot of the folio's first page, as passed to [`Requests::begin`].
    pub(super) fn first_slot(&self, number: u32) -> u64 {
        u64::from(self.request(number).slot.load(Relaxed))
    }
}

/// The word that changes with each completion, and whenever a thread has processed some. Threads
/// that wait for a device park on it.
pub(super) struct Completions<W = AtomicU32>(W);

impl Completions {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl<W: Word<u32>> Completions<W> {
    /// The word itself, at zero.
    #[cfg(all(test, loom))]
    pub(super) fn of_word(word: W) -> Self {
        Self(word)
    }

    /// Wakes the waiting threads. The state that they wait for was changed before. In any context.
    pub(super) fn note(&self, parking: &impl Parking<W>) {
        // Release: a thread that sees the change of the word sees that of the state.
        self.0.add(1, Release);
        parking.unpark(&self.0);
    }

    /// Waits until `is_over`.
    pub(super) fn wait(&self, parking: &impl Parking<W>, is_over: &mut dyn FnMut() -> bool) {
        parking.might_sleep();
        loop {
            // Acquire, and before the check: a change of the state after the check changes the
            // word, too.
            let seen = self.0.load(Acquire);
            if is_over() {
                return;
            }
            parking.park(&self.0, seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_hands_out_what_is_free() {
        let requests = Requests::new();
        let numbers: std::vec::Vec<_> = core::iter::from_fn(|| requests.take()).collect();
        assert!(numbers.iter().copied().eq(0..REQUESTS as u32));
        requests.free(31);
        requests.free(7);
        assert_eq!((requests.take(), requests.take(), requests.take()), (Some(7), Some(31), None));
    }

    #[test]
    fn a_write_is_done_with_its_last_piece() {
        for failed in [false, true] {
            let requests = Requests::new();
            let number = requests.take().unwrap();
            requests.begin(number, Frame(9), 0);
            requests.add_piece(number);
            requests.complete(number, SwapOperation::Write, failed);
            requests.add_piece(number);
            requests.complete(number, SwapOperation::Write, false);
            assert_eq!((requests.take_done(), requests.result(number)), (0, None));
            requests.complete(number, SwapOperation::Write, false);
            assert_eq!((requests.take_done(), requests.take_done()), (1, 0));
            assert_eq!((requests.result(number), requests.head(number)), (Some(!failed), Frame(9)));
        }
    }

    #[test]
    fn an_unawaited_read_is_for_all() {
        for failed in [false, true] {
            let requests = Requests::new();
            let number = requests.take().unwrap();
            requests.begin_around(number, Frame(1));
            requests.add_piece(number);
            requests.complete(number, SwapOperation::Read, failed);
            assert_eq!((requests.take_done(), requests.result(number)), (0, None));
            requests.complete(number, SwapOperation::Read, false);
            assert_eq!((requests.take_done(), requests.result(number)), (1, Some(!failed)));
            assert!(requests.is_around(number));
        }
    }

    #[test]
    fn a_read_is_for_its_reader_alone() {
        let requests = Requests::new();
        let number = requests.take().unwrap();
        requests.begin(number, Frame(1), 0);
        requests.complete(number, SwapOperation::Read, true);
        assert_eq!((requests.take_done(), requests.result(number)), (0, Some(false)));
    }
}
