//! [`Answer`]: the word in which a pager answers a request, and [`Requests`]: a memory as its
//! requests see it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::Memory;
use crate::collections::page_tree::PageRun;
use crate::platform::Platform;

use super::page_read::{PageRead, answer, buffer_of};
use super::{PagerError, ReadBuffer, StoredBytes};

const ANSWERED: u32 = 1 << 8;

/// 0 until the pager has answered.
pub(super) struct Answer(AtomicU32);

impl Answer {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Stores the answer. The thread that waits for it may free the word at once.
    pub(super) fn give(&self, answer: Result<(), PagerError>) {
        let error = answer.map_or_else(PagerError::number, |()| 0);
        // Release: the pager's accesses to the bytes come before.
        self.0.store(ANSWERED | error, Ordering::Release);
    }

    pub(super) fn get(&self) -> Option<Result<(), PagerError>> {
        // Acquire: pairs with `give`.
        let answer = self.0.load(Ordering::Acquire);
        let error = PagerError::of_number(answer & !ANSWERED);
        (answer & ANSWERED != 0).then_some(error.map_or(Ok(()), Err))
    }
}

/// A memory, whatever its platform.
pub(super) trait Requests: Sync {
    fn identity(&self) -> u64;

    /// As [`answer`].
    ///
    /// # Safety
    /// 1. As there.
    unsafe fn answer_read(&self, read: NonNull<PageRead>, result: Result<(), PagerError>);

    /// As [`buffer_of`].
    ///
    /// # Safety
    /// 1. As there.
    unsafe fn buffer<'r>(&self, read: &'r PageRead) -> ReadBuffer<'r>;

    /// The first `length` bytes of a run.
    ///
    /// # Safety
    /// 1. As of [`StoredBytes::new`], for as long as the result lives.
    unsafe fn stored(&self, run: &PageRun, length: usize) -> StoredBytes<'_>;

    /// Wakes the threads that wait for answers, in any context.
    fn wake(&self);
}

impl<P: Platform> Requests for Memory<P> {
    fn identity(&self) -> u64 {
        self.answers.identity
    }

    unsafe fn answer_read(&self, read: NonNull<PageRead>, result: Result<(), PagerError>) {
        // SAFETY: 1. the caller's obligation.
        unsafe { answer(self, read, result) }
    }

    unsafe fn buffer<'r>(&self, read: &'r PageRead) -> ReadBuffer<'r> {
        // SAFETY: 1. the caller's obligation.
        unsafe { buffer_of(self.platform(), read) }
    }

    unsafe fn stored(&self, run: &PageRun, length: usize) -> StoredBytes<'_> {
        let start = self.platform().direct_map(run.frame);
        // SAFETY: 1. and 2. the caller's obligations.
        unsafe { StoredBytes::new(self.platform(), start, length) }
    }

    fn wake(&self) {
        self.answers.completions.note(self.platform());
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
