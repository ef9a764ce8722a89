//! `truncate`, `fallocate`, `fsync`, `sync_file_range` and `posix_fadvise`.

use bindery::{FileAccess, ReadPattern};
use bindery_linux as linux;
use linux_raw_sys::general as nr;
use linux_raw_sys::general::{AT_FDCWD, FALLOC_FL_KEEP_SIZE, O_RDWR};

use crate::errno::{Errno, Outcome, from_raw};
use crate::platform::Machine;

use super::super::attributes::Kind;
use super::super::descriptor::Description;
use super::super::manner::check_growth;
use super::super::node::{Advice, file_access};
use super::super::path::{LastLink, user_place};
use super::super::{permission, pipe};
use super::get;

type OpenFile = linux::OpenFile<'static, Machine>;

/// The errno of a call that needs an object, for a pipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pipes {
    /// `EINVAL`.
    Invalid,
    /// `ESPIPE`.
    CannotSeek,
}

fn is_pipe(description: &Description) -> bool {
    pipe::of(&*description.node).is_some()
}

/// `fsync(2)`. For a file in memory, which most are, it has nothing to do.
pub(super) fn synchronize(descriptor: i32) -> Outcome {
    let description = get(descriptor)?;
    if is_pipe(&description) {
        Err(Errno::EINVAL)
    } else {
        description.node.synchronize().map(|()| 0)
    }
}

/// `posix_fadvise(2)`. Files of the disk follow all advice but `NOREUSE`, others accept it.
pub(super) fn advise(descriptor: i32, start: i64, length: i64, advice: u32) -> Outcome {
    let description = get(descriptor)?;
    if is_pipe(&description) {
        return Err(Errno::ESPIPE);
    }
    let advice = match advice {
        nr::POSIX_FADV_WILLNEED => Some(Advice::WillNeed),
        nr::POSIX_FADV_DONTNEED => Some(Advice::DontNeed),
        nr::POSIX_FADV_NORMAL => Some(Advice::Order(ReadPattern::Unknown)),
        nr::POSIX_FADV_RANDOM => Some(Advice::Order(ReadPattern::Random)),
        nr::POSIX_FADV_SEQUENTIAL => Some(Advice::Order(ReadPattern::Sequential)),
        nr::POSIX_FADV_NOREUSE => None,
        _ => return Err(Errno::EINVAL),
    };
    let length = u64::try_from(length).map_err(|_| Errno::EINVAL)?;
    // To the end of the file.
    let length = if length == 0 { u64::MAX } else { length };
    match (advice, u64::try_from(start)) {
        (Some(advice), Ok(start)) => description.node.advise(start, length, advice),
        (Some(advice @ Advice::Order(_)), Err(_)) => description.node.advise(0, length, advice),
        // No pages lie before the beginning of the file.
        (_, Err(_)) | (None, _) => {}
    }
    Ok(0)
}

/// `sync_file_range(2)`: as [`synchronize`].
pub(super) fn synchronize_range(descriptor: i32, start: i64, length: i64, flags: u32) -> Outcome {
    const KNOWN: u32 = nr::SYNC_FILE_RANGE_WAIT_BEFORE
        | nr::SYNC_FILE_RANGE_WRITE
        | nr::SYNC_FILE_RANGE_WAIT_AFTER;
    let description = get(descriptor)?;
    if description.flags() & nr::O_PATH != 0 {
        return Err(Errno::EBADF);
    }
    let end = start.checked_add(length).filter(|end| start >= 0 && *end >= start);
    if flags & !KNOWN != 0 || end.is_none() {
        return Err(Errno::EINVAL);
    }
    match description.node.kind() {
        Kind::Regular | Kind::Directory | Kind::Block => Ok(0),
        Kind::Link | Kind::Device | Kind::Pipe | Kind::Socket | Kind::Anonymous => {
            Err(Errno::ESPIPE)
        }
    }
}

/// Calls `act` with the object of a file whose contents it changes.
fn with_object(descriptor: i32, pipes: Pipes, act: impl FnOnce(&OpenFile) -> Outcome) -> Outcome {
    let description = get(descriptor)?;
    if description.flags() & nr::O_PATH != 0 {
        return Err(Errno::EBADF);
    }
    match description.open_file() {
        Ok(file) => {
            if file.access.contains(FileAccess::WRITE) {
                permission::drop_set_ids(&*description.node)?;
            }
            act(&file)
        }
        Err(_) if pipes == Pipes::CannotSeek && is_pipe(&description) => Err(Errno::ESPIPE),
        Err(_) => Err(Errno::EINVAL),
    }
}

fn resize(file: &OpenFile, length: i64) -> Outcome {
    if length >= 0 && file.access.contains(FileAccess::WRITE) {
        check_growth(file.object.size(), length as u64)?;
    }
    from_raw(linux::ftruncate(file, length))
}

fn allocate(file: &OpenFile, mode: u32, start: i64, length: i64) -> Outcome {
    let end = start.checked_add(length).filter(|_| start >= 0 && length > 0);
    if let Some(end) = end
        && mode & !FALLOC_FL_KEEP_SIZE == 0
        && file.access.contains(FileAccess::WRITE)
    {
        // As on Linux, the limit applies even if the size does not change.
        check_growth(file.object.size(), end as u64)?;
    }
    from_raw(linux::fallocate(file, mode as i32, start, length))
}

/// `ftruncate(2)`.
pub(super) fn ftruncate(descriptor: i32, length: i64) -> Outcome {
    with_object(descriptor, Pipes::Invalid, |file| resize(file, length))
}

/// `fallocate(2)`.
pub(super) fn fallocate(descriptor: i32, mode: u32, start: i64, length: i64) -> Outcome {
    with_object(descriptor, Pipes::CannotSeek, |file| allocate(file, mode, start, length))
}

/// `truncate(2)`.
pub(super) fn truncate(path: u64, length: i64) -> Outcome {
    let place = user_place(AT_FDCWD, path, LastLink::Followed)?;
    if place.node.kind() == Kind::Directory {
        return Err(Errno::EISDIR);
    }
    permission::check(&*place.node, nr::W_OK)?;
    let opened = if place.node.object().is_none() { place.node.open(O_RDWR)? } else { None };
    let node = opened.as_ref().unwrap_or(&place.node);
    let object = node.object().ok_or(Errno::EINVAL)?.clone();
    let access = file_access(O_RDWR);
    permission::drop_set_ids(&*place.node)?;
    resize(&OpenFile { object, access }, length)
}
