//! Linux as the judge: a process on the host's Linux and the hosted machine run the same random
//! sequences of memory calls, in the formats of three architectures. Results, errno, mappings with
//! their flags, residence, accounts and contents agree after every operation, and the auditor finds
//! nothing.
//!
//! `ORACLE_SEQUENCES` (or `PROPTEST_CASES`) sets the number of sequences. `ORACLE_SEED` sets their
//! first seed; the default is fixed, and `random` selects a new one for each run. The test prints
//! the seed. It reduces sequences with differences and prints their operations. `regressions.rs`
//! holds the differences found in the past, `differences.rs` the intentional differences.
//!
//! Linux must be 6.18 or newer, with large folios on request and none in shared memory (the default
//! of distributions). The test must run as root, because it raises limits. Otherwise it prints why
//! it is skipped.
//!
//! | file | what |
//! |---|---|
//! | `place`, `names`, `operation` | where sequences run, and what they are made of |
//! | `generate` | sequences at random |
//! | `linux/` | the process that runs them on Linux, and looks at itself |
//! | `ours/` | the hosted machine that runs them; all that knows the core's interface |
//! | `observation`, `words` | what is seen, the same for both; the way between processes |
//! | `compare`, `differences` | what differs, in words; what may |
//! | `swapped` | how pages in swap are compared with pages in memory |
//! | `run`, `regressions` | many sequences; those that were found once |
//! | `special` | calls on `[vvar]` and `[vdso]` |

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

extern crate bindery_scenarios as support;

mod compare;
mod differences;
mod generate;
mod linux;
mod names;
mod observation;
mod operation;
mod ours;
mod place;
mod regressions;
mod run;
mod special;
mod swapped;
mod words;

/// The judge of the random sequences: a second process of this program runs this test, which
/// otherwise does nothing.
#[test]
fn the_judge() {
    linux::serve();
}

#[test]
fn linux_does_the_same_when_asked_twice() {
    let count = std::env::var("LINUX").map_or(100, |n| n.parse().unwrap());
    run::linux_agrees_with_itself(run::Theme::Memory, count);
    run::linux_agrees_with_itself(run::Theme::Userfaults, count);
}

#[test]
fn random_sequences_agree_with_linux() {
    run::random_sequences(run::Theme::Memory, 1000);
}

#[test]
fn random_sequences_with_a_userfaultfd_agree_with_linux() {
    run::random_sequences(run::Theme::Userfaults, 500);
}

/// If Linux has no swap, its pages stay in memory, and the core's pages must appear to.
#[test]
fn random_sequences_with_swap_agree_with_linux() {
    run::random_sequences(run::Theme::Swap, 500);
}
