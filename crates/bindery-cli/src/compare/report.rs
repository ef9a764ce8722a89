//! Figures as tables, which are some 180 columns wide, and as plain sentences.

use bindery_cli::guest::Architecture;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::baseline::Figure;
use super::counts::{Counter, Summary};
use super::results::{Comparison, Verdict, invalidations, weighed};
use crate::output::thousands;
use crate::size::FolioSize;

/// No lines but one under the header.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('-').junction('-'));

const HEADER: [&str; 13] = [
    "operation",
    "folios",
    "kernel",
    "instructions",
    "string bytes",
    "loads",
    "stores",
    "atomics",
    "inval.",
    "weighed",
    "Linux/ours",
    "T",
    "",
];

/// The number of text columns.
const WORDS: usize = 3;

/// The table of one architecture.
pub fn table(comparisons: &[Comparison<'_>]) -> String {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(HEADER);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if number == 0 { 0 } else { 1 }, 0));
        if (WORDS..HEADER.len() - 1).contains(&number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut last = "";
    for comparison in comparisons {
        let name = if comparison.row.name == last { "" } else { comparison.row.name };
        last = comparison.row.name;
        table.add_row(ours(comparison, name));
        if comparison.linux.is_some() || comparison.recorded.is_some() {
            table.add_row(linux(comparison));
        }
    }
    table.trim_fmt()
}

fn ours(comparison: &Comparison<'_>, name: &str) -> Vec<String> {
    let mut row = vec![name.to_owned(), show_folio(comparison.folio), "Bindery".to_owned()];
    row.extend(counts(comparison.bindery, comparison.architecture));
    row.push(comparison.ratio().map_or_else(String::new, |ratio| format!("{ratio:.2} x")));
    row.push(comparison.target.map_or_else(String::new, show_figure));
    row.push(comparison.verdict().map_or("", show_verdict).to_owned());
    row
}

fn linux(comparison: &Comparison<'_>) -> Vec<String> {
    let start = |who: &str| vec![String::new(), String::new(), who.to_owned()];
    match (comparison.linux, comparison.recorded) {
        (None, Some(Figure { instructions, invalidations })) => {
            let mut row = start("recorded");
            row.push(thousands(instructions));
            row.extend([const { String::new() }; 4]);
            row.push(invalidations.map_or_else(String::new, thousands));
            row
        }
        (measured, _) => {
            let mut row = start("Linux");
            row.extend(counts(measured, comparison.architecture));
            row
        }
    }
}

fn show_folio(folio: Option<FolioSize>) -> String {
    folio.map_or_else(|| "-".to_owned(), |folio| folio.to_string())
}

/// The columns from instructions to invalidations.
fn counts(summary: Option<&Summary>, architecture: Architecture) -> Vec<String> {
    let Some(Summary { mean, .. }) = summary else { return vec!["-".to_owned(); 7] };
    let shown =
        [Counter::Kernel, Counter::StringBytes, Counter::Loads, Counter::Stores, Counter::Atomics];
    let mut cells: Vec<String> = shown.map(|counter| rounded(mean.of(counter))).into();
    cells.push(rounded(invalidations(mean, architecture)));
    cells.push(show_time(weighed(mean, architecture)));
    cells
}

/// Three digits, because the weights justify no greater precision.
fn show_time(nanoseconds: f64) -> String {
    match nanoseconds {
        below if below < 1e3 => format!("{below:.0} ns"),
        below if below < 1e5 => format!("{:.1} us", below / 1e3),
        below if below < 1e6 => format!("{:.0} us", below / 1e3),
        below if below < 1e8 => format!("{:.1} ms", below / 1e6),
        all => format!("{:.0} ms", all / 1e6),
    }
}

fn show_figure(figure: Figure) -> String {
    let Figure { instructions, invalidations } = figure;
    match invalidations {
        Some(invalidations) => format!("{} / {invalidations}", thousands(instructions)),
        None => thousands(instructions),
    }
}

fn show_verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Reached => "reached",
        Verdict::Missed => "NOT reached",
        Verdict::NoMoreThanLinux => "",
        Verdict::MoreThanLinux => "MORE than Linux",
    }
}

/// The number of operations that reach their targets.
pub fn conclusion(comparisons: &[Comparison<'_>]) -> String {
    let count = |wanted: Verdict| {
        comparisons.iter().filter(|comparison| comparison.verdict() == Some(wanted)).count()
    };
    let (reached, missed) = (count(Verdict::Reached), count(Verdict::Missed));
    let ratios = comparisons.iter().filter_map(Comparison::ratio);
    let dearer = ratios.filter(|ratio| *ratio < 1.0).count();
    let worst = worst(comparisons).map_or_else(String::new, |(comparison, ratio)| {
        let folios =
            comparison.folio.map_or_else(String::new, |folio| format!(", folios of {folio}"));
        format!("The worst row against Linux is {}{folios}: {ratio:.2} x.\n", comparison.row.name)
    });
    format!(
        "T is reached in {reached} of {} rows that have one; \
         more instructions than Linux in {dearer} rows.\n{worst}",
        reached + missed
    )
}

/// The row in which Linux needs the fewest instructions relative to Bindery, and the ratio.
fn worst<'a, 'b>(comparisons: &'a [Comparison<'b>]) -> Option<(&'a Comparison<'b>, f64)> {
    let ratios =
        comparisons.iter().filter_map(|comparison| Some((comparison, comparison.ratio()?)));
    ratios.min_by(|(_, one), (_, other)| one.total_cmp(other))
}

fn rounded(mean: f64) -> String {
    thousands(mean.round() as u64)
}

/// How to read the tables; printed after them.
pub const LEGEND: &str = "
How to read this
  Both kernels run the same static program in the same machine (one CPU, 3 GiB, a clock that counts
  instructions), and a QEMU plugin counts what the kernel executes from just before each call to just
  after it: system call entry and exit, page faults and timer ticks included. Figures are means over
  all occurrences of the operation, the first included. The same run gives the same figures.
  Code in the kernel calls vmalloc, vmap, ioremap and their frees: at boot in Bindery's kernel, in a
  module on Linux, which puts invalidations off until many mappings were freed (docs/compare.md).
  string bytes   bytes that x86-64 rep stos and movs, and AArch64 DC ZVA, move or clear. These are not
                 part of instructions, loads or stores; AArch64 copies by loads and stores.
  inval.         TLB invalidations. x86-64: INVLPG, INVPCID, writes to CR3 and CR4. AArch64: TLBI.
  weighed        0.1 ns an instruction, 5 an atomic, 180 an invalidation, 465 a return from the kernel,
                 0.03 a byte of string bytes: a fit of native times, no measurement.
  T              the target: instructions / invalidations, set beforehand from minimal loops.
  recorded       Linux 7.2.13, measured earlier with the same workloads; shown if Linux was not run.
  Linux does more around these paths than Bindery: memory cgroups, security modules, tracing hooks, NUMA
  placement and balancing, statistics of every kind, huge page daemons, many CPUs and large machines. Most
  is switched off here by its command line (docs/compare.md), but not compiled out. Instructions are not
  time: a rough fit of native times is 0.1 ns an instruction, 5 ns an atomic, 180 ns an invalidation,
  465 ns a system call or exception. A ratio below 1.5 in instructions alone proves nothing about time.
";

#[cfg(test)]
mod tests {
    use super::super::results::Pair;
    use super::super::results::tests::measurement;
    use super::super::rows::{self, Workload};
    use super::*;

    fn pairs(linux: Option<u64>) -> [Pair; 1] {
        [Pair {
            workload: Workload::System1,
            folio: Some(FolioSize::KIB_64),
            bindery: Some(measurement(3, 20_000)),
            linux: linux.map(|linux| measurement(3, linux)),
        }]
    }

    fn line<'a>(text: &'a str, words: &[&str]) -> &'a str {
        let fits = |line: &&str| words.iter().all(|word| line.contains(word));
        text.lines().find(fits).unwrap_or_else(|| panic!("no line with {words:?} in\n{text}"))
    }

    #[test]
    fn the_table_shows_both_kernels_with_the_verdict() {
        let pairs = pairs(Some(80_000));
        let comparisons = Comparison::all(Architecture::X86_64, &pairs);
        let text = table(&comparisons);
        line(&text, &["memset", "64 KiB", "Bindery", "20,000", "4.00 x", "25,000", "reached"]);
        line(&text, &["Linux", "80,000", "55"]);
        assert!(text.lines().all(|line| line.len() <= 165), "{text}");
        assert!(conclusion(&comparisons).contains("1 of 1 rows"), "{}", conclusion(&comparisons));
    }

    #[test]
    fn the_worst_row_against_linux_is_named() {
        let pair = |folio, linux| Pair { folio: Some(folio), ..pairs(Some(linux))[0].clone() };
        let pairs = [pair(FolioSize::KIB_64, 80_000), pair(FolioSize::MIB_2, 10_000)];
        let text = conclusion(&Comparison::all(Architecture::X86_64, &pairs));
        let name = rows::ROWS.iter().find(|row| row.phase == 3).unwrap().name;
        line(&text, &["worst", name, "folios of 2 MiB", "0.50 x"]);
        line(&text, &["more instructions than Linux in 1 rows"]);
        let nothing = conclusion(&[]);
        assert!(!nothing.contains("worst"), "{nothing}");
    }

    #[test]
    fn recorded_figures_are_called_recorded() {
        let pairs = pairs(None);
        let text = table(&Comparison::all(Architecture::AArch64, &pairs));
        line(&text, &["recorded", "133,105"]);
    }

    #[test]
    fn the_legend_fits_into_120_columns() {
        assert!(LEGEND.lines().all(|line| line.len() <= 120));
    }
}
