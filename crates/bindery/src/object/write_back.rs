//! Dirty pages of the files of a file system, stored to keep within a limit or on request.
//!
//! Linux has a thread for each device that stores its dirty pages, and throttles writers until that
//! has caught up. Here the writer that finds no room stores pages itself: of its own file first,
//! which it has just written, then of the file system's others. So a limit needs no thread, and a
//! writer is as fast as its own device. A thread that stores pages earlier is the embedder's
//! ([`FileSystem::write_back`]).
//!
//! Reclaim of a file's pages stores none. It has found a folio by its frame, and nothing shows it
//! that the pager is alive: a program may have forgotten a handle. (Linux left it to the threads of
//! the devices as well.) The limits see to it that most pages of files are clean.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::PageRange;
use crate::collections::page_tree::PAGE_LIMIT;
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;

use super::detached_batch::settle_written;
use super::file_system::FileSystem;
use super::in_flight::InFlight;
use super::registry::Registry;
use super::save::{Rules, Saved, Tried, next_to_store, save_from};
use super::unsaved::Room;
use super::{Object, ObjectState};

/// The pages that a writer without room stores at a time.
const BATCH: u32 = 1024;

const ALL: PageRange = PageRange { first: 0, end: PAGE_LIMIT };

impl<'m, P: Platform> FileSystem<'m, P> {
    /// Stores dirty pages of the file system's files, about `pages` of them, and returns the number
    /// stored. It takes the files in turn, that first which has had dirty pages for the longest
    /// time. Pages that the pager has failed to store are left. A failure is reported to the
    /// openers of the file ([`Object::check_errors`]), and ends its turn, as a lack of memory of
    /// the pager does. Each file gets one turn. A fatal signal ends the call early. If another
    /// thread drops the last handle of a file in its turn, the call ends the file as that drop
    /// would.
    ///
    /// For a thread that stores pages before writers have to wait for it (Linux: the flusher of a
    /// `bdi`). It calls again while [`crate::DirtyLimit::pages`] is above a mark of the embedder's,
    /// and every few seconds. Waits for the pager.
    ///
    /// Context: may sleep. Complexity: linear in the pages, and in the files with dirty pages.
    pub fn write_back(&self, pages: u64) -> u64 {
        write_back(self, pages)
    }
}

fn write_back<P: Platform>(system: &FileSystem<'_, P>, pages: u64) -> u64 {
    let memory = system.memory();
    // Answered pages of a sync that was dropped count as dirty until then, and no file has them to
    // store: a caller that repeats this above a mark would repeat it for ever.
    settle_written(memory);
    let mut stored = 0;
    // At most one round: a file whose pages another thread stores, or whose pager lacks memory,
    // stays in the list.
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

/// The next file of the number space with pages that may be stored, or are being.
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
    // The page may have left in between.
    Some(Saved { after: saved.after.max(run.page + 1), ..saved })
}

/// Stores pages until one more of the object may become dirty. Called without locks.
///
/// # Errors
/// [`Error::InputOutput`] if the pager has failed to store all pages that fill the limit;
/// [`Failure::NoMemory`] if it lacks memory; [`Error::Interrupted`] if a fatal signal is pending.
pub(super) fn make_room<P: Platform>(object: &Object<'_, P>) -> Result<(), Failure> {
    let (memory, state) = (object.memory, object.state());
    loop {
        match state.room_for_dirty(memory) {
            Room::Yes => return Ok(()),
            Room::No => return Err(Error::InputOutput.into()),
            Room::AfterStores => {}
        }
        interrupt::check(memory.platform())?;
        // Each turn stores pages, waits for some that are being stored, or finds that another
        // thread has done so since the check.
        if state.pages.unsaved.has_storable() {
            store_of_file(memory, state)?;
        } else if let Some(name) = state.name.name()
            && let Some(file) = next_file(memory, name.space)
        {
            store_of_file(memory, file.state())?;
        }
    }
}

/// Stores a batch of the file's pages, or waits for those that another call stores. Pages that the
/// pager fails to store are not storable any more.
///
/// # Errors
/// [`Failure::NoMemory`] if the pager lacks memory.
fn store_of_file<P: Platform>(memory: &Memory<P>, object: &ObjectState) -> Result<(), Failure> {
    match store_from(memory, object, 0, BATCH.into()) {
        Some(Saved { result: Err(Failure::NoMemory), stored: 0, .. }) => Err(Failure::NoMemory),
        Some(_) => Ok(()),
        None => {
            wait_for_writes(memory, object);
            Ok(())
        }
    }
}

/// Waits for the writes of a file's pages that have begun.
fn wait_for_writes<P: Platform>(memory: &Memory<P>, object: &ObjectState) {
    let next = |_: &mut _, in_flight: &mut InFlight, _: &_| in_flight.next_number();
    let number = object.pages.alone(memory.platform(), next);
    object.pages.wait_for_writes(memory, ALL, number);
}
