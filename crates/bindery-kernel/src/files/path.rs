//! From a path to a node.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use linux_raw_sys::general::{AT_FDCWD, W_OK, X_OK};

use crate::errno::Errno;
use crate::process::credentials;
use crate::user;

use super::attributes::Kind;
use super::descriptor::Files;
use super::memory::{self, Directory};
use super::node::{PATH_MAX, Place};
use super::permission;
use super::root::root;

/// The longest name.
pub const NAME_MAX: usize = 255;

/// The maximum number of symbolic links in a path.
const LINKS_MAX: usize = 40;

/// The treatment of a symbolic link at the end of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LastLink {
    /// The link is followed.
    Followed,
    /// The path means the link itself.
    Taken,
}

/// A name to create or remove, and its directory.
pub struct Name {
    /// The directory.
    pub above: Arc<Place>,
    /// The name in it; not `.`, `..` or empty.
    pub name: Vec<u8>,
    /// Whether a slash followed the name, which then can only be a directory's.
    pub for_directory: bool,
}

impl Name {
    /// The directory, if names can be created in it.
    ///
    /// # Errors
    /// `ENOTDIR`; `EROFS` in generated directories (`/proc`, `/sys`); `EACCES`.
    pub fn directory(&self) -> Result<&Directory, Errno> {
        match self.above.node.kind() {
            Kind::Directory => {
                let directory = memory::directory(&*self.above.node).ok_or(Errno::EROFS)?;
                permission::check(&*self.above.node, W_OK | X_OK)?;
                Ok(directory)
            }
            Kind::Regular
            | Kind::Link
            | Kind::Device
            | Kind::Block
            | Kind::Pipe
            | Kind::Socket
            | Kind::Anonymous => Err(Errno::ENOTDIR),
        }
    }
}

/// Reads a path of the running program.
///
/// # Errors
/// `EFAULT`, `ENAMETOOLONG`.
pub fn from_user(at: u64) -> Result<Vec<u8>, Errno> {
    user::text(at, PATH_MAX)
}

/// The place where a relative path begins.
///
/// # Errors
/// `EBADF`; `ENOTDIR` if the descriptor is not a directory's.
pub fn beginning(files: &Files, directory: i32, path: &[u8]) -> Result<Arc<Place>, Errno> {
    if path.first() == Some(&b'/') {
        return Ok(root());
    }
    if directory == AT_FDCWD {
        return Ok(files.directory());
    }
    let place = files.get(directory)?.place.clone();
    if !path.is_empty() && place.node.kind() != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    Ok(place)
}

/// The place that a path leads to.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `EACCES`, `ELOOP`, `ENAMETOOLONG`.
pub fn look_up(start: Arc<Place>, path: &[u8], last: LastLink) -> Result<Arc<Place>, Errno> {
    if path.is_empty() {
        return Err(Errno::ENOENT);
    }
    let directory_meant = path.last() == Some(&b'/');
    let mut names = split(path);
    let place = walk(start, &mut names, if directory_meant { LastLink::Followed } else { last })?;
    if directory_meant && place.node.kind() != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    Ok(place)
}

/// The directory of a path's last name, and the name.
///
/// # Errors
/// As [`look_up`]; `EEXIST` for the root, `EINVAL` for `.` and `..`.
pub fn look_up_name(start: Arc<Place>, path: &[u8]) -> Result<Name, Errno> {
    if path.is_empty() {
        return Err(Errno::ENOENT);
    }
    let for_directory = path.last() == Some(&b'/');
    let mut names = split(path);
    let Some(name) = names.pop_back() else { return Err(Errno::EEXIST) };
    if name == b"." || name == b".." {
        return Err(Errno::EINVAL);
    }
    if name.len() > NAME_MAX {
        return Err(Errno::ENAMETOOLONG);
    }
    let above = walk(start, &mut names, LastLink::Followed)?;
    if above.node.kind() != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    Ok(Name { above, name, for_directory })
}

/// As [`look_up`], with a path in the running program's memory.
pub fn user_place(directory: i32, at: u64, last: LastLink) -> Result<Arc<Place>, Errno> {
    let path = from_user(at)?;
    let files = Files::current();
    look_up(beginning(&files, directory, &path)?, &path, last)
}

/// As [`look_up_name`], with a path in the running program's memory.
pub fn user_name(directory: i32, at: u64) -> Result<Name, Errno> {
    let path = from_user(at)?;
    let files = Files::current();
    look_up_name(beginning(&files, directory, &path)?, &path)
}

fn split(path: &[u8]) -> VecDeque<Vec<u8>> {
    path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).map(Vec::from).collect()
}

fn walk(
    start: Arc<Place>,
    names: &mut VecDeque<Vec<u8>>,
    last: LastLink,
) -> Result<Arc<Place>, Errno> {
    let who = credentials();
    let mut place = start;
    let mut links = 0;
    while let Some(name) = names.pop_front() {
        if place.node.kind() != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        permission::check_for(&who, &*place.node, X_OK)?;
        match &name[..] {
            b"." => continue,
            b".." => {
                if let Some(above) = place.above.clone() {
                    place = above;
                }
                continue;
            }
            name if name.len() > NAME_MAX => return Err(Errno::ENAMETOOLONG),
            _ => {}
        }
        let node = place.node.child(&name)?;
        if node.kind() != Kind::Link || names.is_empty() && last == LastLink::Taken {
            place = place.below(node, &name);
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::ELOOP);
        }
        if let Some(there) = node.jump() {
            place = there;
            continue;
        }
        let target = node.target()?;
        if target.first() == Some(&b'/') {
            place = root();
        }
        let ahead = split(&target);
        if target.is_empty() || names.len() + ahead.len() > PATH_MAX {
            return Err(if target.is_empty() { Errno::ENOENT } else { Errno::ENAMETOOLONG });
        }
        for name in ahead.into_iter().rev() {
            names.push_front(name);
        }
    }
    Ok(place)
}
