//! A scheduler of one CPU with strict priorities: only the ready thread with the highest priority
//! runs, until it sleeps.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};

use bindery::sync::{LockApi05, RawLock};

/// The number of rounds that a thread may spin while no other thread runs. Beyond that, the awaited
/// thread will never run.
const SPINS: u64 = 10_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Ready,
    /// Parked on the word at this address.
    Parked(usize),
    /// Sleeps until this number of steps has passed.
    Sleeping(u64),
    Finished,
}

#[derive(Clone, Copy)]
struct Thread {
    priority: u32,
    state: State,
}

/// The outcome of the run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// All threads have finished, after this number of steps.
    Finished(u64),
    Stuck(String),
}

struct Inside {
    threads: Vec<Thread>,
    running: usize,
    /// The number of points at which a thread could be preempted, and of ticks without a ready
    /// thread.
    steps: u64,
    limit: u64,
    spins: u64,
    end: Option<End>,
}

pub struct Scheduler {
    inside: Mutex<Inside>,
    changed: Condvar,
}

thread_local! {
    static HERE: RefCell<Option<(Arc<Scheduler>, usize)>> = const { RefCell::new(None) };
    /// The nesting depth of this thread's read sections and spin locks, in which it is not
    /// preempted.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

impl Inside {
    fn end_with(&mut self, end: End) {
        self.end.get_or_insert(end);
    }

    /// Selects the thread to run.
    fn choose(&mut self) {
        self.spins = 0;
        if self.steps > self.limit {
            self.end_with(End::Stuck(format!("no end after {} steps", self.steps)));
        }
        let sleeping = |thread: &Thread| match thread.state {
            State::Sleeping(until) => Some(until),
            _ => None,
        };
        let ready = |thread: &Thread| thread.state == State::Ready;
        if !self.threads.iter().any(ready)
            && let Some(first) = self.threads.iter().filter_map(sleeping).min()
        {
            self.steps = self.steps.max(first);
        }
        for thread in &mut self.threads {
            if sleeping(thread).is_some_and(|until| until <= self.steps) {
                thread.state = State::Ready;
            }
        }
        let all = self.threads.iter().enumerate().filter(|(_, thread)| ready(thread));
        // Among equal priorities, the running thread continues.
        let best = all.max_by_key(|(number, thread)| (thread.priority, *number == self.running));
        match best {
            Some((number, _)) => self.running = number,
            None if self.threads.iter().all(|thread| thread.state == State::Finished) => {
                let steps = self.steps;
                self.end_with(End::Finished(steps));
            }
            None => self.end_with(End::Stuck("everybody sleeps, and nobody will wake them".into())),
        }
    }
}

impl Scheduler {
    /// For threads with these priorities; the highest number is the highest priority.
    pub fn new(priorities: &[u32], limit: u64) -> Arc<Self> {
        let thread = |priority: &u32| Thread { priority: *priority, state: State::Ready };
        let threads = priorities.iter().map(thread).collect();
        let mut inside = Inside { threads, running: 0, steps: 0, limit, spins: 0, end: None };
        inside.choose();
        Arc::new(Self { inside: Mutex::new(inside), changed: Condvar::new() })
    }

    /// Runs `work` as the thread with that number.
    pub fn run(self: &Arc<Self>, number: usize, work: impl FnOnce()) {
        HERE.set(Some((Arc::clone(self), number)));
        self.change(number, |_| ());
        let done = catch_unwind(AssertUnwindSafe(work));
        HERE.set(None);
        self.change(number, |inside| {
            inside.threads[number].state = State::Finished;
            if done.is_err() {
                inside.end_with(End::Stuck("a thread has panicked".into()));
            }
        });
    }

    /// Waits until the run has ended.
    pub fn wait(&self) -> End {
        let inside = self.inside.lock().unwrap();
        let inside = self.changed.wait_while(inside, |inside| inside.end.is_none()).unwrap();
        inside.end.clone().unwrap()
    }

    /// Applies a change by the running thread and switches to the thread that should run next.
    /// Returns when the scheduler selects the caller again; never returns if the run ends first.
    fn change(&self, me: usize, change: impl FnOnce(&mut Inside)) {
        let mut inside = self.inside.lock().unwrap();
        change(&mut inside);
        inside.choose();
        self.changed.notify_all();
        if inside.threads[me].state == State::Finished {
            return;
        }
        let mine = |inside: &mut Inside| inside.running != me || inside.end.is_some();
        let _inside = self.changed.wait_while(inside, mine).unwrap();
    }
}

fn here<R>(work: impl FnOnce(&Arc<Scheduler>, usize) -> R) -> Option<R> {
    let here = HERE.with_borrow(Clone::clone);
    here.map(|(scheduler, me)| work(&scheduler, me))
}

/// A point at which the calling thread may be preempted, except in a non-preemptible section.
pub fn point() {
    if DEPTH.get() == 0 {
        here(|scheduler, me| scheduler.change(me, |inside| inside.steps += 1));
    }
}

/// Disables preemption of the calling thread.
pub fn enter() {
    point();
    DEPTH.set(DEPTH.get() + 1);
}

/// Ends a section that `enter` began.
pub fn leave() {
    DEPTH.set(DEPTH.get() - 1);
    point();
}

/// The calling thread sleeps for this number of steps.
pub fn sleep(steps: u64) {
    here(|scheduler, me| {
        scheduler.change(me, |inside| {
            inside.threads[me].state = State::Sleeping(inside.steps + steps);
        });
    });
}

/// The calling thread sleeps on a word if the word is still `unchanged`.
pub fn park(word: usize, unchanged: impl FnOnce() -> bool) {
    assert_eq!(DEPTH.get(), 0, "a thread sleeps where nobody may preempt it");
    here(|scheduler, me| {
        scheduler.change(me, |inside| {
            inside.steps += 1;
            if unchanged() {
                inside.threads[me].state = State::Parked(word);
            }
        });
    });
}

/// Makes the threads that sleep on the word ready.
pub fn unpark(word: usize) {
    here(|scheduler, _| {
        let mut inside = scheduler.inside.lock().unwrap();
        for thread in &mut inside.threads {
            if thread.state == State::Parked(word) {
                thread.state = State::Ready;
            }
        }
    });
    point();
}

/// The calling thread spins for one round while no other thread runs.
pub fn spin() {
    here(|scheduler, me| {
        let mut inside = scheduler.inside.lock().unwrap();
        inside.spins += 1;
        if inside.spins > SPINS {
            let priority = inside.threads[me].priority;
            inside.end_with(End::Stuck(format!("livelock: a thread of priority {priority} spins")));
            drop(inside);
            scheduler.change(me, |_| ());
        }
    });
}

/// A lock that the scheduler knows. With `SLEEPS`, a waiting thread sleeps. Without it, the holder
/// is never preempted.
pub struct Lock<const SLEEPS: bool>(LockApi05<parking_lot::RawMutex>);

impl<const SLEEPS: bool> Lock<SLEEPS> {
    fn is_taken(&self) -> bool {
        // SAFETY: 1. the state belongs to this acquisition. 2. This thread made the acquisition.
        let release = |state| unsafe { self.0.unlock(state) };
        self.0.try_lock().map(release).is_none()
    }
}

// SAFETY: the inner lock meets the contract.
unsafe impl<const SLEEPS: bool> RawLock for Lock<SLEEPS> {
    const UNLOCKED: Self = Self(LockApi05::UNLOCKED);
    type State = <LockApi05<parking_lot::RawMutex> as RawLock>::State;

    fn lock(&self) -> Self::State {
        if SLEEPS {
            point()
        } else {
            enter()
        }
        loop {
            if let Some(guard) = self.0.try_lock() {
                return guard;
            }
            assert!(SLEEPS, "the holder of a spin lock was preempted");
            park(std::ptr::from_ref(self).addr(), || self.is_taken());
        }
    }

    fn try_lock(&self) -> Option<Self::State> {
        if !SLEEPS {
            enter();
        }
        let locked = self.0.try_lock();
        if locked.is_none() && !SLEEPS {
            leave();
        }
        locked
    }

    unsafe fn unlock(&self, state: Self::State) {
        // SAFETY: 1. and 2. are the caller's promises.
        unsafe { self.0.unlock(state) };
        if SLEEPS {
            unpark(std::ptr::from_ref(self).addr());
        } else {
            leave();
        }
    }
}
