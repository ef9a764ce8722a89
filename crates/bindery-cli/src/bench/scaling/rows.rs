//! The operations that the model knows, and the targets.

use super::read::Sharing;

/// An operation whose lines of conflict `bindery bench conflicts` counts.
pub struct Modelled {
    pub operation: &'static str,
    /// The rows of that table that make up the operation, with their repetitions.
    pub rows: &'static [(&'static str, f64)],
    /// The target as a fraction of the control: threads, processes.
    pub targets: [Option<f64>; 2],
}

/// Pages of a sample of `page_fault1`, which share the cost of one mmap and one munmap.
const PAGES: f64 = 256.0;

/// In the order of the program.
pub const MODELLED: &[Modelled] = &[
    Modelled {
        operation: "first touch, own VMA",
        rows: &[("first touch, own VMA", 1.0)],
        targets: [Some(0.90), Some(0.95)],
    },
    Modelled {
        operation: "first touch, one VMA",
        rows: &[("first touch, one VMA", 1.0)],
        targets: [Some(0.60), None],
    },
    Modelled {
        operation: "DONTNEED, touch",
        rows: &[("madvise, DONTNEED", 1.0), ("first touch, own VMA", 16.0)],
        targets: [Some(0.80), Some(0.95)],
    },
    Modelled {
        operation: "mmap, touch, munmap",
        rows: &[("mmap, touch, munmap", 1.0)],
        targets: [Some(0.56), Some(0.95)],
    },
    Modelled {
        operation: "mmap, munmap",
        rows: &[("mmap, fixed", 1.0), ("munmap, untouched", 1.0)],
        targets: [Some(0.40), Some(0.95)],
    },
    Modelled {
        operation: "mprotect",
        rows: &[("mprotect", 1.0)],
        targets: [Some(0.45), Some(0.97)],
    },
    Modelled {
        operation: "page_fault1: memory",
        rows: &[
            ("first touch, own VMA", 1.0),
            ("mmap, anywhere", 1.0 / PAGES),
            ("munmap, resident", 1.0 / PAGES),
        ],
        targets: [None; 2],
    },
    Modelled {
        operation: "mmap1: memory",
        rows: &[("mmap, anywhere", 1.0), ("munmap, untouched", 1.0)],
        targets: [None; 2],
    },
    Modelled {
        operation: "malloc: map, one touch, unmap",
        rows: &[
            ("mmap, anywhere", 1.0),
            ("first touch, new table", 1.0),
            ("munmap, resident", 1.0),
        ],
        targets: [None; 2],
    },
    Modelled { operation: "brk: a page more and less", rows: &[("brk", 2.0)], targets: [None; 2] },
    Modelled {
        operation: "fork: a child that ends",
        rows: &[("fork, nearly empty", 1.0)],
        targets: [None; 2],
    },
];

impl Modelled {
    /// The target of a setting, as a fraction of the control.
    pub fn target(operation: &str, sharing: Sharing) -> Option<f64> {
        let row = MODELLED.iter().find(|row| row.operation == operation)?;
        match sharing {
            Sharing::Threads => row.targets[0],
            Sharing::Processes => row.targets[1],
            Sharing::Memories => None,
        }
    }

    /// The lines of an operation. `lines_of` returns the lines of a row for threads and processes.
    pub fn lines(
        &self,
        sharing: Sharing,
        lines_of: impl Fn(&str) -> Option<[Option<f64>; 2]>,
    ) -> Option<f64> {
        let column = match sharing {
            Sharing::Threads => 0,
            Sharing::Processes => 1,
            Sharing::Memories => return Some(0.0),
        };
        self.rows.iter().map(|(row, times)| Some(lines_of(row)?[column]? * times)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::conflicts::{TABLE, committed_row};

    #[test]
    fn the_committed_table_has_all_rows() {
        let path = bindery_cli::guest::workspace::root().unwrap().join(TABLE);
        let table = std::fs::read_to_string(path).unwrap();
        for (row, _) in MODELLED.iter().flat_map(|modelled| modelled.rows) {
            assert!(committed_row(&table, row).is_some(), "{row}");
        }
    }

    #[test]
    fn lines_add_up() {
        let both = MODELLED.iter().find(|row| row.operation == "mmap, munmap").unwrap();
        let lines_of = |row: &str| Some([Some(if row == "mmap, fixed" { 7.0 } else { 2.0 }), None]);
        assert_eq!(both.lines(Sharing::Threads, lines_of), Some(9.0));
        assert_eq!(both.lines(Sharing::Processes, lines_of), None);
    }
}
