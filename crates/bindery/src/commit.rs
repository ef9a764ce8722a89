//! Commit accounting: how much memory is committed, and how much may be (`vm.overcommit_memory`).

use core::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};

use crate::error::Error;

/// The current mode.
///
/// ```
/// use bindery::{Memory, Overcommit, Platform};
///
/// /// `sysctl vm.overcommit_memory=2`
/// fn never<P: Platform>(memory: &Memory<P>) {
///     memory.commitment().set_mode(Overcommit::Never);
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Overcommit {
    /// Only a single request for more than all memory and swap is refused (0).
    #[default]
    Heuristic = 0,
    /// Nothing is refused (1).
    Always = 1,
    /// The sum of committed memory stays below [`Commitment::limit`] (2).
    Never = 2,
}

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
#[derive(Debug)]
pub struct Commitment {
    committed: AtomicI64,
    limit: AtomicU64,
    /// Memory and swap.
    total: AtomicU64,
    mode: AtomicU8,
}

impl Commitment {
    pub(crate) const fn new(total: u64) -> Self {
        Self {
            committed: AtomicI64::new(0),
            // As Linux's vm.overcommit_ratio: half of memory, until the embedder says otherwise.
            limit: AtomicU64::new(total / 2),
            total: AtomicU64::new(total),
            mode: AtomicU8::new(Overcommit::Heuristic as u8),
        }
    }

    /// Selects what is refused from now on.
    pub fn set_mode(&self, mode: Overcommit) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// What is refused.
    pub fn mode(&self) -> Overcommit {
        match self.mode.load(Ordering::Relaxed) {
            1 => Overcommit::Always,
            2 => Overcommit::Never,
            _ => Overcommit::Heuristic,
        }
    }

    /// The most pages that may be committed under [`Overcommit::Never`] (`CommitLimit`).
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets [`Commitment::limit`].
    pub fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Ordering::Relaxed);
    }

    /// Pages committed (`Committed_AS`).
    pub fn committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed).max(0) as u64
    }

    /// Swap areas came or went: adds `slots` slots.
    pub(crate) fn swap_changed(&self, slots: i64) {
        self.total.fetch_add(slots as u64, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, pages: i64) {
        self.committed.fetch_add(pages, Ordering::Relaxed);
    }

    /// Commits `pages` for as long as the guard lives, or refuses: a caller that wants them to stay
    /// committed adds them before it drops the guard, so two processes are never committed the same
    /// pages.
    pub(crate) fn reserve(&self, pages: u64) -> Result<Reservation<'_>, Error> {
        let pages = pages.min(1 << 52) as i64;
        let after = self.committed.fetch_add(pages, Ordering::Relaxed) + pages;
        let reservation = Reservation { commitment: self, pages };
        let refused = match self.mode() {
            Overcommit::Always => false,
            Overcommit::Heuristic => pages as u64 > self.total.load(Ordering::Relaxed),
            // A request for nothing succeeds, however much is committed already.
            Overcommit::Never => pages > 0 && after > self.limit().min(i64::MAX as u64) as i64,
        };
        if refused { Err(Error::Overcommitted) } else { Ok(reservation) }
    }

    /// Commits `pages` for as long as the guard lives, which were committed before and are about to
    /// be given back: so nobody else is committed them in between.
    pub(crate) fn keep(&self, pages: u64) -> Reservation<'_> {
        let pages = pages.min(1 << 52) as i64;
        self.add(pages);
        Reservation { commitment: self, pages }
    }
}

/// Pages that are committed for now.
pub(crate) struct Reservation<'a> {
    commitment: &'a Commitment,
    pages: i64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.commitment.add(-self.pages);
    }
}
