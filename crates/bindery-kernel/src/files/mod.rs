//! Files: an in-memory file system that begins with the contents of the initramfs, and everything
//! else that has a descriptor.
//!
//! | file | what |
//! |---|---|
//! | [`node`] | files and directories of every kind, and their places |
//! | [`memory`] | directories, regular files, symbolic links |
//! | [`path`] | from a path to a node |
//! | [`permission`] | owner, group and permission bits |
//! | [`descriptor`] | descriptors and what they share |
//! | [`console`], [`stream`], [`device`], [`pipe`], [`socket`], [`event`], [`epoll`] | everything else that is read and written |
//! | [`generated`], [`proc`], [`sys`] | files whose text is made when it is read |
//! | [`huge_pages`] | the pools of huge pages, which are empty |
//! | [`swap`] | swap areas and their device |
//! | [`listing`] | texts that are made entry by entry, for `/proc` |
//! | [`userfault`] | descriptors of userfaultfds |
//! | [`segments`] | the memory of a program that a call reads or writes |
//! | [`symbols`] | the kernel's symbols, for a panic |
//! | [`manner`] | flags of one transfer, and the largest size of a file |
//! | [`calls`], [`transfer`], [`splice`], [`names`], [`status`], [`poll`] | the system calls |

pub mod calls;
mod console;
mod descriptor;
mod device;
mod epoll;
mod event;
mod generated;
mod huge_pages;
mod listing;
mod manner;
mod memory;
mod names;
mod node;
mod path;
mod permission;
mod pipe;
pub mod poll;
mod proc;
mod segments;
mod socket;
mod splice;
mod status;
mod stream;
pub mod swap;
pub mod symbols;
mod sys;
mod transfer;
mod userfault;

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::Object;
use linux_raw_sys::general::X_OK;

use crate::boot::Stretch;
use crate::errno::Errno;
use crate::platform::Machine;
use crate::sync::Mutex;
use crate::{arch, log};

use memory::{Directory, Link, Regular};
use node::{Change, Kind, Node, Patience, Place};
use path::LastLink;

pub use console::listen;
pub use descriptor::{Files, Inherited};
pub use node::Mappable;
pub use poll::changed;

static ROOT: Mutex<Option<Arc<Place>>> = Mutex::new(None);

/// The root of the file system.
fn root() -> Arc<Place> {
    // `begin` has made it before there was anybody to ask; nobody asks after `end`.
    ROOT.lock().clone().expect("there is a root between boot and the end")
}

/// The path of the kernel's symbols in the initramfs.
const SYMBOLS: &str = ".bindery/symbols";

/// Unpacks the initramfs into the root file system.
///
/// # Panics
/// Where it does not fit into memory.
pub fn begin(initramfs: Stretch) {
    let root = Directory::new(0o755).expect("there is memory for a root");
    let place = Place::alone(root, b"");
    *ROOT.lock() = Some(place.clone());
    let length = (initramfs.end - initramfs.start) as usize;
    // SAFETY: the boot protocol says that the initramfs lies there; nothing else uses that memory
    // (`boot::Information::free_memory`).
    let archive: &'static [u8] =
        unsafe { core::slice::from_raw_parts(arch::direct_map(initramfs.start).as_ptr(), length) };
    for entry in cpio_reader::iter_files(archive) {
        if entry.name() == SYMBOLS {
            symbols::begin(entry.file());
        } else if let Err(errno) = unpack(&place, &entry) {
            panic!("{} of the initramfs cannot be unpacked: {errno:?}", entry.name());
        }
    }
    memory::begin();
    for (name, mode) in [(&b"dev"[..], 0o755), (b"proc", 0o555), (b"sys", 0o555), (b"tmp", 0o1777)]
    {
        directory_at(&place, name, mode).expect("there is memory for a few directories");
    }
    device::begin(&place).expect("there is memory for the devices");
    let top = place.node.directory().expect("the root is a directory");
    top.replace(b"proc", proc::root());
    top.replace(b"sys", sys::root());
    console::begin();
}

/// Drops the whole file system.
pub fn end() {
    let Some(root) = ROOT.lock().take() else { return };
    // Directories in directories are not taken apart by recursion: they may be deep.
    let mut left: Vec<Arc<dyn Node>> = [root.node.clone()].into();
    drop(root);
    while let Some(node) = left.pop() {
        if let Some(directory) = node.directory() {
            directory.empty_into(&mut left);
        }
    }
}

/// The directory of this name, made if it is not there.
fn directory_at(above: &Arc<Place>, name: &[u8], mode: u32) -> Result<Arc<Place>, Errno> {
    if let Ok(node) = above.node.child(name) {
        return if node.kind() == Kind::Directory {
            Ok(above.below(node, name))
        } else {
            Err(Errno::ENOTDIR)
        };
    }
    let directory: Arc<dyn Node> = Directory::new(mode)?;
    above.node.directory().ok_or(Errno::ENOTDIR)?.insert(name, directory.clone())?;
    Ok(above.below(directory, name))
}

fn unpack(root: &Arc<Place>, entry: &cpio_reader::Entry<'_>) -> Result<(), Errno> {
    let mut names: Vec<&[u8]> = entry.name().as_bytes().split(|byte| *byte == b'/').collect();
    names.retain(|name| !name.is_empty() && name != b".");
    let Some(last) = names.pop() else { return Ok(()) };
    let mut above = root.clone();
    for name in names {
        above = directory_at(&above, name, 0o755)?;
    }
    let mode = entry.mode();
    let permissions = mode.bits() & 0o7777;
    let node: Arc<dyn Node> = match mode.bits() & 0o170_000 {
        0o040_000 => {
            let change = Change { mode: Some(permissions), ..Change::default() };
            return directory_at(&above, last, permissions)?.node.change(&change);
        }
        0o100_000 => {
            let file = Regular::new(permissions)?;
            let content = entry.file();
            if file.write(0, content, Patience::Wait)? < content.len() {
                return Err(Errno::ENOMEM);
            }
            file
        }
        0o120_000 => Link::new(entry.file())?,
        // Devices are ours; the archive's have no meaning here.
        _ => {
            log!("{} of the initramfs is left out: it is a device or a socket", entry.name());
            return Ok(());
        }
    };
    above.node.directory().ok_or(Errno::ENOTDIR)?.insert(last, node)
}

/// A program to be run.
pub struct Program {
    /// Its contents.
    pub object: Object<'static, Machine>,
    /// Its absolute path.
    pub path: Vec<u8>,
    /// The user that it runs as (set-user-ID), if not its caller.
    pub set_user: Option<u32>,
    /// As which group.
    pub set_group: Option<u32>,
}

/// Finds a program.
///
/// # Errors
/// As [`path::look_up`]; `EACCES` for what is no regular file or has no execute permission.
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
    let object = place.node.object().cloned();
    proc::remember(&place);
    match object {
        Some(object) if place.node.kind() == Kind::Regular && mode & 0o111 != 0 => {
            permission::check(&*place.node, X_OK)?;
            let sets = |bits: u32, id: u32| Some(id).filter(|_| mode & bits == bits);
            Ok(Program {
                object,
                path: place.path(),
                set_user: sets(permission::SET_USER, owner.0),
                set_group: sets(permission::SET_GROUP | 0o010, owner.1),
            })
        }
        _ => Err(Errno::EACCES),
    }
}

pub use calls::{insert_process, process_behind};
