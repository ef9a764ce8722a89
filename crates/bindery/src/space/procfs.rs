//! What the files under `/proc` need of an address space, and nothing else does.

use core::sync::atomic::Ordering;

use crate::addr::VirtAddr;
use crate::error::{Error, NoMemory};
use crate::platform::Platform;
use crate::table::age::Forget;

use super::vma::Vma;
use super::{AddressSpace, MappingFlags, MmapLocked};

impl<P: Platform> AddressSpace<'_, P> {
    /// The most pages that all mappings together have had (`VmPeak`).
    pub(crate) fn peak_total(&self) -> u64 {
        self.account.peak.load(Ordering::Relaxed).max(0) as u64
    }

    /// The most pages that were resident whenever it was noted, or are now (`VmHWM`, and `ru_maxrss`
    /// of `getrusage`). It is noted whenever a call takes pages away.
    ///
    /// Context: any. Complexity: constant. Takes no lock.
    pub fn resident_peak(&self) -> u64 {
        self.note_resident();
        self.account.resident_peak.load(Ordering::Relaxed).max(0) as u64
    }

    /// Forgets what [`AddressSpace::note_resident`] has noted.
    pub(crate) fn reset_resident_peak(&self) {
        self.account.resident_peak.store(0, Ordering::Relaxed);
    }

    /// Looks at the first mapping that ends after `at`, with the mutex held; `None` if there is
    /// none. A caller that lists all mappings asks again from the end of the last, so that others
    /// get the mutex in between.
    pub(crate) fn with_first_ending_after<R>(
        &self,
        at: VirtAddr,
        look: impl FnOnce(&MmapLocked, &Vma) -> R,
    ) -> Option<R> {
        let mm = self.mmap_lock.lock();
        self.first_ending_after(&mm, at.0).map(|vma| look(&mm, vma))
    }

    /// Lets all leaves of the mappings that `concerned` names forget; with [`Forget::SoftDirty`],
    /// the mappings too. When it returns, every CPU has forgotten.
    pub(crate) fn forget_in(
        &self,
        forget: Forget,
        concerned: impl Fn(&Vma) -> bool,
    ) -> Result<(), Error> {
        // What has been forgotten already is forgotten once more, if it comes to that.
        self.page_table.memory.outermost(|| Ok(self.forget_once(forget, &concerned)?))
    }

    fn forget_once(
        &self,
        forget: Forget,
        concerned: &impl Fn(&Vma) -> bool,
    ) -> Result<(), NoMemory> {
        self.transaction(|mm, gather, _| {
            let mut result = Ok(());
            for node in self.vmas.iter() {
                let vma = self.vma(node);
                if result.is_err() || !concerned(vma) {
                    continue;
                }
                let vma = vma.lock_write(self.platform());
                if forget == Forget::SoftDirty {
                    self.change_flags(mm, &vma, vma.flags() - MappingFlags::SOFT_DIRTY);
                }
                let forgotten = self.page_table.forget(vma.range(), forget, gather, |_, _| true);
                result = forgotten.map(|_| ());
            }
            // One flush for up to 64 tables. A store that slips through before it is as if it had
            // come before the call.
            result
        })
    }
}
