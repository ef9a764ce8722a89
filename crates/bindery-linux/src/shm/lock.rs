//! `SHM_LOCK` and `SHM_UNLOCK`: segments that stay in memory, and the users' accounts of them.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bindery::addr::PAGE_SHIFT;
use bindery::{Errno, Platform};

use super::segment::{LOCKED, Segment};
use super::{IpcUser, Outcome, Segments, pages_of};

/// The pages of segments that one user has locked by `SHM_LOCK` (Linux: `user_shm_lock`).
///
/// The embedder maintains an account for each user and passes the caller's account to each call
/// ([`SegmentLocking`]). A segment is charged in full to the user that locked it. The charge ends
/// with `SHM_UNLOCK` by any user, or when the segment is destroyed. While [`LockAccount::used`] is
/// 0, no segment refers to the account, so the embedder may reuse it for another user.
///
/// ```
/// use bindery_linux::{LockAccount, SegmentLocking};
///
/// // A unikernel has one user, which may lock everything.
/// static ACCOUNT: LockAccount = LockAccount::new();
/// let locking = SegmentLocking { account: &ACCOUNT, limit: u64::MAX, privileged: true };
/// assert_eq!(locking.account.used(), 0);
/// ```
///
/// # Context
/// Context: any.
#[derive(Debug, Default)]
pub struct LockAccount {
    pages: AtomicU64,
}

impl LockAccount {
    /// An account of a user without locked segments.
    #[must_use]
    pub const fn new() -> Self {
        Self { pages: AtomicU64::new(0) }
    }

    /// The pages of the user's locked segments.
    pub fn used(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Adds `pages`, unless the sum would exceed `most`. The sum of all accounts cannot overflow,
    /// because the sum of all segment sizes cannot overflow.
    fn charge(&self, pages: u64, most: u64) -> Result<(), Errno> {
        // Updates the account by a single exchange. Adding first and then undoing an excessive sum
        // could make a smaller concurrent request of another CPU fail.
        let fits = |used: u64| used.checked_add(pages).filter(|after| *after <= most);
        self.pages.fetch_update(Relaxed, Relaxed, fits).map(drop).map_err(|_| Errno::ENOMEM)
    }

    /// Subtracts `pages` that were added.
    fn uncharge(&self, pages: u64) {
        self.pages.fetch_sub(pages, Relaxed);
    }
}

/// The caller's rights to lock segments into memory.
#[derive(Clone, Copy, Debug)]
pub struct SegmentLocking<'m> {
    /// The account of the caller's real user.
    pub account: &'m LockAccount,
    /// The maximum of the account after a lock by the caller (`RLIMIT_MEMLOCK`), in bytes;
    /// `u64::MAX` means no limit.
    pub limit: u64,
    /// Whether the caller is exempt from the limit and may lock and unlock segments of other users
    /// (`CAP_IPC_LOCK`). The caller's locks are charged in any case.
    pub privileged: bool,
}

impl SegmentLocking<'_> {
    /// The limit of the account in pages.
    fn most(&self) -> u64 {
        if self.privileged || self.limit == u64::MAX { u64::MAX } else { self.limit >> PAGE_SHIFT }
    }

    /// Returns `EPERM` unless the caller may lock and unlock the segment.
    fn check<P: Platform>(
        &self,
        user: &IpcUser<'_>,
        segment: &Segment<'_, P>,
    ) -> Result<(), Errno> {
        if self.privileged || segment.is_of(user) { Ok(()) } else { Err(Errno::EPERM) }
    }
}

/// `SHM_LOCK`. An already locked segment stays charged to the same account.
pub(super) fn lock<'m, P: Platform>(
    segments: &Segments<'m, P>,
    user: &IpcUser<'_>,
    locking: &SegmentLocking<'m>,
    id: u32,
) -> Outcome {
    change(segments, user, locking, id, |segment| {
        if locking.limit == 0 && !locking.privileged {
            return Err(Errno::EPERM);
        }
        if segment.mode & LOCKED == 0 {
            locking.account.charge(pages_of(segment.size), locking.most())?;
            segment.locked_by = Some(locking.account);
            segment.mode |= LOCKED;
            segment.object.keep_in_memory();
        }
        Ok(())
    })
}

/// `SHM_UNLOCK`.
pub(super) fn unlock<'m, P: Platform>(
    segments: &Segments<'m, P>,
    user: &IpcUser<'_>,
    locking: &SegmentLocking<'m>,
    id: u32,
) -> Outcome {
    change(segments, user, locking, id, |segment| {
        if segment.mode & LOCKED != 0 {
            segment.mode &= !LOCKED;
            segment.object.allow_swap();
            segment.leave_account();
        }
        Ok(())
    })
}

/// Changes a segment if the caller may lock and unlock it.
fn change<'m, P: Platform>(
    segments: &Segments<'m, P>,
    user: &IpcUser<'_>,
    locking: &SegmentLocking<'m>,
    id: u32,
    change: impl FnOnce(&mut Segment<'m, P>) -> Result<(), Errno>,
) -> Outcome {
    segments.change(id, |segment| {
        locking.check(user, segment)?;
        change(segment).map(|()| 0)
    })
}

impl<P: Platform> Segment<'_, P> {
    /// Uncharges the pages from the account of the user that locked the segment.
    fn leave_account(&mut self) {
        if let Some(account) = self.locked_by.take() {
            account.uncharge(pages_of(self.size));
        }
    }
}

impl<P: Platform> Drop for Segment<'_, P> {
    fn drop(&mut self) {
        self.leave_account();
    }
}
