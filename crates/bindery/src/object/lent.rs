//! A borrow that an object keeps for as long as it has holders.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use super::{Attachments, FrameSource, Pager};

/// A pager, quota, source of frames or follower that was lent to an object. The existence of this
/// value implies that the lent value lives: the lender keeps it longer than any holder of the
/// object exists and the last release runs, and so longer than any use of this value.
pub(super) struct Lent<T: ?Sized>(NonNull<T>);

impl<T: ?Sized> Clone for Lent<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ?Sized> Copy for Lent<T> {}

impl<T: ?Sized> Lent<T> {
    /// Stores the pointer of a borrow.
    ///
    /// # Safety
    /// 1. The borrow lasts for as long as the result or a copy of it is used.
    pub(super) unsafe fn new(lent: NonNull<T>) -> Self {
        Self(lent)
    }

    pub(super) fn get(&self) -> &T {
        // SAFETY: the value stays borrowed as shared for as long as this is used (obligation 1 of
        // `new`).
        unsafe { self.0.as_ref() }
    }
}

impl Lent<dyn Pager> {
    /// Stores a pager, whose lifetime the type does not show.
    ///
    /// # Safety
    /// 1. As for [`Lent::new`].
    pub(super) unsafe fn pager<'m>(pager: &'m (dyn Pager + 'm)) -> Self {
        let pager: NonNull<dyn Pager + 'm> = NonNull::from(pager);
        // SAFETY: the two types differ only in a lifetime, about which a raw pointer promises
        // nothing.
        let pager: NonNull<dyn Pager> = unsafe { core::mem::transmute(pager) };
        Self(pager)
    }
}

impl Lent<dyn Attachments> {
    /// Stores a follower, whose lifetime the type does not show.
    ///
    /// # Safety
    /// 1. As for [`Lent::new`].
    pub(super) unsafe fn follower<'m>(follower: &'m (dyn Attachments + 'm)) -> Self {
        let follower: NonNull<dyn Attachments + 'm> = NonNull::from(follower);
        // SAFETY: the two types differ only in a lifetime, about which a raw pointer promises
        // nothing.
        let follower: NonNull<dyn Attachments> = unsafe { core::mem::transmute(follower) };
        Self(follower)
    }
}

impl Lent<dyn FrameSource> {
    /// Stores a source of frames, whose lifetime the type does not show.
    ///
    /// # Safety
    /// 1. As for [`Lent::new`].
    pub(super) unsafe fn source<'m>(source: &'m (dyn FrameSource + 'm)) -> Self {
        let source: NonNull<dyn FrameSource + 'm> = NonNull::from(source);
        // SAFETY: the two types differ only in a lifetime, about which a raw pointer promises
        // nothing.
        let source: NonNull<dyn FrameSource> = unsafe { core::mem::transmute(source) };
        Self(source)
    }
}
