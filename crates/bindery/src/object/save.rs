//! Saving: what was written to a file's pages goes to its pager.
//!
//! For each batch of dirty pages that stand next to each other:
//! 1. with the object's gate passed alone, so that no fault is between marking a page and letting
//!    it be written, the marks are cleared, all mappings lose their permission to write, and the
//!    batch is noted as being saved;
//! 2. with the gate open again, the pager stores the pages. Reads and faults go on; whoever wants
//!    to write one of these pages marks it first, and that waits ([`super::pages::mark_dirty`]). So
//!    the bytes stand still, and what is written later is dirty again;
//! 3. if the pager fails, the marks are set again.
//!
//! The *saving* lock is held throughout, so one batch is saved at a time, and no page of it is
//! dropped: who drops pages takes that lock too.

use core::sync::atomic::{AtomicU64, Ordering};

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::platform::Platform;

use super::index::{PageFlags, Run};
use super::state::pages_of;
use super::{Object, ObjectState, mappings};

/// Runs that one call of the pager stores at the most.
const PIECES: usize = 32;
/// Pages that one call of the pager stores at the most: 16 MiB. Writers of any of them wait.
const PAGES: u32 = 4096;

/// The pages that are being saved at the moment.
pub(super) struct BeingSaved {
    first: AtomicU64,
    /// 0 where nothing is.
    end: AtomicU64,
}

impl BeingSaved {
    pub(super) const fn nothing() -> Self {
        Self { first: AtomicU64::new(0), end: AtomicU64::new(0) }
    }

    /// Whether one of the pages is being saved. The answer "no" lasts for as long as the caller
    /// holds the object's gate.
    pub(super) fn overlaps(&self, page: u64, count: u64) -> bool {
        // Acquire: whoever writes the page next comes after the pager has read it.
        let end = self.end.load(Ordering::Acquire);
        page < end && self.first.load(Ordering::Relaxed) < page.saturating_add(count)
    }

    /// With the gate passed alone.
    pub(super) fn begin(&self, first: u64, end: u64) {
        self.first.store(first, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
    }

    fn end(&self) {
        self.end.store(0, Ordering::Release);
    }
}

/// Dirty pages next to each other, which are being saved.
struct Batch {
    runs: ArrayVec<Run, PIECES>,
    /// The size of the file, in bytes.
    size: u64,
}

impl Batch {
    fn first(&self) -> u64 {
        self.runs.first().map_or(0, |run| run.page)
    }

    fn end(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.page + u64::from(run.count))
    }
}

impl<P: Platform> Object<'_, P> {
    /// Stores what was written to the file in `length` bytes from `offset` on, through mappings or
    /// otherwise, and returns when the pager has it. Nothing to do for shared memory. May sleep.
    /// (Linux: `fsync(2)`, `msync(2)` with `MS_SYNC`.)
    ///
    /// # Errors
    /// What the pager says, [`Error::InputOutput`] mostly. What could not be stored remains to be
    /// stored; the rest of the range is.
    ///
    /// Complexity: in the dirty pages, the index of the resident ones in the range, and the
    /// mappings of the object for each batch of up to 32 runs.
    pub fn sync(&self, offset: u64, length: u64) -> Result<(), Error> {
        let end = offset.saturating_add(length);
        save(self.memory, self.state(), offset >> PAGE_SHIFT, pages_of(end))
    }
}

/// As [`Object::sync`], of the pages from `first` to `end`. Called without the object's locks.
pub(super) fn save<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    end: u64,
) -> Result<(), Error> {
    if !object.is_file() {
        return Ok(());
    }
    object.saving.alone(&memory.platform, || {
        let mut result = Ok(());
        let mut from = first;
        while let Some(batch) = begin_batch(memory, object, from, end) {
            let stored = store(memory, object, &batch);
            if stored.is_err() {
                let count = batch.end() - batch.first();
                object.pages.change(memory, |index, _| {
                    index.set_flags(batch.first(), count, PageFlags::DIRTY);
                    ((), 0)
                });
            }
            object.being_saved.end();
            result = result.and(stored);
            from = batch.end();
        }
        result
    })
}

/// The next dirty pages from `from` on, which nobody may write any more.
fn begin_batch<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    from: u64,
    end: u64,
) -> Option<Batch> {
    object.gate.alone(&memory.platform, || {
        let size = object.size();
        let runs = dirty_runs(memory, object, from, end.min(pages_of(size)))?;
        let batch = Batch { runs, size };
        let (first, count) = (batch.first(), batch.end() - batch.first());
        object.pages.change(memory, |index, _| {
            index.clear_flags(first, count, PageFlags::DIRTY);
            ((), 0)
        });
        mappings::write_protect(memory, object, first, count);
        object.being_saved.begin(first, batch.end());
        Some(batch)
    })
}

/// Runs of dirty pages that follow each other, the first of which is the first from `from` on.
fn dirty_runs<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    from: u64,
    end: u64,
) -> Option<ArrayVec<Run, PIECES>> {
    object.pages.look(&memory.platform, |index| {
        let mut next = index.next_run_with(PageFlags::DIRTY, from, end);
        let mut runs = ArrayVec::new();
        let mut room = PAGES;
        while let Some(run) = next {
            let count = run.count.min(room);
            room -= count;
            runs.push(Run { count, ..run });
            let behind = run.page + u64::from(count);
            if room == 0 || runs.is_full() {
                break;
            }
            // Asked for the page alone first: the search goes as far as it must.
            let follows =
                |page| index.get(page).is_some_and(|slot| slot.flags.contains(PageFlags::DIRTY));
            next = follows(behind)
                .then(|| index.next_run_with(PageFlags::DIRTY, behind, end))
                .flatten();
        }
        (!runs.is_empty()).then_some(runs)
    })
}

/// Hands a batch to the pager.
fn store<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    batch: &Batch,
) -> Result<(), Error> {
    let Some((pager, file)) = object.file() else { return Ok(()) };
    let pieces: ArrayVec<&[u8], PIECES> = batch
        .runs
        .iter()
        .map(|run| {
            let left = batch.size - (run.page << PAGE_SHIFT);
            let length = left.min(u64::from(run.count) * PAGE_SIZE) as usize;
            let window = memory.platform.window(run.frame).as_ptr();
            // SAFETY: the window shows the bytes of the run's frames, which are consecutive
            // (obligation 1 of `Platform`, and `Frames::new` looked where two ranges touch). The
            // pages stay where they are while the saving lock is held. Nobody writes them: no
            // entry lets a program do so since `begin_batch`, and whoever wants to make one that
            // does, or to write from here (`content`, `pages::zero_part`), waits until the batch
            // is no longer noted as being saved.
            unsafe { core::slice::from_raw_parts(window, length) }
        })
        .collect();
    Ok(pager.write(file, batch.first(), &pieces)?)
}
