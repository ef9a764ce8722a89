//! The requests of an area that a device has: a table of 32, each for one folio.
//!
//! A folio with pages that one word fills goes in *pieces*, the runs between these; one request
//! counts them. Nothing is allocated when memory is short, and a thread that finds the table full
//! waits for the device.
//!
//! ```text
//! take        a bit in `taken`                      thread
//! begin       folio, 1 piece: the submitter's own
//! add         one piece more, before each submit
//! complete    one piece less                        any context
//!             the last of a write: a bit in `done`
//! take_done   `done` is emptied                     thread
//! free        the bit in `taken` goes
//! ```
//!
//! The submitter's own piece keeps a request from being done while some of it is yet to be
//! submitted. Each bit of `done` goes to one thread, which then has the folio's lock. The reader of
//! a page waits for its request, so that has no bit.
//!
//! A completion touches the request last when it counts its piece, or sets the bit. From then on
//! the number may be another request's.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, Ordering};

use super::device::SwapOperation;
use crate::addr::Frame;

/// How many folios of an area may be under way.
pub(super) const REQUESTS: usize = 32;

/// In `pieces`: one of them failed.
const FAILED: u32 = 1 << 31;

/// A folio that is under way.
struct Request {
    /// The folio's head.
    head: AtomicU32,
    /// Pieces that are not complete, and [`FAILED`].
    pieces: AtomicU32,
}

/// The table of an area.
pub(super) struct Requests {
    taken: AtomicU32,
    done: AtomicU32,
    table: [Request; REQUESTS],
}

impl Requests {
    pub(super) const fn new() -> Self {
        let table =
            [const { Request { head: AtomicU32::new(0), pieces: AtomicU32::new(0) } }; REQUESTS];
        Self { taken: AtomicU32::new(0), done: AtomicU32::new(0), table }
    }

    fn request(&self, number: u32) -> &Request {
        &self.table[number as usize % REQUESTS]
    }

    /// Takes a request, if one is free.
    pub(super) fn take(&self) -> Option<u32> {
        let first_free = |taken: u32| (taken != u32::MAX).then(|| taken | (taken + 1));
        // Acquire: what was done with the request before is over.
        let before = self.taken.fetch_update(Acquire, Relaxed, first_free).ok()?;
        Some(before.trailing_ones())
    }

    /// Gives a request back that is complete, or was not begun.
    pub(super) fn free(&self, number: u32) {
        self.taken.fetch_and(!(1 << number), Release);
    }

    /// The request is for this folio from now on, with the submitter's own piece.
    pub(super) fn begin(&self, number: u32, head: Frame) {
        let request = self.request(number);
        request.head.store(head.0, Relaxed);
        request.pieces.store(1, Relaxed);
    }

    /// One piece more is submitted.
    pub(super) fn add_piece(&self, number: u32) {
        // Relaxed: the submitter's own piece keeps the count from zero.
        self.request(number).pieces.fetch_add(1, Relaxed);
    }

    /// A piece is complete. In any context.
    pub(super) fn complete(&self, number: u32, operation: SwapOperation, failed: bool) {
        let pieces = &self.request(number).pieces;
        if failed {
            pieces.fetch_or(FAILED, Relaxed);
        }
        // Release: the transfer comes before. Acquire: so do those of the other pieces.
        let last = pieces.fetch_sub(1, AcqRel) & !FAILED == 1;
        if last && operation == SwapOperation::Write {
            self.done.fetch_or(1 << number, Release);
        }
    }

    /// Whether all pieces of the caller's request have been transferred, once none is left.
    pub(super) fn result(&self, number: u32) -> Option<bool> {
        // Acquire: the frames hold what the device has read.
        let pieces = self.request(number).pieces.load(Ordering::Acquire);
        (pieces & !FAILED == 0).then_some(pieces & FAILED == 0)
    }

    /// The writes that are done, and that nobody has asked for yet: a bit for each.
    pub(super) fn take_done(&self) -> u32 {
        if self.done.load(Relaxed) == 0 { 0 } else { self.done.swap(0, Acquire) }
    }

    /// Whether the device has nothing to do, and all that it has done was seen to.
    pub(super) fn is_idle(&self) -> bool {
        // Acquire: so is what was done with the folios.
        self.taken.load(Acquire) == 0
    }

    /// The folio's head.
    pub(super) fn head(&self, number: u32) -> Frame {
        Frame(self.request(number).head.load(Relaxed))
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
            requests.begin(number, Frame(9));
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
    fn a_read_is_for_its_reader_alone() {
        let requests = Requests::new();
        let number = requests.take().unwrap();
        requests.begin(number, Frame(1));
        requests.complete(number, SwapOperation::Read, true);
        assert_eq!((requests.take_done(), requests.result(number)), (0, Some(false)));
    }
}
