//! `madvise`, `process_madvise` and `process_mrelease`.

use core::ops::Deref;

use linux_raw_sys::general as raw;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, KeyRights};
use bindery::{AddressSpace, Advice, Errno, Error, Operation, Platform};

use super::vector::{IoRange, MOST_BYTES, MOST_RANGES};
use super::{Begun, Outcome, Process, errno, raw as raw_result};

fn advice(number: i32) -> Option<Advice> {
    Some(match u32::try_from(number).ok()? {
        raw::MADV_NORMAL => Advice::Normal,
        raw::MADV_RANDOM => Advice::Random,
        raw::MADV_SEQUENTIAL => Advice::Sequential,
        raw::MADV_WILLNEED => Advice::WillNeed,
        raw::MADV_DONTNEED => Advice::DontNeed,
        raw::MADV_DONTNEED_LOCKED => Advice::DontNeedLocked,
        raw::MADV_FREE => Advice::Free,
        raw::MADV_COLD => Advice::Cold,
        raw::MADV_PAGEOUT => Advice::PageOut,
        raw::MADV_REMOVE => Advice::Remove,
        raw::MADV_DONTFORK => Advice::DontFork,
        raw::MADV_DOFORK => Advice::DoFork,
        raw::MADV_WIPEONFORK => Advice::WipeOnFork,
        raw::MADV_KEEPONFORK => Advice::KeepOnFork,
        raw::MADV_DONTDUMP => Advice::DontDump,
        raw::MADV_DODUMP => Advice::DoDump,
        raw::MADV_MERGEABLE => Advice::Mergeable,
        raw::MADV_UNMERGEABLE => Advice::Unmergeable,
        raw::MADV_HUGEPAGE => Advice::Huge,
        raw::MADV_NOHUGEPAGE => Advice::NoHuge,
        raw::MADV_COLLAPSE => Advice::Collapse,
        raw::MADV_POPULATE_READ => Advice::PopulateRead,
        raw::MADV_POPULATE_WRITE => Advice::PopulateWrite,
        raw::MADV_GUARD_INSTALL => Advice::GuardInstall,
        raw::MADV_GUARD_REMOVE => Advice::GuardRemove,
        _ => return None,
    })
}

pub(super) fn madvise<'m, P: Platform>(
    process: &impl Process<'m, P>,
    addr: u64,
    length: u64,
    number: i32,
) -> Begun {
    let advice = advice(number).ok_or(Errno::EINVAL)?;
    let begun = process.space().begin_madvise(VirtAddr(addr), length, advice, process.key_rights());
    begun.map(|populate| (0, populate)).map_err(errno(Operation::Madvise))
}

/// `process_madvise(2)`: an array of `struct iovec` in the caller's memory lists the ranges.
pub(super) fn process_madvise<'m, P: Platform>(
    process: &impl Process<'m, P>,
    [pidfd, vector, count, number, flags, _]: [u64; 6],
) -> Outcome {
    if flags as u32 != 0 || count > MOST_RANGES {
        return Err(Errno::EINVAL);
    }
    let range_at = |index| {
        let range = IoRange::read(process.space(), vector, index)?;
        Ok((range.start, range.length))
    };
    // Validates the whole array first.
    let (mut left, mut skewed, mut beyond) = (false, false, false);
    for index in 0..count {
        let (addr, length) = range_at(index)?;
        skewed |= index == 0 && length == 0 && !addr.is_multiple_of(PAGE_SIZE);
        if length > i64::MAX as u64 {
            return Err(Errno::EINVAL);
        }
        left |= length > 0;
        beyond |= addr.saturating_add(length) > P::Arch::USER_END;
    }
    if beyond {
        return Err(Errno::EFAULT);
    }
    let target = process.process(pidfd as i32).ok_or(Errno::EBADF)?;
    // Linux 7.2 rejects unknown advice even for an empty array.
    let advice = advice(number as i32).ok_or(Errno::EINVAL)?;
    let own = core::ptr::eq(target, process.space());
    if !own {
        if !advice.is_for_others() {
            return Err(Errno::EINVAL);
        }
        if !process.may_advise_others() {
            return Err(Errno::EPERM);
        }
    }
    if left && skewed {
        // Linux checks the alignment of the first range even if that range is empty.
        return Err(Errno::EINVAL);
    }
    let rights = if own { process.key_rights() } else { KeyRights::ALL };
    let mut done = 0;
    for index in 0..count {
        let (addr, length) = range_at(index)?;
        let length = length.min(MOST_BYTES - done);
        if length == 0 {
            continue;
        }
        match target.madvise_with_keys(VirtAddr(addr), length, advice, rights) {
            Ok(()) => done += length,
            Err(error) if done == 0 => return Err(error.errno(Operation::Madvise)),
            // The result is the length advised so far.
            Err(_) => break,
        }
    }
    Ok(done)
}

/// `process_mrelease(2)`: frees the memory of a process that is about to exit. `find` returns the
/// memory of the process behind the pidfd. It fails with `EBADF` if the descriptor is no pidfd,
/// with `ESRCH` if the process has released its memory, and with `EINVAL` if the process, or
/// another one with the same memory, is not about to exit. Returns 0 or `-errno`.
///
/// Context: may sleep. Complexity: as [`AddressSpace::reap`].
pub fn process_mrelease<'m, P: Platform, S: Deref<Target = AddressSpace<'m, P>>>(
    flags: u32,
    find: impl FnOnce() -> Result<S, Errno>,
) -> i64 {
    let release = || {
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        find()?.reap().map(|()| 0).map_err(|error| {
            let short = error == Error::OutOfMemory;
            if short { Errno::EAGAIN } else { error.errno(Operation::Madvise) }
        })
    };
    raw_result(release())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_and_numbers_correspond() {
        let named: std::vec::Vec<_> = (0..i32::from(u16::MAX)).filter_map(advice).collect();
        assert_eq!(named.len(), Advice::ALL.len());
        assert!(Advice::ALL.iter().all(|advice| named.contains(advice)));
    }
}
