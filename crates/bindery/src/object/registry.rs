//! The list of all objects of a memory, used by the auditor, by `swapoff`, and for unique numbers.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::memory::{Anchor, Memory};
use crate::platform::Platform;

use super::ObjectState;

/// An object's links in the list.
pub(super) struct Links {
    next: AtomicPtr<ObjectState>,
    previous: AtomicPtr<ObjectState>,
}

impl Links {
    pub(super) const fn new() -> Self {
        Self { next: AtomicPtr::new(ptr::null_mut()), previous: AtomicPtr::new(ptr::null_mut()) }
    }
}

/// The list of all objects of a memory, in no order. Its lock is held for a constant number of
/// steps, and ranks below all others of an object.
pub(crate) struct Registry<'m, P: Platform>(&'m Anchor<P>);

impl<'m, P: Platform> Registry<'m, P> {
    /// The list of the memory's objects.
    pub(crate) fn of(memory: &'m Memory<P>) -> Self {
        Self(&memory.objects)
    }

    /// A number that no other object of this memory has or had.
    pub(super) fn new_identity(&self) -> u64 {
        self.0.last_identity.fetch_add(1, Relaxed) + 1
    }

    /// Adds an object that is in no list.
    ///
    /// # Safety
    /// 1. The object lives until [`Registry::take`] has removed it.
    pub(super) unsafe fn add(&self, node: NonNull<ObjectState>) {
        let list = self.0.first.lock();
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
    }

    /// Removes an object.
    ///
    /// # Safety
    /// 1. The object is in the list.
    pub(super) unsafe fn take(&self, object: &ObjectState) {
        let list = self.0.first.lock();
        let links = &object.links;
        let (next, previous) = (links.next.load(Relaxed), links.previous.load(Relaxed));
        match NonNull::new(previous) {
            // SAFETY: 1. the lock is held, and objects leave the list before they are freed: the
            // object's neighbors are in it (the caller's obligation 1).
            Some(previous) => unsafe { Self::links(previous) }.next.store(next, Relaxed),
            None => list.store(next.cast(), Relaxed),
        }
        if let Some(next) = NonNull::new(next) {
            // SAFETY: 1. as above.
            unsafe { Self::links(next) }.previous.store(previous, Relaxed);
        }
    }

    /// All objects.
    ///
    /// # Safety
    /// 1. No object is added or removed while the iterator and its items are used.
    pub(crate) unsafe fn iter(self) -> impl Iterator<Item = &'m ObjectState> + use<'m, P> {
        let mut next: *mut ObjectState = self.0.first.lock().load(Relaxed).cast();
        core::iter::from_fn(move || {
            let node = NonNull::new(next)?;
            // SAFETY: objects leave the list before they are freed, which does not happen now (the
            // caller's obligation 1).
            let object = unsafe { node.as_ref() };
            next = object.links.next.load(Relaxed);
            Some(object)
        })
    }

    /// The object after `last` in the list, or the first; the caller becomes a holder of it. Skips
    /// objects that are being freed, and may skip new ones.
    pub(super) fn next_held(&self, last: Option<&ObjectState>) -> Option<NonNull<ObjectState>> {
        let list = self.0.first.lock();
        let mut next = match last {
            Some(last) => last.links.next.load(Relaxed),
            None => list.load(Relaxed).cast(),
        };
        while let Some(node) = NonNull::new(next) {
            // SAFETY: objects leave the list, whose lock is held, before they are freed.
            let object = unsafe { node.as_ref() };
            if object.try_hold() {
                return Some(node);
            }
            // Its last holder is about to remove it.
            next = object.links.next.load(Relaxed);
        }
        None
    }

    /// # Safety
    /// 1. The list's lock is held until the last use of the reference, and the object is in the list
    ///    or being added: so it is not freed before.
    unsafe fn links<'a>(node: NonNull<ObjectState>) -> &'a Links {
        // SAFETY: the caller's obligation 1.
        unsafe { &node.as_ref().links }
    }
}
