//! VMAs that are not in the set yet. A dropped VMA frees its memory, so error paths need no
//! cleanup.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ptr::{self, NonNull};

use crate::Memory;
use crate::error::NoMemory;
use crate::frame::slab::Reserved;
use crate::platform::Platform;
use crate::rmap::RmapGuard;
use crate::vma::Vma;

/// Memory for one VMA.
pub(crate) struct ReservedVma<'m, P: Platform> {
    memory: &'m Memory<P>,
    reserved: ManuallyDrop<Reserved<Vma>>,
}

impl<'m, P: Platform> ReservedVma<'m, P> {
    /// Reserves memory for a VMA.
    #[inline]
    pub(super) fn new(memory: &'m Memory<P>) -> Result<Self, NoMemory> {
        memory.may_wait();
        let reserved = memory.slab::<Vma>().reserve(&memory.frames);
        Ok(Self { memory, reserved: ManuallyDrop::new(reserved.ok_or(NoMemory)?) })
    }

    /// Builds the VMA in the memory.
    #[inline]
    pub(super) fn fill<'h>(self, make: impl FnOnce() -> Vma) -> NewVma<'h, 'm, P> {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used or dropped afterwards, so the memory has one owner.
        let reserved = unsafe { ptr::read(&raw const *this.reserved) };
        NewVma { memory: this.memory, node: reserved.fill(make), _held: PhantomData }
    }
}

impl<P: Platform> Drop for ReservedVma<'_, P> {
    #[cold]
    fn drop(&mut self) {
        let memory = self.memory;
        // SAFETY: the value is not used again, because this is its drop.
        let reserved = unsafe { ManuallyDrop::take(&mut self.reserved) };
        // SAFETY: 1. `new` reserved it from the slab for VMAs of this memory.
        unsafe { memory.slab::<Vma>().unreserve(&memory.frames, reserved) };
    }
}

/// A VMA in no list. No other thread can find it, and it holds neither object nor anon group; it
/// borrows their holders.
pub(crate) struct NewVma<'h, 'm, P: Platform> {
    memory: &'m Memory<P>,
    node: NonNull<Vma>,
    _held: PhantomData<&'h Vma>,
}

impl<P: Platform> NewVma<'_, '_, P> {
    /// The VMA.
    pub(super) fn vma(&self) -> &Vma {
        // SAFETY: the slab built the VMA (`ReservedVma::fill`), and only the drop frees it.
        unsafe { self.node.as_ref() }
    }

    /// The exclusive end.
    pub(crate) fn end(&self) -> u64 {
        self.vma().end()
    }

    /// Passes the node to the set, which frees it after its removal.
    #[inline]
    pub(super) fn into_node(self) -> NonNull<Vma> {
        ManuallyDrop::new(self).node
    }
}

impl<P: Platform> Drop for NewVma<'_, '_, P> {
    #[cold]
    fn drop(&mut self) {
        let memory = self.memory;
        // SAFETY: the node came from this slab (`ReservedVma::fill`) and was never in the index or
        // a tree, so no other thread can find it.
        unsafe { memory.slab::<Vma>().free(&memory.frames, self.node) };
    }
}

/// A VMA that is in the trees of the reverse map but not in the index yet: walkers of the reverse
/// map find it, faults do not. It must be inserted; otherwise it is never freed.
#[must_use = "it has to be inserted"]
pub(crate) struct LinkedVma<'op> {
    pub(super) vma: &'op Vma,
    pub(super) node: NonNull<Vma>,
}

impl LinkedVma<'_> {
    /// Records that the VMA has received entries of another VMA with the same object and anon
    /// group, whose trees are locked ([`RmapGuard::moved`], which panics otherwise).
    pub(crate) fn received<P: Platform>(&self, held: &RmapGuard<'_, P>) {
        // SAFETY: 1. it is in the trees (`VmaSet::link`).
        unsafe { held.moved(self.vma) };
    }
}
