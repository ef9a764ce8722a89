//! Dropping contents while the mapping stays (`madvise(2)`, `MADV_DONTNEED`).

use crate::addr::VirtAddr;
use crate::error::Error;
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::index::Indexed;
use super::{AddressSpace, Removed};

impl<P: Platform> AddressSpace<'_, P> {
    /// Drops the contents of `length` bytes (rounded up to pages) at `start`: what is mapped there
    /// reads as zeroes again. Tables that become empty are freed.
    ///
    /// # Errors
    /// As [`AddressSpace::munmap`] for the range; [`Error::NotMapped`] where it has holes, after
    /// the mapped parts are dropped, as on Linux.
    ///
    /// Complexity: in the mappings and whole tables, plus the runs of the tables at the edges.
    pub fn discard(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        if length == 0 && start.is_aligned(crate::addr::PAGE_SIZE) {
            return Ok(());
        }
        let range = self.unmap_range(start, length)?;
        let mut gather = Gather::new();
        let mut result = Ok(());
        let guard = self.mutex.lock();
        let mut at = range.start();
        while at < range.end() {
            let Some(vma) = self.first_behind(at.0).filter(|vma| vma.start() < range.end().0)
            else {
                result = Err(Error::NotMapped(at));
                break;
            };
            if vma.start() > at.0 {
                result = Err(Error::NotMapped(at));
            }
            let part = vma.range().intersection(range);
            at = part.end();
            vma.write(self.platform());
            let zapped = self.table.zap(part, part, &mut gather);
            self.table.prune(part.start(), &mut gather);
            self.table.prune(VirtAddr(part.end().0 - 1), &mut gather);
            // Before a fault is let in: it would map a new page while others still use the old.
            let mut counts = Counts::default();
            self.table.flush(&mut gather, &mut counts);
            self.table.stats.add(&counts);
            vma.end_write();
            if zapped.is_err() {
                result = Err(Error::OutOfMemory);
                break;
            }
        }
        self.flush(&mut gather);
        drop(guard);
        self.finish(gather, Removed::default());
        result
    }
}
