//! [`Answer`]: the word that holds a pager's answer to a request. [`Requests`]: the interface of a
//! memory to its requests.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::Memory;
use crate::collections::page_tree::IndexRun;
use crate::platform::Platform;
use crate::sync::word::Word;

use super::page_read::{PageRead, answer, buffer_of};
use super::write_request::{PageWrite, answer_write};
use super::{PagerError, ReadBuffer, StoredBytes};

const ANSWERED: u32 = 1 << 8;

/// 0 until the pager has answered.
pub(super) struct Answer<W = AtomicU32>(W);

impl Answer {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl<W: Word<u32>> Answer<W> {
    #[cfg(all(test, any(loom, shuttle)))]
    pub(super) fn of_words(word: impl Fn(u32) -> W) -> Self {
        Self(word(0))
    }

    /// Stores the answer. The waiting thread may free the word at once.
    pub(super) fn give(&self, answer: Result<(), PagerError>) {
        let error = answer.map_or_else(PagerError::number, |()| 0);
        // Release: orders the pager's accesses to the bytes before the answer.
        self.0.store(ANSWERED | error, Ordering::Release);
    }

    pub(super) fn get(&self) -> Option<Result<(), PagerError>> {
        // Acquire: pairs with `give`.
        let answer = self.0.load(Ordering::Acquire);
        let error = PagerError::of_number(answer & !ANSWERED);
        (answer & ANSWERED != 0).then_some(error.map_or(Ok(()), Err))
    }
}

/// The end of a read or of a batch of writes. Any thread may settle the transfer; the call that
/// follows it checks this record.
pub(super) struct TransferEnd<W = AtomicU32> {
    /// The settling thread and the call. The last holder frees the record.
    holders: W,
    /// 0 while the transfer is unsettled, then the [`Settled`]. A settled read has its folios in
    /// the index or has freed them; a settled batch has no writes in the list.
    settled: W,
}

/// The result of a settled transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Settled {
    /// The transfer has the result of the pager's answer.
    Answered = 1,
    /// The page index had no memory for the folios.
    NoMemory = 2,
}

impl TransferEnd {
    pub(super) const fn new() -> Self {
        Self { holders: AtomicU32::new(1), settled: AtomicU32::new(0) }
    }
}

impl<W: Word<u32>> TransferEnd<W> {
    #[cfg(all(test, any(loom, shuttle)))]
    pub(super) fn of_words(word: impl Fn(u32) -> W) -> Self {
        Self { holders: word(1), settled: word(0) }
    }

    /// Adds the call as a holder, before the pager has the request.
    pub(super) fn follow(&self) {
        self.holders.store(2, Ordering::Relaxed);
    }

    /// Whether a call follows the transfer.
    pub(super) fn is_followed(&self) -> bool {
        self.holders.load(Ordering::Relaxed) > 1
    }

    /// Marks the transfer as settled.
    pub(super) fn settle(&self, settled: Settled) {
        // Release: the folios are in the index, and the result of a batch is known.
        self.settled.store(settled as u32, Ordering::Release);
    }

    pub(super) fn settled(&self) -> Option<Settled> {
        // Acquire: pairs with `settle`.
        match self.settled.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Settled::Answered),
            _ => Some(Settled::NoMemory),
        }
    }

    /// Drops a holder. Returns whether it was the last.
    pub(super) fn leave(&self) -> bool {
        // Release: orders the holder's accesses to the record before the drop. Acquire: likewise
        // orders those of the other holder.
        self.holders.sub(1, Ordering::AcqRel) == 1
    }
}

/// The interface of a memory to its requests, without the platform parameter.
pub(super) trait Requests: Sync {
    fn identity(&self) -> u64;

    /// As [`answer`].
    ///
    /// # Safety
    /// 1. As for [`answer`].
    unsafe fn answer_read(&self, read: NonNull<PageRead>, result: Result<(), PagerError>);

    /// Stores the answer of a write and wakes the threads that wait for answers, in any context.
    ///
    /// # Safety
    /// 1. The write lives until it is answered, which this call does for the first time.
    unsafe fn answer_write(
        &self,
        write: NonNull<PageWrite<'static>>,
        result: Result<(), PagerError>,
    );

    /// As [`buffer_of`].
    ///
    /// # Safety
    /// 1. As for [`buffer_of`].
    unsafe fn buffer<'r>(&self, read: &'r PageRead) -> ReadBuffer<'r>;

    /// The first `length` bytes of a run.
    ///
    /// # Safety
    /// 1. As for [`StoredBytes::new`], for as long as the result lives.
    unsafe fn stored(&self, run: &IndexRun, length: usize) -> StoredBytes<'_>;
}

impl<P: Platform> Requests for Memory<P> {
    fn identity(&self) -> u64 {
        self.answers.identity
    }

    unsafe fn answer_read(&self, read: NonNull<PageRead>, result: Result<(), PagerError>) {
        // SAFETY: 1. the caller's obligation.
        unsafe { answer(self, read, result) }
    }

    unsafe fn answer_write(
        &self,
        write: NonNull<PageWrite<'static>>,
        result: Result<(), PagerError>,
    ) {
        // SAFETY: 1. the caller's obligation.
        unsafe { answer_write(self, write, result) }
    }

    unsafe fn buffer<'r>(&self, read: &'r PageRead) -> ReadBuffer<'r> {
        // SAFETY: 1. the caller's obligation.
        unsafe { buffer_of(self.platform(), read) }
    }

    unsafe fn stored(&self, run: &IndexRun, length: usize) -> StoredBytes<'_> {
        let start = self.platform().direct_map(run.frame);
        // SAFETY: 1. and 2. the caller's obligations.
        unsafe { StoredBytes::new(self.platform(), start, length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_comes_back_as_it_was_given() {
        for given in PagerError::ALL.map(Err).into_iter().chain([Ok(())]) {
            let answer = Answer::new();
            assert_eq!(answer.get(), None);
            answer.give(given);
            assert_eq!(answer.get(), Some(given));
        }
    }
}
