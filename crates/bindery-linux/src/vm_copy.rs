//! `process_vm_readv` and `process_vm_writev`: copies between the memory of two processes.

use core::ops::Deref;

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, CallReady, Errno, FaultError, PendingCopy, Platform, Step};

use super::vector::{IoRange, MOST_BYTES, MOST_RANGES, PendingRange, RangeStep};
use super::{CallStep, Outcome, raw};

/// The direction of [`process_vm`].
///
/// ```
/// use bindery_linux::CopyDirection;
///
/// /// By the number of the system call on x86-64.
/// fn direction(number: u64) -> Option<CopyDirection> {
///     match number {
///         310 => Some(CopyDirection::Read),
///         311 => Some(CopyDirection::Write),
///         _ => None,
///     }
/// }
/// assert_eq!(direction(310), Some(CopyDirection::Read));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyDirection {
    /// From the other process to the caller (`process_vm_readv(2)`).
    Read,
    /// From the caller to the other process (`process_vm_writev(2)`).
    Write,
}

/// The number of elements that [`process_vm`] needs for a call with these arguments; at most 2,048.
///
/// Context: may sleep.
pub fn process_vm_ranges(arguments: [u64; 6]) -> usize {
    let [_, _, local, _, remote, _] = arguments;
    (local.min(MOST_RANGES) + remote.min(MOST_RANGES)) as usize
}

/// `process_vm_readv(2)` or `process_vm_writev(2)` by a process with the memory `caller`. Takes raw
/// arguments and returns the number of bytes copied or `-errno`. Both processes may be the same.
///
/// `ranges` is a buffer for both arrays, of at least [`process_vm_ranges`] elements. The arrays are
/// read once, before the copy. `find` returns the memory of the process with the given number, or
/// fails with `ESRCH` or `EPERM`. `find` is called only if there are bytes to copy.
///
/// Copies bytes in the order of the arrays until one side ends or faults, or a fatal signal
/// arrives. Returns the number of bytes copied so far. In addition to Linux's errors, returns
/// `ENOMEM` if no memory was available for the first byte; the embedder may free memory and call
/// again. Returns `EINTR` if the signal arrived before the first byte.
///
/// Context: may sleep. Complexity: linear in the bytes and ranges.
pub fn process_vm<'m, P: Platform, S: Deref<Target = AddressSpace<'m, P>>>(
    caller: &AddressSpace<'_, P>,
    direction: CopyDirection,
    arguments: [u64; 6],
    ranges: &mut [IoRange],
    find: impl FnOnce(i32) -> Result<S, Errno>,
) -> i64 {
    raw(copy(caller, direction, arguments, ranges, find))
}

fn copy<'m, P: Platform, S: Deref<Target = AddressSpace<'m, P>>>(
    caller: &AddressSpace<'_, P>,
    direction: CopyDirection,
    [process, local_at, local_count, remote_at, remote_count, flags]: [u64; 6],
    ranges: &mut [IoRange],
    find: impl FnOnce(i32) -> Result<S, Errno>,
) -> Outcome {
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let (local, rest) = fetch(caller, local_at, local_count, ranges)?;
    if local.iter().any(|range| is_outside(caller, range)) {
        return Err(Errno::EFAULT);
    }
    if limit(local) == 0 {
        return Ok(0);
    }
    let (remote, _) = fetch(caller, remote_at, remote_count, rest)?;
    if remote.iter().all(|range| range.length == 0) {
        return Ok(0);
    }
    let other = find(process as i32)?;
    let mut done = 0;
    for (here, there, length) in pairs(local, remote) {
        let (here, there) = (VirtAddr(here), VirtAddr(there));
        let result = match direction {
            CopyDirection::Read => caller.copy_from(here, &other, there, length),
            CopyDirection::Write => caller.copy_to(here, &other, there, length),
        };
        let Err(partial) = result else {
            done += length;
            continue;
        };
        done += partial.copied;
        if done > 0 {
            break;
        }
        return Err(errno_of(partial.fault));
    }
    Ok(done)
}

/// Truncates the ranges to the maximum of a call. Returns the number of bytes in the ranges.
fn limit(local: &mut [IoRange]) -> u64 {
    let mut left = MOST_BYTES;
    for range in local.iter_mut() {
        range.length = range.length.min(left);
        left -= range.length;
    }
    MOST_BYTES - left
}

/// The errno of a call that has copied nothing.
fn errno_of(fault: FaultError) -> Errno {
    if fault == FaultError::OutOfMemory {
        Errno::ENOMEM
    } else if fault == FaultError::Interrupted {
        Errno::EINTR
    } else {
        Errno::EFAULT
    }
}

/// A [`process_vm`] that stops wherever it would wait for a page of the arrays or of either process
/// and continues from there, like a [`PendingCall`](super::PendingCall). The arrays are read once,
/// and no byte is copied twice. Dropping the value ends the call; the bytes copied so far stay.
///
/// ```
/// use bindery::{AddressSpace, Platform};
/// use bindery_linux::{CallStep, CopyDirection, IoRange, PendingProcessVm};
///
/// /// Another thread does the waiting.
/// fn read<'m, P: Platform>(
///     caller: &AddressSpace<'m, P>, other: &AddressSpace<'m, P>,
///     arguments: [u64; 6], ranges: &mut [IoRange],
/// ) -> i64 {
///     let mut call = PendingProcessVm::new(CopyDirection::Read, arguments);
///     let mut ready = None;
///     loop {
///         match call.step(caller, ready.take(), ranges, |_| Ok(other)) {
///             CallStep::Done(result) => return result,
///             CallStep::Blocked(wait) => ready = Some(wait.wait()),
///         }
///     }
/// }
/// ```
///
/// # Context
/// Context: may sleep.
#[derive(Debug)]
#[must_use = "its steps make the call"]
pub struct PendingProcessVm {
    direction: CopyDirection,
    arguments: [u64; 6],
    /// The number of ranges read so far from both arrays.
    read: usize,
    reading: Option<PendingRange>,
    /// The copy between two ranges.
    copy: Option<PendingCopy>,
    /// The number of bytes that earlier copies copied.
    done: u64,
    /// The address of the other process's state, used only for comparison.
    other: Option<usize>,
    /// The result, once the call has ended.
    outcome: Option<Outcome>,
}

impl PendingProcessVm {
    /// Creates the call with these raw arguments. Runs no part of it yet.
    pub fn new(direction: CopyDirection, arguments: [u64; 6]) -> Self {
        let (reading, copy, other, outcome) = (None, None, None, None);
        Self { direction, arguments, read: 0, reading, copy, done: 0, other, outcome }
    }

    /// Continues the call until it is done or has to wait. `ready` is the end of the wait that the
    /// last step returned. `caller` and `ranges` are as for [`process_vm`] and the same in each
    /// step. Each step that copies calls `find` once; if the process has ended or its number now
    /// names another process, the call ends. An address space is identified by its address, so the
    /// memory of an [`AddressSpace`] that has ended must not be reused for another one while the
    /// call is in progress. After the last step, returns the result again.
    ///
    /// Complexity: that of the completed part, plus linear in the ranges.
    pub fn step<'s, 'm, P: Platform>(
        &mut self,
        caller: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
        ranges: &mut [IoRange],
        find: impl FnOnce(i32) -> Result<&'s AddressSpace<'m, P>, Errno>,
    ) -> CallStep<'s, 'm, P> {
        if let Some(outcome) = self.outcome {
            return CallStep::Done(raw(outcome));
        }
        let outcome = match self.advance(caller, ready, ranges, find) {
            Ok(Step::Blocked(wait)) => return CallStep::Blocked(wait),
            Ok(Step::Done) => Ok(self.done),
            // The process has ended. The bytes copied so far count, including those of the
            // unfinished copy.
            Err(errno) => match self.moved() {
                0 => Err(errno),
                moved => Ok(moved),
            },
        };
        self.outcome = Some(outcome);
        CallStep::Done(raw(outcome))
    }

    /// The number of bytes copied so far.
    fn moved(&self) -> u64 {
        self.done + self.copy.as_ref().map_or(0, PendingCopy::copied)
    }

    fn advance<'s, 'm, P: Platform>(
        &mut self,
        caller: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
        ranges: &mut [IoRange],
        find: impl FnOnce(i32) -> Result<&'s AddressSpace<'m, P>, Errno>,
    ) -> Result<Step<'s, 'm, P>, Errno> {
        let [process, local_at, local_count, remote_at, remote_count, flags] = self.arguments;
        if flags != 0 || local_count > MOST_RANGES {
            return Err(Errno::EINVAL);
        }
        let mut ready = ready;
        let (local, rest) =
            ranges.split_at_mut_checked(local_count as usize).ok_or(Errno::ENOMEM)?;
        if let Some(blocked) = self.fetch(caller, &mut ready, (local_at, 0), local)? {
            return Ok(blocked);
        }
        if local.iter().any(|range| is_outside(caller, range)) {
            return Err(Errno::EFAULT);
        }
        if limit(local) == 0 {
            return Ok(Step::Done);
        }
        if remote_count > MOST_RANGES {
            return Err(Errno::EINVAL);
        }
        let remote = rest.get_mut(..remote_count as usize).ok_or(Errno::ENOMEM)?;
        if let Some(blocked) = self.fetch(caller, &mut ready, (remote_at, local.len()), remote)? {
            return Ok(blocked);
        }
        if remote.iter().all(|range| range.length == 0) {
            return Ok(Step::Done);
        }
        let other = find(process as i32)?;
        let address = core::ptr::from_ref(other).addr();
        if *self.other.get_or_insert(address) != address {
            return Err(Errno::ESRCH);
        }
        let mut passed = 0;
        for (here, there, length) in pairs(local, remote) {
            passed += length;
            if passed <= self.done {
                continue;
            }
            let (here, there) = (VirtAddr(here), VirtAddr(there));
            let copy = self.copy.get_or_insert_with(|| match self.direction {
                CopyDirection::Read => PendingCopy::from_other(here, there, length),
                CopyDirection::Write => PendingCopy::to_other(here, there, length),
            });
            match copy.step(caller, other, ready.take()) {
                Ok(Step::Blocked(wait)) => return Ok(Step::Blocked(wait)),
                Ok(Step::Done) => self.done += length,
                Err(partial) => {
                    self.done += partial.copied;
                    self.copy = None;
                    return if self.done > 0 {
                        Ok(Step::Done)
                    } else {
                        Err(errno_of(partial.fault))
                    };
                }
            }
            self.copy = None;
        }
        Ok(Step::Done)
    }

    /// Reads the rest of an array, after `before` ranges of the other array. Returns the wait for
    /// the next range.
    fn fetch<'s, 'm, P: Platform>(
        &mut self,
        caller: &'s AddressSpace<'m, P>,
        ready: &mut Option<CallReady<'m, P>>,
        (at, before): (u64, usize),
        into: &mut [IoRange],
    ) -> Result<Option<Step<'s, 'm, P>>, Errno> {
        while let Some(place) = self.read.checked_sub(before).and_then(|at| into.get_mut(at)) {
            let index = (self.read - before) as u64;
            let mut reading = match self.reading.take() {
                Some(reading) => reading,
                None => PendingRange::new(at, index)?,
            };
            match reading.step(caller, ready.take())? {
                RangeStep::Read(range) if range.length > i64::MAX as u64 => {
                    return Err(Errno::EINVAL);
                }
                RangeStep::Read(range) => *place = range,
                RangeStep::Blocked(wait) => {
                    self.reading = Some(reading);
                    return Ok(Some(Step::Blocked(wait)));
                }
            }
            self.read += 1;
        }
        Ok(None)
    }
}

/// Reads an array of ranges into the front of `into`. Returns the ranges and the unused rest.
fn fetch<'a, P: Platform>(
    caller: &AddressSpace<'_, P>,
    at: u64,
    count: u64,
    into: &'a mut [IoRange],
) -> Result<(&'a mut [IoRange], &'a mut [IoRange]), Errno> {
    if count > MOST_RANGES {
        return Err(Errno::EINVAL);
    }
    let (ranges, rest) = into.split_at_mut_checked(count as usize).ok_or(Errno::ENOMEM)?;
    for (index, range) in ranges.iter_mut().enumerate() {
        *range = IoRange::read(caller, at, index as u64)?;
        if range.length > i64::MAX as u64 {
            return Err(Errno::EINVAL);
        }
    }
    Ok((ranges, rest))
}

/// Whether a range extends beyond user space.
fn is_outside<P: Platform>(space: &AddressSpace<'_, P>, range: &IoRange) -> bool {
    range.start.checked_add(range.length).is_none_or(|end| end > space.limit().0)
}

/// The copies to perform: a local address, a remote address and a length each. A copy ends with the
/// shorter of its two ranges.
fn pairs<'a>(
    local: &'a [IoRange],
    remote: &'a [IoRange],
) -> impl Iterator<Item = (u64, u64, u64)> + 'a {
    let (mut here, mut there) = (local.iter().copied(), remote.iter().copied());
    let (mut one, mut other) = (IoRange::default(), IoRange::default());
    core::iter::from_fn(move || {
        while one.length == 0 {
            one = here.next()?;
        }
        while other.length == 0 {
            other = there.next()?;
        }
        let length = one.length.min(other.length);
        let pair = (one.start, other.start, length);
        for range in [&mut one, &mut other] {
            range.start = range.start.wrapping_add(length);
            range.length -= length;
        }
        Some(pair)
    })
}
