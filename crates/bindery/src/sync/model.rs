//! The threads and shared state of a model: under loom, which runs every interleaving of a small
//! scenario, or shuttle, which runs random interleavings. The models run under both.
//!
//! Shuttle does not model weak memory: each load reads the latest store. So a model without a
//! required ordering fails only under loom and is ignored under shuttle.

#[cfg(loom)]
pub(crate) use loom::{cell, sync, thread};
#[cfg(shuttle)]
pub(crate) use shuttle::{sync, thread};

pub(crate) use super::loom_model_threads::beside;

/// Runs every interleaving with at most `preemptions` preemptions; `None` means any number.
#[cfg(loom)]
pub(crate) fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// Runs random interleavings: the number in the environment variable `SCHEDULES`, or 1,000. The
/// number of preemptions is unbounded.
#[cfg(shuttle)]
pub(crate) fn check(_: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let schedules = std::env::var("SCHEDULES")
        .map_or(1_000, |count| count.parse().expect("`SCHEDULES` is a number"));
    shuttle::check_random(model, schedules);
}

#[cfg(shuttle)]
pub(crate) mod cell {
    use core::cell;

    use shuttle::thread;

    /// The beginning of loom's panic message.
    const RACE: &str = "Causality violation: Concurrent ";

    /// Memory in which a write must not overlap another access, with loom's interface.
    pub(crate) struct UnsafeCell<T> {
        value: cell::UnsafeCell<T>,
        readers: cell::Cell<u32>,
        is_written: cell::Cell<bool>,
    }

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            let (readers, is_written) = (cell::Cell::new(0), cell::Cell::new(false));
            Self { value: cell::UnsafeCell::new(value), readers, is_written }
        }

        /// Reads. Other threads run before the read, and panic if they write.
        pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            assert!(!self.is_written.get(), "{RACE}read and write accesses");
            self.readers.set(self.readers.get() + 1);
            thread::yield_now();
            let result = read(self.value.get());
            self.readers.set(self.readers.get() - 1);
            result
        }

        /// Writes. Other threads run before the write, and panic if they read or write.
        pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            assert!(!self.is_written.get(), "{RACE}write accesses");
            assert!(self.readers.get() == 0, "{RACE}read and write accesses");
            self.is_written.set(true);
            thread::yield_now();
            let result = write(self.value.get());
            self.is_written.set(false);
            result
        }
    }
}
