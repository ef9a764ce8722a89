//! The nodes of the disk's files.

use alloc::sync::{Arc, Weak};
use core::any::Any;
use core::mem;

use bindery::{ErrorMark, Object, Operation, ReadPattern};
use linux_raw_sys::general::O_TRUNC;

use crate::disk;
use crate::errno::{Errno, Outcome};
use crate::platform::Machine;
use crate::sync::{Mutex, SleepingMutex};

use super::super::attributes::{Attributes, Change, Kind, Patience};
use super::super::inode::Common;
use super::super::memory::Regular;
use super::super::node::{Advice, Node};
use super::super::segments::Segments;
use super::failed;
use super::numbers::Held;
use super::storage::{file_system, storage};
use super::volume::Volume;
use super::writer;

/// The first inode number of the disk's files.
const NUMBERS: u64 = 1 << 40;

/// A file of the disk.
pub struct DiskFile(Arc<File>);

/// A file, for its node and its openings.
struct File {
    held: Held,
    common: Common,
    /// The open file, if any. All openings share it, and with it the writers' lock.
    opened: SleepingMutex<Weak<Regular>>,
}

/// The number of the file that a node is.
pub fn number_of(node: &dyn Node) -> Option<u64> {
    Some(node.special()?.downcast_ref::<DiskFile>()?.0.held.number())
}

impl DiskFile {
    /// The file of this number, with the attributes that the disk has.
    pub fn new(number: u64) -> Result<Arc<Self>, Errno> {
        let storage = storage().ok_or(Errno::EIO)?;
        let held = storage.hold(number).ok_or(Errno::EIO)?;
        let (mode, owner, modified) = {
            let mut volume = storage.volume.lock();
            let record = volume.record(number).ok_or(Errno::EIO)?;
            (record.mode, record.owner, record.modified)
        };
        let common = Common::new(NUMBERS + number, mode)?;
        common.change(&Change {
            owner: (Some(owner.0), Some(owner.1)),
            times: [None, Some(modified)],
            ..Change::default()
        });
        let opened = SleepingMutex::new(Weak::new());
        Ok(Arc::new(Self(Arc::new(File { held, common, opened }))))
    }

    /// Makes the running thread's user the owner of a new file and writes the file's block.
    pub fn take_owner(&self) -> Result<(), Errno> {
        let who = crate::process::credentials();
        let owner = (Some(who.user.file), Some(who.group.file));
        self.change(&Change { owner, ..Change::default() })
    }
}

impl File {
    fn number(&self) -> u64 {
        self.held.number()
    }

    fn regular(&self) -> Result<Arc<Regular>, Errno> {
        let mut opened = self.opened.lock();
        if let Some(regular) = opened.upgrade() {
            return Ok(regular);
        }
        let size = self.size();
        let system = file_system().ok_or(Errno::EIO)?;
        let object = system.file(self.number(), size).map_err(|_| Errno::ENOMEM)?;
        let storage = storage().ok_or(Errno::EIO)?;
        // Checked while the object exists, because it keeps the content of an existing file.
        if storage.volume.lock().record(self.number()).is_none() {
            return Err(Errno::ESTALE);
        }
        let regular = Regular::stored(object, storage, self.number())?;
        *opened = Arc::downgrade(&regular);
        Ok(regular)
    }

    /// The file's size. An open file has its object's size.
    fn size(&self) -> u64 {
        if let Some(object) = file_system().and_then(|system| system.find(self.number())) {
            return object.size();
        }
        let size = storage().and_then(|storage| {
            let mut volume = storage.volume.lock();
            volume.record(self.number()).map(|record| record.size)
        });
        size.unwrap_or(0)
    }

    /// Takes note of a write.
    fn written(&self) {
        self.note(Common::written);
        if let Some(storage) = storage() {
            storage.volume.lock().has_changed(self.number());
        }
        writer::written();
    }

    /// Records the changes that the pager has seen: truncations, and first writes to pages through
    /// mappings.
    fn hear_news(&self, volume: &mut Volume) {
        if let Some(time) = volume.take_news(self.number()) {
            self.common.written_at(time);
        }
    }

    /// Changes attributes, and copies those that the disk has to keep to the record. The volume
    /// stays locked, because a mapping's write that records its time in between would have it
    /// overwritten by an older one.
    fn note(&self, change: impl FnOnce(&Common)) {
        let Some(storage) = storage() else { return };
        let mut volume = storage.volume.lock();
        self.hear_news(&mut volume);
        change(&self.common);
        let Attributes { mode, owner, times, .. } = self.common.attributes(0, 0);
        if let Some(record) = volume.record(self.number()) {
            (record.mode, record.owner, record.modified) = (mode, owner, times[1]);
        }
    }
}

impl File {
    fn attributes(&self) -> Attributes {
        let (has_name, pages) = storage().map_or((false, 0), |storage| {
            let mut volume = storage.volume.lock();
            self.hear_news(&mut volume);
            volume.record(self.number()).map_or((false, 0), |record| {
                let counts = record.extents.iter().map(|extent| u64::from(extent.count));
                (record.name.is_some(), counts.sum())
            })
        });
        let attributes = self.common.attributes(self.size(), pages * 8);
        Attributes { links: has_name.into(), ..attributes }
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.note(|common| common.change(change));
        storage().ok_or(Errno::EIO)?.write_record(self.number()).map_err(failed)
    }
}

impl Node for DiskFile {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        self.0.attributes()
    }

    fn permissions(&self) -> (u32, (u32, u32)) {
        self.0.common.permissions()
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.0.change(change)
    }

    fn open(&self, flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        let regular = self.0.regular()?;
        regular.open(flags)?;
        if flags & O_TRUNC != 0 {
            self.0.written();
        }
        let mark = SleepingMutex::new(regular.object().ok_or(Errno::EIO)?.error_mark());
        let reader = Mutex::new(regular.clone());
        Ok(Some(Arc::new(Opened { file: self.0.clone(), regular, mark, reader })))
    }

    fn special(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// An opening of a file. Its content is that of a regular file, and its attributes are the disk's.
struct Opened {
    file: Arc<File>,
    regular: Arc<Regular>,
    /// The errors that this opening has reported.
    mark: SleepingMutex<ErrorMark>,
    /// The file, through a handle that reads in this opening's order.
    reader: Mutex<Arc<Regular>>,
}

impl Opened {
    /// Changes the order of reads. Without memory for another handle, the order does not change.
    fn set_order(&self, pattern: ReadPattern) {
        let (Some(object), Some(storage)) = (self.regular.object(), storage()) else { return };
        let mut object = object.clone();
        object.set_read_pattern(pattern);
        if let Ok(reader) = Regular::stored(object, storage, self.file.number()) {
            let old = mem::replace(&mut *self.reader.lock(), reader);
            drop(old);
        }
    }

    fn reader(&self) -> Arc<Regular> {
        self.reader.lock().clone()
    }

    /// Takes note of a write.
    fn written<T>(&self, outcome: T) -> T {
        self.file.written();
        outcome
    }
}

impl Node for Opened {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        self.file.attributes()
    }

    fn permissions(&self) -> (u32, (u32, u32)) {
        self.file.common.permissions()
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.file.change(change)
    }

    fn read(&self, at: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        self.reader().read(at, into, patience)
    }

    fn write(&self, at: u64, from: &[u8], patience: Patience) -> Result<usize, Errno> {
        self.written(self.regular.write(at, from, patience))
    }

    fn read_into(&self, at: u64, to: &Segments, patience: Patience) -> Option<Outcome> {
        self.reader().read_into(at, to, patience)
    }

    fn write_from(&self, at: u64, from: &Segments, patience: Patience) -> Option<Outcome> {
        self.written(self.regular.write_from(at, from, patience))
    }

    fn append_from(&self, from: &Segments) -> Option<Result<(u64, u64), Errno>> {
        self.written(self.regular.append_from(from))
    }

    fn object(&self) -> Option<&Object<'static, Machine>> {
        self.regular.object()
    }

    fn synchronize(&self) -> Result<(), Errno> {
        let object = self.regular.object().ok_or(Errno::EIO)?;
        // The mark reports a failure, whichever call met it.
        let saved = object.sync(0, u64::MAX);
        // The size is left out, because the pager is informed of each change of it, including one
        // by a concurrent truncation.
        self.file.note(|_| {});
        let storage = storage().ok_or(Errno::EIO)?;
        let noted = storage.write_record(self.file.number()).map_err(failed);
        let errno = |error: bindery::Error| Errno::from(error.errno(Operation::Object));
        object.check_errors(&mut self.mark.lock()).map_err(errno)?;
        if let Err(error) = saved
            && error != bindery::Error::InputOutput
            && error != bindery::Error::NoSpace
        {
            return Err(errno(error));
        }
        noted?;
        disk::flush().map_err(failed)
    }

    fn check_errors(&self) -> Result<(), bindery::Error> {
        let object = self.regular.object().ok_or(bindery::Error::InputOutput)?;
        object.check_errors(&mut self.mark.lock())
    }

    fn advise(&self, at: u64, length: u64, advice: Advice) {
        let Some(object) = self.regular.object() else { return };
        match advice {
            Advice::WillNeed => object.read_ahead(at, length),
            Advice::DontNeed => {
                object.evict(at, length);
            }
            Advice::Order(pattern) => self.set_order(pattern),
        }
    }
}
