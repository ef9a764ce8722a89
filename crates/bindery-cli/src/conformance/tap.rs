//! The report of a test on standard output: lines of the Test Anything Protocol, in the form that
//! Linux's tests use.
//!
//! ```text
//! 1..3
//! # [INFO] Page migration
//! ok 1 SIGSEGV generated, page not modified
//! not ok 2 write() failed
//! ok 3 # SKIP mbind() failed
//! ```

use serde::Serialize;

/// The outcome of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The expected result, including an expected refusal (`XFAIL`).
    Passed,
    /// Another result.
    Failed,
    /// The test found that the kernel lacks a feature for the case.
    Skipped,
}

/// One case of a test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// The case's number, from 1.
    pub number: u32,
    /// The case's text, preceded by its heading, if any.
    pub name: String,
    /// The outcome of the case.
    pub outcome: Outcome,
}

/// The report of a test.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// The planned number of cases, if the test reported it.
    pub planned: Option<u32>,
    /// The cases that the test ran.
    pub cases: Vec<Case>,
    /// The reason why the test gave up, if it did.
    pub gave_up: Option<String>,
}

/// The maximum number of cases. No test has more, so a larger number does not come from a test.
const MOST_CASES: u32 = 10_000;

/// The beginnings of comments that are headings.
const HEADINGS: [&str; 2] = ["# [INFO] ", "# [RUN] "];

/// Reads what a test wrote.
pub fn read(text: &str) -> Report {
    let mut report = Report::default();
    let mut heading = None;
    for line in text.lines().map(str::trim_end) {
        if let Some(text) = HEADINGS.iter().find_map(|start| line.strip_prefix(start)) {
            heading = Some(text);
        } else if let Some(reason) = line.strip_prefix("1..0 # SKIP") {
            let name = reason.trim().to_owned();
            report.cases.push(Case { number: 1, name, outcome: Outcome::Skipped });
        } else if let Some(plan) = line.strip_prefix("1..") {
            report.planned = plan.parse().ok().filter(|count| *count <= MOST_CASES);
        } else if let Some(reason) = line.strip_prefix("Bail out!") {
            report.gave_up = Some(reason.trim().to_owned());
        } else if let Some(case) = case(line, heading) {
            report.cases.push(case);
        }
    }
    report
}

fn case(line: &str, heading: Option<&str>) -> Option<Case> {
    let (rest, is_ok) = match line.strip_prefix("not ok ") {
        Some(rest) => (rest, false),
        None => (line.strip_prefix("ok ")?, true),
    };
    let (number, text) = rest.split_once(' ').unwrap_or((rest, ""));
    let number = number.parse().ok().filter(|number| (1..=MOST_CASES).contains(number))?;
    let (directive, text) = directive(text);
    let outcome = match (is_ok, directive) {
        (true, "SKIP") => Outcome::Skipped,
        (true, _) => Outcome::Passed,
        (false, _) => Outcome::Failed,
    };
    let name = match heading {
        Some(heading) if heading != text => format!("{heading}: {text}"),
        _ => text.clone(),
    };
    Some(Case { number, name, outcome })
}

/// The directive in a case's text, and the text without the directive, which Linux's tests write
/// before or after the text.
fn directive(text: &str) -> (&str, String) {
    let (before, behind) = match text.strip_prefix("# ") {
        Some(behind) => ("", behind),
        None => match text.split_once(" # ") {
            Some(parts) => parts,
            None => return ("", text.to_owned()),
        },
    };
    let (word, reason) = behind.split_once(' ').unwrap_or((behind, ""));
    if !matches!(word, "SKIP" | "XFAIL" | "XPASS" | "error") {
        return ("", text.to_owned());
    }
    let parts = [before, reason].map(str::trim);
    let text = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(": ");
    (word, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(text: &str) -> Vec<(u32, String, Outcome)> {
        let cases = read(text).cases.into_iter();
        cases.map(|case| (case.number, case.name, case.outcome)).collect()
    }

    #[test]
    fn cases_pass_fail_or_are_skipped() {
        let text = "TAP version 13\r\n1..4\r\nok 1 one\r\n\tmremap time: 5ns\r\nnot ok 2 two\r\n\
                    ok 3 # SKIP three\r\nok 4 # XFAIL four\r\n# Totals: pass:1\r\n";
        assert_eq!(
            outcomes(text),
            [
                (1, "one".to_owned(), Outcome::Passed),
                (2, "two".to_owned(), Outcome::Failed),
                (3, "three".to_owned(), Outcome::Skipped),
                (4, "four".to_owned(), Outcome::Passed),
            ]
        );
        assert_eq!(read(text).planned, Some(4));
        assert_eq!(read(text).gave_up, None);
    }

    #[test]
    fn a_directive_may_stand_behind_the_name() {
        let text = "ok 1 name # SKIP no such thing\nnot ok 2 # error what\nok 3 a # b\n";
        let expected = [
            (1, "name: no such thing".to_owned(), Outcome::Skipped),
            (2, "what".to_owned(), Outcome::Failed),
            (3, "a # b".to_owned(), Outcome::Passed),
        ];
        assert_eq!(outcomes(text), expected);
    }

    #[test]
    fn a_case_is_named_with_its_heading() {
        let text = "# [INFO] PTRACE\nok 1 same\n# [RUN] other\n# a remark\nok 2 same\n\
                    ok 3 other\n";
        let names: Vec<String> = read(text).cases.into_iter().map(|case| case.name).collect();
        assert_eq!(names, ["PTRACE: same", "other: same", "other"]);
    }

    #[test]
    fn a_wholly_skipped_test_is_one_case() {
        let text = "TAP version 13\n1..0 # SKIP no such machine\n";
        assert_eq!(outcomes(text), [(1, "no such machine".to_owned(), Outcome::Skipped)]);
        assert_eq!(read(text).planned, None);
    }

    #[test]
    fn other_lines_are_no_cases() {
        let text = "1..4000000000\nok 4000000000 a\nok 0 b\nokay 1\nok one\nnot ok\nnot 1\nok\nok 1x\nBail out! mmap failed\n";
        assert_eq!(outcomes(text), []);
        assert_eq!(read(text).planned, None);
        assert_eq!(read(text).gave_up.as_deref(), Some("mmap failed"));
    }
}
