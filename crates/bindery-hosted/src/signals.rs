//! The signals that end long calls.

use std::sync::atomic::{AtomicU64, Ordering};

use bindery::platform::{Cpu, CpuSet};
use parking_lot::Mutex;

/// No signal is to come.
const NEVER: u64 = u64::MAX;

/// How many questions for a signal are answered "no" yet.
pub(crate) struct Signals {
    /// For one that is fatal.
    left: AtomicU64,
    /// For one that is not.
    others: AtomicU64,
    killed: Mutex<CpuSet>,
}

impl Default for Signals {
    fn default() -> Self {
        let [left, others] = [NEVER; 2].map(AtomicU64::new);
        Self { left, others, killed: Mutex::default() }
    }
}

impl Signals {
    pub(crate) fn set(&self, questions: Option<u64>) {
        self.left.store(questions.unwrap_or(NEVER), Ordering::Relaxed);
    }

    pub(crate) fn set_other(&self, questions: Option<u64>) {
        self.others.store(questions.unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// A signal kills the thread on this CPU, and every later one there.
    pub(crate) fn kill(&self, cpu: Cpu) {
        self.killed.lock().insert(cpu);
    }

    /// Whether the thread on this CPU was killed.
    pub(crate) fn has_killed(&self, cpu: Cpu) -> bool {
        self.killed.lock().contains(cpu)
    }

    /// Whether a fatal one has come; one question less until it does.
    pub(crate) fn waits(&self) -> bool {
        has_come(&self.left)
    }

    /// As [`Signals::waits`], for one that is not fatal.
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
