//! Commit accounting: the amount of committed memory, and its limit (`vm.overcommit_memory`).

use core::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::error::Error;

/// The mode of commit accounting.
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
    /// Each call that commits writes it.
    committed: CachePadded<AtomicI64>,
    limit: AtomicU64,
    /// Memory and swap.
    total: AtomicU64,
    mode: AtomicU8,
}

impl Commitment {
    pub(crate) const fn new(total: u64) -> Self {
        Self {
            committed: CachePadded::new(AtomicI64::new(0)),
            // Like Linux's vm.overcommit_ratio: half of memory, until the embedder sets it.
            limit: AtomicU64::new(total / 2),
            total: AtomicU64::new(total),
            mode: AtomicU8::new(Overcommit::Heuristic as u8),
        }
    }

    /// Sets the mode.
    pub fn set_mode(&self, mode: Overcommit) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// The current mode.
    pub fn mode(&self) -> Overcommit {
        match self.mode.load(Ordering::Relaxed) {
            1 => Overcommit::Always,
            2 => Overcommit::Never,
            _ => Overcommit::Heuristic,
        }
    }

    /// The maximum number of committed pages under [`Overcommit::Never`] (`CommitLimit`).
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

    /// Swap areas were added or removed: adds `slots` slots.
    pub(crate) fn swap_changed(&self, slots: i64) {
        self.total.fetch_add(slots as u64, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, pages: i64) {
        self.committed.fetch_add(pages, Ordering::Relaxed);
    }

    /// Commits `pages` for as long as the guard lives, or refuses. A caller that wants them to stay
    /// committed adds them before it drops the guard, so the same pages are never committed to two
    /// processes.
    pub(crate) fn reserve(&self, pages: u64) -> Result<Reservation<'_>, Error> {
        let pages = pages.min(1 << 52) as i64;
        let after = self.committed.fetch_add(pages, Ordering::Relaxed) + pages;
        let reservation = Reservation { commitment: self, pages };
        let refused = match self.mode() {
            Overcommit::Always => false,
            Overcommit::Heuristic => pages as u64 > self.total.load(Ordering::Relaxed),
            // A request for no pages succeeds, whatever is committed already.
            Overcommit::Never => pages > 0 && after > self.limit().min(i64::MAX as u64) as i64,
        };
        if refused { Err(Error::Overcommitted) } else { Ok(reservation) }
    }

    /// Keeps `pages` committed for as long as the guard lives, although their commitment is about
    /// to be returned: no other process can commit them in between.
    pub(crate) fn keep(&self, pages: u64) -> Reservation<'_> {
        let pages = pages.min(1 << 52) as i64;
        self.add(pages);
        Reservation { commitment: self, pages }
    }
}

/// Pages that are committed temporarily.
pub(crate) struct Reservation<'a> {
    commitment: &'a Commitment,
    pages: i64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.commitment.add(-self.pages);
    }
}
