//! Commit accounting: the amount of committed memory, and its limit (`vm.overcommit_memory`).
//!
//! All processes count in one word. So that they do not all write it, each CPU that is online holds
//! *credit*: pages that are in the word and that no mapping uses. A call commits from the credit of
//! its CPU and returns to it, however large the mapping is. When the credit does not suffice, the
//! call takes the difference and a batch from the word.
//!
//! The word gets credit back under a lock: when a CPU goes offline, and before a call is refused.
//! That call closes the credit of all CPUs, returns it to the word, and tries again: while all credit
//! is closed, the word is exact. So a refusal is always true. A call that wants pages of closed credit
//! waits for the lock; one that returns pages subtracts them from the word.
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

/// The pages that a CPU takes from the word at once, besides those that it needs.
const BATCH: i64 = 256;

/// The most credit that a CPU keeps: 4 PiB. Without a limit on commitments, pages that one CPU commits
/// and another returns would add up until the sum overflows.
const MOST: i64 = 1 << 40;

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

    /// Adds pages, unless the credit is closed or would be more than [`MOST`].
    #[inline]
    fn put(&self, pages: i64) -> bool {
        let more = |held: i64| held.checked_add(pages).filter(|sum| (0..=MOST).contains(sum));
        self.0.fetch_update(Relaxed, Relaxed, more).is_ok()
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

    /// Pages committed. Exact when no call runs. The lock is held, so no credit moves to or from the
    /// word between the two readings.
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
                self.word.fetch_sub(credit.close(), Relaxed);
            }
            let taken = self.raise(pages, most);
            credits.all().for_each(|credit| credit.open(0));
            taken
        })
    }

    #[inline]
    fn put(&self, credits: &impl Credits, pages: i64) {
        if !credits.own().is_some_and(|own| own.put(pages)) {
            // The sum, the word less all credit, falls by these pages either way.
            self.word.fetch_sub(pages, Relaxed);
        }
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
        /// The number of times that the lock was taken.
        locked: AtomicU64,
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
            self.0.locked.fetch_add(1, Relaxed);
            exchange()
        }
    }

    impl World {
        fn new(mode: Overcommit, limit: u64) -> Self {
            let state = CommitState::new(1 << 30);
            state.set_mode(mode);
            state.set_limit(limit);
            let (lock, locked) = (Mutex::default(), AtomicU64::new(0));
            Self { state, credits: Default::default(), lock, locked }
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
        assert_eq!(world.committed(), 28);
        // A CPU goes offline.
        world.state.collect(&On(&world, None), &world.credits[0]);
        assert_eq!((world.committed(), world.credits[0].held()), (28, 0));
    }

    #[test]
    fn pages_that_another_cpu_returns_never_overflow() {
        let world = World::new(Overcommit::Always, 0);
        for _ in 0..10_000 {
            world.add(0, 1 << 51);
            world.add(1, -(1 << 51));
        }
        assert_eq!(world.committed(), 0);
        for _ in 0..10_000 {
            world.add(0, MOST / 4);
            world.add(1, -(MOST / 4));
        }
        assert_eq!((world.committed(), world.credits[1].held()), (0, MOST));
    }

    #[test]
    fn pages_return_to_the_word_while_the_credit_is_closed() {
        let world = World::new(Overcommit::Always, 0);
        world.add(0, 10);
        let held = world.credits[0].close();
        world.state.word.fetch_sub(held, Relaxed);
        world.add(0, -4);
        assert_eq!((world.credits[0].held(), world.committed()), (0, 6));
        world.credits[0].open(0);
        assert_eq!(world.committed(), 6);
    }

    #[test]
    fn a_large_area_that_comes_and_goes_takes_the_lock_once() {
        const AREA: i64 = 32_768;
        let world = World::new(Overcommit::Never, 3 * AREA as u64);
        for _ in 0..1000 {
            assert!(world.reserve(0, AREA));
            world.add(0, -AREA);
        }
        assert_eq!((world.locked.load(Relaxed), world.committed()), (1, 0));
        // A larger area takes only the difference.
        assert!(world.reserve(0, 2 * AREA));
        world.add(0, -2 * AREA);
        // The sum above was read under the lock, too.
        assert_eq!((world.locked.load(Relaxed), world.credits[0].held()), (3, 2 * AREA + BATCH));
        // Another CPU gets all of it before it is refused.
        assert!(world.reserve(1, 3 * AREA));
        assert!(!world.reserve(0, 1));
        assert_eq!(world.committed(), 3 * AREA as u64);
    }

    #[test]
    fn large_areas_of_several_cpus_meet_at_the_limit() {
        const AREA: i64 = 32_768;
        // Two areas have room at a time.
        let world = World::new(Overcommit::Never, 2 * AREA as u64 + 100);
        let areas = AtomicI64::new(0);
        let mapped = world.on_each_cpu(|cpu| {
            let mut mapped = 0;
            for _ in 0..2000 {
                if world.reserve(cpu, AREA) {
                    assert!(areas.fetch_add(1, Relaxed) < 2, "the limit is passed");
                    assert!(world.state.word.load(Relaxed) <= 2 * AREA + 100);
                    areas.fetch_sub(1, Relaxed);
                    world.add(cpu, -AREA);
                    mapped += 1;
                }
            }
            mapped
        });
        assert!(mapped > 0);
        assert_eq!(world.committed(), 0);
        // The credit that the last calls have left to other CPUs does not stop one.
        assert!(world.reserve(0, 2 * AREA + 100) && !world.reserve(1, 1));
    }

    #[test]
    fn two_areas_always_find_room_for_two() {
        const AREA: i64 = 32_768;
        let world = World::new(Overcommit::Never, 2 * AREA as u64);
        // Two CPUs map one area each: no refusal would be true.
        let refused = world.on_each_cpu(|cpu| {
            let refused = |_| {
                if world.reserve(cpu, AREA) {
                    world.add(cpu, -AREA);
                    0
                } else {
                    1
                }
            };
            if cpu < 2 { (0..5000).map(refused).sum() } else { 0 }
        });
        assert_eq!((refused, world.committed()), (0, 0));
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
