//! Reading and writing an object from outside of mappings (`pread(2)`, `pwrite(2)`).

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::interrupt;
use crate::platform::Platform;
use crate::space::MappingFlags;

use super::awaited::Stop;
use super::fetch::{Wanted, demand, obtain};
use super::in_flight::Reads;
use super::seals::Seals;
use super::state::pages_of;
use super::{MAX_SIZE, Object, ObjectState, pages};
use crate::bytes;

/// No more bytes than this are copied before others may pass the gate.
const PIECE: u64 = 2 << 20;

impl<P: Platform> Object<'_, P> {
    /// Reads from `offset` on, both in bytes, and returns how much there was: less than `into` has
    /// room for only at the object's end. What is not in memory reads as zeroes, and takes no
    /// memory; of a file, it is brought in. May sleep. `into` is the caller's own memory, not that
    /// of a program.
    ///
    /// # Errors
    /// [`Error::Invalid`] where offset or end do not fit in 63 bits, as in `pread(2)`; for a file,
    /// what the pager says of the first page, and [`Error::OutOfMemory`]; [`Error::Interrupted`] where
    /// a fatal signal waits before anything was read.
    ///
    /// Complexity: in the bytes, and the height of the index for each run of pages.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Error> {
        check_position(offset, into.len())?;
        self.memory.retry(|| self.read_pieces(offset, into))
    }

    fn read_pieces(&self, offset: u64, into: &mut [u8]) -> Result<usize, Error> {
        let mut done = 0;
        while done < into.len() {
            match self.read_piece(offset + done as u64, &mut into[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                // As Linux: what was read counts, and whoever asks again is told.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Reads what stands in one run of pages; 0 at or behind the end.
    fn read_piece(&self, at: u64, into: &mut [u8]) -> Result<usize, Error> {
        interrupt::check(&self.memory.platform)?;
        let mut _kept = None;
        loop {
            match self.read_present(at, into) {
                Ok(count) => return Ok(count),
                Err(Stop::Error(error)) => return Err(error),
                Err(Stop::Await(awaited)) => _kept = awaited.wait(self)?,
            }
        }
    }

    /// As [`Object::read_piece`], if it is in memory.
    fn read_present(&self, at: u64, into: &mut [u8]) -> Result<usize, Stop> {
        let (memory, object) = (self.memory, self.state());
        let platform = &memory.platform;
        object.gate.together(platform, || {
            let left = object.size().saturating_sub(at).min(into.len() as u64).min(PIECE);
            let into = &mut into[..left as usize];
            if into.is_empty() {
                return Ok(0);
            }
            let (page, inside) = (at >> PAGE_SHIFT, at % PAGE_SIZE);
            let wanted = pages_of(inside + left);
            if object.is_file() {
                let orders = object.orders(memory, MappingFlags::empty());
                let one = Wanted::one(orders, object.size_in_pages());
                obtain(memory, object, page, &Wanted { ahead: wanted, ..one })?;
            }
            let (frame, count) = pages::run_at(memory, object, page, wanted);
            let length = (count * PAGE_SIZE - inside).min(left) as usize;
            let into = &mut into[..length];
            match frame {
                Some(frame) => bytes::read(platform, frame, inside as usize, into),
                None => into.fill(0),
            }
            Ok(length)
        })
    }

    /// Writes at `offset`, in bytes, and returns how much was written. The object grows where that
    /// reaches over its end. May sleep. `from` is the caller's own memory, not that of a program.
    ///
    /// Less is written than asked for where something is in the way of the rest: no memory, a fatal
    /// signal, the pager, or [`Seals::GROW`], which lets through what fits into the object, in whole pages from
    /// the first page boundary on.
    ///
    /// # Errors
    /// Where nothing was written: [`Error::Invalid`] where offset or end do not fit in 63 bits, as
    /// in `pwrite(2)`; [`Error::SealForbids`]; [`Error::OutOfMemory`]; [`Error::Overcommitted`] and
    /// [`Error::NoSpace`] where no more may be promised, where its [`crate::Quota`] is used up, or
    /// where no more frames are free than are kept for faults ([`Memory::set_fault_reserve`]); for a
    /// file, what the pager says; [`Error::Interrupted`] where a fatal signal waits.
    ///
    /// Complexity: in the bytes, and the height of the index for each run of pages.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<usize, Error> {
        check_position(offset, from.len())?;
        if from.is_empty() {
            return Ok(0);
        }
        // Where it fails, nothing was written.
        self.memory.retry(|| self.write_once(offset, from))
    }

    fn write_once(&self, offset: u64, from: &[u8]) -> Result<usize, Error> {
        let range = (offset >> PAGE_SHIFT, pages_of(offset + from.len() as u64));
        let mut done = 0;
        // What is fetched by others meanwhile is as good as before: where we write, the index has a page.
        let written =
            self.change_pages(range, Reads::Stay, || self.write_locked(offset, from, &mut done));
        match written {
            Err(error) if done == 0 => Err(error),
            _ => Ok(done),
        }
    }

    /// Writes what is not `done`, and counts that on. The changes are held, and given back only while
    /// nothing is written yet: what the pager has of the first and the last page is fetched before the
    /// first byte is written, and all pages between are overwritten. So other writers see all of a
    /// write or nothing.
    fn write_locked(&self, offset: u64, from: &[u8], done: &mut usize) -> Result<(), Stop> {
        let (memory, object) = (self.memory, self.state());
        object.seals.forbid_writing()?;
        let from = within_seal(object, offset, from)?;
        let end = offset + from.len() as u64;
        for page in [offset >> PAGE_SHIFT, (end - 1) >> PAGE_SHIFT] {
            demand(memory, object, page, &self.wanted_to_write(offset, from))?;
        }
        let grows = end > object.size();
        if grows {
            object.before_growth(memory, end)?;
        }
        let written = self.write_pieces(offset, from, done);
        if grows {
            object.after_growth(memory, end);
        }
        written
    }

    fn write_pieces(&self, offset: u64, from: &[u8], done: &mut usize) -> Result<(), Stop> {
        while *done < from.len() {
            interrupt::check(&self.memory.platform)?;
            *done += self.write_piece(offset + *done as u64, &from[*done..])?;
        }
        Ok(())
    }

    /// How pages come that `from` is to be written to.
    fn wanted_to_write<'a>(&self, at: u64, from: &'a [u8]) -> Wanted<'a> {
        let object = self.state();
        let orders = object.orders(self.memory, MappingFlags::empty());
        let end = object.size_in_pages().max(pages_of(at + from.len() as u64));
        let reserve = self.memory.fault_reserve();
        Wanted { bytes: (at, from), reserve, ..Wanted::one(orders, end) }
    }

    /// Writes what goes into one run of pages, at least one byte.
    fn write_piece(&self, at: u64, from: &[u8]) -> Result<usize, Stop> {
        let (memory, object) = (self.memory, self.state());
        object.gate.together(&memory.platform, || {
            let left = (from.len() as u64).min(PIECE);
            let (page, inside) = (at >> PAGE_SHIFT, at % PAGE_SIZE);
            let wanted = pages_of(inside + left);
            let first = obtain(memory, object, page, &self.wanted_to_write(at, from))?;
            let (_, count) = pages::run_at(memory, object, page, wanted);
            pages::mark_dirty(memory, object, page, count)?;
            let length = (count * PAGE_SIZE - inside).min(left) as usize;
            bytes::write(&memory.platform, first, inside as usize, &from[..length]);
            let behind = at + length as u64;
            if behind > object.size() {
                object.set_size(behind);
            }
            Ok(length)
        })
    }
}

impl ObjectState {
    /// Makes sure that the object can have `bytes` bytes, more than it has. The changes are held;
    /// the size is set afterwards, and [`ObjectState::after_growth`] called.
    pub(super) fn before_growth<P: Platform>(
        &self,
        memory: &Memory<P>,
        bytes: u64,
    ) -> Result<(), Error> {
        self.promise_size(memory, bytes)?;
        if let Some((pager, file)) = self.file() {
            pager.resize(file, bytes)?;
            // What a program wrote behind the end of the last page was never part of the file, as
            // in Linux's file systems. In shared memory it becomes so: Linux 6.18 leaves it there.
            let size = self.size();
            self.gate.together(&memory.platform, || {
                pages::zero_part(memory, self, size, size.next_multiple_of(PAGE_SIZE));
            });
        }
        Ok(())
    }

    /// The object did not grow as far as it might have: takes back what was made sure of.
    pub(super) fn after_growth<P: Platform>(&self, memory: &Memory<P>, expected: u64) {
        let size = self.size();
        if size == expected {
            return;
        }
        // Less than before can always be promised.
        let _ = self.promise_size(memory, size);
        if let Some((pager, file)) = self.file() {
            // If it fails, the storage has zeroes behind the end until the next change.
            let _ = pager.resize(file, size);
        }
    }
}

/// What of `from` may be written at `offset` before [`Seals::GROW`]. Linux writes page by page and
/// stops at the first piece that would reach over the end.
fn within_seal<'a>(object: &ObjectState, offset: u64, from: &'a [u8]) -> Result<&'a [u8], Error> {
    let size = object.size();
    if !object.seals.get().contains(Seals::GROW) || offset + from.len() as u64 <= size {
        return Ok(from);
    }
    let end = size - size % PAGE_SIZE;
    match end.checked_sub(offset).and_then(|length| from.get(..length as usize)) {
        Some(part) if !part.is_empty() => Ok(part),
        _ => Err(Error::SealForbids),
    }
}

fn check_position(offset: u64, length: usize) -> Result<(), Error> {
    let end = offset.checked_add(length as u64);
    if end.is_none_or(|end| end > MAX_SIZE) { Err(Error::Invalid) } else { Ok(()) }
}
