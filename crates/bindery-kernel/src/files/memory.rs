//! The file system in memory: directories, symbolic links, and regular files whose contents are
//! objects of the core. `/proc`, `/sys` and `/dev` have their own modules.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;
use core::sync::atomic::{AtomicU64, Ordering};

use bindery::{Access, Accounting, Object, Operation, Quota, Sealing};
use bindery_linux as linux;

use crate::errno::{Errno, Outcome, from_raw};
use crate::heap;
use crate::memory::memory;
use crate::platform::Machine;
use crate::process;
use crate::sync::{Mutex, SleepingMutex};

use super::attributes::{Attributes, Change, Entry, Kind, Patience};
use super::inode::{Common, NODE_SIZE, new_number};
use super::manner::limited;
use super::node::{Node, count_links, file_access};
use super::segments::Segments;
use super::store::Store;
use super::transfer::{Step, by_steps};
use linux_raw_sys::general::{O_RDWR, O_TRUNC};

/// The common quota of all regular files. Unlimited while the initramfs is unpacked.
static QUOTA: Quota = Quota::new(u64::MAX);

/// The share of frames that writers leave for faults, as a divisor.
const FAULT_RESERVE_SHARE: u64 = 64;

/// Sets the limit of the file system, once the initramfs is unpacked: half of memory (as Linux's
/// tmpfs), plus the present content.
pub fn begin() {
    let memory = memory();
    QUOTA.set_limit(QUOTA.used() + memory.total_frames() / 2);
    memory.set_fault_reserve(memory.total_frames() / FAULT_RESERVE_SHARE);
}

/// The size of the file system, and its free part, in pages.
pub fn size_and_free() -> (u64, u64) {
    (QUOTA.limit(), QUOTA.limit().saturating_sub(QUOTA.used()))
}

/// An object within the file system's quota, for the content of a device.
///
/// # Errors
/// `ENOMEM`.
pub fn new_content(size: u64) -> Result<Object<'static, Machine>, Errno> {
    memory()
        .shared_memory_within(&QUOTA, size, Sealing::Forbidden, Accounting::PerPage)
        .map_err(|_| Errno::ENOMEM)
}

/// A regular file.
pub struct Regular {
    common: Common,
    object: Object<'static, Machine>,
    /// A second handle to the object for the writer, locked during each write.
    writer: SleepingMutex<Object<'static, Machine>>,
    /// The storage of the content, and the file's number there.
    store: Option<(&'static dyn Store, u64)>,
}

/// The errno of an error of an object.
fn refused(error: bindery::Error) -> Errno {
    error.errno(Operation::Object).into()
}

/// Repeats a read of an object that ran out of memory, after memory was freed. A read needs memory
/// only for a page in swap. Like a fault on that page, the read waits instead of failing (Linux
/// retries an allocation of one page until the OOM killer has freed memory).
///
/// # Errors
/// The errors of `read`. `ENOMEM` only if the running thread is about to end, or if the victim may
/// be waiting for a lock of the running call.
#[inline]
fn with_room(mut read: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Errno> {
    loop {
        match read() {
            Err(Errno::ENOMEM) if !process::memory_ran_out() => {}
            outcome => return outcome,
        }
    }
}

impl Regular {
    /// An empty file.
    pub fn new(mode: u32) -> Result<Arc<Self>, Errno> {
        Self::of(new_content(0)?, mode)
    }

    /// A file on an existing object (`memfd_create`).
    pub fn of(object: Object<'static, Machine>, mode: u32) -> Result<Arc<Self>, Errno> {
        Self::with_store(object, mode, None)
    }

    /// A file whose content a store keeps under this number.
    pub fn stored(
        object: Object<'static, Machine>,
        store: &'static dyn Store,
        number: u64,
    ) -> Result<Arc<Self>, Errno> {
        Self::with_store(object, 0, Some((store, number)))
    }

    fn with_store(
        object: Object<'static, Machine>,
        mode: u32,
        store: Option<(&'static dyn Store, u64)>,
    ) -> Result<Arc<Self>, Errno> {
        let common = Common::new(object.identity(), mode)?;
        let writer = SleepingMutex::new(object.clone());
        Ok(Arc::new(Self { common, object, writer, store }))
    }

    /// The number of bytes of a write for which the storage has room. The writer's lock is held.
    fn room(&self, at: u64, length: u64) -> Result<u64, Errno> {
        self.store.map_or(Ok(length), |(store, number)| store.reserve(number, at, length))
    }

    /// Copies from `at` on to a program's memory, page by page, from the pages themselves.
    fn copy_out(&self, at: u64, to: &Segments) -> Outcome {
        let total = to.total() as usize;
        let step = |done: usize| {
            let mut stopped = false;
            let count = with_room(|| {
                let (at, length) = (at + done as u64, total - done);
                let copied = self.object.read_with(at, length, |before, from, length| {
                    // SAFETY: the object has the bytes for us to read.
                    let count = unsafe { to.put(done + before, from, length) };
                    stopped = count < length;
                    count
                });
                copied.map_err(refused)
            })?;
            Ok(Step { count, fault: stopped.then_some(count) })
        };
        let fault_in = |done| to.fault_in(done as u64, Access::Write);
        Ok(by_steps(step, fault_in, |_| false)? as u64)
    }

    /// Reports to the storage how many of the reserved bytes a write has written.
    fn end_write(&self, at: u64, count: u64) {
        if let Some((store, number)) = self.store {
            store.end_write(number, if count > 0 { at + count } else { 0 });
        }
    }

    /// Copies a program's memory to `at` in the object of `writer`, which is locked, so that other
    /// writers see all of the write or nothing, even if the copy has to fault pages in.
    fn copy_in(&self, object: &Object<'static, Machine>, at: u64, from: &Segments) -> Outcome {
        match self.store {
            None => self.copy_all_in(object, at, from),
            Some(_) => self.copy_in_with_room(object, at, from),
        }
    }

    /// [`Regular::copy_in`], limited to the room in the storage.
    // Out of line: files in memory pay only a comparison.
    #[cold]
    fn copy_in_with_room(
        &self,
        object: &Object<'static, Machine>,
        at: u64,
        from: &Segments,
    ) -> Outcome {
        let room = self.room(at, from.total())?;
        let outcome = if room == from.total() {
            self.copy_all_in(object, at, from)
        } else {
            from.first(room).and_then(|first| self.copy_all_in(object, at, &first))
        };
        self.end_write(at, *outcome.as_ref().unwrap_or(&0));
        outcome
    }

    #[inline]
    fn copy_all_in(&self, object: &Object<'static, Machine>, at: u64, from: &Segments) -> Outcome {
        let total = from.total() as usize;
        let step = |done: usize| {
            let mut stopped = false;
            let copied = object.write_with(at + done as u64, total - done, |before, to, length| {
                // SAFETY: the object has the bytes for us to write.
                let count = unsafe { from.take(done + before, to, length) };
                stopped = count < length;
                count
            });
            let count = copied.map_err(refused)?;
            Ok(Step { count, fault: stopped.then_some(count) })
        };
        let fault_in = |done| from.fault_in(done as u64, Access::Read);
        let done = by_steps(step, fault_in, |_| false)?;
        if done > 0 {
            self.common.written();
        }
        Ok(done as u64)
    }

    fn opened(&self, flags: u32) -> linux::OpenFile<'static, Machine> {
        linux::OpenFile { object: self.object.clone(), access: file_access(flags) }
    }
}

impl Node for Regular {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        let pages = self.object.resident_pages() + self.object.swapped_pages();
        self.common.attributes(self.object.size(), pages * 8)
    }

    fn permissions(&self) -> (u32, (u32, u32)) {
        self.common.permissions()
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.common.change(change);
        Ok(())
    }

    fn open(&self, flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        if flags & O_TRUNC != 0 {
            from_raw(linux::ftruncate(&self.opened(O_RDWR), 0))?;
            self.common.written();
        }
        Ok(None)
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
        let opened = self.opened(O_RDWR);
        with_room(|| Ok(from_raw(linux::pread(&opened, into, at))? as usize))
    }

    fn write(&self, at: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        let at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
        let _writer = self.writer.lock();
        let room = self.room(at.cast_unsigned(), from.len() as u64)?;
        let from = &from[..room as usize];
        let count = from_raw(linux::pwrite(&self.opened(O_RDWR), from, at));
        self.end_write(at.cast_unsigned(), *count.as_ref().unwrap_or(&0));
        let count = count? as usize;
        self.common.written();
        Ok(count)
    }

    fn read_into(&self, at: u64, to: &Segments, _: Patience) -> Option<Outcome> {
        Some(self.copy_out(at, to))
    }

    fn write_from(&self, at: u64, from: &Segments, _: Patience) -> Option<Outcome> {
        Some(self.copy_in(&self.writer.lock(), at, from))
    }

    fn append_from(&self, from: &Segments) -> Option<Result<(u64, u64), Errno>> {
        let object = self.writer.lock();
        // Read under the lock, because the previous writer may have yielded the CPU before the file
        // grew.
        let at = object.size();
        let written = limited(self, at, from, |from| self.copy_in(&object, at, from));
        Some(written.map(|count| (at, count)))
    }

    fn object(&self) -> Option<&Object<'static, Machine>> {
        Some(&self.object)
    }

    fn links(&self) -> Option<&Common> {
        Some(&self.common)
    }

    fn is_seekable(&self) -> bool {
        !self.object.is_secret()
    }
}

/// A symbolic link.
pub struct Link {
    common: Common,
    target: Vec<u8>,
}

impl Link {
    /// A link to a path.
    pub fn new(target: &[u8]) -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self { common: Common::new(new_number(), 0o777)?, target: target.into() }))
    }
}

impl Node for Link {
    fn kind(&self) -> Kind {
        Kind::Link
    }

    fn attributes(&self) -> Attributes {
        self.common.attributes(self.target.len() as u64, 0)
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.common.change(change);
        Ok(())
    }

    fn target(&self) -> Result<Vec<u8>, Errno> {
        Ok(self.target.clone())
    }

    fn links(&self) -> Option<&Common> {
        Some(&self.common)
    }

    fn open(&self, _: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        Err(Errno::ELOOP)
    }
}

struct Named {
    node: Arc<dyn Node>,
    cookie: u64,
}

/// A directory.
pub struct Directory {
    store: Option<&'static dyn Store>,
    common: Common,
    entries: Mutex<BTreeMap<Vec<u8>, Named>>,
    cookies: AtomicU64,
    /// Whether the directory was removed (`rmdir`), so that no name can be added.
    removed: core::sync::atomic::AtomicBool,
}

impl Directory {
    /// An empty directory.
    pub fn new(mode: u32) -> Result<Arc<Self>, Errno> {
        Self::stored(None, mode)
    }

    /// An empty directory whose files a store keeps. It can contain only regular files.
    pub fn of_store(store: &'static dyn Store, mode: u32) -> Result<Arc<Self>, Errno> {
        Self::stored(Some(store), mode)
    }

    fn stored(store: Option<&'static dyn Store>, mode: u32) -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self {
            store,
            common: Common::new(new_number(), mode)?,
            entries: Mutex::new(BTreeMap::new()),
            cookies: AtomicU64::new(3),
            removed: false.into(),
        }))
    }

    /// Adds a node under a free name.
    ///
    /// # Errors
    /// `EEXIST`; `ENOENT` if the directory itself has been removed; `ENOMEM`.
    pub fn insert(&self, name: &[u8], node: Arc<dyn Node>) -> Result<(), Errno> {
        if self.store.is_some() { Err(Errno::EPERM) } else { self.insert_stored(name, node) }
    }

    /// The storage of the directory's files.
    pub fn store(&self) -> Option<&'static dyn Store> {
        self.store
    }

    /// Creates a regular file under a free name.
    ///
    /// # Errors
    /// The errors of [`Directory::insert`] and of the store.
    pub fn create(&self, name: &[u8], mode: u32) -> Result<Arc<dyn Node>, Errno> {
        let node: Arc<dyn Node> = match self.store {
            Some(store) => store.create(name, mode)?,
            None => Regular::new(mode)?,
        };
        let made = self.insert_stored(name, node.clone());
        if let (Err(_), Some(store)) = (&made, self.store) {
            store.remove(&*node)?;
        }
        made.map(|()| node)
    }

    /// As [`Directory::insert`], for a node that the store already holds under this name.
    ///
    /// # Errors
    /// As [`Directory::insert`].
    pub fn insert_stored(&self, name: &[u8], node: Arc<dyn Node>) -> Result<(), Errno> {
        heap::room(NODE_SIZE)?;
        let mut entries = self.entries.lock();
        if self.removed.load(Ordering::Relaxed) {
            return Err(Errno::ENOENT);
        }
        if entries.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        entries.insert(name.into(), self.named(node));
        drop(entries);
        self.common.written();
        Ok(())
    }

    /// Another name for a node.
    pub fn link(&self, name: &[u8], node: &Arc<dyn Node>) -> Result<(), Errno> {
        self.insert(name, node.clone())?;
        count_links(&**node, 1);
        Ok(())
    }

    /// Removes a name if `allowed` permits it.
    ///
    /// # Errors
    /// `ENOENT`, or the errors of `allowed`.
    pub fn remove(
        &self,
        name: &[u8],
        allowed: impl FnOnce(&dyn Node) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut entries = self.entries.lock();
        allowed(&*entries.get(name).ok_or(Errno::ENOENT)?.node)?;
        let node = entries.remove(name);
        drop(entries);
        if let Some(named) = node {
            count_links(&*named.node, -1);
            if let Some(store) = self.store {
                store.remove(&*named.node)?;
            }
        }
        self.common.written();
        Ok(())
    }

    /// Marks an empty directory as removed.
    ///
    /// # Errors
    /// `ENOTEMPTY`.
    pub fn retire(&self) -> Result<(), Errno> {
        if !self.entries.lock().is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.removed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Puts `node` under `name`. Returns the node that was there.
    pub fn replace(&self, name: &[u8], node: Arc<dyn Node>) -> Option<Arc<dyn Node>> {
        let named = self.named(node);
        let old = self.entries.lock().insert(name.into(), named);
        self.common.written();
        old.map(|named| named.node)
    }

    /// Fails if no name can be added.
    ///
    /// # Errors
    /// `ENOENT` if the directory has been removed; `ENOMEM`.
    pub fn check_room(&self) -> Result<(), Errno> {
        heap::room(NODE_SIZE)?;
        if self.removed.load(Ordering::Relaxed) { Err(Errno::ENOENT) } else { Ok(()) }
    }

    /// Adds the directory's subdirectories to `out`.
    pub fn directories_into(&self, out: &mut Vec<Arc<dyn Node>>) {
        let entries = self.entries.lock();
        let nodes = entries.values().map(|named| &named.node);
        out.extend(nodes.filter(|node| node.kind() == Kind::Directory).cloned());
    }

    /// Moves all nodes out.
    pub fn empty_into(&self, out: &mut Vec<Arc<dyn Node>>) {
        let entries = core::mem::take(&mut *self.entries.lock());
        out.extend(entries.into_values().map(|named| named.node));
    }

    /// Removes a name without a change of the link count (`rename`).
    pub fn take(&self, name: &[u8]) -> Option<Arc<dyn Node>> {
        self.common.written();
        self.entries.lock().remove(name).map(|named| named.node)
    }

    fn named(&self, node: Arc<dyn Node>) -> Named {
        Named { node, cookie: self.cookies.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Node for Directory {
    fn kind(&self) -> Kind {
        Kind::Directory
    }

    fn attributes(&self) -> Attributes {
        let entries = self.entries.lock();
        let directories =
            entries.values().filter(|named| named.node.kind() == Kind::Directory).count();
        let size = 40 + entries.len() as u64 * 20;
        drop(entries);
        let links = 2 + directories as u32;
        Attributes { links, ..self.common.attributes(size, 0) }
    }

    fn permissions(&self) -> (u32, (u32, u32)) {
        self.common.permissions()
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.common.change(change);
        Ok(())
    }

    fn child(&self, name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        self.entries.lock().get(name).map(|named| named.node.clone()).ok_or(Errno::ENOENT)
    }

    fn children(&self) -> Result<Vec<Entry>, Errno> {
        let entries = self.entries.lock();
        heap::room(entries.keys().map(|name| name.len() + 96).sum::<usize>() * 2)?;
        let entry = |(name, named): (&Vec<u8>, &Named)| Entry {
            name: name.clone(),
            number: named.node.attributes().number,
            kind: named.node.kind(),
            cookie: named.cookie,
        };
        let mut entries: Vec<_> = entries.iter().map(entry).collect();
        entries.sort_unstable_by_key(|entry| entry.cookie);
        Ok(entries)
    }

    fn special(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// The directory in memory behind a node, if the node is one.
pub fn directory(node: &dyn Node) -> Option<&Directory> {
    node.special()?.downcast_ref()
}
