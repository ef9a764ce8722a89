//! Reports of an object's mappings to the registry of a System V segment.

use core::ptr::NonNull;

/// Follows the mappings (VMAs) of an object.
pub(crate) trait Attachments: Send + Sync {
    /// A mapping was added. Called with locks held: takes only innermost spin locks.
    fn attached(&self, segment: u64);

    /// A mapping was removed. Called without locks; may drop the last handle of the object.
    fn detached(&self, segment: u64);
}

/// The object's link to the segment whose memory it is.
#[derive(Clone, Copy)]
pub(crate) struct SegmentMark {
    /// The follower. Outlives all holders of the object ([`crate::Memory::segment_memory`]).
    pub(super) told: NonNull<dyn Attachments>,
    /// The follower's number for the segment.
    pub(crate) segment: u64,
    /// The key of the segment.
    #[cfg_attr(not(feature = "procfs"), expect(dead_code, reason = "shown by `linux::proc`"))]
    pub(crate) key: u32,
}

impl SegmentMark {
    pub(super) fn told(&self) -> &dyn Attachments {
        // SAFETY: the follower outlives all holders of the object. The caller is a holder, or was
        // one until a moment ago, in a call whose own caller still holds the lifetime
        // (`map_removed`): handles and address spaces end before the lifetime for which it was
        // lent.
        unsafe { self.told.as_ref() }
    }
}
