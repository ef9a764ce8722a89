//! Reports of an object's mappings to the registry of a System V segment.

use core::ptr::NonNull;

/// Follows the mappings (VMAs) of an object.
pub(crate) trait Attachments: Send + Sync {
    /// There is one more. Called with locks held: takes none but innermost spin locks.
    fn attached(&self, segment: u64);

    /// There is one less. Called without locks; may let go of the last handle of the object.
    fn detached(&self, segment: u64);
}

/// What an object knows of the segment that it is the memory of.
#[derive(Clone, Copy)]
pub(crate) struct SegmentMark {
    /// What follows them. Outlives all who hold the object ([`crate::Memory::segment_memory`]).
    pub(super) told: NonNull<dyn Attachments>,
    /// What the segment is called there.
    pub(crate) segment: u64,
    /// The key that the segment was made with.
    #[cfg_attr(not(feature = "procfs"), expect(dead_code, reason = "shown by `linux::proc`"))]
    pub(crate) key: u32,
}

impl SegmentMark {
    pub(super) fn told(&self) -> &dyn Attachments {
        // SAFETY: it outlives all who hold the object, and the caller is a holder, or was one a
        // moment ago in a call of somebody who still may be (`map_removed`): handles and address
        // spaces end before the lifetime that it was lent for.
        unsafe { self.told.as_ref() }
    }
}
