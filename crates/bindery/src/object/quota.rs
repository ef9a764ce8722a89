//! [`Quota`]: the page limit of a file system in memory.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::Error;

/// A limit for the total number of pages of a set of shared-memory objects: the size of a file
/// system in memory (Linux: the option `size=` of a tmpfs).
///
/// An object created by [`crate::Memory::shared_memory_within`] charges its commitments
/// ([`crate::Accounting`]) to the quota and uncharges them when they are released. A charge that
/// does not fit is refused with [`Error::NoSpace`]; a fault that would need it is refused with
/// [`crate::FaultError::Bus`].
///
/// ```
/// use bindery::{Accounting, Error, Memory, Object, Platform, Quota, Sealing};
///
/// /// A file of a file system in memory.
/// fn file<'m, P: Platform>(
///     memory: &'m Memory<P>,
///     room: &'m Quota,
/// ) -> Result<Object<'m, P>, Error> {
///     memory.shared_memory_within(room, 0, Sealing::Forbidden, Accounting::PerPage)
/// }
/// assert_eq!(Quota::new(1024).used(), 0);
/// ```
///
/// # Context
/// Context: any.
#[derive(Debug)]
pub struct Quota {
    limit: AtomicU64,
    used: AtomicU64,
}

impl Quota {
    /// A quota of `limit` pages; `u64::MAX` means no limit.
    #[must_use]
    pub const fn new(limit: u64) -> Self {
        Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0) }
    }

    /// The maximum number of pages of the quota's objects.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Sets the limit. A limit below [`Quota::used`] removes no pages, but allows no addition.
    pub fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Relaxed);
    }

    /// The number of pages of the quota's objects.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Adds `pages` to the usage, if they fit.
    pub(super) fn charge(&self, pages: u64) -> Result<(), Error> {
        // A single exchange, because an addition that is undone later could cause the refusal of a
        // smaller request on another CPU in between.
        let fits = |used: u64| used.checked_add(pages).filter(|after| *after <= self.limit());
        match self.used.fetch_update(Relaxed, Relaxed, fits) {
            Ok(_) => Ok(()),
            // A request for no pages succeeds, whatever the usage.
            Err(_) if pages == 0 => Ok(()),
            Err(_) => Err(Error::NoSpace),
        }
    }

    /// Subtracts `pages` that were added to the usage.
    pub(super) fn uncharge(&self, pages: u64) {
        self.used.fetch_sub(pages, Relaxed);
    }
}
