//! Compares both kernels case by case.
//!
//! Linux is the standard: a case that passes there must pass here, and a case that is skipped here
//! because of a missing feature counts as failed. If Linux was not run, each case must pass.

use std::collections::BTreeMap;

use serde::Serialize;

use super::machines::{End, Run};
use super::suite::{self, Reason, Test};
use super::tap::{Case, Outcome};

/// The verdict on a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The case passes.
    Passed,
    /// The case does not pass on Linux either.
    NoWorse,
    /// The case fails for a known reason outside the subject of the test.
    SetApart(Reason),
    /// The case passes on Linux but not here.
    Failed,
}

/// One case on both kernels; a kernel's outcome is missing if the test did not reach it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compared {
    /// The case's number in the test.
    pub number: u32,
    /// The name of the case. Linux's name is used if Linux was run, since a name may contain the
    /// error.
    pub name: String,
    /// The outcome on our kernel.
    pub bindery: Option<Outcome>,
    /// The outcome on Linux.
    pub linux: Option<Outcome>,
    /// The verdict.
    pub verdict: Verdict,
}

/// A test on both kernels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Comparison {
    /// The test's name.
    pub test: &'static str,
    /// The cases of the test.
    pub cases: Vec<Compared>,
    /// The problem of the test as a whole.
    pub problem: Option<String>,
    /// Whether Linux was run.
    pub has_linux: bool,
    /// The seconds that the test ran, here and on Linux.
    pub seconds: [Option<u64>; 2],
}

/// The number of times of each outcome.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Tally {
    /// Cases that passed.
    pub passed: usize,
    /// Cases that failed.
    pub failed: usize,
    /// Cases that were skipped.
    pub skipped: usize,
}

impl Tally {
    /// Counts outcomes.
    pub fn of(outcomes: impl Iterator<Item = Outcome>) -> Self {
        let mut tally = Self::default();
        for outcome in outcomes {
            *match outcome {
                Outcome::Passed => &mut tally.passed,
                Outcome::Failed => &mut tally.failed,
                Outcome::Skipped => &mut tally.skipped,
            } += 1;
        }
        tally
    }
}

impl Comparison {
    /// Compares the runs of a test on both kernels.
    pub fn new(test: &'static Test, bindery: Option<&Run>, linux: Option<&Run>) -> Self {
        let [ours, theirs] =
            [bindery, linux].map(|run| by_number(run.map(|run| &*run.report.cases)));
        let planned = [linux, bindery].into_iter().flatten().find_map(|run| run.report.planned);
        let last = [ours.keys().max(), theirs.keys().max()].into_iter().flatten().max().copied();
        let count = planned.unwrap_or(0).max(last.unwrap_or(0));
        let compare = |number: u32| {
            let (ours, theirs) = (ours.get(&number).copied(), theirs.get(&number).copied());
            let name = theirs.or(ours).map_or("", |case| &*case.name);
            let outcomes = [ours, theirs].map(|case| case.map(|case| case.outcome));
            let verdict = verdict(outcomes, linux.is_some(), suite::set_apart(test, name));
            let [bindery, linux] = outcomes;
            Compared { number, name: name.to_owned(), bindery, linux, verdict }
        };
        let cases: Vec<Compared> = (1..=count).map(compare).collect();
        let problem = problem(&cases, bindery, linux);
        let seconds = [bindery, linux].map(|run| run.and_then(|run| run.seconds));
        Self { test: test.name, cases, problem, has_linux: linux.is_some(), seconds }
    }

    /// The tally of all cases on our kernel.
    pub fn bindery(&self) -> Tally {
        Tally::of(self.cases.iter().filter_map(|case| case.bindery))
    }

    /// The tally of all cases on Linux, if it was run.
    pub fn linux(&self) -> Option<Tally> {
        self.has_linux.then(|| Tally::of(self.cases.iter().filter_map(|case| case.linux)))
    }

    /// The cases that fail here although they must pass.
    pub fn failed(&self) -> impl Iterator<Item = &Compared> {
        self.cases.iter().filter(|case| case.verdict == Verdict::Failed)
    }

    /// Whether all cases that pass on Linux pass here, except those set apart.
    pub fn is_good(&self) -> bool {
        self.problem.is_none() && self.failed().next().is_none()
    }
}

/// A problem with the end of the test, apart from its cases.
fn problem(cases: &[Compared], bindery: Option<&Run>, linux: Option<&Run>) -> Option<String> {
    let Some(Run { end, report, .. }) = bindery else { return Some("it was not run".to_owned()) };
    let status = match end {
        End::Broken(why) => return Some(why.clone()),
        End::Status(status) => *status,
    };
    let is_missed = |case: &Compared| match case.verdict {
        Verdict::SetApart(_) => false,
        Verdict::Passed | Verdict::NoWorse | Verdict::Failed => case.bindery.is_none(),
    };
    let came_to_all = !cases.is_empty() && !cases.iter().any(is_missed);
    let is_told = cases.iter().any(|case| case.bindery != Some(Outcome::Passed));
    let is_as_linux = linux.is_some_and(|linux| linux.end == *end);
    if came_to_all && (status == 0 || is_told || is_as_linux) {
        return None;
    }
    Some(match &report.gave_up {
        Some(reason) => format!("it ended with {status}: {reason}"),
        None if came_to_all => format!("all cases passed, but it ended with {status}"),
        None => format!("it ended with {status} before all of its cases were run"),
    })
}

/// The cases by their numbers; if a number occurs twice, the case that failed.
fn by_number(cases: Option<&[Case]>) -> BTreeMap<u32, &Case> {
    let mut numbered: BTreeMap<u32, &Case> = BTreeMap::new();
    for case in cases.unwrap_or_default() {
        let known = numbered.entry(case.number).or_insert(case);
        if case.outcome == Outcome::Failed {
            *known = case;
        }
    }
    numbered
}

fn verdict(
    [ours, theirs]: [Option<Outcome>; 2],
    has_linux: bool,
    reason: Option<Reason>,
) -> Verdict {
    match (ours, theirs) {
        (Some(Outcome::Passed), _) => Verdict::Passed,
        (_, Some(Outcome::Passed)) => reason.map_or(Verdict::Failed, Verdict::SetApart),
        // The case is missing, because the test found that cases of its kind cannot run.
        (None, Some(_)) if reason.is_some() => reason.map_or(Verdict::Failed, Verdict::SetApart),
        _ if has_linux => Verdict::NoWorse,
        _ => reason.map_or(Verdict::Failed, Verdict::SetApart),
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite::TESTS;
    use super::super::tap;
    use super::*;

    fn run(text: &str) -> Run {
        ended(text, End::Status(0))
    }

    fn ended(text: &str, end: End) -> Run {
        Run { report: tap::read(text), end, seconds: None, text: text.to_owned() }
    }

    fn verdicts(comparison: &Comparison) -> Vec<Verdict> {
        comparison.cases.iter().map(|case| case.verdict).collect()
    }

    const LINUX: &str = "1..5\nok 1 a\nok 2 b\nnot ok 3 c\nok 4 # SKIP d\nok 5 e\n";

    #[test]
    fn a_case_passing_on_linux_must_pass_here() {
        let (linux, ours) = (run(LINUX), run("1..5\nok 1 a\nok 2 # SKIP b\nok 3 c\n"));
        let comparison = Comparison::new(&TESTS[1], Some(&ours), Some(&linux));
        use Verdict::{Failed, NoWorse, Passed};
        assert_eq!(verdicts(&comparison), [Passed, Failed, Passed, NoWorse, Failed]);
        assert_eq!(comparison.bindery(), Tally { passed: 2, failed: 0, skipped: 1 });
        assert_eq!(comparison.linux(), Some(Tally { passed: 3, failed: 1, skipped: 1 }));
        assert!(!comparison.is_good());
    }

    #[test]
    fn a_case_failing_on_both_is_good() {
        let linux = ended(LINUX, End::Status(1));
        let comparison = Comparison::new(&TESTS[1], Some(&linux), Some(&linux));
        assert!(comparison.is_good(), "{comparison:?}");
    }

    #[test]
    fn a_test_that_dies_after_its_cases_fails() {
        let text = "1..1\nok 1 a\n";
        let problem = |ours: Option<&Run>, linux: &Run| {
            let comparison = Comparison::new(&TESTS[1], ours, Some(linux));
            assert_eq!(comparison.is_good(), comparison.problem.is_none());
            comparison.problem
        };
        let (good, bad) = (run(text), ended(text, End::Status(1)));
        let dead = ended(text, End::Broken("died".to_owned()));
        assert_eq!(problem(Some(&dead), &good).as_deref(), Some("died"));
        assert_eq!(problem(Some(&dead), &bad).as_deref(), Some("died"));
        assert!(problem(Some(&bad), &good).is_some());
        assert_eq!(problem(Some(&bad), &bad), None);
        assert!(problem(None, &good).is_some(), "not run at all");
        assert!(problem(Some(&run("")), &run("")).is_some(), "nothing was told");
        let gave_up = ended("Bail out! mmap\n", End::Status(1));
        assert_eq!(problem(Some(&gave_up), &bad).as_deref(), Some("it ended with 1: mmap"));
    }

    #[test]
    fn cases_with_missing_features_are_set_apart() {
        let text = |outcome: &str| format!("1..1\n{outcome} 1 mmap(NULL, MAP_HUGETLB)\n");
        let (linux, ours) = (run(&text("ok")), run(&text("not ok")));
        let set_apart = [Verdict::SetApart(Reason::Hugetlb)];
        let test = Test::from_name("va_high_addr_switch").unwrap();
        for linux in [Some(&linux), None] {
            let comparison = Comparison::new(test, Some(&ours), linux);
            assert_eq!(verdicts(&comparison), set_apart);
            assert!(comparison.is_good());
        }
    }

    #[test]
    fn a_case_set_apart_may_be_missing() {
        let test = Test::from_name("va_high_addr_switch").unwrap();
        let linux = run("1..3\nok 1 a\nok 2 mmap(NULL, MAP_HUGETLB)\n\
                         not ok 3 mmap(high, MAP_HUGETLB)\n");
        let ours = run("1..1\nok 1 a\n");
        let comparison = Comparison::new(test, Some(&ours), Some(&linux));
        assert!(comparison.is_good(), "{comparison:?}");
        let linux = run("1..2\nok 1 a\nok 2 b\n");
        assert!(!Comparison::new(test, Some(&ours), Some(&linux)).is_good());
    }

    #[test]
    fn a_skipped_test_fails_if_linux_runs_it() {
        let skips = ended("1..0 # SKIP not supported\n", End::Status(4));
        let comparison = Comparison::new(&TESTS[1], Some(&skips), Some(&skips));
        assert!(comparison.is_good(), "{comparison:?}");
        let comparison = Comparison::new(&TESTS[1], Some(&skips), Some(&run("1..1\nok 1 a\n")));
        assert!(!comparison.is_good());
        assert_eq!(verdicts(&comparison), [Verdict::Failed]);
    }

    #[test]
    fn without_linux_every_case_must_pass() {
        let ours = run(LINUX);
        let comparison = Comparison::new(&TESTS[1], Some(&ours), None);
        use Verdict::{Failed, Passed};
        assert_eq!(verdicts(&comparison), [Passed, Passed, Failed, Failed, Passed]);
        assert_eq!(comparison.linux(), None);
    }

    #[test]
    fn a_case_told_twice_fails_if_either_failed() {
        let ours = run("1..1\nnot ok 1 a\nok 1 a\n");
        let comparison = Comparison::new(&TESTS[1], Some(&ours), None);
        assert_eq!(verdicts(&comparison), [Verdict::Failed]);
    }
}
