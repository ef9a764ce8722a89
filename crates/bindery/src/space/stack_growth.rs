//! Mappings that grow down (`MAP_GROWSDOWN`).

use core::ptr::NonNull;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use crate::error::{Failure, FaultError};
use crate::platform::Platform;

use super::vma::MappingFlags;
use super::{AddressSpace, STACK_GUARD_GAP};

impl<P: Platform> AddressSpace<'_, P> {
    /// Lets the mapping above `page` grow down to it, if that is one that does and the limits and
    /// the mapping below allow it (Linux: `expand_stack`). Nothing is mapped at `page`.
    pub(super) fn grow_down_to(&self, page: VirtAddr) -> Result<(), Failure<FaultError>> {
        let refused = FaultError::NotMapped;
        let mm = self.mmap_lock.lock();
        let vma = self.first_ending_after(&mm, page.0).ok_or(refused)?;
        if vma.start() <= page.0 {
            // Mapped meanwhile.
            return Ok(());
        }
        if !vma.has(MappingFlags::GROWS_DOWN) || page < self.options.minimum_address {
            return Err(refused.into());
        }
        if let Some(below) = self.vmas.previous(NonNull::from(vma)) {
            let below = self.vma(below);
            let grows = below.has(MappingFlags::GROWS_DOWN);
            let accessible = below.flags().intersects(MappingFlags::PROTECTION);
            if !grows && accessible && page.0 - below.end() < STACK_GUARD_GAP {
                return Err(refused.into());
            }
        }
        let added = (vma.start() - page.0) >> PAGE_SHIFT;
        let limits = self.limits();
        let size = vma.end() - page.0;
        let offset = vma.page_offset();
        if size > limits.stack || added > offset {
            return Err(refused.into());
        }
        self.may_expand(vma.flags(), added).map_err(|_| refused)?;
        if vma.has(MappingFlags::LOCKED) {
            self.may_lock(added).map_err(|_| refused)?;
        }
        let accounted = vma.has(MappingFlags::ACCOUNT);
        let committed = if accounted { added } else { 0 };
        let _reservation =
            self.page_table.memory.commitment().reserve(committed).map_err(|_| refused)?;
        self.prepare_group_locked(&mm, vma)?;
        let vma = vma.lock_write(self.platform());
        self.resize(&mm, &vma, page.0, vma.end());
        drop(vma);
        drop(mm);
        Ok(())
    }
}

const _: () = assert!(STACK_GUARD_GAP.is_multiple_of(PAGE_SIZE));
