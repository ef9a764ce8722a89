//! `msync`.

use linux_raw_sys::general as raw;

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Errno, Operation, Platform, SyncFlags};

use super::{Outcome, errno};

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
