//! The ordering rules of the parts, each named by the code that follows it.
//!
//! Outside of models, a rule is a constant and costs nothing. A model may leave out one rule
//! (`omit`), and then must fail.

use crate::atomic::{Ordering, fence as execute_fence};

/// An ordering rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rule {
    /// A CPU executes a fence between the announcement of its read section and the section's reads.
    FenceAtEntry,
    /// A thread that sees a section announced sees that the previous section has ended.
    ReleaseAtEntry,
    /// A thread that sees a CPU outside of sections sees all reads of the section.
    ReleaseAtLeave,
    /// A thread executes a fence between its unlinking and its read of the period's number.
    FenceBeforeNumber,
    /// A thread that looks at sections executes a fence after it has read the period's number.
    FenceBeforeLook,
    /// The number that a thread reads next is that of a period that has not begun.
    NextPeriod,
    /// A thread that sees a period passed sees that the sections before it have ended.
    AcquirePassed,
    /// A thread that continues a look passes on that the sections seen earlier have ended.
    PassOnLook,
    /// A thread that sees a CPU offline sees that its sections have ended.
    ReleaseAtOffline,
    /// A thread executes a fence between its stores to entries and its reads of roots.
    FenceBeforeRoots,
    /// A CPU executes a fence between the announcement of a switch and the load of the root.
    FenceBeforeLoad,
    /// A CPU that switches roots is announced as switching, whatever root it has loaded.
    AnnounceSwitch,
    /// A thread that sees the new root sees that the old one is no longer loaded.
    ReleaseAfterLoad,
    /// A kept tag becomes stale only by compare-exchange with the word that was read.
    ExchangeKept,
    /// A thread whose compare-exchange failed reads the word again.
    LookAgain,
    /// A CPU that finds its tag stale flushes it before the program runs.
    FlushStale,
    /// A CPU that serves a request for a root that it keeps lazily makes the tag stale.
    StaleWhenServed,
    /// A CPU that waits for another serves its own queue.
    ServeWhileWaiting,
    /// A request is written before its bit is set, and the CPU that sees the bit sees the request.
    ReleaseRequest,
    /// An interrupt that spares others has been sent, and is not one that a thread still owes.
    SentBeforeSpared,
    /// An interrupt spares others only until its handler has taken the requests.
    SentWhilePending,
    /// A CPU that comes online serves the requests whose interrupts it did not get.
    ServeAtOnline,
    /// A CPU takes the bits of its queue and clears them in one step.
    TakeInOneStep,
    /// A thread that sees its request done sees that the CPU has stopped using the translation.
    ReleaseDone,
    /// The number of the last full flush never falls.
    FlushedNeverFalls,
    /// A thread takes its request back from a queue before it reuses the slot.
    TakeBack,
}

/// Whether the code follows the rule.
#[cfg(not(all(test, loom)))]
#[inline(always)]
pub(crate) const fn holds(_rule: Rule) -> bool {
    true
}

/// Whether the code follows the rule: all but the one that the model leaves out.
#[cfg(all(test, loom))]
pub(crate) fn holds(rule: Rule) -> bool {
    omit::left_out() != Some(rule)
}

/// The ordering that a rule demands.
#[inline(always)]
pub(crate) fn order(rule: Rule, order: Ordering) -> Ordering {
    if holds(rule) { order } else { Ordering::Relaxed }
}

/// The fence that a rule demands.
#[inline(always)]
pub(crate) fn fence(rule: Rule) {
    if holds(rule) {
        execute_fence(Ordering::SeqCst);
    }
}

/// The rule that a model leaves out. Loom runs all threads of a model on the thread of its test.
#[cfg(all(test, loom))]
pub(crate) mod omit {
    use core::cell::Cell;
    use std::boxed::Box;
    use std::thread_local;

    use super::Rule;

    thread_local! {
        static LEFT_OUT: Cell<Option<Rule>> = const { Cell::new(None) };
    }

    pub(super) fn left_out() -> Option<Rule> {
        LEFT_OUT.get()
    }

    /// Runs every interleaving with at most `preemptions` preemptions, without one rule.
    pub(crate) fn check(
        rule: Option<Rule>,
        preemptions: Option<usize>,
        model: impl Fn() + Send + Sync + 'static,
    ) {
        LEFT_OUT.set(rule);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = preemptions;
        builder.check(model);
        LEFT_OUT.set(None);
    }

    /// Lends a value to all threads of one execution, which end before `with` returns.
    pub(crate) fn lend<T: 'static>(value: T, with: impl FnOnce(&'static T)) {
        let lent = Box::into_raw(Box::new(value));
        // SAFETY: the box lives until all threads have been joined. A model that fails leaks it.
        with(unsafe { &*lent });
        // SAFETY: as above; no reference to it is used any more.
        drop(unsafe { Box::from_raw(lent) });
    }
}
