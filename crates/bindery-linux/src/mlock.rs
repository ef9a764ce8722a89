//! `mlock` and its relatives.

use linux_raw_sys::general as raw;

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Errno, LockAll, LockPages, Operation, Platform};

use super::{Begun, Outcome, errno};

pub(super) fn mlock<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: u64,
    length: u64,
    flags: i32,
) -> Begun {
    let pages = match u32::try_from(flags) {
        Ok(0) => LockPages::Now,
        Ok(raw::MLOCK_ONFAULT) => LockPages::OnFault,
        _ => return Err(Errno::EINVAL),
    };
    let begun = space.begin_mlock(VirtAddr(addr), length, pages);
    begun.map(|populate| (0, populate)).map_err(errno(Operation::Mlock))
}

pub(super) fn munlock<P: Platform>(space: &AddressSpace<'_, P>, addr: u64, length: u64) -> Outcome {
    space.munlock(VirtAddr(addr), length).map(|()| 0).map_err(errno(Operation::Mlock))
}

pub(super) fn mlockall<P: Platform>(space: &AddressSpace<'_, P>, flags: i32) -> Begun {
    let bits = flags as u32;
    if bits & !(raw::MCL_CURRENT | raw::MCL_FUTURE | raw::MCL_ONFAULT) != 0 {
        return Err(Errno::EINVAL);
    }
    let mut what = LockAll::empty();
    what.set(LockAll::CURRENT, bits & raw::MCL_CURRENT != 0);
    what.set(LockAll::FUTURE, bits & raw::MCL_FUTURE != 0);
    what.set(LockAll::ON_FAULT, bits & raw::MCL_ONFAULT != 0);
    space.begin_mlockall(what).map(|populate| (0, populate)).map_err(errno(Operation::Mlock))
}
