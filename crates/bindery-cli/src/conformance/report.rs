//! The table of both kernels, and what is to be said of single cases.

use std::fmt::Write;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::results::{Compared, Comparison, Tally, Verdict};
use super::tap::Outcome;

/// No lines but one under the header.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('-').junction('-'));

const HEADER: [&str; 7] =
    ["test", "cases", "Linux passed", "skipped", "Bindery passed", "skipped", ""];

/// The table of one architecture.
pub fn table(comparisons: &[Comparison]) -> String {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(HEADER);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if number == 0 { 0 } else { 2 }, 0));
        if (1..HEADER.len() - 1).contains(&number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for comparison in comparisons {
        let [linux_passed, linux_skipped] = cells(comparison.linux());
        let [passed, skipped] = cells(Some(comparison.bindery()));
        table.add_row([
            comparison.test.to_owned(),
            comparison.cases.len().to_string(),
            linux_passed,
            linux_skipped,
            passed,
            skipped,
            judgement(comparison),
        ]);
    }
    table.trim_fmt()
}

fn cells(tally: Option<Tally>) -> [String; 2] {
    let texts = |tally: Tally| [tally.passed, tally.skipped].map(|count| count.to_string());
    tally.map_or([const { String::new() }; 2], texts)
}

fn judgement(comparison: &Comparison) -> String {
    let count = |wanted: fn(&Verdict) -> bool| {
        comparison.cases.iter().filter(|case| wanted(&case.verdict)).count()
    };
    let failed = count(|verdict| *verdict == Verdict::Failed);
    let apart = count(|verdict| matches!(verdict, Verdict::SetApart(_)));
    let mut words = Vec::new();
    if failed > 0 {
        words.push(format!("{failed} FAILED"));
    } else if comparison.problem.is_some() {
        words.push("FAILED".to_owned());
    }
    if apart > 0 {
        words.push(format!("{apart} set apart"));
    }
    if words.is_empty() { "good".to_owned() } else { words.join(", ") }
}

/// The cases that do not pass, one a line.
pub fn remarks(comparisons: &[Comparison]) -> String {
    let mut text = String::new();
    let mut line = |words: String| writeln!(text, "{words}").expect("a string takes all");
    for comparison in comparisons {
        let test = comparison.test;
        if let Some(problem) = &comparison.problem {
            line(format!("FAILED     {test}: {problem}"));
        }
        for case in &comparison.cases {
            let Compared { number, name, bindery, linux, verdict } = case;
            let ours = bindery.map_or("did not come to it", outcome);
            match verdict {
                Verdict::Passed => {}
                Verdict::Failed => line(format!("FAILED     {test} {number} ({name}): {ours}")),
                Verdict::SetApart(reason) => {
                    line(format!("set apart  {test} {number} ({name}): {reason}"));
                }
                Verdict::NoWorse => {
                    let theirs = linux.map_or("did not come to it", outcome);
                    line(format!(
                        "as Linux   {test} {number} ({name}): {ours} here, {theirs} on Linux"
                    ));
                }
            }
        }
    }
    text
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Passed => "passed",
        Outcome::Failed => "failed",
        Outcome::Skipped => "skipped",
    }
}

/// All in one sentence.
pub fn conclusion(comparisons: &[Comparison]) -> String {
    let sum = |pick: fn(&Comparison) -> usize| comparisons.iter().map(pick).sum::<usize>();
    let passed = sum(|comparison| comparison.bindery().passed);
    let cases = sum(|comparison| comparison.cases.len());
    let failed = sum(|comparison| comparison.failed().count());
    let linux = sum(|comparison| comparison.linux().map_or(0, |tally| tally.passed));
    let ours = format!("{passed} of {cases} cases pass");
    if comparisons.iter().all(|comparison| comparison.has_linux) {
        format!("{ours}, {linux} on Linux; {failed} that pass on Linux fail.")
    } else {
        format!("{ours}; {failed} fail. Linux was not run beside.")
    }
}

#[cfg(test)]
mod tests {
    use super::super::machines::{End, Run};
    use super::super::suite::TESTS;
    use super::super::tap;
    use super::*;

    fn run(text: &str) -> Run {
        Run { report: tap::read(text), end: End::Status(0) }
    }

    fn comparison(linux: Option<&str>) -> Comparison {
        let ours = run("1..3\nok 1 a\nok 2 # SKIP b\nnot ok 3 mremap move multiple invalid vmas\n");
        let linux = linux.map(run);
        Comparison::new(&TESTS[0], Some(&ours), linux.as_ref())
    }

    const LINUX: &str = "1..3\nok 1 a\nok 2 b\nok 3 mremap move multiple invalid vmas\n";

    #[test]
    fn the_table_shows_both_kernels_and_the_judgement() {
        let text = table(&[comparison(Some(LINUX))]);
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        let expected =
            ["mremap_test", "3", "3", "0", "1", "1", "1", "FAILED,", "1", "set", "apart"];
        assert_eq!(row, expected, "{text}");
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    }

    #[test]
    fn cases_that_do_not_pass_are_named() {
        let text = remarks(&[comparison(Some(LINUX))]);
        assert!(text.contains("FAILED     mremap_test 2 (b): skipped\n"), "{text}");
        assert!(text.contains("set apart  mremap_test 3 "), "{text}");
        assert_eq!(text.lines().count(), 2);
        let text = remarks(&[comparison(Some("1..3\nok 1 a\nok 2 # SKIP b\nok 3 x\n"))]);
        assert!(text.contains("skipped here, skipped on Linux"), "{text}");
    }

    #[test]
    fn the_conclusion_says_whether_linux_was_there() {
        let text = conclusion(&[comparison(Some(LINUX))]);
        assert_eq!(text, "1 of 3 cases pass, 3 on Linux; 1 that pass on Linux fail.");
        assert!(conclusion(&[comparison(None)]).contains("Linux was not run"));
    }
}
