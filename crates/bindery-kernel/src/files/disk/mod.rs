//! `/disk`: the files of the disk, in one directory.
//!
//! | file | what |
//! |---|---|
//! | [`layout`] | the blocks of the disk |
//! | [`volume`], [`page_set`], [`extents`] | files and free blocks in memory |
//! | [`placements`] | blocks of stores in progress |
//! | [`cuts`] | pages that become holes |
//! | [`mapped_writes`] | room for pages that mappings write |
//! | [`storage`] | the pager, and the changes of the disk |
//! | [`node`], [`numbers`] | the nodes of the files, and their numbers |
//! | [`writer`] | the thread that stores dirty pages early |

mod cuts;
mod extents;
mod layout;
mod mapped_writes;
mod node;
mod numbers;
mod page_set;
mod placements;
mod storage;
mod volume;
pub mod writer;

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::Operation;
use bindery::addr::PAGE_SIZE;

use crate::errno::Errno;
use crate::{heap, log, options, time};

use super::memory::Directory;
use super::node::Node;
use super::store::Store;
use layout::{NAME_MAX, Record};
use node::{DiskFile, number_of};
use storage::{Storage, file_system, storage};

/// The maximum heap memory for a file, in bytes.
const FILE_SIZE: usize = 1024 + layout::WITHIN * size_of::<extents::Extent>();

fn failed(error: bindery::PagerError) -> Errno {
    match error {
        bindery::PagerError::NoSpace => Errno::ENOSPC,
        bindery::PagerError::OutOfMemory => Errno::ENOMEM,
        bindery::PagerError::InputOutput | bindery::PagerError::NotSupported | _ => Errno::EIO,
    }
}

/// The directory of the disk with its files; `None` if no disk can be mounted.
pub fn begin() -> Option<Arc<Directory>> {
    crate::disk::blocks()?;
    let mount = || {
        let storage = storage::mount()?;
        let directory = Directory::of_store(storage, 0o1777).map_err(|_| NO_MEMORY)?;
        for (number, name) in names(storage) {
            let file = DiskFile::new(number).map_err(|_| NO_MEMORY)?;
            directory.insert_stored(&name, file).map_err(|_| NO_MEMORY)?;
        }
        writer::begin();
        Ok::<_, &str>(directory)
    };
    mount().inspect_err(|problem| log!("/disk is not mounted: {problem}")).ok()
}

const NO_MEMORY: &str = "there is no memory for the files of the disk";

/// The files' names. If two files have one name, the machine stopped during a `rename`, and the
/// earlier file is removed.
fn names(storage: &Storage) -> Vec<(u64, Vec<u8>)> {
    let mut volume = storage.volume.lock();
    let records = volume.records.iter().enumerate();
    let named = records.filter_map(|(number, record)| {
        let record = record.as_ref()?;
        Some((record.name.clone()?, record.sequence, number as u64))
    });
    let mut named: Vec<_> = named.collect();
    named.sort();
    let mut names: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut old = Vec::new();
    for (name, _, number) in named {
        if names.last().is_some_and(|(_, last)| *last == name) {
            old.extend(names.pop().map(|(number, _)| number));
        }
        names.push((number, name));
    }
    for number in &old {
        if let Some(record) = volume.record(*number) {
            record.name = None;
        }
    }
    drop(volume);
    if !old.is_empty() && crate::disk::flush().is_err() {
        // The later file may still be only in the device's cache, so the next mount removes the old
        // one.
        return names;
    }
    for number in old {
        let _ = storage.remove(number);
    }
    names
}

/// The size of the disk, and its free part, in blocks.
pub fn size_and_free() -> Option<(u64, u64)> {
    Some(storage()?.volume.lock().size_and_free())
}

/// Stores all that was changed (`sync(2)`, `syncfs(2)`).
///
/// # Errors
/// The errors of the device and the disk.
pub fn synchronize() -> Result<(), Errno> {
    let (Some(storage), Some(system)) = (storage(), file_system()) else { return Ok(()) };
    let mut outcome = Ok(());
    for number in 0..layout::FILES as u64 {
        if let Some(object) = system.find(number) {
            let saved = object.sync(0, u64::MAX).map_err(|error| error.errno(Operation::Object));
            outcome = outcome.and(saved.map_err(Errno::from));
        }
    }
    outcome.and(storage.commit().map_err(failed))
}

/// Whether a disk is mounted.
#[inline]
pub fn is_mounted() -> bool {
    storage().is_some()
}

/// Makes all stored content durable: the places of its blocks, and the sizes of its files
/// (`msync(2)`).
///
/// # Errors
/// The errors of the device.
pub fn commit() -> Result<(), Errno> {
    storage().map_or(Ok(()), |storage| storage.commit().map_err(failed))
}

impl Store for Storage {
    fn reserve(&self, file: u64, at: u64, length: u64) -> Result<u64, Errno> {
        let Some(behind) = at.checked_add(length).filter(|_| length > 0) else {
            // The object refuses what cannot be, and writes nothing.
            return Ok(length);
        };
        let pages = at / PAGE_SIZE..behind.div_ceil(PAGE_SIZE);
        match self.volume.lock().reserve(file, pages) {
            Ok(end) => Ok((end * PAGE_SIZE).min(behind) - at),
            Err(error) => Err(failed(error)),
        }
    }

    fn end_write(&self, file: u64, end: u64) {
        self.volume.lock().end_write(file, end.div_ceil(PAGE_SIZE));
    }

    fn create(&self, name: &[u8], mode: u32) -> Result<Arc<dyn Node>, Errno> {
        if name.len() > NAME_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        heap::room(FILE_SIZE)?;
        self.drop_old_names()?;
        let record = |sequence| Record {
            name: Some(name.to_vec()),
            size: 0,
            mode,
            owner: (0, 0),
            modified: time::real_time(),
            sequence,
            extents: Vec::new(),
            lists: Vec::new(),
        };
        let number = self.add(record).ok_or(Errno::ENOSPC)?;
        let made = DiskFile::new(number);
        let file = made.and_then(|file| file.take_owner().map(|()| file));
        let undo = |_: &Errno| {
            if let Some(record) = self.volume.lock().record(number) {
                record.name = None;
            }
            let _ = self.remove(number);
        };
        Ok(file.inspect_err(undo)?)
    }

    fn remove(&self, node: &dyn Node) -> Result<(), Errno> {
        let number = number_of(node).ok_or(Errno::EIO)?;
        self.unlink(number)
    }

    fn rename(&self, node: &dyn Node, name: &[u8], replaces: bool) -> Result<(), Errno> {
        let number = number_of(node).ok_or(Errno::EIO)?;
        self.drop_old_names()?;
        let old = {
            let mut volume = self.volume.lock();
            volume.sequence += 1;
            let sequence = volume.sequence;
            let record = volume.record(number).ok_or(Errno::ENOENT)?;
            record.sequence = sequence;
            let old = record.name.replace(name.to_vec());
            volume.has_old_names = true;
            old
        };
        let flush = |()| if replaces { crate::disk::flush() } else { Ok(()) };
        // Before the block of the replaced file is emptied: if only that change reached the disk,
        // the new name would name no file.
        self.write_record(number).and_then(flush).map_err(|error| {
            let mut volume = self.volume.lock();
            if let Some(record) = volume.record(number) {
                record.name = old;
            }
            // The disk may have either name.
            volume.has_changed(number);
            failed(error)
        })
    }

    fn synchronize(&self) -> Result<(), Errno> {
        self.commit().map_err(failed)
    }
}

impl Storage {
    /// Makes the last renames durable, before another file takes a name. Otherwise the machine may
    /// stop while the device has the block of the new file and the old block of the renamed one:
    /// two files of one name, of which the next mount removes the renamed one.
    fn drop_old_names(&self) -> Result<(), Errno> {
        if self.volume.lock().has_old_names {
            self.commit().map_err(failed)?;
            self.volume.lock().has_old_names = false;
        }
        Ok(())
    }

    /// Removes a file's name. Its content is freed after its last close.
    fn unlink(&self, number: u64) -> Result<(), Errno> {
        let system = file_system().ok_or(Errno::EIO)?;
        let size = {
            let mut volume = self.volume.lock();
            let record = volume.record(number).ok_or(Errno::ENOENT)?;
            record.name = None;
            record.size
        };
        // The end of this handle, or of a later one, removes the file (`Pager::removed`). Even
        // without memory for the handle, the name is removed.
        let lacks_memory = options::value("provoke") == Some("unlink-without-memory");
        let object = if lacks_memory { None } else { system.file(number, size).ok() };
        if object.is_none() {
            self.volume.lock().set_orphan(number, true);
        }
        self.write_record(number).map_err(failed)?;
        drop(object);
        Ok(())
    }
}
