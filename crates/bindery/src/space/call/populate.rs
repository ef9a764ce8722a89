//! Populates ranges: maps pages before the first access.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, KeyRights};
use crate::error::{Error, FaultError};
use crate::interrupt;
use crate::platform::Platform;
use crate::table::look;

use super::steps::{CallEnd, CallReady, CallWait, Step};
use crate::space::AddressSpace;
use crate::space::fault::{Access, FaultReady, Resolved, TriedFault, step_fault};
use crate::vma::{MappingFlags, Protection, Vma};

/// The number of level-1 tables searched for missing pages between two checks for a fatal signal.
const PIECE: u64 = 2;

/// The access that populated pages must allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::space) enum Want {
    /// The access that `mlock` prepares: writes to private writable mappings, and reads of other
    /// mappings.
    Usual,
    /// As `Usual`, for locked private mappings that may be written; other mappings are skipped
    /// (`mprotect`).
    UsualOfLocked,
    /// Reads (`MADV_POPULATE_READ`).
    Readable,
    /// Writes; pages are mapped as if written (`MADV_POPULATE_WRITE`).
    Writable,
}

impl Want {
    /// The access with which pages of a mapping are faulted; `None` if the mapping does not allow
    /// the access.
    fn access(self, vma: &Vma) -> Option<Access> {
        let protection = vma.protection();
        let readable = protection.contains(Protection::READ).then_some(Access::Read);
        let writable = protection.contains(Protection::WRITE).then_some(Access::Write);
        let executable = protection.contains(Protection::EXECUTE).then_some(Access::Execute);
        match self {
            Self::Usual | Self::UsualOfLocked if !vma.is_shared() && writable.is_some() => writable,
            Self::Usual | Self::UsualOfLocked => readable.or(writable).or(executable),
            Self::Readable => readable,
            Self::Writable => writable,
        }
    }

    fn is_usual(self) -> bool {
        matches!(self, Self::Usual | Self::UsualOfLocked)
    }

    /// The access with which the pages of a mapping are faulted from `at` on; `None` if the pages
    /// are not populated.
    fn of(self, vma: &Vma, at: VirtAddr) -> Result<Option<Access>, Error> {
        let usual = self.is_usual();
        let written = MappingFlags::LOCKED | MappingFlags::WRITE;
        if self == Self::UsualOfLocked && (!vma.has(written) || vma.is_shared()) {
            return Ok(None);
        }
        if vma.has(MappingFlags::SECRET) {
            // Linux populates by pinning pages, and secret pages cannot be pinned.
            return Err(if usual { Error::Fault(at) } else { Error::Invalid });
        }
        let frames = vma.has(MappingFlags::FRAMES);
        if frames && !usual {
            return Err(Error::Invalid);
        }
        if usual && (frames || vma.has(MappingFlags::LOCK_ON_FAULT)) {
            return Ok(None);
        }
        let refused = if usual { Error::Fault(at) } else { Error::Invalid };
        self.access(vma).map(Some).ok_or(refused)
    }
}

/// The reaction of a populate to a page that cannot be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OnFailure {
    /// The populate fails.
    Fails,
    /// The populate fails; the caller may retry if memory was short (`mlock`).
    FailsForNow,
    /// The populate continues with the next mapping, but fails at a fatal signal (`mlockall`).
    Passes,
    /// The populate continues with the next mapping. A fatal signal ends it without an error,
    /// because the call has already succeeded (`MAP_POPULATE`).
    Ignores,
}

/// The second part of a call, without the mutex of the address space: it maps the remaining pages
/// of a range before their first access (Linux: `mm_populate`). Each step looks up the mappings
/// again. Another thread's call between two steps therefore has the same effect as between two
/// faults of a blocking call.
///
/// The value holds no lock and no reference. Dropping it ends the call; the pages mapped so far
/// stay.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, LockPages, Platform, Step};
///
/// /// `mlock(2)`; another thread does the waiting.
/// fn lock<P: Platform>(
///     space: &AddressSpace<'_, P>, at: VirtAddr, size: u64,
/// ) -> Result<(), Error> {
///     let mut populate = space.begin_mlock(at, size, LockPages::Now)?;
///     let mut ready = None;
///     loop {
///         match populate.step(space, ready.take())? {
///             Step::Done => return Ok(()),
///             // On another thread, or polled, in a kernel that needs this call.
///             Step::Blocked(wait) => ready = Some(wait.wait()),
///         }
///     }
/// }
/// ```
///
/// # Context
/// Context: may sleep.
#[derive(Debug)]
#[must_use = "the pages are mapped by its steps"]
pub struct Populate {
    /// The first page that may be missing.
    at: VirtAddr,
    end: VirtAddr,
    want: Want,
    on_failure: OnFailure,
}

/// The outcome of one turn of [`Populate::run`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Whole,
    /// The fault of the first remaining page has to wait, or another thread has the mutex.
    Blocked,
}

/// Nothing to do: the only step is [`Step::Done`].
impl Default for Populate {
    #[inline(always)]
    fn default() -> Self {
        Self::as_possible(VirtRange::raw(0, 0))
    }
}

impl Populate {
    /// The pages of `range` that can be mapped, for a call that has already succeeded.
    #[inline(always)]
    pub(in crate::space) fn as_possible(range: VirtRange) -> Self {
        let (at, end) = (range.start(), range.end());
        Self { at, end, want: Want::Usual, on_failure: OnFailure::Ignores }
    }

    /// As [`Populate::as_possible`], restricted to locked private mappings that may be written.
    pub(in crate::space) fn of_locked(range: VirtRange) -> Self {
        Self { want: Want::UsualOfLocked, ..Self::as_possible(range) }
    }

    /// As [`Populate::as_possible`], for a call that ends at a fatal signal.
    #[inline(always)]
    pub(in crate::space) fn until_signal(self) -> Self {
        Self { on_failure: OnFailure::Passes, ..self }
    }

    /// The pages of `range`. The call fails if any of them cannot be mapped.
    #[inline(always)]
    pub(in crate::space) fn all_of(range: VirtRange, want: Want) -> Self {
        let (at, end) = (range.start(), range.end());
        Self { at, end, want, on_failure: OnFailure::Fails }
    }

    /// As [`Populate::all_of`], for a call that may be repeated when memory is no longer short.
    #[inline(always)]
    pub(in crate::space) fn for_now(self) -> Self {
        Self { on_failure: OnFailure::FailsForNow, ..self }
    }

    /// The range whose pages are not yet known to be mapped.
    pub fn remaining(&self) -> VirtRange {
        VirtRange::raw(self.at.0, self.end.0.max(self.at.0))
    }

    /// Maps pages until all are mapped or a page has to be waited for. `ready` is the end of the
    /// wait that the last step returned. Without `ready`, the page is checked as if no wait had
    /// taken place: an error of the pager is lost, and the pager is asked again.
    ///
    /// Sleeps for no pager, device or handler: no lock is held while these work. Stops for locks as
    /// `docs/lock-order.md` says, and sleeps while the frames of a large folio are collected.
    ///
    /// Complexity: linear in the number of mappings and of allocated folios.
    ///
    /// # Errors
    /// The errors of the call that created the value. The pages before the error are mapped.
    pub fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        // Keeps the folio that was waited for until it is mapped.
        let mut ready = ready;
        if self.at < self.end
            && let Some(wait) = space.wait_for_mutex(&mut ready)
        {
            return Ok(Step::Blocked(wait));
        }
        // An error about the mapping is about its former state. The fault checks the present state.
        if let Some(CallReady(CallEnd::Fault(page, Err(error)))) = ready
            && page == self.at
            && !matches!(error, FaultError::NotMapped | FaultError::Protection)
        {
            self.fail(space, error)?;
        }
        loop {
            let mut blocked = None;
            let is_free = || !space.vmas.is_locked();
            let ended = self.run(space, is_free, |at, access| {
                Ok(match step_fault(space, at, access)? {
                    TriedFault::Resolved(resolved) => Some(resolved),
                    TriedFault::Blocked(wait) => {
                        blocked = Some(wait);
                        None
                    }
                })
            })?;
            if ended == Ended::Whole {
                return Ok(Step::Done);
            }
            let wait = match blocked {
                Some(wait) => Some(CallWait::new(wait).keeping(page_of(ready.take()))),
                None => space.wait_for_mutex(&mut ready),
            };
            if let Some(wait) = wait {
                return Ok(Step::Blocked(wait));
            }
        }
    }

    /// Maps all pages, sleeping as needed.
    ///
    /// Context: may sleep. Complexity: the sum of all steps.
    ///
    /// # Errors
    /// As [`Populate::step`]; [`Error::OutOfMemory`], after reclaim.
    // Most calls have nothing to populate and cost one comparison.
    #[inline(always)]
    pub fn finish<P: Platform>(self, space: &AddressSpace<'_, P>) -> Result<(), Error> {
        if self.at < self.end { self.finish_rest(space) } else { Ok(()) }
    }

    #[inline(never)]
    fn finish_rest<P: Platform>(mut self, space: &AddressSpace<'_, P>) -> Result<(), Error> {
        self.run(space, || true, block(space)).map(|_| ())
    }

    /// Maps the pages by `fault`, which returns `None` to stop. Also stops before it takes the mutex,
    /// if `may_lock` returns false. Skips present pages in runs. Stops
    /// at a fatal signal, which is checked before each fault and before each [`PIECE`] of searched
    /// tables.
    #[inline]
    fn run<P: Platform>(
        &mut self,
        space: &AddressSpace<'_, P>,
        may_lock: impl Fn() -> bool,
        mut fault: impl FnMut(VirtAddr, Access) -> Result<Option<Resolved>, FaultError>,
    ) -> Result<Ended, Error> {
        while self.at < self.end {
            if !may_lock() {
                return Ok(Ended::Blocked);
            }
            let (end, access) = match self.next_part(space) {
                Ok(Some(part)) => part,
                Ok(None) => return Ok(Ended::Whole),
                Err((_, error)) if self.fails() => return Err(error),
                Err((end, _)) => {
                    self.at = end;
                    continue;
                }
            };
            match fill(space, &mut self.at, end, access, &mut fault) {
                Ok(Ended::Whole) => {}
                Ok(Ended::Blocked) => return Ok(Ended::Blocked),
                Err(FaultError::NotMapped | FaultError::Protection)
                    if !self.wants(space, access) => {}
                Err(error) => self.fail(space, error)?,
            }
        }
        Ok(Ended::Whole)
    }

    /// The next mapping to populate: its end within the range, and the kind of access for the
    /// faults. The populate continues at the start of this mapping. An error also carries the end.
    fn next_part<P: Platform>(
        &mut self,
        space: &AddressSpace<'_, P>,
    ) -> Result<Option<(VirtAddr, Access)>, (VirtAddr, Error)> {
        let vmas = space.vmas.lock();
        while self.at < self.end {
            let found = vmas.view().first_in(VirtRange::raw(self.at.0, self.end.0));
            let Some(vma) = found.filter(|vma| self.passes_holes() || vma.start() <= self.at.0)
            else {
                // The call found no hole at this address before, so the mapping has been unmapped
                // since.
                let hole = (self.end, Error::NotMapped(self.at));
                return if self.passes_holes() { Ok(None) } else { Err(hole) };
            };
            self.at = self.at.max(VirtAddr(vma.start()));
            let end = VirtAddr(vma.end().min(self.end.0));
            match self.want.of(vma, self.at) {
                Ok(Some(access)) => return Ok(Some((end, access))),
                Ok(None) => self.at = end,
                Err(error) => return Err((end, error)),
            }
        }
        Ok(None)
    }

    /// Whether a page that cannot be mapped ends the call.
    fn fails(&self) -> bool {
        match self.on_failure {
            OnFailure::Fails | OnFailure::FailsForNow => true,
            OnFailure::Passes | OnFailure::Ignores => false,
        }
    }

    /// As on Linux, a call that found no hole skips one that appeared later.
    fn passes_holes(&self) -> bool {
        self.want.is_usual()
    }

    /// Whether the first remaining page still has to be faulted with this access. If not, another
    /// thread has changed the mapping since it was looked up.
    #[cold]
    fn wants<P: Platform>(&self, space: &AddressSpace<'_, P>, access: Access) -> bool {
        let vmas = space.vmas.lock();
        let wanted = vmas.view().at(self.at).map(|vma| self.want.of(vma, self.at));
        matches!(wanted, Some(Ok(Some(wanted))) if wanted == access)
    }

    /// Handles a first remaining page that cannot be mapped. Returns the error of the call if the
    /// failure ends the call.
    #[cold]
    fn fail<P: Platform>(
        &mut self,
        space: &AddressSpace<'_, P>,
        error: FaultError,
    ) -> Result<(), Error> {
        let at = self.at;
        let end = {
            let vmas = space.vmas.lock();
            let vma = vmas.view().at(at);
            vma.map_or(at.offset(PAGE_SIZE), |vma| VirtAddr(vma.end())).min(self.end)
        };
        match (error_at(at, error), self.on_failure) {
            (Error::Interrupted, OnFailure::Ignores) => {
                self.at = self.end;
                Ok(())
            }
            (Error::Interrupted, _) => Err(Error::Interrupted),
            (_, OnFailure::Passes | OnFailure::Ignores) => {
                self.at = end;
                Ok(())
            }
            (Error::OutOfMemory, OnFailure::FailsForNow) => Err(Error::TryAgain),
            (error, OnFailure::Fails | OnFailure::FailsForNow) => Err(error),
        }
    }
}

/// The page that a wait has brought, if any.
fn page_of<'m, P: Platform>(ready: Option<CallReady<'m, P>>) -> Option<FaultReady<'m, P>> {
    if let Some(CallReady(CallEnd::Fault(_, Ok(kept)))) = ready { Some(kept) } else { None }
}

/// The result of a blocking call. `begun` is the result of the part that precedes the populate.
#[inline(always)]
pub(in crate::space) fn populated<P: Platform, T>(
    space: &AddressSpace<'_, P>,
    begun: Result<(T, Populate), Error>,
) -> Result<T, Error> {
    let (value, populate) = begun?;
    populate.finish(space)?;
    Ok(value)
}

/// The fault of a call that blocks.
fn block<P: Platform>(
    space: &AddressSpace<'_, P>,
) -> impl FnMut(VirtAddr, Access) -> Result<Option<Resolved>, FaultError> {
    |at, access| space.fault_for_kernel(at, access, KeyRights::ALL).map(Some)
}

/// Maps a new mapping of frames outside the core's memory, up to the pages for which the source has
/// frames.
pub(in crate::space) fn populate_frames<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    flags: MappingFlags,
) -> Result<(), Error> {
    let protection = flags.protection();
    let shared = flags.contains(MappingFlags::SHARED);
    // A write to a private mapping would copy the page.
    let access = if protection.contains(Protection::WRITE) && shared {
        Access::Write
    } else if protection.contains(Protection::READ) {
        Access::Read
    } else if protection.contains(Protection::EXECUTE) {
        Access::Execute
    } else {
        return Ok(());
    };
    let mut at = range.start();
    let done = fill(space, &mut at, range.end(), access, &mut block(space));
    done.map(|_| ()).map_err(|error| error_at(at, error))
}

/// Faults in the missing pages from `at` to `end` and advances `at`. The pages were in one mapping
/// when it was looked up.
#[inline]
fn fill<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: &mut VirtAddr,
    end: VirtAddr,
    access: Access,
    fault: &mut impl FnMut(VirtAddr, Access) -> Result<Option<Resolved>, FaultError>,
) -> Result<Ended, FaultError> {
    while *at < end {
        if interrupt::check(space.platform()).is_err() {
            return Err(FaultError::Interrupted);
        }
        let piece = PIECE * P::Arch::PMD.span();
        let piece = VirtRange::raw(at.0, end.0.min(at.0.saturating_add(piece)));
        *at = look::skip_present(&space.page_table, piece, access.permission());
        if *at >= piece.end() {
            continue;
        }
        *at = match fault(*at, access)? {
            Some(Resolved::New(range) | Resolved::Mapped(range)) => range.end().max(*at),
            Some(_) => at.offset(PAGE_SIZE),
            None => return Ok(Ended::Blocked),
        };
    }
    Ok(Ended::Whole)
}

/// The error of a call for a page that cannot be mapped.
fn error_at(at: VirtAddr, error: FaultError) -> Error {
    match error {
        FaultError::OutOfMemory => Error::OutOfMemory,
        FaultError::Interrupted => Error::Interrupted,
        FaultError::Bus
        | FaultError::NotMapped
        | FaultError::Protection
        | FaultError::ProtectionKey(_) => Error::Fault(at),
    }
}
