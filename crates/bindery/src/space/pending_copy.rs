//! Copies from and to programs' memory that stop instead of waiting and can be continued.

use crate::addr::{PAGE_SIZE, VirtAddr};
use crate::error::FaultError;
use crate::interrupt;
use crate::platform::Platform;

use super::AddressSpace;
use super::call::steps::{CallEnd, CallReady, CallWait, Step};
use super::fault::FaultReady;
use super::user_copy::{Asker, COPIED_AT_ONCE, PartialCopy, UserCopy, piece_after, piece_of_both};

/// A copy between the caller's memory and a program's memory, as by [`AddressSpace::read_user`] and
/// [`AddressSpace::write_user`]. The copy stops at each page that has to be waited for and
/// continues there. No byte is copied twice, and a pager is asked once per page.
///
/// Each step reads the current mappings. If another thread has unmapped a page between two steps,
/// the copy fails at that page like a blocking copy, and the bytes before the page stay copied.
/// Dropping the value ends the copy; the bytes copied so far stay.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, FaultError, PendingUserCopy, Platform, Step};
///
/// /// `copy_from_user`; another thread does the waiting.
/// fn read<P: Platform>(
///     space: &AddressSpace<'_, P>, at: VirtAddr, into: &mut [u8],
/// ) -> Result<(), FaultError> {
///     let mut copy = PendingUserCopy::new(at);
///     let mut ready = None;
///     loop {
///         match copy.read(space, ready.take(), into)? {
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
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "the bytes are copied by its steps"]
pub struct PendingUserCopy {
    at: VirtAddr,
    asker: Asker,
    copied: usize,
}

impl PendingUserCopy {
    /// A copy from or to `at`, as by the program itself. Nothing has been copied yet.
    ///
    /// Context: any.
    pub fn new(at: VirtAddr) -> Self {
        Self { at, asker: Asker::Program, copied: 0 }
    }

    /// As [`PendingUserCopy::new`], for a caller other than the program, as
    /// [`AddressSpace::read_foreign`].
    ///
    /// Context: any.
    pub fn foreign(at: VirtAddr) -> Self {
        Self { asker: Asker::Other, ..Self::new(at) }
    }

    /// The number of bytes copied so far.
    pub fn copied(&self) -> usize {
        self.copied
    }

    /// Reads the rest of `into`, the same buffer in each step, until all bytes are read or a page
    /// has to be waited for. `ready` is the end of the wait that the last step returned. Without
    /// `ready`, the page is treated as if no wait had taken place.
    ///
    /// Sleeps for no lock, pager, device or handler. Complexity: linear in the number
    /// of pages that the bytes touch.
    ///
    /// # Errors
    /// As [`AddressSpace::read_user`]; [`PendingUserCopy::copied`] returns the number of bytes
    /// read.
    pub fn read<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
        into: &mut [u8],
    ) -> Result<Step<'s, 'm, P>, FaultError> {
        let copy = UserCopy::of(space, self.asker);
        self.run(ready, into.len(), |at, done, length| {
            copy.try_read(at, &mut into[done..done + length])
        })
    }

    /// Writes the rest of `from` in the manner of [`PendingUserCopy::read`].
    ///
    /// Context: may sleep. Complexity: as for [`PendingUserCopy::read`].
    ///
    /// # Errors
    /// As [`AddressSpace::write_user`].
    pub fn write<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
        from: &[u8],
    ) -> Result<Step<'s, 'm, P>, FaultError> {
        let copy = UserCopy::of(space, self.asker);
        self.run(ready, from.len(), |at, done, length| {
            copy.try_write(at, &from[done..done + length])
        })
    }

    /// Copies page by page. `copy` receives an address, the number of bytes before it, and a length
    /// within its page.
    fn run<'s, 'm, P: Platform>(
        &mut self,
        ready: Option<CallReady<'m, P>>,
        length: usize,
        mut copy: impl FnMut(VirtAddr, usize, usize) -> Result<Option<CallWait<'s, 'm, P>>, FaultError>,
    ) -> Result<Step<'s, 'm, P>, FaultError> {
        let mut kept = None;
        let mut ready = ready;
        while self.copied < length {
            let (at, count) = piece_after(self.at, self.copied, length)?;
            if let Some(ready) = ready.take() {
                kept = end_of(ready, at)?;
            }
            if let Some(wait) = copy(at, self.copied, count)? {
                return Ok(Step::Blocked(wait.keeping(kept)));
            }
            self.copied += count;
        }
        Ok(Step::Done)
    }
}

/// The result of the wait for the page at `at`, if that page was waited for.
///
/// # Errors
/// The error of the wait. An error about the mapping concerns the mapping at that time; the copy
/// checks the current mapping.
fn end_of<'m, P: Platform>(
    ready: CallReady<'m, P>,
    at: VirtAddr,
) -> Result<Option<FaultReady<'m, P>>, FaultError> {
    match ready.0 {
        CallEnd::Fault(page, result) if page == at.align_down(PAGE_SIZE) => match result {
            Ok(kept) => Ok(Some(kept)),
            Err(FaultError::NotMapped | FaultError::Protection) => Ok(None),
            Err(error) => Err(error),
        },
        CallEnd::Fault(..) | CallEnd::Object(_) | CallEnd::Nothing | CallEnd::Message(_) => {
            Ok(None)
        }
    }
}

/// A copy between the memory of two processes, as by [`AddressSpace::copy_from`] and
/// [`AddressSpace::copy_to`], that stops instead of waiting and can be continued. No byte is copied
/// twice. The value holds up to 1 KiB that was read from one process and not yet written to the
/// other, as the blocking call does on its stack. An unmapping by another thread between two steps
/// therefore has the same effect as during a wait of the blocking call. Dropping the value ends the
/// copy; the bytes copied so far stay.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, PendingCopy, Platform, Step};
///
/// /// How many bytes were copied. Another thread does the waiting.
/// fn copy<'m, P: Platform>(
///     to: &AddressSpace<'m, P>, from: &AddressSpace<'m, P>, at: VirtAddr,
/// ) -> u64 {
///     let mut copy = PendingCopy::from_other(at, at, 4096);
///     let mut ready = None;
///     loop {
///         match copy.step(to, from, ready.take()) {
///             Ok(Step::Blocked(wait)) => ready = Some(wait.wait()),
///             Ok(Step::Done) | Err(_) => return copy.copied(),
///         }
///     }
/// }
/// ```
///
/// # Context
/// Context: may sleep.
#[derive(Clone, Debug)]
#[must_use = "the bytes are copied by its steps"]
pub struct PendingCopy {
    /// The address in the caller's own memory.
    here: VirtAddr,
    /// The address in the other process's memory.
    there: VirtAddr,
    direction: Direction,
    length: u64,
    copied: u64,
    piece: [u8; COPIED_AT_ONCE],
    /// The number of bytes that were read but not yet written: the length of the piece, or 0.
    read: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    FromOther,
    ToOther,
}

impl PendingCopy {
    /// A copy of `length` bytes at `from` in another process's memory to `to` in the caller's own
    /// memory. Nothing has been copied yet.
    ///
    /// Context: any.
    pub fn from_other(to: VirtAddr, from: VirtAddr, length: u64) -> Self {
        let (direction, piece) = (Direction::FromOther, [0; COPIED_AT_ONCE]);
        Self { here: to, there: from, direction, length, copied: 0, piece, read: 0 }
    }

    /// A copy of `length` bytes at `from` in the caller's own memory to `to` in another process's
    /// memory.
    ///
    /// Context: any.
    pub fn to_other(from: VirtAddr, to: VirtAddr, length: u64) -> Self {
        Self { direction: Direction::ToOther, ..Self::from_other(from, to, length) }
    }

    /// The number of bytes copied so far.
    pub fn copied(&self) -> u64 {
        self.copied
    }

    /// Copies until all bytes are copied or a page has to be waited for. `space` is the caller's
    /// own memory and `other` that of the other process; both are the same in each step. `ready` is
    /// as in [`PendingUserCopy::read`]. After the end of the copy, does nothing.
    ///
    /// Sleeps for no lock, pager, device or handler. Complexity: linear in the number
    /// of bytes.
    ///
    /// # Errors
    /// As [`AddressSpace::copy_from`].
    pub fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        other: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, PartialCopy> {
        self.advance(space, other, ready).map_err(|fault| {
            self.length = self.copied;
            PartialCopy { copied: self.copied, fault }
        })
    }

    fn advance<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        other: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, FaultError> {
        let (own, foreign) =
            (UserCopy::of(space, Asker::Program), UserCopy::of(other, Asker::Other));
        let (mut kept, mut ready) = (None, ready);
        while self.copied < self.length {
            let left = self.length - self.copied;
            let (here, there, count) = piece_of_both((self.here, self.there), self.copied, left)?;
            let (source, target) = match self.direction {
                Direction::FromOther => ((&foreign, there), (&own, here)),
                Direction::ToOther => ((&own, here), (&foreign, there)),
            };
            if let Some(ready) = ready.take() {
                kept = end_of(ready, if self.read == 0 { source.1 } else { target.1 })?;
            }
            if self.read == 0 {
                interrupt::check(space.platform()).map_err(|_| FaultError::Interrupted)?;
                if let Some(wait) = source.0.try_read(source.1, &mut self.piece[..count])? {
                    return Ok(Step::Blocked(wait.keeping(kept)));
                }
                self.read = count;
            }
            if let Some(wait) = target.0.try_write(target.1, &self.piece[..count])? {
                return Ok(Step::Blocked(wait.keeping(kept)));
            }
            self.read = 0;
            self.copied += count as u64;
        }
        Ok(Step::Done)
    }
}
