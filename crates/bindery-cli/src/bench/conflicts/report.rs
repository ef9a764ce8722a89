//! The table of all operations, which is committed, and the comparison with it.

use std::fmt::Write as _;

use super::rows::{Data, Row};
use crate::bench::report::table;

/// The conflict lines of Linux 7.2 on two CPUs, with threads and with processes, then the project's
/// target for each. Linux's lines were counted as ours are, with Linux's own system calls.
const REFERENCES: [(&str, [Option<u32>; 4]); 30] = [
    ("first touch, own VMA", of(0, 0, 0, 0)),
    ("first touch, new table", of(1, 0, 0, 0)),
    ("first touch, one VMA", of(1, 0, 1, 0)),
    ("first touch, one table, far", of(2, 0, 2, 0)),
    ("first touch, one table, near", of(3, 0, 3, 0)),
    ("first read, zero page", of(0, 0, 0, 0)),
    ("memfd page, present", of(0, 0, 1, 1)),
    ("memfd page, new", of(6, 6, 3, 2)),
    ("madvise, DONTNEED", of(4, 4, 6, 0)),
    ("madvise, FREE", of(18, 14, 3, 0)),
    ("madvise, COLD", of(14, 9, 3, 0)),
    ("madvise, POPULATE_WRITE", of(7, 6, 4, 0)),
    ("mincore", of(2, 0, 2, 0)),
    ("mmap, fixed", of(9, 0, 9, 0)),
    ("mmap, anywhere", of(12, 0, 9, 0)),
    ("munmap, resident", of(14, 4, 11, 0)),
    ("munmap, untouched", of(11, 0, 8, 0)),
    ("mmap, touch, munmap", of(14, 4, 10, 0)),
    ("mprotect", of(7, 0, 3, 0)),
    ("mremap", of(10, 0, 4, 0)),
    // For two threads, Linux was counted with a second call that had nothing to do.
    ("brk", [None, Some(0), None, Some(0)]),
    ("fork, nearly empty", [None, Some(94), None, Some(1)]),
    ("fork, 20 VMAs, 320 pages", [None, None, None, Some(1)]),
    ("2 MiB folio, touch, munmap", [None, None, None, Some(0)]),
    ("pageout", [None, None, None, Some(0)]),
    ("swap-in", [None, None, None, Some(0)]),
    ("pageout, compressed", [None, None, None, Some(0)]),
    ("swap-in, compressed", [None, None, None, Some(0)]),
    ("pageout, device", [None, None, None, Some(0)]),
    ("swap-in, device", [None, None, None, Some(0)]),
];

const fn of(threads: u32, processes: u32, target: u32, other: u32) -> [Option<u32>; 4] {
    [Some(threads), Some(processes), Some(target), Some(other)]
}

const HEADER: [&str; 10] = [
    "lines of conflict",
    "threads",
    "processes",
    "readers: threads",
    "processes",
    "atomics",
    "Linux: threads",
    "processes",
    "target: threads",
    "processes",
];

/// The names of the settings: the columns that the comparison reads.
const NAMES: [&str; 4] = ["threads", "processes", "threads with readers", "processes with readers"];

/// The number of lines by which a row may exceed the committed table, because the layout of records
/// in memory can add one. Zero if the table has 0.
fn allowance(committed: f64) -> f64 {
    if committed == 0.0 { 0.0 } else { (committed * 0.03).max(1.0) }
}

/// The table.
pub fn rows(rows: &[Row]) -> String {
    let mut table = table(&HEADER, 1);
    for row in rows {
        let references = REFERENCES.iter().find(|(name, _)| *name == row.operation);
        let references = references.map_or([None; 4], |(_, figures)| *figures);
        let cells = [row.operation.clone()]
            .into_iter()
            .chain(row.lines.map(figure))
            .chain([figure(Some(row.atomics))])
            .chain(references.map(|lines| figure(lines.map(f64::from))));
        table.add_row(cells);
    }
    format!("{}\n", table.trim_fmt())
}

/// The data of one setting, and the operations that share it.
pub fn data(title: &str, data: &Data) -> String {
    let mut text = format!("\n{title}\n");
    for (name, operations) in data {
        let mut shown = String::new();
        for (number, (operation, lines)) in operations.iter().enumerate() {
            let comma = if number == 0 { "" } else { "; " };
            // Writing to a string cannot fail.
            let _ = write!(shown, "{comma}{operation} {}", figure(Some(*lines)));
        }
        let _ = writeln!(text, "  {name}\n    {shown}");
    }
    text
}

/// The rows that have more lines of conflict than the committed table allows, and the rows that are
/// in only one of the tables.
pub fn grown(rows: &[Row], committed: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for row in rows {
        let Some(figures) = committed_row(committed, &row.operation) else {
            problems.push(format!(
                "{} is not in docs/figures/conflicts.txt; --write adds it",
                row.operation
            ));
            continue;
        };
        for (column, (lines, committed)) in row.lines.iter().zip(figures).enumerate() {
            let is_worse = match (*lines, committed) {
                (Some(lines), Some(committed)) => lines > committed + allowance(committed),
                (None, None) => false,
                (Some(_), None) | (None, Some(_)) => true,
            };
            if is_worse {
                problems.push(format!(
                    "{}, {}: {} lines, and the committed table has {}",
                    row.operation,
                    NAMES[column],
                    figure(*lines),
                    figure(committed)
                ));
            }
        }
    }
    // Under the header and its rule.
    for line in committed.lines().skip(2) {
        let name = line.split("  ").next().unwrap_or_default();
        if !rows.iter().any(|row| row.operation == name) {
            problems.push(format!(
                "{name:?} is in docs/figures/conflicts.txt, and was not measured; --write removes it"
            ));
        }
    }
    problems
}

/// The figures of one operation in a table: threads and processes, then both with readers.
pub fn committed_row(committed: &str, operation: &str) -> Option<[Option<f64>; NAMES.len()]> {
    let rest = committed.lines().find_map(|line| {
        let rest = line.strip_prefix(operation)?;
        // A longer name begins with the same words.
        rest.starts_with("  ").then_some(rest)
    })?;
    let mut figures = [None; NAMES.len()];
    let mut words = rest.split_whitespace();
    for figure in &mut figures {
        let word = words.next()?;
        *figure = if word == "-" { None } else { Some(word.parse().ok()?) };
    }
    Some(figures)
}

/// The number of lines as the tables show it.
pub fn figure(lines: Option<f64>) -> String {
    match lines {
        None => "-".to_owned(),
        Some(lines) if lines.fract() == 0.0 => format!("{lines:.0}"),
        Some(lines) => format!("{lines:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(operation: &str, lines: [Option<f64>; 4]) -> Row {
        Row { operation: operation.to_owned(), lines, atomics: 7.0 }
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let written = [
            row("brk", [Some(3.0), Some(0.0), Some(4.5), Some(0.0)]),
            row("first touch, one table, far", [Some(1.0), None, None, Some(600.0)]),
        ];
        let text = rows(&written);
        assert!(grown(&written, &text).is_empty(), "{text}");
        // The other row of the table was not measured, which is one problem.
        let within = row("brk", [Some(4.0), Some(0.0), Some(5.5), Some(0.0)]);
        assert_eq!(grown(&[within], &text).len(), 1);
        let beyond = row("brk", [Some(4.5), Some(0.5), Some(4.5), Some(0.0)]);
        assert_eq!(grown(&[beyond], &text).len(), 3, "a row of 0 lines stays one");
        let hundreds = row("first touch, one table, far", [Some(1.0), None, None, Some(619.0)]);
        assert_eq!(grown(&[hundreds], &text).len(), 2);
        let missing = row("brk", [Some(3.0), Some(0.0), None, Some(0.0)]);
        assert_eq!(grown(&[missing], &text).len(), 2, "a setting that was not measured");
        assert_eq!(grown(&[row("first touch", [None; 4])], &text).len(), 3, "it has no row");
    }

    #[test]
    fn each_reference_belongs_to_an_operation() {
        let source = include_str!("../../../../bindery-conflicts/src/operations.rs");
        for (name, _) in REFERENCES {
            assert!(source.contains(&format!("\"{name}\"")), "{name}");
        }
    }
}
