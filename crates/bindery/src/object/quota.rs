//! [`Quota`]: how many pages a file system in memory may have.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::Error;

/// The number of pages that a set of shared-memory objects may have together: the size of a file
/// system in memory (Linux: the option `size=` of a tmpfs).
///
/// An object made by [`crate::Memory::shared_memory_within`] takes from it what the object commits
/// ([`crate::Accounting`]), and returns it when that is freed. What does not fit is refused with
/// [`Error::NoSpace`]; a fault that would need it is refused with [`crate::FaultError::Bus`].
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
    /// A quota of `limit` pages; `u64::MAX` is no limit.
    #[must_use]
    pub const fn new(limit: u64) -> Self {
        Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0) }
    }

    /// The most pages that its objects may have.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Sets the limit. A limit below [`Quota::used`] removes nothing, and allows no addition.
    pub fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Relaxed);
    }

    /// The pages that its objects have.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Takes `pages` if they fit.
    pub(super) fn take(&self, pages: u64) -> Result<(), Error> {
        // One exchange, and not an addition that is taken back: that would refuse a smaller request
        // of another CPU in between.
        let fits = |used: u64| used.checked_add(pages).filter(|after| *after <= self.limit());
        match self.used.fetch_update(Relaxed, Relaxed, fits) {
            Ok(_) => Ok(()),
            // A request for nothing succeeds, however much is used already.
            Err(_) if pages == 0 => Ok(()),
            Err(_) => Err(Error::NoSpace),
        }
    }

    /// Gives back `pages` that were taken.
    pub(super) fn give_back(&self, pages: u64) {
        self.used.fetch_sub(pages, Relaxed);
    }
}
