//! One run: call A is held at a step, call B runs to its end or waits for A, and B's guarantees are
//! audited when it returns.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::platform::Cpu;
use bindery::{Access, check};
use bindery_hosted::Walk;

use super::operations::Operation;
use super::promises::{Audit, WATCHER, WHILE_HELD};
use super::stepped::{Readers, SteppedFiles, stepped};
use super::stops::{HoldAt, Phase, Role, Step, Stops};
use super::world::{ANON, World};
use crate::support::MIB;

const MEMORY: u64 = 32 * MIB;

/// The place where call A is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    Step(u32),
    /// At A's first wait for a table lock that a fault holds; the fault is released afterwards.
    Contended,
    /// Nowhere, to count A's steps.
    Nowhere,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// B returned while A was held, and its guarantees were audited.
    Audited,
    /// B returned with an error, which guarantees nothing.
    Refused,
    /// B waited for A.
    Blocked,
    /// A was never held.
    NotHeld,
}

#[derive(Debug)]
pub struct Outcome {
    pub verdict: Verdict,
    /// The number of steps that A passed before it was held, or in total.
    pub steps: u32,
    pub step: Option<Step>,
    pub problems: Vec<String>,
}

/// Releases every call at the end of the run, even after a panic.
struct Releases<'a>(&'a Stops);

impl Drop for Releases<'_> {
    fn drop(&mut self) {
        for role in [Role::Held, Role::Meanwhile, Role::Obstacle] {
            self.0.release(role);
        }
    }
}

/// Runs `held` and `stepped_in`.
pub fn run<A: Walk>(
    held: &Operation<A>,
    stepped_in: &Operation<A>,
    at: At,
    folio_order: u8,
) -> Outcome {
    // In every second run, unlinked items wait although no reader exists, so a walk that still
    // finds them finds them unchanged.
    let readers = match at {
        At::Step(number) if !number.is_multiple_of(2) => Readers::NotTold,
        _ => Readers::Told,
    };
    let (machine, memory) = stepped::<A>(MEMORY, readers);
    let files = SteppedFiles::default();
    let _watcher = machine.bind(WATCHER);
    let world = World::new(&machine, &memory, &files, folio_order);
    let stops = Arc::new(Stops::default());
    let mut audit = Audit { world: &world, held, stepped_in, problems: Vec::new() };
    let with_child = !audit.involves("drop child");
    let mut seen = vec![world.touch(1, with_child)];
    let mut late = Vec::new();
    let (verdict, done) = thread::scope(|scope| {
        let _releases = Releases(&stops);
        let start = |role: Role, cpu: u16, hold_at: HoldAt, call: fn(&World<'_, A>) -> bool| {
            let (stops, machine, world) = (&stops, &machine, &world);
            scope.spawn(move || {
                machine.on_cpu(Cpu(cpu), || stops.act(role, hold_at, || call(world)))
            })
        };
        let obstacle = (at == At::Contended).then(|| {
            let obstacle = start(Role::Obstacle, 3, HoldAt::First(Step::Invalidate), copy_a_page);
            stops.wait_for(Role::Obstacle);
            obstacle
        });
        let hold_at = match at {
            At::Step(number) => HoldAt::Number(number),
            At::Contended => HoldAt::First(Step::Relax),
            At::Nowhere => HoldAt::Nowhere,
        };
        let call = start(Role::Held, 0, hold_at, held.call);
        let mut phase = stops.wait_for(Role::Held);
        if obstacle.is_some() {
            stops.release(Role::Obstacle);
            if stops.wait_for(Role::Obstacle) == Phase::Waiting {
                phase = Phase::Waiting;
            }
        }
        let mut verdict = Verdict::NotHeld;
        let mut other = None;
        if phase == Phase::Held {
            let stored = world.touch(WHILE_HELD, with_child);
            let call = start(Role::Meanwhile, 1, HoldAt::Nowhere, stepped_in.call);
            verdict = Verdict::Blocked;
            seen.push(stored.clone());
            if stops.wait_for(Role::Meanwhile) == Phase::Finished {
                let done = call.join().unwrap();
                verdict = if done == Some(true) { Verdict::Audited } else { Verdict::Refused };
                match done {
                    Some(true) => late = audit.on_return(&stored),
                    Some(false) => {}
                    None => audit.problems.push("B panicked".to_owned()),
                }
            } else {
                other = Some(call);
            }
        }
        for role in [Role::Held, Role::Obstacle] {
            stops.release(role);
        }
        let problems = &mut audit.problems;
        let held_done = is_done("A", Some(call), problems);
        let other_done = is_done("B", other, problems) || verdict == Verdict::Audited;
        is_done("C", obstacle, problems);
        (verdict, [held_done, other_done])
    });
    let (step, steps) = stops.steps(Role::Held);
    if at != At::Nowhere {
        audit.at_the_end(done, &late);
        if verdict != Verdict::NotHeld {
            audit.swapped_contents(&seen);
        }
        finish(&mut audit, with_child);
    }
    let problems = audit.problems;
    Outcome { verdict, steps, step, problems }
}

/// Waits for the end of a call, if one exists. Returns whether the call succeeded.
fn is_done(
    who: &str,
    call: Option<thread::ScopedJoinHandle<'_, Option<bool>>>,
    problems: &mut Vec<String>,
) -> bool {
    let result = call.map(|call| call.join().unwrap());
    if result == Some(None) {
        problems.push(format!("{who} panicked"));
    }
    result.flatten().unwrap_or(false)
}

/// A fault that flushes with the table of `ANON` locked.
fn copy_a_page<A: Walk>(world: &World<'_, A>) -> bool {
    world.space.fault(VirtAddr(ANON + 5 * PAGE_SIZE), Access::Write).is_ok()
}

/// Checks that the watcher can continue to store, its values are saved, and the auditor finds
/// nothing.
fn finish<A: Walk>(audit: &mut Audit<'_, '_, A>, with_child: bool) {
    let found = catch_unwind(AssertUnwindSafe(|| {
        for (round, when) in [(4, "by the first sync"), (5, "though written after a sync")] {
            audit.world.touch(round, with_child);
            audit.child_is_apart();
            audit.saved(when);
        }
        let world = audit.world;
        world.machine.assert_clean();
        let children = world.children.lock().unwrap();
        let spaces: Vec<_> = children.iter().chain([&world.space, &world.other]).collect();
        let memory = world.space.memory();
        let mut scratch = vec![0; check::scratch_words(memory)];
        let checked = check::check(memory, &spaces, &mut scratch);
        drop(children);
        checked.unwrap_or_else(|violation| panic!("the auditor found: {violation}"));
    }));
    if let Err(panic) = found {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        audit.problems.push(text.unwrap_or_default());
    }
}
