//! The end of the output: three sentences with the results, and where to look next.

use super::json::{Phase, Table};
use super::report::three_digits;

/// A ratio of a tenth or less is within the spread of two runs.
const NOTABLE: f64 = 1.1;

/// Three sentences about all figures.
pub fn conclusion(results: &[Table]) -> String {
    let measured: Vec<_> =
        rows(results).filter(|row| row.phase.table.nanoseconds.is_some()).collect();
    if measured.is_empty() {
        return "\nNothing was measured.\n".to_owned();
    }
    format!("\n{}\n{}\n{}\n", floor(&measured), larger_pieces(&measured), linux(&measured))
}

/// A measured call, and its table.
#[derive(Clone, Copy)]
struct Row<'a> {
    table: &'a Table,
    phase: &'a Phase,
}

fn rows(results: &[Table]) -> impl Iterator<Item = Row<'_>> {
    results.iter().flat_map(|table| table.phases.iter().map(move |phase| Row { table, phase }))
}

/// The row with the largest ratio.
fn largest<'a>(rows: &[Row<'a>], ratio: impl Fn(&Phase) -> Option<f64>) -> Option<(Row<'a>, f64)> {
    rows.iter()
        .filter_map(|row| Some((*row, ratio(row.phase)?)))
        .max_by(|(_, one), (_, other)| one.total_cmp(other))
}

/// Whether the number of entries that the call writes does not exceed its floor.
fn is_at_the_floor(phase: &Phase) -> bool {
    let floor = phase.floor.entries_written + phase.floor.tables_installed;
    phase.table.counts.as_ref().is_some_and(|work| work.entries_written <= floor)
}

fn floor(rows: &[Row<'_>]) -> String {
    let at_the_floor = rows.iter().filter(|row| is_at_the_floor(row.phase)).count();
    let excess = largest(rows, |phase| phase.ratio_floor).filter(|(_, ratio)| *ratio > 1.0);
    let rest = excess.map_or_else(String::new, |(row, ratio)| {
        format!(", the others at most {:.1} % more ({})", 100.0 * (ratio - 1.0), row.phase.phase)
    });
    format!("{at_the_floor} of {} calls write the fewest entries possible{rest}.", rows.len())
}

fn larger_pieces(rows: &[Row<'_>]) -> String {
    let faster = rows.iter().filter(|row| row.phase.ratio_page > Some(NOTABLE)).count();
    let most = largest(rows, |phase| phase.ratio_page).filter(|(_, ratio)| *ratio > NOTABLE);
    let rest = most.map_or_else(String::new, |(row, ratio)| {
        format!(", {} most ({} x)", row.phase.phase, three_digits(ratio))
    });
    let all = rows.len();
    format!(
        "Pieces larger than a page speed {faster} of {all} calls up by more than a tenth{rest}."
    )
}

fn linux(rows: &[Row<'_>]) -> String {
    let next =
        "look next at --full (spreads, all counts, a legend) and at docs/compare.md (instructions)";
    let ratio = |phase: &Phase| phase.ratio_linux;
    let Some((most, high)) = largest(rows, ratio) else {
        return format!("Linux was not measured ({});\n{next}.", reason(rows));
    };
    let compared: Vec<_> = rows.iter().filter_map(|row| ratio(row.phase)).collect();
    let low = compared.iter().copied().fold(high, f64::min);
    format!(
        "Linux takes {} to {} times as long for {} calls (most: {});\n{next}.",
        three_digits(low),
        three_digits(high),
        compared.len(),
        most.phase.phase
    )
}

/// The first reason why Linux is missing.
fn reason<'a>(rows: &[Row<'a>]) -> &'a str {
    let problem = rows.iter().find_map(|row| row.table.linux_problem.as_deref());
    problem.unwrap_or("its calls took no time")
}
