//! The backing store of an object.

use crate::arch::MemoryType;
use crate::memory::DirtyLimit;

use super::attachments::SegmentMark;
use super::frame_source::FrameSource;
use super::lent::Lent;
use super::pager::Pager;
use super::quota::Quota;

/// The way in which the memory of an object counts as committed ([`crate::Commitment`]).
///
/// ```
/// use bindery::{Accounting, Error, Memory, Object, Platform, Sealing};
///
/// /// The memory of a shared anonymous mapping.
/// fn anonymous<P: Platform>(memory: &Memory<P>, size: u64) -> Result<Object<'_, P>, Error> {
///     memory.shared_memory(size, Sealing::Forbidden, Accounting::Whole)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accounting {
    /// The whole size, from the start: a shared anonymous mapping.
    Whole,
    /// Each page when it is allocated: a memfd, or a mapping with `MAP_NORESERVE`.
    PerPage,
    /// Not at all.
    None,
}

/// The restriction on access to the content of shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Secrecy {
    /// Any holder of a handle has access.
    None,
    /// Only programs that map the object have access, by their own accesses (`memfd_secret(2)`).
    Secret,
}

/// The backing store of an object, which holds the content that is not in memory.
#[derive(Clone, Copy)]
pub(super) enum Backing {
    /// No backing store: a page that is neither in memory nor in swap reads as zeroes.
    Memory {
        /// The way in which the object's pages count as committed.
        accounting: Accounting,
        /// The quota to which committed pages are also charged (`Memory::shared_memory_within`).
        quota: Option<Lent<Quota>>,
        /// The segment that this object backs.
        segment: Option<SegmentMark>,
        /// The restriction on access to the content.
        content: Secrecy,
    },
    /// A file behind a pager.
    File {
        pager: Lent<dyn Pager>,
        /// The pager's number for the file.
        file: u64,
        /// The number space of the file system in which the file can be found by that number; 0 for
        /// none.
        file_system: u64,
        /// The limit for the dirty pages of that file system.
        dirty_limit: Option<Lent<DirtyLimit>>,
        /// Whether the pager and the limit exist forever, so that reclaim may use them, which has
        /// no handle.
        lasts: bool,
    },
    /// Frames that the core does not own: the object has no pages of its own.
    Frames {
        source: Lent<dyn FrameSource>,
        /// The memory type of their leaves.
        memory: MemoryType,
    },
}
