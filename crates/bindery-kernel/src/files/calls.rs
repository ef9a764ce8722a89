//! The calls with a descriptor or a path, by number.

use alloc::sync::Arc;

use linux_raw_sys::general as nr;
use linux_raw_sys::general::{
    AT_FDCWD, EFD_SEMAPHORE, F_ADD_SEALS, F_DUPFD, F_DUPFD_CLOEXEC, F_GET_SEALS, F_GETFD, F_GETFL,
    F_GETLK, F_GETPIPE_SZ, F_SETFD, F_SETFL, F_SETLK, F_SETLKW, F_SETPIPE_SZ, F_UNLCK,
    FALLOC_FL_KEEP_SIZE, FD_CLOEXEC, MFD_CLOEXEC, O_CLOEXEC, O_NONBLOCK, O_RDWR,
};
use linux_raw_sys::ioctl::{FIOCLEX, FIONBIO, FIONCLEX, FIONREAD};
use linux_raw_sys::net::{AF_UNIX, SOCK_SEQPACKET, SOCK_STREAM};

use bindery::{FileAccess, linux};

use crate::errno::{Errno, Outcome, from_raw};
use crate::memory::memory;
use crate::platform::Machine;
use crate::process::Capability;
use crate::{process, user};

use super::descriptor::{AtExec, Description, Files};
use super::event::{EventCounter, ProcessHandle, Reading};
use super::manner::{Start, check_growth};
use super::memory::Regular;
use super::names::{self, at_exec};
use super::node::{Place, Special};
use super::path::{LastLink, user_place};
use super::poll::{self, Fraction, deadline};
use super::socket::{self, Boundaries};
use super::transfer::{self, Segments};
use super::{pipe, splice, status};

/// Flags of `close_range(2)`.
const CLOSE_RANGE_UNSHARE: u32 = 1 << 1;
const CLOSE_RANGE_CLOEXEC: u32 = 1 << 2;

/// Makes a call; `None` where the number is another's.
pub fn call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    let [a, b, c, d, e, f] = arguments;
    let descriptor = a as i32;
    let outcome = match number {
        nr::__NR_read | nr::__NR_write => {
            move_bytes(number, descriptor, Ok(Segments::one(b, c)), Ok(Start::Position), 0)
        }
        nr::__NR_readv | nr::__NR_writev => {
            move_bytes(number, descriptor, Segments::many(b, c), Ok(Start::Position), 0)
        }
        nr::__NR_pread64 | nr::__NR_pwrite64 => {
            move_bytes(number, descriptor, Ok(Segments::one(b, c)), Start::at(d as i64), 0)
        }
        nr::__NR_preadv | nr::__NR_pwritev => {
            move_bytes(number, descriptor, Segments::many(b, c), Start::at(d as i64), 0)
        }
        nr::__NR_preadv2 | nr::__NR_pwritev2 => {
            let start = Start::at_or_position(d as i64);
            move_bytes(number, descriptor, Segments::many(b, c), start, f as u32)
        }
        nr::__NR_lseek => transfer::seek(descriptor, b as i64, c as u32),
        nr::__NR_splice => splice::splice((descriptor, b), (c as i32, d), e, f as u32),
        nr::__NR_tee => splice::tee(descriptor, b as i32, c, d as u32),
        nr::__NR_vmsplice => splice::vmsplice(descriptor, b, c, d as u32),
        nr::__NR_sendfile => copy((b as i32, c), (descriptor, 0), d),
        nr::__NR_copy_file_range => copy((descriptor, b), (c as i32, d), e),
        nr::__NR_openat => names::open(descriptor, b, c as u32, d as u32),
        nr::__NR_close => process::current().files().close(descriptor).map(|()| 0),
        nr::__NR_close_range => close_range(a, b, c as u32),
        nr::__NR_dup => duplicate(descriptor, 0, AtExec::Kept),
        nr::__NR_dup3 => duplicate_to(descriptor, b as i32, c as u32),
        nr::__NR_fcntl => control(descriptor, b as u32, c),
        nr::__NR_flock => get(descriptor).map(|_| 0),
        nr::__NR_ioctl => device_control(descriptor, b as u32, c),
        nr::__NR_pipe2 => make_pipe(a, b as u32),
        nr::__NR_eventfd2 => event_counter(a as u32, b as u32),
        nr::__NR_memfd_create => make_memfd(a, b as u32),
        nr::__NR_memfd_secret => make_secret(a as u32),
        nr::__NR_ppoll => masked(d, || poll::poll(a, b, deadline(c, Fraction::Nanoseconds)?)),
        nr::__NR_pselect6 => select_masked(a, [b, c, d], e, f),
        nr::__NR_epoll_create1 => {
            let epoll = super::epoll::Epoll::describe(a as u32 & !O_CLOEXEC);
            epoll.and_then(|epoll| insert(epoll, at_exec(a as u32)))
        }
        nr::__NR_epoll_ctl => with_epoll(descriptor, |epoll| epoll.change(b as u32, c as i32, d)),
        nr::__NR_epoll_pwait => {
            masked(e, || with_epoll(descriptor, |epoll| epoll.wait(b, c as i32, milliseconds(d))))
        }
        nr::__NR_mkdirat => names::make_folder(descriptor, b, c as u32),
        nr::__NR_mknodat => names::make_node(descriptor, b, c as u32),
        nr::__NR_unlinkat => names::unlink(descriptor, b, c as u32),
        nr::__NR_renameat2 => names::rename((descriptor, b), (c as i32, d), e as u32),
        nr::__NR_linkat => names::link((descriptor, b), (c as i32, d), e as u32),
        nr::__NR_symlinkat => names::make_link(a, b as i32, c),
        nr::__NR_readlinkat => names::read_link(descriptor, b, c, d as i32),
        nr::__NR_getdents64 => names::read_folder(descriptor, b, c),
        nr::__NR_getcwd => names::current_folder(a, b),
        nr::__NR_chdir => names::change_folder(a),
        nr::__NR_fchdir => names::change_folder_to(descriptor),
        nr::__NR_newfstatat => status::stat_at(descriptor, b, c, d as u32),
        nr::__NR_fstat => status::stat_of(descriptor, b),
        nr::__NR_statx => status::stat_extended(descriptor, b, c as u32, e),
        nr::__NR_faccessat => status::access(descriptor, b, c as u32, 0),
        nr::__NR_faccessat2 => status::access(descriptor, b, c as u32, d as u32),
        nr::__NR_fchmodat => status::change_mode(descriptor, b, c as u32),
        nr::__NR_fchmod => status::change_mode_of(descriptor, b as u32),
        nr::__NR_fchownat => status::change_owner(descriptor, b, c as u32, d as u32, e as u32),
        nr::__NR_fchown => status::change_owner_of(descriptor, b as u32, c as u32),
        nr::__NR_utimensat => status::change_times(descriptor, b, c, d as u32),
        nr::__NR_statfs => status::statfs(a, b),
        nr::__NR_fstatfs => status::statfs_of(descriptor, b),
        nr::__NR_truncate => truncate(a, b as i64),
        nr::__NR_ftruncate => {
            with_object(descriptor, Pipes::Invalid, |file| resize(file, b as i64))
        }
        nr::__NR_fallocate => {
            let act = |file: &_| allocate(file, b as u32, c as i64, d as i64);
            with_object(descriptor, Pipes::CannotSeek, act)
        }
        nr::__NR_fsync | nr::__NR_fdatasync => synchronize(descriptor),
        nr::__NR_syncfs => get(descriptor).map(|_| 0),
        nr::__NR_fadvise64 | nr::__NR_readahead => get(descriptor).map(|_| 0),
        nr::__NR_sync => Ok(0),
        nr::__NR_umask => Ok(process::current().files().set_umask(a as u32).into()),
        nr::__NR_mount => mount(b, c),
        nr::__NR_umount2 => user_place(AT_FDCWD, a, LastLink::Followed).map(|_| 0),
        nr::__NR_chroot => Err(Errno::EPERM),
        nr::__NR_socketpair => make_socket_pair(a as u32, b as u32, c as u32, d),
        // There is no network.
        nr::__NR_socket => Err(Errno::EAFNOSUPPORT),
        _ => return old_call(number, arguments),
    };
    Some(outcome)
}

/// The calls that newer architectures have left out.
#[cfg(target_arch = "x86_64")]
fn old_call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    use linux_raw_sys::general::{AT_REMOVEDIR, AT_SYMLINK_NOFOLLOW, O_CREAT, O_TRUNC, O_WRONLY};
    let [a, b, c, d, e, _] = arguments;
    let outcome = match number {
        nr::__NR_open => names::open(AT_FDCWD, a, b as u32, c as u32),
        nr::__NR_creat => names::open(AT_FDCWD, a, O_CREAT | O_WRONLY | O_TRUNC, b as u32),
        nr::__NR_stat => status::stat_at(AT_FDCWD, a, b, 0),
        nr::__NR_lstat => status::stat_at(AT_FDCWD, a, b, AT_SYMLINK_NOFOLLOW),
        nr::__NR_access => status::access(AT_FDCWD, a, b as u32, 0),
        nr::__NR_pipe => make_pipe(a, 0),
        nr::__NR_dup2 if a == b => get(a as i32).map(|_| b),
        nr::__NR_dup2 => duplicate_to(a as i32, b as i32, 0),
        nr::__NR_rename => names::rename((AT_FDCWD, a), (AT_FDCWD, b), 0),
        nr::__NR_renameat => names::rename((a as i32, b), (c as i32, d), 0),
        nr::__NR_mkdir => names::make_folder(AT_FDCWD, a, b as u32),
        nr::__NR_mknod => names::make_node(AT_FDCWD, a, b as u32),
        nr::__NR_rmdir => names::unlink(AT_FDCWD, a, AT_REMOVEDIR),
        nr::__NR_unlink => names::unlink(AT_FDCWD, a, 0),
        nr::__NR_link => names::link((AT_FDCWD, a), (AT_FDCWD, b), 0),
        nr::__NR_symlink => names::make_link(a, AT_FDCWD, b),
        nr::__NR_readlink => names::read_link(AT_FDCWD, a, b, c as i32),
        nr::__NR_chmod => status::change_mode(AT_FDCWD, a, b as u32),
        nr::__NR_chown => status::change_owner(AT_FDCWD, a, b as u32, c as u32, 0),
        nr::__NR_lchown => {
            status::change_owner(AT_FDCWD, a, b as u32, c as u32, AT_SYMLINK_NOFOLLOW)
        }
        nr::__NR_poll => poll::poll(a, b, milliseconds(c)),
        nr::__NR_select => deadline(e, Fraction::Microseconds)
            .and_then(|deadline| poll::select(a, [b, c, d], deadline)),
        nr::__NR_eventfd => event_counter(a as u32, 0),
        nr::__NR_epoll_create if (a as i32) <= 0 => Err(Errno::EINVAL),
        nr::__NR_epoll_create => {
            super::epoll::Epoll::describe(0).and_then(|epoll| insert(epoll, AtExec::Kept))
        }
        nr::__NR_epoll_wait => {
            with_epoll(a as i32, |epoll| epoll.wait(b, c as i32, milliseconds(d)))
        }
        _ => return None,
    };
    Some(outcome)
}

#[cfg(not(target_arch = "x86_64"))]
fn old_call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    let [a, b, c, d, ..] = arguments;
    match number {
        nr::__NR_renameat => Some(names::rename((a as i32, b), (c as i32, d), 0)),
        _ => None,
    }
}

/// Reads or writes, as the call's number says.
fn move_bytes(
    number: u32,
    descriptor: i32,
    segments: Result<Segments, Errno>,
    start: Result<Start, Errno>,
    flags: u32,
) -> Outcome {
    let (start, segments) = (start?, segments?);
    match number {
        nr::__NR_read | nr::__NR_readv | nr::__NR_pread64 | nr::__NR_preadv | nr::__NR_preadv2 => {
            transfer::read(descriptor, &segments, start, flags)
        }
        _ => transfer::write(descriptor, &segments, start, flags),
    }
}

type OpenFile = linux::OpenFile<'static, Machine>;
type Opened = alloc::sync::Arc<Description>;

fn get(descriptor: i32) -> Result<Opened, Errno> {
    process::current().files().get(descriptor)
}

fn insert(description: Opened, at_exec: AtExec) -> Outcome {
    Ok(process::current().files().insert(description, at_exec)? as u64)
}

fn with_epoll(descriptor: i32, act: impl FnOnce(&super::epoll::Epoll) -> Outcome) -> Outcome {
    match get(descriptor)?.node.special() {
        Special::Epoll(epoll) => act(epoll),
        _ => Err(Errno::EINVAL),
    }
}

/// What a call that needs an object says of pipes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pipes {
    /// `EINVAL`.
    Invalid,
    /// `ESPIPE`.
    CannotSeek,
}

fn is_pipe(description: &Description) -> bool {
    matches!(description.node.special(), Special::Pipe(_))
}

/// `fsync(2)`: all contents are in memory anyway.
fn synchronize(descriptor: i32) -> Outcome {
    if is_pipe(&*get(descriptor)?) { Err(Errno::EINVAL) } else { Ok(0) }
}

fn with_object(descriptor: i32, pipes: Pipes, act: impl FnOnce(&OpenFile) -> Outcome) -> Outcome {
    let description = get(descriptor)?;
    if description.flags() & nr::O_PATH != 0 {
        return Err(Errno::EBADF);
    }
    match description.open_file() {
        Ok(file) => act(&file),
        Err(_) if pipes == Pipes::CannotSeek && is_pipe(&description) => Err(Errno::ESPIPE),
        Err(_) => Err(Errno::EINVAL),
    }
}

/// `ftruncate(2)`.
fn resize(file: &OpenFile, length: i64) -> Outcome {
    if length >= 0 && file.access.contains(FileAccess::WRITE) {
        check_growth(file.object.size(), length as u64)?;
    }
    from_raw(linux::ftruncate(file, length))
}

/// `fallocate(2)`.
fn allocate(file: &OpenFile, mode: u32, start: i64, length: i64) -> Outcome {
    let end = start.checked_add(length).filter(|_| start >= 0 && length > 0);
    if let Some(end) = end
        && mode & !FALLOC_FL_KEEP_SIZE == 0
        && file.access.contains(FileAccess::WRITE)
    {
        // As Linux: also where the size is to be kept.
        check_growth(file.object.size(), end as u64)?;
    }
    from_raw(linux::fallocate(file, mode as i32, start, length))
}

/// A timeout in milliseconds as a deadline; a negative one is none.
fn milliseconds(timeout: u64) -> Option<u64> {
    let timeout = u64::try_from(timeout as i32).ok()?;
    Some(process::deadline_of_call(timeout * 1_000_000))
}

/// Makes a call with the signal mask at `mask` in place of the thread's own, if there is one.
fn masked(mask: u64, call: impl FnOnce() -> Outcome) -> Outcome {
    if mask != 0 {
        process::signal::block_for_call(user::read(mask)?);
    }
    call()
}

/// `pselect6(2)`: the last argument points to a mask's address and size.
fn select_masked(count: u64, sets: [u64; 3], timeout: u64, mask: u64) -> Outcome {
    let mask = if mask == 0 { 0 } else { user::read::<[u64; 2]>(mask)?[0] };
    masked(mask, || poll::select(count, sets, deadline(timeout, Fraction::Nanoseconds)?))
}

fn copy(from: (i32, u64), to: (i32, u64), count: u64) -> Outcome {
    let (source, target) = (get(from.0)?, get(to.0)?);
    transfer::copy((&source, from.1), (&target, to.1), count)
}

fn close_range(first: u64, last: u64, flags: u32) -> Outcome {
    let (first, last) = (first as u32, last as u32);
    if first > last || flags & !(CLOSE_RANGE_CLOEXEC | CLOSE_RANGE_UNSHARE) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & CLOSE_RANGE_UNSHARE != 0 {
        process::keep_own_descriptors()?;
    }
    let files = process::current().files();
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

fn duplicate(descriptor: i32, first: u64, at_exec: AtExec) -> Outcome {
    let files = process::current().files();
    Ok(files.insert_from(first, files.get(descriptor)?, at_exec)? as u64)
}

fn duplicate_to(descriptor: i32, to: i32, flags: u32) -> Outcome {
    if descriptor == to || flags & !O_CLOEXEC != 0 {
        return Err(Errno::EINVAL);
    }
    let files = process::current().files();
    files.set(to, files.get(descriptor)?, at_exec(flags))?;
    Ok(to as u64)
}

fn control(descriptor: i32, command: u32, argument: u64) -> Outcome {
    let files = process::current().files();
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
        // One family of processes, no servers: locks are always free.
        F_GETLK => user::write(argument, &(F_UNLCK as u16)).map(|()| 0),
        F_SETLK | F_SETLKW => Ok(0),
        F_GETPIPE_SZ | F_SETPIPE_SZ => match description.node.special() {
            Special::Pipe(_) => Ok(pipe::CAPACITY as u64),
            _ => Err(Errno::EBADF),
        },
        F_ADD_SEALS => from_raw(linux::add_seals(&description.open_file()?, argument as u32)),
        F_GET_SEALS => from_raw(linux::get_seals(&description.open_file()?)),
        _ => Err(Errno::EINVAL),
    }
}

fn device_control(descriptor: i32, request: u32, argument: u64) -> Outcome {
    let files = process::current().files();
    let description = files.get(descriptor)?;
    match request {
        FIOCLEX => files.set_at_exec(descriptor, AtExec::Closed).map(|()| 0),
        FIONCLEX => files.set_at_exec(descriptor, AtExec::Kept).map(|()| 0),
        FIONBIO => {
            let on = user::read::<u32>(argument)? != 0;
            let others = description.flags() & !O_NONBLOCK;
            description.set_flags(if on { others | O_NONBLOCK } else { others });
            Ok(0)
        }
        FIONREAD => match description.node.special() {
            Special::Pipe(pipe) => user::write(argument, &(pipe.waiting() as u32)).map(|()| 0),
            _ => description.node.control(request, argument),
        },
        _ => description.node.control(request, argument),
    }
}

/// Closes what was just opened. Another thread may have done it first: that is no error.
fn close_again(files: &Files, descriptor: i32) {
    let _ = files.close(descriptor);
}

fn make_pipe(at: u64, flags: u32) -> Outcome {
    if flags & !(O_CLOEXEC | O_NONBLOCK | nr::O_DIRECT) != 0 {
        return Err(Errno::EINVAL);
    }
    insert_both(pipe::both_ends(flags & O_NONBLOCK)?, at_exec(flags), at)
}

fn make_socket_pair(family: u32, kind: u32, protocol: u32, at: u64) -> Outcome {
    if family != AF_UNIX {
        return Err(Errno::EAFNOSUPPORT);
    }
    // The flags beside a socket's type are those of `open`.
    const TYPE: u32 = 0xf;
    let flags = kind & !TYPE;
    if flags & !(O_CLOEXEC | O_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    let boundaries = match kind & TYPE {
        SOCK_STREAM => Boundaries::Lost,
        SOCK_SEQPACKET => Boundaries::Kept,
        _ => return Err(Errno::ESOCKTNOSUPPORT),
    };
    if protocol != 0 && protocol != AF_UNIX {
        return Err(Errno::EPROTONOSUPPORT);
    }
    insert_both(socket::pair(boundaries, flags & O_NONBLOCK)?, at_exec(flags), at)
}

/// Gives the running process two descriptors, and writes their numbers to `at`.
fn insert_both(both: [Arc<Description>; 2], at_exec: AtExec, at: u64) -> Outcome {
    let files = process::current().files();
    let [first, second] = both;
    let first = files.insert(first, at_exec)?;
    let both = files.insert(second, at_exec).and_then(|second| {
        user::write(at, &[first, second]).inspect_err(|_| close_again(&files, second))
    });
    both.inspect_err(|_| close_again(&files, first)).map(|()| 0)
}

fn event_counter(count: u32, flags: u32) -> Outcome {
    if flags & !(O_CLOEXEC | O_NONBLOCK | EFD_SEMAPHORE) != 0 {
        return Err(Errno::EINVAL);
    }
    let reading = if flags & EFD_SEMAPHORE != 0 { Reading::ByOne } else { Reading::Whole };
    insert(EventCounter::describe(count, reading, flags & O_NONBLOCK)?, at_exec(flags))
}

/// The longest name of a memfd (see memfd_create(2)).
const MEMFD_NAME_MAX: usize = 249;

fn make_memfd(name: u64, flags: u32) -> Outcome {
    let object = linux::memfd_create(memory(), flags)?;
    let name = user::text(name, MEMFD_NAME_MAX + 1);
    let name =
        name.map_err(|errno| if errno == Errno::ENAMETOOLONG { Errno::EINVAL } else { errno })?;
    let executable = flags & nr::MFD_NOEXEC_SEAL == 0;
    let file = Regular::of(object, if executable { 0o777 } else { 0o666 })?;
    let path = [&b"/memfd:"[..], &name, b" (deleted)"].concat();
    let place = Place::alone(file.clone(), &path);
    super::proc::remember(&place);
    let closes = flags & MFD_CLOEXEC != 0;
    insert(
        Description::new(place, file, O_RDWR)?,
        if closes { AtExec::Closed } else { AtExec::Kept },
    )
}

fn make_secret(flags: u32) -> Outcome {
    let object = linux::memfd_secret(memory(), flags)?;
    let file = Regular::of(object, 0o600)?;
    let place = Place::alone(file.clone(), b"/secretmem (deleted)");
    insert(Description::new(place, file, O_RDWR)?, at_exec(flags))
}

fn truncate(path: u64, length: i64) -> Outcome {
    let place = user_place(AT_FDCWD, path, LastLink::Followed)?;
    if place.node.kind() == super::node::Kind::Folder {
        return Err(Errno::EISDIR);
    }
    super::permission::check(&*place.node, nr::W_OK)?;
    let object = place.node.object().ok_or(Errno::EINVAL)?.clone();
    let access = super::node::file_access(O_RDWR);
    resize(&OpenFile { object, access }, length)
}

/// `mount(2)`: what programs want to have mounted at start is there already.
fn mount(target: u64, kind: u64) -> Outcome {
    process::credentials().demand(Capability::Admin)?;
    let kind = user::text(kind, 64)?;
    let place = user_place(AT_FDCWD, target, LastLink::Followed)?;
    if place.node.kind() != super::node::Kind::Folder {
        return Err(Errno::ENOTDIR);
    }
    match &kind[..] {
        b"proc" | b"sysfs" | b"devtmpfs" | b"tmpfs" => Ok(0),
        _ => Err(Errno::ENODEV),
    }
}

/// A descriptor for a process (`pidfd_open`).
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub fn insert_process(process: u32, flags: u32) -> Outcome {
    insert(ProcessHandle::describe(process, flags & O_NONBLOCK)?, AtExec::Closed)
}

/// The process that a descriptor names.
///
/// # Errors
/// `EBADF`.
pub fn process_behind(descriptor: i32) -> Result<u32, Errno> {
    get(descriptor)?.node.process().ok_or(Errno::EBADF)
}
