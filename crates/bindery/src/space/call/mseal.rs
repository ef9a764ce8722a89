//! `mseal(2)`.

use crate::addr::{VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;
use crate::vma::MappingFlags;
use crate::vmas::VmaView;

use super::range::page_range;
use crate::space::AddressSpace;
use crate::space::op::Op;

impl<P: Platform> AddressSpace<'_, P> {
    /// Seals the mappings of `length` bytes (rounded up to pages) at `start`. Sealed mappings
    /// cannot be unmapped, moved, resized or replaced, and their protection cannot change. Contents
    /// that the program could not overwrite cannot be discarded.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::OutOfRange`]; [`Error::NotMapped`] if the range has holes,
    /// and [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping cannot be split. If
    /// the range has holes, nothing is changed; after any other error, the part before it is
    /// sealed.
    pub fn mseal(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        let range = page_range::<P::Arch>(start, length)?;
        self.operate_with_reclaim(|op| seal(op, range))
    }
}

/// Seals the mappings of `range`. Skips mappings that are already sealed.
fn seal<P: Platform>(op: &mut Op<'_, '_, P>, range: VirtRange) -> Result<(), Failure> {
    refuse_holes(*op.vmas, range)?;
    op.vmas.set_flags_in(range, |vma| vma.flags() | MappingFlags::SEALED)
}

/// Fails if the range has holes.
fn refuse_holes<P: Platform>(vmas: VmaView<'_, P>, range: VirtRange) -> Result<(), Error> {
    let mut at = range.start();
    while at < range.end() {
        let vma = vmas.at(at).ok_or(Error::NotMapped(at))?;
        at = VirtAddr(vma.end());
    }
    Ok(())
}
