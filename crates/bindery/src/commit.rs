//! Commit accounting: the amount of committed memory, and its limit (`vm.overcommit_memory`).
//!
//! All processes count in one word. So that they do not all write it, each CPU that is online holds
//! *credit*: pages that are in the word and that no mapping uses. A call commits from the credit of
//! its CPU and returns to it. When the credit does not suffice, the call takes a batch more from the
//! word than it needs; of credit above two batches, all but one returns to the word.
//!
//! Word and credit exchange pages under a lock. So that a refusal is always true, the call that is
//! about to be refused closes the credit of all CPUs under that lock, returns it to the word, and
//! tries again: while all credit is closed, the word is exact. A call that finds the credit of its
//! CPU closed waits for the lock.
//!
//! A batch is taken only if the word stays within the limit, and credit is used only while it is. So
//! credit never lets committed pages pass the limit. (A reservation that is being turned into a
//! mapping counts twice for a moment.)

use core::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering::Relaxed};

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
    /// The sum of committed memory stays below [`crate::Commitment::limit`] (2).
    Never = 2,
}

/// The pages that a CPU takes from the word at once, beside those that it needs.
const BATCH: i64 = 256;

/// Credit that its CPU must not use, under the lock.
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

    #[inline]
    fn put(&self, pages: i64) -> bool {
        let fits = |held: i64| held >= 0 && held + pages <= 2 * BATCH;
        self.0.fetch_update(Relaxed, Relaxed, |held| fits(held).then(|| held + pages)).is_ok()
    }

    /// Keeps the CPU from its credit, which is returned. The lock is held.
    fn close(&self) -> i64 {
        self.0.swap(CLOSED, Relaxed)
    }

    /// Ends [`Credit::close`]. Credit of a CPU that came online since then was never closed, and may
    /// hold pages: it stays as it is.
    fn open(&self, pages: i64) {
        let _was_open = self.0.compare_exchange(CLOSED, pages, Relaxed, Relaxed);
    }
}

/// The credit of all CPUs, as one CPU sees it.
pub(crate) trait Credits {
    /// The credit of the caller's CPU, or of one that it ran on before. `None` if no CPU is online.
    fn own(&self) -> Option<&Credit>;

    /// The credit of all CPUs.
    fn all(&self) -> impl Iterator<Item = &Credit>;

    /// Runs `exchange` with the lock held.
    fn locked<R>(&self, exchange: impl FnOnce() -> R) -> R;
}

/// The word, and its limits.
pub(crate) struct CommitState {
    /// Committed pages and all credit.
    word: CachePadded<AtomicI64>,
    limit: AtomicU64,
    /// Memory and swap.
    total: AtomicU64,
    mode: AtomicU8,
}

impl CommitState {
    pub(crate) const fn new(total: u64) -> Self {
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

    /// Swap areas were added or removed: adds `slots` slots.
    pub(crate) fn swap_changed(&self, slots: i64) {
        self.total.fetch_add(slots as u64, Relaxed);
    }

    /// Pages committed. Exact when no call runs.
    pub(crate) fn committed(&self, credits: &impl Credits) -> u64 {
        let held: i64 = credits.all().map(Credit::held).sum();
        (self.word.load(Relaxed) - held).max(0) as u64
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

    /// Commits `pages`, or refuses.
    pub(crate) fn reserve(&self, credits: &impl Credits, pages: i64) -> Result<(), Error> {
        let accepted = match self.mode() {
            Overcommit::Heuristic if pages as u64 > self.total.load(Relaxed) => false,
            Overcommit::Heuristic | Overcommit::Always => self.take(credits, pages, ANY),
            // A request for no pages succeeds, whatever is committed already.
            Overcommit::Never => pages == 0 || self.take(credits, pages, self.most()),
        };
        if accepted { Ok(()) } else { Err(Error::Overcommitted) }
    }

    /// Returns all of a CPU's credit.
    pub(crate) fn collect(&self, credits: &impl Credits, credit: &Credit) {
        credits.locked(|| {
            self.word.fetch_sub(credit.close(), Relaxed);
            credit.open(0);
        });
    }

    /// The most that the word may hold.
    fn most(&self) -> i64 {
        if self.mode() == Overcommit::Never { self.limit().min(ANY as u64 - 1) as i64 } else { ANY }
    }

    #[inline]
    fn take(&self, credits: &impl Credits, pages: i64, most: i64) -> bool {
        let taken = match credits.own() {
            // A limit that was lowered may lie below what the word holds.
            Some(own) => (most == ANY || self.word.load(Relaxed) <= most) && own.take(pages),
            None => self.raise(pages, most),
        };
        taken || self.take_from_word(credits, pages, most)
    }

    /// Adds to the word, unless it would pass `most`.
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
            if let Some(own) = credits.own()
                && self.raise(pages + BATCH, most.min(self.most()))
            {
                // It is open, since the lock is held.
                own.0.fetch_add(BATCH, Relaxed);
                return true;
            }
            if self.raise(pages, most) {
                return true;
            }
            for credit in credits.all() {
                self.word.fetch_sub(credit.close(), Relaxed);
            }
            let taken = self.raise(pages, most);
            credits.all().for_each(|credit| credit.open(0));
            taken
        })
    }

    #[inline]
    fn put(&self, credits: &impl Credits, pages: i64) {
        match credits.own() {
            Some(own) if own.put(pages) => {}
            Some(_) => self.put_into_word(credits, pages),
            None => _ = self.word.fetch_sub(pages, Relaxed),
        }
    }

    #[cold]
    #[inline(never)]
    fn put_into_word(&self, credits: &impl Credits, pages: i64) {
        credits.locked(|| {
            let Some(own) = credits.own() else {
                self.word.fetch_sub(pages, Relaxed);
                return;
            };
            let all = own.close() + pages;
            let kept = all.min(BATCH);
            self.word.fetch_sub(all - kept, Relaxed);
            own.open(kept);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;

    use super::*;

    const CPUS: usize = 4;

    struct World {
        state: CommitState,
        credits: [Credit; CPUS],
        lock: Mutex<()>,
    }

    /// One CPU, or none.
    struct On<'w>(&'w World, Option<usize>);

    impl Credits for On<'_> {
        fn own(&self) -> Option<&Credit> {
            self.1.map(|cpu| &self.0.credits[cpu])
        }

        fn all(&self) -> impl Iterator<Item = &Credit> {
            self.0.credits.iter()
        }

        fn locked<R>(&self, exchange: impl FnOnce() -> R) -> R {
            let _lock = self.0.lock.lock().unwrap();
            exchange()
        }
    }

    impl World {
        fn new(mode: Overcommit, limit: u64) -> Self {
            let state = CommitState::new(1 << 30);
            state.set_mode(mode);
            state.set_limit(limit);
            Self { state, credits: Default::default(), lock: Mutex::default() }
        }

        fn reserve(&self, cpu: usize, pages: i64) -> bool {
            self.state.reserve(&On(self, Some(cpu)), pages).is_ok()
        }

        fn add(&self, cpu: usize, pages: i64) {
            self.state.add(&On(self, Some(cpu)), pages);
        }

        fn committed(&self) -> u64 {
            self.state.committed(&On(self, None))
        }

        fn on_each_cpu(&self, work: impl Fn(usize) -> i64 + Sync) -> i64 {
            thread::scope(|scope| {
                let threads = [0, 1, 2, 3].map(|cpu| {
                    let work = &work;
                    scope.spawn(move || work(cpu))
                });
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            })
        }
    }

    #[test]
    fn credit_does_not_count_as_committed() {
        let world = World::new(Overcommit::Heuristic, 0);
        for cpu in 0..CPUS {
            world.add(cpu, 10);
            world.add(cpu, -3);
        }
        assert_eq!(world.committed(), 28);
        assert_eq!(world.state.word.load(Relaxed), 4 * (10 + BATCH));
        // Above two batches, all but one return to the word.
        world.add(0, 1000);
        world.add(0, -1000);
        assert_eq!(world.committed(), 28);
        assert_eq!(world.credits[0].held(), BATCH);
        // A CPU goes offline.
        world.state.collect(&On(&world, None), &world.credits[0]);
        assert_eq!((world.committed(), world.credits[0].held()), (28, 0));
    }

    #[test]
    fn a_refusal_is_true() {
        let world = World::new(Overcommit::Never, 2000);
        for cpu in 0..CPUS {
            assert!(world.reserve(cpu, 10));
        }
        // The other CPUs hold more credit than is free in the word.
        assert!(world.reserve(0, 2000 - 40));
        assert_eq!(world.committed(), 2000);
        assert!(!world.reserve(1, 1) && world.reserve(1, 0));
        assert!(world.state.reserve(&On(&world, None), 1).is_err());
        world.add(2, -5);
        assert!(!world.reserve(3, 6) && world.reserve(3, 5));
        assert_eq!((world.committed(), world.state.word.load(Relaxed)), (2000, 2000));
    }

    #[test]
    fn a_lowered_limit_holds_for_credit_too() {
        let world = World::new(Overcommit::Heuristic, 100);
        world.add(0, 200);
        world.state.set_mode(Overcommit::Never);
        assert!(!world.reserve(0, 1));
        world.add(0, -101);
        assert!(world.reserve(0, 1) && !world.reserve(0, 1));
        assert_eq!(world.committed(), 100);
    }

    #[test]
    fn a_machine_without_cpus_online_holds_no_credit() {
        let world = World::new(Overcommit::Never, 100);
        let none = On(&world, None);
        assert!(world.state.reserve(&none, 100).is_ok());
        assert!(world.state.reserve(&none, 1).is_err());
        world.state.add(&none, -40);
        assert!(world.state.reserve(&none, 41).is_err());
        assert!(world.state.reserve(&none, 40).is_ok());
        assert_eq!(world.committed(), 100);
    }

    #[test]
    fn several_cpus_take_all_and_no_more() {
        for limit in [1, 255, 256, 257, 1023, 5000] {
            let world = World::new(Overcommit::Never, limit);
            for round in 0..20 {
                // No page is returned, so a refusal is true only if nothing is left.
                let taken = world.on_each_cpu(|cpu| {
                    let mut taken = 0;
                    while world.reserve(cpu, 1) {
                        taken += 1;
                        assert!(world.state.word.load(Relaxed) <= limit as i64);
                    }
                    taken
                });
                assert_eq!((taken, world.committed()), (limit as i64, limit));
                world.add(round % CPUS, -taken);
                assert_eq!(world.committed(), 0);
            }
        }
    }

    #[test]
    fn pages_that_come_and_go_are_counted_exactly() {
        let world = World::new(Overcommit::Never, 3000);
        let left = world.on_each_cpu(|cpu| {
            let (mut held, mut seed) = (0, cpu as u64 + 1);
            for _ in 0..20_000 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let pages = (seed >> 33) as i64 % 700;
                if seed >> 63 == 0 && world.reserve(cpu, pages) {
                    held += pages;
                } else {
                    let returned = held.min(pages);
                    world.add(cpu, -returned);
                    held -= returned;
                }
                assert!(world.state.word.load(Relaxed) <= 3000);
            }
            held
        });
        assert_eq!(world.committed() as i64, left);
        assert!(world.reserve(0, 3000 - left) && !world.reserve(1, 1));
    }
}
