//! Executable files, found by path or descriptor.

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::Object;
use linux_raw_sys::general::{O_RDONLY, R_OK, X_OK};

use crate::errno::Errno;
use crate::platform::Machine;

use super::attributes::{Kind, SET_GROUP, SET_USER};
use super::descriptor::Files;
use super::node::Place;
use super::path::{self, LastLink};
use super::{permission, proc};

/// A program to be run.
pub struct Program {
    /// The program's contents.
    pub object: Object<'static, Machine>,
    /// The program's absolute path.
    pub path: Vec<u8>,
    /// Whether the caller may read the file. Otherwise the user's other processes must not read the
    /// contents from the program's memory.
    pub is_readable: bool,
    /// The user as whom the program runs (set-user-ID), if not the caller.
    pub set_user: Option<u32>,
    /// The group with which the program runs (set-group-ID), if not the caller's.
    pub set_group: Option<u32>,
}

/// Finds a program.
///
/// # Errors
/// The errors of [`path::look_up`]; `EACCES` if the file is not regular or has no execute
/// permission.
pub fn open_program(files: &Files, directory: i32, path: &[u8]) -> Result<Program, Errno> {
    let place = path::look_up(path::beginning(files, directory, path)?, path, LastLink::Followed)?;
    program(place)
}

/// As [`open_program`], by descriptor (`execveat` with `AT_EMPTY_PATH`).
///
/// # Errors
/// `EBADF`, `EACCES`.
pub fn program_of(files: &Files, descriptor: i32) -> Result<Program, Errno> {
    program(files.get(descriptor)?.place.clone())
}

fn program(place: Arc<Place>) -> Result<Program, Errno> {
    let (mode, owner) = place.node.permissions();
    let opened = if place.node.object().is_none() && place.node.kind() == Kind::Regular {
        place.node.open(O_RDONLY)?
    } else {
        None
    };
    let object = opened.as_ref().unwrap_or(&place.node).object().cloned();
    proc::remember(&place);
    match object {
        Some(object) if place.node.kind() == Kind::Regular && mode & 0o111 != 0 => {
            permission::check(&*place.node, X_OK)?;
            let sets = |bits: u32, id: u32| Some(id).filter(|_| mode & bits == bits);
            Ok(Program {
                object,
                path: place.path(),
                is_readable: permission::check(&*place.node, R_OK).is_ok(),
                set_user: sets(SET_USER, owner.0),
                set_group: sets(SET_GROUP | 0o010, owner.1),
            })
        }
        _ => Err(Errno::EACCES),
    }
}
