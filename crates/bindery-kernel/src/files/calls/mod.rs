//! The system calls with a descriptor or a path, by number.
//!
//! | file | what |
//! |---|---|
//! | `create` | pipes, sockets, event counters, memfds, pidfds |
//! | `descriptors` | duplicates, flags, `fcntl`, `ioctl` |
//! | `sizes` | `truncate`, `fallocate`, `fsync`, `sync_file_range` |
//! | `legacy` | calls that only x86-64 has, each replaced by a newer one |
//!
//! The other calls are in the modules above.

mod create;
mod descriptors;
#[cfg(target_arch = "x86_64")]
mod legacy;
mod sizes;

use linux_raw_sys::general as nr;
use linux_raw_sys::general::{AT_FDCWD, O_CLOEXEC};

use crate::errno::{Errno, Outcome};
use crate::process::Capability;
use crate::{process, user};

use super::attributes::Kind;
use super::descriptor::{AtExec, Description, Files, at_exec};
use super::epoll::{self, Epoll};
use super::manner::Start;
use super::names;
use super::path::{LastLink, user_place};
use super::poll::{self, Fraction};
use super::segments::Segments;
use super::transfer::{self, Copying};
use super::{disk, splice, status, swap, userfault};

/// Makes a call; `None` if the number belongs to another one.
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
        nr::__NR_sendfile => copy(Copying::Send, (b as i32, c), (descriptor, 0), d),
        nr::__NR_copy_file_range if f as u32 != 0 => Err(Errno::EINVAL),
        nr::__NR_copy_file_range => copy(Copying::Range, (descriptor, b), (c as i32, d), e),
        nr::__NR_openat => names::open(descriptor, b, c as u32, d as u32),
        nr::__NR_close => Files::current().close(descriptor).map(|()| 0),
        nr::__NR_close_range => descriptors::close_range(a, b, c as u32),
        nr::__NR_dup => descriptors::duplicate(descriptor, 0, AtExec::Kept),
        nr::__NR_dup3 => descriptors::duplicate_to(descriptor, b as i32, c as u32),
        nr::__NR_fcntl => descriptors::fcntl(descriptor, b as u32, c),
        nr::__NR_flock => get(descriptor).map(|_| 0),
        nr::__NR_ioctl => descriptors::ioctl(descriptor, b as u32, c),
        nr::__NR_pipe2 => create::pipe(a, b as u32),
        nr::__NR_userfaultfd => userfault::call(a as u32),
        nr::__NR_eventfd2 => create::event_counter(a as u32, b as u32),
        nr::__NR_memfd_create => create::memfd(a, b as u32),
        nr::__NR_memfd_secret => create::secret(a as u32),
        nr::__NR_ppoll => poll::timed(c, Fraction::Nanoseconds, |deadline| {
            masked([d, e], || poll::poll(a, b, deadline))
        }),
        nr::__NR_pselect6 => select_masked(a, [b, c, d], e, f),
        nr::__NR_epoll_create1 => {
            let epoll = Epoll::describe(a as u32 & !O_CLOEXEC);
            epoll.and_then(|epoll| insert(epoll, at_exec(a as u32)))
        }
        nr::__NR_epoll_ctl => with_epoll(descriptor, |epoll| epoll.change(b as u32, c as i32, d)),
        nr::__NR_epoll_pwait => masked([e, f], || {
            with_epoll(descriptor, |epoll| epoll.wait(b, c as i32, milliseconds(d)))
        }),
        nr::__NR_truncate => sizes::truncate(a, b as i64),
        nr::__NR_ftruncate => sizes::ftruncate(descriptor, b as i64),
        nr::__NR_fallocate => sizes::fallocate(descriptor, b as u32, c as i64, d as i64),
        nr::__NR_fsync | nr::__NR_fdatasync => sizes::synchronize(descriptor),
        nr::__NR_sync_file_range => {
            sizes::synchronize_range(descriptor, b as i64, c as i64, d as u32)
        }
        nr::__NR_syncfs => get(descriptor).and_then(|_| disk::synchronize().map(|()| 0)),
        nr::__NR_fadvise64 => sizes::advise(descriptor, b as i64, c as i64, d as u32),
        nr::__NR_readahead => {
            sizes::advise(descriptor, b as i64, c as i64, nr::POSIX_FADV_WILLNEED)
        }
        // `sync(2)` reports no errors; `fsync(2)` does.
        nr::__NR_sync => disk::synchronize().map_or(Ok(0), |()| Ok(0)),
        nr::__NR_umask => Ok(Files::current().set_umask(a as u32).into()),
        nr::__NR_mount => mount(b, c),
        nr::__NR_umount2 => user_place(AT_FDCWD, a, LastLink::Followed).map(|_| 0),
        nr::__NR_swapon => swap::turn_on(a, b as u32),
        nr::__NR_swapoff => swap::turn_off(a),
        nr::__NR_chroot => Err(Errno::EPERM),
        nr::__NR_socketpair => create::socket_pair(a as u32, b as u32, c as u32, d),
        // There is no network.
        nr::__NR_socket => Err(Errno::EAFNOSUPPORT),
        _ => return name_call(number, arguments),
    };
    Some(outcome)
}

/// Makes a call about names, or about the files that they name.
fn name_call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    let [a, b, c, d, e, _] = arguments;
    let descriptor = a as i32;
    let outcome = match number {
        nr::__NR_mkdirat => names::make_directory(descriptor, b, c as u32),
        nr::__NR_mknodat => names::make_node(descriptor, b, c as u32),
        nr::__NR_unlinkat => names::unlink(descriptor, b, c as u32),
        nr::__NR_renameat2 => names::rename((descriptor, b), (c as i32, d), e as u32),
        nr::__NR_linkat => names::link((descriptor, b), (c as i32, d), e as u32),
        nr::__NR_symlinkat => names::make_link(a, b as i32, c),
        nr::__NR_readlinkat => names::read_link(descriptor, b, c, d as i32),
        nr::__NR_getdents64 => names::read_directory(descriptor, b, c),
        nr::__NR_getcwd => names::current_directory(a, b),
        nr::__NR_chdir => names::change_directory(a),
        nr::__NR_fchdir => names::change_directory_to(descriptor),
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
        nr::__NR_renameat => names::rename((descriptor, b), (c as i32, d), 0),
        _ => return legacy_call(number, arguments),
    };
    Some(outcome)
}

#[cfg(target_arch = "x86_64")]
use legacy::call as legacy_call;

#[cfg(not(target_arch = "x86_64"))]
fn legacy_call(_number: u32, _arguments: [u64; 6]) -> Option<Outcome> {
    None
}

/// Reads or writes, depending on the call's number.
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

type Opened = alloc::sync::Arc<Description>;

fn get(descriptor: i32) -> Result<Opened, Errno> {
    Files::description(descriptor)
}

fn insert(description: Opened, at_exec: AtExec) -> Outcome {
    Ok(Files::current().insert(description, at_exec)? as u64)
}

fn with_epoll(descriptor: i32, act: impl FnOnce(&Epoll) -> Outcome) -> Outcome {
    act(epoll::of(&*get(descriptor)?.node).ok_or(Errno::EINVAL)?)
}

/// The deadline of a timeout in milliseconds; a negative one means none.
fn milliseconds(timeout: u64) -> Option<u64> {
    let timeout = u64::try_from(timeout as i32).ok()?;
    Some(process::deadline_of_call(timeout * 1_000_000))
}

/// Makes a call with the signal mask at this address, if given, instead of the thread's own.
///
/// # Errors
/// `EINVAL` if the mask has another size than 8 bytes; `EFAULT`; those of `call`.
fn masked([at, size]: [u64; 2], call: impl FnOnce() -> Outcome) -> Outcome {
    if at == 0 {
        return call();
    }
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    process::signal::block_for_call(user::read(at)?);
    let outcome = call();
    // After an interruption the signal is delivered first, although the thread's own mask may block
    // it. Otherwise such a signal stays pending.
    if !matches!(outcome, Err(Errno::RESTART_WITHOUT_HANDLER | Errno::EINTR)) {
        process::signal::end_block_for_call();
    }
    outcome
}

/// `pselect6(2)`: the last argument points to a mask's address and size.
fn select_masked(count: u64, sets: [u64; 3], timeout: u64, mask: u64) -> Outcome {
    let mask = if mask == 0 { [0; 2] } else { user::read(mask)? };
    poll::timed(timeout, Fraction::Nanoseconds, |deadline| {
        masked(mask, || poll::select(count, sets, deadline))
    })
}

fn copy(call: Copying, from: (i32, u64), to: (i32, u64), count: u64) -> Outcome {
    let (source, target) = (get(from.0)?, get(to.0)?);
    transfer::copy(call, (&source, from.1), (&target, to.1), count)
}

/// `mount(2)`: the file systems that programs mount at start are already mounted.
fn mount(target: u64, kind: u64) -> Outcome {
    process::credentials().demand(Capability::Admin)?;
    let kind = user::text(kind, 64)?;
    let place = user_place(AT_FDCWD, target, LastLink::Followed)?;
    if place.node.kind() != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    match &kind[..] {
        b"proc" | b"sysfs" | b"devtmpfs" | b"tmpfs" => Ok(0),
        _ => Err(Errno::ENODEV),
    }
}

pub use create::{insert_process, process_behind, process_to_wait_for};
