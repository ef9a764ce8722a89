//! `process_vm_readv` and `process_vm_writev`: copies between the memory of two processes.

use core::ops::Deref;

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Errno, FaultError, Platform};

use super::vector::{IoRange, MOST_BYTES, MOST_RANGES};
use super::{Outcome, raw};

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
/// arguments, and returns the number of bytes copied or `-errno`. Both processes may be the same.
///
/// `ranges` is a buffer for both arrays, of at least [`process_vm_ranges`] elements. The arrays are
/// read once, before the copy. `find` returns the memory of the process with the given number, or
/// fails with `ESRCH` or `EPERM`. It is called only if there are bytes to copy.
///
/// Copies bytes in the order of the arrays until one side ends or faults, or a fatal signal comes.
/// Returns the number of bytes copied by then. Beside Linux's errors, returns `ENOMEM` if no memory
/// was available for the first byte; the embedder may free some and call again. `EINTR`: the signal
/// came before the first byte.
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
    let mut left = MOST_BYTES;
    for range in local.iter_mut() {
        range.length = range.length.min(left);
        left -= range.length;
    }
    if left == MOST_BYTES {
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
        return Err(if partial.fault == FaultError::OutOfMemory {
            Errno::ENOMEM
        } else if partial.fault == FaultError::Interrupted {
            Errno::EINTR
        } else {
            Errno::EFAULT
        });
    }
    Ok(done)
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

/// The copies to make: a local address, a remote address and a length each. A copy ends with the
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
