//! Answers of pagers that arrive in any context, and the threads that wait for them.
//!
//! If a thread waits for a request, the answer is stored in the request's record and only wakes
//! that thread. All other answers are kept here, in lists without a lock: an interrupt handler adds
//! to a list, and a thread takes the whole list. The records belong to a higher layer, which
//! interprets them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicPtr, AtomicU64};

use crate::sync::completions::Completions;

use super::record::Opaque;

/// The number of memories created so far. Each memory's identity distinguishes its own requests.
static MEMORIES: AtomicU64 = AtomicU64::new(0);

/// The link from one answer to the previous one.
pub(crate) struct Earlier(AtomicPtr<Opaque>);

impl Earlier {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The previous answer, valid until the record is freed.
    pub(crate) fn get(&self) -> Option<NonNull<Opaque>> {
        NonNull::new(self.0.load(Relaxed))
    }
}

/// The answers that no thread has taken, and the threads that wait for answers.
pub(crate) struct Answers {
    /// To reads.
    pub(crate) reads: AnswerList,
    /// To batches of writes.
    pub(crate) writes: AnswerList,
    /// Threads that wait for an answer.
    pub(crate) completions: Completions,
    /// The writes that reclaim has requested.
    pub(crate) reclaim: ReclaimWrites,
    /// The identity of the memory, unique among all memories.
    pub(crate) identity: u64,
}

impl Answers {
    pub(super) fn new() -> Self {
        let identity = MEMORIES.fetch_add(1, Relaxed) + 1;
        let (reads, writes) = (AnswerList::new(), AnswerList::new());
        let (completions, reclaim) = (Completions::new(), ReclaimWrites::default());
        Self { reads, writes, completions, reclaim, identity }
    }
}

/// The batches of writes that reclaim has requested, which no thread has to wait for.
#[derive(Default)]
pub(crate) struct ReclaimWrites {
    begun: AtomicU64,
    ended: AtomicU64,
    /// One more than the number of ended batches when a thread last waited in vain; 0 for never.
    in_vain: AtomicU64,
}

impl ReclaimWrites {
    pub(crate) fn begin(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    pub(crate) fn end(&self) {
        self.ended.fetch_add(1, Relaxed);
    }

    /// The number of ended batches.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }

    /// Whether a batch has not ended, and a wait for it is not known to be in vain.
    pub(crate) fn may_end(&self) -> bool {
        let ended = self.ended();
        ended != self.begun.load(Relaxed) && self.in_vain.load(Relaxed) != ended + 1
    }

    /// Records that a thread has waited in vain since `ended` batches had ended. Threads wait again
    /// once another batch has ended.
    pub(crate) fn note_silence(&self, ended: u64) {
        self.in_vain.store(ended + 1, Relaxed);
    }
}

/// Answers of one kind, newest first.
pub(crate) struct AnswerList {
    last: AtomicPtr<Opaque>,
}

impl AnswerList {
    const fn new() -> Self {
        Self { last: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Whether the list has any answer; may be stale.
    pub(crate) fn has_any(&self) -> bool {
        !self.last.load(Relaxed).is_null()
    }

    /// Adds a record, in any context. From then on, the thread that takes the record owns it.
    ///
    /// # Safety
    /// 1. The record is in no list of answers and lives until [`AnswerList::take_all`] has returned
    ///    it. `earlier` is part of the record.
    pub(crate) unsafe fn add(&self, record: NonNull<Opaque>, earlier: NonNull<Earlier>) {
        let mut last = self.last.load(Relaxed);
        loop {
            // SAFETY: the record lives, because it is not in the list yet (obligation 1).
            unsafe { earlier.as_ref() }.0.store(last, Relaxed);
            // Release: the answer is written before the record is published. Acquire: for the
            // records that follow in the list.
            match self.last.compare_exchange_weak(last, record.as_ptr(), AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => last = now,
            }
        }
    }

    /// Takes all answers, which the caller then owns. [`Earlier`] links to the next.
    pub(crate) fn take_all(&self) -> Option<NonNull<Opaque>> {
        if !self.has_any() {
            return None;
        }
        NonNull::new(self.last.swap(ptr::null_mut(), Acquire))
    }
}
