//! `bindery bench`: measures workloads on the engine, both page by page and in runs and whole
//! tables, and on Linux.
//!
//! | file | contents |
//! |---|---|
//! | `workload` | the workloads, as lists of calls |
//! | `floor` | the fewest entry writes and invalidations that a call needs |
//! | `engine`, `linux` | the engine and Linux make the calls |
//! | `kernel` | the same for `kernel-map`, whose calls are of another kind |
//! | `pageout` | the same for `pageout`, which needs a swap device |
//! | `compaction` | `bindery bench compaction`: a heap by MOVE and by COPY |
//! | `conflicts` | `bindery bench conflicts`: cache lines that two CPUs share |
//! | `latency` | `bindery bench latency`: the maximum work of each call in one section |
//! | `scaling` | `bindery bench scaling`: many CPUs at once, and a model of more |
//! | `programs` | programs of measurements that are built apart |
//! | `scale` | `bindery bench scale`: calls among very many mappings |
//! | `measure` | running a list of calls, and the cost of each |
//! | `statistics` | medians and percentiles of many measurements |
//! | `host` | the host of the measurements |
//! | `report`, `json` | the figures in readable and machine-readable form |
//! | `conclusion` | three sentences about all figures |

mod compaction;
mod conclusion;
pub mod conflicts;
mod engine;
mod floor;
mod host;
mod json;
mod kernel;
mod latency;
mod linux;
mod measure;
mod pageout;
mod programs;
mod report;
mod scale;
mod scaling;
mod statistics;
mod workload;

use std::path::PathBuf;

use bindery::arch::Arch;
use bindery_hosted::{ArchitectureName, Visitor, Walk, dispatch};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use crate::Problem;
use crate::output::{JsonFile, show};
use crate::size::{FolioSize, MIB};
use engine::{Bench, Comparison};
use floor::Geometry;
use host::Host;
use measure::{Clock, ticks};
use workload::{Script, Workload};

const HELP: &str = "\
Workloads
  remap-1m  { mmap 1 MiB at 1 GiB, write to each page, mremap, munmap }, the loop of system 1. Each
            of the four calls is timed separately. The mapping moves by 1 MiB, and in a second table
            by 4 KiB more, so that no folio keeps its alignment. Folios of 64k and 4k.
  remap-1g  1 GiB of touched memory is moved (system 2). The destination is congruent with the
            source modulo 1 GiB (one entry moves), modulo 2 MiB (512 tables), off by 64 KiB and off
            by 4 KiB (262,144 pages). Folios of 4k are moved back, untimed, and used again. Larger
            folios are touched again for each move, because a move may split them. Their caches are
            cold, so small times are larger. Folios of 4k and 64k.
  pageout   64 MiB of written memory goes to swap by MADV_PAGEOUT, and is unmapped there (system 3).
            The engine's device takes no time and keeps nothing, and no page is zeroes: what is left
            is the unmapping. Page by page, each page has its own swap entry, slot and
            invalidation. Linux takes part where the host has swap, and its times include its
            device. Folios of 64k and 4k.
  kernel-map
            Areas in the kernel's half of the addresses (system 5): ioremap, vmalloc, vmap of 1 MiB,
            vmap of 100 MiB, vmalloc of 16 MiB, and their frees. \"base\" allows only base pages,
            \"huge\" the largest pieces. \"mapping alone\" is vmalloc without its frames. Order n is
            a list of pages made of blocks of 2^n, none of which continues the one before. Frees are
            lazy: one purge covers 32 MiB. The calls of that many areas are timed together, and each
            has its share of the purge. Programs cannot make these calls, so Linux has no figures.

Figures
  Time is the median with the 10th and 90th percentile (nearest rank). The same calls are made by
  the engine page by page (Reach::Page, the baseline), by the engine in runs and whole tables
  (Reach::Table), and by the host's Linux. The engine is called as a library; Linux's figures
  include the system call. A first touch on the engine calls fault() where the hardware would fault
  next; the MMU itself is not timed. On Linux it stores one byte to each page. The host's settings
  for transparent huge pages are shown and not changed. Where folios of the wanted size are off,
  Linux uses base pages.
  Counts need no clock and do not depend on the host: entries read and written by the operation,
  entries read on the way down from the root, tables allocated, freed, or moved by the one entry
  that names them, invalidations sent and the base pages that they cover. The floor is the fewest
  entry writes and invalidations that the call needs: the theoretical minimum.

Examples
  bindery bench                              everything, in less than a minute
  bindery bench --full                       the same, with all figures and a legend
  bindery bench remap-1m --folio 4k,2m       one workload, other folios
  bindery bench --quick --arch aarch64 --json figures.json

The JSON
  host; architecture; results[]: workload, variant, folio_bytes, phases[]: phase, floor
  {entries_written, tables_installed, invalidations}, and for each of page, table, linux:
  nanoseconds {samples, minimum, p10, median, p90, maximum}, counts {entries_read,
  entries_written, ...}; ratio_page, ratio_linux (medians, to table), ratio_floor (entries written,
  to the floor), ratio_published; calls: how many were measured together. Times are those of one
  call, floor and counts those of all.";

/// Measure memory calls: page by page, in runs and whole tables, and on the host's Linux
///
/// Without arguments: all workloads, on a hosted x86-64 machine. Nothing needs to be installed, and
/// nothing outside this process is changed.
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More, with examples: bindery bench --help")]
#[command(args_conflicts_with_subcommands = true)]
pub struct Arguments {
    #[command(subcommand)]
    counts: Option<Counts>,

    /// The workloads to run [default: all]
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<Workload>,

    /// The page-table format of the hosted machine: x86-64, x86-64-la57, aarch64, riscv64
    /// (riscv64-sv48) or riscv64-sv39
    #[arg(long, value_name = "ARCH", default_value = "x86-64", value_parser = parse_architecture)]
    arch: ArchitectureName,

    /// The folio sizes of first touches on the engine: powers of two from 4k to 2m, separated by
    /// commas. Each workload has its own defaults; kernel-map has none
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    folio: Vec<FolioSize>,

    /// Write all figures to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Print spreads, Linux's times, the counts of both reaches, and a legend
    #[arg(long)]
    full: bool,

    /// Repeat less, and run remap-1g only with folios of 4k: a few seconds in all, wider spreads
    #[arg(long)]
    quick: bool,
}

/// Subcommands without Linux.
#[derive(clap::Subcommand)]
enum Counts {
    Latency(latency::Arguments),
    Compaction(compaction::Arguments),
    Scale(scale::Arguments),
    Conflicts(conflicts::Arguments),
    Scaling(scaling::Arguments),
}

fn parse_architecture(name: &str) -> Result<ArchitectureName, String> {
    match name.parse() {
        Ok(ArchitectureName::Tiny) => {
            Err("tiny has 256 KiB of addresses, and every workload needs more; use x86-64"
                .to_owned())
        }
        Ok(name) => Ok(name),
        Err(unknown) => Err(format!("{unknown}")),
    }
}

/// Runs the measurements of the arguments.
///
/// # Errors
/// The message for the user.
pub fn run(arguments: &Arguments) -> Result<(), Problem> {
    match &arguments.counts {
        Some(Counts::Latency(arguments)) => return latency::run(arguments),
        Some(Counts::Compaction(arguments)) => return compaction::run(arguments),
        Some(Counts::Scale(arguments)) => return scale::run(arguments),
        Some(Counts::Conflicts(arguments)) => return Ok(conflicts::run(arguments)?),
        Some(Counts::Scaling(arguments)) => return Ok(scaling::run(arguments)?),
        None => {}
    }
    // Created before the measurements, so that a wrong name is reported at once.
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let (host, clock) = (Host::look(), Clock::calibrate());
    show(&report::heading(&host, arguments.arch, clock, arguments.full))?;
    let mut document = json::Document::new(host, arguments.arch, arguments.quick, clock);
    let plan = plan(arguments);
    let progress = progress(&plan);
    let mut problems = Vec::new();
    for group in &plan {
        progress.set_message(group.workload.name());
        let results = &mut document.results;
        let run = Run { group, clock, full: arguments.full, progress: &progress, results };
        problems.extend(dispatch(arguments.arch, run).err());
    }
    progress.finish_and_clear();
    show(&conclusion::conclusion(&document.results))?;
    if arguments.full {
        show(report::LEGEND)?;
    }
    if let Some(file) = file {
        file.write(&document)?;
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.join("\nerror: ").into()) }
}

/// All tables of one workload, which share a machine.
struct Group {
    workload: Workload,
    scripts: Vec<Script>,
}

fn plan(arguments: &Arguments) -> Vec<Group> {
    let geometry = dispatch(arguments.arch, GeometryOf);
    let workloads = match &*arguments.workloads {
        [] => Workload::value_variants(),
        chosen => chosen,
    };
    let group = |workload: &Workload| {
        let defaults = workload.default_folios(arguments.quick);
        let chosen = workload.has_folios() && !arguments.folio.is_empty();
        let folios = if chosen { &*arguments.folio } else { defaults };
        let scripts =
            folios.iter().flat_map(|folio| workload.scripts(*folio, geometry, arguments.quick));
        Group { workload: *workload, scripts: scripts.collect() }
    };
    workloads.iter().map(group).collect()
}

/// The geometry of an architecture known by name.
struct GeometryOf;

impl Visitor for GeometryOf {
    type Output = Geometry;

    fn visit<A: Walk>(self) -> Geometry {
        Geometry {
            levels: A::LEVELS,
            index_bits: <A as Arch>::INDEX_BITS,
            // The root has no leaves, because other roots may copy its entries.
            largest_leaf: A::LARGEST_LEAF.number().min(A::LEVELS - 1),
            block: A::CONTIG_ENTRIES,
            largest_block: A::LARGEST_CONTIG_LEVEL.number(),
            remembers_invalid: A::INVALID_MAY_BE_CACHED,
        }
    }
}

/// A group, to be run on an architecture known by name.
struct Run<'a> {
    group: &'a Group,
    clock: Clock,
    full: bool,
    progress: &'a ProgressBar,
    results: &'a mut Vec<json::Table>,
}

impl Visitor for Run<'_> {
    type Output = Result<(), String>;

    fn visit<A: Walk>(self) -> Self::Output {
        let Self { group, clock, full, progress, results } = self;
        let Group { workload, scripts } = group;
        let memory = workload.memory();
        enough_memory(memory)
            .map_err(|problem| format!("{} was left out: {problem}", workload.name()))?;
        let linux = enough_memory(memory + workload.data());
        let bench = Bench { scripts, memory, linux, clock };
        let done = |script: &Script, comparison| {
            let table = json::Table::new(script, &comparison);
            let text = if full {
                report::tables(script, &comparison, &table)
            } else {
                report::short_table(script, &table)
            };
            progress.suspend(|| show(&text))?;
            results.push(table);
            match engine_problem(&comparison) {
                None => Ok(()),
                Some(problem) => {
                    Err(format!("the engine failed in {}: {problem}", workload.name()))
                }
            }
        };
        bench.run::<A>(|| progress.inc(1), done)
    }
}

/// Refuses a size that would make the host swap.
fn enough_memory(needed: u64) -> Result<(), String> {
    /// Memory for the program itself and some spare.
    const SPARE: u64 = 64 * MIB;
    let needed = needed + SPARE;
    match Host::available_memory() {
        Some(available) if available < needed => Err(format!(
            "it takes {} MiB of free memory, and the host has {} MiB",
            needed / MIB,
            available / MIB
        )),
        _ => Ok(()),
    }
}

fn engine_problem(comparison: &Comparison) -> Option<&str> {
    let outcome = |who: usize| comparison.outcomes[who].problem.as_deref();
    outcome(engine::PAGE).or_else(|| outcome(engine::FULL))
}

/// A progress bar on standard error; indicatif hides it if standard error is not a terminal.
fn progress(plan: &[Group]) -> ProgressBar {
    let scripts = plan.iter().flat_map(|group| &group.scripts);
    let length: usize = scripts.map(|script| ticks(script, 3)).sum();
    let style = ProgressStyle::with_template("{msg:8} [{bar:40}] {percent:>3} %  {eta} left");
    ProgressBar::new(length as u64).with_style(style.expect("the template is a constant"))
}
