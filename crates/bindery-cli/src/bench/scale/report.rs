//! The figures as a table.

use comfy_table::Cell;

use super::Row;
use crate::bench::report::table;
use crate::output::thousands;

pub const LEGEND: &str = "
Means of one call; of fork, truncate and sync, means of one mapping. Steps: nodes looked at in the
index of mappings, in the object's tree of mappings and in its page index. Growth: steps among the
most mappings divided by those among the fewest, and in parentheses the growth of a logarithm. A row
that grows by more than twice that ends with \"!\".
";

/// One line for each call and number of mappings.
pub fn rows(rows: &[Row]) -> String {
    let header =
        ["mappings of a", "call", "mappings", "steps", "entries", "locks", "ns", "growth", ""];
    let mut table = table(&header, 2);
    for row in rows {
        for (number, sample) in row.samples.iter().enumerate() {
            let of_one = |sum: u64| sum as f64 / sample.calls.max(1) as f64;
            let counts = [sample.steps, sample.entries, sample.locks];
            let last = number + 1 == row.samples.len();
            let growth = format!("{:.1} ({:.1})", row.growth, row.logarithm);
            let words = if number == 0 { [row.scene, row.call] } else { [""; 2] };
            let cells = words
                .map(Cell::new)
                .into_iter()
                .chain([Cell::new(thousands(sample.mappings))])
                .chain(counts.map(|sum| Cell::new(format!("{:.1}", of_one(sum)))))
                .chain([Cell::new(format!("{:.0}", of_one(sample.nanoseconds)))])
                .chain([if last { growth.as_str() } else { "" }].map(Cell::new))
                .chain([if last && !row.logarithmic { "!" } else { "" }].map(Cell::new));
            table.add_row(cells);
        }
    }
    format!("{}\n", table.trim_fmt())
}
