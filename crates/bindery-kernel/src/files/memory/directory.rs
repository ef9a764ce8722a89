//! Directories in memory.

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::any::Any;
use core::sync::atomic::{AtomicU64, Ordering};

use bindery::sync::MutexGuard;

use crate::errno::Errno;
use crate::heap;
use crate::sync::{Mutex, SleepingLock, SleepingMutex};

use super::super::attributes::{Attributes, Change, Entry, Kind};
use super::super::inode::{Common, NODE_SIZE, new_number};
use super::super::node::{Node, count_links};
use super::super::store::Store;
use super::Regular;

/// A change of a directory's names ([`Directory::begin_change`]).
pub type ChangeGuard<'a> = MutexGuard<'a, SleepingLock, ()>;

struct Named {
    node: Arc<dyn Node>,
    cookie: u64,
}

/// A directory.
pub struct Directory {
    store: Option<&'static dyn Store>,
    /// Held around each change of the names of a directory with a store, because the store sleeps
    /// between the look at a name and its change. The first lock of such a call.
    changes: SleepingMutex<()>,
    common: Common,
    entries: Mutex<BTreeMap<Vec<u8>, Named>>,
    cookies: AtomicU64,
    this: Weak<Self>,
    /// The directory that has this one, if any does or did.
    above: Mutex<Weak<Self>>,
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
        let common = Common::new(new_number(), mode)?;
        Ok(Arc::new_cyclic(|this| Self {
            store,
            changes: SleepingMutex::new(()),
            common,
            entries: Mutex::new(BTreeMap::new()),
            cookies: AtomicU64::new(3),
            this: this.clone(),
            above: Mutex::new(Weak::new()),
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

    /// Keeps other threads from changing names of a directory with a store until the guard is
    /// dropped. Names in memory change in one step.
    pub fn begin_change(&self) -> Option<ChangeGuard<'_>> {
        self.store.map(|_| self.changes.lock())
    }

    /// Creates a regular file under a free name.
    ///
    /// # Errors
    /// The errors of [`Directory::insert`] and of the store.
    pub fn create(&self, name: &[u8], mode: u32) -> Result<Arc<dyn Node>, Errno> {
        let _change = self.begin_change();
        if self.entries.lock().contains_key(name) {
            return Err(Errno::EEXIST);
        }
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

    /// Removes a name if `allowed` permits it. The caller has begun the change.
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

    /// Whether the directory is `other` or below it.
    pub fn is_inside(&self, other: &Self) -> bool {
        let mut this = self.this.upgrade();
        while let Some(directory) = this {
            if core::ptr::eq(&*directory, other) {
                return true;
            }
            this = directory.above.lock().upgrade();
        }
        false
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
        if let Some(directory) = directory(&*node) {
            *directory.above.lock() = self.this.clone();
        }
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

    fn synchronize(&self) -> Result<(), Errno> {
        self.store.map_or(Ok(()), Store::synchronize)
    }

    fn special(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// The directory in memory behind a node, if the node is one.
pub fn directory(node: &dyn Node) -> Option<&Directory> {
    node.special()?.downcast_ref()
}
