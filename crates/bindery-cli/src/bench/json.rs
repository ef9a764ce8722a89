//! The figures in machine-readable form. Fields are only ever added.

use bindery::Counts;
use bindery_hosted::ArchitectureName;
use serde::Serialize;

use super::engine::{Comparison, FULL, LINUX, PAGE};
use super::floor::Floor;
use super::host::Host;
use super::kernel::NO_LINUX;
use super::linux::describe_folios;
use super::measure::{Clock, Samples, Tally};
use super::statistics::{Summary, ratio};
use super::workload::{self, Script, Workload};

/// One run of `bindery bench`.
#[derive(Debug, Serialize)]
pub struct Document {
    /// The version of the program.
    pub bindery: &'static str,
    /// The host of the run.
    pub host: Host,
    /// The architecture of the hosted machine.
    pub architecture: String,
    /// Whether there were few repetitions (`--quick`).
    pub quick: bool,
    /// The cost of reading the clock, which was subtracted each time.
    pub clock_nanoseconds: u64,
    /// One entry for each table.
    pub results: Vec<Table>,
}

/// A workload in one variant, with folios of one size.
#[derive(Debug, Serialize)]
pub struct Table {
    /// The workload's name, as on the command line.
    pub workload: &'static str,
    /// The variant: its move or size.
    pub variant: String,
    /// The folio size of the engine.
    pub folio_bytes: u64,
    /// The folios of Linux.
    pub linux_folios: String,
    /// The cost of an invalidation of 1 MiB on the hosted machine; the engine's times include it.
    pub invalidation_nanoseconds: u64,
    /// The measured calls.
    pub phases: Vec<Phase>,
    /// The reason why the engine, page by page, was not measured (further), or null.
    pub page_problem: Option<String>,
    /// The reason why the engine at full reach was not measured (further), or null.
    pub table_problem: Option<String>,
    /// The reason why Linux was not measured (further), or null.
    pub linux_problem: Option<String>,
}

/// One measured call.
#[derive(Debug, Serialize)]
pub struct Phase {
    /// The phase's name.
    pub phase: String,
    /// Calls measured together: times are for one, counts and floor for all.
    pub calls: u64,
    /// The minimum work of the calls on a page table.
    pub floor: Floor,
    /// The engine, page by page (`Reach::Page`).
    pub page: Measurement,
    /// The engine at full reach (`Reach::Table`).
    pub table: Measurement,
    /// Linux.
    pub linux: Measurement,
    /// Median of `page` divided by that of `table`.
    pub ratio_page: Option<f64>,
    /// Median of `linux` divided by that of `table`.
    pub ratio_linux: Option<f64>,
    /// Entries that `table` wrote, divided by the floor's two kinds of entries.
    pub ratio_floor: Option<f64>,
    /// The published figure for `ratio_page`, or null.
    pub ratio_published: Option<f64>,
}

/// The cost of a call.
#[derive(Debug, Serialize)]
pub struct Measurement {
    /// Time; null if not measured.
    pub nanoseconds: Option<Summary>,
    /// Work of the last call; null for Linux.
    pub counts: Option<Work>,
    /// Whether every call had the same counts.
    pub counts_steady: bool,
}

/// The engine's counts; `bindery::Counts` documents each.
#[derive(Debug, Serialize)]
#[allow(missing_docs, reason = "named as in `bindery::Counts`")]
pub struct Work {
    pub entries_read: u64,
    pub entries_written: u64,
    pub entries_descended: u64,
    pub tables_allocated: u64,
    pub tables_freed: u64,
    pub tables_moved: u64,
    pub tables_locked: u64,
    pub invalidations: u64,
    /// Invalidations only on the faulting CPU, not included in `invalidations`.
    pub local_invalidations: u64,
    pub pages_invalidated: u64,
    pub invalidations_saved: u64,
    pub folios_touched: u64,
    pub bytes_zeroed: u64,
    pub bytes_copied: u64,
}

impl Document {
    /// A document without results.
    pub fn new(host: Host, arch: ArchitectureName, quick: bool, clock: Clock) -> Self {
        Self {
            bindery: env!("CARGO_PKG_VERSION"),
            host,
            architecture: arch.to_string(),
            quick,
            clock_nanoseconds: clock.cost,
            results: Vec::new(),
        }
    }
}

impl Table {
    pub fn new(script: &Script, comparison: &Comparison) -> Self {
        let outcomes = &comparison.outcomes;
        let problem = |who: usize| outcomes[who].problem.clone();
        let phases = script.phases.iter().enumerate().map(|(number, phase)| {
            let samples = outcomes.each_ref().map(|outcome| &outcome.phases[number]);
            Phase::new(phase, samples)
        });
        Self {
            workload: script.workload.name(),
            variant: script.variant.clone(),
            folio_bytes: script.folio.bytes(),
            linux_folios: match script.workload {
                Workload::KernelMap => NO_LINUX.to_owned(),
                Workload::Remap1m | Workload::Remap1g | Workload::Pageout => {
                    describe_folios(script.folio)
                }
            },
            invalidation_nanoseconds: comparison.invalidation,
            phases: phases.collect(),
            page_problem: problem(PAGE),
            table_problem: problem(FULL),
            linux_problem: problem(LINUX),
        }
    }
}

impl Phase {
    fn new(phase: &workload::Phase, samples: [&Samples; 3]) -> Self {
        let workload::Phase { name, floor, repetitions, published } = phase;
        let [page, table, linux] = samples.map(Measurement::from);
        let median = |of: &Measurement| of.nanoseconds.map(|summary| summary.median);
        let to_table = |of: &Measurement| ratio(median(of)?, median(&table)?);
        let least = floor.entries_written + floor.tables_installed;
        Self {
            phase: name.clone(),
            calls: *repetitions,
            floor: *floor,
            ratio_page: to_table(&page),
            ratio_linux: to_table(&linux),
            ratio_floor: table.counts.as_ref().and_then(|work| ratio(work.entries_written, least)),
            ratio_published: *published,
            page,
            table,
            linux,
        }
    }
}

impl From<&Samples> for Measurement {
    fn from(samples: &Samples) -> Self {
        Self {
            nanoseconds: samples.summary(),
            counts: samples.tally().map(Work::from),
            counts_steady: samples.steady(),
        }
    }
}

impl From<Tally> for Work {
    fn from(tally: Tally) -> Self {
        let Tally { counts, local_invalidations } = tally;
        let Counts { entries_read, entries_written, entries_descended, .. } = counts;
        let Counts { tables_allocated, tables_freed, tables_moved, tables_locked, .. } = counts;
        let Counts { invalidations, pages_invalidated, invalidations_saved, .. } = counts;
        let Counts { folios_touched, bytes_zeroed, bytes_copied, .. } = counts;
        Self {
            entries_read,
            entries_written,
            entries_descended,
            tables_allocated,
            tables_freed,
            tables_moved,
            tables_locked,
            invalidations,
            local_invalidations,
            pages_invalidated,
            invalidations_saved,
            folios_touched,
            bytes_zeroed,
            bytes_copied,
        }
    }
}
