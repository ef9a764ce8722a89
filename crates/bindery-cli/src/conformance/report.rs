//! The table of both kernels, and remarks on single cases.

use std::collections::BTreeMap;
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
            judgment(comparison),
        ]);
    }
    table.trim_fmt()
}

fn cells(tally: Option<Tally>) -> [String; 2] {
    let texts = |tally: Tally| [tally.passed, tally.skipped].map(|count| count.to_string());
    tally.map_or([const { String::new() }; 2], texts)
}

fn judgment(comparison: &Comparison) -> String {
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

/// The cases that do not pass, one per line. Cases that do not pass on Linux either, and cases that
/// a test did not reach, are only counted.
pub fn remarks(comparisons: &[Comparison]) -> String {
    let mut text = String::new();
    let mut line = |words: String| writeln!(text, "{words}").expect("a string takes all");
    for comparison in comparisons {
        let test = comparison.test;
        if let Some(problem) = &comparison.problem {
            line(format!("FAILED     {test}: {problem}"));
        }
        let (mut missed, mut as_linux) = (0, BTreeMap::<[&str; 2], usize>::new());
        for Compared { number, name, bindery, linux, verdict } in &comparison.cases {
            match verdict {
                Verdict::Passed => {}
                Verdict::Failed => match bindery {
                    Some(ours) => {
                        line(format!("FAILED     {test} {number} ({name}): {}", outcome(*ours)));
                    }
                    None => missed += 1,
                },
                Verdict::SetApart(reason) => {
                    line(format!("set apart  {test} {number} ({name}): {reason}"));
                }
                Verdict::NoWorse => {
                    *as_linux.entry([ending(*bindery), ending(*linux)]).or_default() += 1;
                }
            }
        }
        if missed > 0 {
            line(format!("FAILED     {test}: {missed} cases that it did not come to"));
        }
        for ([ours, theirs], count) in as_linux {
            line(format!("as Linux   {test}: {count} {ours} here, {theirs} on Linux"));
        }
    }
    text
}

fn ending(ended: Option<Outcome>) -> &'static str {
    ended.map_or("not come to", outcome)
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Passed => "passed",
        Outcome::Failed => "failed",
        Outcome::Skipped => "skipped",
    }
}

/// A summary in one sentence. A case that is skipped here and passes on Linux counts as failed.
pub fn conclusion(comparisons: &[Comparison]) -> String {
    let sum = |pick: fn(&Comparison) -> usize| comparisons.iter().map(pick).sum::<usize>();
    let passed = sum(|comparison| comparison.bindery().passed);
    let cases = sum(|comparison| comparison.cases.len());
    let failed = sum(|comparison| comparison.failed().count());
    let skipped = sum(|comparison| {
        comparison.failed().filter(|case| case.bindery == Some(Outcome::Skipped)).count()
    });
    let linux = sum(|comparison| comparison.linux().map_or(0, |tally| tally.passed));
    let broken = comparisons.iter().filter(|comparison| comparison.problem.is_some()).count();
    let mut text = format!("{passed} of {cases} cases pass");
    let mut add = |words: String| text.push_str(&words);
    if comparisons.iter().all(|comparison| comparison.has_linux) {
        add(format!(", {linux} on Linux; {failed} that pass on Linux fail"));
        if skipped > 0 {
            add(format!(", {skipped} of them because they are skipped here"));
        }
    } else {
        add(format!("; {failed} fail. Linux was not run beside"));
    }
    if broken > 0 {
        add(format!(". {broken} of {} tests did not end well", comparisons.len()));
    }
    add(".".to_owned());
    text
}

#[cfg(test)]
mod tests {
    use super::super::machines::{End, Run};
    use super::super::suite::{TESTS, Test};
    use super::super::tap;
    use super::*;

    fn run(text: &str) -> Run {
        Run { report: tap::read(text), end: End::Status(0), seconds: None, text: text.to_owned() }
    }

    /// A test with a case that is set apart.
    fn merge() -> &'static Test {
        Test::from_name("merge").unwrap()
    }

    fn comparison(linux: Option<&str>) -> Comparison {
        let ours = run("1..3\nok 1 a\nok 2 # SKIP b\nnot ok 3 handle_uprobe_upon_merged_vma\n");
        let linux = linux.map(run);
        Comparison::new(merge(), Some(&ours), linux.as_ref())
    }

    const LINUX: &str = "1..3\nok 1 a\nok 2 b\nok 3 handle_uprobe_upon_merged_vma\n";

    #[test]
    fn the_table_shows_both_kernels_and_the_judgment() {
        let text = table(&[comparison(Some(LINUX))]);
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        let expected = ["merge", "3", "3", "0", "1", "1", "1", "FAILED,", "1", "set", "apart"];
        assert_eq!(row, expected, "{text}");
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    }

    #[test]
    fn cases_that_do_not_pass_are_named() {
        let text = remarks(&[comparison(Some(LINUX))]);
        assert!(text.contains("FAILED     merge 2 (b): skipped\n"), "{text}");
        assert!(text.contains("set apart  merge 3 "), "{text}");
        assert_eq!(text.lines().count(), 2);
        let text = remarks(&[comparison(Some("1..3\nok 1 a\nok 2 # SKIP b\nok 3 x\n"))]);
        assert!(text.contains("merge: 1 skipped here, skipped on Linux"), "{text}");
        let (ours, theirs) = (run("1..3\nok 1 a\n"), run(LINUX));
        let text = remarks(&[Comparison::new(&TESTS[1], Some(&ours), Some(&theirs))]);
        assert!(text.contains("FAILED     mremap_dontunmap: 2 cases that it did not"), "{text}");
    }

    #[test]
    fn the_conclusion_says_whether_linux_was_there() {
        const TEXT: &str = "1 of 3 cases pass, 3 on Linux; 1 that pass on Linux fail, \
                            1 of them because they are skipped here.";
        let text = conclusion(&[comparison(Some(LINUX))]);
        assert_eq!(text, TEXT);
        assert!(conclusion(&[comparison(None)]).contains("Linux was not run"));
        let broken = Run { end: End::Broken("died".to_owned()), ..run(LINUX) };
        let broken = Comparison::new(merge(), Some(&broken), Some(&run(LINUX)));
        let text = conclusion(&[broken]);
        assert!(text.ends_with("fail. 1 of 1 tests did not end well."), "{text}");
    }
}
