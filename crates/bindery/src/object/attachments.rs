//! Reports of an object's mappings to the registry of a System V segment.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

/// Follows the mappings of an object, each VMA separately ([`crate::Memory::segment_memory`]).
///
/// # Context
/// Context: may sleep in [`Attachments::detached`] only.
pub trait Attachments: Send + Sync {
    /// One more VMA maps the memory of `segment`. Called with locks held: it acquires none but
    /// innermost spin locks.
    fn attached(&self, segment: u64);

    /// One VMA less maps the memory of `segment`. Called without locks; it may drop the last handle of
    /// the object.
    fn detached(&self, segment: u64);
}

/// The object's link to the segment whose memory it is.
#[derive(Clone, Copy)]
pub(crate) struct SegmentMark {
    /// The follower. Outlives all holders of the object ([`crate::Memory::segment_memory`]).
    pub(super) told: NonNull<dyn Attachments>,
    /// The follower's number for the segment.
    pub(crate) segment: u64,
    /// The key that the segment was made with.
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
