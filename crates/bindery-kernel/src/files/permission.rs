//! Permission to use a file: owner, group and permission bits, and the capabilities that override
//! them.

use linux_raw_sys::general::{R_OK, W_OK, X_OK};

use crate::errno::Errno;
use crate::process::{Capability, Credentials, credentials};

use super::attributes::{Attributes, Change, Kind, SET_GROUP, SET_USER};
use super::node::Node;

/// The sticky bit: only owners may remove names from the directory.
const STICKY: u32 = 0o1000;

/// Checks that the running thread may access a node: a set of `R_OK`, `W_OK`, `X_OK`.
///
/// # Errors
/// `EACCES`.
pub fn check(node: &dyn Node, wanted: u32) -> Result<(), Errno> {
    check_for(&credentials(), node, wanted)
}

/// As [`check`], with these credentials.
///
/// # Errors
/// `EACCES`.
pub fn check_for(who: &Credentials, node: &dyn Node, wanted: u32) -> Result<(), Errno> {
    let is_directory = node.kind() == Kind::Directory;
    let overrides = who.can(Capability::DacOverride);
    if overrides && (is_directory || wanted & X_OK == 0) {
        return Ok(());
    }
    if matches!(node.kind(), Kind::Pipe | Kind::Socket | Kind::Anonymous) {
        // A file without a name comes from a process that could use it.
        return Ok(());
    }
    let (mode, (owner, group)) = node.permissions();
    if overrides {
        // A file without any execute bit cannot be run.
        return if mode & 0o111 != 0 { Ok(()) } else { Err(Errno::EACCES) };
    }
    let shift = match () {
        () if who.user.file == owner => 6,
        () if who.is_in_group(group) => 3,
        () => 0,
    };
    let reads = wanted == R_OK || is_directory && wanted & W_OK == 0;
    if mode >> shift & wanted == wanted || reads && who.can(Capability::DacReadSearch) {
        return Ok(());
    }
    Err(Errno::EACCES)
}

/// Refuses to remove `node` from a sticky directory if only its owners may.
///
/// # Errors
/// `EPERM`.
pub fn check_taking(directory: &dyn Node, node: &dyn Node) -> Result<(), Errno> {
    let (mode, (owner, _)) = directory.permissions();
    let who = credentials();
    let is_own = || who.user.file == owner || who.user.file == node.permissions().1.0;
    if mode & STICKY == 0 || who.can(Capability::FileOwner) || is_own() {
        return Ok(());
    }
    Err(Errno::EPERM)
}

/// Whether the running thread has the rights of the owner.
pub fn is_owner(node: &dyn Node) -> bool {
    let who = credentials();
    who.can(Capability::FileOwner) || who.user.file == node.permissions().1.0
}

/// Refuses everyone but the owner.
///
/// # Errors
/// `EPERM`.
pub fn check_owner(node: &dyn Node) -> Result<(), Errno> {
    if is_owner(node) { Ok(()) } else { Err(Errno::EPERM) }
}

/// Clears the bits by which a program would run as its owner or its group, because the running
/// thread is about to change the program. `CAP_FSETID` keeps them.
///
/// # Errors
/// Those of [`Node::change`].
#[inline]
pub fn drop_set_ids(node: &dyn Node) -> Result<(), Errno> {
    if node.sets_ids() { drop_set_ids_of_program(node) } else { Ok(()) }
}

#[cold]
fn drop_set_ids_of_program(node: &dyn Node) -> Result<(), Errno> {
    let (mode, (_, group)) = node.permissions();
    let who = credentials();
    if who.can(Capability::FileSetId) {
        return Ok(());
    }
    // Set-group-ID without execution by the group has another meaning.
    let keeps_group = mode & 0o010 == 0 && who.is_in_group(group);
    let lost = if keeps_group { SET_USER } else { SET_USER | SET_GROUP };
    match mode & !lost {
        same if same == mode => Ok(()),
        mode => node.change(&Change { mode: Some(mode), ..Change::default() }),
    }
}

/// Changes owner and group. The superuser may choose any; the owner may choose only one of their
/// own groups. Clears the bits by which a program would run as the owner.
///
/// # Errors
/// `EPERM`.
pub fn give(node: &dyn Node, owner: Option<u32>, group: Option<u32>) -> Result<(), Errno> {
    let who = credentials();
    let Attributes { mode, owner: now, .. } = node.attributes();
    let is_own = who.user.file == now.0;
    let owner_allowed = owner.is_none_or(|owner| is_own && owner == now.0);
    let group_allowed =
        group.is_none_or(|group| is_own && (group == now.1 || who.is_in_group(group)));
    let allowed = who.can(Capability::Chown) || owner_allowed && group_allowed;
    if !allowed {
        return Err(Errno::EPERM);
    }
    let lost = match node.kind() {
        Kind::Directory => 0,
        Kind::Regular
        | Kind::Link
        | Kind::Device
        | Kind::Block
        | Kind::Pipe
        | Kind::Socket
        | Kind::Anonymous => {
            if mode & 0o010 != 0 {
                SET_USER | SET_GROUP
            } else {
                SET_USER
            }
        }
    };
    let mode = Some(mode & !lost).filter(|_| lost & mode != 0);
    node.change(&Change { mode, owner: (owner, group), ..Change::default() })
}
