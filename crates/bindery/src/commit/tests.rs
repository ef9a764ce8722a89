use std::sync::Mutex;
use std::thread;

use super::*;

const CPUS: usize = 4;

struct World {
    state: CommitState,
    credits: [Credit; CPUS],
    lock: Mutex<()>,
    /// The number of times that the lock was acquired.
    locked: AtomicU64,
}

/// One CPU, or no CPU.
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
        self.state.reserve(&On(self, Some(cpu)), pages, 0).is_ok()
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
    // A CPU is taken offline.
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
fn pages_bypass_closed_credit() {
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
fn a_recurring_large_area_locks_once() {
    const AREA: i64 = 32_768;
    let world = World::new(Overcommit::Never, 3 * AREA as u64);
    for _ in 0..1000 {
        assert!(world.reserve(0, AREA));
        world.add(0, -AREA);
    }
    assert_eq!((world.locked.load(Relaxed), world.committed()), (1, 0));
    // A larger area takes only the difference from the word.
    assert!(world.reserve(0, 2 * AREA));
    world.add(0, -2 * AREA);
    // The sum above was also read under the lock.
    assert_eq!((world.locked.load(Relaxed), world.credits[0].held()), (3, 2 * AREA + BATCH));
    // Another CPU gets all remaining pages before it is refused.
    assert!(world.reserve(1, 3 * AREA));
    assert!(!world.reserve(0, 1));
    assert_eq!(world.committed(), 3 * AREA as u64);
}

#[test]
fn large_areas_meet_at_the_limit() {
    const AREA: i64 = 32_768;
    // Only two areas fit at a time.
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
    // The credit that the last calls have left on other CPUs does not cause a refusal.
    assert!(world.reserve(0, 2 * AREA + 100) && !world.reserve(1, 1));
}

#[test]
fn two_areas_always_find_room_for_two() {
    const AREA: i64 = 32_768;
    let world = World::new(Overcommit::Never, 2 * AREA as u64);
    // Two CPUs map one area each; a refusal would be unjustified.
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
    assert!(world.state.reserve(&On(&world, None), 1, 0).is_err());
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
    assert!(world.state.reserve(&none, 100, 0).is_ok());
    assert!(world.state.reserve(&none, 1, 0).is_err());
    world.state.add(&none, -40);
    assert!(world.state.reserve(&none, 41, 0).is_err());
    assert!(world.state.reserve(&none, 40, 0).is_ok());
    assert_eq!(world.committed(), 100);
}

#[test]
fn several_cpus_take_all_and_no_more() {
    for limit in [1, 255, 256, 257, 1023, 5000] {
        let world = World::new(Overcommit::Never, limit);
        for round in 0..20 {
            // No page is returned, so a failure is justified only if no page remains.
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
