//! The memory part of `shmdt(2)`.

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use crate::error::Error;
use crate::platform::Platform;
use crate::vma::Vma;

use super::munmap::unmap;
use crate::space::AddressSpace;
use crate::space::op::{Op, Unmappings};

impl<P: Platform> AddressSpace<'_, P> {
    /// Unmaps all remaining parts of the System V segment that was attached at `at`. As on Linux,
    /// parts that were moved elsewhere stay.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings from `at` to the first
    /// part, and as [`AddressSpace::munmap`].
    ///
    /// # Errors
    /// [`Error::Invalid`] if no part of such a segment remains or if `at` is not a multiple of the
    /// page size.
    pub fn detach_segment(&self, at: VirtAddr) -> Result<(), Error> {
        let result = self.operate(|op| detach(op, at));
        crate::deferred::free_some(self.page_table.memory);
        result
    }
}

fn detach<P: Platform>(op: &mut Op<'_, '_, P>, at: VirtAddr) -> Result<(), Error> {
    if !at.is_aligned(PAGE_SIZE) {
        return Err(Error::Invalid);
    }
    let is_part = |vma: &Vma| {
        vma.start() >= at.0
            && vma.object().is_some_and(|object| object.segment().is_some())
            && (vma.start() - at.0) >> PAGE_SHIFT == vma.page_offset()
    };
    let mut next = op.vmas.first_ending_after(at.0);
    while let Some(vma) = next.filter(|vma| !is_part(vma)) {
        next = op.vmas.first_ending_after(vma.end());
    }
    let first = next.ok_or(Error::Invalid)?;
    let segment = first.object_pointer();
    let pages = first.object().map_or(0, |object| object.size_in_pages());
    let end = at.0.saturating_add(pages << PAGE_SHIFT);
    // No part needs memory to be unmapped: each is removed whole.
    op.unmappings = Unmappings::Unreported;
    let mut part = Some(first);
    while let Some(vma) = part {
        let after = vma.end();
        if is_part(vma) && vma.object_pointer() == segment {
            // A sealed mapping stays without an error, as on Linux.
            let _ = unmap(op, vma.range());
        }
        part = op.vmas.first_ending_after(after).filter(|vma| vma.end() <= end);
    }
    Ok(())
}
