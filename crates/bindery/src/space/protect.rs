//! `mprotect(2)`.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;
use crate::tlb::Gather;

use super::index::Indexed;
use super::vma::Protection;
use super::{AddressSpace, Removed};

impl<P: Platform> AddressSpace<'_, P> {
    /// Lets programs do with `length` bytes (rounded up to pages) at `start` what `protection`
    /// says, and nothing else.
    ///
    /// # Errors
    /// [`Error::Unaligned`] and [`Error::OutOfRange`], with nothing changed. As on Linux, where
    /// something in the range is not mapped ([`Error::NotMapped`]) or a mapping cannot be cut
    /// ([`Error::TooManyMappings`], [`Error::OutOfMemory`]), what lies before it is changed.
    ///
    /// Complexity: in the runs of the range. One invalidation at the end, none where the range
    /// only allows more than before.
    pub fn mprotect(
        &self,
        start: VirtAddr,
        length: u64,
        protection: Protection,
    ) -> Result<(), Error> {
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        if length == 0 {
            return Ok(());
        }
        let limit = self.limit();
        let range = length
            .checked_next_multiple_of(PAGE_SIZE)
            .and_then(|length| VirtRange::from_len(start, length))
            .filter(|range| !range.is_empty())
            .ok_or(Error::OutOfRange { limit })?;
        let (mut gather, mut removed) = (Gather::new(), Removed::default());
        let guard = self.mutex.lock();
        let result = self.protect_locked(range, protection, &mut gather, &mut removed);
        self.flush(&mut gather);
        drop(guard);
        self.finish(gather, removed);
        result
    }

    fn protect_locked(
        &self,
        range: VirtRange,
        protection: Protection,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<(), Error> {
        let mut at = range.start();
        while at < range.end() {
            let Some(mut vma) = self.first_behind(at.0).filter(|vma| vma.start() <= at.0) else {
                return Err(Error::NotMapped(at));
            };
            let part = vma.range().intersection(range);
            at = part.end();
            if vma.protection() == protection {
                continue;
            }
            if vma.start() < part.start().0 {
                self.room_for(1)?;
                vma = self.split(vma, part.start())?;
            }
            if part.end().0 < vma.end() {
                let cut = self.room_for(1).and_then(|()| self.split(vma, part.end()));
                if let Err(error) = cut {
                    // Nothing has changed here: what was cut off below belongs to it again.
                    self.merge_around(vma, removed);
                    return Err(error);
                }
            }
            vma.write(self.platform());
            vma.set_protection(protection);
            let done = self.table.protect(part, protection.permissions(), gather);
            vma.end_write();
            self.merge_around(vma, removed);
            done.map_err(|_| Error::OutOfMemory)?;
        }
        Ok(())
    }
}
