//! Read sections under loom: the code itself, with a record that readers find until it is unlinked.
//!
//! Run with `scripts/loom read_sections`.
//!
//! The record is a loom cell. A reader that finds it reads it, and freeing writes it, so a record
//! freed under a reader is a race. Each model also requires that an execution freed the record and
//! that another found it. The last tests leave out one rule each and must fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};
use std::vec::Vec;

use bindery::platform::Cpu;
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::{LOW, ReadCpu, ReadSections, store_entry};
use crate::atomic::Ordering;
use crate::rule::{Rule, omit};

const REMOVER: Cpu = Cpu(0);
const READER: Cpu = Cpu(1);
const PREEMPTIONS: usize = 3;

#[derive(Default)]
struct Seen {
    found: Flag,
    freed: Flag,
}

struct World {
    sections: ReadSections<'static>,
    linked: AtomicBool,
    record: UnsafeCell<u32>,
    seen: Arc<Seen>,
}

// SAFETY: the model runs one thread at a time, and the cell reports concurrent accesses.
unsafe impl Sync for World {}

impl World {
    fn read(&self) {
        self.sections.enter(READER);
        self.look_up();
        self.sections.leave(READER);
    }

    /// An interrupt handler reads, after the first part of an entry.
    fn read_in_a_handler(&self) {
        let period = self.sections.progress.0.load(Ordering::Relaxed) & !LOW;
        store_entry(&self.sections.cpus[usize::from(READER.0)].section, period | 1);
        self.read();
        self.sections.leave(READER);
    }

    /// Looks up the record and reads it.
    fn look_up(&self) {
        if self.linked.load(Ordering::Relaxed) {
            // SAFETY: the cell reports a concurrent write.
            let freed = self.record.with(|freed| unsafe { *freed });
            assert_eq!(freed, 0, "found and freed");
            self.seen.found.store(true, Relaxed);
        }
    }

    /// Unlinks the record, and frees it if the grace period passes within two questions.
    fn remove(&self, ask: fn(&ReadSections<'_>)) {
        self.linked.store(false, Ordering::Relaxed);
        let period = self.sections.grace_period();
        for _ in 0..2 {
            ask(&self.sections);
            if self.sections.has_passed(period) {
                // SAFETY: the cell reports a concurrent access.
                self.record.with_mut(|freed| unsafe { *freed += 1 });
                self.seen.freed.store(true, Relaxed);
                break;
            }
        }
    }
}

fn advance(sections: &ReadSections<'_>) {
    sections.advance();
}

fn only_ask(_: &ReadSections<'_>) {
    thread::yield_now();
}

fn remove_and_advance(world: &World) {
    world.remove(advance);
}

fn remove_and_ask(world: &World) {
    world.remove(only_ask);
}

fn read_once(world: &World) {
    world.read();
}

fn read_in_a_handler(world: &World) {
    world.read_in_a_handler();
}

fn read_twice(world: &World) {
    world.read();
    world.read();
}

fn advance_twice(world: &World) {
    world.sections.advance();
    world.sections.advance();
}

fn read_then_go_offline(world: &World) {
    world.read();
    world.sections.cpu_offline(READER);
}

fn come_online_and_read(world: &World) {
    world.sections.cpu_online(READER);
    world.read();
}

/// Explores the interleavings of threads, of which the first runs on the main thread.
fn explore<const N: usize>(rule: Option<Rule>, offline: &'static [Cpu], work: [fn(&World); N]) {
    let seen = Arc::new(Seen::default());
    let all = Arc::clone(&seen);
    omit::check(rule, Some(PREEMPTIONS), move || {
        let seen = Arc::clone(&all);
        omit::lend([ReadCpu::new(), ReadCpu::new()], |cpus| {
            let sections = ReadSections::new(cpus);
            offline.iter().for_each(|cpu| sections.cpu_offline(*cpu));
            let (linked, record) = (AtomicBool::new(true), UnsafeCell::new(0));
            omit::lend(World { sections, linked, record, seen }, |world| {
                let others: Vec<_> = work[1..]
                    .iter()
                    .copied()
                    .map(|work| thread::spawn(move || work(world)))
                    .collect();
                work[0](world);
                others.into_iter().for_each(|thread| thread.join().unwrap());
            });
        });
    });
    assert!(seen.found.load(Relaxed), "no reader found the record");
    assert!(seen.freed.load(Relaxed), "the record was never freed");
}

const ALL_ONLINE: &[Cpu] = &[];

#[test]
fn no_record_is_freed_under_a_reader() {
    explore(None, ALL_ONLINE, [remove_and_advance, read_once]);
    explore(None, ALL_ONLINE, [remove_and_advance, read_twice]);
}

#[test]
fn a_handler_reads_inside_an_entry() {
    explore(None, ALL_ONLINE, [remove_and_advance, read_in_a_handler]);
}

#[test]
fn other_cpus_may_let_the_period_pass() {
    explore(None, ALL_ONLINE, [remove_and_ask, read_once, advance_twice]);
    explore(None, ALL_ONLINE, [remove_and_advance, read_once, advance_twice]);
}

#[test]
fn cpus_come_and_go_beside_a_look() {
    explore(None, ALL_ONLINE, [remove_and_advance, read_then_go_offline]);
    explore(None, &[READER], [remove_and_advance, come_online_and_read]);
    explore(None, &[READER], [remove_and_ask, come_online_and_read, advance_twice]);
}

/// The remover's own CPU is looked at like any other.
#[test]
fn a_remover_reads_too() {
    fn read_and_remove(world: &World) {
        world.sections.enter(REMOVER);
        world.sections.leave(REMOVER);
        world.remove(advance);
    }
    explore(None, ALL_ONLINE, [read_and_remove, read_once]);
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[should_panic(expected = "Causality violation")]
fn a_section_entered_without_fence_is_missed() {
    explore(Some(Rule::FenceAtEntry), ALL_ONLINE, [remove_and_advance, read_once]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_section_inside_an_entry_needs_its_fence() {
    explore(Some(Rule::FenceAtNestedEntry), ALL_ONLINE, [remove_and_advance, read_in_a_handler]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_section_seen_without_acquire_still_reads() {
    explore(Some(Rule::AcquireSection), ALL_ONLINE, [remove_and_advance, read_once]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_cpu_seen_offline_without_acquire_still_reads() {
    explore(Some(Rule::AcquireOffline), ALL_ONLINE, [remove_and_advance, read_then_go_offline]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_second_section_hides_the_first() {
    explore(Some(Rule::ReleaseAtEntry), ALL_ONLINE, [remove_and_advance, read_twice]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_section_left_without_release_is_freed_under() {
    explore(Some(Rule::ReleaseAtLeave), ALL_ONLINE, [remove_and_advance, read_once]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_number_read_before_the_unlinking_is_early() {
    explore(Some(Rule::FenceBeforeNumber), ALL_ONLINE, [remove_and_ask, read_once, advance_twice]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_look_without_fence_misses_a_reader() {
    explore(Some(Rule::FenceBeforeLook), ALL_ONLINE, [remove_and_ask, read_once, advance_twice]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_period_that_has_begun_is_too_early() {
    explore(Some(Rule::NextPeriod), ALL_ONLINE, [remove_and_ask, read_once]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_number_read_without_acquire_proves_nothing() {
    explore(Some(Rule::AcquirePassed), ALL_ONLINE, [remove_and_ask, read_once, advance_twice]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_look_of_another_cpu_must_be_released() {
    explore(Some(Rule::PassOnLook), ALL_ONLINE, [remove_and_ask, read_once, advance_twice]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_cpu_offline_without_release_still_reads() {
    explore(Some(Rule::ReleaseAtOffline), ALL_ONLINE, [remove_and_advance, read_then_go_offline]);
}
