//! Moves a handler's own pages to missing pages (`UFFDIO_MOVE`).

use bitflags::bitflags;

use crate::addr::{VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;
use crate::space::move_pages::{MovePermit, MoveRequest, move_in_space};
use crate::userfault::Userfault;
use crate::vma::{MappingFlags, Vma};

use super::PartialFill;
use super::handler::UserfaultHandler;

bitflags! {
    /// Modes of [`UserfaultHandler::move_pages`] (`UFFDIO_MOVE_MODE_*`).
    ///
    /// # Context
    /// Context: any.
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{AddressSpace, MoveMode, PartialFill, Platform, Userfault};
    ///
    /// /// Moves the present pages of 2 MiB.
    /// fn compact<P: Platform>(
    ///     space: &AddressSpace<'_, P>,
    ///     userfault: &Userfault<'_, P>,
    ///     (to, from): (VirtAddr, VirtAddr),
    /// ) -> Result<(), PartialFill> {
    ///     space.handler(userfault).move_pages(to, from, 2 << 20, MoveMode::ALLOW_SOURCE_HOLES)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct MoveMode: u8 {
        /// Does not wake the faults that wait for the pages.
        const DONT_WAKE = 1 << 0;
        /// Skips missing pages of the source and counts them as moved.
        const ALLOW_SOURCE_HOLES = 1 << 1;
    }
}

/// A userfaultfd's conditions on a destination.
struct Permit<'a, 'm, P: Platform>(&'a Userfault<'m, P>);

impl<P: Platform> MovePermit for Permit<'_, '_, P> {
    fn is_changing(&self) -> bool {
        self.0.state().is_changing()
    }

    fn serves(&self, destination: &Vma) -> bool {
        destination.userfault_pointer() == Some(self.0.pointer())
    }

    fn keeps_protection(&self, destination: &Vma) -> bool {
        destination.has(MappingFlags::USERFAULT_WRITE_PROTECT)
    }
}

impl<P: Platform> UserfaultHandler<'_, '_, P> {
    /// Moves the pages of `length` bytes at `from` to missing pages at `to`, and wakes the faults
    /// that wait for them (`UFFDIO_MOVE`). Both ranges lie in private anonymous mappings with the
    /// same protection, and the destination is registered. Other threads may run and fault during
    /// the call. No page is copied: a folio that the range covers moves as a whole, and a page in
    /// swap stays there. `docs/userfault.md` describes the protocol.
    ///
    /// Context: may sleep. Complexity: linear in the number of runs; for whole tables and single
    /// pages, linear in the number of folios, since each folio gets a new index. One invalidation
    /// per 64 tables.
    ///
    /// # Errors
    /// [`PartialFill`] with the number of moved bytes and [`Error::Invalid`] for a bad range,
    /// mappings that cannot exchange pages, a destination that is not registered, or a userfaultfd
    /// of another address space; [`Error::NotMapped`] for a missing mapping or page;
    /// [`Error::Exists`] if a page of the destination is present; [`Error::Busy`] for a pinned
    /// page, or a page that another process shares; [`Error::Fault`] for a guard or a poisoned
    /// page; [`Error::TryAgain`] while the address space changes; [`Error::OutOfMemory`];
    /// [`Error::Interrupted`] for a fatal signal.
    pub fn move_pages(
        self,
        to: VirtAddr,
        from: VirtAddr,
        length: u64,
        mode: MoveMode,
    ) -> Result<(), PartialFill> {
        let Self { space, userfault } = self;
        if userfault.state().is_changing() {
            return Err(Error::TryAgain.into());
        }
        if !space.owns_userfault(userfault) {
            return Err(Error::Invalid.into());
        }
        let allows_holes = mode.contains(MoveMode::ALLOW_SOURCE_HOLES);
        let request = MoveRequest { destination: to, source: from, length, allows_holes };
        let (done, result) = move_in_space(space, &request, &Permit(userfault));
        if done > 0 && !mode.contains(MoveMode::DONT_WAKE) {
            userfault.state().wake(space.platform(), VirtRange::raw(to.0, to.0 + done));
        }
        result.map_err(|error| PartialFill { done, error: error.at(VirtAddr(from.0 + done)) })
    }
}
