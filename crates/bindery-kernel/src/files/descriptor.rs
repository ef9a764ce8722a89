//! Descriptors: the open files of a process.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use bindery::{FileAccess, Object};
use bindery_linux::OpenFile;
use linux_raw_sys::general::{O_APPEND, O_CLOEXEC, O_NONBLOCK, O_PATH};

use crate::errno::Errno;
use crate::heap;
use crate::platform::Machine;
use crate::process::{self, Process, Thread, ThreadFiles};
use crate::sync::{Mutex, SleepingMutex};

use super::attributes::Patience;
use super::node::{Mappable, Node, Place, file_access, may_read, may_write};
use super::permission;

/// The maximum number of descriptors of a process.
pub const HARD_LIMIT: u64 = 4096;

/// One opening of a node, which descriptors share after `dup` and `fork`.
pub struct Description {
    /// The place where the path led.
    pub place: Arc<Place>,
    /// The node that is read and written.
    pub node: Arc<dyn Node>,
    /// The position of the next read or write, locked during each.
    pub position: SleepingMutex<u64>,
    flags: AtomicU32,
    /// The writers of a pipe before this opening, if it did not wait for one.
    writers_before: u64,
}

/// The flags that `fcntl` can change.
const CHANGEABLE: u32 = O_APPEND | O_NONBLOCK;

impl Description {
    /// The flags of the opening that never change.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(place: Arc<Place>, node: Arc<dyn Node>, flags: u32) -> Result<Arc<Self>, Errno> {
        heap::room(512)?;
        let position = SleepingMutex::new(0);
        let waits_for_writer = may_write(flags) || flags & O_NONBLOCK == 0;
        let writers_before = if waits_for_writer { 0 } else { node.writers_so_far() };
        let flags = AtomicU32::new(flags);
        Ok(Arc::new(Self { place, node, position, flags, writers_before }))
    }

    /// Whether the node is a pipe that no writer has had since this opening or before it.
    pub fn is_early_reader(&self) -> bool {
        self.node.lacks_writer_since(self.writers_before)
    }

    /// The flags of this opening.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Changes the changeable flags (`F_SETFL`).
    pub fn set_flags(&self, flags: u32) {
        let kept = self.flags() & !CHANGEABLE;
        self.flags.store(kept | flags & CHANGEABLE, Ordering::Relaxed);
    }

    /// Whether transfers through this opening may sleep.
    pub fn patience(&self) -> Patience {
        if self.flags() & O_NONBLOCK != 0 { Patience::None } else { Patience::Wait }
    }

    /// The node, if it can be read.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn readable(&self) -> Result<&dyn Node, Errno> {
        let flags = self.flags();
        if flags & O_PATH == 0 && may_read(flags) { Ok(&*self.node) } else { Err(Errno::EBADF) }
    }

    /// The node, if it can be written.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn writable(&self) -> Result<&dyn Node, Errno> {
        let flags = self.flags();
        if flags & O_PATH == 0 && may_write(flags) { Ok(&*self.node) } else { Err(Errno::EBADF) }
    }

    /// The node's object with the permitted access.
    ///
    /// # Errors
    /// `EINVAL` if the node has no object.
    pub fn open_file(&self) -> Result<OpenFile<'static, Machine>, Errno> {
        let object = self.node.object().ok_or(Errno::EINVAL)?.clone();
        let mut access = file_access(self.flags());
        access.set(FileAccess::OWNER, permission::is_owner(&*self.node));
        Ok(OpenFile { object, access })
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        if self.flags() & O_PATH == 0 {
            self.node.closed(self.flags());
        }
    }
}

/// The effect of `exec` on a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtExec {
    /// The descriptor stays open.
    Kept,
    /// `exec` closes the descriptor (`O_CLOEXEC`).
    Closed,
}

#[derive(Clone)]
struct Slot {
    description: Arc<Description>,
    at_exec: AtExec,
}

/// The descriptors of a thread, its current directory and its umask. All threads of a process share
/// them, unless `clone` specified otherwise.
pub struct Files {
    descriptors: Arc<Descriptors>,
    surroundings: Arc<Surroundings>,
}

/// The part shared with `CLONE_FILES`.
#[derive(Default)]
struct Descriptors {
    table: Mutex<Vec<Option<Slot>>>,
}

/// The part shared with `CLONE_FS`.
struct Surroundings {
    directory: Mutex<Arc<Place>>,
    umask: AtomicU32,
}

/// Whether a child shares its parent's table or gets a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Inherited {
    /// The same.
    Shared,
    /// A copy.
    Copied,
}

// SAFETY: 1. no other type implements it.
unsafe impl ThreadFiles for Files {}

impl Files {
    /// The table of the running thread.
    ///
    /// # Panics
    /// If the thread has closed its files because it is exiting.
    pub fn current() -> Arc<Self> {
        Self::of(&process::current()).expect("a running thread has files")
    }

    /// The table of a thread; `None` once it has ended.
    pub fn of(thread: &Thread) -> Option<Arc<Self>> {
        let files = Arc::into_raw(thread.files()?);
        // SAFETY: the pointer is of an `Arc` of the one type that implements the trait.
        Some(unsafe { Arc::from_raw(files.cast()) })
    }

    /// The table of a process's first thread; `None` once it has ended.
    pub fn of_process(process: &Process) -> Option<Arc<Self>> {
        Self::of(&*process.first_thread()?)
    }

    /// The description behind a descriptor of the running thread. Unlike `current().get()`, this
    /// function does not count a reference to the table, so a call pays for only one reference, to
    /// the description.
    ///
    /// # Errors
    /// `EBADF`.
    ///
    /// # Panics
    /// As [`Files::current`].
    pub fn description(descriptor: i32) -> Result<Arc<Description>, Errno> {
        process::current().with_files(|files| {
            let files: *const dyn ThreadFiles = files.expect("a running thread has files");
            // SAFETY: the pointer is of a reference to the one type that implements the trait.
            unsafe { &*files.cast::<Self>() }.get(descriptor)
        })
    }

    /// A table with these descriptions at descriptors 0, 1 and 2, and a current directory.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(standard: [Arc<Description>; 3], directory: Arc<Place>) -> Result<Self, Errno> {
        let files = Self {
            descriptors: Arc::default(),
            surroundings: Arc::new(Surroundings {
                directory: Mutex::new(directory),
                umask: AtomicU32::new(0o022),
            }),
        };
        for (at, description) in standard.into_iter().enumerate() {
            let slot = Slot { description, at_exec: AtExec::Kept };
            let mut table = files.descriptors.table.lock();
            entry(&mut table, at)?.replace(slot);
        }
        Ok(files)
    }

    /// The table of a child of `clone`: shared or copied descriptors (`CLONE_FILES`), current
    /// directory and umask (`CLONE_FS`).
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn inherit(&self, descriptors: Inherited, surroundings: Inherited) -> Result<Self, Errno> {
        let descriptors = match descriptors {
            Inherited::Shared => self.descriptors.clone(),
            Inherited::Copied => {
                let table = self.descriptors.table.lock();
                heap::room(size_of::<Option<Slot>>() * table.len() + 256)?;
                Arc::new(Descriptors { table: Mutex::new(table.clone()) })
            }
        };
        let surroundings = match surroundings {
            Inherited::Shared => self.surroundings.clone(),
            Inherited::Copied => Arc::new(Surroundings {
                directory: Mutex::new(self.directory()),
                umask: AtomicU32::new(self.umask()),
            }),
        };
        Ok(Self { descriptors, surroundings })
    }

    /// Whether others share the descriptors, but not the current directory.
    pub fn are_shared(&self) -> bool {
        Arc::strong_count(&self.descriptors) > 1
    }

    /// Closes the descriptors with `O_CLOEXEC`.
    pub fn close_on_exec(&self) {
        let mut closed = Vec::new();
        for slot in self.descriptors.table.lock().iter_mut() {
            closed.extend(slot.take_if(|slot| slot.at_exec == AtExec::Closed));
        }
    }

    /// The current directory.
    pub fn directory(&self) -> Arc<Place> {
        self.surroundings.directory.lock().clone()
    }

    /// Changes the current directory.
    pub fn set_directory(&self, place: Arc<Place>) {
        let old = core::mem::replace(&mut *self.surroundings.directory.lock(), place);
        drop(old);
    }

    /// The permission bits that new files do not get.
    pub fn umask(&self) -> u32 {
        self.surroundings.umask.load(Ordering::Relaxed)
    }

    /// Changes the umask; returns the old one.
    pub fn set_umask(&self, umask: u32) -> u32 {
        self.surroundings.umask.swap(umask & 0o777, Ordering::Relaxed)
    }

    /// The description behind a descriptor.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn get(&self, descriptor: i32) -> Result<Arc<Description>, Errno> {
        let index = usize::try_from(descriptor).map_err(|_| Errno::EBADF)?;
        match self.descriptors.table.lock().get(index) {
            Some(Some(slot)) => Ok(slot.description.clone()),
            _ => Err(Errno::EBADF),
        }
    }

    /// The lowest free descriptor for a description.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`.
    pub fn insert(&self, description: Arc<Description>, at_exec: AtExec) -> Result<i32, Errno> {
        self.insert_from(0, description, at_exec)
    }

    /// The lowest free descriptor from `first` on.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`; `EINVAL` if `first` is beyond the limit.
    pub fn insert_from(
        &self,
        first: u64,
        description: Arc<Description>,
        at_exec: AtExec,
    ) -> Result<i32, Errno> {
        let limit = process::descriptor_limit();
        if first >= limit {
            return Err(if first == 0 { Errno::EMFILE } else { Errno::EINVAL });
        }
        let mut table = self.descriptors.table.lock();
        let first = first as usize;
        let free = (first..).find(|at| table.get(*at).is_none_or(Option::is_none));
        let free = free.filter(|at| (*at as u64) < limit).ok_or(Errno::EMFILE)?;
        entry(&mut table, free)?.replace(Slot { description, at_exec });
        Ok(free as i32)
    }

    /// Installs a description at a descriptor, and closes the old one.
    ///
    /// # Errors
    /// `EBADF` beyond the limit, `ENOMEM`.
    pub fn set(
        &self,
        descriptor: i32,
        description: Arc<Description>,
        at_exec: AtExec,
    ) -> Result<(), Errno> {
        let at = usize::try_from(descriptor).map_err(|_| Errno::EBADF)?;
        if at as u64 >= process::descriptor_limit() {
            return Err(Errno::EBADF);
        }
        let mut table = self.descriptors.table.lock();
        let old = entry(&mut table, at)?.replace(Slot { description, at_exec });
        drop(table);
        drop(old);
        Ok(())
    }

    /// Closes a descriptor.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn close(&self, descriptor: i32) -> Result<(), Errno> {
        let index = usize::try_from(descriptor).map_err(|_| Errno::EBADF)?;
        let slot = self.descriptors.table.lock().get_mut(index).and_then(Option::take);
        // Dropped without the lock, because dropping the last reference may wake other threads.
        slot.map(drop).ok_or(Errno::EBADF)
    }

    /// Closes a descriptor that the running call has installed but could not report. Leaves the
    /// descriptor if another thread has since closed it and opened another file there.
    pub fn withdraw(&self, descriptor: i32, description: &Arc<Description>) {
        let made = |slot: &Slot| Arc::ptr_eq(&slot.description, description);
        let slot = {
            let mut table = self.descriptors.table.lock();
            let entry = usize::try_from(descriptor).ok().and_then(|index| table.get_mut(index));
            entry.and_then(|entry| entry.take_if(|slot| made(slot)))
        };
        // Without the lock, as in `close`.
        drop(slot);
    }

    /// The effect of `exec` on a descriptor.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn at_exec(&self, descriptor: i32) -> Result<AtExec, Errno> {
        let index = usize::try_from(descriptor).map_err(|_| Errno::EBADF)?;
        match self.descriptors.table.lock().get(index) {
            Some(Some(slot)) => Ok(slot.at_exec),
            _ => Err(Errno::EBADF),
        }
    }

    /// Changes the effect of `exec` on a descriptor.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn set_at_exec(&self, descriptor: i32, at_exec: AtExec) -> Result<(), Errno> {
        let index = usize::try_from(descriptor).map_err(|_| Errno::EBADF)?;
        match self.descriptors.table.lock().get_mut(index) {
            Some(Some(slot)) => {
                slot.at_exec = at_exec;
                Ok(())
            }
            _ => Err(Errno::EBADF),
        }
    }

    /// The open descriptors, in rising order.
    pub fn open_descriptors(&self) -> Vec<i32> {
        let table = self.descriptors.table.lock();
        (0..table.len()).filter(|at| table[*at].is_some()).map(|at| at as i32).collect()
    }

    /// Reports a failed store of a mapped file, for `msync(2)`. The kernel does not know the opening
    /// behind a mapping. So it takes the only opening that the descriptors have of the file. With
    /// none or several it reports nothing, because an error that the wrong opening has reported
    /// would be lost to its `fsync(2)`.
    ///
    /// # Errors
    /// The store's error.
    pub fn check_errors(&self, file: &Object<'static, Machine>) -> Result<(), bindery::Error> {
        let mut only: Option<Arc<Description>> = None;
        let count = self.descriptors.table.lock().len();
        for descriptor in 0..count {
            let Ok(description) = self.get(descriptor as i32) else { continue };
            let object = description.node.object();
            if object.is_none_or(|object| object.identity() != file.identity()) {
                continue;
            }
            let is_other = |only: &Arc<Description>| !Arc::ptr_eq(only, &description);
            if only.as_ref().is_some_and(is_other) {
                return Ok(());
            }
            only = Some(description);
        }
        only.map_or(Ok(()), |description| description.node.check_errors())
    }

    /// The file behind a descriptor, for `mmap`.
    ///
    /// # Errors
    /// `EBADF`; `ENODEV` for files that cannot be mapped.
    pub fn mappable(&self, descriptor: i32) -> Result<Mappable, Errno> {
        let description = self.get(descriptor)?;
        if description.flags() & O_PATH != 0 {
            return Err(Errno::EBADF);
        }
        if description.node.is_zeroes() {
            return Ok(Mappable::Zeroes(file_access(description.flags())));
        }
        description.open_file().map(Mappable::File).map_err(|_| description.node.unmappable())
    }
}

/// An entry of the table, which grows as needed. Takes no slot: if there is no room, the caller
/// drops the description after it has unlocked the table, because dropping the last reference to a
/// device may sleep.
fn entry(table: &mut Vec<Option<Slot>>, at: usize) -> Result<&mut Option<Slot>, Errno> {
    if at >= table.len() {
        heap::room((at + 1) * size_of::<Option<Slot>>() * 2)?;
        table.resize(at + 1, None);
    }
    Ok(&mut table[at])
}

/// The effect of `exec` that flags of `open` select.
pub fn at_exec(flags: u32) -> AtExec {
    if flags & O_CLOEXEC != 0 { AtExec::Closed } else { AtExec::Kept }
}
