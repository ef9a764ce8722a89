//! The signal that ends long calls.

use std::sync::atomic::{AtomicU64, Ordering};

use bindery::platform::{Cpu, CpuSet};
use parking_lot::Mutex;

/// No signal is to come.
const NEVER: u64 = u64::MAX;

/// How many questions for a fatal signal are answered "no" yet.
pub(crate) struct Signals {
    left: AtomicU64,
    killed: Mutex<CpuSet>,
}

impl Default for Signals {
    fn default() -> Self {
        Self { left: AtomicU64::new(NEVER), killed: Mutex::default() }
    }
}

impl Signals {
    pub(crate) fn set(&self, questions: Option<u64>) {
        self.left.store(questions.unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// A signal kills the thread on this CPU, and every later one there.
    pub(crate) fn kill(&self, cpu: Cpu) {
        self.killed.lock().insert(cpu);
    }

    /// Whether the thread on this CPU was killed.
    pub(crate) fn has_killed(&self, cpu: Cpu) -> bool {
        self.killed.lock().contains(cpu)
    }

    /// Whether it has come; one question less until it does.
    pub(crate) fn waits(&self) -> bool {
        let fewer = |left| if left == NEVER { None } else { u64::checked_sub(left, 1) };
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) {
            Ok(_) => false,
            Err(left) => left == 0,
        }
    }
}
