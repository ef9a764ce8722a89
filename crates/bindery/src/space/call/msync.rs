//! `msync(2)`.

use bitflags::bitflags;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;

use crate::object::Object;
use crate::vmas::Parts;

use super::steps::Step;
use super::writeback::Writeback;
use crate::space::AddressSpace;
use crate::vma::MappingFlags;

bitflags! {
    /// Flags of [`AddressSpace::msync`].
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{AddressSpace, Error, Platform, SyncFlags};
    ///
    /// /// Saves one page of a mapped file, and waits for it.
    /// fn save<P: Platform>(space: &AddressSpace<'_, P>, page: VirtAddr) -> Result<(), Error> {
    ///     space.msync(page, 4096, SyncFlags::SYNC)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct SyncFlags: u8 {
        /// Start to save (`MS_ASYNC`). Has no effect, because the object tracks dirty pages anyway.
        const ASYNC = 1 << 0;
        /// Make writes visible to other mappings of the object (`MS_INVALIDATE`). Has no effect,
        /// because writes are always visible.
        const INVALIDATE = 1 << 1;
        /// Save, and wait for completion (`MS_SYNC`).
        const SYNC = 1 << 2;
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Saves the dirty pages of shared file mappings in `length` bytes (rounded up to pages) at
    /// `start`. May wait for storage.
    ///
    /// Context: may sleep. Complexity: linear in the number of runs of dirty pages.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::Invalid`] if both kinds are requested; [`Error::OutOfRange`];
    /// [`Error::Locked`] if [`SyncFlags::INVALIDATE`] meets locked memory; [`Error::InputOutput`];
    /// [`Error::Interrupted`] as [`crate::Object::sync`]; [`Error::NotMapped`] if the range has
    /// holes, after the mapped parts were saved.
    pub fn msync(&self, start: VirtAddr, length: u64, flags: SyncFlags) -> Result<(), Error> {
        self.msync_with(start, length, flags, |_, _| Ok(()))
    }

    /// As [`AddressSpace::msync`], for an embedder whose open files hold an
    /// [`ErrorMark`](crate::ErrorMark). When the pages of a mapping are stored or could not be,
    /// `report` is called with the file and the first address of the part. The embedder knows which
    /// open file the program has mapped there, and reports what is new to its mark. So an error is
    /// reported once to each open file, by `fsync` or by `msync`, also an error of another call.
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{AddressSpace, Error, ErrorMark, Platform, SyncFlags};
    ///
    /// /// `msync(2)` with `MS_SYNC` of pages of one open file.
    /// fn msync<P: Platform>(
    ///     space: &AddressSpace<'_, P>, start: VirtAddr, length: u64, errors: &mut ErrorMark,
    /// ) -> Result<(), Error> {
    ///     space.msync_with(start, length, SyncFlags::SYNC, |file, _| file.check_errors(errors))
    /// }
    /// ```
    ///
    /// Context: may sleep. `report` is called without locks of the core.
    ///
    /// # Errors
    /// As [`AddressSpace::msync`]; those of `report`, which end the call, as on Linux, and replace
    /// the error of the stores.
    pub fn msync_with(
        &self,
        start: VirtAddr,
        length: u64,
        flags: SyncFlags,
        mut report: impl FnMut(&Object<'m, P>, VirtAddr) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut parts = parts(self, start, length, flags)?;
        while let Some(part) = next_file(self, &mut parts, flags)? {
            let stored = part.object.sync(part.offset, part.length);
            reported(stored, || report(&part.object, part.at))?;
        }
        parts.end()
    }

    /// As [`AddressSpace::msync`], for a caller that must not block while the pager works. The
    /// steps of the result store the pages.
    ///
    /// Context: any. Complexity: constant.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::Invalid`] and [`Error::OutOfRange`] as
    /// [`AddressSpace::msync`], whose other errors come from the steps.
    pub fn begin_msync(
        &self,
        start: VirtAddr,
        length: u64,
        flags: SyncFlags,
    ) -> Result<MappedWriteback<'m, P>, Error> {
        let parts = parts(self, start, length, flags)?;
        Ok(MappedWriteback { parts: Some(parts), flags, last: None })
    }
}

/// The mappings whose changes an `msync` has yet to store ([`AddressSpace::begin_msync`]). A step
/// first continues with the file of the last mapping, whatever has happened to that mapping, and
/// then looks up the next one, as a blocking call does. A mapping that another thread unmaps after
/// the call has reached it counts as present; one that is unmapped earlier counts as a hole.
///
/// The value holds a handle to the file that it stores, but no lock. Dropping it ends the call,
/// like dropping a [`Writeback`].
///
/// # Context
/// Context: may sleep. The drop may also sleep, like that of an [`Object`].
#[derive(Debug)]
#[must_use = "the pages are stored by its steps"]
pub struct MappedWriteback<'m, P: Platform> {
    /// `None` after the end.
    parts: Option<Parts>,
    flags: SyncFlags,
    /// The first address of the last mapping and its writeback, until that is complete.
    last: Option<(VirtAddr, Writeback<'m, P>)>,
}

impl<'m, P: Platform> MappedWriteback<'m, P> {
    /// Stores pages until all are stored or the call has to wait for the pager. `space` is the same
    /// at each step. After the end, does nothing.
    ///
    /// Stops while another thread has the mutex that it needs to look up the next mapping, and
    /// sleeps as [`Writeback::step`]. Also waits for the pager if another thread has unmapped and
    /// closed the file since the last step, because the release by the last holder saves the file.
    /// Complexity: as [`Writeback::step`], plus linear in the number of mappings.
    ///
    /// # Errors
    /// As [`AddressSpace::msync`].
    pub fn step<'s>(&mut self, space: &'s AddressSpace<'m, P>) -> Result<Step<'s, 'm, P>, Error> {
        self.step_with(space, |_, _| Ok(()))
    }

    /// As [`MappedWriteback::step`], with `report` as in [`AddressSpace::msync_with`].
    ///
    /// Context: may sleep. `report` is called without locks of the core.
    ///
    /// # Errors
    /// As [`AddressSpace::msync_with`].
    pub fn step_with<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        report: impl FnMut(&Object<'m, P>, VirtAddr) -> Result<(), Error>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let result = self.advance(space, report);
        if !matches!(result, Ok(Step::Blocked(_))) {
            (self.parts, self.last) = (None, None);
        }
        result
    }

    fn advance<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        mut report: impl FnMut(&Object<'m, P>, VirtAddr) -> Result<(), Error>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let Some(parts) = &mut self.parts else { return Ok(Step::Done) };
        loop {
            if let Some((at, writeback)) = &mut self.last {
                let stored = match writeback.step() {
                    Ok(Step::Done) => Ok(()),
                    Ok(blocked @ Step::Blocked(_)) => return Ok(blocked),
                    Err(error) => Err(error),
                };
                reported(stored, || report(writeback.object(), *at))?;
                self.last = None;
            }
            if let Some(wait) = space.wait_for_mutex(&mut None) {
                return Ok(Step::Blocked(wait));
            }
            let Some(part) = next_file(space, parts, self.flags)? else { break };
            let writeback = part.object.begin_sync(part.offset, part.length);
            self.last = Some((part.at, writeback));
        }
        self.parts.take().map_or(Ok(()), Parts::end).map(|()| Step::Done)
    }
}

/// The result of a mapping. An error that is new to the open file replaces that of the stores: it is
/// the last one that the file's mark has not seen. Pages of a call that was interrupted are not
/// stored yet, and their errors are left to the next call.
fn reported(
    stored: Result<(), Error>,
    report: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    if stored == Err(Error::Interrupted) { stored } else { report().and(stored) }
}

/// The mappings of a call.
fn parts<P: Platform>(
    space: &AddressSpace<'_, P>,
    start: VirtAddr,
    length: u64,
    flags: SyncFlags,
) -> Result<Parts, Error> {
    if !start.is_aligned(PAGE_SIZE) {
        return Err(Error::Unaligned(start));
    }
    if flags.contains(SyncFlags::ASYNC | SyncFlags::SYNC) {
        return Err(Error::Invalid);
    }
    let limit = space.limit();
    // A length that overflows when it is rounded up becomes zero, as on Linux.
    let length = length.wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1);
    let range = VirtRange::from_len(start, length).ok_or(Error::OutOfRange { limit })?;
    Ok(Parts::of(range))
}

/// A part of a shared mapping whose pages are to be stored.
struct FilePart<'m, P: Platform> {
    object: Object<'m, P>,
    /// The first address of the part.
    at: VirtAddr,
    /// The first byte of the part in the object.
    offset: u64,
    /// In bytes.
    length: u64,
}

/// The next shared mapping of an object whose pages are to be stored.
fn next_file<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    parts: &mut Parts,
    flags: SyncFlags,
) -> Result<Option<FilePart<'m, P>>, Error> {
    loop {
        let vmas = space.vmas.lock();
        let Some((vma, part)) = parts.next(vmas.view()) else { return Ok(None) };
        if flags.contains(SyncFlags::INVALIDATE) && vma.has(MappingFlags::LOCKED) {
            return Err(Error::Locked(part.start()));
        }
        if !flags.contains(SyncFlags::SYNC) || !vma.is_shared() {
            continue;
        }
        if let Some(object) = space.object_of(vma) {
            // `mremap` may extend a mapping beyond the largest offset of an object.
            let offset = vma.page_offset_of(part.start()).saturating_mul(PAGE_SIZE);
            let (at, length) = (part.start(), part.len());
            return Ok(Some(FilePart { object, at, offset, length }));
        }
    }
}
