//! [`WeakObject`]: a handle that keeps no pages.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::Memory;
use crate::platform::Platform;

use super::last_holder::free_record;
use super::{Object, ObjectState, Pager, Registry};

/// A handle that does not keep its object alive. It serves a table of files that finds an object
/// only while other users hold it. It keeps a record of some hundred bytes, and no pages. (Rust:
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
    /// Creates a handle that does not keep the object alive.
    ///
    /// Context: any. Complexity: constant.
    pub fn downgrade(&self) -> WeakObject<'m, P> {
        self.state().keep_record();
        // SAFETY: 1. the reference was added above.
        unsafe { WeakObject::of_record(self.memory, self.state) }
    }
}

impl<'m, P: Platform> WeakObject<'m, P> {
    /// Makes a handle for a caller that has a reference to the record.
    ///
    /// # Safety
    /// 1. The caller has a reference to the record and passes it to the handle.
    pub(super) unsafe fn of_record(memory: &'m Memory<P>, state: NonNull<ObjectState>) -> Self {
        Self { memory, state, pager: PhantomData }
    }

    fn state(&self) -> &ObjectState {
        // SAFETY: the handle has a reference to the record.
        unsafe { self.state.as_ref() }
    }

    /// A handle that keeps the object alive. `None` if the object's last holder was released: its
    /// pages are dropped, or about to be.
    ///
    /// Context: spins. Complexity: constant.
    pub fn upgrade(&self) -> Option<Object<'m, P>> {
        let held = Registry::of(self.memory).hold(self.state());
        // SAFETY: 1. the caller has become a holder.
        held.then(|| unsafe { Object::of_holder(self.memory, self.state) })
    }

    /// The number that [`Object::identity`] returns.
    ///
    /// Context: any.
    pub fn identity(&self) -> u64 {
        self.state().identity()
    }

    /// Waits until a leaving object has left and its pager was notified. Called without locks, for
    /// an object with a name that no longer has a holder.
    pub(super) fn wait_until_left(self) {
        // `last_holder` holds the changes from before the object loses its last holder to the end.
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
        // SAFETY: 1. the reference is the handle's own, and the handle is not a holder.
        unsafe { free_record(self.memory, self.state) };
    }
}

impl<P: Platform> fmt::Debug for WeakObject<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakObject").field("identity", &self.identity()).finish_non_exhaustive()
    }
}
