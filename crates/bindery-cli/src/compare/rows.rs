//! The workloads, the phases of each, and the operations that the tables show.

use clap::ValueEnum;

use crate::size::FolioSize;

/// A program under `programs/workloads`. Each runs in a machine of its own, so that its figures do
/// not depend on what else was asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Debug)]
pub enum Workload {
    /// 1 MiB is mapped, written, moved and unmapped, again and again
    #[value(name = "system1")]
    System1,
    /// 1 GiB of touched memory is moved, in four ways, and unmapped
    #[value(name = "system2")]
    System2,
}

impl Workload {
    /// Its name on the command line, which is that of its source too.
    pub fn name(self) -> &'static str {
        match self {
            Self::System1 => "system1",
            Self::System2 => "system2",
        }
    }

    /// What it is run with: one list of arguments for each time.
    pub fn runs(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::System1 => {
                &[&["--iterations", "1000"], &["--iterations", "1000", "--offset", "4096"]]
            }
            Self::System2 => &[&["--mib", "1024", "--moves", "4"]],
        }
    }
}

/// An operation: a phase of a workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// The workload that it is in.
    pub workload: Workload,
    /// Its number in `programs/include/mark.h`.
    pub phase: u16,
    /// Its name for `--profile` and in the JSON.
    pub key: &'static str,
    /// Its name in the table.
    pub name: &'static str,
}

impl Row {
    /// The operation that is called so.
    pub fn from_key(key: &str) -> Result<Self, String> {
        ROWS.iter().copied().find(|row| row.key == key).ok_or_else(|| {
            let keys: Vec<&str> = ROWS.iter().map(|row| row.key).collect();
            format!("operations are {}", keys.join(", "))
        })
    }
}

/// All operations, in the order of the table.
pub const ROWS: &[Row] = &[
    row(Workload::System1, 2, "mmap-1m", "mmap 1 MiB"),
    row(Workload::System1, 3, "touch-1m", "first touch of 1 MiB (memset)"),
    row(Workload::System1, 4, "mremap-1m", "mremap 1 MiB, congruent by 1 MiB"),
    row(Workload::System1, 260, "mremap-1m-off-4k", "mremap 1 MiB, off by 4 KiB"),
    row(Workload::System1, 5, "munmap-1m", "munmap 1 MiB"),
    row(Workload::System1, 261, "munmap-1m-off-4k", "munmap 1 MiB, moved off by 4 KiB"),
    row(Workload::System2, 20, "touch-1g", "mmap and first touch of 1 GiB"),
    row(Workload::System2, 16, "mremap-1g", "mremap 1 GiB, congruent by 1 GiB"),
    row(Workload::System2, 17, "mremap-1g-by-2m", "mremap 1 GiB, congruent by 2 MiB"),
    row(Workload::System2, 18, "mremap-1g-off-64k", "mremap 1 GiB, off by 64 KiB"),
    row(Workload::System2, 19, "mremap-1g-off-4k", "mremap 1 GiB, off by 4 KiB"),
    row(Workload::System2, 21, "munmap-1g", "munmap 1 GiB"),
];

const fn row(workload: Workload, phase: u16, key: &'static str, name: &'static str) -> Row {
    Row { workload, phase, key, name }
}

/// The folio sizes that are measured unless others are asked for.
pub const FOLIOS: [FolioSize; 3] = [FolioSize::BASE, FolioSize::KIB_64, FolioSize::MIB_2];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_a_phase_and_a_key_of_its_own() {
        for (number, row) in ROWS.iter().enumerate() {
            assert_eq!(Row::from_key(row.key), Ok(*row));
            assert!(ROWS[..number].iter().all(|other| other.phase != row.phase), "{}", row.name);
        }
        assert!(Row::from_key("swap").unwrap_err().contains("mremap-1g-by-2m"));
    }

    #[test]
    fn phases_are_those_of_the_marks() {
        let marks = include_str!("../../../../programs/include/mark.h");
        let number_of = |name: &str| -> u16 {
            let line = marks.lines().find_map(|line| line.trim().strip_prefix(name));
            let number = line.and_then(|line| line.strip_prefix(" = ")?.strip_suffix(','));
            number.unwrap_or_else(|| panic!("mark.h has no {name}")).parse().unwrap()
        };
        let offset = number_of("PHASE_OFFSET");
        for (key, phase) in [
            ("mmap-1m", number_of("PHASE_MMAP")),
            ("touch-1m", number_of("PHASE_FIRST_TOUCH")),
            ("mremap-1m", number_of("PHASE_MREMAP")),
            ("mremap-1m-off-4k", number_of("PHASE_MREMAP") + offset),
            ("munmap-1m", number_of("PHASE_MUNMAP")),
            ("munmap-1m-off-4k", number_of("PHASE_MUNMAP") + offset),
            ("touch-1g", number_of("PHASE_POPULATE_1G")),
            ("mremap-1g", number_of("PHASE_MOVE_BY_1G")),
            ("mremap-1g-by-2m", number_of("PHASE_MOVE_BY_2M")),
            ("mremap-1g-off-64k", number_of("PHASE_MOVE_OFF_64K")),
            ("mremap-1g-off-4k", number_of("PHASE_MOVE_OFF_4K")),
            ("munmap-1g", number_of("PHASE_MUNMAP_1G")),
        ] {
            assert_eq!(Row::from_key(key).unwrap().phase, phase, "{key}");
        }
    }
}
