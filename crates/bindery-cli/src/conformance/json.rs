//! The results in machine-readable form. Fields are only ever added.

use serde::Serialize;

use super::results::{Compared, Comparison, Tally, Verdict};
use super::tap::Outcome;

/// One run of `bindery conformance`.
#[derive(Debug, Serialize)]
pub struct Document {
    /// The version of the program.
    pub bindery: &'static str,
    /// The release of Linux from which the tests come.
    pub tests_of_linux: String,
    /// One entry for each architecture.
    pub architectures: Vec<ArchitectureResults>,
}

/// The results on one architecture.
#[derive(Debug, Serialize)]
pub struct ArchitectureResults {
    /// The architecture's name.
    pub architecture: String,
    /// The name of our kernel; null if it did not boot far enough to report it.
    pub bindery_kernel: Option<String>,
    /// The name of Linux; null if it was not run.
    pub linux_kernel: Option<String>,
    /// The tests.
    pub tests: Vec<TestResults>,
}

/// A test.
#[derive(Debug, Serialize)]
pub struct TestResults {
    /// The test's name.
    pub test: &'static str,
    /// Whether all cases that pass on Linux pass here, except those set apart.
    pub good: bool,
    /// The problem of the test as a whole.
    pub problem: Option<String>,
    /// The seconds that the test ran on our kernel; null if it did not end.
    pub seconds: Option<u64>,
    /// The seconds that the test ran on Linux; null if it was not run or did not end.
    pub linux_seconds: Option<u64>,
    /// The tally of our kernel's cases.
    pub bindery: Tally,
    /// The tally on Linux; null if Linux was not run.
    pub linux: Option<Tally>,
    /// The cases.
    pub cases: Vec<CaseResults>,
}

/// A case.
#[derive(Debug, Serialize)]
pub struct CaseResults {
    /// The case's number in the test.
    pub number: u32,
    /// The case's name.
    pub name: String,
    /// The outcome on our kernel; null if the test did not reach it.
    pub bindery: Option<Outcome>,
    /// The outcome on Linux.
    pub linux: Option<Outcome>,
    /// `passed`, `failed`, `as-linux` or `set-apart`.
    pub verdict: &'static str,
    /// The reason why the case is set apart.
    pub reason: Option<String>,
}

impl TestResults {
    /// The results of a comparison.
    pub fn new(comparison: &Comparison) -> Self {
        Self {
            test: comparison.test,
            good: comparison.is_good(),
            problem: comparison.problem.clone(),
            seconds: comparison.seconds[0],
            linux_seconds: comparison.seconds[1],
            bindery: comparison.bindery(),
            linux: comparison.linux(),
            cases: comparison.cases.iter().map(CaseResults::new).collect(),
        }
    }
}

impl CaseResults {
    fn new(case: &Compared) -> Self {
        let (verdict, reason) = match case.verdict {
            Verdict::Passed => ("passed", None),
            Verdict::Failed => ("failed", None),
            Verdict::NoWorse => ("as-linux", None),
            Verdict::SetApart(reason) => ("set-apart", Some(reason.to_string())),
        };
        let Compared { number, bindery, linux, .. } = *case;
        Self { number, name: case.name.clone(), bindery, linux, verdict, reason }
    }
}
