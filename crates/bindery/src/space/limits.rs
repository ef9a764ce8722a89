//! The limits of an address space, and its usage.

use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::platform::Platform;

use super::vma::MappingFlags;
use super::{AddressSpace, MmapLocked};

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
    /// Private writable mappings, and the heap (`RLIMIT_DATA`); 0 forbids a heap and nothing else.
    pub data: u64,
    /// Locked memory (`RLIMIT_MEMLOCK`).
    pub locked: u64,
    /// Pinned memory, each page counted once for each pin (`RLIMIT_MEMLOCK`, which Linux compares
    /// with locked and pinned memory apart).
    pub pinned: u64,
    /// The maximum size of a mapping that grows down (`RLIMIT_STACK`).
    pub stack: u64,
    /// Whether the limits of locked and pinned memory count for this process.
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
    /// Up to its limit.
    #[default]
    Limited,
    /// Without limit.
    Privileged,
}

impl Default for Limits {
    /// No limits but those that Linux begins with: 8 MiB of locked memory, and of pinned, 8 MiB of
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

/// The accounts and limits, readable at any time; usage changes with the mutex held.
pub(super) struct Account {
    total: AtomicI64,
    pub(super) peak: AtomicI64,
    /// The most resident pages that were noted; see `note_resident`.
    pub(super) resident_peak: AtomicI64,
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

impl Account {
    pub(super) fn new(limits: &Limits) -> Self {
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
        account.set_limits(limits);
        account
    }

    fn set_limits(&self, limits: &Limits) {
        self.address_space_limit.store(limits.address_space, Ordering::Relaxed);
        self.data_limit.store(limits.data, Ordering::Relaxed);
        self.locked_limit.store(limits.locked, Ordering::Relaxed);
        self.pinned_limit.store(limits.pinned, Ordering::Relaxed);
        self.stack_limit.store(limits.stack, Ordering::Relaxed);
        self.privileged.store(limits.locking == Locking::Privileged, Ordering::Relaxed);
    }

    fn limits(&self) -> Limits {
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
}

fn add(counter: &AtomicI64, pages: i64) {
    // One writer at a time: the mutex is held.
    counter.store(counter.load(Ordering::Relaxed) + pages, Ordering::Relaxed);
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Sets the limits. Existing mappings stay.
    ///
    /// Context: any.
    pub fn set_limits(&self, limits: &Limits) {
        self.account.set_limits(limits);
    }

    /// The current limits.
    ///
    /// Context: any.
    pub fn limits(&self) -> Limits {
        self.account.limits()
    }

    /// Notes how many pages are resident. Called before a call takes pages away, so that mapping
    /// them need not. (Others who take pages away, by a truncation, do not note it.)
    #[inline]
    pub(crate) fn note_resident(&self) {
        let pages = self.page_table.stats.mapped_pages();
        if pages > self.account.resident_peak.load(Ordering::Relaxed) {
            self.account.resident_peak.fetch_max(pages, Ordering::Relaxed);
        }
    }

    /// The usage of the address space.
    ///
    /// Context: any.
    pub fn usage(&self) -> Usage {
        let read = |counter: &AtomicI64| counter.load(Ordering::Relaxed).max(0) as u64;
        Usage {
            total: read(&self.account.total),
            data: read(&self.account.data),
            stack: read(&self.account.stack),
            locked: read(&self.account.locked),
            committed: read(&self.account.committed),
            pinned: self.pinned_pages(),
        }
    }

    /// `pages` more (or fewer) of a mapping with these flags.
    pub(super) fn account(&self, _mm: &MmapLocked, flags: MappingFlags, pages: i64) {
        add(&self.account.total, pages);
        let total = self.account.total.load(Ordering::Relaxed);
        if total > self.account.peak.load(Ordering::Relaxed) {
            self.account.peak.store(total, Ordering::Relaxed);
        }
        if flags.is_data() {
            add(&self.account.data, pages);
        }
        if flags.contains(MappingFlags::GROWS_DOWN) {
            add(&self.account.stack, pages);
        }
        if flags.contains(MappingFlags::LOCKED) {
            add(&self.account.locked, pages);
        }
        if flags.contains(MappingFlags::ACCOUNT) {
            add(&self.account.committed, pages);
            self.page_table.memory.commitment().add(pages);
        }
    }

    /// Refuses where `pages` more with these flags are more than the process may have (Linux:
    /// `may_expand_vm`).
    pub(super) fn may_expand(&self, flags: MappingFlags, pages: u64) -> Result<(), Error> {
        let (usage, limits) = (self.usage(), self.limits());
        let exceeds = |used: u64, limit: u64| used.saturating_add(pages) > limit >> PAGE_SHIFT;
        // As Linux: a limit of zero means no limit: programs that use no heap set it.
        let limits_data = flags.is_data() && limits.data > 0;
        if exceeds(usage.total, limits.address_space)
            || limits_data && exceeds(usage.data, limits.data)
        {
            return Err(Error::LimitReached);
        }
        Ok(())
    }

    /// Refuses where `pages` more locked pages are more than the process may have.
    pub(super) fn may_lock(&self, pages: u64) -> Result<(), Error> {
        let limits = self.limits();
        let after = self.usage().locked.saturating_add(pages);
        if limits.locking == Locking::Limited && after > limits.locked / PAGE_SIZE {
            return Err(Error::LockLimit);
        }
        Ok(())
    }
}
