//! The fair lock under loom: the code itself, with a count that its holder changes.
//!
//! Run with `scripts/loom fair_lock`.
//!
//! The count is a loom cell, so two holders at once are a race. The last tests leave out one rule
//! each and must fail.

use bindery::addr::{Frame, VirtAddr, VirtRange};
use bindery::platform::{Cpu, Invalidation, Tables};
use loom::cell::UnsafeCell;
use loom::thread;

use super::FairLock;
use crate::rule::{Rule, omit};
use crate::{LocalTlb, ShootdownCpu, Shootdowns};

struct World {
    lock: FairLock,
    count: UnsafeCell<u32>,
}

// SAFETY: the model runs one thread at a time, and the cell reports concurrent accesses.
unsafe impl Sync for World {}

impl World {
    fn add(&self) {
        // SAFETY: the cell reports a concurrent access.
        self.count.with_mut(|count| unsafe { *count += 1 });
    }
}

/// Two waiters could yield to each other for ever: each explores only its first few rounds.
fn relax() -> impl FnMut() {
    let mut rounds = 0;
    move || {
        rounds += 1;
        if rounds > 4 {
            loom::skip_branch();
        }
        thread::yield_now();
    }
}

fn lock_and_add(world: &World) {
    let _turn = world.lock.lock(relax());
    world.add();
}

fn try_and_add(world: &World) {
    if let Some(_turn) = world.lock.try_lock() {
        world.add();
    }
}

fn explore<const N: usize>(rule: Option<Rule>, start: u32, work: [fn(&World); N]) {
    let preemptions = if N > 2 { Some(3) } else { None };
    omit::check(rule, preemptions, move || {
        let lock = FairLock::starting_at(start);
        omit::lend(World { lock, count: UnsafeCell::new(0) }, |world| {
            let spawn = |work: &fn(&World)| {
                let work = *work;
                thread::spawn(move || work(world))
            };
            let others: [_; 2] = core::array::from_fn(|other| work.get(other + 1).map(spawn));
            work[0](world);
            others.into_iter().flatten().for_each(|thread| thread.join().unwrap());
            assert!(!world.lock.is_locked());
        });
    });
}

#[test]
fn one_thread_at_a_time_has_its_turn() {
    explore(None, 0, [lock_and_add, lock_and_add]);
    explore(None, u32::MAX, [lock_and_add, lock_and_add]);
    explore(None, 0, [lock_and_add, lock_and_add, lock_and_add]);
}

#[test]
fn a_try_takes_only_a_free_lock() {
    explore(None, 0, [lock_and_add, try_and_add]);
    explore(None, u32::MAX, [try_and_add, try_and_add]);
    explore(None, u32::MAX, [lock_and_add, try_and_add, lock_and_add]);
}

struct Tlb;

impl LocalTlb for Tlb {
    fn send(&self, _: Cpu) {}
    fn invalidate(&self, _: Frame, _: &Invalidation) {}
    fn invalidate_kernel(&self, _: &Invalidation) {}
    fn flush_all(&self) {}
    fn order(&self) {}
    fn relax(&self) {
        thread::yield_now();
    }
}

/// One CPU invalidates with the lock held, while another acquires it with interrupts off.
fn invalidate_with_lock_held(rule: Option<Rule>) {
    omit::check(rule, Some(3), || {
        omit::lend([ShootdownCpu::new(), ShootdownCpu::new()], |cpus| {
            omit::lend((Shootdowns::new(cpus), FairLock::new()), |(all, lock)| {
                (0..2).for_each(|cpu| all.on(Cpu(cpu), &Tlb).online());
                let waiter = thread::spawn(move || {
                    let here = all.on(Cpu(1), &Tlb);
                    drop(lock.lock(|| {
                        here.serve();
                        thread::yield_now();
                    }));
                    here.offline();
                });
                let range = VirtRange::from_len(VirtAddr(0x1000), 0x1000).unwrap();
                let what = Invalidation { range, stride: 0x1000, tables: Tables::Unchanged };
                let turn = lock.lock(thread::yield_now);
                all.on(Cpu(0), &Tlb).invalidate_kernel(&what);
                drop(turn);
                waiter.join().unwrap();
            });
        });
    });
}

#[test]
fn a_holder_invalidates_on_a_cpu_that_waits() {
    invalidate_with_lock_held(None);
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[should_panic(expected = "Causality violation")]
fn a_ticket_drawn_in_two_steps_is_shared() {
    explore(Some(Rule::DrawInOneStep), 0, [lock_and_add, lock_and_add]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_try_that_draws_later_has_no_turn() {
    explore(Some(Rule::DrawOnlyIfFree), 0, [lock_and_add, try_and_add]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_turn_without_acquire_is_early() {
    explore(Some(Rule::AcquireTurn), 0, [lock_and_add, lock_and_add]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_free_lock_without_acquire_is_early() {
    explore(Some(Rule::AcquireFreeLock), 0, [lock_and_add, try_and_add]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_turn_passed_on_without_release_is_early() {
    explore(Some(Rule::ReleaseTurn), 0, [lock_and_add, lock_and_add]);
}

#[test]
#[should_panic(expected = "exceeded maximum number of branches")]
fn a_waiter_must_serve_the_holder() {
    invalidate_with_lock_held(Some(Rule::RelaxWhileWaiting));
}
