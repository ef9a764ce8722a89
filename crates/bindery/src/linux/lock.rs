//! `mlock` and its relatives, `mincore`, `msync`.

use linux_raw_sys::general as raw;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use crate::error::{Errno, Error, Operation};
use crate::platform::Platform;
use crate::space::{AddressSpace, LockAll, LockPages, Residence, SyncFlags};

use super::{Outcome, errno};

pub(super) fn mlock<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: u64,
    length: u64,
    flags: i32,
) -> Outcome {
    let pages = match u32::try_from(flags) {
        Ok(0) => LockPages::Now,
        Ok(raw::MLOCK_ONFAULT) => LockPages::OnFault,
        _ => return Err(Errno::EINVAL),
    };
    space.mlock(VirtAddr(addr), length, pages).map(|()| 0).map_err(errno(Operation::Mlock))
}

pub(super) fn munlock<P: Platform>(space: &AddressSpace<'_, P>, addr: u64, length: u64) -> Outcome {
    space.munlock(VirtAddr(addr), length).map(|()| 0).map_err(errno(Operation::Mlock))
}

pub(super) fn mlockall<P: Platform>(space: &AddressSpace<'_, P>, flags: i32) -> Outcome {
    let bits = flags as u32;
    if bits & !(raw::MCL_CURRENT | raw::MCL_FUTURE | raw::MCL_ONFAULT) != 0 {
        return Err(Errno::EINVAL);
    }
    let mut what = LockAll::empty();
    what.set(LockAll::CURRENT, bits & raw::MCL_CURRENT != 0);
    what.set(LockAll::FUTURE, bits & raw::MCL_FUTURE != 0);
    what.set(LockAll::ON_FAULT, bits & raw::MCL_ONFAULT != 0);
    space.mlockall(what).map(|()| 0).map_err(errno(Operation::Mlock))
}

/// Pages answered in one go; the answers stand on the stack.
const PAGES_AT_ONCE: u64 = 512;

pub(super) fn mincore<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: u64,
    length: u64,
    vector: u64,
) -> Outcome {
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let limit = space.limit().0;
    let fits = |start: u64, length: u64| length <= limit && start <= limit - length;
    if !fits(addr, length) {
        return Err(Errno::ENOMEM);
    }
    let pages = length.div_ceil(PAGE_SIZE);
    if !fits(vector, pages) {
        return Err(Errno::EFAULT);
    }
    let mut done = 0;
    while done < pages {
        let mut answers = [0_u8; PAGES_AT_ONCE as usize];
        let mut known = 0;
        let start = VirtAddr(addr + (done << PAGE_SHIFT));
        // Mapping by mapping, as Linux: the answers themselves may lie in the next one.
        let end = space.mapping_end(start).unwrap_or(start);
        let left = ((end.0 - start.0) >> PAGE_SHIFT).max(1);
        let count = (pages - done).min(PAGES_AT_ONCE).min(left);
        let told = space.mincore(start, count << PAGE_SHIFT, |residence, pages| {
            let stretch = &mut answers[known..known + pages as usize];
            stretch.fill(u8::from(residence == Residence::Resident));
            known += pages as usize;
        });
        // What lies before a hole is reported.
        let to = VirtAddr(vector + done);
        space.write_user(to, &answers[..known]).map_err(|_| Errno::EFAULT)?;
        told.map_err(|error| match error {
            Error::OutOfRange { .. } => Errno::ENOMEM,
            other => other.errno(Operation::Mincore),
        })?;
        done += count;
    }
    Ok(0)
}

pub(super) fn msync<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: u64,
    length: u64,
    flags: i32,
) -> Outcome {
    let bits = flags as u32;
    if bits & !(raw::MS_ASYNC | raw::MS_INVALIDATE | raw::MS_SYNC) != 0 {
        return Err(Errno::EINVAL);
    }
    let mut what = SyncFlags::empty();
    what.set(SyncFlags::ASYNC, bits & raw::MS_ASYNC != 0);
    what.set(SyncFlags::INVALIDATE, bits & raw::MS_INVALIDATE != 0);
    what.set(SyncFlags::SYNC, bits & raw::MS_SYNC != 0);
    space.msync(VirtAddr(addr), length, what).map(|()| 0).map_err(errno(Operation::Msync))
}
