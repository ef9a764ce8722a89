//! The limits of an address space and its usage.

use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::vma::MappingFlags;

/// The limits of a process (`getrlimit(2)`), in bytes; `u64::MAX` means no limit.
///
/// ```
/// use bindery::{AddressSpace, Limits, Platform};
///
/// fn limit<P: Platform>(space: &AddressSpace<'_, P>) {
///     space.set_limits(&Limits { address_space: 1 << 30, ..space.limits() });
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// All mappings together (`RLIMIT_AS`).
    pub address_space: u64,
    /// Private writable mappings, and the heap (`RLIMIT_DATA`); 0 forbids only a heap.
    pub data: u64,
    /// Locked memory (`RLIMIT_MEMLOCK`).
    pub locked: u64,
    /// Pinned memory, each page counted once for each pin (`RLIMIT_MEMLOCK`, which Linux compares
    /// separately with locked and with pinned memory).
    pub pinned: u64,
    /// The maximum size of a mapping that grows down (`RLIMIT_STACK`).
    pub stack: u64,
    /// Whether this process is subject to the limits of locked and pinned memory.
    pub locking: Locking,
}

/// Whether a process may lock and pin memory without limit (`CAP_IPC_LOCK`).
///
/// ```
/// use bindery::Locking;
///
/// // A process without CAP_IPC_LOCK.
/// assert_eq!(Locking::default(), Locking::Limited);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Locking {
    /// Up to the limit.
    #[default]
    Limited,
    /// Without limit.
    Privileged,
}

impl Default for Limits {
    /// Only Linux's initial limits: 8 MiB of locked memory, 8 MiB of pinned memory, and 8 MiB of
    /// stack.
    fn default() -> Self {
        Self {
            address_space: u64::MAX,
            data: u64::MAX,
            locked: 8 << 20,
            pinned: 8 << 20,
            stack: 8 << 20,
            locking: Locking::Limited,
        }
    }
}

/// The usage of an address space, in base pages.
///
/// ```
/// use bindery::{AddressSpace, Platform};
///
/// fn pages<P: Platform>(space: &AddressSpace<'_, P>) -> (u64, u64) {
///     (space.usage().total, space.usage().locked)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// All mappings together (`VmSize`).
    pub total: u64,
    /// Private writable mappings that do not grow down (`VmData` without the stack).
    pub data: u64,
    /// Mappings that grow down (`VmStk`).
    pub stack: u64,
    /// Mappings that are locked (`VmLck`).
    pub locked: u64,
    /// Mappings that count as committed.
    pub committed: u64,
    /// Pages that are pinned, each counted once for each pin (`VmPin`).
    pub pinned: u64,
}

/// The accounts and limits, readable at any time. Usage changes under the mutex and has its own
/// cache line.
#[repr(C, align(64))]
pub(crate) struct Account {
    total: AtomicI64,
    peak: AtomicI64,
    /// The recorded maximum of resident pages; see `note_resident`.
    resident_peak: AtomicI64,
    data: AtomicI64,
    stack: AtomicI64,
    locked: AtomicI64,
    committed: AtomicI64,
    address_space_limit: AtomicU64,
    data_limit: AtomicU64,
    locked_limit: AtomicU64,
    pinned_limit: AtomicU64,
    stack_limit: AtomicU64,
    privileged: AtomicBool,
}

impl Default for Account {
    fn default() -> Self {
        let account = Self {
            total: AtomicI64::new(0),
            peak: AtomicI64::new(0),
            resident_peak: AtomicI64::new(0),
            data: AtomicI64::new(0),
            stack: AtomicI64::new(0),
            locked: AtomicI64::new(0),
            committed: AtomicI64::new(0),
            address_space_limit: AtomicU64::new(0),
            data_limit: AtomicU64::new(0),
            locked_limit: AtomicU64::new(0),
            pinned_limit: AtomicU64::new(0),
            stack_limit: AtomicU64::new(0),
            privileged: AtomicBool::new(false),
        };
        account.set_limits(&Limits::default());
        account
    }
}

impl Account {
    /// The offset of the first byte after the usage.
    #[cfg(test)]
    pub(super) const USAGE_END: usize = core::mem::offset_of!(Self, address_space_limit);

    pub(crate) fn set_limits(&self, limits: &Limits) {
        self.address_space_limit.store(limits.address_space, Ordering::Relaxed);
        self.data_limit.store(limits.data, Ordering::Relaxed);
        self.locked_limit.store(limits.locked, Ordering::Relaxed);
        self.pinned_limit.store(limits.pinned, Ordering::Relaxed);
        self.stack_limit.store(limits.stack, Ordering::Relaxed);
        self.privileged.store(limits.locking == Locking::Privileged, Ordering::Relaxed);
    }

    pub(crate) fn limits(&self) -> Limits {
        let privileged = self.privileged.load(Ordering::Relaxed);
        Limits {
            address_space: self.address_space_limit.load(Ordering::Relaxed),
            data: self.data_limit.load(Ordering::Relaxed),
            locked: self.locked_limit.load(Ordering::Relaxed),
            pinned: self.pinned_limit.load(Ordering::Relaxed),
            stack: self.stack_limit.load(Ordering::Relaxed),
            locking: if privileged { Locking::Privileged } else { Locking::Limited },
        }
    }

    /// The usage. The account does not include pinned pages, so their number is zero.
    pub(crate) fn usage(&self) -> Usage {
        let read = |counter: &AtomicI64| counter.load(Ordering::Relaxed).max(0) as u64;
        Usage {
            total: read(&self.total),
            data: read(&self.data),
            stack: read(&self.stack),
            locked: read(&self.locked),
            committed: read(&self.committed),
            pinned: 0,
        }
    }

    /// Adds `pages` (or subtracts them) of a mapping with these flags. Returns whether they count
    /// as committed. The mutex is held.
    #[inline]
    pub(super) fn count(&self, flags: MappingFlags, pages: i64) -> bool {
        add(&self.total, pages);
        let total = self.total.load(Ordering::Relaxed);
        if total > self.peak.load(Ordering::Relaxed) {
            self.peak.store(total, Ordering::Relaxed);
        }
        if flags.is_data() {
            add(&self.data, pages);
        }
        if flags.contains(MappingFlags::GROWS_DOWN) {
            add(&self.stack, pages);
        }
        if flags.contains(MappingFlags::LOCKED) {
            add(&self.locked, pages);
        }
        let committed = flags.contains(MappingFlags::ACCOUNT);
        if committed {
            add(&self.committed, pages);
        }
        committed
    }

    /// Fails if `pages` more pages with these flags would exceed the limits (Linux:
    /// `may_expand_vm`).
    pub(crate) fn may_expand(&self, flags: MappingFlags, pages: u64) -> Result<(), Error> {
        let (usage, limits) = (self.usage(), self.limits());
        let exceeds = |used: u64, limit: u64| used.saturating_add(pages) > limit >> PAGE_SHIFT;
        // A data limit of zero means no limit, as on Linux: programs without a heap set it.
        let limits_data = flags.is_data() && limits.data > 0;
        if exceeds(usage.total, limits.address_space)
            || limits_data && exceeds(usage.data, limits.data)
        {
            return Err(Error::LimitReached);
        }
        Ok(())
    }

    /// Fails if `pages` more locked pages would exceed the limit.
    pub(crate) fn may_lock(&self, pages: u64) -> Result<(), Error> {
        let limits = self.limits();
        let after = self.usage().locked.saturating_add(pages);
        if limits.locking == Locking::Limited && after > limits.locked / PAGE_SIZE {
            return Err(Error::LockLimit);
        }
        Ok(())
    }

    /// Fails if the process may not lock any memory (Linux: `can_do_mlock`).
    pub(crate) fn may_lock_at_all(&self) -> Result<(), Error> {
        let limits = self.limits();
        if limits.locking == Locking::Limited && limits.locked == 0 {
            return Err(Error::LockForbidden);
        }
        Ok(())
    }

    /// Records the number of resident pages. Called before a call unmaps pages, so that the mapping
    /// of pages need not record it.
    #[inline]
    pub(crate) fn note_resident(&self, pages: i64) {
        if pages > self.resident_peak.load(Ordering::Relaxed) {
            self.resident_peak.fetch_max(pages, Ordering::Relaxed);
        }
    }

    /// The maximum of all mappings together, in pages (`VmPeak`).
    pub(crate) fn peak_total(&self) -> u64 {
        self.peak.load(Ordering::Relaxed).max(0) as u64
    }

    /// The maximum of [`Account::note_resident`].
    pub(crate) fn resident_peak(&self) -> u64 {
        self.resident_peak.load(Ordering::Relaxed).max(0) as u64
    }

    /// Resets the maximum of [`Account::note_resident`].
    pub(crate) fn reset_resident_peak(&self) {
        self.resident_peak.store(0, Ordering::Relaxed);
    }
}

fn add(counter: &AtomicI64, pages: i64) {
    // Only one writer at a time, because the mutex is held.
    counter.store(counter.load(Ordering::Relaxed) + pages, Ordering::Relaxed);
}
