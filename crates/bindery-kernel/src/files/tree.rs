//! The tree of files: its construction at boot, and its removal at the end.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::boot::Stretch;
use crate::errno::Errno;
use crate::{arch, log, symbols};

use super::attributes::{Change, Kind, Patience};
use super::memory::{self, Directory, Link, Regular};
use super::node::{Node, Place};
use super::{console, device, disk, proc, root, sys};

/// The path of the kernel's symbols in the initramfs.
const SYMBOLS: &str = ".bindery/symbols";

/// Unpacks the initramfs into the root file system.
///
/// # Panics
/// If the content exceeds memory.
pub fn begin(initramfs: Stretch) {
    let root = Directory::new(0o755).expect("there is memory for a root");
    let place = Place::alone(root, b"");
    root::set(place.clone());
    let length = (initramfs.end - initramfs.start) as usize;
    // SAFETY: the boot protocol says that the initramfs lies there; nothing else uses that memory
    // (`boot::Information::free_memory`).
    let archive: &'static [u8] =
        unsafe { core::slice::from_raw_parts(arch::direct_map(initramfs.start).as_ptr(), length) };
    for entry in cpio_reader::iter_files(archive) {
        if entry.name() == SYMBOLS {
            symbols::begin(entry.file());
        } else if let Err(errno) = unpack(&place, &entry) {
            panic!(
                "{} of the initramfs cannot be unpacked ({errno:?}); if that is {}, ENOMEM, give the \
                 machine more memory (`--memory`)",
                entry.name(),
                Errno::ENOMEM.0
            );
        }
    }
    memory::begin();
    for (name, mode) in [(&b"dev"[..], 0o755), (b"proc", 0o555), (b"sys", 0o555), (b"tmp", 0o1777)]
    {
        directory_at(&place, name, mode).expect("there is memory for a few directories");
    }
    device::begin(&place).expect("there is memory for the devices");
    let top = memory::directory(&*place.node).expect("the root is a directory");
    top.replace(b"proc", proc::root());
    top.replace(b"sys", sys::root());
    if let Some(directory) = disk::begin() {
        top.replace(b"disk", directory);
    }
    console::begin();
}

/// Drops the whole file system.
pub fn end() {
    let Some(root) = root::take() else { return };
    // Nested directories are dropped in a loop, because they may be too deep for recursion.
    let mut left: Vec<Arc<dyn Node>> = [root.node.clone()].into();
    drop(root);
    while let Some(node) = left.pop() {
        if let Some(directory) = memory::directory(&*node) {
            directory.empty_into(&mut left);
        }
    }
}

/// The directory of this name. Creates it unless it exists.
pub(super) fn directory_at(
    above: &Arc<Place>,
    name: &[u8],
    mode: u32,
) -> Result<Arc<Place>, Errno> {
    if let Ok(node) = above.node.child(name) {
        return if node.kind() == Kind::Directory {
            Ok(above.below(node, name))
        } else {
            Err(Errno::ENOTDIR)
        };
    }
    let directory: Arc<dyn Node> = Directory::new(mode)?;
    memory::directory(&*above.node).ok_or(Errno::ENOTDIR)?.insert(name, directory.clone())?;
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
        // The kernel has its own devices; the archive's are ignored.
        _ => {
            log!(
                "{} of the initramfs is skipped: devices and sockets are not supported there",
                entry.name()
            );
            return Ok(());
        }
    };
    memory::directory(&*above.node).ok_or(Errno::ENOTDIR)?.insert(last, node)
}
