//! `mseal(2)`.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;

use super::vma::MappingFlags;
use super::{AddressSpace, MmapLocked};

impl<P: Platform> AddressSpace<'_, P> {
    /// Seals the mappings of `length` bytes (rounded up to pages) at `start`. They can no
    /// longer be unmapped, moved, resized or replaced, their protection cannot change, and contents
    /// that the program could not overwrite cannot be discarded.
    ///
    /// Context: may sleep. Complexity: in the mappings.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::OutOfRange`]; [`Error::NotMapped`] if the range has holes,
    /// and [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping cannot be split. A
    /// hole changes nothing; the part before another error is sealed.
    pub fn mseal(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        let limit = self.limit();
        let range = length
            .checked_next_multiple_of(PAGE_SIZE)
            .and_then(|length| VirtRange::from_len(start, length))
            .ok_or(Error::OutOfRange { limit })?;
        self.page_table.memory.outermost(|| self.seal_once(range))
    }

    /// What is sealed already is passed over.
    fn seal_once(&self, range: VirtRange) -> Result<(), Failure> {
        self.transaction(|mm, _, removed| {
            self.covered(mm, range)?;
            let mut at = range.start();
            while at < range.end() {
                let vma = self.vma_at(mm, at).ok_or(Error::NotMapped(at))?;
                let part = vma.range().intersection(range);
                at = part.end();
                let flags = vma.flags() | MappingFlags::SEALED;
                if flags != vma.flags() {
                    self.with_flags(mm, vma, part, flags, removed, |_| Ok(()))?;
                }
            }
            Ok(())
        })
    }

    /// Refuses a range with holes.
    fn covered(&self, mm: &MmapLocked, range: VirtRange) -> Result<(), Error> {
        let mut at = range.start();
        while at < range.end() {
            let vma = self.vma_at(mm, at).ok_or(Error::NotMapped(at))?;
            at = VirtAddr(vma.end());
        }
        Ok(())
    }
}
