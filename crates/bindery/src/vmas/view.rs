//! Look-ups under the mutex.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;
use crate::vma::Vma;

use super::VmaIndex;
use super::limits::Account;

/// The VMAs of an address space whose mutex is held for `'op`. While a view exists:
///
/// - every VMA that it finds remains allocated for `'op`, even if the operation removes the VMA,
///   because removed VMAs are freed after the operation ([`super::Removed`]);
/// - bounds and flags change only through the single [`super::VmaSet`] that lends the view.
pub(crate) struct VmaView<'op, P: Platform> {
    pub(super) vmas: &'op VmaIndex<P>,
}

impl<P: Platform> Clone for VmaView<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for VmaView<'_, P> {}

impl<'op, P: Platform> VmaView<'op, P> {
    /// The VMA of a node.
    ///
    /// # Safety
    /// 1. The index has returned the node since the mutex was acquired, or the caller is about to
    ///    insert the node. (A VMA leaves the index only into a [`super::Removed`], which the
    ///    operation borrows for `'op`, so the VMA is not freed before the end of `'op`.)
    #[inline]
    pub(super) unsafe fn vma(self, node: NonNull<Vma>) -> &'op Vma {
        // SAFETY: the caller's obligation 1.
        unsafe { node.as_ref() }
    }

    /// The first VMA that ends after `addr`.
    pub(crate) fn first_ending_after(self, addr: u64) -> Option<&'op Vma> {
        // SAFETY: 1. the node came from the index, and the mutex is held.
        self.vmas.index.first_ending_after(addr).map(|node| unsafe { self.vma(node) })
    }

    /// The VMA that contains `addr`.
    pub(crate) fn at(self, addr: VirtAddr) -> Option<&'op Vma> {
        self.first_ending_after(addr.0).filter(|vma| vma.start() <= addr.0)
    }

    /// The first VMA that overlaps `range`.
    pub(crate) fn first_in(self, range: VirtRange) -> Option<&'op Vma> {
        self.first_ending_after(range.start().0).filter(|vma| vma.start() < range.end().0)
    }

    /// The last VMA that starts at or before `addr`.
    pub(crate) fn last_at_or_before(self, addr: u64) -> Option<&'op Vma> {
        // SAFETY: 1. the node came from the index, and the mutex is held.
        self.vmas.index.find_at_or_before(addr).map(|node| unsafe { self.vma(node) })
    }

    /// The VMAs that overlap `range`, in ascending order. The VMA yielded last may be changed or
    /// removed.
    pub(crate) fn overlapping(self, range: VirtRange) -> impl Iterator<Item = &'op Vma> {
        self.overlapping_from(self.first_ending_after(range.start().0), range)
    }

    /// As [`VmaView::overlapping`], without a search. `first` is the first VMA that ends after the
    /// start of `range`.
    pub(crate) fn overlapping_from(
        self,
        first: Option<&'op Vma>,
        range: VirtRange,
    ) -> impl Iterator<Item = &'op Vma> {
        let mut next = first;
        core::iter::from_fn(move || {
            let vma = next.filter(|vma| vma.start() < range.end().0)?;
            next = self.next(vma);
            Some(vma)
        })
    }

    /// All VMAs, in ascending order. The VMA yielded last may be changed or removed.
    pub(crate) fn iter(self) -> impl Iterator<Item = &'op Vma> {
        // SAFETY: 1. the node came from the index, and the mutex is held.
        self.vmas.index.iter().map(move |node| unsafe { self.vma(node) })
    }

    /// The VMA after `vma`.
    pub(crate) fn next(self, vma: &Vma) -> Option<&'op Vma> {
        // SAFETY: 1. the node came from the index, and the mutex is held.
        self.vmas.index.next(vma).map(|node| unsafe { self.vma(node) })
    }

    /// The VMA before `vma`.
    pub(crate) fn previous(self, vma: &Vma) -> Option<&'op Vma> {
        // SAFETY: 1. the node came from the index, and the mutex is held.
        self.vmas.index.previous(vma).map(|node| unsafe { self.vma(node) })
    }

    /// The VMA before `next`, which is the first VMA that ends after `addr`.
    pub(super) fn before(self, next: Option<&Vma>, addr: u64) -> Option<&'op Vma> {
        next.map_or_else(|| self.last_at_or_before(addr), |next| self.previous(next))
    }

    /// Limits and usage.
    pub(crate) fn account(self) -> &'op Account {
        &self.vmas.account
    }

    /// The lowest address that may be mapped.
    pub(crate) fn minimum(self) -> VirtAddr {
        self.vmas.minimum
    }

    /// Fails if `more` further VMAs would exceed the limit.
    pub(crate) fn room_for(self, more: usize) -> Result<(), Error> {
        if self.vmas.len() + more > self.vmas.maximum.load(Ordering::Relaxed) {
            return Err(Error::TooManyMappings);
        }
        Ok(())
    }
}
