//! Copies from and to programs that stop where they would wait, and go on.

use crate::addr::{PAGE_SIZE, VirtAddr};
use crate::error::FaultError;
use crate::interrupt;
use crate::platform::Platform;

use super::AddressSpace;
use super::call::steps::{CallEnd, CallReady, CallWait, Step};
use super::fault::FaultReady;
use super::user_copy::{Asker, COPIED_AT_ONCE, PartialCopy, UserCopy, piece_after, piece_of_both};

/// A copy between memory of the caller's and a program's, as [`AddressSpace::read_user`] and
/// [`AddressSpace::write_user`], that stops at each page that has to be waited for, and goes on
/// there. No byte is copied twice, and a pager is asked once for each page.
///
/// Each step looks the mappings up as they are: for a page that another thread has unmapped between
/// two steps, the copy fails, with the bytes before it copied, as one that blocks does. Dropping it
/// ends the copy: the bytes copied so far stay.
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
    /// A copy from or to `at`, as by the program itself. Nothing is copied yet.
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

    /// The number of bytes that were copied so far.
    pub fn copied(&self) -> usize {
        self.copied
    }

    /// Reads the rest of `into`, the same bytes in each step, until all is read or a page has to be
    /// waited for. `ready` is the end of the wait that the last step has returned. Without it, the
    /// page is looked at as if there had been no wait.
    ///
    /// Sleeps for locks, but for no pager, no device and no handler. Complexity: in the pages that
    /// the bytes touch.
    ///
    /// # Errors
    /// As [`AddressSpace::read_user`]; [`PendingUserCopy::copied`] says how many bytes have been
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

    /// Writes the rest of `from`, as [`PendingUserCopy::read`] reads.
    ///
    /// Context: may sleep. Complexity: as there.
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

    /// Copies page by page. `copy` gets an address, the number of bytes before it and a length in
    /// its page.
    fn run<'s, 'm, P: Platform>(
        &mut self,
        ready: Option<CallReady<'m, P>>,
        length: usize,
        mut copy: impl FnMut(VirtAddr, usize, usize) -> Result<Option<CallWait<'s, 'm, P>>, FaultError>,
    ) -> Result<Step<'s, 'm, P>, FaultError> {
        let mut _kept = None;
        let mut ready = ready;
        while self.copied < length {
            let (at, count) = piece_after(self.at, self.copied, length)?;
            if let Some(ready) = ready.take() {
                _kept = end_of(ready, at)?;
            }
            if let Some(wait) = copy(at, self.copied, count)? {
                return Ok(Step::Blocked(wait));
            }
            self.copied += count;
        }
        Ok(Step::Done)
    }
}

/// The page that was waited for, if the wait was for that at `at`.
///
/// # Errors
/// That of the wait. One about the mapping is of the mapping as it was: the copy looks at it as it
/// is.
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
        CallEnd::Fault(..) | CallEnd::Object(_) => Ok(None),
    }
}

/// A copy between the memory of two processes, as [`AddressSpace::copy_from`] and
/// [`AddressSpace::copy_to`], that stops where it would wait, and goes on there. No byte is copied
/// twice. It has up to 1 KiB that was read from the one and not written to the other yet, as the
/// blocking call has on its stack. So what another thread unmaps between two steps has the effect
/// that it has while that call waits. Dropping it ends the copy: the bytes copied so far stay.
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
    /// In the own memory.
    here: VirtAddr,
    /// In that of the other process.
    there: VirtAddr,
    direction: Direction,
    length: u64,
    copied: u64,
    piece: [u8; COPIED_AT_ONCE],
    /// The number of bytes that were read and not written yet: the length of the piece, or 0.
    read: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    FromOther,
    ToOther,
}

impl PendingCopy {
    /// A copy of `length` bytes at `from` in the memory of another process to `to` in the own one.
    /// Nothing is copied yet.
    ///
    /// Context: any.
    pub fn from_other(to: VirtAddr, from: VirtAddr, length: u64) -> Self {
        let (direction, piece) = (Direction::FromOther, [0; COPIED_AT_ONCE]);
        Self { here: to, there: from, direction, length, copied: 0, piece, read: 0 }
    }

    /// A copy of `length` bytes at `from` in the own memory to `to` in that of another process.
    ///
    /// Context: any.
    pub fn to_other(from: VirtAddr, to: VirtAddr, length: u64) -> Self {
        Self { direction: Direction::ToOther, ..Self::from_other(from, to, length) }
    }

    /// The number of bytes that were copied so far.
    pub fn copied(&self) -> u64 {
        self.copied
    }

    /// Copies until all is copied or a page has to be waited for. `space` is the own memory and
    /// `other` that of the other process, the same in each step. `ready` is as in
    /// [`PendingUserCopy::read`]. After the end, does nothing.
    ///
    /// Sleeps for locks, but for no pager, no device and no handler. Complexity: in the bytes.
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
        let (mut _kept, mut ready) = (None, ready);
        while self.copied < self.length {
            let left = self.length - self.copied;
            let (here, there, count) = piece_of_both((self.here, self.there), self.copied, left)?;
            let (source, target) = match self.direction {
                Direction::FromOther => ((&foreign, there), (&own, here)),
                Direction::ToOther => ((&own, here), (&foreign, there)),
            };
            if let Some(ready) = ready.take() {
                _kept = end_of(ready, if self.read == 0 { source.1 } else { target.1 })?;
            }
            if self.read == 0 {
                interrupt::check(space.platform()).map_err(|_| FaultError::Interrupted)?;
                if let Some(wait) = source.0.try_read(source.1, &mut self.piece[..count])? {
                    return Ok(Step::Blocked(wait));
                }
                self.read = count;
            }
            if let Some(wait) = target.0.try_write(target.1, &self.piece[..count])? {
                return Ok(Step::Blocked(wait));
            }
            self.read = 0;
            self.copied += count as u64;
        }
        Ok(Step::Done)
    }
}
