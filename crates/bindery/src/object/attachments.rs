//! Reports of an object's mappings to the registry of a System V segment.

use super::lent::Lent;

/// Follows the mappings of an object, each VMA separately ([`crate::Memory::segment_memory`]).
///
/// # Context
/// Context: may sleep in [`Attachments::detached`] only.
pub trait Attachments: Send + Sync {
    /// One more VMA maps the memory of `segment`. Called with locks held: it acquires none but
    /// innermost spin locks.
    fn attached(&self, segment: u64);

    /// One VMA less maps the memory of `segment`. Called without locks; it may drop the last handle
    /// of the object.
    fn detached(&self, segment: u64);
}

/// The object's link to the segment whose memory it is.
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
    /// The key that the segment was made with.
    pub key: u32,
}

impl SegmentMark {
    pub(super) fn follower(&self) -> &dyn Attachments {
        self.follower.get()
    }
}
