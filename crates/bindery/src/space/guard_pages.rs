//! Guard pages (`MADV_GUARD_INSTALL`, `MADV_GUARD_REMOVE`): an access raises a signal, and no
//! mapping is split for it.

use crate::addr::VirtRange;
use crate::arch::Marker;
use crate::error::{Error, Failure, NoMemory};
use crate::platform::Platform;
use crate::table::zap::Flush;
use crate::tlb::Gather;

use super::vma::{MappingFlags, Vma};
use super::{AddressSpace, MmapLocked};

impl<P: Platform> AddressSpace<'_, P> {
    /// Throws the contents of `part` away and guards it. A stretch of level 2 that is covered whole
    /// is one entry.
    pub(super) fn install_guards(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        part: VirtRange,
        gather: &mut Gather,
    ) -> Result<(), Failure> {
        if vma.has(MappingFlags::LOCKED) {
            return Err(Error::Invalid.into());
        }
        if vma.is_anonymous() {
            // As Linux, which joins mappings by it.
            self.prepare_group_locked(mm, vma)?;
        }
        let vma = vma.lock_write(self.platform());
        gather.vma_stays();
        self.change_flags(mm, &vma, vma.flags() | MappingFlags::MAYBE_GUARDS);
        let zapped = self.page_table.zap(part, part, Flush::BeforeUnlock, gather);
        self.flush(gather);
        let done = zapped.and_then(|()| self.page_table.mark(part, Marker::Guard));
        drop(vma);
        Ok(done?)
    }

    /// Takes the guards of `part` away; what is touched then is new.
    pub(super) fn remove_guards(&self, vma: &Vma, part: VirtRange) -> Result<(), NoMemory> {
        let _locked = vma.lock_write(self.platform());
        self.page_table.unmark(part, Marker::Guard)
    }
}
