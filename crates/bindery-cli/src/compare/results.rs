//! The counts of both kernels for an operation, with the recorded figure and the target.

use bindery_cli::guest::Architecture;

use super::baseline::{self, Figure};
use super::counts::{Counter, Counts, Summary};
use super::guests::Measurement;
use super::rows::{ROWS, Row, Workload};
use crate::size::FolioSize;

/// The measurements of one workload with folios of one size; `None` for a kernel that was left out
/// or has failed.
#[derive(Clone, Debug)]
pub struct Pair {
    pub workload: Workload,
    /// `None` for workloads without folios.
    pub folio: Option<FolioSize>,
    pub bindery: Option<Measurement>,
    pub linux: Option<Measurement>,
}

/// All figures of one operation with folios of one size.
#[derive(Clone, Debug)]
pub struct Comparison<'a> {
    pub row: Row,
    /// `None` for operations without folios.
    pub folio: Option<FolioSize>,
    pub architecture: Architecture,
    pub bindery: Option<&'a Summary>,
    pub linux: Option<&'a Summary>,
    /// Recorded figures of Linux.
    pub recorded: Option<Figure>,
    pub target: Option<Figure>,
}

/// The verdict on an operation's cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The target is reached.
    Reached,
    /// The target is not reached.
    Missed,
    /// There is no target, and Linux needs no fewer instructions.
    NoMoreThanLinux,
    /// There is no target, and Linux needs fewer instructions.
    MoreThanLinux,
}

impl<'a> Comparison<'a> {
    /// All operations of an architecture, in the order of the table.
    pub fn all(architecture: Architecture, pairs: &'a [Pair]) -> Vec<Self> {
        let mut all = Vec::new();
        for &row in ROWS {
            for pair in pairs.iter().filter(|pair| pair.workload == row.workload) {
                let summary = |measured: &'a Option<Measurement>| {
                    measured.as_ref().and_then(|measured| measured.phases.get(&row.phase))
                };
                all.push(Self {
                    row,
                    folio: pair.folio,
                    architecture,
                    bindery: summary(&pair.bindery),
                    linux: summary(&pair.linux),
                    recorded: baseline::recorded(row.key, pair.folio, architecture),
                    target: baseline::target(row.key, pair.folio, architecture),
                });
            }
        }
        all
    }

    /// Linux's instructions, measured or, failing that, recorded.
    pub fn linux_instructions(&self) -> Option<f64> {
        let measured = self.linux.map(|linux| linux.mean.of(Counter::Kernel));
        measured.or_else(|| Some(self.recorded?.instructions as f64))
    }

    /// Linux's instructions divided by ours.
    pub fn ratio(&self) -> Option<f64> {
        let ours = self.bindery?.mean.of(Counter::Kernel);
        (ours > 0.0).then_some(self.linux_instructions()? / ours)
    }

    /// `None` if a figure for the verdict is missing.
    pub fn verdict(&self) -> Option<Verdict> {
        let ours = self.bindery?.mean;
        let instructions = ours.of(Counter::Kernel);
        if let Some(target) = self.target {
            let few_invalidations = target.invalidations.is_none_or(|most| {
                // Rare ticks and switches of address spaces do not belong to the operation.
                invalidations(&ours, self.architecture).round() <= most as f64
            });
            let reached = instructions <= target.instructions as f64 && few_invalidations;
            return Some(if reached { Verdict::Reached } else { Verdict::Missed });
        }
        let no_more = instructions <= self.linux_instructions()?;
        Some(if no_more { Verdict::NoMoreThanLinux } else { Verdict::MoreThanLinux })
    }
}

/// TLB invalidations of all kinds. On x86-64 a write to the root-table register counts as an
/// invalidation; on AArch64 such a write invalidates nothing.
pub fn invalidations(counts: &Counts<f64>, architecture: Architecture) -> f64 {
    let mut kinds = vec![
        Counter::InvalidatePage,
        Counter::InvalidateRange,
        Counter::InvalidateSpace,
        Counter::InvalidateAll,
    ];
    if architecture == Architecture::X86_64 {
        kinds.push(Counter::RootWrites);
    }
    kinds.into_iter().map(|kind| counts.of(kind)).sum()
}

/// The approximate time of the counts in nanoseconds, from a fit to native times of Linux's memory
/// calls: 0.1 per instruction, 5 per atomic, 180 per invalidation, 465 per return from the kernel,
/// 0.03 per byte of a string instruction.
pub fn weighed(counts: &Counts<f64>, architecture: Architecture) -> f64 {
    0.1 * counts.of(Counter::Kernel)
        + 5.0 * counts.of(Counter::Atomics)
        + 180.0 * invalidations(counts, architecture)
        + 465.0 * counts.of(Counter::ExceptionReturns)
        + 0.03 * counts.of(Counter::StringBytes)
}

#[cfg(test)]
pub mod tests {
    use super::super::counts;
    use super::*;

    /// A measurement in which every counter of a phase except kernel instructions has its own
    /// number.
    pub fn measurement(phase: u16, kernel: u64) -> Measurement {
        let mut line = vec![phase.to_string(), kernel.to_string()];
        line.extend((2..=counts::NAMES.len()).map(|number| number.to_string()));
        let text = format!("phase\t{}\n{}\n", counts::NAMES.join("\t"), line.join("\t"));
        Measurement { kernel: "Kernel 1".to_owned(), phases: counts::read(&text).unwrap() }
    }

    fn pair(phase: u16, ours: u64, linux: Option<u64>) -> [Pair; 1] {
        [Pair {
            workload: Workload::System1,
            folio: Some(FolioSize::KIB_64),
            bindery: Some(measurement(phase, ours)),
            linux: linux.map(|linux| measurement(phase, linux)),
        }]
    }

    fn verdict(phase: u16, ours: u64, linux: Option<u64>) -> (Option<Verdict>, Option<f64>) {
        let pairs = pair(phase, ours, linux);
        let all = Comparison::all(Architecture::X86_64, &pairs);
        let found = all.iter().find(|comparison| comparison.row.phase == phase).unwrap();
        (found.verdict(), found.ratio())
    }

    #[test]
    fn a_target_without_invalidations_needs_only_instructions() {
        assert_eq!(verdict(3, 25_000, Some(50_000)), (Some(Verdict::Reached), Some(2.0)));
        assert_eq!(verdict(3, 25_001, None).0, Some(Verdict::Missed));
    }

    #[test]
    fn too_many_invalidations_miss_a_target() {
        // The measurement has 9 + 10 + 11 + 12 + 13 invalidations, and the target for mremap is 1.
        assert_eq!(verdict(4, 10, Some(100)).0, Some(Verdict::Missed));
        let pairs = pair(4, 10, None);
        let mean = pairs[0].bindery.as_ref().unwrap().phases[&4].mean;
        assert_eq!(invalidations(&mean, Architecture::X86_64), 55.0);
        assert_eq!(invalidations(&mean, Architecture::AArch64), 42.0);
    }

    #[test]
    fn the_weighed_sum_has_each_counter_in_it() {
        let pairs = pair(4, 1_000, None);
        let mean = pairs[0].bindery.as_ref().unwrap().phases[&4].mean;
        // Counters after the first have the numbers from 2 on: 7 atomics, 16 returns, 18 bytes.
        let expected = 100.0 + 7.0 * 5.0 + 55.0 * 180.0 + 16.0 * 465.0 + 18.0 * 0.03;
        assert!((weighed(&mean, Architecture::X86_64) - expected).abs() < 1e-6);
    }

    #[test]
    fn without_a_target_linux_is_the_measure() {
        assert_eq!(verdict(2, 100, Some(100)), (Some(Verdict::NoMoreThanLinux), Some(1.0)));
        assert_eq!(verdict(2, 200, Some(100)), (Some(Verdict::MoreThanLinux), Some(0.5)));
        assert_eq!(verdict(2, 200, None), (None, None));
    }

    #[test]
    fn recorded_figures_stand_in_for_linux() {
        assert_eq!(verdict(5, 20_490, None), (Some(Verdict::Missed), Some(2.0)));
    }
}
