//! A batch of dirty pages that the pager stores without a waiting thread; any thread may settle it.
//!
//! A sync in steps ([`crate::Writeback`]) may hand its waits to the caller, or be dropped, while
//! the pager has requests. So the records of the batch lie in a slab, like those of a read
//! ([`super::page_read`]):
//!
//! ```text
//! begun      in the list of the object; the pager has the requests             a thread
//! answered   all of them: the last answer puts the batch into a list           any context
//! settled    the pages are clean, or dirty again; the records out of the list  a thread
//! ```
//!
//! Threads that need the pages settle all answered batches before they check, and again each time
//! that an answer wakes them ([`super::page_index::Pages`], `wait`). Reclaim settles answered
//! batches, too.
//!
//! # Memory for the records
//! Pages have to be stored in order to free memory. So while a memory has files, it keeps the memory
//! for the records of 32 batches ([`join_pool`]). More batches need free memory.
//!
//! # The object lives as long as the batch
//! The last holder of an object waits until the object's list has no writes
//! ([`super::last_holder`]). So the settling thread's last access to the object removes the records
//! from the list, with the index lock held. The last holder acquires that lock once more before it
//! frees the object.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::{Cell, OnceCell};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::Frame;
use crate::collections::page_tree::{IndexRun, PAGE_LIMIT};
use crate::error::{Failure, NoMemory};
use crate::folio::{FolioOwner, FolioRef, Owner};
use crate::memory::Earlier;
use crate::platform::Platform;

use super::ObjectState;
use super::answer::{Settled, TransferEnd};
use super::in_flight::{FlightRecord, Ticket};
use super::save::{Rules, SaveBatch, Saved, Tried};
use super::write_request::{PageWrite, WriteRequest};

/// The maximum number of runs in a batch, chosen so that the record fits into a slab.
const RUNS: usize = 7;

/// The number of batches for which there is always memory, while a memory has files.
const POOL: u16 = 32;

/// The maximum number of pages of a batch that reclaim begins.
const RECLAIMED: u32 = 512;

/// Reserves the memory for the first [`POOL`] batches, so that pages can be stored when memory has
/// run out, until each call has its [`leave_pool`].
///
/// # Errors
/// [`NoMemory`].
pub(super) fn join_pool<P: Platform>(memory: &Memory<P>) -> Result<(), NoMemory> {
    if memory.slab::<DetachedBatch>().pool(&memory.frames, POOL) { Ok(()) } else { Err(NoMemory) }
}

/// Ends a [`join_pool`].
pub(super) fn leave_pool<P: Platform>(memory: &Memory<P>) {
    memory.slab::<DetachedBatch>().unpool();
}

type Writes = ArrayVec<PageWrite<'static>, RUNS>;

/// A batch whose store has started.
pub(crate) struct DetachedBatch {
    /// Records in the object's list, from the start to the end of the batch.
    records: [FlightRecord; RUNS],
    object: NonNull<ObjectState>,
    /// The runs of the batch. Set before the pager gets the first request.
    batch: OnceCell<SaveBatch<RUNS>>,
    /// One write for each group of adjacent runs, borrowed from `batch`. Set at the same time as
    /// `batch`.
    writes: OnceCell<Writes>,
    /// The number of writes whose requests the pager has received. Accessed by the beginning
    /// thread, and afterwards by the settling thread.
    asked: Cell<usize>,
    /// The number of unanswered requests, plus one while the batch is being started.
    unanswered: AtomicU32,
    /// The first error, once the batch is settled.
    result: Cell<Result<(), Failure>>,
    end: TransferEnd,
    earlier: Earlier,
    /// Whether reclaim has begun the batch.
    is_for_reclaim: bool,
}

impl DetachedBatch {
    fn new(object: &ObjectState) -> Self {
        Self {
            records: [const { FlightRecord::detached() }; RUNS],
            object: NonNull::from(object),
            batch: OnceCell::new(),
            writes: OnceCell::new(),
            asked: Cell::new(0),
            unanswered: AtomicU32::new(1),
            result: Cell::new(Ok(())),
            end: TransferEnd::new(),
            earlier: Earlier::new(),
            is_for_reclaim: false,
        }
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl crate::memory::Record for DetachedBatch {
    const KIND: crate::memory::RecordKind = crate::memory::RecordKind::DetachedBatch;
}

/// Counts a stored answer for a part of the batch, in any context. The caller no longer accesses
/// the batch.
///
/// # Safety
/// 1. The part's request was made, and this is called once for its answer.
pub(super) unsafe fn answer<P: Platform>(memory: &Memory<P>, batch: NonNull<DetachedBatch>) {
    // SAFETY: 1. the count includes a part for this answer (obligation 1).
    if unsafe { count_down(batch) } {
        // SAFETY: the last part of the count was the caller's, so the batch lives until it is
        // settled.
        let earlier = unsafe { NonNull::from(&batch.as_ref().earlier) };
        // SAFETY: 1. the batch is added once, and no thread settles a batch that is not in the
        // list.
        unsafe { memory.answers.writes.add(batch.cast(), earlier) };
    }
}

/// Drops a part of the count of unanswered requests. Returns whether it was the last part.
///
/// # Safety
/// 1. The part belongs to the caller, so the batch lives.
unsafe fn count_down(batch: NonNull<DetachedBatch>) -> bool {
    // SAFETY: the batch lives (obligation 1). Release: orders the caller's stores before the drop.
    // Acquire: likewise orders the stores of the other parts.
    unsafe { batch.as_ref() }.unanswered.fetch_sub(1, Ordering::AcqRel) == 1
}

/// The thread that starts a batch. When dropped, even by a panic of the pager, it leaves the batch
/// to the answers of the requests that the pager has received.
struct Beginner<'m, P: Platform> {
    memory: &'m Memory<P>,
    batch: NonNull<DetachedBatch>,
}

impl<P: Platform> Drop for Beginner<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the part is the beginner's own.
        if unsafe { count_down(self.batch) } {
            // SAFETY: 1. all parts of the count are released, and the beginner has a handle.
            unsafe { settle(self.memory, self.batch) };
        }
    }
}

/// Starts to store the next dirty pages from `first` on that the rules allow. Returns the page to
/// continue at, and the batch. The batch is `None` if no such pages exist or another call is
/// changing the first of them. Called without locks.
///
/// # Errors
/// [`NoMemory`] for the record: [`POOL`] batches or more have not ended, and no memory is free.
pub(super) fn begin<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    first: u64,
    rules: Rules,
) -> Result<(u64, Option<FollowedBatch<'m, P>>), NoMemory> {
    let (slab, new) = (memory.slab::<DetachedBatch>(), || DetachedBatch::new(object));
    let record = slab.allocate_with(&memory.frames, new);
    let record = record.or_else(|| slab.allocate_pooled(&memory.frames, new)).ok_or(NoMemory)?;
    // SAFETY: the record is new, and is freed below or by its last holder; the caller is one of the
    // holders.
    let state = unsafe { record.as_ref() };
    let mut batch = SaveBatch::new(first);
    // SAFETY: 1. the records are new, and stay in the slab until `settle` has removed them; only
    // shared references to them exist.
    unsafe { batch.begin(memory, object, &state.records, rules) };
    let after = batch.after;
    if batch.is_empty() {
        // SAFETY: the record came from this slab. None of its flight records is in the list, and no
        // other thread knows it.
        unsafe { memory.slab::<DetachedBatch>().free(&memory.frames, record) };
        return Ok((after, None));
    }
    state.end.follow();
    let followed = FollowedBatch { memory, batch: record };
    // SAFETY: 1. the record has begun the batch and has no request yet.
    unsafe { ask(memory, record, batch) };
    Ok((after, Some(followed)))
}

/// Makes the pager store the runs of a batch. Called without locks.
///
/// # Safety
/// 1. `batch` was begun with the flight records of `record`, whose batch is not set yet.
unsafe fn ask<P: Platform>(
    memory: &Memory<P>,
    record: NonNull<DetachedBatch>,
    batch: SaveBatch<RUNS>,
) {
    let _beginner = Beginner { memory, batch: record };
    // SAFETY: the beginner holds a part of the count, so the record stays in the list of the
    // object, whose last holder waits for the record (obligation 1).
    let (state, object) = unsafe { (record.as_ref(), record.as_ref().object.as_ref()) };
    let batch = state.batch.get_or_init(|| batch);
    let Some((pager, file)) = object.file() else { return };
    let writes = state.writes.get_or_init(|| {
        let writes = batch.groups().map(|runs| {
            // SAFETY: the runs stay in the record, like the writes. Both are freed with it.
            let runs: &'static [IndexRun] = unsafe { NonNull::from(runs).as_ref() };
            PageWrite::new(file, runs, batch.size).of_batch(record)
        });
        writes.collect()
    });
    for write in writes {
        state.asked.set(state.asked.get() + 1);
        state.unanswered.fetch_add(1, Ordering::Relaxed);
        // SAFETY: 1. the record stays until all requests are answered: this request is counted and
        // is the only one of this write. 2. The pages stay in place while their record is in the
        // list, as in `save`.
        pager.begin_write(unsafe { WriteRequest::new(memory, write) });
    }
}

/// Starts to store dirty pages of a file from the folio of `frame` on, for reclaim, which has no
/// handle to the file. Returns whether a batch has begun; it ends without the caller. Never tries a
/// page that the pager has failed to store. Does nothing if the frame is no longer in a file with a
/// lasting pager, if another thread holds one of the locks, or if the limit has its share of the
/// records. Allocates nothing. Called without locks, in a thread that does not work for a pager.
pub(crate) fn store_for_reclaim<P: Platform>(memory: &Memory<P>, frame: Frame) -> bool {
    let held = memory.frames.try_hold(frame);
    let Some(locked) = held.and_then(FolioRef::try_into_locked) else { return false };
    let FolioOwner { owner: Owner::File(object), first } = locked.owner() else { return false };
    // SAFETY: the object owns the folio, whose lock is held, so it lives until it has dropped the
    // folio. Before that, it waits for the invalidate lock, and afterwards for the batch.
    let object: &ObjectState = unsafe { object.cast().as_ref() };
    if !object.has_lasting_pager() {
        return false;
    }
    let Some(alone) = object.invalidate_lock.try_write(memory.platform()) else { return false };
    let first = first.first();
    drop(locked);
    let limit = object.pages.unsaved.limit().unwrap_or(memory.dirty_limit());
    if !limit.begin_batch() {
        return false;
    }
    let slab = memory.slab::<DetachedBatch>();
    let new = || DetachedBatch { is_for_reclaim: true, ..DetachedBatch::new(object) };
    let Some(record) = slab.allocate_pooled(&memory.frames, new) else {
        limit.end_batch();
        return false;
    };
    let mut batch = SaveBatch::new(first);
    let rules = Rules { end: PAGE_LIMIT, turn: u64::MAX, most: RECLAIMED, tried: Tried::Never };
    {
        // SAFETY: the record is new.
        let state = unsafe { record.as_ref() };
        // SAFETY: 1. as in `begin`.
        unsafe { batch.begin_locked((memory, object), &state.records, rules, &alone.proof) };
    }
    if batch.is_empty() {
        limit.end_batch();
        // SAFETY: as in `begin`.
        unsafe { slab.free(&memory.frames, record) };
        return false;
    }
    memory.answers.reclaim.begin();
    // From here on only the batch keeps the object.
    drop(alone);
    // SAFETY: 1. the record has begun the batch and has no request yet.
    unsafe { ask(memory, record, batch) };
    true
}

/// Ends a batch: its pages become clean, or dirty again, and its records leave the list.
///
/// # Safety
/// 1. All requests are answered, the batch belongs to the caller, and the object lives until the
///    records have left its list.
unsafe fn settle<P: Platform>(memory: &Memory<P>, batch: NonNull<DetachedBatch>) {
    // SAFETY: the batch lives until it is released below; the object lives until its list lacks the
    // records (obligation 1).
    let (state, object) = unsafe { (batch.as_ref(), batch.as_ref().object.as_ref()) };
    if state.is_for_reclaim {
        object.pages.unsaved.limit().unwrap_or(memory.dirty_limit()).end_batch();
    }
    let (Some(runs), asked) = (state.batch.get(), state.asked.get()) else { return };
    let writes = state.writes.get().map_or(&[][..], |writes| writes);
    let answer = |number: usize| {
        let write = writes.get(number).filter(|_| number < asked)?;
        write.answer()
    };
    for number in 0..asked {
        if let Some(Err(error)) = answer(number) {
            // Recorded before the end, which a sync of another opener may wait for.
            object.write_errors.record(error);
            state.result.set(state.result.get().and(Err(error.into())));
        }
    }
    object.pages.end_writes(memory, |index, in_flight, ends| {
        for (number, group) in runs.groups().enumerate() {
            let parts = (&mut *index, &mut *in_flight, ends);
            // SAFETY: 1. `begin` was called with these records.
            unsafe { runs.end(parts, &state.records, group.len(), answer(number)) };
        }
        // With the lock held, as `FollowedBatch::ticket` requires.
        state.end.settle(Settled::Answered);
    });
    if state.is_for_reclaim {
        // The pages are clean now, so a search finds pages that the last search did not. A thread
        // that waits for the end must not search before.
        memory.answers.reclaim.end();
        memory.clock.exhausted.forget();
    }
    // The object may be freed from here on. SAFETY: 1. the settling thread's reference, released
    // once.
    unsafe { release(memory, batch) };
    memory.answers.completions.note(memory.platform());
}

/// Drops a holder of the record; the last one frees it.
///
/// # Safety
/// 1. The caller is one of the counted holders, and ends its hold. The record is in no list, unless
///    the settling thread is still a holder.
unsafe fn release<P: Platform>(memory: &Memory<P>, batch: NonNull<DetachedBatch>) {
    // SAFETY: the caller is a holder (obligation 1).
    if unsafe { batch.as_ref() }.end.leave() {
        // SAFETY: the record came from this slab; the settling thread has removed it from all
        // lists.
        unsafe { memory.slab::<DetachedBatch>().free(&memory.frames, batch) };
    }
}

/// Settles all answered batches. Called without locks. Acquires only spin locks and allocates
/// nothing.
pub(crate) fn settle_written<P: Platform>(memory: &Memory<P>) {
    let mut next = memory.answers.writes.take_all();
    if next.is_some() {
        // The batch's pages are clean now, so a search finds pages that the last search did not.
        memory.clock.exhausted.forget();
    }
    while let Some(record) = next {
        let batch: NonNull<DetachedBatch> = record.cast();
        // SAFETY: `answer` has added the batch, which lives until `settle`.
        next = unsafe { batch.as_ref() }.earlier.get();
        // SAFETY: 1. the batch was in the list, so all its requests are answered, and it belongs to
        // the caller. The last holder of the object waits for the object's list.
        unsafe { settle(memory, batch) };
    }
}

/// A batch that any thread settles, as seen by a call that checks whether it has ended.
pub(super) struct FollowedBatch<'m, P: Platform> {
    memory: &'m Memory<P>,
    batch: NonNull<DetachedBatch>,
}

// SAFETY: it is a counted holder of the record. It reads atomic words of the record, and fields
// that the settling thread has written before it set one of these words.
unsafe impl<P: Platform> Send for FollowedBatch<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for FollowedBatch<'_, P> {}

impl<P: Platform> FollowedBatch<'_, P> {
    fn get(&self) -> &DetachedBatch {
        // SAFETY: this is a counted holder.
        unsafe { self.batch.as_ref() }
    }

    /// The result, once the batch is settled.
    pub(super) fn saved(&self) -> Option<Saved> {
        let state = self.get();
        state.end.settled()?;
        let (result, batch) = (state.result.get(), state.batch.get()?);
        Some(Saved { result, after: batch.after, stored: batch.stored.get() })
    }

    /// A ticket for the batch's end; `None` if the batch is settled. `object` is that of the batch.
    pub(super) fn ticket(&self, object: &ObjectState) -> Option<Ticket> {
        object.pages.alone(self.memory.platform(), |_, in_flight, ends| {
            // The lock is held, so the records of an unsettled batch are in the list.
            let is_settled = self.get().end.settled().is_some();
            (!is_settled).then(|| in_flight.ticket(ends, true))
        })
    }
}

impl<P: Platform> Drop for FollowedBatch<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the holder is `self`, which is dropped.
        unsafe { release(self.memory, self.batch) };
    }
}

impl<P: Platform> core::fmt::Debug for FollowedBatch<'_, P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let is_settled = self.get().end.settled().is_some();
        f.debug_struct("FollowedBatch").field("is_settled", &is_settled).finish_non_exhaustive()
    }
}
