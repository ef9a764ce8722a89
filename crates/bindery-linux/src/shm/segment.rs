//! One segment.

use core::fmt;

use super::{INDEX_BITS, LockAccount};
use bindery::{Errno, Object, Platform};

/// The permission bits of a mode.
pub(super) const PERMISSIONS: u32 = 0o777;
/// The segment is destroyed with its last attachment (`SHM_DEST`).
pub(super) const DESTROYED: u32 = 0o1000;
/// The segment is not swapped out (`SHM_LOCKED`).
pub(super) const LOCKED: u32 = 0o2000;

/// The credentials of a caller.
///
/// ```
/// use bindery_linux::IpcUser;
///
/// let root = IpcUser { privileged: true, ..IpcUser::default() };
/// assert_eq!(root.user, 0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IpcUser<'a> {
    /// The effective user.
    pub user: u32,
    /// The effective group.
    pub group: u32,
    /// The supplementary groups.
    pub groups: &'a [u32],
    /// Whether the caller is exempt from permissions (`CAP_IPC_OWNER`, `CAP_SYS_ADMIN`).
    pub privileged: bool,
}

impl IpcUser<'_> {
    fn is_in(&self, group: u32) -> bool {
        self.group == group || self.groups.contains(&group)
    }
}

/// Room for one segment ([`super::Segments::new`]).
pub struct SegmentSlot<'m, P: Platform> {
    /// The number of earlier segments in this slot. The number is a part of the identifier, so that
    /// identifiers of destroyed segments do not find a new segment.
    pub(super) uses: u16,
    pub(super) segment: Option<Segment<'m, P>>,
}

impl<P: Platform> fmt::Debug for SegmentSlot<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentSlot")
            .field("uses", &self.uses)
            .field("used", &self.segment.is_some())
            .finish()
    }
}

impl<P: Platform> SegmentSlot<'_, P> {
    /// An empty slot.
    ///
    /// Context: any.
    #[must_use]
    pub const fn new() -> Self {
        Self { uses: 0, segment: None }
    }

    /// The identifier of the slot's current segment or, if the slot is empty, of its next segment.
    pub(super) fn id(&self, index: usize) -> u32 {
        u32::from(self.uses) << INDEX_BITS | index as u32
    }
}

impl<P: Platform> Default for SegmentSlot<'_, P> {
    fn default() -> Self {
        Self::new()
    }
}

/// A segment. Times are in seconds since 1970; 0 means never.
pub(super) struct Segment<'m, P: Platform> {
    pub(super) object: Object<'m, P>,
    /// The key by which `shmget` finds the segment; 0 if no key finds it.
    pub(super) key: i32,
    /// The requested size in bytes.
    pub(super) size: u64,
    pub(super) mode: u32,
    /// The owner's user and group.
    pub(super) owner: (u32, u32),
    pub(super) creator: (u32, u32),
    pub(super) attached_at: i64,
    pub(super) detached_at: i64,
    pub(super) changed_at: i64,
    pub(super) created_by: i32,
    pub(super) last_process: i32,
    /// The number of VMAs that map the segment, and of calls that are about to map it.
    pub(super) attached: u64,
    /// The account to which the pages are charged while the segment is locked.
    pub(super) locked_by: Option<&'m LockAccount>,
}

impl<P: Platform> Segment<'_, P> {
    /// Returns `EACCES` unless the mode grants `user` the permissions in any triple of `wanted`, or
    /// the user is privileged. (Linux: `ipcperms`.)
    pub(super) fn check(&self, user: &IpcUser<'_>, wanted: u32) -> Result<(), Errno> {
        let wanted = wanted >> 6 | wanted >> 3 | wanted;
        let granted = if self.is_of(user) {
            self.mode >> 6
        } else if user.is_in(self.owner.1) || user.is_in(self.creator.1) {
            self.mode >> 3
        } else {
            self.mode
        };
        let lacks = wanted & !granted & 0o7 != 0;
        if lacks && !user.privileged { Err(Errno::EACCES) } else { Ok(()) }
    }

    /// Returns `EPERM` unless the user may change the segment.
    pub(super) fn check_owner(&self, user: &IpcUser<'_>) -> Result<(), Errno> {
        if self.is_of(user) || user.privileged { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// Whether the user is the owner or the creator.
    pub(super) fn is_of(&self, user: &IpcUser<'_>) -> bool {
        user.user == self.owner.0 || user.user == self.creator.0
    }
}
