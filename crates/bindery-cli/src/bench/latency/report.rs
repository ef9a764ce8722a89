//! The longest sections as a table.

use comfy_table::Cell;

use super::meter::{BOUNDS, Row};
use crate::bench::report::table;
use crate::output::thousands;
use crate::size::show_bytes;

/// The meaning of the columns, and the bounds.
pub fn legend() -> String {
    format!(
        "\nThe most that one read section did; no page-table lock outlasts a section. Bounds: {} \
         entries,\n{} tables marked, {} zeroed or copied; a row that exceeds them ends with \"!\".\n\
         rmap   entries and VMAs looked at while a lock of the reverse map was held: {}\n\
         waits  grace periods that the call waited for\n\
         later  tables and records that the call leaves to be freed when all readers have left\n",
        thousands(BOUNDS.entries),
        BOUNDS.tables_marked,
        show_bytes(BOUNDS.bytes),
        thousands(BOUNDS.reverse_map_entries),
    )
}

/// One line for each call.
pub fn rows(rows: &[Row]) -> String {
    let header = ["call", "on", "entries", "tables", "bytes", "rmap", "waits", "later", ""];
    let mut table = table(&header, 2);
    for row in rows {
        let longest = &row.longest;
        let numbers = [
            longest.entries,
            longest.tables_marked,
            longest.bytes,
            longest.reverse_map_entries,
            longest.grace_periods,
            longest.tables_deferred + longest.records_deferred,
        ];
        let words = [row.call, &row.arguments].map(Cell::new);
        let mark = if row.within_bounds { "" } else { "!" };
        let numbers = numbers.map(|number| Cell::new(thousands(number)));
        table.add_row(words.into_iter().chain(numbers).chain([Cell::new(mark)]));
    }
    format!("{}\n", table.trim_fmt())
}
