//! `mprotect(2)`.

use arrayvec::ArrayVec;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, ProtectionKey};
use crate::error::{Error, Failure};
use crate::platform::Platform;
use crate::vma::{MappingFlags, Protection};
use crate::vmas::VmaView;

use super::mlock::LOCKS;
use super::range::page_range;
use super::steps::{CallReady, Step};
use crate::space::AddressSpace;
use crate::space::call::populate::Populate;
use crate::space::entry_policy::entry_policy;
use crate::space::op::Op;

/// The start of a change of protection. The length of the change counts from the address.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, Platform, ProtectFrom, Protection};
///
/// /// Makes a stack executable, all of it, from any address in it.
/// fn executable<P: Platform>(space: &AddressSpace<'_, P>, stack: VirtAddr) -> Result<(), Error> {
///     let all = Protection::READ | Protection::WRITE | Protection::EXECUTE;
///     space.mprotect_from(ProtectFrom::GrowingStart(stack), 4096, all)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProtectFrom {
    /// The address itself.
    Address(VirtAddr),
    /// The start of the mapping that contains the address and that must grow down
    /// (`PROT_GROWSDOWN`).
    GrowingStart(VirtAddr),
    /// From the address to the end of its mapping, which must grow up (`PROT_GROWSUP`). On these
    /// architectures, no mapping grows up.
    GrowingEnd(VirtAddr),
}

impl ProtectFrom {
    /// The address in the call's arguments.
    fn address(self) -> VirtAddr {
        match self {
            Self::Address(at) | Self::GrowingStart(at) | Self::GrowingEnd(at) => at,
        }
    }
}

/// The permissions and the protection key that a call sets.
#[derive(Clone, Copy)]
struct NewProtection {
    protection: Protection,
    /// `None`: each mapping retains its key.
    key: Option<ProtectionKey>,
}

/// The ranges whose locked pages a call has made writable, in order. If there are more ranges than
/// fit, the last one covers the rest.
type Unlocked = ArrayVec<VirtRange, 16>;

/// The second part of an `mprotect` that has made locked pages writable: it maps these pages, so
/// that the first store needs no fault. In private mappings, the pages become exclusive. Each step
/// looks up the mappings again and skips those that are no longer locked, writable and private.
///
/// The value holds no lock and no reference. Dropping it ends the call; the new protection stays.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, Platform, ProtectFrom, Protection, Step};
///
/// /// `mprotect(2)`; another thread does the waiting.
/// fn protect<P: Platform>(
///     space: &AddressSpace<'_, P>, at: VirtAddr, size: u64, protection: Protection,
/// ) -> Result<(), Error> {
///     let mut pending = space.begin_mprotect(ProtectFrom::Address(at), size, protection, None);
///     let mut ready = None;
///     while let Step::Blocked(wait) = pending.step(space, ready.take())? {
///         // On another thread, or polled, in a kernel that needs this call.
///         ready = Some(wait.wait());
///     }
///     Ok(())
/// }
/// ```
///
/// # Context
/// Context: may sleep.
#[derive(Debug)]
#[must_use = "the result of the call is that of its last step"]
pub struct PendingProtect {
    result: Result<(), Error>,
    populate: Populate,
    /// The ranges that follow the range of `populate`.
    unlocked: Unlocked,
}

impl PendingProtect {
    /// Maps pages until all are mapped or a page has to be waited for, as [`Populate::step`].
    ///
    /// Complexity: linear in the number of mappings and of allocated folios.
    ///
    /// # Errors
    /// The errors of [`AddressSpace::mprotect_from`], from the last step: the part before the error
    /// is changed, and its pages are mapped. A page that cannot be mapped is no error, as on Linux.
    pub fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        mut ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        loop {
            if let Step::Blocked(wait) = self.populate.step(space, ready.take())? {
                return Ok(Step::Blocked(wait));
            }
            let Some(range) = self.unlocked.pop_at(0) else {
                return self.result.map(|()| Step::Done);
            };
            self.populate = Populate::of_locked(range);
        }
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Sets the permissions of `length` bytes (rounded up to pages) at `start` to `protection`.
    ///
    /// Context: may sleep. Complexity: linear in the number of runs in the range. One invalidation
    /// per 64 tables, or none if no permission is removed.
    ///
    /// # Errors
    /// [`Error::Unaligned`] and [`Error::OutOfRange`] change nothing. As on Linux, if a part of the
    /// range is not mapped ([`Error::NotMapped`]), does not allow the protection
    /// ([`Error::AccessDenied`]), is sealed ([`Error::Sealed`]), would exceed a limit
    /// ([`Error::LimitReached`], [`Error::Overcommitted`]) or cannot be split
    /// ([`Error::TooManyMappings`], [`Error::OutOfMemory`]), the part before it is changed.
    pub fn mprotect(
        &self,
        start: VirtAddr,
        length: u64,
        protection: Protection,
    ) -> Result<(), Error> {
        self.mprotect_from(ProtectFrom::Address(start), length, protection)
    }

    /// As [`AddressSpace::mprotect`], with a choice of the start of the change.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::mprotect`]; also [`Error::Invalid`] if the mapping does not grow down.
    pub fn mprotect_from(
        &self,
        from: ProtectFrom,
        length: u64,
        protection: Protection,
    ) -> Result<(), Error> {
        protect_and_populate(self, from, length, NewProtection { protection, key: None })
    }

    /// As [`AddressSpace::mprotect_from`], and also sets the mappings' protection key
    /// (`pkey_mprotect(2)`). The other calls leave the key unchanged.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mprotect_from`]. A change of the key
    /// always causes an invalidation.
    ///
    /// # Errors
    /// As [`AddressSpace::mprotect_from`]; also [`Error::Invalid`], with nothing changed, if the
    /// key is not allocated ([`AddressSpace::pkey_alloc`]).
    pub fn pkey_mprotect(
        &self,
        from: ProtectFrom,
        length: u64,
        protection: Protection,
        key: ProtectionKey,
    ) -> Result<(), Error> {
        protect_and_populate(self, from, length, NewProtection { protection, key: Some(key) })
    }

    /// As [`AddressSpace::mprotect_from`], or with a key as [`AddressSpace::pkey_mprotect`], for a
    /// caller that must not wait for a pager, a device or a handler. The call sets the protection;
    /// the steps of the result map pages.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mprotect_from`].
    ///
    /// # Errors
    /// None here: the last step returns those of the call ([`PendingProtect::step`]).
    pub fn begin_mprotect(
        &self,
        from: ProtectFrom,
        length: u64,
        protection: Protection,
        key: Option<ProtectionKey>,
    ) -> PendingProtect {
        let mut unlocked = Unlocked::new();
        let new = NewProtection { protection, key };
        let result = protect_with(self, (from, length), new, &mut unlocked);
        PendingProtect { result, populate: Populate::default(), unlocked }
    }

    /// Whether this machine can check that programs' branches end at landing pads
    /// ([`Protection::BTI`]).
    ///
    /// Context: any.
    #[inline]
    pub fn branch_target_identification(&self) -> bool {
        P::Arch::BTI && self.platform().branch_target_identification()
    }
}

/// Protects the range, then maps the pages that have to be populated.
fn protect_and_populate<P: Platform>(
    space: &AddressSpace<'_, P>,
    from: ProtectFrom,
    length: u64,
    new: NewProtection,
) -> Result<(), Error> {
    let mut unlocked = ArrayVec::new();
    let result = protect_with(space, (from, length), new, &mut unlocked);
    for range in unlocked {
        // The protection has changed, so the call succeeds even if the population fails, as on
        // Linux.
        let _ = Populate::of_locked(range).finish(space);
    }
    result
}

/// Protects the range. Adds to `unlocked` as [`protect`] does.
fn protect_with<P: Platform>(
    space: &AddressSpace<'_, P>,
    (from, length): (ProtectFrom, u64),
    new: NewProtection,
    unlocked: &mut Unlocked,
) -> Result<(), Error> {
    let range = page_range::<P::Arch>(from.address(), length)?;
    if range.is_empty() {
        return Ok(());
    }
    let new = NewProtection { protection: heeded(space, new.protection), ..new };
    // A second attempt finds that the part before the error has already changed, and skips it.
    space.operate_with_reclaim(|op| {
        let allowed = new.key.is_none_or(|key| space.keys.has(key));
        let range = if allowed { start_of(*op.vmas, range, from) } else { Err(Error::Invalid) };
        protect(op, range?, new, unlocked)
    })
}

/// `protection` without the bits that this machine ignores.
#[inline]
pub(in crate::space) fn heeded<P: Platform>(
    space: &AddressSpace<'_, P>,
    protection: Protection,
) -> Protection {
    if space.branch_target_identification() { protection } else { protection - Protection::BTI }
}

/// The range of a call, whose start depends on `from`.
fn start_of<P: Platform>(
    vmas: VmaView<'_, P>,
    range: VirtRange,
    from: ProtectFrom,
) -> Result<VirtRange, Error> {
    match from {
        ProtectFrom::Address(_) => Ok(range),
        ProtectFrom::GrowingStart(start) => {
            let vma = vmas.first_in(range).ok_or(Error::NotMapped(start))?;
            if !vma.has(MappingFlags::GROWS_DOWN) {
                return Err(Error::Invalid);
            }
            Ok(VirtRange::raw(vma.start(), range.end().0))
        }
        ProtectFrom::GrowingEnd(start) => {
            vmas.at(start).ok_or(Error::NotMapped(start))?;
            Err(Error::Invalid)
        }
    }
}

/// Protects the VMAs of `range`. Adds to `unlocked` the parts whose locked pages have become
/// writable and therefore have to be populated.
fn protect<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    new: NewProtection,
    unlocked: &mut Unlocked,
) -> Result<(), Failure> {
    let NewProtection { protection, key } = new;
    let mut at = range.start();
    while at < range.end() {
        let vma = op.vmas.at(at).ok_or(Error::NotMapped(at))?;
        let part = vma.range().intersection(range);
        at = part.end();
        let wanted = MappingFlags::of(protection);
        let possible = MappingFlags::from_bits_truncate(
            (vma.flags() & MappingFlags::MAY_ALL).bits()
                >> MappingFlags::MAY_READ.bits().trailing_zeros(),
        );
        if !possible.contains(wanted & MappingFlags::PROTECTION) {
            return Err(Error::AccessDenied.into());
        }
        op.space.settings.refuse_exec_gain(vma.flags(), wanted)?;
        if vma.has(MappingFlags::SEALED) {
            return Err(Error::Sealed(part.start()).into());
        }
        let before = vma.flags();
        let key = key.unwrap_or(before.key());
        let mut flags = before.with_protection(protection).with_key(key);
        if flags == before {
            continue;
        }
        let mut committed = 0;
        if flags.contains(MappingFlags::WRITE) {
            let account = op.vmas.account();
            if account.may_expand(flags, part.pages()).is_err()
                && account.may_expand(before, part.pages()).is_ok()
            {
                return Err(Error::LimitReached.into());
            }
            if flags.is_accountable() && !flags.contains(MappingFlags::ACCOUNT) {
                committed = part.pages();
                flags |= MappingFlags::ACCOUNT;
            }
        } else if vma.is_anonymous() && vma.group_pointer().is_none() {
            // The mapping has no written pages and will get none.
            flags -= MappingFlags::ACCOUNT;
        }
        op.vmas.commit(committed)?;
        let Op { vmas, edit, .. } = op;
        vmas.with_flags(vma, part, flags, |vma| edit.protect(part, &entry_policy(vma)))?;
        let locked = before & (MappingFlags::WRITE | MappingFlags::SHARED | LOCKS);
        if locked == MappingFlags::LOCKED && flags.contains(MappingFlags::WRITE) {
            // The pages are populated after the operation. Their anon group must already exist,
            // because it determines which VMAs merge.
            if let Some(vma) = op.vmas.at(part.start()) {
                let _ = op.vmas.prepare_group(vma);
            }
            // If the parts exceed the capacity of `unlocked`, the last range covers the remaining
            // parts.
            let start = if unlocked.is_full() {
                unlocked.pop().map_or(part.start(), |last: VirtRange| last.start())
            } else {
                part.start()
            };
            unlocked.push(VirtRange::raw(start.0, part.end().0));
        }
    }
    Ok(())
}
