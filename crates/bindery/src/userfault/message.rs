//! The messages that a handler reads.

use core::fmt;

use crate::addr::{VirtAddr, VirtRange};
use crate::platform::Platform;

use super::Userfault;

/// Why a fault waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum UserfaultKind {
    /// There is no page.
    Missing,
    /// The page is write-protected (`UFFD_PAGEFAULT_FLAG_WP`).
    WriteProtected,
    /// The object has the page, and no entry maps it (`UFFD_PAGEFAULT_FLAG_MINOR`).
    Minor,
}

/// A fault that waits (`UFFD_EVENT_PAGEFAULT`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct UserfaultFault {
    /// The address: of the page, or of the access itself
    /// ([`crate::UserfaultFeatures::EXACT_ADDRESS`]).
    pub address: VirtAddr,
    /// Why it waits.
    pub kind: UserfaultKind,
    /// Whether it is a write (`UFFD_PAGEFAULT_FLAG_WRITE`).
    pub is_write: bool,
    /// The thread ([`crate::UserfaultFeatures::THREAD_ID`]), else 0.
    pub thread: u32,
}

/// What a handler reads (`struct uffd_msg`).
pub enum UserfaultMessage<'m, P: Platform> {
    /// A fault, which waits until it is woken.
    Fault(UserfaultFault),
    /// The address space was forked; the child's userfaultfd (`UFFD_EVENT_FORK`).
    Fork(Userfault<'m, P>),
    /// Memory was moved (`UFFD_EVENT_REMAP`).
    Remap {
        /// Where it was.
        from: VirtAddr,
        /// Where it is.
        to: VirtAddr,
        /// Bytes.
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
