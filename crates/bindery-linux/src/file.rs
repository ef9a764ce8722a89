//! Shared memory by descriptor: `memfd_create`, `ftruncate`, `fallocate`, seals, reading and
//! writing.

use linux_raw_sys::general as raw;

use super::{OpenFile, errno, raw as result};
use bindery::{
    Accounting, Errno, FileAccess, Growth, Memory, Object, Operation, Platform, Sealing, Seals,
};

/// Creates empty shared memory for `memfd_create(2)`.
///
/// Context: may sleep.
///
/// # Errors
/// `EINVAL` for unknown flags, and for `MFD_HUGETLB`; `ENOMEM`.
pub fn memfd_create<P: Platform>(memory: &Memory<P>, flags: u32) -> Result<Object<'_, P>, Errno> {
    let no_exec = flags & raw::MFD_NOEXEC_SEAL != 0;
    let known = raw::MFD_CLOEXEC | raw::MFD_ALLOW_SEALING | raw::MFD_NOEXEC_SEAL | raw::MFD_EXEC;
    if flags & !known != 0 || no_exec && flags & raw::MFD_EXEC != 0 {
        return Err(Errno::EINVAL);
    }
    let allowed = no_exec || flags & raw::MFD_ALLOW_SEALING != 0;
    let sealing = if allowed { Sealing::Allowed } else { Sealing::Forbidden };
    let object =
        memory.shared_memory(0, sealing, Accounting::PerPage).map_err(errno(Operation::Object))?;
    if no_exec {
        object.add_seals(Seals::EXECUTE).map_err(errno(Operation::Object))?;
    }
    Ok(object)
}

/// Creates empty secret memory for `memfd_secret(2)`.
///
/// Context: may sleep.
///
/// # Errors
/// `EINVAL` for flags other than `O_CLOEXEC`, which the embedder implements; `ENOMEM`.
pub fn memfd_secret<P: Platform>(memory: &Memory<P>, flags: u32) -> Result<Object<'_, P>, Errno> {
    if flags & !raw::O_CLOEXEC != 0 {
        return Err(Errno::EINVAL);
    }
    memory.secret_memory().map_err(errno(Operation::Object))
}

/// `ftruncate(2)`.
///
/// Context: may sleep.
pub fn ftruncate<P: Platform>(file: &OpenFile<'_, P>, length: i64) -> i64 {
    let Ok(length) = u64::try_from(length) else { return result(Err(Errno::EINVAL)) };
    if !file.access.contains(FileAccess::WRITE) {
        return result(Err(Errno::EINVAL));
    }
    result(file.object.set_size(length).map(|()| 0).map_err(errno(Operation::Object)))
}

/// `linux-raw-sys` lacks this flag.
const FALLOC_FL_WRITE_ZEROES: u32 = 0x80;

/// `fallocate(2)`: allocates pages, or punches a hole.
///
/// Context: may sleep.
pub fn fallocate<P: Platform>(file: &OpenFile<'_, P>, mode: i32, offset: i64, length: i64) -> i64 {
    let (Ok(offset), Ok(length)) = (u64::try_from(offset), u64::try_from(length)) else {
        return result(Err(Errno::EINVAL));
    };
    if length == 0 {
        return result(Err(Errno::EINVAL));
    }
    let mode = mode as u32;
    let hole = raw::FALLOC_FL_PUNCH_HOLE | raw::FALLOC_FL_KEEP_SIZE;
    let kept = mode & raw::FALLOC_FL_KEEP_SIZE != 0;
    let sensible = match mode & !raw::FALLOC_FL_KEEP_SIZE {
        0 | raw::FALLOC_FL_UNSHARE_RANGE | raw::FALLOC_FL_ZERO_RANGE => true,
        raw::FALLOC_FL_PUNCH_HOLE => kept,
        raw::FALLOC_FL_COLLAPSE_RANGE | raw::FALLOC_FL_INSERT_RANGE => !kept,
        FALLOC_FL_WRITE_ZEROES => !kept,
        _ => false,
    };
    if !sensible {
        return result(Err(Errno::EOPNOTSUPP));
    }
    if !file.access.contains(FileAccess::WRITE) {
        return result(Err(Errno::EBADF));
    }
    if offset.saturating_add(length) > i64::MAX as u64 {
        return result(Err(Errno::EFBIG));
    }
    // Valid modes that shared memory does not support.
    if mode != hole && mode & !raw::FALLOC_FL_KEEP_SIZE != 0 {
        return result(Err(Errno::EOPNOTSUPP));
    }
    let done = if mode == hole {
        file.object.punch_hole(offset, length)
    } else {
        let keeps = mode & raw::FALLOC_FL_KEEP_SIZE != 0;
        let growth = if keeps { Growth::Forbidden } else { Growth::Allowed };
        file.object.allocate(offset, length, growth)
    };
    result(done.map(|()| 0).map_err(errno(Operation::Object)))
}

/// `fcntl(2)` with `F_ADD_SEALS`.
///
/// Context: may sleep.
pub fn add_seals<P: Platform>(file: &OpenFile<'_, P>, seals: u32) -> i64 {
    if file.object.is_secret() {
        return result(Err(Errno::EINVAL));
    }
    if !file.access.contains(FileAccess::WRITE) {
        return result(Err(Errno::EPERM));
    }
    let mut seals = Seals::from_bits_retain(seals);
    if seals.contains(Seals::EXECUTE) && !file.object.seals().contains(Seals::EXECUTE) {
        // Sealing the executable bit of an executable memfd seals its content too, so that the file
        // cannot be both writable and executable.
        seals |= Seals::SHRINK | Seals::GROW | Seals::WRITE | Seals::FUTURE_WRITE;
    }
    result(file.object.add_seals(seals).map(|()| 0).map_err(errno(Operation::Object)))
}

/// `fcntl(2)` with `F_GET_SEALS`.
///
/// Context: any.
pub fn get_seals<P: Platform>(file: &OpenFile<'_, P>) -> i64 {
    if file.object.is_secret() {
        return result(Err(Errno::EINVAL));
    }
    i64::from(file.object.seals().bits())
}

/// `pread(2)` into a kernel buffer.
///
/// Context: may sleep.
pub fn pread<P: Platform>(file: &OpenFile<'_, P>, into: &mut [u8], offset: i64) -> i64 {
    let Ok(offset) = u64::try_from(offset) else { return result(Err(Errno::EINVAL)) };
    if !file.access.contains(FileAccess::READ) {
        return result(Err(Errno::EBADF));
    }
    result(file.object.read(offset, into).map(|n| n as u64).map_err(errno(Operation::Object)))
}

/// `pwrite(2)` from a kernel buffer.
///
/// Context: may sleep.
pub fn pwrite<P: Platform>(file: &OpenFile<'_, P>, from: &[u8], offset: i64) -> i64 {
    let Ok(offset) = u64::try_from(offset) else { return result(Err(Errno::EINVAL)) };
    if !file.access.contains(FileAccess::WRITE) {
        return result(Err(Errno::EBADF));
    }
    result(file.object.write(offset, from).map(|n| n as u64).map_err(errno(Operation::Object)))
}
