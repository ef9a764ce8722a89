//! Tags under loom: the code itself, with CPUs whose TLBs keep one translation for each tag.
//!
//! Run with `scripts/loom tags`.
//!
//! A translation is the number of the space that made it. A space that finds the number of another
//! under its tag fails the model. For each tag there is also a loom cell, which each space that
//! runs under the tag writes: two that run at the same time are a race. The last tests leave out
//! one rule each and must fail.

use core::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};

use bindery::platform::Cpu;
use loom::cell::UnsafeCell;
use loom::thread;

use super::{Tag, TagCpu, TagWord, Tags};
use crate::rule::{Rule, omit};

const CPU: Cpu = Cpu(0);

struct World {
    tags: Tags<'static>,
    uses: [UnsafeCell<u32>; 3],
}

// SAFETY: the model runs one thread at a time, and the cells report concurrent accesses.
unsafe impl Sync for World {}

impl World {
    fn use_tag(&self, tag: &Tag) {
        let cell = &self.uses[usize::from(tag.number())];
        // SAFETY: the cell reports a concurrent access.
        cell.with_mut(|uses| unsafe { *uses += 1 });
    }
}

/// The first CPU with its TLB.
struct Machine {
    world: &'static World,
    cached: RefCell<[u32; 3]>,
    spaces: Cell<u32>,
}

impl Machine {
    fn flush(&self) {
        *self.cached.borrow_mut() = [0; 3];
    }

    /// Runs a new space with its tag, from its first load to its end.
    fn run(&self, tag: Tag) {
        let space = self.spaces.get() + 1;
        self.spaces.set(space);
        let number = self.world.tags.load(CPU, &tag, || self.flush());
        self.world.use_tag(&tag);
        let found = core::mem::replace(&mut self.cached.borrow_mut()[usize::from(number)], space);
        assert_eq!(found, 0, "a translation of another space");
        self.world.tags.retire(tag);
    }

    /// Runs new spaces with the tags that are free. Returns whether there was one.
    fn run_with_free(&self) -> bool {
        let found = [(); 2].map(|()| self.world.tags.find());
        let is_found = found.iter().any(Option::is_some);
        found.into_iter().flatten().for_each(|tag| self.run(tag));
        is_found
    }
}

/// Runs a space, and others with freed tags.
fn run_twice(cpu: &Machine, first: Tag, _second: Tag) -> bool {
    cpu.run(first);
    cpu.run_with_free()
}

/// As [`run_twice`], with another retired tag at first.
fn retire_and_run_twice(cpu: &Machine, first: Tag, second: Tag) -> bool {
    cpu.world.tags.retire(second);
    cpu.run(first);
    cpu.run_with_free()
}

/// A thread is preempted in its check, and a space runs on the CPU and ends.
fn run_in_a_check(cpu: &Machine, first: Tag, second: Tag) -> bool {
    cpu.world.tags.load(CPU, &second, || {
        cpu.flush();
        cpu.run(first);
    });
    cpu.run_with_free()
}

/// Collects on another CPU.
fn collect(world: &World) {
    world.tags.collect();
}

/// Collects and uses a freed tag on another CPU.
fn collect_and_use(world: &World) {
    world.tags.collect();
    if let Some(tag) = world.tags.find() {
        world.use_tag(&tag);
    }
}

/// Takes both tags, the only ones, at first.
fn with_world(rule: Option<Rule>, work: impl Fn(&'static World, Tag, Tag) + Send + Sync + 'static) {
    omit::check(rule, Some(3), move || {
        omit::lend(([TagWord::new()], [TagCpu::new()]), |(words, cpus)| {
            let tags = Tags::new(words, cpus);
            tags.reserve(3..=63);
            let uses = core::array::from_fn(|_| UnsafeCell::new(0));
            omit::lend(World { tags, uses }, |world| {
                let [first, second] = [(); 2].map(|()| world.tags.take().unwrap());
                work(world, first, second);
            });
        });
    });
}

/// Explores the interleavings of the first CPU and another thread. Requires that the CPU found a
/// freed tag.
fn explore(rule: Option<Rule>, work: fn(&Machine, Tag, Tag) -> bool, other: fn(&World)) {
    let found = Arc::new(Flag::new(false));
    let all = Arc::clone(&found);
    with_world(rule, move |world, first, second| {
        let other = thread::spawn(move || other(world));
        let cpu = Machine { world, cached: RefCell::default(), spaces: Cell::new(0) };
        if work(&cpu, first, second) {
            all.store(true, Relaxed);
        }
        other.join().unwrap();
    });
    assert!(found.load(Relaxed), "no freed tag was found");
}

/// Two threads take a tag each.
fn take_at_once(rule: Option<Rule>) {
    with_world(rule, |world, first, second| {
        [first, second].into_iter().for_each(|tag| world.tags.retire(tag));
        world.tags.collect();
        let other = thread::spawn(move || world.tags.find());
        let tag = world.tags.find();
        assert_ne!(tag, other.join().unwrap(), "one tag for two");
    });
}

/// Each of two threads retires a tag and collects.
fn collect_at_once(rule: Option<Rule>) {
    with_world(rule, |world, first, second| {
        let other = thread::spawn(move || {
            world.tags.retire(first);
            world.tags.collect();
        });
        world.tags.retire(second);
        world.tags.collect();
        other.join().unwrap();
        world.tags.collect();
        let found = [(); 2].map(|()| world.tags.find());
        assert!(found.iter().all(Option::is_some), "a tag is lost");
    });
}

#[test]
fn no_space_finds_translations_of_another() {
    explore(None, run_twice, collect);
    explore(None, retire_and_run_twice, collect);
    explore(None, run_in_a_check, collect);
    explore(None, run_twice, collect_and_use);
}

#[test]
fn threads_that_take_get_different_tags() {
    take_at_once(None);
}

#[test]
fn threads_that_collect_lose_no_tag() {
    collect_at_once(None);
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[should_panic(expected = "a translation of another space")]
fn a_tag_loaded_without_check_is_old() {
    explore(Some(Rule::CheckAtLoad), run_twice, collect);
}

#[test]
#[should_panic(expected = "a translation of another space")]
fn a_tag_collected_late_is_not_flushed() {
    explore(Some(Rule::CollectBeforeRaise), retire_and_run_twice, collect);
}

#[test]
#[should_panic(expected = "a translation of another space")]
fn a_tag_freed_early_is_not_flushed() {
    explore(Some(Rule::RaiseBeforeFree), run_twice, collect);
}

#[test]
#[should_panic(expected = "a translation of another space")]
fn a_tag_freed_without_release_hides_the_generation() {
    explore(Some(Rule::ReleaseFree), run_twice, collect);
}

#[test]
#[should_panic(expected = "a translation of another space")]
fn a_tag_taken_without_acquire_hides_the_generation() {
    explore(Some(Rule::AcquireFree), run_twice, collect);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_tag_retired_without_release_is_in_use() {
    explore(Some(Rule::ReleaseRetired), run_twice, collect_and_use);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_tag_collected_without_acquire_is_in_use() {
    explore(Some(Rule::AcquireRetired), run_twice, collect_and_use);
}

#[test]
#[should_panic(expected = "a translation of another space")]
fn a_generation_read_late_is_not_flushed() {
    explore(Some(Rule::GenerationBeforeFlush), run_in_a_check, collect);
}

#[test]
#[should_panic(expected = "one tag for two")]
fn a_tag_taken_in_two_steps_is_shared() {
    take_at_once(Some(Rule::TakeTagInOneStep));
}

#[test]
#[should_panic(expected = "a tag is lost")]
fn two_collectors_lose_a_tag() {
    collect_at_once(Some(Rule::OneCollector));
}

#[test]
#[should_panic(expected = "a tag is lost")]
fn a_collection_without_release_loses_a_tag() {
    collect_at_once(Some(Rule::ReleaseCollector));
}

#[test]
#[should_panic(expected = "a tag is lost")]
fn a_collection_without_acquire_loses_a_tag() {
    collect_at_once(Some(Rule::AcquireCollector));
}
