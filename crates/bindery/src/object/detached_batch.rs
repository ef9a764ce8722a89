//! A batch of dirty pages that no thread waits for: the pager stores them, and any thread settles
//! the batch.
//!
//! A sync in steps ([`crate::Writeback`]) gives its waits away, or is dropped, while the pager has
//! requests. So their records lie in a slab, as those of a read do ([`super::page_read`]):
//!
//! ```text
//! begun      in the list of the object; the pager has the requests             a thread
//! answered   all of them: the last answer puts the batch into a list           any context
//! settled    the pages are clean, or dirty again; the records out of the list  a thread
//! ```
//!
//! Threads that need the pages settle what was answered before they look, and each time that an
//! answer wakes them ([`super::page_index::Pages`], `wait`). Reclaim settles, too.
//!
//! # The object lives as long as the batch
//! The last holder of an object waits until its list has no writes ([`super::last_holder`]). So the
//! settling thread's last access to the object is the one that takes the records out of the list,
//! with the index lock held. The last holder takes that lock once more before it frees the object.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::{Cell, OnceCell};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use arrayvec::ArrayVec;

use crate::Memory;
use crate::collections::page_tree::IndexRun;
use crate::error::{Failure, NoMemory};
use crate::memory::Earlier;
use crate::platform::Platform;

use super::ObjectState;
use super::answer::{Settled, TransferEnd};
use super::in_flight::{FlightRecord, Ticket};
use super::save::{Rules, SaveBatch, Saved};
use super::write_request::{PageWrite, WriteRequest};

/// The maximum number of runs in a batch: the record fits into a slab.
const RUNS: usize = 7;

type Writes = ArrayVec<PageWrite<'static>, RUNS>;

/// A batch that was begun.
pub(crate) struct DetachedBatch {
    /// In the object's list from the beginning to the end.
    records: [FlightRecord; RUNS],
    object: NonNull<ObjectState>,
    /// Its runs. Set before the pager gets the first request.
    batch: OnceCell<SaveBatch<RUNS>>,
    /// One for each group of adjacent runs, which it borrows from `batch`. Set as `batch`.
    writes: OnceCell<Writes>,
    /// The number of writes whose requests the pager has got. The beginning thread's, and then the
    /// settling thread's.
    asked: Cell<usize>,
    /// The number of requests without an answer, and one while the batch begins.
    unanswered: AtomicU32,
    /// The first error, once the batch is settled.
    result: Cell<Result<(), Failure>>,
    end: TransferEnd,
    earlier: Earlier,
}

// SAFETY: 1. No other type has this kind.
unsafe impl crate::memory::Record for DetachedBatch {
    const KIND: crate::memory::RecordKind = crate::memory::RecordKind::DetachedBatch;
}

/// An answer for a part of the batch was stored, in any context. The caller does not access the
/// batch any more.
///
/// # Safety
/// 1. The part was asked for, and this is called once for its answer.
pub(super) unsafe fn answer<P: Platform>(memory: &Memory<P>, batch: NonNull<DetachedBatch>) {
    // SAFETY: 1. the count has a part for this answer (obligation 1).
    if unsafe { count_down(batch) } {
        // SAFETY: the last part of the count was the caller's, so it lives until it is settled.
        let earlier = unsafe { NonNull::from(&batch.as_ref().earlier) };
        // SAFETY: 1. that happens once, and no thread settles a batch that is not in the list.
        unsafe { memory.answers.writes.add(batch.cast(), earlier) };
    }
}

/// Drops a part of the count of unanswered requests. Returns whether it was the last one.
///
/// # Safety
/// 1. The part is the caller's: the batch lives.
unsafe fn count_down(batch: NonNull<DetachedBatch>) -> bool {
    // SAFETY: it lives (obligation 1). Release: the caller's stores come before. Acquire: so do the
    // others'.
    unsafe { batch.as_ref() }.unanswered.fetch_sub(1, Ordering::AcqRel) == 1
}

/// The thread that begins a batch. Dropped, also by a panic of the pager, it leaves the batch to
/// the answers of the requests that the pager has got.
struct Beginner<'m, P: Platform> {
    memory: &'m Memory<P>,
    batch: NonNull<DetachedBatch>,
}

impl<P: Platform> Drop for Beginner<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. its own part.
        if unsafe { count_down(self.batch) } {
            // SAFETY: 1. all parts of the count are given up, and the beginner has a handle.
            unsafe { settle(self.memory, self.batch) };
        }
    }
}

/// Begins to store the next dirty pages from `first` on that the rules allow. Returns the page to
/// continue at. Without a batch there are none, or another call is changing the first. Called
/// without locks.
///
/// # Errors
/// [`NoMemory`] for the record.
pub(super) fn begin<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    first: u64,
    rules: Rules,
) -> Result<(u64, Option<FollowedBatch<'m, P>>), NoMemory> {
    let record = memory.slab::<DetachedBatch>().allocate_with(&memory.frames, || DetachedBatch {
        records: [const { FlightRecord::detached() }; RUNS],
        object: NonNull::from(object),
        batch: OnceCell::new(),
        writes: OnceCell::new(),
        asked: Cell::new(0),
        unanswered: AtomicU32::new(1),
        result: Cell::new(Ok(())),
        end: TransferEnd::new(),
        earlier: Earlier::new(),
    });
    let record = record.ok_or(NoMemory)?;
    // SAFETY: it is new, and is freed below, or by the last holder, of which the caller is one.
    let state = unsafe { record.as_ref() };
    let mut batch = SaveBatch::new(first);
    // SAFETY: 1. the records are new, and stay in the slab until `settle` has removed them; only
    // shared references to them exist.
    unsafe { batch.begin(memory, object, &state.records, rules) };
    let after = batch.after;
    if batch.is_empty() {
        // SAFETY: it came from this slab. No record is in the list, and no other thread knows it.
        unsafe { memory.slab::<DetachedBatch>().free(&memory.frames, record) };
        return Ok((after, None));
    }
    state.end.follow();
    let followed = FollowedBatch { memory, batch: record };
    let _beginner = Beginner { memory, batch: record };
    let batch = state.batch.get_or_init(|| batch);
    let Some((pager, file)) = object.file() else { return Ok((after, Some(followed))) };
    let writes = state.writes.get_or_init(|| {
        let writes = batch.groups().map(|runs| {
            // SAFETY: the runs stay in the record, as the writes do. Both are freed with it.
            let runs: &'static [IndexRun] = unsafe { NonNull::from(runs).as_ref() };
            PageWrite::new(file, runs, batch.size).of_batch(record)
        });
        writes.collect()
    });
    for write in writes {
        state.asked.set(state.asked.get() + 1);
        state.unanswered.fetch_add(1, Ordering::Relaxed);
        // SAFETY: 1. the record stays until all requests are answered: it is the only one of this
        // write, and counted. 2. The pages stay in place while their record is in the list, as in
        // `save`.
        pager.begin_write(unsafe { WriteRequest::new(memory, write) });
    }
    Ok((after, Some(followed)))
}

/// Ends a batch: its pages are clean, or dirty again; the records leave the list.
///
/// # Safety
/// 1. All requests are answered, the batch is the caller's, and the object lives until the records
///    have left its list.
unsafe fn settle<P: Platform>(memory: &Memory<P>, batch: NonNull<DetachedBatch>) {
    // SAFETY: the batch lives until it is released below; the object until its list lacks the
    // records (obligation 1).
    let (state, object) = unsafe { (batch.as_ref(), batch.as_ref().object.as_ref()) };
    let (Some(runs), asked) = (state.batch.get(), state.asked.get()) else { return };
    let writes = state.writes.get().map_or(&[][..], |writes| writes);
    let answer = |number: usize| {
        let write = writes.get(number).filter(|_| number < asked)?;
        write.answer()
    };
    for number in 0..asked {
        if let Some(Err(error)) = answer(number) {
            // Before the end, which a sync of another opener may wait for.
            object.write_errors.record(error);
            state.result.set(state.result.get().and(Err(error.into())));
        }
    }
    object.pages.end_writes(memory, |index, in_flight, ends| {
        for (number, group) in runs.groups().enumerate() {
            let parts = (&mut *index, &mut *in_flight, ends);
            // SAFETY: 1. `begin` has begun it with them.
            unsafe { runs.end(parts, &state.records, group.len(), answer(number)) };
        }
        // With the lock held, for `FollowedBatch::ticket`.
        state.end.settle(Settled::Answered);
    });
    // The object may be freed from here on.
    // SAFETY: 1. the settling thread's, once.
    unsafe { release(memory, batch) };
    memory.answers.completions.note(memory.platform());
}

/// Drops a holder of the record; the last one frees it.
///
/// # Safety
/// 1. The caller is one of the holders counted, and gives that up. The record is in no list, unless
///    the settling thread is a holder still.
unsafe fn release<P: Platform>(memory: &Memory<P>, batch: NonNull<DetachedBatch>) {
    // SAFETY: the caller is a holder (obligation 1).
    if unsafe { batch.as_ref() }.end.leave() {
        // SAFETY: it came from this slab; the settling thread has taken it out of all lists.
        unsafe { memory.slab::<DetachedBatch>().free(&memory.frames, batch) };
    }
}

/// Settles all batches that are answered. Called without locks. Takes only spin locks, and
/// allocates nothing.
pub(crate) fn settle_written<P: Platform>(memory: &Memory<P>) {
    let mut next = memory.answers.writes.take_all();
    if next.is_some() {
        // Its pages are clean now, so a search finds some that the last one did not.
        memory.clock.exhausted.forget();
    }
    while let Some(record) = next {
        let batch: NonNull<DetachedBatch> = record.cast();
        // SAFETY: `answer` has added it, and it lives until `settle`.
        next = unsafe { batch.as_ref() }.earlier.get();
        // SAFETY: 1. it was in the list, so all requests are answered, and it is the caller's. The
        // last holder of the object waits for its list.
        unsafe { settle(memory, batch) };
    }
}

/// A batch that any thread settles; a call checks whether it has ended.
pub(super) struct FollowedBatch<'m, P: Platform> {
    memory: &'m Memory<P>,
    batch: NonNull<DetachedBatch>,
}

// SAFETY: it is a counted holder of the record, of which it reads words, and what the settling
// thread has written before it has set one of them.
unsafe impl<P: Platform> Send for FollowedBatch<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for FollowedBatch<'_, P> {}

impl<P: Platform> FollowedBatch<'_, P> {
    fn get(&self) -> &DetachedBatch {
        // SAFETY: it is a holder.
        unsafe { self.batch.as_ref() }
    }

    /// The result, once the batch is settled.
    pub(super) fn saved(&self) -> Option<Saved> {
        let state = self.get();
        state.end.settled()?;
        let (result, batch) = (state.result.get(), state.batch.get()?);
        Some(Saved { result, after: batch.after, stored: batch.stored.get() })
    }

    /// A ticket for its end; `None` if it is settled. `object` is that of the batch.
    pub(super) fn ticket(&self, object: &ObjectState) -> Option<Ticket> {
        object.pages.alone(self.memory.platform(), |_, in_flight, ends| {
            // The lock is held, so its records are in the list.
            let is_settled = self.get().end.settled().is_some();
            (!is_settled).then(|| in_flight.ticket(ends, true))
        })
    }
}

impl<P: Platform> Drop for FollowedBatch<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. its own.
        unsafe { release(self.memory, self.batch) };
    }
}

impl<P: Platform> core::fmt::Debug for FollowedBatch<'_, P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let is_settled = self.get().end.settled().is_some();
        f.debug_struct("FollowedBatch").field("is_settled", &is_settled).finish_non_exhaustive()
    }
}
