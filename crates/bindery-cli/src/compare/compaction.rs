//! The complete cost of compaction by MOVE compared with COPY: kernel, program, and the bytes that
//! string instructions copy and clear.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::counts::{Counter, Summary};
use super::results::Comparison;

/// The beginnings of the keys of both rows of a pair.
const COPY: &str = "compact-copy-";
const MOVE: &str = "compact-move-";

/// Instructions, with each eight bytes of string instructions counted as one.
fn effort(summary: &Summary) -> f64 {
    let of = |counter| summary.mean.of(counter);
    // The C library of the workloads copies and fills in words of eight bytes.
    of(Counter::Kernel)
        + of(Counter::User)
        + of(Counter::UserString)
        + of(Counter::StringBytes) / 8.0
}

/// A line for each size of ranges, folio size and method; empty if no compaction was measured.
pub fn table(comparisons: &[Comparison<'_>]) -> String {
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('-').junction('-')));
    table.set_header(["MOVE / COPY", "folios", "Bindery", "Linux"]);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if number == 0 { 0 } else { 1 }, 0));
        if number > 1 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut pairs = 0;
    for copied in comparisons {
        let Some(ranges) = copied.row.key.strip_prefix(COPY) else { continue };
        let belongs = |other: &&Comparison<'_>| {
            other.folio == copied.folio && other.row.key.strip_prefix(MOVE) == Some(ranges)
        };
        let Some(moved) = comparisons.iter().find(belongs) else { continue };
        let percent = |moved: Option<&Summary>, copied: Option<&Summary>| {
            let (moved, copied) = (effort(moved?), effort(copied?));
            (copied > 0.0).then(|| format!("{:.0} %", moved * 100.0 / copied))
        };
        let shown = |percent: Option<String>| percent.unwrap_or_else(|| "-".to_owned());
        pairs += 1;
        table.add_row([
            format!("compaction by {ranges}"),
            copied.folio.map_or_else(|| "-".to_owned(), |folio| folio.to_string()),
            shown(percent(moved.bindery, copied.bindery)),
            shown(percent(moved.linux, copied.linux)),
        ]);
    }
    if pairs == 0 {
        return String::new();
    }
    format!(
        "\n{}\n\nInstructions of kernel and program together; eight bytes that string instructions copy or \
         clear\ncount as one more.\n",
        table.trim_fmt()
    )
}

#[cfg(test)]
mod tests {
    use bindery_cli::guest::Architecture;

    use super::super::results::Pair;
    use super::super::results::tests::measurement;
    use super::super::rows::{Row, Workload};
    use super::*;
    use crate::size::FolioSize;

    #[test]
    fn moves_stand_beside_copies_of_the_same_ranges() {
        let phase = |key| Row::from_key(key).unwrap().phase;
        let mut both = measurement(phase("compact-copy-64k"), 1_000_000);
        both.phases.extend(measurement(phase("compact-move-64k"), 500_000).phases);
        let pair = |workload| Pair {
            workload,
            folio: Some(FolioSize::BASE),
            bindery: Some(both.clone()),
            linux: None,
        };
        let pairs = [pair(Workload::Compaction)];
        let text = table(&Comparison::all(Architecture::X86_64, &pairs));
        let line = text.lines().find(|line| line.contains("by 64k ")).unwrap();
        assert!(line.contains("50 %") && line.contains('-'), "{text}");
        let pairs = [pair(Workload::System1)];
        assert_eq!(table(&Comparison::all(Architecture::X86_64, &pairs)), "");
    }

    #[test]
    fn copied_bytes_count_at_one_for_eight() {
        // The counters are 100 kernel instructions, then 2, 3, 4 and so on.
        let measured = measurement(1, 100);
        let mean = measured.phases[&1].mean;
        let expected = 100.0
            + mean.of(Counter::User)
            + mean.of(Counter::UserString)
            + mean.of(Counter::StringBytes) / 8.0;
        assert_eq!(effort(&measured.phases[&1]), expected);
        assert!(mean.of(Counter::StringBytes) > 0.0);
    }
}
