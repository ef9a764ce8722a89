//! [`WeakObject`]: a handle that keeps no pages.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::Memory;
use crate::platform::Platform;

use super::last_holder::free_record;
use super::{Object, ObjectState, Pager, Registry};

/// A handle that does not keep its object: for a table of files that finds an object as long as
/// something else uses it. It keeps a record of some hundred bytes, and no pages. (Rust:
/// [`alloc::sync::Weak`](https://doc.rust-lang.org/alloc/sync/struct.Weak.html).)
///
/// ```
/// use bindery::{Accounting, Error, Memory, Platform, Sealing};
///
/// fn look<P: Platform>(memory: &Memory<P>) -> Result<(), Error> {
///     let object = memory.shared_memory(4096, Sealing::Forbidden, Accounting::PerPage)?;
///     let weak = object.downgrade();
///     assert!(weak.upgrade().is_some());
///     drop(object);
///     assert!(weak.upgrade().is_none());
///     Ok(())
/// }
/// ```
pub struct WeakObject<'m, P: Platform> {
    memory: &'m Memory<P>,
    state: NonNull<ObjectState>,
    /// A file's pager lives as long as `'m`.
    pager: PhantomData<&'m dyn Pager>,
}

// SAFETY: as for `Object`.
unsafe impl<P: Platform> Send for WeakObject<'_, P> {}
// SAFETY: as for `Object`.
unsafe impl<P: Platform> Sync for WeakObject<'_, P> {}

impl<'m, P: Platform> Object<'m, P> {
    /// A handle that does not keep the object.
    ///
    /// Context: any. Complexity: constant.
    pub fn downgrade(&self) -> WeakObject<'m, P> {
        self.state().keep_record();
        // SAFETY: 1. kept above.
        unsafe { WeakObject::of_record(self.memory, self.state) }
    }
}

impl<'m, P: Platform> WeakObject<'m, P> {
    /// The handle of a caller that keeps a record.
    ///
    /// # Safety
    /// 1. The caller keeps the record; the handle does so in its place.
    pub(super) unsafe fn of_record(memory: &'m Memory<P>, state: NonNull<ObjectState>) -> Self {
        Self { memory, state, pager: PhantomData }
    }

    fn state(&self) -> &ObjectState {
        // SAFETY: the handle keeps the record.
        unsafe { self.state.as_ref() }
    }

    /// A handle that keeps the object. `None` if its last holder was released: its pages are gone,
    /// or about to go.
    ///
    /// Context: spins. Complexity: constant.
    pub fn upgrade(&self) -> Option<Object<'m, P>> {
        let held = Registry::of(self.memory).hold(self.state());
        // SAFETY: 1. it is a holder.
        held.then(|| unsafe { Object::of_holder(self.memory, self.state) })
    }

    /// The number of [`Object::identity`].
    ///
    /// Context: any.
    pub fn identity(&self) -> u64 {
        self.state().identity()
    }

    /// Waits until an object that leaves has left, and its pager has heard of it. Called without
    /// locks, for an object with a name that has no holder any more.
    pub(super) fn wait_until_left(self) {
        // `last_holder` has them from before the object is without holders, to the end.
        self.state().changes.with_read(self.memory.platform(), || ());
    }
}

impl<P: Platform> Clone for WeakObject<'_, P> {
    fn clone(&self) -> Self {
        self.state().keep_record();
        Self { memory: self.memory, state: self.state, pager: PhantomData }
    }
}

impl<P: Platform> Drop for WeakObject<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the handle's own, which is no holder.
        unsafe { free_record(self.memory, self.state) };
    }
}

impl<P: Platform> fmt::Debug for WeakObject<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakObject").field("identity", &self.identity()).finish_non_exhaustive()
    }
}
