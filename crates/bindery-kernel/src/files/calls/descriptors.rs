//! Descriptors: duplicates, flags, `fcntl`, `ioctl`.

use alloc::sync::Arc;

use bindery_linux as linux;
use linux_raw_sys::general::{
    F_ADD_SEALS, F_DUPFD, F_DUPFD_CLOEXEC, F_GET_SEALS, F_GETFD, F_GETFL, F_GETLK, F_GETPIPE_SZ,
    F_SETFD, F_SETFL, F_SETLK, F_SETLKW, F_SETPIPE_SZ, F_UNLCK, FD_CLOEXEC, O_CLOEXEC, O_NONBLOCK,
};
use linux_raw_sys::ioctl::{FIOCLEX, FIONBIO, FIONCLEX, FIONREAD};

use crate::errno::{Errno, Outcome, from_raw};
use crate::{process, user};

use super::super::descriptor::at_exec;
use super::super::descriptor::{AtExec, Files, Inherited};
use super::super::pipe;

/// Flags of `close_range(2)`.
const CLOSE_RANGE_UNSHARE: u32 = 1 << 1;
const CLOSE_RANGE_CLOEXEC: u32 = 1 << 2;

/// `close_range(2)`.
pub(super) fn close_range(first: u64, last: u64, flags: u32) -> Outcome {
    let (first, last) = (first as u32, last as u32);
    if first > last || flags & !(CLOSE_RANGE_CLOEXEC | CLOSE_RANGE_UNSHARE) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & CLOSE_RANGE_UNSHARE != 0 {
        keep_own_descriptors()?;
    }
    let files = Files::current();
    for descriptor in files.open_descriptors() {
        if !(first..=last).contains(&(descriptor as u32)) {
            continue;
        }
        if flags & CLOSE_RANGE_CLOEXEC != 0 {
            files.set_at_exec(descriptor, AtExec::Closed)?;
        } else {
            files.close(descriptor)?;
        }
    }
    Ok(0)
}

/// `dup(2)`, and `fcntl(F_DUPFD)` with a minimum number.
pub(super) fn duplicate(descriptor: i32, first: u64, at_exec: AtExec) -> Outcome {
    let files = Files::current();
    Ok(files.insert_from(first, files.get(descriptor)?, at_exec)? as u64)
}

/// `dup3(2)`.
pub(super) fn duplicate_to(descriptor: i32, to: i32, flags: u32) -> Outcome {
    if descriptor == to || flags & !O_CLOEXEC != 0 {
        return Err(Errno::EINVAL);
    }
    let files = Files::current();
    files.set(to, files.get(descriptor)?, at_exec(flags))?;
    Ok(to as u64)
}

/// `fcntl(2)`.
pub(super) fn fcntl(descriptor: i32, command: u32, argument: u64) -> Outcome {
    let files = Files::current();
    let description = files.get(descriptor)?;
    match command {
        F_DUPFD | F_DUPFD_CLOEXEC => {
            let first = u64::try_from(argument as i32).map_err(|_| Errno::EINVAL)?;
            let closes = command == F_DUPFD_CLOEXEC;
            duplicate(descriptor, first, if closes { AtExec::Closed } else { AtExec::Kept })
        }
        F_GETFD => {
            Ok(if files.at_exec(descriptor)? == AtExec::Closed { FD_CLOEXEC } else { 0 }.into())
        }
        F_SETFD => {
            let closes = argument as u32 & FD_CLOEXEC != 0;
            let at_exec = if closes { AtExec::Closed } else { AtExec::Kept };
            files.set_at_exec(descriptor, at_exec).map(|()| 0)
        }
        F_GETFL => Ok(description.flags().into()),
        F_SETFL => {
            description.set_flags(argument as u32);
            Ok(0)
        }
        // Every lock is granted, because only one family of processes exists and no servers have to
        // be excluded.
        F_GETLK => user::write(argument, &(F_UNLCK as u16)).map(|()| 0),
        F_SETLK | F_SETLKW => Ok(0),
        F_GETPIPE_SZ | F_SETPIPE_SZ => match pipe::of(&*description.node) {
            Some(_) => Ok(pipe::CAPACITY as u64),
            None => Err(Errno::EBADF),
        },
        F_ADD_SEALS => from_raw(linux::add_seals(&description.open_file()?, argument as u32)),
        F_GET_SEALS => from_raw(linux::get_seals(&description.open_file()?)),
        _ => Err(Errno::EINVAL),
    }
}

/// `ioctl(2)`.
pub(super) fn ioctl(descriptor: i32, request: u32, argument: u64) -> Outcome {
    let description = Files::description(descriptor)?;
    match request {
        FIOCLEX => Files::current().set_at_exec(descriptor, AtExec::Closed).map(|()| 0),
        FIONCLEX => Files::current().set_at_exec(descriptor, AtExec::Kept).map(|()| 0),
        FIONBIO => {
            let on = user::read::<u32>(argument)? != 0;
            let others = description.flags() & !O_NONBLOCK;
            description.set_flags(if on { others | O_NONBLOCK } else { others });
            Ok(0)
        }
        FIONREAD => match pipe::of(&*description.node) {
            Some(pipe) => user::write(argument, &(pipe.waiting() as u32)).map(|()| 0),
            None => description.node.control(request, argument),
        },
        _ => description.node.control(request, argument),
    }
}

/// Unshares the running thread's descriptors (`close_range` with `CLOSE_RANGE_UNSHARE`).
///
/// # Errors
/// `ENOMEM`.
fn keep_own_descriptors() -> Result<(), Errno> {
    let files = Files::current().inherit(Inherited::Copied, Inherited::Shared)?;
    process::current().set_files(Some(Arc::new(files)));
    Ok(())
}
