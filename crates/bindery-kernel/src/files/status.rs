//! Attributes of files: `stat` and its relatives, `statfs`, permissions, times.

use alloc::sync::Arc;

use linux_raw_sys::general::{
    AT_EACCESS, AT_EMPTY_PATH, AT_FDCWD, AT_SYMLINK_NOFOLLOW, R_OK, STATX_BASIC_STATS, UTIME_NOW,
    UTIME_OMIT, W_OK, X_OK, stat, statfs64, statx, statx_timestamp,
};

use crate::errno::{Errno, Outcome};
use crate::{process, time, user};

use super::attributes::{Attributes, Change};
use super::descriptor::Files;
use super::disk;
use super::memory::size_and_free;
use super::node::{Node, Place};
use super::path::{self, LastLink};
use super::permission;

/// The device number of the file system in memory, and of generated files.
const DEVICE: u64 = 1;

/// The preferred size of a transfer, in bytes.
const BLOCK_SIZE: u32 = 4096;

/// The place that a descriptor and a path name together, as in the `*at` calls.
fn place_at(directory: i32, path: u64, flags: u32) -> Result<Arc<Place>, Errno> {
    let text =
        if path == 0 && flags & AT_EMPTY_PATH != 0 { [].into() } else { path::from_user(path)? };
    let files = Files::current();
    if text.is_empty() && flags & AT_EMPTY_PATH != 0 {
        return if directory == AT_FDCWD {
            Ok(files.directory())
        } else {
            Ok(files.get(directory)?.place.clone())
        };
    }
    let followed = flags & AT_SYMLINK_NOFOLLOW == 0;
    let last = if followed { LastLink::Followed } else { LastLink::Taken };
    path::look_up(path::beginning(&files, directory, &text)?, &text, last)
}

fn number((major, minor): (u32, u32)) -> u64 {
    let (major, minor) = (u64::from(major), u64::from(minor));
    (minor & 0xff) | (major & 0xfff) << 8 | (minor & !0xff) << 12 | (major & !0xfff) << 32
}

fn split(nanoseconds: u64) -> (u64, u64) {
    (nanoseconds / time::SECOND, nanoseconds % time::SECOND)
}

fn write_stat(at: u64, node: &dyn Node) -> Outcome {
    let attributes = node.attributes();
    // SAFETY: a structure of numbers, for which zeroes are values.
    let mut out: stat = unsafe { core::mem::zeroed() };
    out.st_dev = DEVICE as _;
    out.st_ino = attributes.number as _;
    out.st_nlink = attributes.links as _;
    out.st_mode = node.kind().mode() | attributes.mode;
    (out.st_uid, out.st_gid) = attributes.owner;
    out.st_rdev = number(attributes.device) as _;
    out.st_size = attributes.size as _;
    out.st_blksize = BLOCK_SIZE as _;
    out.st_blocks = attributes.blocks as _;
    let [accessed, modified, changed] = attributes.times.map(split);
    (out.st_atime, out.st_atime_nsec) = (accessed.0 as _, accessed.1 as _);
    (out.st_mtime, out.st_mtime_nsec) = (modified.0 as _, modified.1 as _);
    (out.st_ctime, out.st_ctime_nsec) = (changed.0 as _, changed.1 as _);
    user::write(at, &out)?;
    Ok(0)
}

/// `newfstatat(2)`.
pub fn stat_at(directory: i32, path: u64, at: u64, flags: u32) -> Outcome {
    const NO_AUTOMOUNT: u32 = 0x800;
    if flags & !(AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW | NO_AUTOMOUNT) != 0 {
        return Err(Errno::EINVAL);
    }
    write_stat(at, &*place_at(directory, path, flags)?.node)
}

/// `fstat(2)`.
pub fn stat_of(descriptor: i32, at: u64) -> Outcome {
    write_stat(at, &*Files::description(descriptor)?.node)
}

/// `statx(2)`: the basic attributes, whatever the request.
pub fn stat_extended(directory: i32, path: u64, flags: u32, at: u64) -> Outcome {
    let place = place_at(directory, path, flags)?;
    let Attributes { number, mode, links, owner, size, blocks, times, device } =
        place.node.attributes();
    let moment = |at: u64| {
        let (seconds, fraction) = split(at);
        statx_timestamp { tv_sec: seconds as i64, tv_nsec: fraction as u32, __reserved: 0 }
    };
    // SAFETY: a structure of numbers, for which zeroes are values.
    let mut out: statx = unsafe { core::mem::zeroed() };
    out.stx_mask = STATX_BASIC_STATS;
    out.stx_blksize = BLOCK_SIZE;
    out.stx_nlink = links;
    (out.stx_uid, out.stx_gid) = owner;
    out.stx_mode = (place.node.kind().mode() | mode) as u16;
    out.stx_ino = number;
    out.stx_size = size;
    out.stx_blocks = blocks;
    out.stx_atime = moment(times[0]);
    out.stx_mtime = moment(times[1]);
    out.stx_ctime = moment(times[2]);
    (out.stx_rdev_major, out.stx_rdev_minor) = device;
    out.stx_dev_minor = DEVICE as u32;
    user::write(at, &out)?;
    Ok(0)
}

/// `faccessat2(2)`: checks the rights of the real user, or with `AT_EACCESS` those of the effective
/// one.
pub fn access(directory: i32, path: u64, wanted: u32, flags: u32) -> Outcome {
    if wanted & !(R_OK | W_OK | X_OK) != 0
        || flags & !(AT_EACCESS | AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0
    {
        return Err(Errno::EINVAL);
    }
    let judge = || permission::check(&*place_at(directory, path, flags)?.node, wanted).map(|()| 0);
    if flags & AT_EACCESS != 0 {
        return judge();
    }
    process::acting_as(process::credentials().with_real_ids(), judge)
}

fn set_mode(node: &dyn Node, mode: u32) -> Outcome {
    permission::check_owner(node)?;
    node.change(&Change { mode: Some(mode & 0o7777), ..Change::default() }).map(|()| 0)
}

/// `fchmodat(2)`.
pub fn change_mode(directory: i32, path: u64, mode: u32) -> Outcome {
    set_mode(&*place_at(directory, path, 0)?.node, mode)
}

/// `fchmod(2)`.
pub fn change_mode_of(descriptor: i32, mode: u32) -> Outcome {
    set_mode(&*Files::description(descriptor)?.node, mode)
}

fn set_owners(node: &dyn Node, owner: u32, group: u32) -> Outcome {
    let given = |id: u32| Some(id).filter(|id| *id != u32::MAX);
    permission::give(node, given(owner), given(group)).map(|()| 0)
}

/// `fchownat(2)`.
pub fn change_owner(directory: i32, path: u64, owner: u32, group: u32, flags: u32) -> Outcome {
    set_owners(&*place_at(directory, path, flags)?.node, owner, group)
}

/// `fchown(2)`.
pub fn change_owner_of(descriptor: i32, owner: u32, group: u32) -> Outcome {
    set_owners(&*Files::description(descriptor)?.node, owner, group)
}

/// `utimensat(2)`.
pub fn change_times(directory: i32, path: u64, times: u64, flags: u32) -> Outcome {
    let moment = |[seconds, fraction]: [i64; 2]| match fraction {
        fraction if fraction == UTIME_OMIT.into() => Ok(None),
        fraction if fraction == UTIME_NOW.into() => Ok(Some(time::real_time())),
        0..=999_999_999 => {
            let seconds = u64::try_from(seconds).map_err(|_| Errno::EINVAL)?;
            Ok(Some(seconds.saturating_mul(time::SECOND).saturating_add(fraction as u64)))
        }
        _ => Err(Errno::EINVAL),
    };
    let new = if times == 0 {
        [Some(time::real_time()); 2]
    } else {
        let [accessed, modified]: [[i64; 2]; 2] = user::read(times)?;
        [moment(accessed)?, moment(modified)?]
    };
    let is_now = times == 0;
    let change = Change { times: new, ..Change::default() };
    let set = |node: &dyn Node| {
        if !permission::is_owner(node) {
            // A caller with write permission may set the present time.
            let allowed = permission::check(node, W_OK);
            allowed.map_err(|errno| if is_now { errno } else { Errno::EPERM })?;
            if !is_now {
                return Err(Errno::EPERM);
            }
        }
        node.change(&change).map(|()| 0)
    };
    if path == 0 {
        return set(&*Files::description(directory)?.node);
    }
    set(&*place_at(directory, path, flags)?.node)
}

fn write_statfs(at: u64, place: &Place) -> Outcome {
    const MEMORY: i64 = 0x0102_1994; // TMPFS_MAGIC, see statfs(2)
    const PROC: i64 = 0x9fa0;
    const SYS: i64 = 0x6265_6572;
    const DISK: i64 = 0x6269_6e64; // a number of our own
    let path = place.path();
    let kind = |name: &[u8]| path == name || path.starts_with(name) && path[name.len()] == b'/';
    let of_disk = if kind(b"/disk") { disk::size_and_free() } else { None };
    // SAFETY: a structure of numbers, for which zeroes are values.
    let mut out: statfs64 = unsafe { core::mem::zeroed() };
    out.f_type = if kind(b"/proc") {
        PROC
    } else if kind(b"/sys") {
        SYS
    } else if of_disk.is_some() {
        DISK
    } else {
        MEMORY
    } as _;
    out.f_bsize = BLOCK_SIZE as _;
    out.f_frsize = BLOCK_SIZE as _;
    out.f_namelen = path::NAME_MAX as _;
    if out.f_type == MEMORY as _ || of_disk.is_some() {
        let (size, free) = of_disk.unwrap_or_else(size_and_free);
        out.f_blocks = size as _;
        out.f_bfree = free as _;
        out.f_bavail = free as _;
    }
    user::write(at, &out)?;
    Ok(0)
}

/// `statfs(2)`.
pub fn statfs(path: u64, at: u64) -> Outcome {
    write_statfs(at, &*path::user_place(AT_FDCWD, path, LastLink::Followed)?)
}

/// `fstatfs(2)`.
pub fn statfs_of(descriptor: i32, at: u64) -> Outcome {
    write_statfs(at, &Files::description(descriptor)?.place)
}
