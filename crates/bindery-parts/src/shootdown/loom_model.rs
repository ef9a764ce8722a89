//! Shootdowns under loom: the code itself, with a page that one CPU unmaps while another uses it.
//!
//! Run with `scripts/loom shootdown`.
//!
//! The page's frame is a loom cell: a CPU that uses a translation reads it, and freeing it writes
//! it, so a frame freed under a translation is a race. A CPU's TLB has one entry, of root P. The
//! walker fills it while the root is loaded, also while the CPU loads another. Interrupts arrive
//! where a thread polls them. The last tests leave out one rule each and must fail.

use core::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};
use std::vec::Vec;

use bindery::addr::{Frame, VirtAddr, VirtRange};
use bindery::platform::{Cpu, CpuSet, Invalidation, Tables};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::queue::{Queue, Request};
use super::{LocalTlb, OnCpu, ShootdownCpu, Shootdowns, Translations};
use crate::atomic::Ordering;
use crate::rule::{Rule, omit};

const P: Frame = Frame(3);
const Q: Frame = Frame(4);
const CPUS: usize = 3;

#[derive(Default)]
struct Seen {
    used: Flag,
    freed: Flag,
    served: Flag,
}

struct World {
    all: Shootdowns<'static>,
    /// Whether P maps the page.
    entry: AtomicBool,
    frame: UnsafeCell<u32>,
    interrupts: [AtomicBool; CPUS],
    seen: Arc<Seen>,
}

// SAFETY: the model runs one thread at a time, and the cell reports concurrent accesses.
unsafe impl Sync for World {}

/// One CPU with its TLB.
struct Machine {
    world: &'static World,
    cpu: Cpu,
    /// Whether root P is loaded.
    loaded: Cell<bool>,
    /// Whether the TLB has the translation, under P's tag.
    cached: Cell<bool>,
}

impl LocalTlb for Machine {
    fn send(&self, cpu: Cpu) {
        self.world.interrupts[usize::from(cpu.0)].store(true, Ordering::Release);
    }

    /// Acts on the tag that is loaded.
    fn invalidate(&self, root: Frame, _: &Invalidation) {
        if root == P && self.loaded.get() {
            self.cached.set(false);
        }
        self.world.seen.served.store(true, Relaxed);
    }

    fn invalidate_kernel(&self, _: &Invalidation) {}

    fn flush_all(&self) {
        self.cached.set(false);
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

impl Machine {
    fn here(&self) -> OnCpu<'_, 'static, Self> {
        self.world.all.on(self.cpu, self)
    }

    /// An access of the program, or one of the walker.
    fn touch(&self) {
        if self.loaded.get() && !self.cached.get() {
            self.cached.set(self.world.entry.load(Ordering::Relaxed));
        }
        if self.cached.get() && self.loaded.get() {
            // SAFETY: the cell reports a concurrent write.
            let freed = self.world.frame.with(|freed| unsafe { *freed });
            assert_eq!(freed, 0, "used and freed");
            self.world.seen.used.store(true, Relaxed);
        }
    }

    fn run(&self, root: Frame) {
        self.here().run(root, |translations| {
            // The walker of the old root is at work until the new one is loaded.
            self.touch();
            if translations == Translations::Stale {
                self.cached.set(false);
            }
            self.loaded.set(root == P);
            self.touch();
        });
    }

    fn keep(&self) {
        self.here().keep(|| {
            self.touch();
            self.loaded.set(false);
        });
    }

    fn poll_interrupt(&self) {
        if self.world.interrupts[usize::from(self.cpu.0)].swap(false, Ordering::Acquire) {
            self.here().serve();
        }
    }

    /// Ends a thread: other CPUs do not wait for this one.
    fn stop(&self) {
        self.here().leave(|| {
            self.touch();
            self.loaded.set(false);
            self.cached.set(false);
        });
        self.here().offline();
    }

    fn unmap(&self, cpus: &[u16]) {
        self.world.entry.store(false, Ordering::Relaxed);
        self.invalidate(cpus);
        // SAFETY: the cell reports a concurrent access.
        self.world.frame.with_mut(|freed| unsafe { *freed += 1 });
        self.world.seen.freed.store(true, Relaxed);
    }

    fn invalidate(&self, cpus: &[u16]) {
        let mut set = CpuSet::EMPTY;
        cpus.iter().for_each(|cpu| set.insert(Cpu(*cpu)));
        self.here().invalidate(P, &set, &page());
    }
}

fn page() -> Invalidation {
    let range = VirtRange::from_len(VirtAddr(0x1000), 0x1000).unwrap();
    Invalidation { range, stride: 0x1000, tables: Tables::Unchanged }
}

fn unmap(cpu: &Machine) {
    cpu.unmap(&[1]);
    cpu.stop();
}

/// Runs, uses the page, serves, uses it again.
fn run(cpu: &Machine) {
    cpu.run(P);
    cpu.touch();
    cpu.poll_interrupt();
    cpu.touch();
    cpu.stop();
}

/// As [`run`], but serves without an interrupt, as a CPU that waits does. An interrupt would order
/// the request before its handler.
fn run_and_serve(cpu: &Machine) {
    cpu.run(P);
    cpu.touch();
    cpu.here().serve();
    cpu.touch();
    cpu.stop();
}

fn run_then_run_another(cpu: &Machine) {
    cpu.run(P);
    cpu.run(Q);
    cpu.stop();
}

fn keep_and_run_again(cpu: &Machine) {
    cpu.run(P);
    cpu.keep();
    cpu.run(P);
    cpu.touch();
    cpu.stop();
}

fn serve_while_kept(cpu: &Machine) {
    cpu.run(P);
    cpu.keep();
    cpu.here().serve();
    cpu.run(P);
    cpu.touch();
    cpu.stop();
}

fn run_and_invalidate(cpu: &Machine) {
    cpu.run(P);
    cpu.invalidate(&[0]);
    cpu.stop();
}

fn run_and_unmap(cpu: &Machine) {
    cpu.run(P);
    cpu.unmap(&[0, 1]);
    cpu.stop();
}

fn invalidate(cpu: &Machine) {
    cpu.invalidate(&[1]);
    cpu.stop();
}

/// A request to a CPU that goes offline, then one to the same CPU.
fn ask_twice(cpu: &Machine) {
    cpu.here().invalidate_kernel(&page());
    cpu.unmap(&[1]);
    cpu.stop();
}

fn go_offline_and_come_back(cpu: &Machine) {
    cpu.here().offline();
    cpu.here().online();
    cpu.run(P);
    cpu.touch();
    cpu.stop();
}

fn explore<const N: usize>(
    rule: Option<Rule>,
    preemptions: Option<usize>,
    work: [fn(&Machine); N],
) -> Arc<Seen> {
    let seen = Arc::new(Seen::default());
    let all = Arc::clone(&seen);
    omit::check(rule, preemptions, move || {
        let seen = Arc::clone(&all);
        let cpus: [ShootdownCpu; N] = core::array::from_fn(|_| ShootdownCpu::new());
        omit::lend(cpus, |cpus| {
            let world = World {
                all: Shootdowns::new(cpus),
                entry: AtomicBool::new(true),
                frame: UnsafeCell::new(0),
                interrupts: core::array::from_fn(|_| AtomicBool::new(false)),
                seen,
            };
            omit::lend(world, |world| {
                let machine = move |cpu| Machine {
                    world,
                    cpu: Cpu(cpu as u16),
                    loaded: Cell::new(false),
                    cached: Cell::new(false),
                };
                (0..N).for_each(|cpu| machine(cpu).here().online());
                let mut others = Vec::new();
                for (cpu, work) in work.into_iter().enumerate().skip(1) {
                    others.push(thread::spawn(move || work(&machine(cpu))));
                }
                work[0](&machine(0));
                others.into_iter().for_each(|thread| thread.join().unwrap());
            });
        });
    });
    seen
}

fn is_used_and_freed(seen: &Seen) -> bool {
    seen.used.load(Relaxed) && seen.freed.load(Relaxed)
}

#[test]
fn no_frame_is_freed_under_a_translation() {
    let seen = explore(None, Some(3), [unmap, run]);
    assert!(is_used_and_freed(&seen) && seen.served.load(Relaxed));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap, run_and_serve])));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap, run_then_run_another])));
}

#[test]
fn a_kept_tag_is_flushed_before_use() {
    assert!(is_used_and_freed(&explore(None, Some(4), [unmap, keep_and_run_again])));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap, serve_while_kept])));
}

#[test]
fn two_cpus_that_ask_each_other_finish() {
    let seen = explore(None, Some(2), [run_and_unmap, run_and_invalidate]);
    assert!(is_used_and_freed(&seen));
}

/// The queue has one slot here: the second request finds none and flushes everything.
#[test]
fn two_requests_to_one_cpu_are_served() {
    assert!(is_used_and_freed(&explore(None, Some(2), [unmap, run, invalidate])));
}

#[test]
fn a_request_to_an_offline_cpu_is_withdrawn() {
    assert!(is_used_and_freed(&explore(None, Some(3), [ask_twice, go_offline_and_come_back])));
}

#[test]
fn no_request_beside_a_take_is_lost() {
    requests_beside_a_take(None);
}

/// A thread posts two requests, one of them for a flush of everything, while the CPU takes some.
fn requests_beside_a_take(rule: Option<Rule>) {
    fn serve(queue: &Queue) {
        let taken = queue.take();
        if taken.is_for_everything() {
            queue.full_flush_done(queue.full_flushes_asked());
        }
        queue.finish(taken);
    }
    omit::check(rule, None, || {
        omit::lend(Queue::new(), |queue| {
            let request = Request { root: None, what: page() };
            let post = move || [(); 2].map(|()| queue.post(&request).0);
            let poster = thread::spawn(post);
            serve(queue);
            let tickets = poster.join().unwrap();
            serve(queue);
            let is_done = |ticket| queue.is_done(queue.awaited(ticket));
            assert!(tickets.into_iter().all(is_done), "a request is lost");
        });
    });
}

#[test]
fn a_nested_full_flush_counts() {
    nested_full_flush(None);
}

/// An interrupt handler performs a later flush of everything inside an earlier one.
fn nested_full_flush(rule: Option<Rule>) {
    omit::check(rule, None, || {
        let queue = Queue::new();
        let request = Request { root: None, what: page() };
        let _slot = queue.post(&request);
        let first = queue.post(&request).0;
        assert!(queue.take().is_for_everything());
        let number = queue.full_flushes_asked();
        let second = queue.post(&request).0;
        let later = queue.take();
        queue.full_flush_done(queue.full_flushes_asked());
        queue.finish(later);
        queue.full_flush_done(number);
        assert!(queue.is_done(queue.awaited(first)) && queue.is_done(queue.awaited(second)));
    });
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[should_panic(expected = "Causality violation")]
fn roots_read_without_fence_miss_a_cpu() {
    explore(Some(Rule::FenceBeforeRoots), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_root_loaded_without_fence_is_missed() {
    explore(Some(Rule::FenceBeforeLoad), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_switch_without_announcement_is_missed() {
    explore(Some(Rule::AnnounceSwitch), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_root_announced_without_release_is_early() {
    explore(Some(Rule::ReleaseAfterLoad), Some(3), [unmap, run_then_run_another]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_tag_made_stale_by_a_store_runs() {
    explore(Some(Rule::ExchangeKept), Some(3), [unmap, keep_and_run_again]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_failed_exchange_spares_no_interrupt() {
    explore(Some(Rule::LookAgain), Some(4), [unmap, keep_and_run_again]);
}

#[test]
#[should_panic(expected = "used and freed")]
fn a_stale_tag_without_flush_is_used() {
    explore(Some(Rule::FlushStale), Some(3), [unmap, keep_and_run_again]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_served_late_leaves_the_tag() {
    explore(Some(Rule::StaleWhenServed), Some(3), [unmap, serve_while_kept]);
}

#[test]
#[should_panic(expected = "exceeded maximum number of branches")]
fn waiters_that_do_not_serve_wait_forever() {
    explore(Some(Rule::ServeWhileWaiting), Some(2), [run_and_unmap, run_and_invalidate]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_without_release_is_read_early() {
    explore(Some(Rule::ReleaseRequest), Some(3), [unmap, run_and_serve]);
}

#[test]
#[should_panic(expected = "a request is lost")]
fn requests_taken_in_two_steps_are_lost() {
    requests_beside_a_take(Some(Rule::TakeInOneStep));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_done_without_release_is_early() {
    explore(Some(Rule::ReleaseDone), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "is_done")]
fn a_flush_number_that_falls_is_lost() {
    nested_full_flush(Some(Rule::FlushedNeverFalls));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_slot_reused_too_early_is_done() {
    explore(Some(Rule::TakeBack), Some(3), [ask_twice, go_offline_and_come_back]);
}
