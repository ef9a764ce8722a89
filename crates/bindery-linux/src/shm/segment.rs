//! One segment.

use core::fmt;

use super::{INDEX_BITS, LockAccount};
use bindery::{Errno, Object, Platform};

/// The bits of a mode that say who may do what.
pub(super) const PERMISSIONS: u32 = 0o777;
/// It goes with the last attachment (`SHM_DEST`).
pub(super) const DESTROYED: u32 = 0o1000;
/// Its pages stay in memory (`SHM_LOCKED`).
pub(super) const LOCKED: u32 = 0o2000;

/// The caller, as far as segments must know it.
///
/// ```
/// use bindery_linux::IpcUser;
///
/// let root = IpcUser { privileged: true, ..IpcUser::default() };
/// assert_eq!(root.user, 0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IpcUser {
    /// The effective user.
    pub user: u32,
    /// The effective group.
    pub group: u32,
    /// Whether the caller is exempt from permissions (`CAP_IPC_OWNER`, `CAP_SYS_ADMIN`).
    pub privileged: bool,
}

/// Room for one segment ([`super::Segments::new`]).
pub struct SegmentSlot<'m, P: Platform> {
    /// How many segments it had before: part of the identifier, so that an old one leads nowhere.
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
    /// An empty one.
    ///
    /// Context: any.
    #[must_use]
    pub const fn new() -> Self {
        Self { uses: 0, segment: None }
    }

    /// The identifier of the segment that is in it, or comes next.
    pub(super) fn id(&self, index: usize) -> u32 {
        u32::from(self.uses) << INDEX_BITS | index as u32
    }
}

impl<P: Platform> Default for SegmentSlot<'_, P> {
    fn default() -> Self {
        Self::new()
    }
}

/// What is known of a segment. Times are in seconds since 1970, 0 for never.
pub(super) struct Segment<'m, P: Platform> {
    pub(super) object: Object<'m, P>,
    /// By which `shmget` finds it; 0 for by none.
    pub(super) key: i32,
    /// In bytes, as it was asked for.
    pub(super) size: u64,
    pub(super) mode: u32,
    /// User and group.
    pub(super) owner: (u32, u32),
    pub(super) creator: (u32, u32),
    pub(super) attached_at: i64,
    pub(super) detached_at: i64,
    pub(super) changed_at: i64,
    pub(super) created_by: i32,
    pub(super) last_process: i32,
    /// VMAs that map it, and calls that are about to.
    pub(super) attached: u64,
    /// The account in which its pages count; `None` unless it is locked.
    pub(super) locked_by: Option<&'m LockAccount>,
}

impl<P: Platform> Segment<'_, P> {
    /// Refuses who may not do what the three times three bits of `wanted` say. (Linux: `ipcperms`.)
    pub(super) fn check(&self, user: &IpcUser, wanted: u32) -> Result<(), Errno> {
        let wanted = wanted >> 6 | wanted >> 3 | wanted;
        let granted = if self.is_of(user) {
            self.mode >> 6
        } else if user.group == self.owner.1 || user.group == self.creator.1 {
            self.mode >> 3
        } else {
            self.mode
        };
        let lacks = wanted & !granted & 0o7 != 0;
        if lacks && !user.privileged { Err(Errno::EACCES) } else { Ok(()) }
    }

    /// Refuses who may not change it.
    pub(super) fn check_owner(&self, user: &IpcUser) -> Result<(), Errno> {
        if self.is_of(user) || user.privileged { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// Whether the caller's user has made it or owns it.
    pub(super) fn is_of(&self, user: &IpcUser) -> bool {
        user.user == self.owner.0 || user.user == self.creator.0
    }
}
