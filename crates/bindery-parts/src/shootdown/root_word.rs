//! [`RootWord`]: the root that a CPU has loaded.
//!
//! ```text
//! run(P)    Nothing -> Switches -> Runs(P)        load of P in between
//! keep      Runs(P) -> Switches -> Keeps(P)       load of the kernel's root in between
//! another CPU          Keeps(P) -> Stale(P)       in place of an interrupt
//! run(P)    Stale(P) -> Switches -> Runs(P)       load of P with a flush in between
//! ```
//!
//! Only the CPU itself changes its word, except from `Keeps` to `Stale`. That is a
//! compare-exchange, so it fails if the CPU begins to switch, and the thread then interrupts the
//! CPU.

use bindery::addr::Frame;

use crate::atomic::{AtomicU64, Ordering, constructor};
use crate::rule::{self, Rule};

/// The state of a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// No program's root is loaded, and no tag is kept.
    Nothing,
    /// The CPU is about to load another root, or has just done so.
    Switches,
    /// The root is loaded.
    Runs(Frame),
    /// The kernel's root is loaded; the translations of this one are valid under its tag.
    Keeps(Frame),
    /// The kernel's root is loaded; the translations of this one must be flushed.
    Stale(Frame),
}

impl State {
    const TAG_BITS: u32 = 3;

    fn to_word(self) -> u64 {
        let of = |tag, root: Frame| u64::from(root.0) << Self::TAG_BITS | tag;
        match self {
            Self::Nothing => 0,
            Self::Switches => 1,
            Self::Runs(root) => of(2, root),
            Self::Keeps(root) => of(3, root),
            Self::Stale(root) => of(4, root),
        }
    }

    fn of_word(word: u64) -> Self {
        let root = Frame((word >> Self::TAG_BITS) as u32);
        match word & ((1 << Self::TAG_BITS) - 1) {
            0 => Self::Nothing,
            2 => Self::Runs(root),
            3 => Self::Keeps(root),
            4 => Self::Stale(root),
            // The safe reading of any other value.
            _ => Self::Switches,
        }
    }
}

/// How a thread makes sure that a CPU uses no old translation of a root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claim {
    /// It asks the CPU.
    Ask,
    /// The CPU flushes before it loads the root again.
    Spared,
    /// The CPU had left the root.
    Left,
}

#[repr(align(128))]
#[derive(Debug)]
pub(super) struct RootWord(AtomicU64);

impl RootWord {
    constructor! {
        pub(super) const fn new() -> Self {
            Self(AtomicU64::new(0))
        }
    }

    /// The state, as the CPU itself sees it.
    pub(super) fn state(&self) -> State {
        State::of_word(self.0.load(Ordering::Relaxed))
    }

    /// Announces a switch before any later load of the CPU or its walker. Returns the state before.
    pub(super) fn begin_switch(&self) -> State {
        // Relaxed: the fence after it and that of the thread which made the tag stale order the
        // thread's stores to entries before the flush. A thread that sees the switch asks in any
        // case.
        let was = if rule::holds(Rule::AnnounceSwitch) {
            self.0.swap(State::Switches.to_word(), Ordering::Relaxed)
        } else {
            self.0.load(Ordering::Relaxed)
        };
        rule::fence(Rule::FenceBeforeLoad);
        State::of_word(was)
    }

    /// Ends a switch. Release: the old root is no longer loaded.
    pub(super) fn end_switch(&self, state: State) {
        let order = rule::order(Rule::ReleaseAfterLoad, Ordering::Release);
        self.0.store(state.to_word(), order);
    }

    /// Called by a thread that has written entries below `root` and executed a fence.
    pub(super) fn claim_flush(&self, root: Frame) -> Claim {
        let mut word = self.0.load(rule::order(Rule::AcquireRoot, Ordering::Acquire));
        loop {
            match State::of_word(word) {
                State::Switches => return Claim::Ask,
                State::Runs(loaded) if loaded == root => return Claim::Ask,
                State::Keeps(kept) if kept == root => match self.make_stale(word, root) {
                    Ok(_) => return Claim::Spared,
                    Err(now) if rule::holds(Rule::LookAgain) => word = now,
                    Err(_) => return Claim::Spared,
                },
                State::Stale(stale) if stale == root => return Claim::Spared,
                State::Nothing | State::Runs(_) | State::Keeps(_) | State::Stale(_) => {
                    return Claim::Left;
                }
            }
        }
    }

    fn make_stale(&self, word: u64, root: Frame) -> Result<u64, u64> {
        let stale = State::Stale(root).to_word();
        if !rule::holds(Rule::ExchangeKept) {
            self.0.store(stale, Ordering::Relaxed);
            return Ok(word);
        }
        // Without release: the CPU reads the word before a fence, and the thread has executed one.
        let kept = rule::order(Rule::AcquireKept, Ordering::Acquire);
        let failed = rule::order(Rule::AcquireAgain, Ordering::Acquire);
        self.0.compare_exchange(word, stale, kept, failed)
    }
}
