//! Writes through mappings: before a fault makes pages of a file writable, the pager consents
//! ([`crate::Pager::make_writable`], Linux: `page_mkwrite`).
//!
//! The pager is asked with the invalidate lock held for reading, and the pages are marked dirty
//! before the lock is released. So each page for which the pager has reserved storage is stored, or
//! the pager hears of its end: by a store, a truncation or a hole.
//!
//! A truncation or a hole tells the pager before it takes the invalidate lock for writing, because
//! the pager may sleep. Without further rules, this could happen:
//! 1. CPU A punches a hole: the pager frees the block of page 3.
//! 2. CPU B writes page 3: the pager reserves a block, and page 3 becomes dirty.
//! 3. CPU A drops page 3, and the reservation stays for ever.
//!
//! Therefore CPU A lists its cut first ([`super::in_flight`]) and waits once for the faults that
//! hold the invalidate lock and may not have seen it ([`wait_for_faults`]). CPU B finds the cut,
//! and waits for its end before it asks.

use crate::Memory;
use crate::addr::PageRange;
use crate::collections::page_tree::PageIndex;
use crate::error::Failure;
use crate::interrupt;
use crate::platform::Platform;

use super::pager::{Preparation, WriteAccess};
use super::pages::{mark_dirty, may_dirty};
use super::wait::{Stop, Wait};
use super::{Object, ObjectState};

/// Marks pages as dirty that an entry is about to make writable, if the pager of a file consents.
/// Called as [`mark_dirty`], by callers that can wait.
///
/// # Errors
/// As [`may_dirty`] and [`mark_dirty`]; a wait for a cut of the pages, or for the pager; the
/// pager's refusal. No page is marked then.
#[inline]
pub(crate) fn begin<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
) -> Result<(), Stop> {
    if object.notices_writes() {
        may_dirty(memory, object, pages)?;
        ask(memory, object, pages)?;
    }
    Ok(mark_dirty(memory, object, pages.first, pages.end - pages.first)?)
}

/// Asks the pager whether the pages may become writable. The invalidate lock is held.
fn ask<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
) -> Result<(), Stop> {
    // Before the question: what the pager has reserved is not lost in a wait.
    if let Some(ticket) = object.pages.being_stored_or_cut(memory.platform(), pages) {
        return Err(Wait::Pager(ticket).into());
    }
    let Some((pager, file)) = object.file() else { return Ok(()) };
    match pager.make_writable(file, pages.first, pages.end - pages.first) {
        Ok(WriteAccess::Granted) => Ok(()),
        Ok(WriteAccess::Later) => Err(Wait::WriteAccess(pages).into()),
        Err(error) => Err(Failure::from(error).into()),
    }
}

/// Lets the pager prepare for writes to the pages. Called without locks.
///
/// # Errors
/// The pager's refusal; [`crate::Error::Interrupted`] if a fatal signal is pending.
#[cold]
pub(super) fn prepare<P: Platform>(
    object: &Object<'_, P>,
    pages: PageRange,
) -> Result<(), Failure> {
    interrupt::check(object.memory.platform())?;
    let Some((pager, file)) = object.state().file() else { return Ok(()) };
    pager.prepare_write(file, pages.first, pages.end - pages.first)?;
    Ok(())
}

/// As [`prepare`], for a task, which must not sleep.
///
/// # Errors
/// The pager's refusal.
pub(super) fn begin_preparation<P: Platform>(
    object: &Object<'_, P>,
    pages: PageRange,
) -> Result<Preparation, Failure> {
    let Some((pager, file)) = object.state().file() else { return Ok(Preparation::Complete) };
    Ok(pager.begin_prepare_write(file, pages.first, pages.end - pages.first)?)
}

impl<P: Platform> Memory<P> {
    /// Wakes the tasks that wait for a pager to prepare for writes
    /// ([`Pager::begin_prepare_write`](crate::Pager::begin_prepare_write)): each asks its pager again.
    ///
    /// Context: any. Complexity: constant, and one [`Platform::unpark`] if a task waits.
    pub fn wake_prepared_writers(&self) {
        self.answers.completions.note(self.platform());
    }
}

/// Waits for the faults that may have asked the pager before the caller's cut was in the list.
/// Faults that begin later find the cut. Called without the invalidate lock, before the pager
/// learns of the cut.
pub(super) fn wait_for_faults<P: Platform>(memory: &Memory<P>, object: &ObjectState) {
    object.invalidate_lock.with_write(memory.platform(), |_| {});
}

/// Marks `count` pages from `page` on as possibly written without the page tables, by a device that
/// had pinned them. Skips pages that the object has since dropped. May sleep; called without locks.
pub(crate) fn end_pinned<P: Platform>(object: &Object<'_, P>, page: u64, count: u64) {
    let (memory, state) = (object.memory, object.state());
    let pages = PageRange::from_count(page, count);
    let mut asks = true;
    loop {
        let marked = state.invalidate_lock.with_read(memory.platform(), |_| {
            if asks {
                ask_for_clean(memory, state, pages)?;
            }
            Ok(mark_dirty(memory, state, page, count)?)
        });
        match marked {
            Ok(()) => return,
            // The device has already written: if the pager has no room, the store will fail.
            Err(Stop::Wait(wait)) => asks &= wait.wait(memory, Some(object)).is_ok(),
            Err(Stop::Failed(_)) => asks = false,
        }
    }
}

/// Asks the pager for the clean pages among those that the object still has. Dirty pages have the
/// pager's consent. The invalidate lock is held.
fn ask_for_clean<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
) -> Result<(), Stop> {
    let mut from = pages.first;
    let next =
        |from| object.pages.look(memory.platform(), |index| clean_run(index, from, pages.end));
    while let Some(clean) = next(from) {
        ask(memory, object, clean)?;
        from = clean.end;
    }
    Ok(())
}

/// The first run of clean pages in memory from `from` to `end`.
fn clean_run(index: &PageIndex, from: u64, end: u64) -> Option<PageRange> {
    let mut from = from;
    loop {
        let run = index.next_run(from, end)?;
        let present = PageRange::from_count(run.page, run.count.into());
        let dirty = index.next_dirty(present.first, present.end);
        let Some((dirty, _)) = dirty else { return Some(present) };
        if dirty.page > present.first {
            return Some(PageRange { end: dirty.page, ..present });
        }
        from = dirty.page + u64::from(dirty.count);
    }
}
