//! The registry of a memory's objects. It holds the list of all objects, used by the auditor, by
//! `swapoff` and for unique numbers; the objects that a [`super::FileSystem`] finds by number; and
//! the files with dirty pages.
//!
//! An object leaves in two steps. When its last holder releases it, it leaves the list, and no
//! thread can become a holder any longer. When its pages are dropped and the pager was notified
//! ([`crate::Pager::removed`]), its number is free for another object. Between the two steps, an
//! open of the number finds an object that is leaving and waits ([`super::last_holder`]).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::collections::interval_tree::Asked;
use crate::memory::{Anchor, Memory, Name, NameLinks, Records, find_named};
use crate::platform::Platform;

use super::ObjectState;
use super::unsaved::UnsavedFiles;

/// An object's links in the list.
pub(super) struct RegistryLinks {
    next: AtomicPtr<ObjectState>,
    previous: AtomicPtr<ObjectState>,
}

impl RegistryLinks {
    pub(super) const fn new() -> Self {
        Self { next: AtomicPtr::new(ptr::null_mut()), previous: AtomicPtr::new(ptr::null_mut()) }
    }
}

/// The result of a search for the object of a name.
pub(super) enum Found {
    /// The caller has become a holder of the object.
    Held(NonNull<ObjectState>),
    /// The object no longer has a holder. The caller has a reference to its record, like a weak
    /// handle.
    Leaving(NonNull<ObjectState>),
}

/// The result for a leaving holder.
pub(super) enum Leave {
    /// Other holders remain.
    Shared,
    /// The caller is the last holder and must save the file first. The next call takes this number.
    Unsaved(u64),
    /// The caller was the last holder.
    Left,
}

/// The list of all objects of a memory, in no particular order, together with the named objects and
/// those with dirty pages. Their lock is held for a search of the names or of the dirty files, and
/// otherwise for a constant number of steps. It ranks below all other locks of an object.
pub(crate) struct Registry<'m, P: Platform>(&'m Anchor<P>);

impl<'m, P: Platform> Registry<'m, P> {
    /// The list of the memory's objects.
    pub(crate) fn of(memory: &'m Memory<P>) -> Self {
        Self(&memory.objects)
    }

    /// A number that no other object of this memory has or has had.
    pub(super) fn new_identity(&self) -> u64 {
        self.0.last_identity.fetch_add(1, Relaxed) + 1
    }

    /// Adds an object that is in no list, unless another object has its name.
    ///
    /// # Errors
    /// The object that already has the name.
    ///
    /// # Safety
    /// 1. The object lives until [`Registry::leave`] and [`Registry::forget_name`] have removed it.
    pub(super) unsafe fn add(&self, node: NonNull<ObjectState>) -> Result<(), Found> {
        let records = self.0.records.lock();
        // SAFETY: the caller keeps the object (obligation 1).
        let object = unsafe { node.as_ref() };
        if let Some(name) = object.name.name() {
            if let Some(found) = Self::find_in(&records, name) {
                return Err(found);
            }
            object.name.set_record(node.cast());
            // SAFETY: 1. the lock is held; 2. the object is new, and lives until `forget_name` (the
            // caller's obligation 1); 3. a name never changes.
            unsafe { records.named.insert(&object.name) };
        }
        object.pages.unsaved.set_object(node);
        let list = &records.first;
        // SAFETY: 1. the lock is held, and the caller keeps the object.
        let links = unsafe { Self::links(node) };
        let first = list.load(Relaxed).cast();
        links.next.store(first, Relaxed);
        links.previous.store(ptr::null_mut(), Relaxed);
        if let Some(first) = NonNull::new(first) {
            // SAFETY: 1. the lock is held, and the object is in the list.
            unsafe { Self::links(first) }.previous.store(node.as_ptr(), Relaxed);
        }
        list.store(node.as_ptr().cast(), Relaxed);
        Ok(())
    }

    /// Searches for the object of that name.
    pub(super) fn find(&self, name: Name) -> Option<Found> {
        Self::find_in(&self.0.records.lock(), name)
    }

    fn find_in(records: &Records, name: Name) -> Option<Found> {
        // SAFETY: 1. a borrow of the records proves that their lock is held.
        let tree = unsafe { records.named.locked() };
        let node: NonNull<ObjectState> = find_named(tree, name)?.record()?.cast();
        // SAFETY: named objects are in the tree, whose lock is held, until they are freed.
        let object = unsafe { node.as_ref() };
        Some(if object.try_hold() {
            Found::Held(node)
        } else {
            object.keep_record();
            Found::Leaving(node)
        })
    }

    /// Makes the caller a holder, unless the last holder was released. Returns whether the caller
    /// is one now. A weak handle keeps the object's record.
    pub(super) fn hold(&self, object: &ObjectState) -> bool {
        // The lock orders this before or after the last check by a leaving holder.
        let _records = self.0.records.lock();
        object.try_hold()
    }

    /// Drops a holder. The last holder of a file stays until its pages are saved: `saved` is the
    /// result of the previous call.
    ///
    /// # Safety
    /// 1. The caller is one of the counted holders. For any result except [`Leave::Unsaved`], it
    ///    ends its hold.
    pub(super) unsafe fn leave(&self, object: &ObjectState, saved: Option<u64>) -> Leave {
        let records = self.0.records.lock();
        if object.drop_shared_holder() {
            return Leave::Shared;
        }
        // 1. CPU A is the last holder and saves the pages.
        // 2. CPU B finds the file, writes a page and releases the file while A is still a holder.
        // 3. A must save again.
        let found = object.times_found();
        if object.is_file() && saved != Some(found) {
            return Leave::Unsaved(found);
        }
        object.drop_last_holder();
        let links = &object.links;
        let (next, previous) = (links.next.load(Relaxed), links.previous.load(Relaxed));
        match NonNull::new(previous) {
            // SAFETY: 1. the lock is held, and objects leave the list before they are freed, so the
            // object's neighbors are alive and in it.
            Some(previous) => unsafe { Self::links(previous) }.next.store(next, Relaxed),
            None => records.first.store(next.cast(), Relaxed),
        }
        if let Some(next) = NonNull::new(next) {
            // SAFETY: 1. as above.
            unsafe { Self::links(next) }.previous.store(previous, Relaxed);
        }
        Leave::Left
    }

    /// Frees the name of an object that has left.
    ///
    /// # Safety
    /// 1. [`Registry::leave`] has returned [`Leave::Left`] for the object, and this function was
    ///    not called for it since.
    pub(super) unsafe fn forget_name(&self, object: &ObjectState) {
        if object.name.name().is_some() {
            let records = self.0.records.lock();
            // SAFETY: 1. the lock is held; 2. `add` has inserted the name (the caller's obligation
            // 1).
            unsafe { records.named.remove(&object.name) };
        }
    }

    /// Counts the record of an object that has left as kept by weak handles, or as no longer kept.
    pub(super) fn note_kept(&self, is_kept: bool) {
        let by = if is_kept { 1 } else { u64::MAX };
        self.0.kept.fetch_add(by, Relaxed);
    }

    /// The number of records of removed objects that weak handles keep.
    pub(crate) fn kept(&self) -> u64 {
        self.0.kept.load(Relaxed)
    }

    /// Adds a file at the end of the list of files with unsaved pages.
    ///
    /// # Safety
    /// 1. The object is not in the list, and lives until [`Registry::remove_unsaved`] has removed
    ///    it.
    pub(super) unsafe fn add_unsaved(&self, node: NonNull<ObjectState>) {
        let records = self.0.records.lock();
        // SAFETY: 1. the caller's obligation 1.
        unsafe { Self::append_unsaved(&records, node) };
    }

    /// # Safety
    /// 1. As for [`Registry::add_unsaved`], with the lock of the records held.
    unsafe fn append_unsaved(records: &Records, node: NonNull<ObjectState>) {
        let last = records.unsaved.last.load(Relaxed).cast::<ObjectState>();
        // SAFETY: the lock is held, and the object lives (obligation 1).
        let links = unsafe { &node.as_ref().pages.unsaved };
        links.next.store(ptr::null_mut(), Relaxed);
        links.previous.store(last, Relaxed);
        match NonNull::new(last) {
            // SAFETY: the lock is held, and objects leave the list before they are freed.
            Some(last) => unsafe { last.as_ref() }.pages.unsaved.next.store(node.as_ptr(), Relaxed),
            None => records.unsaved.first.store(node.as_ptr().cast(), Relaxed),
        }
        records.unsaved.last.store(node.as_ptr().cast(), Relaxed);
    }

    /// Removes a file from the list of files with unsaved pages.
    ///
    /// # Safety
    /// 1. The object is in the list.
    pub(super) unsafe fn remove_unsaved(&self, node: NonNull<ObjectState>) {
        let records = self.0.records.lock();
        // SAFETY: 1. the caller's obligation 1; the lock is held.
        unsafe { Self::unlink_unsaved(&records, node) };
    }

    /// # Safety
    /// 1. As for [`Registry::remove_unsaved`], with the lock of the records held.
    unsafe fn unlink_unsaved(records: &Records, node: NonNull<ObjectState>) {
        // SAFETY: the lock is held, and the object is in the list, so it lives (obligation 1).
        let links = unsafe { &node.as_ref().pages.unsaved };
        let (next, previous) = (links.next.load(Relaxed), links.previous.load(Relaxed));
        match NonNull::new(previous) {
            // SAFETY: as in `append_unsaved`.
            Some(previous) => unsafe { previous.as_ref() }.pages.unsaved.next.store(next, Relaxed),
            None => records.unsaved.first.store(next.cast(), Relaxed),
        }
        match NonNull::new(next) {
            // SAFETY: as in `append_unsaved`.
            Some(next) => unsafe { next.as_ref() }.pages.unsaved.previous.store(previous, Relaxed),
            None => records.unsaved.last.store(previous.cast(), Relaxed),
        }
    }

    /// The next file of the number space with pages that may be stored or are being stored: the one
    /// that has been in the list for the longest time, or was returned least recently. The file
    /// moves to the end of the list, and the caller becomes a holder. Skips files that are being
    /// freed.
    ///
    /// # Complexity
    /// Linear in the files with unsaved pages.
    pub(super) fn next_unsaved(&self, space: u64) -> Option<NonNull<ObjectState>> {
        let records = self.0.records.lock();
        let mut next: *mut ObjectState = records.unsaved.first.load(Relaxed).cast();
        while let Some(node) = NonNull::new(next) {
            // SAFETY: the lock is held, and objects leave the list before they are freed.
            let object = unsafe { node.as_ref() };
            let is_in_space = object.name.name().is_some_and(|name| name.space == space);
            if is_in_space && object.pages.unsaved.has_storable() && object.try_hold() {
                // SAFETY: 1. the object is in the list, whose lock is held.
                unsafe { Self::unlink_unsaved(&records, node) };
                // SAFETY: 1. the object is not in the list now, and lives while `charged` is not 0.
                unsafe { Self::append_unsaved(&records, node) };
                return Some(node);
            }
            next = object.pages.unsaved.next.load(Relaxed);
        }
        None
    }

    /// The unsaved pages of those files of the number space that have holders. Complexity: as
    /// [`Registry::next_unsaved`].
    pub(super) fn unsaved_files(&self, space: u64) -> UnsavedFiles {
        let records = self.0.records.lock();
        let mut files = UnsavedFiles { storable: 0, pages: 0 };
        let mut next = records.unsaved.first.load(Relaxed).cast::<ObjectState>();
        while let Some(node) = NonNull::new(next) {
            // SAFETY: the lock is held, and objects leave the list before they are freed.
            let object = unsafe { node.as_ref() };
            let unsaved = &object.pages.unsaved;
            let is_in_space = object.name.name().is_some_and(|name| name.space == space);
            if is_in_space && object.holders() > 0 {
                files.storable += u64::from(unsaved.has_storable());
                files.pages += unsaved.counted();
            }
            next = unsaved.next.load(Relaxed);
        }
        files
    }

    /// Whether the names and the list of files with unsaved pages agree with the objects, while no
    /// call runs; for the auditor. `objects` are those of [`Registry::iter`].
    pub(crate) fn agrees_with<'o>(&self, objects: impl Iterator<Item = &'o ObjectState>) -> bool {
        let records = self.0.records.lock();
        // SAFETY: 1. a borrow of the records proves that their lock is held.
        let tree = unsafe { records.named.locked() };
        let (mut named, mut unsaved) = (0, 0);
        for object in objects {
            let record = Some(NonNull::from(object).cast());
            if let Some(name) = object.name.name() {
                named += 1;
                if find_named(tree, name).and_then(NameLinks::record) != record {
                    return false;
                }
            }
            unsaved += usize::from(object.pages.unsaved.has_any());
        }
        let (mut listed, mut last) = (0, None);
        let mut next = records.unsaved.first.load(Relaxed).cast::<ObjectState>();
        while let Some(node) = NonNull::new(next) {
            // SAFETY: the lock is held, and objects leave the list before they are freed.
            let links = unsafe { &node.as_ref().pages.unsaved };
            if !links.has_any() || NonNull::new(links.previous.load(Relaxed)) != last {
                return false;
            }
            listed += 1;
            last = Some(node);
            next = links.next.load(Relaxed);
        }
        let ends = NonNull::new(records.unsaved.last.load(Relaxed).cast()) == last;
        tree.check() && tree.iter(Asked::ALL).count() == named && listed == unsaved && ends
    }

    /// All objects.
    ///
    /// # Safety
    /// 1. No object is added or removed while the iterator and its items are used.
    pub(crate) unsafe fn iter(self) -> impl Iterator<Item = &'m ObjectState> + use<'m, P> {
        let mut next: *mut ObjectState = self.0.records.lock().first.load(Relaxed).cast();
        core::iter::from_fn(move || {
            let node = NonNull::new(next)?;
            // SAFETY: objects leave the list before they are freed, and no object is freed now (the
            // caller's obligation 1).
            let object = unsafe { node.as_ref() };
            next = object.links.next.load(Relaxed);
            Some(object)
        })
    }

    /// The shared memory after `last` in the list, or the first; the caller becomes a holder of it.
    /// Skips objects that are being freed, and may skip new ones.
    pub(super) fn next_held(&self, last: Option<&ObjectState>) -> Option<NonNull<ObjectState>> {
        let records = self.0.records.lock();
        let mut next = match last {
            Some(last) => last.links.next.load(Relaxed),
            None => records.first.load(Relaxed).cast(),
        };
        while let Some(node) = NonNull::new(next) {
            // SAFETY: objects leave the list, whose lock is held, before they are freed.
            let object = unsafe { node.as_ref() };
            // Only shared memory is requested. A holder of a file could become the last one when
            // the pager no longer exists.
            if object.is_shared_memory() && object.try_hold() {
                return Some(node);
            }
            next = object.links.next.load(Relaxed);
        }
        None
    }

    /// # Safety
    /// 1. The list's lock is held until the last use of the reference, and the object is in the
    ///    list or being added, so it is not freed before.
    unsafe fn links<'a>(node: NonNull<ObjectState>) -> &'a RegistryLinks {
        // SAFETY: the caller's obligation 1.
        unsafe { &node.as_ref().links }
    }
}
