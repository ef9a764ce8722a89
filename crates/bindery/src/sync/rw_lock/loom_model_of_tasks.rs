//! Tasks that poll the lock under loom, beside the threads that hold it.
//!
//! Run with `scripts/loom gate`.
//!
//! A task waits on the lock's word, or, if the lock may be freed, on a word of its own
//! ([`Completions`]). Readers of such a lock only try it, so no thread joins its line. Loom reports a
//! lost wake-up as a deadlock. The last tests leave out one rule
//! each ([`Omit`]) and must fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::sync::completions::Completions;
use crate::sync::model;
use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::atomic::{AtomicU32, Ordering};
use crate::sync::parking::model::{SecondLook, Sleepers};

use super::{Readable, RwLock};

/// The bound on preemptions with three CPUs. (With two, all are explored.)
const PREEMPTIONS: usize = 3;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Omit {
    Nothing,
    /// A task that finds the lock taken marks it.
    Mark,
    /// A writer that unlocks a marked lock wakes the tasks.
    NoteAtUnlock,
    /// A writer that closes a marked lock wakes the tasks.
    NoteAtRemoval,
    /// A task counts itself before its first look.
    Enter,
    /// A task reads its word before it looks at the lock.
    WordBeforeLook,
}

struct World {
    omit: Omit,
    lock: RwLock<AtomicU32>,
    tasks: Completions<AtomicU32>,
    guarded: UnsafeCell<u32>,
    sleepers: Sleepers,
}

/// Reads in the lock, if it is free now.
fn try_read(world: &World) -> bool {
    let guard = world.lock.try_read(&world.sleepers);
    if guard.is_some() {
        // SAFETY: the model tracks each access to the cell and reports races.
        world.guarded.with(|value| unsafe { *value });
    }
    guard.is_some()
}

/// A reader that does not wait.
fn look(world: &World) {
    let _ = try_read(world);
}

fn read(world: &World) {
    let guard = world.lock.read(&world.sleepers);
    // SAFETY: the model tracks each access to the cell and reports races.
    world.guarded.with(|value| unsafe { *value });
    drop(guard);
}

fn write(world: &World) {
    let guard = world.lock.write(&world.sleepers);
    // SAFETY: the model tracks each access to the cell and reports races.
    world.guarded.with_mut(|value| unsafe { *value += 1 });
    match world.omit {
        Omit::NoteAtUnlock => drop(guard),
        _ => guard.unlock_for(|| &world.tasks),
    }
}

fn write_twice(world: &World) {
    write(world);
    write(world);
}

/// Removes what the lock guards, and wakes the tasks afterwards, as `Removed::free` does.
fn remove(world: &World) {
    let guard = world.lock.write(&world.sleepers);
    // SAFETY: the model tracks each access to the cell and reports races.
    world.guarded.with_mut(|value| unsafe { *value += 1 });
    guard.close();
    if world.lock.is_marked() && world.omit != Omit::NoteAtRemoval {
        world.tasks.note(&world.sleepers);
    }
}

/// Polls until the lock was free or is closed; sleeps on the word of the tasks between polls.
fn poll(world: &World) {
    poll_at_most(world, usize::MAX);
}

/// A task that is dropped after its first poll.
fn poll_once(world: &World) {
    poll_at_most(world, 1);
}

fn poll_at_most(world: &World, polls: usize) {
    if world.omit != Omit::Enter {
        world.tasks.enter();
    }
    for _ in 0..polls {
        if try_read(world) {
            break;
        }
        let before = world.tasks.word();
        let found = match world.omit {
            Omit::Mark => Readable::Later(before.0, before.1),
            _ => world.lock.poll_read(),
        };
        let (word, expected) =
            if world.omit == Omit::WordBeforeLook { world.tasks.word() } else { before };
        match found {
            Readable::Now => {}
            Readable::Never => break,
            Readable::Later(..) if polls == 1 => {}
            Readable::Later(..) => {
                world.sleepers.park(word, || word.load(Ordering::Acquire) == expected);
            }
        }
    }
    if world.omit != Omit::Enter {
        world.tasks.leave();
    }
}

/// As [`poll`], for a lock that is not freed: sleeps on the lock's word.
fn poll_word(world: &World) {
    while !try_read(world) {
        match world.lock.poll_read() {
            Readable::Now => {}
            Readable::Never => break,
            Readable::Later(word, expected) => {
                world.sleepers.park(word, || word.load(Ordering::Acquire) == expected);
            }
        }
    }
}

/// Explores the interleavings of the CPUs at the lock, and returns the number of sleeps.
fn explore<const N: usize>(omit: Omit, work: [fn(&World); N]) -> usize {
    let slept = Arc::new(AtomicUsize::new(0));
    let sum = Arc::clone(&slept);
    model::check((N > 2).then_some(PREEMPTIONS), move || {
        let world = std::rc::Rc::new(World {
            omit,
            lock: RwLock(AtomicU32::new(0)),
            tasks: Completions::of_words(AtomicU32::new),
            guarded: UnsafeCell::new(0),
            sleepers: Sleepers::new(SecondLook::Taken),
        });
        model::beside(&world, work.into_iter().skip(1), work[0]);
        let left = world.lock.0.load(Ordering::Relaxed);
        assert!(left == 0 || world.lock.is_closed(), "the lock is left as it was found");
        sum.fetch_add(world.sleepers.sleeps.load(Relaxed), Relaxed);
    });
    slept.load(Relaxed)
}

#[test]
fn a_writer_wakes_the_tasks() {
    assert!(explore(Omit::Nothing, [write, poll]) > 0);
    assert!(explore(Omit::Nothing, [write_twice, poll]) > 0);
    assert!(explore(Omit::Nothing, [write, poll, poll]) > 0);
    assert!(explore(Omit::Nothing, [write, look, poll]) > 0);
}

#[test]
fn a_removal_wakes_the_tasks() {
    assert!(explore(Omit::Nothing, [remove, poll]) > 0);
    assert!(explore(Omit::Nothing, [remove, poll, poll]) > 0);
    assert!(explore(Omit::Nothing, [remove, look, poll]) > 0);
}

#[test]
fn a_task_giving_up_strands_no_other() {
    assert!(explore(Omit::Nothing, [write, poll_once, poll]) > 0);
}

#[test]
fn a_task_may_wait_on_the_locks_word() {
    assert!(explore(Omit::Nothing, [write, poll_word]) > 0);
    assert!(explore(Omit::Nothing, [write, poll_word, read]) > 0);
    assert!(explore(Omit::Nothing, [write_twice, write, poll_word]) > 0);
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[should_panic(expected = "deadlock")]
fn an_unmarked_lock_strands_the_task() {
    explore(Omit::Mark, [write, poll]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_silent_writer_strands_the_task() {
    explore(Omit::NoteAtUnlock, [write, poll]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_silent_removal_strands_the_task() {
    explore(Omit::NoteAtRemoval, [remove, poll]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_silent_removal_strands_both_tasks() {
    explore(Omit::NoteAtRemoval, [remove, poll, poll]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_silent_removal_strands_tasks_beside_readers() {
    explore(Omit::NoteAtRemoval, [remove, look, poll]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_uncounted_task_is_not_woken() {
    explore(Omit::Enter, [write, poll]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_word_read_too_late_strands_the_task() {
    explore(Omit::WordBeforeLook, [write, poll]);
}
