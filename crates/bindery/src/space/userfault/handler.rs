//! The handler's side of a userfaultfd.

use core::fmt;

use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::userfault::Userfault;

/// The calls by which a handler answers faults: a userfaultfd, and the address space whose pages
/// the handler supplies, moves or protects ([`AddressSpace::handler`]). If the userfaultfd belongs
/// to another address space, each call fails, with [`crate::Error::Invalid`] unless an earlier
/// check reports a different error.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, FillMode, PartialFill, Platform, Userfault};
///
/// fn supply<P: Platform>(
///     space: &AddressSpace<'_, P>,
///     userfault: &Userfault<'_, P>,
///     page: VirtAddr,
/// ) -> Result<(), PartialFill> {
///     space.handler(userfault).fill_zeroes(page, 4096, FillMode::empty())
/// }
/// ```
pub struct UserfaultHandler<'h, 'm, P: Platform> {
    pub(super) space: &'h AddressSpace<'m, P>,
    pub(super) userfault: &'h Userfault<'h, P>,
}

impl<P: Platform> Clone for UserfaultHandler<'_, '_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for UserfaultHandler<'_, '_, P> {}

impl<P: Platform> fmt::Debug for UserfaultHandler<'_, '_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserfaultHandler")
            .field("userfault", self.userfault)
            .finish_non_exhaustive()
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// The calls of the userfaultfd's handler on this address space.
    ///
    /// Context: any.
    #[inline]
    pub fn handler<'h>(&'h self, userfault: &'h Userfault<'_, P>) -> UserfaultHandler<'h, 'm, P> {
        UserfaultHandler { space: self, userfault }
    }
}
