//! [`Commitment`]: the committed memory of a machine, and the credit of its CPUs.

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

impl<'m, P: Platform> Commitment<'m, P> {
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

    #[inline]
    pub(crate) fn add(&self, pages: i64) {
        self.memory.commit.add(self, pages);
    }

    /// Commits `pages` until the guard is dropped, or refuses. A caller that needs them committed
    /// for longer adds them elsewhere before it drops the guard, so the same pages are never
    /// committed to two processes.
    pub(crate) fn reserve(&self, pages: u64) -> Result<Reservation<'m, P>, Error> {
        let pages = pages.min(1 << 52) as i64;
        self.memory.commit.reserve(self, pages)?;
        Ok(Reservation { memory: self.memory, pages })
    }

    /// Keeps `pages` committed until the guard is dropped, although their commitment is about to be
    /// returned, so no other process can commit them in between.
    pub(crate) fn keep(&self, pages: u64) -> Reservation<'m, P> {
        let pages = pages.min(1 << 52) as i64;
        self.add(pages);
        Reservation { memory: self.memory, pages }
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

/// Pages that are committed temporarily.
pub(crate) struct Reservation<'m, P: Platform> {
    memory: &'m Memory<P>,
    pages: i64,
}

impl<P: Platform> Reservation<'_, P> {
    /// Ends the guard but leaves the pages committed.
    #[inline]
    pub(crate) fn stay(mut self) {
        self.pages = 0;
    }
}

impl<P: Platform> Drop for Reservation<'_, P> {
    fn drop(&mut self) {
        if self.pages != 0 {
            self.memory.commitment().add(-self.pages);
        }
    }
}
