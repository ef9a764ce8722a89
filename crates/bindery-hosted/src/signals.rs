//! The signal that ends long calls.

use std::sync::atomic::{AtomicU64, Ordering};

/// No signal is to come.
const NEVER: u64 = u64::MAX;

/// How many questions for a fatal signal are answered "no" yet.
pub(crate) struct Signals(AtomicU64);

impl Default for Signals {
    fn default() -> Self {
        Self(AtomicU64::new(NEVER))
    }
}

impl Signals {
    pub(crate) fn set(&self, questions: Option<u64>) {
        self.0.store(questions.unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// Whether it has come; one question less until it does.
    pub(crate) fn waits(&self) -> bool {
        let fewer = |left| if left == NEVER { None } else { u64::checked_sub(left, 1) };
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) {
            Ok(_) => false,
            Err(left) => left == 0,
        }
    }
}
