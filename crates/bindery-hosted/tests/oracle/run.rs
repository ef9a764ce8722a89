//! Runs sequences one after the other, from the request to the verdict.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery_hosted::Walk;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::compare::{Difference, difference};
use super::generate::{sequence, sequence_with_swap, sequence_with_userfaults};
use super::linux::{Judge, Verdict, unable};
use super::operation::Operation;
use super::{differences, ours, swapped};

/// The name of the test that acts as the judge in its process.
pub const JUDGE: &str = "the_judge";

/// The maximum number of operations in a random sequence, besides its start.
const LENGTH: usize = 50;

/// The number of runs on Linux that must show a difference. When memory is short, a kernel drops
/// memfd pages that were read but never written, regardless of the sequence; a later run observes
/// them again.
const ANSWERS: usize = 3;

/// The maximum number of attempts to reduce a failing sequence.
const SIMPLER_FORMS: u32 = 1500;

thread_local! {
    /// Whether panics of this thread are attributed to the core, and the text of the last panic.
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Whether sequences can be run here. Prints the reason if not.
pub fn able() -> bool {
    match unable() {
        None => true,
        Some(why) => {
            eprintln!("skipped: {why}");
            false
        }
    }
}

/// A whole number from the environment.
fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, and no number")))
}

/// Runs on one architecture and returns the differences.
fn differs<A: Walk>(operations: &[Operation], linux: &Verdict) -> Option<Difference> {
    let scenario = || ours::scenario::<A>(operations, &linux.before);
    let mut observations = match quietly(scenario) {
        Ok(observations) => observations,
        Err(panic) => return Some(Difference { kind: shortened(&panic), text: panic }),
    };
    let mut theirs = linux.observations.clone();
    swapped::level(operations, &theirs, &mut observations);
    differences::level(operations, &mut theirs, &mut observations);
    let mut found = difference(operations, &theirs, &observations)?;
    found.text = format!("on {}, {}", A::NAME, found.text);
    Some(found)
}

/// A panic's message without its numbers, which differ in every sequence.
fn shortened(panic: &str) -> String {
    panic.split(|c: char| c.is_ascii_digit()).filter(|part| part.len() > 1).take(12).collect()
}

/// Runs the core. A panic is returned as a result.
fn quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if QUIET.get() {
                LAST_PANIC.set(panic.to_string());
            } else {
                usual(panic);
            }
        }));
    });
    QUIET.set(true);
    let done: Result<T, Box<dyn Any + Send>> = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(false);
    done.map_err(|_| LAST_PANIC.take())
}

/// Runs a sequence on one architecture.
type Trial = fn(&[Operation], &Verdict) -> Option<Difference>;

const ARCHITECTURES: [Trial; 3] = [differs::<X86_64<4>>, differs::<AArch64>, differs::<Riscv64<4>>];

/// The differences from Linux on the first architecture that shows any.
fn verdict(
    judge: &mut Judge,
    trials: &[Trial],
    operations: &[Operation],
) -> Option<(Trial, Difference)> {
    in_each_answer(|| {
        let linux = judge.ask(operations);
        let mut all = trials.iter().map(|trial| (*trial, trial(operations, &linux)));
        all.find_map(|(trial, found)| Some((trial, found?)))
    })
}

/// The last difference, if all [`ANSWERS`] runs show one.
fn in_each_answer<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let mut found = ask()?;
    for _ in 1..ANSWERS {
        found = ask()?;
    }
    Some(found)
}

/// Panics if the core differs from Linux.
#[track_caller]
pub fn agrees(operations: &[Operation]) {
    if !able() {
        return;
    }
    if let Some((_, found)) = verdict(&mut Judge::start(JUDGE), &ARCHITECTURES, operations) {
        panic!("{}", found.text);
    }
}

/// The kind of calls in the sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Theme {
    /// Memory calls.
    Memory,
    /// Memory calls and requests on a userfaultfd.
    Userfaults,
    /// Memory calls while the core swaps.
    Swap,
}

/// Each seed has its own sequence.
fn tree(theme: Theme, seed: u64) -> Box<dyn ValueTree<Value = Vec<Operation>>> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let sequences = match theme {
        Theme::Memory => sequence(LENGTH).boxed(),
        Theme::Userfaults => sequence_with_userfaults(LENGTH).boxed(),
        Theme::Swap => sequence_with_swap(LENGTH).boxed(),
    };
    sequences.new_tree(&mut runner).expect("sequences are not rejected")
}

/// The simplest form that fails in the same way, and its failure.
fn simplest(
    judge: &mut Judge,
    trial: Trial,
    mut tree: impl ValueTree<Value = Vec<Operation>>,
    mut found: Difference,
) -> (Vec<Operation>, Difference) {
    let mut simplest = tree.current();
    let mut forms = 0;
    while forms < SIMPLER_FORMS && tree.simplify() {
        loop {
            forms += 1;
            let form = tree.current();
            match verdict(judge, &[trial], &form) {
                Some((_, other)) if other.kind == found.kind => {
                    (simplest, found) = (form, other);
                    break;
                }
                _ if forms < SIMPLER_FORMS && tree.complicate() => {}
                _ => return (simplest, found),
            }
        }
    }
    (simplest, found)
}

/// The findings, by kind: the seeds, and the reduced form of the first.
#[derive(Default)]
struct Found(BTreeMap<String, (Vec<u64>, String)>);

impl Found {
    /// Records a difference. Returns whether it is the first of its kind.
    fn note(&mut self, kind: &str, seed: u64) -> bool {
        let (seeds, _) = self.0.entry(kind.to_owned()).or_default();
        seeds.push(seed);
        seeds.len() == 1
    }
}

/// Runs random sequences. From the environment: `ORACLE_SEQUENCES` (or `PROPTEST_CASES`), their
/// number; `ORACLE_SEED`, the first seed, or `random`; `ORACLE_KINDS`, the number of kinds of
/// differences after which to stop.
pub fn random_sequences(theme: Theme, usual: u64) {
    if !able() {
        return;
    }
    let count = setting("ORACLE_SEQUENCES").or_else(|| setting("PROPTEST_CASES")).unwrap_or(usual);
    let most = setting("ORACLE_KINDS").unwrap_or(3) as usize;
    let seed = if std::env::var("ORACLE_SEED").is_ok_and(|seed| seed == "random") {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
        now.as_nanos() as u64 >> 10 << 20
    } else {
        setting("ORACLE_SEED").unwrap_or(0)
    };
    println!("{count} sequences from ORACLE_SEED={seed}");
    let next = AtomicU64::new(0);
    let found = Mutex::new(Found::default());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| play_some(theme, (seed, count), most, &next, &found));
        }
    });
    let Found(found) = found.into_inner().expect("no thread has failed");
    let mut text = String::new();
    for (kind, (seeds, simplest)) in &found {
        let seeds: Vec<_> = seeds.iter().map(u64::to_string).collect();
        let _ = writeln!(text, "# {kind}: ORACLE_SEED={}\n{simplest}", seeds.join(", "));
    }
    assert!(found.is_empty(), "{} kind(s) of differences:\n\n{text}", found.len());
}

fn play_some(
    theme: Theme,
    (seed, count): (u64, u64),
    most: usize,
    next: &AtomicU64,
    found: &Mutex<Found>,
) {
    let mut judge = Judge::start(JUDGE);
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= count || found.lock().expect("the others live").0.len() >= most {
            return;
        }
        let seed = seed.wrapping_add(number);
        let tree = tree(theme, seed);
        let Some((trial, difference)) = verdict(&mut judge, &ARCHITECTURES, &tree.current()) else {
            continue;
        };
        if !found.lock().expect("the others live").note(&difference.kind, seed) {
            continue;
        }
        let kind = difference.kind.clone();
        let (operations, difference) = simplest(&mut judge, trial, tree, difference);
        let mut text = String::new();
        for operation in &operations {
            let _ = writeln!(text, "    {operation:?},");
        }
        let _ = writeln!(text, "{}", difference.text);
        if let Some(known) = found.lock().expect("the others live").0.get_mut(&kind) {
            known.1 = text;
        }
    }
}

/// Runs Linux twice.
pub fn linux_agrees_with_itself(theme: Theme, count: u64) {
    if !able() {
        return;
    }
    let mut judge = Judge::start(JUDGE);
    for seed in 0..count {
        let operations = tree(theme, seed).current();
        let found = in_each_answer(|| {
            let (mut once, mut again) = (judge.ask(&operations), judge.ask(&operations));
            // With everything locked, the judge's own memory counts and sometimes grows.
            while once.before != again.before {
                (once, again) = (again, judge.ask(&operations));
            }
            difference(&operations, &once.observations, &again.observations)
        });
        if let Some(found) = found {
            panic!("seed {seed}: {}", found.text);
        }
    }
}

#[test]
fn a_difference_counts_if_each_answer_shows_it() {
    let mut asked = 0;
    let mut differs_in = |answers: &[usize]| {
        asked = 0;
        let found = in_each_answer(|| {
            asked += 1;
            answers.contains(&asked).then_some(asked)
        });
        (found, asked)
    };
    assert_eq!(differs_in(&[1, 2, 3]), (Some(3), 3));
    assert_eq!(differs_in(&[1, 2]), (None, 3));
    assert_eq!(differs_in(&[]), (None, 1));
}
