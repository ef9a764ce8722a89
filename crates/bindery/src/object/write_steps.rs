//! A write of an object that stops, before its first byte, wherever it would have to wait, and
//! continues later.
//!
//! ```text
//! | pages that must be read first come in: stops here, goes on here | everything is written |
//! ```
//!
//! A stopped step holds no lock, no record and no request. So, unlike a blocking write, a write
//! that stops for pages that are being stored has no place in the queue of those that wait for
//! them. It checks again afterwards, as a fault does.

use core::cell::{Cell, RefCell};
use core::fmt;
use core::mem;
use core::ptr::NonNull;

use crate::addr::{PAGE_SHIFT, PageRange};
use crate::collections::page_tree::{PageIndex, PageStretch};
use crate::error::{Error, Failure};
use crate::folio::FolioRef;
use crate::interrupt;
use crate::platform::Platform;
use crate::reclaim::Attempts;

use super::Object;
use super::detached_batch::settle_written;
use super::fetch::WriteSource;
use super::polled_wait::{ObjectWait, PolledWait};
use super::read_steps::{PageReady, swap_in_page};
use super::state::pages_of;
use super::transfers::Reads;
use super::wait::{Stop, Wait};

/// The maximum number of pages that one lookup in the page index covers.
const LOOKED_AT: u64 = 512;

/// The maximum number of times that a write looks for pages in swap from its first page on, because
/// reclaim may evict pages while the write waits for others.
const ROUNDS: u8 = 8;

/// A write of an object, and its progress.
pub(crate) struct WriteSteps<'m, P: Platform> {
    object: Object<'m, P>,
    /// The first byte to write, as an offset in the object.
    offset: u64,
    /// The number of bytes to write, without those from an unreadable page on.
    length: usize,
    /// The number of bytes that were written.
    done: usize,
    /// The value of `done` when the source last stopped. Other writers see all that is written from
    /// there on, or nothing.
    before: usize,
    /// Whether the write has ended.
    is_over: bool,
    /// For shared memory: the page from which on pages may still be in swap.
    unprepared: u64,
    /// Whether the write has waited for a page in swap since it last began with its first page.
    has_waited: bool,
    /// The number of times that it has begun there again.
    rounds: u8,
    /// The measures against a lack of memory that were taken so far.
    attempts: Attempts,
    /// The pages that were last waited for are held until they are written, because the first and
    /// the last page may both be needed at the same time.
    kept: [Option<FolioRef<'m, P>>; 2],
}

/// The outcome of one attempt.
enum Attempt {
    /// The bytes are written, up to the end or to the point at which the source has stopped.
    Written,
    /// Fewer bytes were written, for a reason that a blocking write does not wait for either.
    Short,
    /// The write has to wait.
    Wait(Wait),
}

impl<'m, P: Platform> WriteSteps<'m, P> {
    /// A write of these bytes.
    ///
    /// # Errors
    /// As [`Object::write`] for an invalid position.
    pub(crate) fn new(object: &Object<'m, P>, offset: u64, length: usize) -> Result<Self, Error> {
        object.state().allow_access(offset, length)?;
        Ok(Self {
            object: object.clone(),
            offset,
            length,
            done: 0,
            before: 0,
            is_over: false,
            unprepared: offset >> PAGE_SHIFT,
            has_waited: false,
            rounds: 0,
            attempts: Attempts::for_content(object.memory),
            kept: [None, None],
        })
    }

    pub(crate) fn platform(&self) -> &'m P {
        self.object.memory.platform()
    }

    /// The object, unless the call has ended.
    pub(crate) fn rest(&self) -> Option<&Object<'m, P>> {
        (!self.is_over && self.done < self.length).then_some(&self.object)
    }

    /// The number of bytes that were written.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Writes everything, or stops at the first page that requires a wait. `ready` is the end of
    /// the last wait.
    ///
    /// # Errors
    /// As [`Object::write`].
    pub(crate) fn write(
        &mut self,
        ready: Option<PageReady<'m, P>>,
        copy: &mut dyn FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<Option<ObjectWait<'m, P>>, Error> {
        let mut ready = ready;
        if let Some(Err(Failure::Refused(error))) = ready
            && !self.object.state().is_file()
        {
            ready = None;
            if let Err(error) = self.end_before(self.unprepared, error) {
                return self.fail(error).map(|()| None);
            }
        }
        if self.is_over || self.done == self.length {
            return Ok(None);
        }
        // Pages whose answers have arrived need no wait.
        settle_written(self.object.memory);
        let (has_stopped, copy) = (Cell::new(false), RefCell::new(copy));
        let before = self.before;
        let source = |moved: usize, to: NonNull<u8>, length: usize| {
            // Never borrowed twice: `copy` does not call the object.
            let copied = copy.try_borrow_mut();
            let count = copied.map_or(0, |mut copy| copy(before + moved, to, length).min(length));
            has_stopped.set(count < length);
            count
        };
        let (memory, mut attempts) = (self.object.memory, mem::take(&mut self.attempts));
        let tried = attempts.repeat(memory, || self.attempt(ready.take(), &source));
        self.attempts = attempts;
        match tried {
            Ok(Attempt::Wait(wait)) => {
                let wait = PolledWait::of_call(memory, wait);
                return Ok(Some(ObjectWait::new(self.object.clone(), wait, self.unprepared)));
            }
            Ok(Attempt::Written) if has_stopped.get() => self.go_on_from_here(),
            Ok(Attempt::Written | Attempt::Short) => self.end(),
            Err(error) => return self.fail(error).map(|()| None),
        }
        Ok(None)
    }

    /// Writes the rest of the bytes that other writers see as a unit, up to the first wait.
    fn attempt(
        &mut self,
        ready: Option<PageReady<'m, P>>,
        source: &WriteSource<'_>,
    ) -> Result<Attempt, Failure> {
        if let Some(folio) = ready.transpose()?.flatten() {
            self.kept.rotate_right(1);
            self.kept[0] = Some(folio);
        }
        let at = self.offset + self.before as u64;
        let mut moved = self.done - self.before;
        let written = self.prepare(at).and_then(|()| {
            let length = self.length - self.before;
            self.object.try_write(PlacedBytes { at, length }, source, &mut moved)
        });
        self.done = self.before + moved;
        match written {
            Ok(()) => Ok(Attempt::Written),
            Err(Stop::Wait(wait)) => Ok(Attempt::Wait(wait)),
            // Another attempt would write the rest after other writers have had access to the
            // pages. The next call reports the error first.
            Err(Stop::Failed(_)) if moved > 0 => Ok(Attempt::Short),
            Err(Stop::Failed(failure)) => Err(failure),
        }
    }

    /// Swaps in the pages of the write, unless writing is forbidden. After a wait, it looks for pages
    /// that reclaim has evicted in the meantime, up to [`ROUNDS`] times. The write then waits with
    /// the changes held only for pages that are evicted after the last look.
    fn prepare(&mut self, at: u64) -> Result<(), Stop> {
        let (memory, object) = (self.object.memory, self.object.state());
        if object.is_file() || object.pages.swapped() == 0 {
            return Ok(());
        }
        object.seals.forbid_writing()?;
        let length = object.within_seal(at, self.length - self.before)?;
        interrupt::check(memory.platform())?;
        let mut page = self.unprepared;
        let end = pages_of(at + length as u64);
        let prepared = loop {
            if object.pages.swapped() == 0 {
                break Ok(());
            }
            if page >= end {
                if !self.has_waited || self.rounds == ROUNDS {
                    break Ok(());
                }
                (self.has_waited, self.rounds, page) = (false, self.rounds + 1, at >> PAGE_SHIFT);
            }
            let look = |index: &PageIndex| index.run(page, (end - page).min(LOOKED_AT));
            match object.pages.look(memory.platform(), look) {
                PageStretch::Frames(_, count) => page += u64::from(count),
                PageStretch::Empty(count) => page += count,
                PageStretch::Swapped(..) => {
                    if let Err(stop) = swap_in_page(&self.object, page) {
                        break Err(stop);
                    }
                }
            }
        };
        self.unprepared = page;
        self.has_waited |= matches!(prepared, Err(Stop::Wait(_)));
        match prepared {
            Err(Stop::Failed(Failure::Refused(error))) => Ok(self.end_before(page, error)?),
            other => other,
        }
    }

    /// Excludes the bytes from the page on, whose content is lost. A blocking write likewise writes
    /// the pages before it and returns their length.
    ///
    /// # Errors
    /// The error, if nothing is left.
    fn end_before(&mut self, page: u64, error: Error) -> Result<(), Error> {
        let start = page << PAGE_SHIFT;
        let length = start.saturating_sub(self.offset).min(self.length as u64) as usize;
        if length <= self.done {
            return Err(error);
        }
        self.length = length;
        Ok(())
    }

    /// The bytes after those at which the source has stopped form another write.
    fn go_on_from_here(&mut self) {
        self.unprepared = (self.offset + self.done as u64) >> PAGE_SHIFT;
        (self.has_waited, self.rounds) = (false, 0);
        if self.done > self.before {
            self.attempts = Attempts::for_content(self.object.memory);
        }
        self.before = self.done;
        self.kept = [None, None];
    }

    fn end(&mut self) {
        self.is_over = true;
        self.kept = [None, None];
    }

    /// Ends with the error, or with the bytes that were written before it. Linux does the same: its
    /// next call returns the error.
    fn fail(&mut self, error: Error) -> Result<(), Error> {
        self.end();
        if self.done > 0 { Ok(()) } else { Err(error) }
    }
}

/// A range of bytes of an object.
#[derive(Clone, Copy)]
struct PlacedBytes {
    at: u64,
    length: usize,
}

impl<P: Platform> Object<'_, P> {
    /// Writes the rest of the bytes after `done` and advances `done`, up to the first wait. For a
    /// file, the write does not begin while the pager stores some of the pages or a `sync` waits
    /// for its turn.
    fn try_write(
        &self,
        bytes: PlacedBytes,
        source: &WriteSource<'_>,
        done: &mut usize,
    ) -> Result<(), Stop> {
        let PlacedBytes { at, length } = bytes;
        let pages = PageRange { first: at >> PAGE_SHIFT, end: pages_of(at + length as u64) };
        // Reads in flight continue, as during a blocking write.
        let write = || self.write_locked(at, length, source, done);
        self.try_change_pages(pages, Reads::Stay, write)
    }
}

impl<P: Platform> fmt::Debug for WriteSteps<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteSteps")
            .field("offset", &self.offset)
            .field("length", &self.length)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}
