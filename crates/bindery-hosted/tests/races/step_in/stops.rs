//! The roles of threads: the calls of one run, the held one, and the waiting one.
//!
//! A thread has one of three roles. Its call passes numbered *steps*: every outermost `enter_read`
//! and `leave_read`, every `invalidate`, every release of a table lock and of a mutex, every
//! `relax` and every `park`, and every call of the pager. At the chosen step, the thread is held
//! until the conductor releases it.
//!
//! Whether a call waits for a held one is counted, not timed. While one call is held, only the
//! other call runs, so a lock that the other call cannot acquire belongs to the held call.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::abort;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bindery::platform::Cpu;
use bindery_hosted::{Machine, Walk};

/// Rounds of `relax` after which a call counts as waiting for the held call.
const PATIENCE: u32 = 256;
/// The time after which calls that neither end nor wait count as hung.
const HANGS: Duration = Duration::from_secs(120);

/// A step of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    EnterRead,
    LeaveRead,
    Invalidate,
    TableUnlocked,
    MutexUnlocked,
    Relax,
    Park,
    Pager,
    SpinLock,
    /// Between two steps of a call.
    Blocked,
}

/// The place where a call is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HoldAt {
    Nowhere,
    /// At the step of this number, from 0.
    Number(u32),
    /// At the first step of this kind.
    First(Step),
    /// Before the next acquisition of a watched spin lock ([`Stops::watch`]), after this number of
    /// acquisitions.
    SpinLock(u32),
}

/// The role of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Call A, which is held.
    Held,
    /// Call B, which runs while A is held.
    Meanwhile,
    /// Call C, which holds a table lock until call A waits for it.
    Obstacle,
}

/// The progress of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    #[default]
    Running,
    Held,
    /// The call has waited for another call.
    Waiting,
    Finished,
}

#[derive(Default)]
struct Actor {
    phase: Phase,
    /// Whether the call is held inside a read section.
    inside: bool,
    go_on: bool,
    step: Option<Step>,
    steps: u32,
}

/// The state of one run.
#[derive(Default)]
pub struct Stops {
    actors: Mutex<[Actor; 3]>,
    changed: Condvar,
    /// Addresses of spin locks.
    watched: Mutex<Vec<usize>>,
}

/// A thread's role.
struct Here {
    stops: Arc<Stops>,
    role: Role,
    hold_at: HoldAt,
    passed: u32,
    relaxed: u32,
    depth: u32,
}

thread_local! {
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
    static AWAKE: Cell<bool> = const { Cell::new(false) };
    static IN_STEP: Cell<bool> = const { Cell::new(false) };
    /// The spin locks that this thread has acquired, if they are being recorded.
    static NOTED: RefCell<Option<Vec<usize>>> = const { RefCell::new(None) };
}

impl Stops {
    /// Runs `role` on this thread. `None` if the call panicked.
    pub fn act<R>(
        self: &Arc<Self>,
        role: Role,
        hold_at: HoldAt,
        call: impl FnOnce() -> R,
    ) -> Option<R> {
        let here = Here { stops: Arc::clone(self), role, hold_at, passed: 0, relaxed: 0, depth: 0 };
        HERE.set(Some(here));
        let result = catch_unwind(AssertUnwindSafe(call));
        let steps = HERE.take().map_or(0, |here| here.passed);
        self.change(role, |actor| {
            actor.phase = Phase::Finished;
            if actor.step.is_none() {
                actor.steps = steps;
            }
        });
        result.ok()
    }

    /// Runs `held` on one CPU, holds it at a step and runs `other` on another CPU in between.
    /// Returns the progress of `other` when `held` was released; `None` if `held` never reached the
    /// step.
    pub fn meet<A: Walk>(
        self: &Arc<Self>,
        machine: &Machine<A>,
        hold_at: HoldAt,
        held: &(dyn Fn() + Sync),
        other: &(dyn Fn() + Sync),
    ) -> Option<Phase> {
        let act = |role, cpu, hold_at, call: &(dyn Fn() + Sync)| {
            machine.on_cpu(Cpu(cpu), || self.act(role, hold_at, call)).expect("no panic");
        };
        thread::scope(|scope| {
            scope.spawn(|| act(Role::Held, 0, hold_at, held));
            let phase = (self.wait_for(Role::Held) == Phase::Held).then(|| {
                let second = scope.spawn(|| act(Role::Meanwhile, 1, HoldAt::Nowhere, other));
                let phase = self.wait_for(Role::Meanwhile);
                self.release(Role::Held);
                second.join().unwrap();
                phase
            });
            self.release(Role::Held);
            phase
        })
    }

    /// Watches the spin locks that `call` acquires on this thread.
    pub fn watch(&self, call: impl FnOnce()) {
        NOTED.set(Some(Vec::new()));
        call();
        *self.watched.lock().unwrap() = NOTED.take().unwrap_or_default();
    }

    fn change(&self, role: Role, change: impl FnOnce(&mut Actor)) {
        let mut actors = self.actors.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut actors[role as usize]);
        drop(actors);
        self.changed.notify_all();
    }

    /// Waits until the call is held, is itself waiting, or has returned.
    pub fn wait_for(&self, role: Role) -> Phase {
        let actors = self.actors.lock().unwrap_or_else(PoisonError::into_inner);
        let (actors, timeout) = self
            .changed
            .wait_timeout_while(actors, HANGS, |actors| {
                actors[role as usize].phase == Phase::Running
            })
            .unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            eprintln!("the call of role {role:?} hangs");
            abort();
        }
        actors[role as usize].phase
    }

    /// Releases the call and never holds it again.
    pub fn release(&self, role: Role) {
        self.change(role, |actor| {
            actor.go_on = true;
            if actor.phase == Phase::Held {
                actor.phase = Phase::Running;
            }
        });
    }

    /// The step where the call was held, and the number of earlier steps or, if the call was never
    /// held, of all steps.
    pub fn steps(&self, role: Role) -> (Option<Step>, u32) {
        let actors = self.actors.lock().unwrap_or_else(PoisonError::into_inner);
        (actors[role as usize].step, actors[role as usize].steps)
    }

    fn hold(&self, role: Role, step: Step, number: u32, inside: bool) {
        let mut actors = self.actors.lock().unwrap_or_else(PoisonError::into_inner);
        let actor = &mut actors[role as usize];
        if actor.go_on {
            return;
        }
        (actor.phase, actor.inside) = (Phase::Held, inside);
        (actor.step, actor.steps) = (Some(step), number);
        self.changed.notify_all();
        let actors = self.changed.wait_while(actors, |actors| !actors[role as usize].go_on);
        drop(actors);
    }

    fn waits(&self, role: Role) {
        self.change(role, |actor| actor.phase = Phase::Waiting);
    }

    fn somebody_is_held_inside(&self) -> bool {
        let actors = self.actors.lock().unwrap_or_else(PoisonError::into_inner);
        actors.iter().any(|actor| actor.phase == Phase::Held && actor.inside)
    }
}

/// Runs a call that must not sleep. Panics if the call might sleep.
pub fn awake<R>(call: impl FnOnce() -> R) -> R {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            AWAKE.set(false);
        }
    }
    AWAKE.set(true);
    let _ends = Ends;
    call()
}

/// Runs a step of a call, which looks at the mutex before it takes it. Panics if it sleeps for a
/// mutex of the held call.
pub fn in_step<R>(step: impl FnOnce() -> R) -> R {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            IN_STEP.set(false);
        }
    }
    IN_STEP.set(true);
    let _ends = Ends;
    step()
}

/// The calling thread might sleep.
pub fn might_sleep() {
    assert!(!AWAKE.get(), "a call that must not sleep might");
}

/// The calling thread passes a step and is held there if it is the chosen step.
pub fn pass(step: Step) {
    let chosen = HERE.with_borrow_mut(|here| {
        let here = here.as_mut()?;
        let number = here.passed;
        here.passed += 1;
        let chosen = match here.hold_at {
            HoldAt::Nowhere | HoldAt::SpinLock(_) => false,
            HoldAt::Number(chosen) => chosen == number,
            HoldAt::First(chosen) => chosen == step,
        };
        if !chosen {
            return None;
        }
        here.hold_at = HoldAt::Nowhere;
        Some((Arc::clone(&here.stops), here.role, number, here.depth > 0))
    });
    if let Some((stops, role, number, inside)) = chosen {
        stops.hold(role, step, number, inside);
    }
}

/// The calling thread is about to acquire the spin lock at this address. The acquisition does not
/// count as a step.
pub fn takes_spin_lock(address: usize) {
    NOTED.with_borrow_mut(|noted| noted.iter_mut().for_each(|noted| noted.push(address)));
    let chosen = HERE.with_borrow_mut(|here| {
        let here = here.as_mut()?;
        let HoldAt::SpinLock(left) = here.hold_at else { return None };
        if !here.stops.watched.lock().unwrap().contains(&address) {
            return None;
        }
        here.hold_at = left.checked_sub(1).map_or(HoldAt::Nowhere, HoldAt::SpinLock);
        (left == 0).then(|| (Arc::clone(&here.stops), here.role, here.passed, here.depth > 0))
    });
    if let Some((stops, role, number, inside)) = chosen {
        stops.hold(role, Step::SpinLock, number, inside);
    }
}

/// The calling thread enters a read section.
pub fn enters() {
    if depth() == 0 {
        pass(Step::EnterRead);
    }
    change_depth(1);
}

/// The calling thread has left a read section.
pub fn left() {
    change_depth(-1);
    if depth() == 0 {
        pass(Step::LeaveRead);
    }
}

fn depth() -> u32 {
    HERE.with_borrow(|here| here.as_ref().map_or(0, |here| here.depth))
}

fn change_depth(by: i32) {
    HERE.with_borrow_mut(|here| {
        if let Some(here) = here {
            here.depth = here.depth.wrapping_add_signed(by);
        }
    });
}

/// The role of this thread and the run to which it belongs.
fn playing() -> Option<(Arc<Stops>, Role)> {
    HERE.with_borrow(|here| here.as_ref().map(|here| (Arc::clone(&here.stops), here.role)))
}

/// The calling thread waits one round.
pub fn relaxes() {
    pass(Step::Relax);
    let waiting = HERE.with_borrow_mut(|here| {
        let here = here.as_mut()?;
        here.relaxed += 1;
        (here.relaxed == PATIENCE).then(|| (Arc::clone(&here.stops), here.role))
    });
    if let Some((stops, role)) = waiting {
        stops.waits(role);
    }
}

/// Called by a thread that is about to sleep. The thread sleeps only if `unchanged` still returns
/// true once it is allowed to continue.
pub fn parks(unchanged: impl Fn() -> bool) {
    pass(Step::Park);
    if unchanged() {
        blocks();
    }
}

/// The calling thread found a lock held and is about to sleep until it acquires the lock.
pub fn blocks() {
    if let Some((stops, role)) = playing() {
        stops.waits(role);
    }
}

/// The calling thread found a mutex held.
pub fn blocks_at_mutex() {
    let is_held = |stops: &Stops| {
        let actors = stops.actors.lock().unwrap_or_else(PoisonError::into_inner);
        actors[Role::Held as usize].phase == Phase::Held
    };
    let sleeps = IN_STEP.get()
        && playing().is_some_and(|(stops, role)| role == Role::Meanwhile && is_held(&stops));
    assert!(!sleeps, "a step sleeps for a mutex that was taken before it");
    blocks();
}

/// The calling thread is about to wait for a grace period.
pub fn synchronizes() {
    if let Some((stops, role)) = playing().filter(|(stops, _)| stops.somebody_is_held_inside()) {
        stops.waits(role);
    }
}
