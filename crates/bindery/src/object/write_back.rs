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

use super::file_system::FileSystem;
use super::registry::Registry;
use super::save::{Rules, Tried, next_to_store, save_from};
use super::{Object, ObjectState};

/// The pages that a writer without room stores at a time.
const BATCH: u32 = 1024;

const ALL: PageRange = PageRange { first: 0, end: PAGE_LIMIT };

impl<'m, P: Platform> FileSystem<'m, P> {
    /// Stores dirty pages of the file system's files, about `pages` of them, and returns the number
    /// stored. It takes the files in turn, that first which has had dirty pages for the longest
    /// time. Pages that the pager has failed to store are left. A failure is reported to the
    /// openers of the file ([`Object::check_errors`]), and ends its turn. A fatal signal ends the
    /// call early.
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
    let mut turns = Registry::of(memory).unsaved_files(system.number());
    let mut stored = 0;
    while stored < pages
        && turns > 0
        && interrupt::check(memory.platform()).is_ok()
        && let Some(file) = next_file(memory, system.number())
    {
        turns -= 1;
        let mut from = 0;
        while stored < pages
            && let Some((count, after)) = store_from(memory, file.state(), from, pages - stored)
        {
            stored += count;
            from = after;
        }
    }
    stored
}

/// The next file with unsaved pages of the number space.
fn next_file<P: Platform>(memory: &Memory<P>, space: u64) -> Option<Object<'_, P>> {
    let node = Registry::of(memory).next_unsaved(space)?;
    // SAFETY: 1. the registry has made the caller a holder.
    Some(unsafe { Object::of_holder(memory, node) })
}

/// Stores pages of a file from page `from` on, about `most`. Returns the number of those that were
/// stored, and the page to continue at. `None` if there is nothing left to store, or the pager has
/// failed.
fn store_from<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    from: u64,
    most: u64,
) -> Option<(u64, u64)> {
    let run = next_to_store(memory, object, PageRange { first: from, ..ALL }, Tried::Never)?;
    let most = most.min(BATCH.into()) as u32;
    let rules = Rules { turn: u64::MAX, most, tried: Tried::Never };
    let saved = save_from(memory, object, run, PAGE_LIMIT, rules);
    // The page may have left in between.
    let after = saved.after.max(run.page + 1);
    saved.result.ok().map(|()| (saved.stored, after))
}

/// Stores pages until one more of the object may become dirty. Called without locks.
///
/// # Errors
/// [`Error::InputOutput`] if the pager has failed to store all the pages that could make room;
/// [`Error::Interrupted`] if a fatal signal is pending.
pub(super) fn make_room<P: Platform>(object: &Object<'_, P>) -> Result<(), Failure> {
    let (memory, state) = (object.memory, object.state());
    while !state.has_room_for_dirty(memory) {
        interrupt::check(memory.platform())?;
        let stuck = match store_of_file(memory, state) {
            Progress::Some => continue,
            Progress::None => 0,
            Progress::Stuck => 1,
        };
        let stuck = match state.name.name() {
            None => stuck,
            Some(name) => match store_of_others(memory, name.space) {
                None => continue,
                Some(stuck) if stuck == Registry::of(memory).unsaved_files(name.space) => stuck,
                // Others were written in between.
                Some(_) => 0,
            },
        };
        if stuck > 0 && !state.has_room_for_dirty(memory) {
            return Err(Error::InputOutput.into());
        }
    }
    Ok(())
}

/// The result of an attempt to store pages of a file.
enum Progress {
    /// Some were stored, by this call or another.
    Some,
    /// The file has no unsaved pages.
    None,
    /// The pager has failed to store those that it has.
    Stuck,
}

/// Stores pages of files of the number space. Returns the number of those whose pages the pager has
/// failed to store, or `None` if some were stored.
fn store_of_others<P: Platform>(memory: &Memory<P>, space: u64) -> Option<usize> {
    let mut stuck = 0;
    for _ in 0..Registry::of(memory).unsaved_files(space) {
        match next_file(memory, space).map(|file| store_of_file(memory, file.state())) {
            None => break,
            Some(Progress::Some) => return None,
            Some(Progress::None) => {}
            Some(Progress::Stuck) => stuck += 1,
        }
    }
    Some(stuck)
}

/// Stores a batch of the file's pages, or waits for those that another call stores.
fn store_of_file<P: Platform>(memory: &Memory<P>, object: &ObjectState) -> Progress {
    let mut from = 0;
    while let Some((stored, after)) = store_from(memory, object, from, BATCH.into()) {
        if stored > 0 {
            return Progress::Some;
        }
        from = after;
    }
    if wait_for_writes(memory, object) {
        return Progress::Some;
    }
    if object.pages.unsaved.has_any() { Progress::Stuck } else { Progress::None }
}

/// Waits for the writes of a file's pages that have begun. Returns false if there was none.
fn wait_for_writes<P: Platform>(memory: &Memory<P>, object: &ObjectState) -> bool {
    let number = object.pages.alone(memory.platform(), |_, in_flight, _| {
        (in_flight.pages_being_stored() > 0).then(|| in_flight.next_number())
    });
    if let Some(number) = number {
        object.pages.wait_for_writes(memory.platform(), ALL, number);
    }
    number.is_some()
}
