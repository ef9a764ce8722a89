//! Commit accounting: the amount of committed memory, and its limit (`vm.overcommit_memory`).
//!
//! The commitments of all processes are counted in one word. To avoid contention for this word,
//! each online CPU holds *credit*: pages that the word counts but no mapping uses. A call commits
//! pages from its CPU's credit and returns pages to it, regardless of the mapping's size. If the
//! credit does not suffice, the call takes the difference plus a batch from the word.
//!
//! Credit returns to the word under a lock: when a CPU is taken offline and before a call fails.
//! That call closes the credit of all CPUs, returns it to the word, and retries. While all credit
//! is closed, the word is exact, so a failure is always justified. A call that needs pages of
//! closed credit waits for the lock; a call that returns pages subtracts them from the word.
//!
//! A batch is taken only if the word stays within the limit, and credit is used only while the word
//! is within it. So committed pages never exceed the limit because of credit.
//!
//! An operation holds the pages that it has reserved, and those that it has unmapped, in a
//! `Reservation` of its own until it ends. A mapping that it inserts takes its pages from there. So
//! a page that moves between two mappings, or from a reservation to a mapping, is counted once at
//! any time, and no other process can commit it in between. The rest returns before the operation
//! unlocks the address space: the next holder of its mutex finds the pages free. Reserved
//! pages count while the operation runs, even if it then fails for another reason, as on Linux.
//!
//! Model under loom: `loom_model`.

#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
#[cfg(test)]
mod tests;

#[cfg(all(test, any(loom, shuttle)))]
use crate::sync::model::sync::atomic::AtomicI64;
#[cfg(not(all(test, any(loom, shuttle))))]
use core::sync::atomic::AtomicI64;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

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
    /// Refuses only a single request that exceeds all memory and swap together (0).
    #[default]
    Heuristic = 0,
    /// Never fails (1).
    Always = 1,
    /// The sum of committed memory stays below [`crate::Commitment::limit`] (2).
    Never = 2,
}

/// The number of additional pages that a CPU takes from the word at once.
const BATCH: i64 = 256;

/// The maximum credit of a CPU: 4 PiB. Without a limit on commitments, pages that one CPU commits
/// and another returns would add up until the sum overflows.
const MOST: i64 = 1 << 40;

/// Marks credit that its CPU must not use, under the lock.
const CLOSED: i64 = i64::MIN;

/// No limit.
const ANY: i64 = i64::MAX;

/// The credit of one CPU in pages, or [`CLOSED`].
#[derive(Default)]
pub(crate) struct Credit(CachePadded<AtomicI64>);

impl Credit {
    fn held(&self) -> i64 {
        self.0.load(Relaxed).max(0)
    }

    #[inline]
    fn take(&self, pages: i64) -> bool {
        self.0.fetch_update(Relaxed, Relaxed, |held| (held >= pages).then(|| held - pages)).is_ok()
    }

    /// Adds pages, unless the credit is closed or would be more than [`MOST`].
    #[inline]
    fn put(&self, pages: i64) -> bool {
        let more = |held: i64| held.checked_add(pages).filter(|sum| (0..=MOST).contains(sum));
        self.0.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Prevents the CPU from using its credit, which is returned to the word. The lock is held.
    fn close(&self) -> i64 {
        self.0.swap(CLOSED, Relaxed)
    }

    /// Ends [`Credit::close`]. Credit of a CPU that was brought online since then was never closed
    /// and may contain pages, so it is left unchanged.
    fn open(&self, pages: i64) {
        let _was_open = self.0.compare_exchange(CLOSED, pages, Relaxed, Relaxed);
    }
}

/// The credit of all CPUs, from the view of one CPU.
pub(crate) trait Credits {
    /// The credit of the caller's CPU, or of a CPU that the caller ran on before. `None` if no CPU
    /// is online.
    fn own(&self) -> Option<&Credit>;

    /// The credit of all CPUs.
    fn all(&self) -> impl Iterator<Item = &Credit>;

    /// Runs `exchange` with the lock held.
    fn locked<R>(&self, exchange: impl FnOnce() -> R) -> R;

    /// Collects credit before a refusal. The lock is held.
    fn close(&self, credit: &Credit) -> i64 {
        credit.close()
    }
}

/// The word, and its limits.
pub(crate) struct CommitState {
    /// Committed pages plus all credit.
    word: CachePadded<AtomicI64>,
    limit: AtomicU64,
    /// Pages of memory and swap.
    total: AtomicU64,
    mode: AtomicU8,
}

impl CommitState {
    pub(crate) fn new(total: u64) -> Self {
        Self {
            word: CachePadded::new(AtomicI64::new(0)),
            // Like Linux's vm.overcommit_ratio: half of memory, until the embedder sets it.
            limit: AtomicU64::new(total / 2),
            total: AtomicU64::new(total),
            mode: AtomicU8::new(Overcommit::Heuristic as u8),
        }
    }

    pub(crate) fn set_mode(&self, mode: Overcommit) {
        self.mode.store(mode as u8, Relaxed);
    }

    pub(crate) fn mode(&self) -> Overcommit {
        match self.mode.load(Relaxed) {
            1 => Overcommit::Always,
            2 => Overcommit::Never,
            _ => Overcommit::Heuristic,
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    pub(crate) fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Relaxed);
    }

    /// Adds `slots` slots after swap areas were added or removed.
    pub(crate) fn swap_changed(&self, slots: i64) {
        self.total.fetch_add(slots as u64, Relaxed);
    }

    /// Pages committed. Exact when no call runs. The lock is held, so no credit moves to or from
    /// the word between the two readings.
    pub(crate) fn committed(&self, credits: &impl Credits) -> u64 {
        credits.locked(|| {
            let held: i64 = credits.all().map(Credit::held).sum();
            self.word.load(Relaxed).saturating_sub(held).max(0) as u64
        })
    }

    /// Commits `pages`, or returns them if negative.
    #[inline]
    pub(crate) fn add(&self, credits: &impl Credits, pages: i64) {
        if pages >= 0 {
            let taken = self.take(credits, pages, ANY);
            debug_assert!(taken, "nothing is refused without a limit");
        } else {
            self.put(credits, -pages);
        }
    }

    /// Commits `pages` on behalf of an operation that already holds `held` committed pages, or
    /// refuses. Returns the number of pages that were missing.
    pub(crate) fn reserve(
        &self,
        credits: &impl Credits,
        pages: i64,
        held: i64,
    ) -> Result<i64, Error> {
        let missing = (pages - held).max(0);
        let accepted = match self.mode() {
            Overcommit::Heuristic if pages as u64 > self.total.load(Relaxed) => false,
            // A request for no pages succeeds, regardless of the committed amount.
            _ if missing == 0 => true,
            Overcommit::Heuristic | Overcommit::Always => self.take(credits, missing, ANY),
            Overcommit::Never => self.take(credits, missing, self.most()),
        };
        if accepted { Ok(missing) } else { Err(Error::Overcommitted) }
    }

    /// Returns all of a CPU's credit.
    pub(crate) fn collect(&self, credits: &impl Credits, credit: &Credit) {
        credits.locked(|| {
            self.word.fetch_sub(credit.close(), Relaxed);
            credit.open(0);
        });
    }

    /// The maximum value of the word.
    fn most(&self) -> i64 {
        if self.mode() == Overcommit::Never { self.limit().min(ANY as u64 - 1) as i64 } else { ANY }
    }

    #[inline]
    fn take(&self, credits: &impl Credits, pages: i64, most: i64) -> bool {
        let taken = match credits.own() {
            // A lowered limit may be below the word.
            Some(own) => (most == ANY || self.word.load(Relaxed) <= most) && own.take(pages),
            None => self.raise(pages, most),
        };
        taken || self.take_from_word(credits, pages, most)
    }

    /// Adds to the word, unless the result would exceed `most`.
    fn raise(&self, pages: i64, most: i64) -> bool {
        if most == ANY {
            self.word.fetch_add(pages, Relaxed);
            return true;
        }
        let sum = |word: i64| word.checked_add(pages).filter(|sum| *sum <= most);
        self.word.fetch_update(Relaxed, Relaxed, sum).is_ok()
    }

    #[cold]
    #[inline(never)]
    fn take_from_word(&self, credits: &impl Credits, pages: i64, most: i64) -> bool {
        credits.locked(|| {
            if let Some(own) = credits.own() {
                let held = own.close();
                if self.raise(pages - held + BATCH, most.min(self.most())) {
                    own.open(BATCH);
                    return true;
                }
                self.word.fetch_sub(held, Relaxed);
                own.open(0);
            }
            if self.raise(pages, most) {
                return true;
            }
            for credit in credits.all() {
                self.word.fetch_sub(credits.close(credit), Relaxed);
            }
            let taken = self.raise(pages, most);
            credits.all().for_each(|credit| credit.open(0));
            taken
        })
    }

    #[inline]
    fn put(&self, credits: &impl Credits, pages: i64) {
        if !credits.own().is_some_and(|own| own.put(pages)) {
            // The sum (the word minus all credit) falls by these pages in either case.
            self.word.fetch_sub(pages, Relaxed);
        }
    }
}
