//! A call that may sleep.

use core::ops::Deref;

use crate::error::Failure;
use crate::folio::FolioRef;
use crate::object::Wait;
use crate::platform::Platform;

use super::AddressSpace;

/// The address space, for a call that waits between its attempts. [`MaySleep::wait`] borrows the
/// value mutably; VMA locks, cursors, edits and read sections made from the value also borrow it,
/// so none of them can exist during a wait.
///
/// A fault needs no such value: it waits by consuming the guard of its VMA
/// ([`wait_for_known`](super::fault::wait_for_known)), which its cursors and read sections borrow.
pub(in crate::space) struct MaySleep<'s, 'm, P: Platform>(&'s AddressSpace<'m, P>);

impl<'s, 'm, P: Platform> MaySleep<'s, 'm, P> {
    /// A call on `space` that holds nothing yet.
    #[inline(always)]
    pub(in crate::space) fn new(space: &'s AddressSpace<'m, P>) -> Self {
        Self(space)
    }

    /// Waits, as [`Wait::wait`].
    #[cold]
    pub(in crate::space) fn wait(
        &mut self,
        wait: Wait,
    ) -> Result<Option<FolioRef<'m, P>>, Failure> {
        wait.wait(self.0.page_table.memory, None)
    }
}

impl<'m, P: Platform> Deref for MaySleep<'_, 'm, P> {
    type Target = AddressSpace<'m, P>;

    #[inline(always)]
    fn deref(&self) -> &AddressSpace<'m, P> {
        self.0
    }
}
