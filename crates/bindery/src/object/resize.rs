//! Size, holes and preallocation (`ftruncate(2)`, `fallocate(2)`).

use crate::Memory;
use crate::addr::{Orders, PAGE_SHIFT, PAGE_SIZE, PageRange};
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;
use crate::vma::MappingFlags;

use super::detached_batch::settle_written;
use super::dropping::{DropPiece, drop_pages};
use super::fetch::{FetchPurpose, Wanted, demand, obtain};
use super::invalidate::PagesMayGo;
use super::mapped_write::wait_for_faults;
use super::mappings::{self, MappingCopies};
use super::pages::mark_run_dirty;
use super::polled_wait::{ObjectWait, PolledWait};
use super::seals::Seals;
use super::state::{ObjectState, pages_of};
use super::swap_in::{Swapped, swap_in};
use super::transfers::Reads;
use super::wait::Stop;
use super::{MAX_SIZE, Object, pages};
use crate::collections::page_tree::{IndexRun, PAGE_LIMIT};

/// Whether an object may grow when pages are allocated beyond its end.
///
/// ```
/// use bindery::{Error, Growth, Object, Platform};
///
/// /// `fallocate(2)` with `FALLOC_FL_KEEP_SIZE`.
/// fn reserve<P: Platform>(object: &Object<'_, P>, bytes: u64) -> Result<(), Error> {
///     object.allocate(0, bytes, Growth::Forbidden)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Growth {
    /// The object grows to contain the pages.
    #[default]
    Allowed,
    /// The object keeps its size; the pages stay beyond its end until it grows
    /// (`FALLOC_FL_KEEP_SIZE`).
    Forbidden,
}

impl<'m, P: Platform> Object<'m, P> {
    /// Sets the object's size to `bytes` (Linux: `ftruncate(2)`). Pages beyond a smaller size are
    /// unmapped everywhere, together with the copies that private mappings have made of them, and
    /// freed; later accesses to them are refused ([`crate::FaultError::Bus`]). A larger size adds
    /// zeroes.
    ///
    /// Context: may sleep. Complexity: linear in the removed runs, the mappings of the object, and
    /// their mapped pages.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above 2^63 - 1; [`Error::SealForbids`]; [`Error::Overcommitted`] if the
    /// whole size counts as committed and exceeds the limit; for a file, the pager's error. An
    /// error changes nothing.
    pub fn set_size(&self, bytes: u64) -> Result<(), Error> {
        if bytes > MAX_SIZE {
            return Err(Error::TooLarge);
        }
        self.memory.outermost(|| self.set_size_once(bytes))
    }

    fn set_size_once(&self, bytes: u64) -> Result<(), Failure> {
        let (memory, object) = (self.memory, self.state());
        // Starts at the page that the new end cuts in two, if any.
        let beyond = PageRange { first: bytes >> PAGE_SHIFT, end: PAGE_LIMIT };
        self.change_pages(beyond, Reads::Canceled, || {
            let old = object.size();
            // The size of secret memory is set once, by the program that created it.
            if old > 0 || object.frames().is_some() {
                object.refuse_hidden(Error::Invalid)?;
            }
            if bytes > old {
                object.seals.forbid(Seals::GROW)?;
                object.before_growth(memory, bytes)?;
                object.set_size(bytes);
                return Ok(());
            }
            if bytes < old {
                object.seals.forbid(Seals::SHRINK)?;
            }
            bring_in_cut(self, [bytes, bytes])?;
            self.cut(old, bytes)?;
            Ok(())
        })
    }

    /// Drops the content after `bytes`, which is at most the size. The changes are held, and the
    /// pager is working on none of the pages.
    fn cut(&self, old: u64, bytes: u64) -> Result<(), Failure> {
        if let Some((pager, file)) = self.state().file().filter(|_| bytes != old) {
            wait_for_faults(self.memory, self.state());
            // Called before the invalidate lock is acquired. The pager no longer reads or stores
            // bytes beyond the new end.
            pager.resize(file, bytes)?;
        }
        self.cut_pages(bytes);
        Ok(())
    }

    /// As [`Object::cut`], after the pager has adopted the size.
    pub(super) fn cut_pages(&self, bytes: u64) {
        let (memory, object) = (self.memory, self.state());
        object.invalidate_lock.with_write(memory.platform(), |proof| {
            // A smaller size can always be committed.
            let _ = object.promise_size(memory, bytes);
            object.set_size(bytes);
            let first = pages_of(bytes);
            let beyond = PageRange { first, end: PAGE_LIMIT };
            mappings::unmap(memory, object, beyond, MappingCopies::Dropped, proof);
            drop_pages(memory, object, beyond, &mut DropPiece::first_of(memory), proof);
            pages::zero_part(memory, object, bytes, first << PAGE_SHIFT, proof.rest_stays());
        });
    }

    /// Makes `length` bytes from `offset` read as zeroes, and frees the whole pages in the range.
    /// The size does not change (Linux: `fallocate(2)` with `FALLOC_FL_PUNCH_HOLE`). Shared
    /// mappings see zeroes; copies that private mappings have made stay.
    ///
    /// Context: may sleep. Complexity: as [`Object::set_size`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a length of zero, or if offset or length do not fit in 63 bits;
    /// [`Error::TooLarge`] if their sum does not; [`Error::SealForbids`]; for a file, the pager's
    /// error, including [`Error::NotSupported`], and [`Error::OutOfMemory`]; [`Error::NoContent`]
    /// for frames that the core does not own. An error changes nothing.
    pub fn punch_hole(&self, offset: u64, length: u64) -> Result<(), Error> {
        let end = end_of(offset, length)?;
        self.memory.outermost(|| self.punch_hole_once(offset, end))
    }

    fn punch_hole_once(&self, offset: u64, end: u64) -> Result<(), Failure> {
        refuse_hole(self.state())?;
        let range = PageRange { first: offset >> PAGE_SHIFT, end: pages_of(end) };
        self.change_pages(range, Reads::Canceled, || self.punch_unstored(offset, end))
    }

    /// As [`Object::punch_hole`], for a caller that must not wait. Returns the event to wait for
    /// before the next attempt: until then nothing has changed.
    ///
    /// # Errors
    /// As [`Object::punch_hole`].
    pub(crate) fn try_punch_hole(
        &self,
        offset: u64,
        length: u64,
    ) -> Result<Option<ObjectWait<'m, P>>, Error> {
        let (memory, end) = (self.memory, end_of(offset, length)?);
        let range = PageRange { first: offset >> PAGE_SHIFT, end: pages_of(end) };
        // Pages whose answers have arrived need no wait.
        settle_written(memory);
        let wait = memory.outermost(|| {
            refuse_hole(self.state())?;
            let punch = || self.punch_unstored(offset, end);
            match self.try_change_pages(range, Reads::Canceled, punch) {
                Ok(()) => Ok(None),
                Err(Stop::Wait(wait)) => Ok(Some(wait)),
                Err(Stop::Failed(failure)) => Err(failure),
            }
        })?;
        Ok(wait.map(|wait| {
            ObjectWait::new(self.clone(), PolledWait::of_call(memory, wait), range.first)
        }))
    }

    /// The changes are held, and the pager is storing none of the pages.
    fn punch_unstored(&self, offset: u64, end: u64) -> Result<(), Stop> {
        let (memory, object) = (self.memory, self.state());
        object.seals.forbid_writing()?;
        if object.is_file() {
            return punch_file(self, offset, end.min(object.size()));
        }
        bring_in_cut(self, [offset, end])?;
        object
            .invalidate_lock
            .with_write(memory.platform(), |proof| self.punch(offset, end, proof));
        Ok(())
    }

    /// Drops the whole pages from `offset` to `end` and zeroes the partial ones.
    fn punch(&self, offset: u64, end: u64, proof: &PagesMayGo) {
        let (memory, object) = (self.memory, self.state());
        let (first, after) = (pages_of(offset), end >> PAGE_SHIFT);
        if first > after {
            // Both ends are in one page.
            pages::zero_part(memory, object, offset, end, proof.rest_stays());
            return;
        }
        if first < after {
            let whole = PageRange { first, end: after };
            mappings::unmap(memory, object, whole, MappingCopies::Kept, proof);
            drop_pages(memory, object, whole, &mut DropPiece::first_of(memory), proof);
        }
        let stay = proof.rest_stays();
        pages::zero_part(memory, object, offset, first << PAGE_SHIFT, stay);
        pages::zero_part(memory, object, after << PAGE_SHIFT, end, stay);
    }

    /// Allocates or swaps in all pages of `length` bytes from `offset` on, so that later writes to
    /// them need no memory, and grows the object to contain them (Linux: `fallocate(2)`). Only for
    /// shared memory.
    ///
    /// Context: may sleep. Complexity: linear in the pages.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::TooLarge`] as [`Object::punch_hole`];
    /// [`Error::NotSupported`] for files; [`Error::NoContent`] also as there;
    /// [`Error::SealForbids`] if the end lies after the object's, regardless of `growth`;
    /// [`Error::Overcommitted`]; [`Error::NoSpace`] and [`Error::OutOfMemory`] as for
    /// [`Object::write`]; [`Error::Interrupted`], checked before each folio (Linux stops for any
    /// signal). An error leaves the content and size unchanged, and also the memory that the object
    /// uses, unless the new pages were already used.
    pub fn allocate(&self, offset: u64, length: u64, growth: Growth) -> Result<(), Error> {
        let end = end_of(offset, length)?;
        let (memory, object) = (self.memory, self.state());
        refuse_frames(object)?;
        if !object.is_shared_memory() || object.is_secret() {
            return Err(Error::NotSupported);
        }
        let allocated = memory.retry_for_content(|| allocate_once(self, offset, end, growth));
        crate::deferred::free_some(memory);
        allocated
    }
}

/// Fails for an object of frames that the core does not own, as `fallocate` of a device does on
/// Linux.
fn refuse_frames(object: &ObjectState) -> Result<(), Error> {
    if object.frames().is_some() { Err(Error::NoContent) } else { Ok(()) }
}

/// Fails for an object that cannot have holes.
fn refuse_hole(object: &ObjectState) -> Result<(), Error> {
    refuse_frames(object)?;
    object.refuse_hidden(Error::NotSupported)
}

/// The end of a range of bytes, if an object can contain the range.
fn end_of(offset: u64, length: u64) -> Result<u64, Error> {
    if length == 0 || length > MAX_SIZE || offset > MAX_SIZE {
        return Err(Error::Invalid);
    }
    let end = offset + length;
    if end > MAX_SIZE { Err(Error::TooLarge) } else { Ok(end) }
}

/// Swaps in pages that are cut in two and will be partly zeroed. The changes are held, so the
/// pages stay; during a wait, the waiting thread holds both of them.
///
/// # Errors
/// The errors of [`swap_in`]. Nothing has changed.
fn bring_in_cut<P: Platform>(handle: &Object<'_, P>, cuts: [u64; 2]) -> Result<(), Stop> {
    let (memory, object) = (handle.memory, handle.state());
    for cut in cuts.into_iter().filter(|cut| !cut.is_multiple_of(PAGE_SIZE)) {
        let page = cut >> PAGE_SHIFT;
        while object.pages.swapped() > 0
            && swap_in(memory, object, page, Orders::PAGE)? != Swapped::No
        {}
    }
    Ok(())
}

/// The changes are held, and the pager is storing none of the pages.
fn punch_file<P: Platform>(handle: &Object<'_, P>, offset: u64, end: u64) -> Result<(), Stop> {
    let (memory, object) = (handle.memory, handle.state());
    let Some((pager, file)) = object.file().filter(|_| offset < end) else { return Ok(()) };
    // At the end of the file, the rest of the last page is already zero.
    let end = if end == object.size() { end.next_multiple_of(PAGE_SIZE) } else { end };
    let cuts = [offset, end].into_iter().filter(|cut| !cut.is_multiple_of(PAGE_SIZE));
    // A page that is partly zeroed must be present, so that the rest of it is saved with it.
    for page in cuts.clone().map(|cut| cut >> PAGE_SHIFT) {
        demand(memory, object, page, &Wanted::one(Orders::default(), object.size_in_pages()))?;
    }
    let (first, after) = (pages_of(offset), end >> PAGE_SHIFT);
    if first < after {
        wait_for_faults(memory, object);
        pager.discard(file, first, after - first).map_err(Failure::from)?;
    }
    object.invalidate_lock.with_write(memory.platform(), |proof| {
        for page in cuts.map(|cut| cut >> PAGE_SHIFT) {
            pages::mark_dirty(memory, object, page, 1)?;
        }
        handle.punch(offset, end, proof);
        Ok(())
    })
}

fn allocate_once<P: Platform>(
    handle: &Object<'_, P>,
    offset: u64,
    end: u64,
    growth: Growth,
) -> Result<(), Failure> {
    let (memory, object) = (handle.memory, handle.state());
    let range = PageRange { first: offset >> PAGE_SHIFT, end: pages_of(end) };
    handle.change_pages(range, Reads::Stay, || {
        let grows = end > object.size();
        if grows {
            object.seals.forbid(Seals::GROW)?;
        }
        let grows = grows && growth == Growth::Allowed;
        if grows {
            object.before_growth(memory, end)?;
        }
        let allocated = allocate_pages(handle, offset >> PAGE_SHIFT, pages_of(end));
        if grows {
            if allocated.is_ok() {
                object.set_size(end);
            }
            object.after_growth(memory, end);
        }
        allocated
    })
}

fn allocate_pages<P: Platform>(handle: &Object<'_, P>, first: u64, end: u64) -> Result<(), Stop> {
    let (memory, object) = (handle.memory, handle.state());
    let orders = object.orders(memory, MappingFlags::empty());
    let limit = end.max(object.size_in_pages());
    let (reserve, purpose) = (memory.fault_reserve(), FetchPurpose::Change);
    let wanted = Wanted { reserve, purpose, ..Wanted::one(orders, limit) };
    if object.quota().is_some_and(|quota| end.saturating_sub(first) > quota.limit()) {
        // Fails early if the range can never fit.
        return Err(Error::NoSpace.into());
    }
    let (mut page, mut piece) = (first, DropPiece::first_of(memory));
    let mut is_own = false;
    while page < end {
        // The changes are held, so no page is dropped during the loop.
        let (found, count) = pages::run_at(memory, object, page, end - page);
        if let Some(frame) = found {
            let run = IndexRun { page, frame, count: u32::try_from(count).unwrap_or(u32::MAX) };
            if !core::mem::take(&mut is_own) && !object.is_file() {
                // This page was reserved before. Marked dirty, it stays if this call fails.
                // Pages of shared memory are never being stored.
                let _ = mark_run_dirty(memory, object, run);
            }
            page += count;
            piece.add(run.count);
            continue;
        }
        let obtained = interrupt::check(memory.platform())
            .map_err(Stop::from)
            .and_then(|()| obtain(memory, object, page, &wanted));
        if let Err(stop) = obtained {
            object.invalidate_lock.with_write(memory.platform(), |proof| {
                let pages = PageRange { first, end: page };
                pages::drop_untouched(memory, object, pages, proof);
            });
            return Err(stop);
        }
        is_own = true;
    }
    Ok(())
}

impl ObjectState {
    /// Makes sure that the object can grow to `bytes` bytes. The changes are held. The caller sets
    /// the size afterwards and calls [`ObjectState::after_growth`].
    pub(super) fn before_growth<P: Platform>(
        &self,
        memory: &Memory<P>,
        bytes: u64,
    ) -> Result<(), Failure> {
        self.promise_size(memory, bytes)?;
        if let Some((pager, file)) = self.file() {
            pager.resize(file, bytes)?;
            // Bytes that a program wrote after the end of the last page were never part of the
            // file, as in Linux's file systems. In shared memory these bytes become part of the
            // object, as in Linux 6.18.
            let size = self.size();
            self.invalidate_lock.with_read(memory.platform(), |stay| {
                pages::zero_part(memory, self, size, size.next_multiple_of(PAGE_SIZE), stay);
            });
        }
        Ok(())
    }

    /// Releases the unused part of the growth that [`ObjectState::before_growth`] prepared, if the
    /// object grew less than `expected`: for a file, also the pages beyond its end, which no
    /// mapping shows. The changes are held.
    // Out of line: most writes do not extend the object, and the others reach the expected size.
    #[inline(never)]
    pub(super) fn after_growth<P: Platform>(&self, memory: &Memory<P>, expected: u64) {
        let size = self.size();
        if size == expected {
            return;
        }
        // A size smaller than before can always be committed.
        let _ = self.promise_size(memory, size);
        if let Some((pager, file)) = self.file() {
            // The write has marked them dirty, and no store would ever reach them.
            let beyond = PageRange { first: self.size_in_pages(), end: PAGE_LIMIT };
            self.invalidate_lock.with_write(memory.platform(), |proof| {
                drop_pages(memory, self, beyond, &mut DropPiece::first_of(memory), proof);
            });
            // If the resize fails, the storage has zeroes after the end until the next change.
            let _ = pager.resize(file, size);
        }
    }
}
