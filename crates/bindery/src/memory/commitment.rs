//! [`Commitment`]: the committed memory of a machine, and the credit of its CPUs. [`Reservation`]:
//! the committed pages that one operation holds.

use core::fmt;

use super::Memory;
use crate::commit::{Credit, Credits, Overcommit};
use crate::error::Error;
use crate::platform::Platform;

/// The committed memory of a machine: private writable mappings and shared memory, in base pages.
///
/// ```
/// use bindery::{Memory, Overcommit, Platform};
///
/// fn never_overcommit<P: Platform>(memory: &Memory<P>) {
///     memory.commitment().set_limit(memory.total_frames() / 2);
///     memory.commitment().set_mode(Overcommit::Never);
/// }
/// ```
///
/// # Context
/// Context: any.
pub struct Commitment<'m, P: Platform> {
    memory: &'m Memory<P>,
}

impl<P: Platform> fmt::Debug for Commitment<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commitment")
            .field("committed", &self.committed())
            .field("limit", &self.limit())
            .field("mode", &self.mode())
            .finish_non_exhaustive()
    }
}

impl<P: Platform> Memory<P> {
    /// Commit accounting: the committed memory and the rules for refusals.
    ///
    /// Context: any.
    #[inline]
    pub fn commitment(&self) -> Commitment<'_, P> {
        Commitment { memory: self }
    }
}

impl<P: Platform> Commitment<'_, P> {
    /// Sets the mode.
    pub fn set_mode(&self, mode: Overcommit) {
        self.memory.commit.set_mode(mode);
    }

    /// The current mode.
    pub fn mode(&self) -> Overcommit {
        self.memory.commit.mode()
    }

    /// The maximum number of committed pages under [`Overcommit::Never`] (`CommitLimit`).
    pub fn limit(&self) -> u64 {
        self.memory.commit.limit()
    }

    /// Sets [`Commitment::limit`].
    pub fn set_limit(&self, pages: u64) {
        self.memory.commit.set_limit(pages);
    }

    /// Pages committed (`Committed_AS`). Exact when no call runs.
    ///
    /// Context: spins. Complexity: linear in the number of CPUs.
    pub fn committed(&self) -> u64 {
        self.memory.commit.committed(self)
    }

    /// Adds `slots` slots after swap areas were added or removed.
    pub(crate) fn swap_changed(&self, slots: i64) {
        self.memory.commit.swap_changed(slots);
    }

    /// Returns the credit of a CPU that is taken offline.
    pub(super) fn collect(&self, credit: &Credit) {
        self.memory.commit.collect(self, credit);
    }

    /// Commits `pages`, or returns them if negative.
    #[inline]
    pub(crate) fn add(&self, pages: i64) {
        self.memory.commit.add(self, pages);
    }
}

impl<P: Platform> Credits for Commitment<'_, P> {
    #[inline]
    fn own(&self) -> Option<&Credit> {
        Some(&self.memory.cpus.own(self.memory.platform())?.credit)
    }

    fn all(&self) -> impl Iterator<Item = &Credit> {
        self.memory.cpus.records().map(|record| &record.credit)
    }

    fn locked<R>(&self, exchange: impl FnOnce() -> R) -> R {
        let _lock = self.memory.credit_lock.lock();
        exchange()
    }
}

/// Committed pages that an operation holds and nothing uses: pages that it has reserved for a
/// mapping or an object, and pages that it has unmapped and may use again. So a page that moves
/// from one mapping to another within an operation is counted once at any time, and no other
/// process can commit it in between.
///
/// The pages that are left return when the value is dropped, on error paths too.
#[must_use = "dropping it returns the pages"]
pub(crate) struct Reservation<'m, P: Platform> {
    memory: &'m Memory<P>,
    pages: i64,
}

impl<'m, P: Platform> Reservation<'m, P> {
    /// A reservation of no pages.
    #[inline]
    pub(crate) fn new(memory: &'m Memory<P>) -> Self {
        Self { memory, pages: 0 }
    }

    /// Commits the pages that are missing until the reservation has `pages`, or refuses.
    #[inline]
    pub(crate) fn reserve(&mut self, pages: u64) -> Result<(), Error> {
        let pages = pages.min(1 << 52) as i64;
        let commit = &self.memory.commit;
        self.pages += commit.reserve(&self.memory.commitment(), pages, self.pages)?;
        Ok(())
    }

    /// Passes `pages` to a mapping or an object, or takes them from it if negative.
    #[inline]
    pub(crate) fn pass(&mut self, pages: i64) {
        self.pages -= pages;
    }
}

impl<P: Platform> Drop for Reservation<'_, P> {
    #[inline]
    fn drop(&mut self) {
        debug_assert!(self.pages >= 0, "an operation uses only pages that it has reserved");
        if self.pages != 0 {
            self.memory.commitment().add(-self.pages);
        }
    }
}
