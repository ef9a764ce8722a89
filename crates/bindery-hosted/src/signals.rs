//! The signals that end long calls.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[cfg(doc)]
use bindery::Platform;
use bindery::platform::Cpu;

use crate::{Machine, Walk};

impl<A: Walk> Machine<A> {
    /// Sends a fatal signal to the running thread: [`Platform::fatal_signal`] returns false
    /// `questions` more times, and true from then on. `None` cancels it. Until then no thread
    /// sleeps in [`Platform::park`], and sleeping threads wake up, because a sleeping thread would
    /// not poll for the signal.
    pub fn fatal_signal_after(&self, questions: Option<u64>) {
        self.shared.signals.set(questions);
        self.shared.parking.interrupt(|_| true);
    }

    /// Like [`Machine::fatal_signal_after`], for a signal that is not fatal ([`Platform::signal`]).
    pub fn signal_after(&self, questions: Option<u64>) {
        self.shared.signals.set_other(questions);
        self.shared.parking.interrupt(|_| true);
    }

    /// Kills the thread on `cpu`: [`Platform::fatal_signal`] returns true there from now on. If
    /// that thread is parked, it wakes up and never sleeps in [`Platform::park`] again. Panics if
    /// the CPU does not exist.
    pub fn kill(&self, cpu: Cpu) {
        self.shared.signals.kill(cpu);
        self.shared.parking.interrupt(|other| other == cpu);
    }
}

/// No signal will come.
const NEVER: u64 = u64::MAX;

/// The number of signal checks that still return false.
pub(crate) struct Signals {
    /// For a fatal signal.
    left: AtomicU64,
    /// For other signals.
    others: AtomicU64,
    /// By CPU, whether its thread was killed.
    killed: Box<[AtomicBool]>,
}

impl Signals {
    pub(crate) fn new(cpus: u16) -> Self {
        let [left, others] = [NEVER; 2].map(AtomicU64::new);
        Self { left, others, killed: (0..cpus).map(|_| AtomicBool::new(false)).collect() }
    }

    pub(crate) fn set(&self, questions: Option<u64>) {
        self.left.store(questions.unwrap_or(NEVER), Ordering::Relaxed);
    }

    pub(crate) fn set_other(&self, questions: Option<u64>) {
        self.others.store(questions.unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// Kills the thread on this CPU and every later thread there.
    pub(crate) fn kill(&self, cpu: Cpu) {
        self.killed[usize::from(cpu.0)].store(true, Ordering::Relaxed);
    }

    /// Whether the thread on this CPU was killed.
    pub(crate) fn has_killed(&self, cpu: Cpu) -> bool {
        self.killed[usize::from(cpu.0)].load(Ordering::Relaxed)
    }

    /// Whether a thread on this CPU must not sleep, because a signal is pending or because the
    /// thread must keep checking for a counted signal.
    pub(crate) fn keep_awake(&self, cpu: Cpu) -> bool {
        let is_counted = |left: &AtomicU64| left.load(Ordering::Relaxed) != NEVER;
        is_counted(&self.left) || is_counted(&self.others) || self.has_killed(cpu)
    }

    /// Whether a fatal signal is pending; until then, counts each check.
    pub(crate) fn waits(&self) -> bool {
        has_come(&self.left)
    }

    /// Like [`Signals::waits`], for other signals.
    pub(crate) fn other_waits(&self) -> bool {
        has_come(&self.others)
    }
}

fn has_come(left: &AtomicU64) -> bool {
    let fewer = |left| if left == NEVER { None } else { u64::checked_sub(left, 1) };
    match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) {
        Ok(_) => false,
        Err(left) => left == 0,
    }
}
