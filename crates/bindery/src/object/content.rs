//! Reads and writes of an object from outside its mappings (`pread(2)`, `pwrite(2)`): bytes are
//! copied in place between the object's pages and the caller's source or target.
//!
//! ```text
//! object    | page | page | page | page | page |
//!              '---- run ----'   '- run -'          consecutive frames: one step of the caller
//!           '--- 64 KiB ---' '--- 64 KiB ---'       one span of the invalidate lock
//! ```
//!
//! A step may stop early when a kernel that copies directly to a program's memory finds a page
//! missing. The kernel must release everything before it faults that page in.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::{Cell, RefCell};
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, PageRange};
use crate::bytes;
use crate::error::{Error, Failure, NoMemory};
use crate::interrupt;
use crate::memory::written_by_call;
use crate::platform::Platform;
use crate::vma::MappingFlags;

use super::fetch::{FetchPurpose, Moved, Wanted, WriteSource, Writing, demand, obtain};
use super::read_ahead::next_window;
#[cfg(doc)]
use super::seals::Seals;
use super::state::pages_of;
use super::transfers::Reads;
use super::wait::{Stop, Wait};
use super::{MAX_SIZE, Object, ObjectState, pages};
use crate::collections::page_tree::{IndexRun, PageStretch};

/// At most this many bytes are copied before other threads may acquire the invalidate lock; a new
/// folio is always filled completely.
const PIECE: usize = 64 << 10;

/// At most this many bytes are requested from the pager at a time.
const AHEAD: usize = 2 << 20;

/// The number of bytes still to be read.
#[derive(Clone, Copy)]
struct BytesLeft {
    /// In this piece.
    now: usize,
    /// In the whole call.
    all: usize,
}

impl<P: Platform> Object<'_, P> {
    /// Reads from `offset`, in bytes, and returns the number of bytes read: less than the size of
    /// `into` only at the object's end. Pages of shared memory that do not exist read as zeroes and
    /// allocate no memory; file pages that are not in memory are loaded. `into` is the caller's own
    /// memory; for a program's memory see [`Object::read_with`].
    ///
    /// Context: may sleep. Complexity: linear in the bytes, plus the height of the page index for
    /// each run of pages.
    ///
    /// # Errors
    /// [`Error::Invalid`] if offset or end do not fit in 63 bits, as in `pread(2)`; for a file, the
    /// pager's error for the first page, and [`Error::OutOfMemory`]; [`Error::Interrupted`] if a
    /// fatal signal is pending before anything was read.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Error> {
        let platform = self.memory.platform();
        self.read_with(offset, into.len(), |done, from, length| {
            // SAFETY: the bytes belong to the object, and no thread has exclusive access to them.
            unsafe { platform.read_bytes(from, &mut into[done..done + length]) };
            length
        })
    }

    /// Like [`Object::read`] of `length` bytes, but `copy` reads the bytes in place. `copy`
    /// receives the number of bytes copied before, an address and a length, and returns how many of
    /// these bytes it copied. A short count ends the read. A kernel can thus read directly into a
    /// program's memory (Linux: `copy_page_to_iter`):
    ///
    /// ```text
    /// loop  read_with(offset + done, .., copy that stops at the first fault)  -> done grows
    ///       nothing stopped: the end                      no lock is held here
    ///       fault(where it stopped, Access::Write)        refused: a short count, or EFAULT
    /// ```
    ///
    /// Until `copy` returns, it may read the bytes, which programs may be writing, by instructions
    /// or [`Platform::read_bytes`], never by a reference. Pages that are not in memory are shown as
    /// the zero page. `copy` runs with the object's pages held in place, for at most 64 KiB at a
    /// time; it must not sleep, resolve a fault or call the object. If a read has to start over,
    /// `copy` may be called again for bytes that it has already copied.
    ///
    /// Context: may sleep. Complexity: as [`Object::read`].
    ///
    /// # Errors
    /// As [`Object::read`].
    pub fn read_with(
        &self,
        offset: u64,
        length: usize,
        mut copy: impl FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<usize, Error> {
        self.state().allow_access(offset, length)?;
        self.read_pieces(offset, length, &mut copy)
    }

    fn read_pieces(
        &self,
        offset: u64,
        length: usize,
        copy: &mut dyn FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<usize, Error> {
        let mut done = 0;
        while done < length {
            // The read proceeds in pieces: a retry does not read earlier pieces again.
            match self.memory.retry(|| self.read_piece(offset, done..length, copy)) {
                Ok(Moved { count, stopped }) => {
                    done += count;
                    if stopped || count == 0 {
                        break;
                    }
                }
                // Linux does the same: it returns the bytes read, and the next call returns the
                // error.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Reads a piece; returns 0 at or after the end.
    fn read_piece(
        &self,
        offset: u64,
        part: Range<usize>,
        copy: &mut dyn FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<Moved, Failure> {
        interrupt::check(self.memory.platform())?;
        let mut _kept = None;
        loop {
            let mut done = part.start;
            let read = self.try_piece(offset, part.end, &mut done, copy);
            let count = done - part.start;
            match read {
                Ok(stopped) => return Ok(Moved { count, stopped }),
                // The next call, for the rest, reports the error first.
                Err(stop) if count > 0 => {
                    if let Some(read) = stop.begun_read() {
                        drop(read.finish(self.memory));
                    }
                    return Ok(Moved { count, stopped: false });
                }
                Err(Stop::Failed(failure)) => return Err(failure),
                // A page that was waited for is held until it is read.
                Err(Stop::Wait(wait)) => _kept = wait.wait(self.memory, Some(self))?.or(_kept),
            }
        }
    }

    /// Reads the piece from `done` on, up to the first page that is not in memory, and advances
    /// `done`. Returns whether `copy` has stopped.
    #[inline(always)]
    pub(super) fn try_piece(
        &self,
        offset: u64,
        length: usize,
        done: &mut usize,
        copy: &mut dyn FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<bool, Stop> {
        let object = self.state();
        object.invalidate_lock.with_read(self.memory.platform(), |_| {
            let all = object.size().saturating_sub(offset).min(length as u64) as usize;
            let end = all.min(done.saturating_add(PIECE));
            while *done < end {
                let at = offset + *done as u64;
                let left = BytesLeft { now: end - *done, all: all - *done };
                let copy = |from, length| copy(*done, from, length).min(length);
                let Moved { count, stopped } = self.read_run(at, left, copy)?;
                *done += count;
                if stopped {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    /// Reads the bytes of consecutive frames, at most `left.now`, if the page is in memory. The
    /// invalidate lock is held.
    fn read_run(
        &self,
        at: u64,
        left: BytesLeft,
        copy: impl FnOnce(NonNull<u8>, usize) -> usize,
    ) -> Result<Moved, Stop> {
        let (memory, object) = (self.memory, self.state());
        let (page, inside) = (at >> PAGE_SHIFT, at % PAGE_SIZE);
        let wanted = pages_of(inside + left.now as u64);
        if object.is_file() {
            let orders = object.orders(memory, MappingFlags::empty());
            let one = Wanted::one(orders, object.size_in_pages());
            let ahead = pages_of(inside + left.all.min(AHEAD) as u64);
            let wanted = Wanted { ahead, pattern: self.pattern, ..one };
            obtain(memory, object, page, &wanted)?;
            // The run may cross a readahead mark.
            let run = PageRange::from_count(page, pages_of(inside + left.now as u64));
            if let Some(next) = next_window(object, run, &wanted) {
                return Err(Wait::ReadAhead(next).into());
            }
        }
        let (frame, count) =
            match object.pages.look(memory.platform(), |index| index.run(page, wanted)) {
                PageStretch::Frames(frame, count) => (frame, u64::from(count)),
                PageStretch::Empty(_) => (memory.zero_frame, 1),
                PageStretch::Swapped(..) => {
                    let orders = object.orders(memory, MappingFlags::empty());
                    let one = Wanted::one(orders, object.size_in_pages());
                    (obtain(memory, object, page, &one)?, 1)
                }
            };
        // A page that is read in pieces counts as read once.
        let last = page + pages_of(inside + left.now as u64).min(count) - 1;
        let before = object.last_read.load(Ordering::Relaxed);
        if before != last {
            object.last_read.store(last, Ordering::Relaxed);
        }
        if before != page
            && let Some(folio) = memory.frames.folio_of(frame)
        {
            memory.frames.folio(folio).reclaim_state().note_read(page == before.wrapping_add(1));
        }
        let length = ((count * PAGE_SIZE - inside) as usize).min(left.now);
        // SAFETY: 1. `inside` is in the run of the object's frames, which belongs to one folio.
        let from = unsafe { bytes::place(memory.platform(), frame, inside as usize) };
        let count = copy(from, length);
        Ok(Moved { count, stopped: count < length })
    }

    /// Writes at `offset`, in bytes, and returns the number of bytes written. The object grows if
    /// the write extends past its end. `from` is the caller's own memory; for a program's memory
    /// see [`Object::write_with`].
    ///
    /// Writes fewer bytes than requested if a lack of memory, a fatal signal, the pager or
    /// [`Seals::GROW`] prevents the rest. The seal allows the part that fits into the object, in
    /// whole pages from the first page boundary on.
    ///
    /// Context: may sleep. Complexity: linear in the bytes, plus the height of the index for each
    /// run of pages.
    ///
    /// # Errors
    /// If nothing was written: [`Error::Invalid`] if offset or end do not fit in 63 bits, as in
    /// `pwrite(2)`; [`Error::SealForbids`]; [`Error::OutOfMemory`], after reclaim, if the only free
    /// frames are those reserved for faults ([`crate::Memory::set_fault_reserve`]);
    /// [`Error::Overcommitted`] and [`Error::NoSpace`] if no more may be committed, or if the
    /// object's [`crate::Quota`] is used up; for a file, the pager's error; [`Error::Interrupted`]
    /// if a fatal signal is pending.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<usize, Error> {
        let platform = self.memory.platform();
        self.write_with(offset, from.len(), |done, to, length| {
            // SAFETY: the bytes are the object's, to which no reference exists.
            unsafe { platform.write_bytes(to, &from[done..done + length]) };
            length
        })
    }

    /// Like [`Object::write`] of `length` bytes, but `copy` writes the bytes in place. `copy`
    /// receives the number of bytes copied before, an address and a length, and returns how many of
    /// these bytes it copied. A short count ends the write. A kernel can thus write directly from a
    /// program's memory (Linux: `copy_folio_from_iter_atomic`), as [`Object::read_with`] shows.
    ///
    /// Until `copy` returns, it may write the bytes, which programs may be using, by instructions
    /// or [`Platform::write_bytes`], never by a reference. `copy` runs with the object's pages held
    /// in place and other writers excluded, for at most 64 KiB or one new folio at a time; it must
    /// not sleep, resolve a fault or call the object. If another thread loads the page at the same
    /// time, `copy` may be called again for bytes that it has already copied.
    ///
    /// Other writers see all of what one call writes, or none of it. A caller that continues with
    /// another call after a fault, and needs atomic writes, holds a lock of its own (Linux: the
    /// inode lock).
    ///
    /// Context: may sleep. Complexity: as [`Object::write`].
    ///
    /// # Errors
    /// As [`Object::write`]. If `copy` stops at once, returns 0.
    pub fn write_with(
        &self,
        offset: u64,
        length: usize,
        copy: impl FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<usize, Error> {
        self.state().allow_access(offset, length)?;
        if length == 0 {
            return Ok(0);
        }
        let copy = RefCell::new(copy);
        let source = |done: usize, to: NonNull<u8>, length: usize| {
            // Never borrowed twice: `copy` does not call the object.
            copy.try_borrow_mut().map_or(0, |mut copy| copy(done, to, length).min(length))
        };
        // If the call fails, nothing was written.
        self.memory.retry_for_content(|| self.write_once(offset, length, &source))
    }

    fn write_once(
        &self,
        offset: u64,
        length: usize,
        source: &WriteSource<'_>,
    ) -> Result<usize, Failure> {
        let end = pages_of(offset + length as u64);
        let range = PageRange { first: offset >> PAGE_SHIFT, end };
        let mut done = 0;
        // Reads in flight need no cancellation: they fetch content that is still valid, and every
        // page that this call writes is in the index.
        let written = self.change_pages(range, Reads::Stay, || {
            self.write_locked(offset, length, source, &mut done)
        });
        match written {
            Err(error) if done == 0 => Err(error),
            _ => Ok(done),
        }
    }

    /// Writes the rest after `done` and advances `done`. The changes are held. They are released
    /// only before the first byte is written, because the pager's content of the first and the last
    /// page is fetched first, and all pages between these two are overwritten. So other writers see
    /// all of a write or nothing. (The exception is a source that stops in the middle of a page
    /// between them: the rest of that page then comes from the pager.)
    pub(super) fn write_locked(
        &self,
        offset: u64,
        length: usize,
        source: &WriteSource<'_>,
        done: &mut usize,
    ) -> Result<(), Stop> {
        let (memory, object) = (self.memory, self.state());
        object.seals.forbid_writing()?;
        let length = object.within_seal(offset, length)?;
        let end = offset + length as u64;
        let filled = Cell::new(None);
        let writing = Writing { at: offset, end, done: 0, source, filled: &filled };
        if object.is_file() {
            if *done == 0 {
                // For the whole call, of which other writers see all or nothing.
                let pages = PageRange { first: offset >> PAGE_SHIFT, end: pages_of(end) };
                pages::may_dirty(memory, object, pages)?;
            }
            for page in [offset >> PAGE_SHIFT, (end - 1) >> PAGE_SHIFT] {
                demand(memory, object, page, &self.wanted_to_write(writing))?;
            }
        }
        let grows = end > object.size();
        if grows {
            object.before_growth(memory, end)?;
        }
        let written = self.write_pieces(writing, done);
        if grows {
            object.after_growth(memory, end);
        }
        written
    }

    fn write_pieces(&self, writing: Writing<'_>, done: &mut usize) -> Result<(), Stop> {
        let (platform, object) = (self.memory.platform(), self.state());
        let Writing { at: start, end, .. } = writing;
        let mut stopped = false;
        while start + (*done as u64) < end && !stopped {
            interrupt::check(platform)?;
            let before = *done;
            object.invalidate_lock.with_read(platform, |_| -> Result<(), Stop> {
                loop {
                    let at = start + *done as u64;
                    let most = PIECE - (*done - before);
                    let moved = self.write_run(Writing { at, done: *done, ..writing }, most)?;
                    *done += moved.count;
                    stopped = moved.stopped;
                    if stopped || *done - before >= PIECE || start + *done as u64 >= end {
                        return Ok(());
                    }
                }
            })?;
        }
        Ok(())
    }

    /// How to load pages that will be written.
    fn wanted_to_write<'a>(&self, writing: Writing<'a>) -> Wanted<'a> {
        let object = self.state();
        let orders = object.orders(self.memory, MappingFlags::empty());
        let end = object.size_in_pages().max(pages_of(writing.end));
        let reserve = self.memory.fault_reserve();
        let purpose = FetchPurpose::Change;
        Wanted { writing: Some(writing), reserve, purpose, ..Wanted::one(orders, end) }
    }

    /// Writes to consecutive frames, at most `most` bytes, or to a new folio. The caller holds the
    /// invalidate lock.
    fn write_run(&self, writing: Writing<'_>, most: usize) -> Result<Moved, Stop> {
        let (memory, object) = (self.memory, self.state());
        let Writing { at, end, .. } = writing;
        let left = (end - at).min(most as u64);
        let (page, inside) = (at >> PAGE_SHIFT, at % PAGE_SIZE);
        let wanted = pages_of(inside + left);
        let look = || object.pages.look(memory.platform(), |index| index.run(page, wanted));
        let mut found = look();
        if !matches!(found, PageStretch::Frames(..)) {
            writing.filled.set(None);
            let obtained = obtain(memory, object, page, &self.wanted_to_write(writing));
            if let Some(filled) = writing.filled.take() {
                if filled.count > 0 {
                    let count = filled.count as u64;
                    pages::mark_dirty(memory, object, page, pages_of(count))?;
                    object.grow_to(at, filled.count);
                }
                return Ok(filled);
            }
            obtained?;
            found = look();
        }
        // The invalidate lock keeps present pages in the index.
        let PageStretch::Frames(frame, count) = found else {
            return Err(NoMemory.into());
        };
        pages::mark_run_dirty(memory, object, IndexRun { page, frame, count })?;
        let length = ((u64::from(count) * PAGE_SIZE - inside).min(left)) as usize;
        // SAFETY: 1. `inside` is in the run of the object's frames, which belongs to one folio.
        let to = unsafe { bytes::place(memory.platform(), frame, inside as usize) };
        let count = (writing.source)(writing.done, to, length);
        written_by_call(memory, frame);
        object.grow_to(at, count);
        Ok(Moved { count, stopped: count < length })
    }
}

impl ObjectState {
    /// Whether `length` bytes of the object at `offset` may be read and written from outside
    /// mappings.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the object is hidden, or if the bytes end beyond the maximum size.
    pub(super) fn allow_access(&self, offset: u64, length: usize) -> Result<(), Error> {
        self.refuse_hidden(Error::Invalid)?;
        let end = offset.checked_add(length as u64);
        if end.is_none_or(|end| end > MAX_SIZE) { Err(Error::Invalid) } else { Ok(()) }
    }

    /// Extends the size to the end of `count` bytes that were written at `at`, if any were. The
    /// changes are held.
    fn grow_to(&self, at: u64, count: usize) {
        let end = at + count as u64;
        if end > self.size() && count > 0 {
            self.set_size(end);
        }
    }
}
