//! The system calls that make and remove names.

use alloc::sync::Arc;
use alloc::vec::Vec;

use linux_raw_sys::general::{
    AT_EMPTY_PATH, AT_FDCWD, AT_REMOVEDIR, AT_SYMLINK_FOLLOW, O_ACCMODE, O_CLOEXEC, O_CREAT,
    O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_PATH, O_RDONLY, O_TMPFILE, O_TRUNC, O_WRONLY, R_OK,
    RENAME_EXCHANGE, RENAME_NOREPLACE, S_IFIFO, S_IFMT, S_IFREG, W_OK, X_OK,
};

use crate::errno::{Errno, Outcome};
use crate::user;

use super::attributes::Kind;
use super::descriptor::{Description, Files, at_exec};
use super::memory::{self, ChangeGuard, Directory, Link};
use super::node::{Node, PATH_MAX, Place, count_links};
use super::path::{self, LastLink, user_name, user_place};
use super::permission;
use super::pipe::Pipe;
use super::root::root;

/// The number of times that a path is looked up again if its file was removed before it could be
/// opened.
const LOOK_UPS: u32 = 8;

/// `openat(2)`.
pub fn open(directory: i32, path: u64, flags: u32, mode: u32) -> Outcome {
    let mut outcome = open_once(directory, path, flags, mode);
    for _ in 0..LOOK_UPS {
        // The file was removed, or replaced by another one, which the next lookup finds.
        if outcome != Err(Errno::ESTALE) {
            break;
        }
        outcome = open_once(directory, path, flags, mode);
    }
    outcome
}

fn open_once(directory: i32, path: u64, flags: u32, mode: u32) -> Outcome {
    let files = Files::current();
    let path = path::from_user(path)?;
    let start = path::beginning(&files, directory, &path)?;
    if flags & O_TMPFILE == O_TMPFILE {
        return Err(Errno::EOPNOTSUPP);
    }
    let last = if flags & O_NOFOLLOW != 0 || flags & O_CREAT != 0 && flags & O_EXCL != 0 {
        LastLink::Taken
    } else {
        LastLink::Followed
    };
    let (place, is_new) = match path::look_up(start.clone(), &path, last) {
        Ok(place) => (place, false),
        Err(Errno::ENOENT) if flags & O_CREAT != 0 => {
            create(start, &path, last, mode & !files.umask())?
        }
        Err(errno) => return Err(errno),
    };
    if flags & O_CREAT != 0 && flags & O_EXCL != 0 && !is_new {
        return Err(Errno::EEXIST);
    }
    let kind = place.node.kind();
    if flags & O_PATH != 0 {
        if flags & O_DIRECTORY != 0 && kind != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let description = Description::new(place.clone(), place.node.clone(), O_PATH)?;
        return Ok(files.insert(description, at_exec(flags))? as u64);
    }
    match kind {
        Kind::Link => return Err(Errno::ELOOP),
        Kind::Directory if flags & O_ACCMODE != 0 || flags & O_CREAT != 0 => {
            return Err(Errno::EISDIR);
        }
        Kind::Directory => {}
        _ if flags & O_DIRECTORY != 0 => return Err(Errno::ENOTDIR),
        Kind::Regular
        | Kind::Device
        | Kind::Block
        | Kind::Pipe
        | Kind::Socket
        | Kind::Anonymous => {}
    }
    // As on Linux, a file opened for reading is also truncated if the caller may write it.
    let truncates = flags & O_TRUNC != 0 && kind == Kind::Regular;
    let flags = if truncates { flags } else { flags & !O_TRUNC };
    if !is_new {
        let writes = if truncates { W_OK } else { 0 };
        permission::check(&*place.node, wanted_by(flags) | writes)?;
    }
    if truncates && !is_new {
        permission::drop_set_ids(&*place.node)?;
    }
    let node = place.node.open(flags)?.unwrap_or_else(|| place.node.clone());
    super::proc::remember(&place);
    let opened = node.clone();
    let description =
        Description::new(place, node, flags & !(O_CREAT | O_EXCL | O_TRUNC | O_CLOEXEC))
            .inspect_err(|_| opened.closed(flags))?;
    Ok(files.insert(description, at_exec(flags))? as u64)
}

/// The permissions that an opening with these flags needs.
fn wanted_by(flags: u32) -> u32 {
    match flags & O_ACCMODE {
        O_RDONLY => R_OK,
        O_WRONLY => W_OK,
        _ => R_OK | W_OK,
    }
}

/// Creates the regular file that a path names. If links are followed, the path may end in a
/// dangling link. Returns whether it created the file, since another thread may create the name
/// first.
fn create(
    start: Arc<Place>,
    path: &[u8],
    last: LastLink,
    mode: u32,
) -> Result<(Arc<Place>, bool), Errno> {
    let (mut start, mut path) = (start, Vec::from(path));
    let mut links = 0;
    while links < 8 {
        let name = path::look_up_name(start.clone(), &path)?;
        if name.for_directory {
            return Err(Errno::EISDIR);
        }
        match name.above.node.child(&name.name) {
            Ok(node) if node.kind() == Kind::Link && last == LastLink::Followed => {
                links += 1;
                path = node.target()?;
                start = if path.first() == Some(&b'/') { root() } else { name.above };
            }
            Ok(node) => return Ok((name.above.below(node, &name.name), false)),
            Err(_) => {
                match name.directory()?.create(&name.name, mode & 0o7777) {
                    // The allocation for the file yielded, and another thread has created the name.
                    Err(Errno::EEXIST) => {}
                    made => return made.map(|file| (name.above.below(file, &name.name), true)),
                }
            }
        }
    }
    Err(Errno::ELOOP)
}

/// `mkdirat(2)`.
pub fn make_directory(directory: i32, path: u64, mode: u32) -> Outcome {
    let name = existing_is_refused(user_name(directory, path))?;
    let umask = Files::current().umask();
    if name.above.node.child(&name.name).is_ok() {
        return Err(Errno::EEXIST);
    }
    name.directory()?.insert(&name.name, Directory::new(mode & 0o1777 & !umask)?)?;
    Ok(0)
}

/// A path that ends in `.` or `..` exists.
fn existing_is_refused(name: Result<path::Name, Errno>) -> Result<path::Name, Errno> {
    name.map_err(|errno| if errno == Errno::EINVAL { Errno::EEXIST } else { errno })
}

/// `mknodat(2)`: regular files and pipes.
pub fn make_node(directory: i32, path: u64, mode: u32) -> Outcome {
    let name = existing_is_refused(user_name(directory, path))?;
    let umask = Files::current().umask();
    if name.for_directory {
        return Err(Errno::ENOENT);
    }
    let node: Arc<dyn Node> = match mode & S_IFMT {
        0 | S_IFREG => {
            return name.directory()?.create(&name.name, mode & 0o7777 & !umask).map(|_| 0);
        }
        S_IFIFO => Pipe::new()?,
        _ => return Err(Errno::EPERM),
    };
    name.directory()?.insert(&name.name, node)?;
    Ok(0)
}

/// `symlinkat(2)`.
pub fn make_link(target: u64, directory: i32, path: u64) -> Outcome {
    let target = path::from_user(target)?;
    if target.is_empty() {
        return Err(Errno::ENOENT);
    }
    let name = existing_is_refused(user_name(directory, path))?;
    if name.for_directory {
        return Err(Errno::ENOENT);
    }
    name.directory()?.insert(&name.name, Link::new(&target)?)?;
    Ok(0)
}

/// `linkat(2)`.
pub fn link(from: (i32, u64), to: (i32, u64), flags: u32) -> Outcome {
    if flags & !(AT_SYMLINK_FOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let last = if flags & AT_SYMLINK_FOLLOW != 0 { LastLink::Followed } else { LastLink::Taken };
    let place = user_place(from.0, from.1, last)?;
    if place.node.kind() == Kind::Directory {
        return Err(Errno::EPERM);
    }
    if place.node.links().is_none() {
        return Err(Errno::EXDEV);
    }
    let name = existing_is_refused(user_name(to.0, to.1))?;
    if name.for_directory {
        return Err(Errno::ENOENT);
    }
    name.directory()?.link(&name.name, &place.node)?;
    Ok(0)
}

fn begin_change(node: &dyn Node) -> Option<ChangeGuard<'_>> {
    memory::directory(node)?.begin_change()
}

/// `unlinkat(2)`, and `rmdir(2)` with its flag.
pub fn unlink(directory: i32, path: u64, flags: u32) -> Outcome {
    if flags & !AT_REMOVEDIR != 0 {
        return Err(Errno::EINVAL);
    }
    let removes_directory = flags & AT_REMOVEDIR != 0;
    let text = path::from_user(path)?;
    let name = user_name(directory, path).map_err(|errno| match errno {
        // The root, `.` and `..`.
        Errno::EEXIST if removes_directory => Errno::EBUSY,
        Errno::EEXIST => Errno::EISDIR,
        Errno::EINVAL if removes_directory && text.ends_with(b"..") => Errno::ENOTEMPTY,
        Errno::EINVAL if !removes_directory => Errno::EISDIR,
        other => other,
    })?;
    let _change = begin_change(&*name.above.node);
    let node = name.above.node.child(&name.name)?;
    let directory = name.directory()?;
    permission::check_taking(&*name.above.node, &*node)?;
    directory.remove(&name.name, |node| {
        let is_directory = node.kind() == Kind::Directory;
        match (removes_directory, is_directory) {
            (true, true) => memory::directory(node).ok_or(Errno::EBUSY)?.retire(),
            (true, false) => Err(Errno::ENOTDIR),
            (false, true) => Err(Errno::EISDIR),
            (false, false) if name.for_directory => Err(Errno::ENOTDIR),
            (false, false) => Ok(()),
        }
    })?;
    Ok(0)
}

/// `renameat2(2)`.
pub fn rename(from: (i32, u64), to: (i32, u64), flags: u32) -> Outcome {
    if flags & !(RENAME_NOREPLACE | RENAME_EXCHANGE) != 0
        || flags == RENAME_NOREPLACE | RENAME_EXCHANGE
    {
        return Err(Errno::EINVAL);
    }
    let busy = |errno| {
        if errno == Errno::EEXIST || errno == Errno::EINVAL { Errno::EBUSY } else { errno }
    };
    let source = user_name(from.0, from.1).map_err(busy)?;
    let target = user_name(to.0, to.1).map_err(busy)?;
    // If both have a store, they are one directory, or nothing is renamed.
    let _change = begin_change(&*source.above.node);
    let node = source.above.node.child(&source.name)?;
    let is_directory = node.kind() == Kind::Directory;
    let (source_directory, target_directory) = (source.directory()?, target.directory()?);
    permission::check_taking(&*source.above.node, &*node)?;
    target_directory.check_room()?;
    if !is_directory && (source.for_directory || target.for_directory) {
        return Err(Errno::ENOTDIR);
    }
    // A directory cannot become a part of itself.
    if is_directory && (is_inside(&target.above, &node)) {
        return Err(Errno::EINVAL);
    }
    let store = source_directory.store();
    if store.is_some() || target_directory.store().is_some() {
        if !core::ptr::eq(source_directory, target_directory) {
            return Err(Errno::EXDEV);
        }
        if flags & RENAME_EXCHANGE != 0 {
            return Err(Errno::EINVAL);
        }
    }
    let there = target.above.node.child(&target.name).ok();
    if let Some(there) = &there {
        permission::check_taking(&*target.above.node, &**there)?;
    }
    if flags & RENAME_EXCHANGE != 0 {
        let there = there.ok_or(Errno::ENOENT)?;
        if there.kind() == Kind::Directory && is_inside(&source.above, &there) {
            return Err(Errno::EINVAL);
        }
        source_directory.replace(&source.name, there);
        target_directory.replace(&target.name, node);
        return Ok(0);
    }
    let replaces = there.is_some();
    if let Some(there) = there {
        if flags & RENAME_NOREPLACE != 0 {
            return Err(Errno::EEXIST);
        }
        if Arc::ptr_eq(&there, &node) {
            return Ok(0);
        }
        match (is_directory, there.kind() == Kind::Directory) {
            (true, false) => return Err(Errno::ENOTDIR),
            (false, true) => return Err(Errno::EISDIR),
            (true, true) => {
                if is_inside(&source.above, &there) {
                    return Err(Errno::ENOTEMPTY);
                }
                memory::directory(&*there).ok_or(Errno::EBUSY)?.retire()?;
            }
            (false, false) => {}
        }
    }
    if let Some(store) = store {
        store.rename(&*node, &target.name, replaces)?;
    }
    source_directory.take(&source.name);
    // Done before the replaced file is removed, so that a lookup always finds one of the two.
    let old = target_directory.replace(&target.name, node.clone());
    if let Some(old) = old.filter(|old| !Arc::ptr_eq(old, &node)) {
        count_links(&*old, -1);
        // The name already belongs to the other file, even if this removal fails. The store's next
        // commit continues it.
        let _ = store.map(|store| store.remove(&*old));
    }
    Ok(0)
}

/// Whether a place is `directory` or below it. Compares the directories themselves, because a place
/// records the path taken at lookup, and directories may have been renamed since.
fn is_inside(place: &Arc<Place>, directory: &Arc<dyn Node>) -> bool {
    let Some(directory) = memory::directory(&**directory) else { return false };
    memory::directory(&*place.node).is_some_and(|place| place.is_inside(directory))
}

/// `readlinkat(2)`.
pub fn read_link(directory: i32, path: u64, at: u64, size: i32) -> Outcome {
    if size <= 0 {
        return Err(Errno::EINVAL);
    }
    let text = path::from_user(path)?;
    let place = if text.is_empty() && directory != AT_FDCWD {
        Files::description(directory)?.place.clone()
    } else {
        user_place(directory, path, LastLink::Taken)?
    };
    let target = place.node.target()?;
    let count = target.len().min(size as usize);
    user::write_bytes(at, &target[..count])?;
    Ok(count as u64)
}

/// `getcwd(2)`.
pub fn current_directory(at: u64, size: u64) -> Outcome {
    let directory = Files::current().directory();
    if directory.path_length() >= PATH_MAX {
        return Err(Errno::ENAMETOOLONG);
    }
    let mut path = directory.path();
    path.push(0);
    if size < path.len() as u64 {
        return Err(if size == 0 { Errno::EINVAL } else { Errno::ERANGE });
    }
    user::write_bytes(at, &path)?;
    Ok(path.len() as u64)
}

/// `chdir(2)`.
pub fn change_directory(path: u64) -> Outcome {
    enter(user_place(AT_FDCWD, path, LastLink::Followed)?)
}

/// `fchdir(2)`.
pub fn change_directory_to(descriptor: i32) -> Outcome {
    enter(Files::description(descriptor)?.place.clone())
}

fn enter(place: Arc<Place>) -> Outcome {
    if place.node.kind() != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    permission::check(&*place.node, X_OK)?;
    Files::current().set_directory(place);
    Ok(0)
}

/// `getdents64(2)`. A position in a directory is the cookie of the last name that was read, so
/// names may be removed between two calls.
pub fn read_directory(descriptor: i32, at: u64, size: u64) -> Outcome {
    let description = Files::description(descriptor)?;
    let node = description.readable()?;
    if node.kind() != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    let mut position = description.position.lock();
    let number = node.attributes().number;
    let above = description.place.above.as_ref();
    let above_number = above.map_or(number, |above| above.node.attributes().number);
    let entries = node.children()?;
    let own = [(&b"."[..], number, Kind::Directory, 1), (b"..", above_number, Kind::Directory, 2)];
    let others =
        entries.iter().map(|entry| (&entry.name[..], entry.number, entry.kind, entry.cookie));
    let all = own.into_iter().chain(others);
    let (mut done, mut last) = (0, *position);
    for (name, number, kind, cookie) in all.filter(|entry| entry.3 > *position) {
        let length = (19 + name.len() + 1).next_multiple_of(8);
        if done + length as u64 > size {
            if done == 0 {
                return Err(Errno::EINVAL);
            }
            break;
        }
        let mut record = alloc::vec![0_u8; length];
        record[..8].copy_from_slice(&number.to_ne_bytes());
        record[8..16].copy_from_slice(&cookie.to_ne_bytes());
        record[16..18].copy_from_slice(&(length as u16).to_ne_bytes());
        record[18] = kind.entry_type();
        record[19..19 + name.len()].copy_from_slice(name);
        user::write_bytes(at.wrapping_add(done), &record)?;
        done += length as u64;
        last = cookie;
    }
    *position = last;
    Ok(done)
}
