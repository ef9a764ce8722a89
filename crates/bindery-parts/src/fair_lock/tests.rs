use std::boxed::Box;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::thread;
use std::vec::Vec;

use bindery::addr::{Frame, VirtAddr, VirtRange};
use bindery::platform::{Cpu, Invalidation, Tables};

use super::*;
use crate::{LocalTlb, ShootdownCpu, Shootdowns};

/// More polls than any thread here needs.
const POLLS: u64 = 500_000_000;

/// Yields, and panics in place of a hang.
fn patience() -> impl FnMut() {
    let mut polls = 0;
    move || {
        polls += 1;
        assert!(polls < POLLS, "waits for ever");
        thread::yield_now();
    }
}

fn until(condition: impl Fn() -> bool) {
    let mut relax = patience();
    while !condition() {
        relax();
    }
}

/// Each thread arrives after the one before it has drawn its ticket.
fn order_of_arrival(lock: &FairLock) -> Vec<u32> {
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let first = lock.lock(patience());
        for number in 0..6 {
            let order = &order;
            scope.spawn(move || {
                let _turn = lock.lock(patience());
                order.lock().unwrap().push(number);
            });
            until(|| lock.waiters() == number + 1);
        }
        drop(first);
    });
    order.into_inner().unwrap()
}

#[test]
fn waiters_are_served_in_order_of_arrival() {
    let lock = FairLock::new();
    assert_eq!(order_of_arrival(&lock), [0, 1, 2, 3, 4, 5]);
    assert!(!lock.is_locked() && lock.waiters() == 0);
}

#[test]
fn tickets_wrap_around() {
    for start in [u32::MAX, u32::MAX - 3, u32::MAX / 2 - 3] {
        let lock = FairLock::starting_at(start);
        assert_eq!(order_of_arrival(&lock), [0, 1, 2, 3, 4, 5]);
        assert!(!lock.is_locked());
    }
    let lock = FairLock::starting_at(u32::MAX);
    let turn = lock.try_lock().expect("free");
    assert!(lock.is_locked() && lock.try_lock().is_none());
    drop(turn);
    assert!(lock.try_lock().is_some());
}

#[test]
fn threads_exclude_each_other() {
    let (lock, count) = (FairLock::new(), AtomicU64::new(0));
    let add = || count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    let _turn = lock.lock(patience());
                    add();
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..5_000 {
                until(|| lock.try_lock().map(|_turn| add()).is_some());
            }
        });
    });
    assert_eq!(count.load(Ordering::Relaxed), 15_000);
}

#[test]
fn a_try_draws_no_ticket_in_vain() {
    let lock = FairLock::new();
    let turn = lock.lock(patience());
    assert!(lock.try_lock().is_none());
    assert_eq!(lock.waiters(), 0);
    let ticket = turn.into_ticket();
    assert!(lock.is_locked() && lock.try_lock().is_none());
    lock.unlock(ticket);
    let turn = lock.try_lock().expect("free");
    assert!(lock.is_locked());
    drop(turn);
    assert!(!lock.is_locked());
}

/// The lock becomes free within the first call of the hook.
#[test]
fn the_hook_runs_once_for_each_thread_ahead() {
    let lock = FairLock::new();
    for ahead in [0, 1, 5] {
        let tickets: Vec<_> = (0..ahead).map(|_| lock.draw()).collect();
        let calls = Cell::new(0);
        let turn = lock.lock(|| {
            if calls.replace(calls.get() + 1) == 0 {
                tickets.iter().for_each(|_| lock.pass_on());
            }
        });
        assert_eq!(calls.get(), ahead);
        drop(turn);
    }
}

#[test]
fn a_holder_that_panics_unlocks() {
    let lock = FairLock::new();
    let panics = || {
        let _turn = lock.lock(patience());
        panic!("a holder");
    };
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    assert!(!lock.is_locked() && lock.try_lock().is_some());
}

/// The first waiter unwinds while the lock is held.
#[test]
fn a_waiter_that_panics_passes_its_turn_on() {
    struct Unwound<'a>(&'a AtomicU64);
    impl Drop for Unwound<'_> {
        fn drop(&mut self) {
            self.0.store(1, Ordering::Relaxed);
        }
    }
    let (lock, unwound) = (FairLock::new(), AtomicU64::new(0));
    thread::scope(|scope| {
        let first = lock.lock(patience());
        let waiter = scope.spawn(|| {
            let hook = Unwound(&unwound);
            let panics = || {
                drop(lock.lock(move || {
                    let _hook = &hook;
                    resume_unwind(Box::new("a waiter"));
                }));
            };
            catch_unwind(AssertUnwindSafe(panics)).is_err()
        });
        until(|| unwound.load(Ordering::Relaxed) == 1);
        let last = scope.spawn(|| drop(lock.lock(patience())));
        until(|| lock.waiters() == 2);
        for _ in 0..10_000 {
            assert_eq!(lock.waiters(), 2, "a turn was passed on before it came");
            thread::yield_now();
        }
        drop(first);
        assert!(waiter.join().unwrap());
        last.join().unwrap();
    });
    assert!(!lock.is_locked());
}

/// No interrupt arrives. Each CPU waits for the lock, which the others hold while they wait for it.
#[test]
fn holders_wait_for_waiters_that_serve() {
    struct Silent;
    impl LocalTlb for Silent {
        fn send(&self, _: Cpu) {}
        fn invalidate(&self, _: Frame, _: &Invalidation) {}
        fn invalidate_kernel(&self, _: &Invalidation) {}
        fn flush_all(&self) {}
        fn order(&self) {}
        fn relax(&self) {
            thread::yield_now();
        }
    }
    let memory = [const { ShootdownCpu::new() }; 3];
    let all = Shootdowns::new(&memory);
    let (lock, done) = (FairLock::new(), AtomicUsize::new(0));
    let range = VirtRange::from_len(VirtAddr(0x1000), 0x1000).unwrap();
    let what = Invalidation { range, stride: 0x1000, tables: Tables::Unchanged };
    (0..3).for_each(|cpu| all.on(Cpu(cpu), &Silent).online());
    thread::scope(|scope| {
        for cpu in 0..3 {
            let (all, lock, done, what) = (&all, &lock, &done, &what);
            scope.spawn(move || {
                let here = all.on(Cpu(cpu), &Silent);
                for _ in 0..200 {
                    let mut patience = patience();
                    let _turn = lock.lock(|| {
                        here.serve();
                        patience();
                    });
                    here.invalidate_kernel(what);
                }
                done.fetch_add(1, Ordering::Relaxed);
                until(|| {
                    here.serve();
                    done.load(Ordering::Relaxed) == 3
                });
            });
        }
    });
    assert_eq!(all.counts().invalidations, 3 * 3 * 200);
}
