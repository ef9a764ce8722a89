//! The messages that a handler reads.

use core::fmt;

use crate::addr::{VirtAddr, VirtRange};
use crate::platform::Platform;

use super::Userfault;

/// The reason why a fault waits.
///
/// ```
/// use bindery::{UserfaultFault, UserfaultKind};
///
/// /// Whether the handler must supply a page; else it lifts a protection, or continues.
/// fn needs_content(fault: &UserfaultFault) -> bool {
///     fault.kind == UserfaultKind::Missing
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum UserfaultKind {
    /// The page is absent.
    Missing,
    /// The page is write-protected (`UFFD_PAGEFAULT_FLAG_WP`).
    WriteProtected,
    /// The object has the page, but no entry maps it (`UFFD_PAGEFAULT_FLAG_MINOR`).
    Minor,
}

/// A waiting fault (`UFFD_EVENT_PAGEFAULT`).
///
/// ```
/// use bindery::UserfaultFault;
/// use bindery::addr::VirtAddr;
///
/// /// The page that the handler must supply.
/// fn page(fault: &UserfaultFault) -> VirtAddr {
///     fault.address.align_down(4096)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct UserfaultFault {
    /// The address of the page, or of the access itself
    /// ([`crate::UserfaultFeatures::EXACT_ADDRESS`]).
    pub address: VirtAddr,
    /// The reason why the fault waits.
    pub kind: UserfaultKind,
    /// Whether the access is a write (`UFFD_PAGEFAULT_FLAG_WRITE`).
    pub is_write: bool,
    /// The faulting thread ([`crate::UserfaultFeatures::THREAD_ID`]), or 0.
    pub thread: u32,
}

/// A message that a handler reads (`struct uffd_msg`).
///
/// ```
/// use bindery::{Error, Platform, Userfault, UserfaultMessage};
///
/// /// Counts faults until the next event.
/// fn faults<P: Platform>(userfault: &Userfault<'_, P>) -> Result<u64, Error> {
///     let mut count = 0;
///     while let UserfaultMessage::Fault(_) = userfault.read()? {
///         count += 1;
///     }
///     Ok(count)
/// }
/// ```
pub enum UserfaultMessage<'m, P: Platform> {
    /// A fault, which waits until it is woken.
    Fault(UserfaultFault),
    /// The address space was forked. The value is the child's userfaultfd (`UFFD_EVENT_FORK`).
    Fork(Userfault<'m, P>),
    /// Memory was moved (`UFFD_EVENT_REMAP`).
    Remap {
        /// The old address.
        from: VirtAddr,
        /// The new address.
        to: VirtAddr,
        /// The length in bytes.
        length: u64,
    },
    /// Contents are dropped (`UFFD_EVENT_REMOVE`).
    Remove(VirtRange),
    /// Memory was unmapped (`UFFD_EVENT_UNMAP`).
    Unmap(VirtRange),
}

impl<P: Platform> fmt::Debug for UserfaultMessage<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(fault) => f.debug_tuple("Fault").field(fault).finish(),
            Self::Fork(child) => f.debug_tuple("Fork").field(child).finish(),
            Self::Remap { from, to, length } => {
                f.debug_tuple("Remap").field(from).field(to).field(length).finish()
            }
            Self::Remove(range) => f.debug_tuple("Remove").field(range).finish(),
            Self::Unmap(range) => f.debug_tuple("Unmap").field(range).finish(),
        }
    }
}
