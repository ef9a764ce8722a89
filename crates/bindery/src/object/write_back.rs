//! Dirty pages of a file system's files, stored to stay within a limit or on request.
//!
//! Linux has a thread for each device that stores its dirty pages, and throttles writers until that
//! thread has caught up. Here, a writer that finds no room stores pages itself: first those of its
//! own file, which it has just written, and then those of the file system's other files. So a limit
//! needs no thread, and a writer is as fast as its own device. The embedder may provide a thread
//! that stores pages earlier ([`FileSystem::write_back`]).
//!
//! Reclaim stores pages only of pagers that exist forever ([`Memory::lasting_file_system`]). A
//! reclaimer finds a folio by its frame and has no proof that another pager still exists, because a
//! program may have forgotten a handle. For these, the limits ensure that most pages are clean.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::PageRange;
use crate::collections::page_tree::{IndexRun, PAGE_LIMIT};
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;

use super::detached_batch::{self, FollowedBatch, settle_written};
use super::file_system::FileSystem;
use super::in_flight::Ticket;
use super::registry::Registry;
use super::save::{Rules, Saved, Tried, next_to_store, save_from};
use super::unsaved::Room;
use super::{Object, ObjectState};

/// The number of pages that a writer without room stores at a time.
const BATCH: u32 = 1024;

const ALL: PageRange = PageRange { first: 0, end: PAGE_LIMIT };

impl<'m, P: Platform> FileSystem<'m, P> {
    /// Stores dirty pages of the file system's files, about `pages` of them, and returns the number
    /// stored. The files take turns, starting with the file that has had dirty pages for the
    /// longest time. Pages that the pager has failed to store are skipped. A failure is reported to
    /// the openers of the file ([`Object::check_errors`]) and ends the file's turn, as does the
    /// pager's lack of memory. Each file gets one turn. A fatal signal ends the call early. If
    /// another thread drops the last handle of a file in its turn, the call ends the file's object
    /// as that drop would.
    ///
    /// Intended for a thread that stores pages before writers have to wait for it (Linux: the
    /// flusher of a `bdi`). The thread calls this repeatedly while [`crate::DirtyLimit::pages`] is
    /// above a threshold of the embedder's, and every few seconds otherwise. Waits for the pager.
    ///
    /// Context: may sleep. Complexity: linear in the pages and in the files with dirty pages.
    pub fn write_back(&self, pages: u64) -> u64 {
        write_back(self, pages)
    }
}

fn write_back<P: Platform>(system: &FileSystem<'_, P>, pages: u64) -> u64 {
    let memory = system.memory();
    // Answered pages of a dropped sync count as dirty until they are settled, and no file has them
    // to store; a caller that repeats the call while above a threshold would otherwise repeat it
    // forever.
    settle_written(memory);
    let mut stored = 0;
    // At most one round, because a file whose pages another thread stores, or whose pager lacks
    // memory, stays in the list.
    for _ in 0..Registry::of(memory).unsaved_files(system.number()).storable {
        if stored >= pages || interrupt::check(memory.platform()).is_err() {
            break;
        }
        let Some(file) = next_file(memory, system.number()) else { break };
        let mut from = 0;
        while stored < pages
            && interrupt::check(memory.platform()).is_ok()
            && let Some(saved) = store_from(memory, file.state(), from, pages - stored)
        {
            stored += saved.stored;
            from = saved.after;
            if saved.result.is_err() {
                break;
            }
        }
    }
    stored
}

/// The next file of the number space with pages that may be stored or are being stored.
fn next_file<P: Platform>(memory: &Memory<P>, space: u64) -> Option<Object<'_, P>> {
    let node = Registry::of(memory).next_unsaved(space)?;
    // SAFETY: 1. the registry has made the caller a holder.
    Some(unsafe { Object::of_holder(memory, node) })
}

/// Stores about `most` pages of a file from page `from` on. `None` if all remaining dirty pages
/// have failed.
fn store_from<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    from: u64,
    most: u64,
) -> Option<Saved> {
    let run = next_to_store(memory, object, PageRange { first: from, ..ALL }, Tried::Never)?;
    let most = most.min(BATCH.into()) as u32;
    let rules = Rules { end: PAGE_LIMIT, turn: u64::MAX, most, tried: Tried::Never };
    let saved = save_from(memory, object, run, rules);
    // The page may have been dropped in between.
    Some(Saved { after: saved.after.max(run.page + 1), ..saved })
}

/// The number of batches that a writer without room begins before it waits for their answers.
const BATCHES: usize = 4;

/// Stores pages until another page of the object may become dirty. Called without locks. A fatal
/// signal ends the call, also while it waits for a pager that does not answer: any thread may end
/// the stores that it has begun ([`super::detached_batch`]).
///
/// # Errors
/// [`Error::InputOutput`] if the pager has failed to store all pages that fill the limit;
/// [`Failure::NoMemory`] if the pager lacks memory; [`Error::Interrupted`] if a fatal signal is
/// pending.
pub(super) fn make_room<P: Platform>(object: &Object<'_, P>) -> Result<(), Failure> {
    let (memory, state) = (object.memory, object.state());
    loop {
        settle_written(memory);
        match state.room_for_dirty(memory) {
            Room::Yes => return Ok(()),
            Room::No => return Err(Error::InputOutput.into()),
            Room::AfterStores => {}
        }
        interrupt::check(memory.platform())?;
        // Each iteration stores pages, waits for pages that are being stored, or finds that another
        // thread has stored pages since the check.
        if state.pages.unsaved.has_storable() {
            store_of_file(memory, state)?;
        } else if let Some(name) = state.name.name()
            && let Some(file) = next_file(memory, name.space)
        {
            store_of_file(memory, file.state())?;
        }
    }
}

/// The room that a task finds or begins to make ([`poll_room`]).
pub(super) enum PolledRoom<'m, P: Platform> {
    /// Another page may become dirty.
    Made,
    /// It may once this batch is stored, which any thread settles.
    AfterBatch(FollowedBatch<'m, P>),
    /// It may once the record of this ticket has ended.
    After(Ticket),
    /// Only a thread can make room.
    NeedsThread,
}

/// As [`make_room`], for a task: begins to store pages of its file, and returns the first event to
/// wait for. While the pager stores pages of the file, nothing further is begun. For the pages of
/// another file, the task would need a handle, and the drop of the last handle sleeps. Called without
/// locks.
///
/// # Errors
/// [`Error::InputOutput`] as [`make_room`].
pub(super) fn poll_room<'m, P: Platform>(
    object: &Object<'m, P>,
) -> Result<PolledRoom<'m, P>, Failure> {
    let (memory, state) = (object.memory, object.state());
    loop {
        settle_written(memory);
        match state.room_for_dirty(memory) {
            Room::Yes => return Ok(PolledRoom::Made),
            Room::No => return Err(Error::InputOutput.into()),
            Room::AfterStores if state.pages.unsaved.has_storable() => {}
            Room::AfterStores => return Ok(PolledRoom::NeedsThread),
        }
        if let Some(ticket) = state.pages.write_before(memory.platform(), ALL, u64::MAX) {
            return Ok(PolledRoom::After(ticket));
        }
        let BegunStores { batches, changed, unbegun } = begin_stores(memory, state);
        if let Some(batch) = batches.into_iter().next() {
            return Ok(PolledRoom::AfterBatch(batch));
        }
        if unbegun.is_some() {
            return Ok(PolledRoom::NeedsThread);
        }
        let platform = memory.platform();
        if let Some(ticket) = changed.and_then(|pages| state.pages.change_of(platform, pages)) {
            return Ok(PolledRoom::After(ticket));
        }
        // Another thread has stored or changed the pages since the look.
    }
}

/// The stores of a file's pages that a writer without room has begun.
struct BegunStores<'m, P: Platform> {
    batches: ArrayVec<FollowedBatch<'m, P>, BATCHES>,
    /// The first pages that another call is changing.
    changed: Option<PageRange>,
    /// The next run to store, with its rules, if there was no record for it.
    unbegun: Option<(IndexRun, Rules)>,
}

/// Begins to store some of the file's pages. Called without locks.
fn begin_stores<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
) -> BegunStores<'m, P> {
    let mut begun = ArrayVec::<_, BATCHES>::new();
    let (mut from, mut left, mut changed) = (0, BATCH, None);
    let next = |from| next_to_store(memory, object, PageRange { first: from, ..ALL }, Tried::Never);
    while !begun.is_full()
        && left > 0
        && let Some(run) = next(from)
    {
        let rules = Rules { end: PAGE_LIMIT, turn: u64::MAX, most: left, tried: Tried::Never };
        let Ok((after, batch)) = detached_batch::begin(memory, object, run.page, rules) else {
            return BegunStores { batches: begun, changed, unbegun: Some((run, rules)) };
        };
        // Pages of a run that another call is changing are passed.
        let end = run.page + u64::from(run.count);
        from = if after > run.page { after } else { end };
        left = left.saturating_sub((from - run.page).min(left.into()) as u32);
        match batch {
            Some(batch) => begun.push(batch),
            None => changed = changed.or(Some(PageRange { first: run.page, end })),
        }
    }
    BegunStores { batches: begun, changed, unbegun: None }
}

/// Stores some of the file's pages. If all of them are being stored or changed already, waits for
/// the first of these stores or changes. Pages that the pager fails to store are no longer
/// storable.
///
/// # Errors
/// [`Failure::NoMemory`] if the pager lacks memory; [`Error::Interrupted`].
fn store_of_file<P: Platform>(memory: &Memory<P>, object: &ObjectState) -> Result<(), Failure> {
    let BegunStores { batches, changed, unbegun } = begin_stores(memory, object);
    if batches.is_empty() {
        return match unbegun {
            // Without a record that any thread may end, this thread has to wait.
            Some((run, rules)) => stored(&save_from(memory, object, run, rules)),
            None => wait_for_others(memory, object, changed),
        };
    }
    let mut result = Ok(());
    for batch in batches {
        while let Some(ticket) = batch.ticket(object) {
            object.pages.wait_unless_killed(memory, ticket)?;
        }
        result = result.and(batch.saved().map_or(Ok(()), |saved| stored(&saved)));
    }
    result
}

/// The result of a batch for a writer without room.
pub(super) fn stored(saved: &Saved) -> Result<(), Failure> {
    match saved {
        Saved { result: Err(Failure::NoMemory), stored: 0, .. } => Err(Failure::NoMemory),
        _ => Ok(()),
    }
}

/// Waits for a write of the file's pages, or for a change of `changed`.
///
/// # Errors
/// [`Error::Interrupted`].
fn wait_for_others<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    changed: Option<PageRange>,
) -> Result<(), Failure> {
    let platform = memory.platform();
    let change = changed.and_then(|pages| object.pages.change_of(platform, pages));
    let ticket = change.or_else(|| object.pages.write_before(platform, ALL, u64::MAX));
    if let Some(ticket) = ticket {
        object.pages.wait_unless_killed(memory, ticket)?;
    }
    Ok(())
}
