//! `docs/tour.md` names files and functions; each must be in the named place.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::BTreeSet;
use std::path::Path;

/// The maximum number of files that the tour visits.
const FILES: usize = 15;
const FUNCTIONS: usize = 30;

/// The rows of the table: number, file, function.
fn stops(page: &str) -> Vec<(String, String)> {
    let cells = |line: &str| -> Vec<String> {
        line.split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let rows = page.lines().filter(|line| line.starts_with('|')).map(cells);
    let numbered = rows.filter(|row| row.len() > 4 && row[1].parse::<u32>().is_ok());
    numbered.map(|row| (row[2].clone(), row[3].clone())).collect()
}

#[test]
fn the_tours_stops_are_few_and_right() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("../../docs/tour.md")).unwrap();
    let stops = stops(&page);
    let files: BTreeSet<_> = stops.iter().map(|(file, _)| file).collect();
    assert!(!stops.is_empty() && files.len() <= FILES && stops.len() <= FUNCTIONS);
    for (file, function) in &stops {
        let folder = if file.starts_with("bindery-") { ".." } else { "src" };
        let source = std::fs::read_to_string(root.join(folder).join(file));
        let source = source.unwrap_or_else(|error| panic!("{file}: {error}"));
        let defined = ["(", "<"].iter().any(|end| source.contains(&format!("fn {function}{end}")));
        assert!(defined, "{file} has no function {function}");
    }
}
