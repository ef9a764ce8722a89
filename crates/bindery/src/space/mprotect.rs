//! `mprotect(2)`.

use arrayvec::ArrayVec;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, ProtectionKey};
use crate::error::{Error, Failure, NoMemory};
use crate::platform::Platform;
use crate::table::protect::{EntryPolicy, Watched, Writable};
use crate::tlb::Gather;

use super::change::Removed;
use super::mlock::LOCKS;
use super::vma::{MappingFlags, Protection, Vma};
use super::{AddressSpace, MmapLocked};

/// The start of a change of protection.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, Platform, ProtectFrom, Protection};
///
/// /// Makes a stack executable, all of it, from any address in it.
/// fn executable<P: Platform>(space: &AddressSpace<'_, P>, stack: VirtAddr) -> Result<(), Error> {
///     let all = Protection::READ | Protection::WRITE | Protection::EXECUTE;
///     space.mprotect_from(stack, 4096, all, ProtectFrom::GrowingStart)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ProtectFrom {
    /// The given address.
    #[default]
    Address,
    /// The start of the mapping around it, which must grow down (`PROT_GROWSDOWN`).
    GrowingStart,
    /// The given address, up to the end of the mapping, which must grow up (`PROT_GROWSUP`); none
    /// does on these architectures.
    GrowingEnd,
}

/// One call, as it goes down.
struct ProtectCall<'a> {
    protection: Protection,
    key: Option<ProtectionKey>,
    gather: &'a mut Gather,
    removed: &'a mut Removed,
}

impl Vma {
    /// The permissions and write policy for entries of this mapping.
    pub(super) fn entry_policy(&self) -> EntryPolicy {
        let writable = match self.object() {
            _ if !self.is_shared() => Writable::Exclusive,
            Some(object) if object.notices_writes() => Writable::Noticed,
            _ => Writable::All,
        };
        let soft_dirty = self.has(MappingFlags::SOFT_DIRTY);
        EntryPolicy {
            permissions: self.protection().permissions(),
            key: self.flags().key(),
            writable,
            watched: if soft_dirty { Watched::No } else { Watched::SoftDirty },
        }
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Sets the permissions of `length` bytes (rounded up to pages) at `start` to `protection`.
    ///
    /// Context: may sleep. Complexity: in the runs of the range. One invalidation for each 64
    /// tables, none if the range only allows more than before.
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
        self.mprotect_from(start, length, protection, ProtectFrom::Address)
    }

    /// As [`AddressSpace::mprotect`], with the start of the change.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As there; [`Error::Invalid`] if the mapping does not grow down.
    pub fn mprotect_from(
        &self,
        start: VirtAddr,
        length: u64,
        protection: Protection,
        from: ProtectFrom,
    ) -> Result<(), Error> {
        self.protect_with(start, length, protection, from, None)
    }

    /// As [`AddressSpace::mprotect_from`], and gives the mappings a protection key
    /// (`pkey_mprotect(2)`). The other calls leave mappings the key that they have.
    ///
    /// Context: may sleep. Complexity: as there. A change of the key is always invalidated.
    ///
    /// # Errors
    /// As there; [`Error::Invalid`], with nothing changed, if the key is not allocated
    /// ([`AddressSpace::pkey_alloc`]).
    pub fn pkey_mprotect(
        &self,
        start: VirtAddr,
        length: u64,
        protection: Protection,
        from: ProtectFrom,
        key: ProtectionKey,
    ) -> Result<(), Error> {
        self.protect_with(start, length, protection, from, Some(key))
    }

    /// Whether branches of programs can be checked for landing pads here ([`Protection::BTI`]).
    ///
    /// Context: any.
    #[inline]
    pub fn branch_target_identification(&self) -> bool {
        P::Arch::BTI && self.platform().branch_target_identification()
    }

    /// What of `protection` means something on this machine.
    #[inline]
    pub(super) fn heeded(&self, protection: Protection) -> Protection {
        if self.branch_target_identification() { protection } else { protection - Protection::BTI }
    }

    fn protect_with(
        &self,
        start: VirtAddr,
        length: u64,
        protection: Protection,
        from: ProtectFrom,
        key: Option<ProtectionKey>,
    ) -> Result<(), Error> {
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        if length == 0 {
            return Ok(());
        }
        let limit = self.limit();
        let range = length
            .checked_next_multiple_of(PAGE_SIZE)
            .and_then(|length| VirtRange::from_len(start, length))
            .filter(|range| !range.is_empty())
            .ok_or(Error::OutOfRange { limit })?;
        let protection = self.heeded(protection);
        let mut unlocked = ArrayVec::new();
        let result = self
            .page_table
            .memory
            .outermost(|| self.protect_once(range, from, protection, key, &mut unlocked));
        for range in unlocked {
            self.populate_writable(range);
        }
        result
    }

    /// What lies before an error is changed, and does not change again when it is done once more.
    fn protect_once(
        &self,
        range: VirtRange,
        from: ProtectFrom,
        protection: Protection,
        key: Option<ProtectionKey>,
        unlocked: &mut ArrayVec<VirtRange, 16>,
    ) -> Result<(), Failure> {
        self.transaction(|mm, gather, removed| {
            let allowed = key.is_none_or(|key| self.keys.has(key));
            let range =
                if allowed { self.protected_range(mm, range, from) } else { Err(Error::Invalid) };
            let mut call = ProtectCall { protection, key, gather, removed };
            self.protect_locked(mm, range?, &mut call, unlocked)
        })
    }

    /// Makes the locked mappings in `range` that may be written now have pages of their own, so
    /// that the first store needs no fault.
    fn populate_writable(&self, range: VirtRange) {
        let mut at = range.start();
        while at < range.end() {
            let part = {
                let mm = self.mmap_lock.lock();
                let wanted = MappingFlags::LOCKED | MappingFlags::WRITE;
                let found = self
                    .vmas_in(&mm, VirtRange::raw(at.0, range.end().0))
                    .find(|vma| vma.has(wanted) && !vma.is_shared());
                let Some(vma) = found else { return };
                vma.range().intersection(VirtRange::raw(at.0, range.end().0))
            };
            // As Linux: the call has succeeded, whether the pages can be had or not.
            let _ = self.populate(part);
            at = part.end();
        }
    }

    fn protected_range(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        from: ProtectFrom,
    ) -> Result<VirtRange, Error> {
        if from == ProtectFrom::Address {
            return Ok(range);
        }
        if from == ProtectFrom::GrowingEnd {
            self.vma_at(mm, range.start()).ok_or(Error::NotMapped(range.start()))?;
            return Err(Error::Invalid);
        }
        let vma =
            self.first_ending_after(mm, range.start().0).filter(|vma| vma.start() < range.end().0);
        let vma = vma.ok_or(Error::NotMapped(range.start()))?;
        if !vma.has(MappingFlags::GROWS_DOWN) {
            return Err(Error::Invalid);
        }
        Ok(VirtRange::raw(vma.start(), range.end().0))
    }

    fn protect_locked(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        call: &mut ProtectCall<'_>,
        unlocked: &mut ArrayVec<VirtRange, 16>,
    ) -> Result<(), Failure> {
        let ProtectCall { protection, key, gather, removed } = call;
        let mut at = range.start();
        while at < range.end() {
            let vma = self.vma_at(mm, at).ok_or(Error::NotMapped(at))?;
            let part = vma.range().intersection(range);
            at = part.end();
            let wanted = MappingFlags::of(*protection);
            let possible = MappingFlags::from_bits_truncate(
                (vma.flags() & MappingFlags::MAY_ALL).bits()
                    >> MappingFlags::MAY_READ.bits().trailing_zeros(),
            );
            if !possible.contains(wanted & MappingFlags::PROTECTION) {
                return Err(Error::AccessDenied.into());
            }
            self.refuse_exec_gain(vma.flags(), wanted)?;
            if vma.has(MappingFlags::SEALED) {
                return Err(Error::Sealed(part.start()).into());
            }
            let before = vma.flags();
            let key = key.unwrap_or(before.key());
            let mut flags = before.with_protection(*protection).with_key(key);
            if flags == before {
                continue;
            }
            let mut committed = 0;
            if flags.contains(MappingFlags::WRITE) {
                if self.may_expand(flags, part.pages()).is_err()
                    && self.may_expand(before, part.pages()).is_ok()
                {
                    return Err(Error::LimitReached.into());
                }
                if flags.is_accountable() && !flags.contains(MappingFlags::ACCOUNT) {
                    committed = part.pages();
                    flags |= MappingFlags::ACCOUNT;
                }
            } else if vma.is_anonymous() && vma.group_pointer().is_none() {
                // Nothing was written, and nothing will be.
                flags -= MappingFlags::ACCOUNT;
            }
            let _reservation = self.page_table.memory.commitment().reserve(committed)?;
            self.with_flags(mm, vma, part, flags, removed, |vma| {
                self.page_table.protect(part, &vma.entry_policy(), gather)
            })?;
            let locked = before & (MappingFlags::WRITE | MappingFlags::SHARED | LOCKS);
            if locked == MappingFlags::LOCKED && flags.contains(MappingFlags::WRITE) {
                // The pages come when the call is over, but whose they are is settled now: it
                // decides what is joined with what.
                if let Some(vma) = self.vma_at(mm, part.start()) {
                    let _ = self.prepare_group_locked(mm, vma);
                }
                // Where there are too many to remember, what lies between them is looked at too.
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

    /// Cuts `part` out of `vma`, gives it `flags`, does `work` with its lock held for writing, and
    /// joins it with its neighbors again. Nothing has changed where it cannot be cut.
    pub(super) fn with_flags(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        part: VirtRange,
        flags: MappingFlags,
        removed: &mut Removed,
        work: impl FnOnce(&Vma) -> Result<(), NoMemory>,
    ) -> Result<(), Failure> {
        let mut vma = vma;
        if vma.start() < part.start().0 {
            self.room_for(1)?;
            vma = self.split(mm, vma, part.start())?;
        }
        if part.end().0 < vma.end() {
            let cut = self.room_for(1).map_err(Failure::from);
            let cut = cut.and_then(|()| Ok(self.split(mm, vma, part.end())?));
            if let Err(failure) = cut {
                // Nothing has changed here: what was cut off below belongs to it again.
                self.merge_around(mm, vma, removed);
                return Err(failure);
            }
        }
        let locked = vma.lock_write(self.platform());
        self.change_flags(mm, &locked, flags);
        let done = work(&locked);
        drop(locked);
        self.merge_around(mm, vma, removed);
        Ok(done?)
    }
}
