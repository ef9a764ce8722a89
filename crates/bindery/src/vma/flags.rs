//! The permissions and flags of a mapping.

use bitflags::bitflags;

use crate::arch::{Permissions, ProtectionKey};
use crate::memory::HugeAdvice;

bitflags! {
    /// The permissions of a mapping (`PROT_READ`, `PROT_WRITE`, `PROT_EXEC`; an empty set means
    /// `PROT_NONE`).
    ///
    /// ```
    /// use bindery::Protection;
    ///
    /// let text = Protection::READ | Protection::EXECUTE;
    /// assert!(!text.contains(Protection::WRITE));
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Protection: u8 {
        /// Loads.
        const READ = 1 << 0;
        /// Stores. Implies loads, as no page-table format separates the two.
        const WRITE = 1 << 1;
        /// Instruction fetches.
        const EXECUTE = 1 << 2;
        /// Indirect branches into the mapping must land on a landing pad (`PROT_BTI` of AArch64).
        /// Ignored on machines without this check ([`Platform::branch_target_identification`]).
        const BTI = 1 << 4;
    }
}

impl Protection {
    /// The permissions of page-table entries with this protection.
    #[inline]
    pub(crate) fn permissions(self) -> Permissions {
        let mut permissions = Permissions::empty();
        permissions.set(Permissions::READ, self.intersects(Self::READ | Self::WRITE));
        permissions.set(Permissions::WRITE, self.contains(Self::WRITE));
        permissions.set(Permissions::EXECUTE, self.contains(Self::EXECUTE));
        permissions.set(Permissions::BTI, self.contains(Self::BTI));
        permissions
    }

    /// Whether no access is allowed (`PROT_NONE`).
    #[inline]
    pub(crate) fn is_none(self) -> bool {
        !self.intersects(Self::READ | Self::WRITE | Self::EXECUTE)
    }
}

bitflags! {
    /// The flags of a whole mapping (Linux: `vm_flags`, the letters of `VmFlags` in
    /// `/proc/self/smaps`).
    ///
    /// # Context
    /// Context: any.
    ///
    /// ```
    /// use bindery::MappingFlags;
    ///
    /// /// The first column of `/proc/PID/maps`.
    /// fn is_stack(flags: MappingFlags) -> bool {
    ///     flags.contains(MappingFlags::GROWS_DOWN)
    /// }
    /// assert!(is_stack(MappingFlags::READ | MappingFlags::GROWS_DOWN));
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct MappingFlags: u64 {
        /// Loads are allowed (`rd`).
        const READ = 1 << 0;
        /// Stores are allowed (`wr`).
        const WRITE = 1 << 1;
        /// Instruction fetches are allowed (`ex`).
        const EXECUTE = 1 << 2;
        /// Writes are visible in all mappings of the same object (`MAP_SHARED`, `ms`).
        const SHARED = 1 << 3;
        /// Indirect branches into the mapping must land on a landing pad (`PROT_BTI`, `bt`).
        const BTI = 1 << 4;
        /// `mprotect` may allow loads (`mr`).
        const MAY_READ = 1 << 5;
        /// `mprotect` may allow stores (`mw`).
        const MAY_WRITE = 1 << 6;
        /// `mprotect` may allow fetches (`me`).
        const MAY_EXECUTE = 1 << 7;
        /// An access just below the mapping extends it (`MAP_GROWSDOWN`, `gd`).
        const GROWS_DOWN = 1 << 8;
        /// The mapping's pages stay in memory (`mlock`, `lo`).
        const LOCKED = 1 << 9;
        /// Locked, but pages are populated by their first access (`MLOCK_ONFAULT`).
        const LOCK_ON_FAULT = 1 << 10;
        /// Not counted as committed (`MAP_NORESERVE`, `nr`).
        const NO_RESERVE = 1 << 11;
        /// Counted as committed (`ac`).
        const ACCOUNT = 1 << 12;
        /// Children do not inherit the mapping (`MADV_DONTFORK`, `dc`).
        const DONT_FORK = 1 << 13;
        /// Children inherit the mapping without its contents (`MADV_WIPEONFORK`, `wf`).
        const WIPE_ON_FORK = 1 << 14;
        /// The program prefers large folios (`MADV_HUGEPAGE`, `hg`).
        const HUGE = 1 << 15;
        /// The program refuses large folios (`MADV_NOHUGEPAGE`, `nh`).
        const NO_HUGE = 1 << 16;
        /// The mapping cannot be changed or unmapped (`mseal`, `sl`).
        const SEALED = 1 << 17;
        /// Pages are used in order (`MADV_SEQUENTIAL`, `sr`).
        const SEQUENTIAL = 1 << 18;
        /// Pages are used in no order (`MADV_RANDOM`, `rr`).
        const RANDOM = 1 << 19;
        /// Excluded from core dumps (`MADV_DONTDUMP`, `dd`).
        const DONT_DUMP = 1 << 20;
        /// All pages count as written since the soft-dirty bits were last cleared (`sd`).
        const SOFT_DIRTY = 1 << 21;
        /// Reclaim may drop the pages without saving them (`MAP_DROPPABLE`, `dp`).
        const DROPPABLE = 1 << 22;
        /// The mapping may have guard pages (`MADV_GUARD_INSTALL`, `gu`).
        const MAYBE_GUARDS = 1 << 23;
        /// `mincore` reports all pages as resident, because the process does not own the file
        /// ([`crate::FileAccess::OWNER`]).
        const HIDES_RESIDENCE = 1 << 32;
        /// Pages with equal contents may be merged (`MADV_MERGEABLE`, `mg`).
        const MERGEABLE = 1 << 33;
        /// The contents were freed because the process is about to exit. Accesses fail
        /// ([`crate::AddressSpace::reap`]).
        const REAPED = 1 << 26;
        /// Only the program itself can access the pages ([`crate::Memory::secret_memory`]).
        const SECRET = 1 << 34;
        /// The mapping's pages are frames outside the core's management ([`crate::FrameSource`]),
        /// so its leaves have no folio (`VM_PFNMAP` and `VM_IO`: `pf`, `io`).
        const FRAMES = 1 << 35;
        /// The mapping never grows, does not merge, and ignores locks (`VM_DONTEXPAND`: `de`).
        /// Every mapping with [`MappingFlags::FRAMES`] has this flag.
        const DONT_EXPAND = 1 << 36;
        /// A userfaultfd serves missing pages (`um`).
        const USERFAULT_MISSING = 1 << 24;
        /// A userfaultfd serves writes to pages that it has write-protected (`uw`).
        const USERFAULT_WRITE_PROTECT = 1 << 25;
        /// A userfaultfd serves pages of the object that are not mapped (`ui`).
        const USERFAULT_MINOR = 1 << 27;
        /// The number of the protection key ([`MappingFlags::key`]).
        const KEY = 0xf << Self::KEY_SHIFT;
    }
}

impl MappingFlags {
    /// `mprotect` may allow all three kinds of access.
    pub const MAY_ALL: Self = Self::MAY_READ.union(Self::MAY_WRITE).union(Self::MAY_EXECUTE);
    /// The access bits of [`Protection`].
    pub const PROTECTION: Self = Self::READ.union(Self::WRITE).union(Self::EXECUTE);
    /// All bits of [`Protection`].
    const OF_PROTECTION: Self = Self::PROTECTION.union(Self::BTI);

    /// A userfaultfd serves some kind of fault.
    pub(crate) const USERFAULT: Self =
        Self::USERFAULT_MISSING.union(Self::USERFAULT_WRITE_PROTECT).union(Self::USERFAULT_MINOR);

    const KEY_SHIFT: u32 = 28;

    /// The program's advice on large folios.
    #[inline(always)]
    pub(crate) fn huge_advice(self) -> HugeAdvice {
        if self.contains(Self::NO_HUGE) {
            HugeAdvice::Avoid
        } else if self.contains(Self::HUGE) {
            HugeAdvice::Use
        } else {
            HugeAdvice::None
        }
    }

    /// Flags in which mappings may differ and still merge. The merged mapping has the flags of
    /// both.
    pub(crate) const STICKY: Self = Self::SOFT_DIRTY.union(Self::MAYBE_GUARDS);

    /// The flags for `protection`.
    pub(crate) fn of(protection: Protection) -> Self {
        Self::from_bits_truncate(u64::from(protection.bits()))
    }

    /// The same flags with another protection.
    #[inline]
    pub(crate) fn with_protection(self, protection: Protection) -> Self {
        (self - Self::OF_PROTECTION) | Self::of(protection)
    }

    /// The permissions.
    pub fn protection(self) -> Protection {
        Protection::from_bits_truncate((self & Self::OF_PROTECTION).bits() as u8)
    }

    /// The protection key of its pages (`pkeys(7)`).
    #[inline]
    pub const fn key(self) -> ProtectionKey {
        ProtectionKey::truncated((self.bits() & Self::KEY.bits()) >> Self::KEY_SHIFT)
    }

    /// The same flags with another protection key.
    pub(crate) const fn with_key(self, key: ProtectionKey) -> Self {
        let others = self.bits() & !Self::KEY.bits();
        Self::from_bits_truncate(others | (key.number() as u64) << Self::KEY_SHIFT)
    }

    /// Whether the mapping counts as committed memory (Linux: `accountable_mapping`).
    pub(crate) fn is_accountable(self) -> bool {
        self & (Self::NO_RESERVE | Self::SHARED | Self::WRITE) == Self::WRITE
    }

    /// Whether the pages count as this process' data: private and writable.
    pub(crate) fn is_data(self) -> bool {
        self & (Self::WRITE | Self::SHARED | Self::GROWS_DOWN) == Self::WRITE
    }
}
