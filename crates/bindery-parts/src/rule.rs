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
    /// A section inside another executes the fence that an interrupted entry still owes.
    FenceAtNestedEntry,
    /// A thread that looks at a section sees all that the CPU did before it announced or left it.
    AcquireSection,
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
    /// A thread that looks at a CPU offline sees all that the CPU did before.
    AcquireOffline,
    /// A thread executes a fence between its stores to entries and its reads of roots.
    FenceBeforeRoots,
    /// A thread executes a fence between its stores to the kernel's entries and its look at CPUs.
    FenceBeforeOnline,
    /// A CPU executes a fence between its announcement and its first use of the kernel's entries.
    FenceAtOnline,
    /// A CPU that comes online flushes what it kept while no thread asked it.
    FlushAtOnline,
    /// A thread that sees a CPU gone offline sees that it has stopped using translations.
    ReleaseGone,
    /// A thread that looks at a CPU gone offline sees all that the CPU did before.
    AcquireGone,
    /// A CPU executes a fence between the announcement of a switch and the load of the root.
    FenceBeforeLoad,
    /// A CPU that switches roots is announced as switching, whatever root it has loaded.
    AnnounceSwitch,
    /// A thread that sees the new root sees that the old one is no longer loaded.
    ReleaseAfterLoad,
    /// A thread that reads a root sees all that the CPU did before it announced the root.
    AcquireRoot,
    /// A thread that makes a tag stale sees the last use of it, also if it was kept twice.
    AcquireKept,
    /// A thread that reads the word again sees all that the CPU did before it changed the word.
    AcquireAgain,
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
    /// A CPU that takes a request sees the request, and the entries as the thread has left them.
    AcquireRequest,
    /// A thread that claims a slot sees that the last request in it has ended.
    AcquireSlot,
    /// A thread ends its request before it releases the slot.
    ReleaseSlot,
    /// A CPU that counts a flush of everything for a thread sees the thread's stores to entries.
    AcquireAsked,
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
    /// A thread whose request is done sees all that the CPU did before.
    AcquireDone,
    /// A thread that sees its flush done sees that the CPU has stopped using all translations.
    ReleaseFlushed,
    /// A thread whose flush is done sees all that the CPU did before.
    AcquireFlushed,
    /// The number of the last full flush never falls.
    FlushedNeverFalls,
    /// A thread takes its request back from a queue before it reuses the slot.
    TakeBack,
    /// A thread reads its word after it has locked the bucket.
    WordUnderLock,
    /// A thread that parks executes a fence between its count and its read of the word.
    FenceBeforeWord,
    /// A thread that unparks executes a fence between its change of the word and the count.
    FenceBeforeWaiters,
    /// A thread that finds its word changed sees all that the other did before the change.
    AcquireWord,
    /// A thread that locks a bucket sees the list as the last holder left it.
    ReleaseBucket,
    /// A thread that locks a bucket sees all that its last holder did before.
    AcquireBucket,
    /// A record is out of its list before it is marked as woken.
    UnlinkBeforeMark,
    /// A record is marked as woken before its thread is.
    MarkBeforeWake,
    /// A thread that unparks executes a fence between the mark and the state of the thread.
    FenceBeforeWake,
    /// A thread about to sleep executes a fence between its state and its read of the mark.
    FenceBeforeMark,
    /// A thread that sees its mark, and parks again, writes its record after the other did.
    ReleaseMark,
    /// A thread that sees its mark sees all that the other did before it unparked.
    AcquireMark,
    /// A thread that gives up leaves the list before it returns.
    LeaveList,
    /// A thread that gives up passes a wake-up on to the next.
    PassOn,
    /// Retired tags are collected before the generation is raised.
    CollectBeforeRaise,
    /// The generation is raised before the collected tags are freed.
    RaiseBeforeFree,
    /// A thread that takes a tag sees the generation in which it was freed.
    ReleaseFree,
    /// A thread that takes a tag sees all that the thread that freed it saw.
    AcquireFree,
    /// A thread that collects a tag sees that its address space has ended.
    ReleaseRetired,
    /// A thread that collects a tag sees all that was done before the tag was retired.
    AcquireRetired,
    /// A CPU reads the generation before it flushes, and stores what it read.
    GenerationBeforeFlush,
    /// A CPU compares its generation before it loads a tag.
    CheckAtLoad,
    /// A thread finds a free tag and takes it in one step.
    TakeTagInOneStep,
    /// One thread collects at a time.
    OneCollector,
    /// A thread that collects sees that the last one has freed its tags.
    ReleaseCollector,
    /// A thread that collects writes its list after the last one has read its own.
    AcquireCollector,
    /// A thread draws a ticket of a lock in one step, so that no other has the same one.
    DrawInOneStep,
    /// A thread that does not wait draws a ticket only if it is the one that is served.
    DrawOnlyIfFree,
    /// A thread whose turn it is sees the stores of the holders before.
    AcquireTurn,
    /// A thread that finds a lock free sees the stores of the holders before.
    AcquireFreeLock,
    /// A holder passes the turn on after its stores.
    ReleaseTurn,
    /// A waiter for a lock serves what the holder may wait for.
    RelaxWhileWaiting,
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::{Path, PathBuf};
    use std::string::String;
    use std::vec::Vec;
    use std::{format, fs};

    /// Orderings without a rule: no model shows what they prevent, and a comment at each says why.
    const EXCEPTIONS: [&str; 3] = [
        // A locked exchange of x86-64 is a fence of the machine, not of the memory model.
        "section.swap(word, Ordering::SeqCst);",
        "core::sync::atomic::compiler_fence(Ordering::SeqCst);",
        // The compiler must not move the hook that sends an interrupt.
        "let _ = self.pending.fetch_update(Ordering::Release, Ordering::Relaxed, sent);",
    ];

    fn files(folder: &Path) -> Vec<PathBuf> {
        let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let inside = |path: PathBuf| if path.is_dir() { files(&path) } else { Vec::from([path]) };
        paths.flat_map(inside).collect()
    }

    /// The text of the models, and of the code.
    fn texts() -> (String, String) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let is = |path: &PathBuf, part: &str| path.to_str().unwrap().contains(part);
        let of = |files: Vec<PathBuf>| {
            files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
        };
        let (models, others): (Vec<_>, Vec<_>) =
            files(&source).into_iter().partition(|path| is(path, "loom_model"));
        let code = others.into_iter().filter(|path| !is(path, "tests") && !is(path, "rule.rs"));
        (of(models), of(code.collect()))
    }

    #[test]
    fn a_model_leaves_out_each_rule() {
        let (models, code) = texts();
        let rules = include_str!("rule.rs").split_once("enum Rule {\n").unwrap().1;
        let rules = rules.split_once("\n}").unwrap().0.lines().map(str::trim);
        for rule in rules.filter(|line| !line.starts_with("///")) {
            let rule = rule.trim_end_matches(',');
            assert!(models.contains(&format!("Some(Rule::{rule})")), "no model omits {rule}");
            let is_used = code.contains(&format!("Rule::{rule}"));
            assert!(is_used, "the code does not follow {rule}");
        }
    }

    #[test]
    fn each_ordering_names_its_rule() {
        let (_, code) = texts();
        let code = code.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let is_strong = |line: &&str| {
            ["Acquire", "Release", "AcqRel", "SeqCst"]
                .iter()
                .any(|order| line.contains(&format!("Ordering::{order}")))
        };
        for line in code.filter(is_strong) {
            let is_named = line.contains("rule::order(Rule::") || EXCEPTIONS.contains(&line);
            assert!(is_named, "an ordering without a rule: {line}");
        }
    }
}
