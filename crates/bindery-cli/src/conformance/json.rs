//! The results for programs. Fields are only ever added.

use serde::Serialize;

use super::results::{Compared, Comparison, Tally, Verdict};
use super::tap::Outcome;

/// One run of `bindery conformance`.
#[derive(Debug, Serialize)]
pub struct Document {
    /// The version of the program.
    pub bindery: &'static str,
    /// The release of Linux that the tests belong to.
    pub tests_of_linux: String,
    /// One for each architecture.
    pub architectures: Vec<ArchitectureResults>,
}

/// The results on one architecture.
#[derive(Debug, Serialize)]
pub struct ArchitectureResults {
    /// Its name.
    pub architecture: String,
    /// Our kernel, as it names itself; null if it did not come that far.
    pub bindery_kernel: Option<String>,
    /// Linux, as it names itself; null if it was not run.
    pub linux_kernel: Option<String>,
    /// The tests.
    pub tests: Vec<TestResults>,
}

/// A test.
#[derive(Debug, Serialize)]
pub struct TestResults {
    /// Its name.
    pub test: &'static str,
    /// Whether all that passes on Linux passes here, apart from what is set apart.
    pub good: bool,
    /// What went wrong with the test as a whole.
    pub problem: Option<String>,
    /// How many seconds it ran on our kernel; null if it came to no end.
    pub seconds: Option<u64>,
    /// How many seconds it ran on Linux; null if it was not run, or came to no end.
    pub linux_seconds: Option<u64>,
    /// Our kernel's cases.
    pub bindery: Tally,
    /// Linux's; null if it was not run.
    pub linux: Option<Tally>,
    /// The cases.
    pub cases: Vec<CaseResults>,
}

/// A case.
#[derive(Debug, Serialize)]
pub struct CaseResults {
    /// Its number in the test.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// What our kernel made of it; null if the test did not come to it.
    pub bindery: Option<Outcome>,
    /// What Linux made of it.
    pub linux: Option<Outcome>,
    /// `passed`, `failed`, `as-linux` or `set-apart`.
    pub verdict: &'static str,
    /// Why it is set apart.
    pub reason: Option<String>,
}

impl TestResults {
    /// Of a comparison.
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
