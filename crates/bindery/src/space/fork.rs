//! `fork(2)`, the memory part.

use crate::error::Error;
use crate::platform::Platform;
use crate::tlb::Gather;

use super::vma::Vma;
use super::{AddressSpace, Removed};

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// A copy of the address space: the same mappings with the same contents. Pages are shared
    /// until one side writes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]: there is no copy, and this address space is as it was, but that
    /// its next writes may ask once more for their permission.
    ///
    /// Complexity: in the mappings and runs; one write to a folio's counts for each run, one
    /// invalidation.
    pub fn fork(&self) -> Result<Self, Error> {
        let child = Self::new(self.table.memory, self.options)?;
        let mut gather = Gather::new();
        let guard = self.mutex.lock();
        // All VMAs stay locked until the flush: a fault that made one page writable again before
        // it would let the parent write to what the child shares.
        let result = self.copy_vmas(&child, &mut gather);
        self.flush(&mut gather);
        for node in self.vmas.iter() {
            self.vma(node).end_write();
        }
        drop(guard);
        self.finish(gather, Removed::default());
        // On failure the drop of the child gives back what it has.
        result.map(|()| child)
    }

    fn copy_vmas(&self, child: &Self, gather: &mut Gather) -> Result<(), Error> {
        for node in self.vmas.iter() {
            self.vma(node).write(self.platform());
        }
        for node in self.vmas.iter() {
            let vma = self.vma(node);
            let copy = Vma::new(vma.range(), vma.protection(), vma.page_offset());
            let copy = child.new_vma(copy)?;
            child.insert(copy);
            self.table
                .copy_to(&child.table, vma.range(), gather)
                .map_err(|_| Error::OutOfMemory)?;
        }
        Ok(())
    }
}
