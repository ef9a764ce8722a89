//! Saving: stores dirty pages of a file through its pager, in batches.
//!
//! For each batch of dirty pages, which may be scattered:
//! 1. The marks are cleared with the invalidate lock held for writing, so that no fault is between
//!    marking a page and allowing writes to it. A record of each run is inserted into the list
//!    ([`super::in_flight`]). All mappings lose write permission, in one walk for all runs.
//! 2. With no lock held, the pager stores the pages. Reads and faults continue. A thread that wants
//!    to write one of these pages marks it first, and waits for the record
//!    ([`super::pages::mark_dirty`]). So the bytes are stable, and a page that is written later
//!    becomes dirty again. A thread that wants to drop the pages also waits.
//! 3. If the pager fails, the marks are set again, in one step with the end of the records.
//!
//! A batch either belongs to the call that waits for it, or lies in a record that any thread
//! settles ([`super::detached_batch`]).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::PageRange;
use crate::error::Failure;
use crate::platform::Platform;

use super::in_flight::{Ends, FlightRecord, InFlight, TransferKind};
use super::invalidate::PagesMayGo;
use super::state::pages_of;
use super::write_request::{PageWrite, RUNS, WriteRequest};
use super::{ObjectState, PagerError, mappings};
use crate::collections::page_tree::{IndexRun, PageFlags, PageIndex};

/// Saves the next dirty pages, starting with `run`. If another call is changing that run, waits for
/// the change; later changes wait until the run is saved.
pub(super) fn save_from<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    run: IndexRun,
    rules: Rules,
) -> Saved {
    let saved = save_batch(memory, object, run.page, rules);
    if saved.after != run.page {
        return saved;
    }
    let range = PageRange::from_count(run.page, u64::from(run.count));
    object.pages.with_turn(memory, range, |turn| {
        save_batch(memory, object, run.page, Rules { turn, end: range.end, ..rules })
    })
}

/// The choice of pages to retry among those that the pager has failed to store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tried {
    /// No such pages.
    Never,
    /// Pages that have failed once.
    Once,
}

impl Tried {
    fn allows(self, flags: PageFlags) -> bool {
        match self {
            Self::Never => !flags.contains(PageFlags::FAILED),
            Self::Once => !flags.contains(PageFlags::FAILED_TWICE),
        }
    }
}

/// The first run of `pages` that has to be stored.
pub(super) fn next_to_store<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    tried: Tried,
) -> Option<IndexRun> {
    let mut from = pages.first;
    loop {
        // One run at a time, because other threads spin for the lock.
        let next = |index: &PageIndex| index.next_dirty(from, pages.end);
        let (run, flags) = object.pages.look(memory.platform(), next)?;
        if tried.allows(flags) {
            return Some(run);
        }
        from = run.page + u64::from(run.count);
    }
}

/// The pages that a batch may include.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// Pages before this one.
    pub(super) end: u64,
    /// Pages up to the first one with a change older than this.
    pub(super) turn: u64,
    /// The maximum number of pages.
    pub(super) most: u32,
    pub(super) tried: Tried,
}

/// The result of a batch.
pub(super) struct Saved {
    pub(super) result: Result<(), Failure>,
    /// The page to continue at.
    pub(super) after: u64,
    /// The number of pages that the pager has stored.
    pub(super) stored: u64,
}

/// Saves the next dirty pages from `first` on that the rules allow.
fn save_batch<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    rules: Rules,
) -> Saved {
    // In this stack frame until the end of the function, and borrowed only as shared, as
    // `SaveBatch::begin` requires.
    let records = [const { FlightRecord::new() }; RUNS];
    let mut batch =
        WritebackBatch { memory, object, records: &records, batch: SaveBatch::new(first) };
    // SAFETY: 1. the records are used only for this batch, and lie in this frame, which has only
    // shared references to them. `WritebackBatch::end` removes them, at the latest when the
    // `WritebackBatch` is dropped.
    unsafe { batch.batch.begin(memory, object, &records, rules) };
    let result = batch.store();
    Saved { result, after: batch.batch.after, stored: batch.batch.stored.get() }
}

/// The step of a batch.
enum SaveStep {
    /// Pages that the rules exclude, up to this one.
    Left(u64),
    /// A run that was taken, and its previous flags.
    Taken(IndexRun, PageFlags),
}

/// The new flags of pages that had the flags `before` and that the pager has failed to store.
fn after_failure(before: PageFlags) -> PageFlags {
    let failed = PageFlags::DIRTY | PageFlags::FAILED;
    if before.contains(PageFlags::FAILED) { failed | PageFlags::FAILED_TWICE } else { failed }
}

fn pages_in(runs: &[IndexRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.count)).sum()
}

/// Runs of dirty pages that are being saved, in ascending order.
pub(super) struct SaveBatch<const N: usize> {
    runs: ArrayVec<IndexRun, N>,
    /// The previous flags of the pages of each run.
    flags: ArrayVec<PageFlags, N>,
    /// The number of completed runs.
    done: Cell<usize>,
    /// The number of pages that were stored.
    pub(super) stored: Cell<u64>,
    /// The size of the file, in bytes.
    pub(super) size: u64,
    /// The page to continue at.
    pub(super) after: u64,
}

impl<const N: usize> SaveBatch<N> {
    /// An empty batch that begins at `first`.
    pub(super) fn new(first: u64) -> Self {
        Self {
            runs: ArrayVec::new(),
            flags: ArrayVec::new(),
            done: Cell::new(0),
            stored: Cell::new(0),
            size: 0,
            after: first,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Adds the pages that the rules allow to the batch and removes write permission from their
    /// mappings. Called without locks.
    ///
    /// # Safety
    /// 1. The records are in no list. Until [`SaveBatch::end`] was called for all runs of the
    ///    batch, the records do not move, and no mutable reference to them exists.
    pub(super) unsafe fn begin<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        object: &ObjectState,
        records: &[FlightRecord; N],
        rules: Rules,
    ) {
        object.invalidate_lock.with_write(memory.platform(), |proof| {
            // SAFETY: 1. the caller's obligation 1.
            unsafe { self.begin_locked((memory, object), records, rules, proof) };
        });
    }

    /// As [`SaveBatch::begin`], with the invalidate lock held.
    ///
    /// # Safety
    /// 1. As for [`SaveBatch::begin`].
    pub(super) unsafe fn begin_locked<P: Platform>(
        &mut self,
        (memory, object): (&Memory<P>, &ObjectState),
        records: &[FlightRecord; N],
        rules: Rules,
        proof: &PagesMayGo,
    ) {
        self.size = object.size();
        let end = rules.end.min(pages_of(self.size));
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.take(memory, object, records, Rules { end, ..rules }) };
        let ranges: ArrayVec<PageRange, N> =
            self.groups().map(|runs| PageRange::from_count(runs[0].page, pages_in(runs))).collect();
        if !ranges.is_empty() {
            mappings::write_protect(memory, object, &ranges, proof);
        }
    }

    /// Adds dirty pages to the batch and clears their flags. Stops at a page with a change older
    /// than the rules' turn; a younger change waits. The invalidate lock is held for writing.
    ///
    /// # Safety
    /// 1. As for [`SaveBatch::begin`].
    unsafe fn take<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        object: &ObjectState,
        records: &[FlightRecord; N],
        rules: Rules,
    ) {
        let mut room = rules.most;
        while room > 0 && !self.runs.is_full() {
            let from = self.after;
            let record = &records[self.runs.len()];
            let next = object.pages.alone(memory.platform(), |index, in_flight, ends| {
                let (run, flags) = index.next_dirty(from, rules.end)?;
                if !rules.tried.allows(flags) {
                    return Some(SaveStep::Left(run.page + u64::from(run.count)));
                }
                let mut count = run.count.min(room);
                let stored = PageRange::from_count(run.page, count.into());
                // In one step with the check of the list, so that a change that begins later waits
                // for the batch.
                if let Some(change) = in_flight.first_change(stored, rules.turn) {
                    count = change.checked_sub(run.page).filter(|count| *count > 0)? as u32;
                }
                let stored = PageRange::from_count(run.page, count.into());
                index.clear_flags(run.page, u64::from(count));
                // SAFETY: 1. the record is used only for this run, and the caller's obligation 1
                // covers the rest.
                unsafe { in_flight.insert(ends, record, TransferKind::Write, stored) };
                Some(SaveStep::Taken(IndexRun { count, ..run }, flags))
            });
            match next {
                None => break,
                Some(SaveStep::Left(after)) => self.after = after,
                Some(SaveStep::Taken(run, flags)) => {
                    room -= run.count;
                    self.after = run.page + u64::from(run.count);
                    self.runs.push(run);
                    self.flags.push(flags);
                }
            }
        }
    }

    /// The runs, in groups of adjacent ones.
    pub(super) fn groups(&self) -> impl Iterator<Item = &[IndexRun]> {
        let follows =
            |run: &IndexRun, next: &IndexRun| run.page + u64::from(run.count) == next.page;
        self.runs.chunk_by(follows)
    }

    /// Completes the next `count` runs and marks them dirty again if they were not stored. A
    /// missing answer does not count as an attempt. Returns whether threads must be woken
    /// ([`super::in_flight::Ends::wake`]).
    ///
    /// # Safety
    /// 1. [`SaveBatch::begin`] and all earlier calls of this function were called with the same
    ///    records.
    pub(super) unsafe fn end(
        &self,
        (index, in_flight, ends): (&mut PageIndex, &mut InFlight, &Ends),
        records: &[FlightRecord; N],
        count: usize,
        answer: Option<Result<(), PagerError>>,
    ) -> bool {
        let over = self.done.get()..self.done.get() + count;
        self.done.set(over.end);
        if let Some(Ok(())) = answer {
            self.stored.set(self.stored.get() + pages_in(&self.runs[over.clone()]));
        }
        let mut wanted = false;
        for number in over {
            let (run, before) = (&self.runs[number], self.flags[number]);
            let again = match answer {
                Some(Ok(())) => None,
                // A failure for lack of memory does not count as an attempt.
                Some(Err(error)) if Failure::from(error) != Failure::NoMemory => {
                    Some(after_failure(before))
                }
                None | Some(Err(_)) => Some(before),
            };
            if let Some(flags) = again {
                index.set_flags(run.page, u64::from(run.count), flags);
                in_flight.count_failure();
            }
            // SAFETY: 1. `begin` has inserted the records of all runs, and `done` has passed those
            // that were removed.
            wanted |= unsafe { in_flight.take(ends, &records[number]) };
        }
        wanted
    }
}

/// A batch that is awaited by the thread that started it.
struct WritebackBatch<'a, P: Platform> {
    memory: &'a Memory<P>,
    object: &'a ObjectState,
    /// One record for each run.
    records: &'a [FlightRecord; RUNS],
    batch: SaveBatch<RUNS>,
}

impl<P: Platform> WritebackBatch<'_, P> {
    /// Makes the pager store all groups, which a device may process concurrently, and waits for all
    /// answers.
    fn store(&self) -> Result<(), Failure> {
        let Some((pager, file)) = self.object.file() else { return Ok(()) };
        let writes: ArrayVec<PageWrite<'_>, RUNS> =
            self.batch.groups().map(|runs| PageWrite::new(file, runs, self.batch.size)).collect();
        // Dropped before the writes: if the pager panics, the drop waits for the answers to the
        // earlier requests.
        let mut begun = BegunWrites { batch: self, asked: &[], answered: 0 };
        let mut result = Ok(());
        for number in 0..writes.len() {
            begun.asked = &writes[..=number];
            // SAFETY: 1. `begun` waits for the answer, at the latest when it is dropped, and this
            // is the only request of the write. 2. The pages stay in place while their record is in
            // the list: a call that writes, drops or replaces them waits for the record's end,
            // which comes after the answer. While an object has pages, no reference to their bytes
            // exists.
            let request = unsafe { WriteRequest::new(self.memory, &writes[number]) };
            pager.begin_write(request);
            // With a pager that answers immediately, no group waits for the others.
            result = result.and(begun.take_answers());
        }
        while begun.answered < writes.len() {
            begun.wait();
            result = result.and(begun.take_answers());
        }
        result
    }

    /// As [`SaveBatch::end`], but also wakes the threads.
    fn end(&self, count: usize, answer: Option<Result<(), PagerError>>) {
        let wanted = self.object.pages.end_writes(self.memory, |index, in_flight, ends| {
            // SAFETY: 1. `save_batch` has begun the batch with these records.
            unsafe { self.batch.end((index, in_flight, ends), self.records, count, answer) }
        });
        if wanted {
            self.object.pages.ends.wake(self.memory.platform());
        }
    }
}

impl<P: Platform> Drop for WritebackBatch<'_, P> {
    fn drop(&mut self) {
        // Runs are left if the pager has panicked.
        let left = self.batch.runs.len() - self.batch.done.get();
        if left > 0 {
            self.end(left, None);
        }
    }
}

/// The writes of a batch whose requests the pager has received. Dropping this waits until all of
/// them are answered.
struct BegunWrites<'b, 'a, P: Platform> {
    batch: &'b WritebackBatch<'a, P>,
    asked: &'b [PageWrite<'b>],
    /// The number of writes whose answer was taken.
    answered: usize,
}

impl<P: Platform> BegunWrites<'_, '_, P> {
    /// Completes the runs of the next writes, up to the first write without an answer.
    fn take_answers(&mut self) -> Result<(), Failure> {
        let mut result = Ok(());
        while let Some(write) = self.asked.get(self.answered)
            && let Some(answer) = write.answer()
        {
            if let Err(error) = answer {
                // Recorded before the end, for which another opener's sync may wait; that sync
                // checks the errors next.
                self.batch.object.write_errors.record(error);
                result = result.and(Err(error.into()));
            }
            self.batch.end(write.runs().len(), Some(answer));
            self.answered += 1;
        }
        result
    }

    /// Waits until the next write is answered.
    fn wait(&self) {
        let memory = self.batch.memory;
        if let Some(write) = self.asked.get(self.answered) {
            memory.answers.completions.wait(memory.platform(), &mut || write.answer().is_some());
        }
    }
}

impl<P: Platform> Drop for BegunWrites<'_, '_, P> {
    fn drop(&mut self) {
        while self.answered < self.asked.len() {
            self.wait();
            let _ = self.take_answers();
        }
    }
}
