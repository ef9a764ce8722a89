//! The list of all objects of a memory, used by the auditor, by `swapoff`, and for unique numbers.

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
    pub(super) fn add(&self, node: NonNull<ObjectState>) {
        let list = self.0.first.lock();
        let links = Self::links(node);
        let first = list.load(Relaxed).cast();
        links.next.store(first, Relaxed);
        links.previous.store(ptr::null_mut(), Relaxed);
        if let Some(first) = NonNull::new(first) {
            Self::links(first).previous.store(node.as_ptr(), Relaxed);
        }
        list.store(node.as_ptr().cast(), Relaxed);
    }

    /// Removes an object that is in the list.
    pub(super) fn take(&self, node: NonNull<ObjectState>) {
        let list = self.0.first.lock();
        let links = Self::links(node);
        let (next, previous) = (links.next.load(Relaxed), links.previous.load(Relaxed));
        match NonNull::new(previous) {
            Some(previous) => Self::links(previous).next.store(next, Relaxed),
            None => list.store(next.cast(), Relaxed),
        }
        if let Some(next) = NonNull::new(next) {
            Self::links(next).previous.store(previous, Relaxed);
        }
    }

    /// All objects. For a quiet system: no object is added or removed while the iterator and its
    /// items are used.
    pub(crate) fn iter(self) -> impl Iterator<Item = &'m ObjectState> + use<'m, P> {
        let mut next = self.0.first.lock().load(Relaxed).cast();
        core::iter::from_fn(move || {
            let node = NonNull::new(next)?;
            next = Self::links(node).next.load(Relaxed);
            // SAFETY: objects leave the list before they are freed, and the caller prevents that.
            Some(unsafe { node.as_ref() })
        })
    }

    /// The object after `last` in the list, or the first; the caller becomes a holder of it. Skips
    /// objects that are being freed, and may skip new ones. The caller holds `last`.
    pub(super) fn next_held(
        &self,
        last: Option<NonNull<ObjectState>>,
    ) -> Option<NonNull<ObjectState>> {
        let list = self.0.first.lock();
        let mut next = match last {
            Some(last) => Self::links(last).next.load(Relaxed),
            None => list.load(Relaxed).cast(),
        };
        while let Some(node) = NonNull::new(next) {
            // SAFETY: objects leave the list, whose lock is held, before they are freed.
            if unsafe { node.as_ref() }.try_hold() {
                return Some(node);
            }
            // Its last holder is about to remove it.
            next = Self::links(node).next.load(Relaxed);
        }
        None
    }

    fn links<'a>(node: NonNull<ObjectState>) -> &'a Links {
        // SAFETY: callers hold the lock (or keep the system quiet) and pass objects that are in the
        // list, or that their holder adds or removes. So they are not freed before the last use of
        // the reference, which no caller keeps.
        unsafe { &node.as_ref().links }
    }
}
