//! The figures in machine-readable form. Fields are only ever added.

use serde::Serialize;

use super::baseline::Figure;
use super::counts::Summary;
use super::results::{Comparison, Pair, Verdict, weighed};
use super::rows::ROWS;
use crate::size::FolioSize;

/// One run of `bindery compare`.
#[derive(Debug, Serialize)]
pub struct Document {
    /// The version of the program.
    pub bindery: &'static str,
    /// One entry for each architecture.
    pub architectures: Vec<ArchitectureResults>,
}

/// The results of one architecture.
#[derive(Debug, Serialize)]
pub struct ArchitectureResults {
    /// The architecture's name.
    pub architecture: String,
    /// QEMU's version.
    pub qemu: String,
    /// The C library in the workloads; null if none of them is a program.
    pub c_library: Option<String>,
    /// The name of our kernel; null if it was not measured.
    pub bindery_kernel: Option<String>,
    /// The name of Linux; null if it was not measured.
    pub linux_kernel: Option<String>,
    /// The operations of the tables.
    pub operations: Vec<Operation>,
    /// Phases that belong to no operation of the tables.
    pub other_phases: Vec<Phase>,
}

/// An operation with folios of one size.
#[derive(Debug, Serialize)]
pub struct Operation {
    /// The operation's name for `--profile`.
    pub operation: &'static str,
    /// The operation's name in the table.
    pub name: &'static str,
    /// The workload that executes the operation.
    pub workload: &'static str,
    /// The folio size; null for operations without folios.
    pub folio_bytes: Option<u64>,
    /// The counts of our kernel; null if it was not measured.
    pub bindery: Option<Summary>,
    /// The counts of Linux; null if it was not measured.
    pub linux: Option<Summary>,
    /// Recorded figures of Linux 7.2.13.
    pub linux_recorded: Option<Figure>,
    /// Our counts in nanoseconds, by the weights of the table's legend.
    pub bindery_weighed_ns: Option<f64>,
    /// Linux's counts in nanoseconds.
    pub linux_weighed_ns: Option<f64>,
    /// Linux's instructions, measured or else recorded, divided by ours.
    pub ratio: Option<f64>,
    /// The target.
    pub target: Option<Figure>,
    /// Whether the operation reaches its target.
    pub verdict: Option<Verdict>,
}

/// A phase by its number in `programs/include/mark.h`.
#[derive(Debug, Serialize)]
pub struct Phase {
    /// The phase's number.
    pub phase: u16,
    /// The workload that executes the operation.
    pub workload: &'static str,
    /// The folio size; null for operations without folios.
    pub folio_bytes: Option<u64>,
    /// The counts of our kernel; null if it was not measured.
    pub bindery: Option<Summary>,
    /// The counts of Linux; null if it was not measured.
    pub linux: Option<Summary>,
}

impl Operation {
    pub fn new(comparison: &Comparison<'_>) -> Self {
        let Comparison { row, folio, .. } = comparison;
        let nanoseconds = |summary: Option<&Summary>| {
            summary.map(|summary| weighed(&summary.mean, comparison.architecture))
        };
        Self {
            bindery_weighed_ns: nanoseconds(comparison.bindery),
            linux_weighed_ns: nanoseconds(comparison.linux),
            operation: row.key,
            name: row.name,
            workload: row.workload.name(),
            folio_bytes: folio.map(FolioSize::bytes),
            bindery: comparison.bindery.cloned(),
            linux: comparison.linux.cloned(),
            linux_recorded: comparison.recorded,
            ratio: comparison.ratio(),
            target: comparison.target,
            verdict: comparison.verdict(),
        }
    }
}

/// The phases of a pair that belong to no operation.
pub fn other_phases(pair: &Pair) -> Vec<Phase> {
    let measured = || [&pair.bindery, &pair.linux].into_iter().flatten();
    let mut numbers: Vec<u16> =
        measured().flat_map(|measurement| measurement.phases.keys().copied()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers.retain(|number| ROWS.iter().all(|row| row.phase != *number));
    let phase = |number| {
        let summary = |measurement: &Option<super::guests::Measurement>| {
            measurement.as_ref().and_then(|measured| measured.phases.get(&number).cloned())
        };
        Phase {
            phase: number,
            workload: pair.workload.name(),
            folio_bytes: pair.folio.map(FolioSize::bytes),
            bindery: summary(&pair.bindery),
            linux: summary(&pair.linux),
        }
    };
    numbers.into_iter().map(phase).collect()
}

#[cfg(test)]
mod tests {
    use bindery_cli::guest::Architecture;

    use super::super::results::tests::measurement;
    use super::super::rows::Workload;
    use super::*;

    fn pair(phase: u16) -> Pair {
        Pair {
            workload: Workload::System1,
            folio: Some(FolioSize::BASE),
            bindery: Some(measurement(phase, 100)),
            linux: None,
        }
    }

    #[test]
    fn an_operation_has_all_counters_by_name() {
        let pairs = [pair(4)];
        let all = Comparison::all(Architecture::X86_64, &pairs);
        let operation = all.iter().map(Operation::new).find(|found| found.bindery.is_some());
        let json = serde_json::to_value(operation.unwrap()).unwrap();
        assert_eq!(json["operation"], "mremap-1m");
        assert_eq!(json["bindery"]["mean"]["kernel"], 100.0);
        assert_eq!(json["bindery"]["minimum"]["atomics"], 7);
        assert_eq!(json["linux"], serde_json::Value::Null);
        assert_eq!(json["linux_recorded"]["instructions"], 20_108);
        assert_eq!(json["verdict"], "missed");
    }

    #[test]
    fn phases_without_a_row_are_kept_by_number() {
        let phases = other_phases(&pair(9));
        assert_eq!(phases.iter().map(|phase| phase.phase).collect::<Vec<_>>(), [9]);
        assert!(other_phases(&pair(4)).is_empty());
    }
}
