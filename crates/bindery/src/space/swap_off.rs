//! The part of `swapoff(2)` that one address space has: everything that it has in an area comes
//! back.

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Kind};
use crate::error::{Error, FaultError};
use crate::interrupt;
use crate::platform::Platform;
use crate::swap::SwapArea;

use super::fault::{PageAccess, Reading};
use super::{Access, AddressSpace};

impl<P: Platform> AddressSpace<'_, P> {
    /// Brings everything back that the address space has in the swap area, run by run, so that
    /// [`Memory::swap_off`](crate::Memory::swap_off) can remove it. Call
    /// [`Memory::stop_swapping_to`](crate::Memory::stop_swapping_to) before, or new pages go out
    /// meanwhile. A fork that runs at the same time may take entries to a child: the child is
    /// another address space. No lock is held from one run to the next.
    ///
    /// Context: may sleep. Complexity: in the runs of swap entries, and the entries of the
    /// mappings.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Fault`] if the area has lost a page, which stays lost;
    /// [`Error::Interrupted`] for a fatal signal. What has come back stays, and everything can be
    /// used as before.
    pub fn swap_in_area(&self, area: &SwapArea) -> Result<(), Error> {
        let mut at = VirtAddr(0);
        while let Some(page) = self.next_in_area(at, area.number) {
            interrupt::check(self.platform())?;
            let fault = || match self.lock_vma(page) {
                Some(locked) => self
                    .swap_in(
                        locked.vma(),
                        PageAccess { page, access: Access::Read },
                        Reading::ForSwapOff,
                    )
                    .map(drop),
                None => Ok(()),
            };
            self.page_table.memory.retry(fault).map_err(|error| match error {
                FaultError::OutOfMemory => Error::OutOfMemory,
                _ => Error::Fault(page),
            })?;
            at = page;
        }
        Ok(())
    }

    /// The first page from `at` on that has its content in the area.
    fn next_in_area(&self, at: VirtAddr, area: u8) -> Option<VirtAddr> {
        let guard = self.mmap_lock.lock();
        let mut at = at;
        while let Some(vma) = self.first_ending_after(&guard, at.0) {
            let range = VirtRange::raw(vma.start().max(at.0), vma.end());
            let mut found = None;
            self.page_table.look(range, |looked| {
                let level = looked.node.level;
                if level.kind(looked.raw) == Kind::Absent
                    && let Some(Absent::Swap { device, .. }) = P::Arch::decode_absent(looked.raw)
                    && device == area
                {
                    found = Some(looked.range.start());
                }
                found.is_none()
            });
            if found.is_some() {
                return found;
            }
            at = VirtAddr(vma.end());
        }
        None
    }
}
