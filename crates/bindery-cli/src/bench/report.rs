//! The figures as tables and plain sentences, readable at 120 columns.

use bindery_hosted::ArchitectureName;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::engine::{Comparison, FULL, LINUX, PAGE};
use super::floor::Floor;
use super::host::Host;
use super::json;
use super::kernel::NO_LINUX;
use super::measure::{Clock, Outcome, Samples};
use super::statistics::{Summary, ratio};
use super::workload::Script;
use crate::output::thousands;

/// The heading, known before the measurement. With `full`, the tables have spreads.
pub fn heading(host: &Host, arch: ArchitectureName, clock: Clock, full: bool) -> String {
    let Host { kernel, cpu, .. } = host;
    let times = if full { "median (p10-p90)" } else { "median" };
    format!(
        "engine  hosted machine {arch} in this process, plain TLB, one CPU (library calls)\n\
         Linux   system calls of {kernel}, on {cpu}\n\
         times   {times}; the clock's own {} ns are taken off\n",
        clock.cost
    )
}

/// The two tables of one script with `--full`: times, then counts.
pub fn tables(script: &Script, comparison: &Comparison, figures: &json::Table) -> String {
    let outcomes = &comparison.outcomes;
    format!(
        "\n{}\n(Linux: {}; engine: {} ns of its times are for each invalidation)\n\n{}\n\n{}\n{}",
        title(script),
        figures.linux_folios,
        comparison.invalidation,
        times(script, outcomes).trim_fmt(),
        counts(script, outcomes).trim_fmt(),
        remarks(figures),
    )
}

/// The table without `--full`: a row for each call.
pub fn short_table(script: &Script, figures: &json::Table) -> String {
    let header = [
        "time, writes",
        "whole tables",
        "page/whole",
        "Linux/whole",
        "written",
        "x floor",
        "invalid.",
    ];
    let mut table = table(&header, 1);
    for phase in &figures.phases {
        let json::Phase { phase: name, floor, ratio_page, ratio_linux, ratio_floor, .. } = phase;
        let json::Measurement { nanoseconds, counts, .. } = &phase.table;
        let times = |ratio: &Option<f64>| ratio.map(|ratio| format!("{} x", three_digits(ratio)));
        let time = nanoseconds.map(|summary| show_time(summary.median, summary.median));
        let written = counts.as_ref().map(|work| thousands(work.entries_written));
        let invalidations = counts.as_ref().map(|work| {
            format!("{} ({})", thousands(work.invalidations), thousands(floor.invalidations))
        });
        let figures = [
            time,
            times(ratio_page),
            times(ratio_linux),
            written,
            ratio_floor.map(three_digits),
            invalidations,
        ];
        let shown = figures.map(|figure| figure.unwrap_or_else(|| "-".to_owned()));
        table.add_row([together(name, phase.calls)].into_iter().chain(shown));
    }
    format!("\n{}\n{}\n{}", title(script), table.trim_fmt(), remarks(figures))
}

/// The name of a call, with the number of calls that were measured together.
fn together(name: &str, calls: u64) -> String {
    if calls == 1 { name.to_owned() } else { format!("{name} x {calls}") }
}

/// The workload, its folios and its variant.
fn title(script: &Script) -> String {
    let Script { workload, variant, folio, .. } = script;
    let folios = if workload.has_folios() { format!(", folios of {folio}") } else { String::new() };
    format!("{}{folios}: {variant}", workload.name())
}

/// A line for each subject whose figures are incomplete or unsteady.
fn remarks(figures: &json::Table) -> String {
    let json::Table { page_problem, table_problem, linux_problem, phases, .. } = figures;
    let mut text = String::new();
    let subjects = [
        ("page by page", page_problem, PAGE),
        ("whole tables", table_problem, FULL),
        ("Linux", linux_problem, LINUX),
    ];
    for (subject, problem, number) in subjects {
        if let Some(problem) = problem.as_ref().filter(|problem| *problem != NO_LINUX) {
            text.push_str(&format!("{subject}: not measured further: {problem}\n"));
        }
        let unsteady: Vec<_> = phases
            .iter()
            .filter(|phase| ![&phase.page, &phase.table, &phase.linux][number].counts_steady)
            .map(|phase| &*phase.phase)
            .collect();
        if !unsteady.is_empty() {
            text.push_str(&format!(
                "{subject}: counts differed from call to call in {}; those of the last are shown\n",
                unsteady.join(", ")
            ));
        }
    }
    text
}

/// No lines but one under the header.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('-').junction('-'));

/// A table whose first `left` columns are words, the others numbers.
pub fn table(header: &[&str], left: usize) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if number == 0 { 0 } else { 1 }, 0));
        if number >= left {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn times(script: &Script, outcomes: &[Outcome; 3]) -> Table {
    let last = if published(script) { "published" } else { "Linux/whole" };
    let header = ["time", "page by page", "whole tables", "Linux", "page/whole", last];
    let mut table = table(&header, 1);
    let mut sums = [Some(0); 3];
    for (number, phase) in script.phases.iter().enumerate() {
        let samples = outcomes.each_ref().map(|outcome| outcome.phases[number].summary());
        for (sum, summary) in sums.iter_mut().zip(samples) {
            *sum = sum.zip(summary).map(|(sum, summary)| sum + summary.median);
        }
        let mut row = vec![phase.name.clone()];
        row.extend(outcomes.each_ref().map(|outcome| match outcome.phases[number].summary() {
            Some(summary) => show_summary(summary),
            None => absence(outcome),
        }));
        let medians = samples.map(|summary| summary.map(|summary| summary.median));
        let [page, linux] = ratios(medians);
        let times = |ratio: f64| format!("{ratio:.1} x");
        let last =
            if published(script) { phase.published.map_or_else(String::new, times) } else { linux };
        row.extend([page, last]);
        table.add_row(row);
    }
    if script.is_loop {
        let mut row = vec!["sum of medians".to_owned()];
        row.extend(sums.map(|sum| sum.map_or_else(String::new, |sum| show_time(sum, sum))));
        row.extend(ratios(sums));
        table.add_row(row);
    }
    table
}

/// Whether others have published the gain from large pieces in the script's phases.
fn published(script: &Script) -> bool {
    script.phases.iter().any(|phase| phase.published.is_some())
}

/// The times page by page and on Linux, each as a multiple of the time with whole tables.
fn ratios(medians: [Option<u64>; 3]) -> [String; 2] {
    [PAGE, LINUX].map(|who| {
        let ratio = medians[who].zip(medians[FULL]).and_then(|(of, than)| ratio(of, than));
        ratio.map_or_else(String::new, |ratio| format!("{} x", three_digits(ratio)))
    })
}

fn counts(script: &Script, outcomes: &[Outcome; 3]) -> Table {
    let header = [
        "counts",
        "reach",
        "read",
        "written",
        "floor",
        "x floor",
        "descended",
        "+/-/moved",
        "invalid.",
        "pages",
    ];
    let mut table = table(&header, 2);
    for (number, phase) in script.phases.iter().enumerate() {
        for (reach, who, name) in [("page", PAGE, &*phase.name), ("whole", FULL, "")] {
            let name =
                if name.is_empty() { String::new() } else { together(name, phase.repetitions) };
            let mut row = vec![name, reach.to_owned()];
            row.extend(counts_of(&outcomes[who].phases[number], phase.floor));
            table.add_row(row);
        }
    }
    table
}

fn counts_of(samples: &Samples, floor: Floor) -> Vec<String> {
    let Some(tally) = samples.tally() else { return vec!["-".to_owned()] };
    let counts = tally.counts;
    let local = match tally.local_invalidations {
        0 => String::new(),
        local => format!("+{}", thousands(local)),
    };
    let least = floor.entries_written + floor.tables_installed;
    let tables = [counts.tables_allocated, counts.tables_freed, counts.tables_moved];
    vec![
        thousands(counts.entries_read),
        thousands(counts.entries_written),
        show_floor(floor),
        ratio(counts.entries_written, least).map_or_else(String::new, three_digits),
        thousands(counts.entries_descended),
        tables.map(thousands).join("/"),
        format!("{}{local} ({})", thousands(counts.invalidations), floor.invalidations),
        thousands(counts.pages_invalidated),
    ]
}

fn show_floor(floor: Floor) -> String {
    let entries = thousands(floor.entries_written);
    match floor.tables_installed {
        0 => entries,
        hooks => format!("{entries}+{}", thousands(hooks)),
    }
}

fn absence(outcome: &Outcome) -> String {
    match outcome.problem.as_deref() {
        Some(NO_LINUX) => NO_LINUX.to_owned(),
        Some(_) => "not measured".to_owned(),
        None => "-".to_owned(),
    }
}

fn show_summary(summary: Summary) -> String {
    let Summary { p10, median, p90, .. } = summary;
    let time = |nanoseconds| show_time(nanoseconds, median);
    if summary.samples == 1 {
        return time(median);
    }
    let unitless = |nanoseconds| time(nanoseconds).rsplit_once(' ').map(|(n, _)| n.to_owned());
    let (low, high) = (unitless(p10).unwrap_or_default(), unitless(p90).unwrap_or_default());
    format!("{} ({low}-{high})", time(median))
}

/// In the unit that suits `scale`.
fn show_time(nanoseconds: u64, scale: u64) -> String {
    let (unit, name) = match scale {
        0..1_000 => return format!("{nanoseconds} ns"),
        1_000..1_000_000 => (1e3, "us"),
        1_000_000..1_000_000_000 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    format!("{} {name}", three_digits(nanoseconds as f64 / unit))
}

/// A number of three digits, or of more before the point.
pub fn three_digits(value: f64) -> String {
    let decimals = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    if decimals == 0 { thousands(value.round() as u64) } else { format!("{value:.decimals$}") }
}

/// How to read the tables; printed after them.
pub const LEGEND: &str = "
How to read this
  whole tables   the engine as it is (Reach::Table): every operation takes the largest piece that the page table can
                 name. page by page (Reach::Page) is the same code with pieces of one base page: the baseline, so
                 page/whole is what larger pieces gain. Both have the same folios, so first touches are alike.
  Linux          does more in each call than the engine: system call entry and exit, in a first touch an exception and
                 the store itself, accounting, locks, reverse mappings, security hooks. Linux/whole is the most that a
                 program would notice, not a measure of Linux's page tables. Its entries cannot be counted from here.
  floor          the fewest entry writes that the work needs on any system: an entry that moves is cleared once and set
                 once, plus (+n) missing tables installed. x floor: writes divided by the floor. 1.00 is the minimum;
                 less means that entries were dropped with their table instead of being cleared, or, page by page,
                 that there are no contiguous runs, which must be broken before they change.
  counts         descended: entries read on the way down from the root. +/-/moved: tables allocated, freed, and moved
                 by the one entry that names them. invalid.: invalidations sent, (their floor), and +n on the faulting
                 CPU alone; pages: base pages that those covered.
  published      system 1, 64 KiB folios in one batch: the loop of remap-1m took 1.9 s and then 1.2 s, 1.6 x (Apple
                 M3, AArch64). System 2, whole tables: mremap of 1 GiB 3.4 ms and then 160 us, 20 x (x86-64).
                 System 5, the last column of kernel-map: Linux with large pieces, to Linux as it is (RK3588, AArch64).
                 There, each kernel entry is stored with its own barriers; barriers are not timed here.
  x 32           this many calls share a purge and are timed together. Times are those of one call; counts and floor
                 are those of all.
  not timed      the MMU itself. Counts do not depend on the host: compare them first. Times vary by 30 % from run
                 to run on a shared machine.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_a_suitable_unit() {
        assert_eq!(show_time(7, 7), "7 ns");
        assert_eq!(show_time(1_234, 1_234), "1.23 us");
        assert_eq!(show_time(45_678, 45_678), "45.7 us");
        assert_eq!(show_time(345_678_901, 345_678_901), "346 ms");
        assert_eq!(show_time(2_500_000, 900_000), "2,500 us");
        assert_eq!(three_digits(9.999), "10.0");
    }

    #[test]
    fn the_spread_has_the_unit_of_the_median() {
        let summary = Summary {
            samples: 9,
            minimum: 900,
            p10: 950,
            median: 1_200,
            p90: 15_000,
            maximum: 20_000,
        };
        assert_eq!(show_summary(summary), "1.20 us (0.95-15.0)");
    }

    #[test]
    fn the_legend_fits_into_120_columns() {
        assert!(LEGEND.lines().all(|line| line.len() <= 120));
    }
}
