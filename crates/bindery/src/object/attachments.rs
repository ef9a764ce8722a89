//! Reports of an object's mappings to the registry of a System V segment.

use super::lent::Lent;

/// Follows the mappings of an object; each VMA counts separately
/// ([`crate::Memory::segment_memory`]).
///
/// # Context
/// Context: may sleep in [`Attachments::detached`] only.
pub trait Attachments: Send + Sync {
    /// One more VMA maps the memory of `segment`. Called with locks held, so it may acquire only
    /// innermost spin locks.
    fn attached(&self, segment: u64);

    /// One VMA fewer maps the memory of `segment`. Called without locks, so it may drop the last
    /// handle of the object.
    fn detached(&self, segment: u64);
}

/// An object's link to the System V segment that it backs.
#[derive(Clone, Copy)]
pub(crate) struct SegmentMark {
    /// The follower ([`crate::Memory::segment_memory`]).
    pub(super) follower: Lent<dyn Attachments>,
    pub(crate) id: SegmentId,
}

/// The identity of a System V segment.
///
/// ```
/// use bindery::{ObjectView, Platform};
///
/// /// The inode number that `/proc` shows for a mapping of the segment.
/// fn inode<P: Platform>(object: &ObjectView<'_, P>) -> Option<u64> {
///     object.segment().map(|id| id.segment)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentId {
    /// The number by which [`Attachments`] knows the segment.
    pub segment: u64,
    /// The key that the segment was created with.
    pub key: u32,
}

impl SegmentMark {
    pub(super) fn follower(&self) -> &dyn Attachments {
        self.follower.get()
    }
}
