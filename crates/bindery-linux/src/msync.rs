//! `msync`.

use linux_raw_sys::general as raw;

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Errno, MappedWriteback, Operation, Platform, SyncFlags};

use super::{Outcome, Process, errno};

pub(super) fn msync<'m, P: Platform>(
    process: &impl Process<'m, P>,
    addr: u64,
    length: u64,
    flags: i32,
) -> Outcome {
    let flags = sync_flags(flags)?;
    let report = |file: &_, at| process.check_errors(file, at);
    let outcome = process.space().msync_with(VirtAddr(addr), length, flags, report);
    outcome.map(|()| 0).map_err(errno(Operation::Msync))
}

/// `msync`, up to its first wait.
pub(super) fn begin_msync<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    addr: u64,
    length: u64,
    flags: i32,
) -> Result<MappedWriteback<'m, P>, Errno> {
    let flags = sync_flags(flags)?;
    space.begin_msync(VirtAddr(addr), length, flags).map_err(errno(Operation::Msync))
}

fn sync_flags(flags: i32) -> Result<SyncFlags, Errno> {
    let bits = flags as u32;
    if bits & !(raw::MS_ASYNC | raw::MS_INVALIDATE | raw::MS_SYNC) != 0 {
        return Err(Errno::EINVAL);
    }
    let mut what = SyncFlags::empty();
    what.set(SyncFlags::ASYNC, bits & raw::MS_ASYNC != 0);
    what.set(SyncFlags::INVALIDATE, bits & raw::MS_INVALIDATE != 0);
    what.set(SyncFlags::SYNC, bits & raw::MS_SYNC != 0);
    Ok(what)
}
