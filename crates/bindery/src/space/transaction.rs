//! One change of an address space, from its lock to its last free.

use core::mem;

use crate::platform::Platform;
use crate::tlb::Gather;

use super::change::Removed;
use super::{AddressSpace, MmapLocked};

impl<P: Platform> AddressSpace<'_, P> {
    /// Does `work` with the address space locked, and ends it in the only right order:
    ///
    /// 1. *Flush*, with the lock held: a call that gets the lock next may rely on what this one
    ///    took away from every TLB, and the pages of VMAs that stay are counted down while their
    ///    owner is the same.
    /// 2. *Unlock*: no lock is held while memory is freed.
    /// 3. *Finish*: pages are counted down, removed VMAs let go of what they hold, tables and VMAs
    ///    are freed after the readers.
    /// 4. *Tell* userfaultfds of it, and wait for their readers: no lock is held, and nothing of
    ///    the call is left to be done.
    #[inline]
    pub(super) fn transaction<R>(
        &self,
        work: impl FnOnce(&MmapLocked, &mut Gather, &mut Removed) -> R,
    ) -> R {
        let (mut gather, mut removed) = (Gather::new(), Removed::default());
        let guard = self.mmap_lock.lock();
        let result = work(&guard, &mut gather, &mut removed);
        self.flush(&mut gather);
        drop(guard);
        let notices = mem::take(&mut removed.notices);
        self.finish(&mut gather, removed);
        if !notices.is_empty() {
            notices.deliver(self.page_table.memory);
        }
        result
    }
}
