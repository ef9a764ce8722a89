//! `bindery compare`: the same work on our kernel and on Linux, counted by the same instrument.
//!
//! | file | contents |
//! |---|---|
//! | `rows` | the workloads, and the operations in them |
//! | `baseline` | recorded figures of Linux, and our targets |
//! | `../plugin.rs` | the QEMU plugin that counts, built at use |
//! | `programs` | the workloads that are programs, built |
//! | `script` | the first program of both kernels |
//! | `guests` | one kernel, one workload, one folio size: a machine is run |
//! | `cache` | machines that were run before |
//! | `counts` | the plugin's counts |
//! | `measure` | all measurements of one architecture |
//! | `parallel` | machines that run in parallel |
//! | `results` | both kernels side by side, and the verdict |
//! | `compaction` | all the work of MOVE and of COPY |
//! | `report`, `json` | the figures in readable and machine-readable form |
//! | `profile` | the instructions of one operation, by function |
//! | `working_set` | another comparison: pages moved when memory is short |
//! | `cold_reads` | reads of a file whose pages are on the disk |
//! | `interrupts` | the interrupts of other CPUs |
//! | `conflicts` | the cache lines that calls of two CPUs share |
//! | `applications` | another one: well-known programs when memory is short |
//! | `interpreter` | programs of steps, each counted |
//! | `random` | such programs at random |
//! | `gate` | our kernel compared with the committed table |
//! | `wide` | every operation there is, dearest first |

mod applications;
mod baseline;
mod cache;
mod cold_reads;
mod compaction;
mod conflicts;
mod counts;
mod gate;
mod guests;
mod interpreter;
mod interrupts;
mod json;
mod measure;
mod parallel;
mod profile;
mod programs;
mod random;
mod report;
mod results;
mod rows;
mod script;
mod wide;
mod working_set;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use bindery_cli::guest::{Architecture, Problem, busybox, kernel, linux};
use clap::ValueEnum;

use crate::output::{JsonFile, show};
use crate::plugin::{self, Emulator, Plugin};
use crate::size::FolioSize;
use guests::{Bench, Kernel, Repeat};
use measure::Plan;
use results::Comparison;
use rows::{Row, Runner, Workload};

const HELP: &str = "\
Workloads
  system1     { mmap 1 MiB at 1 GiB, memset, mremap by 1 MiB, munmap } 1,000 times, and again
              with the destination off by 4 KiB.
  system2     1 GiB is touched and moved four times by a distance of 1 GiB, of 2 MiB, off by
              64 KiB, and off by 4 KiB, and unmapped.
  system3     256 MiB of zeroes go to compressed swap by MADV_PAGEOUT, come back page by page, and
              are unmapped while they are out; then 32 MiB with one word in eight random.
              Also called pageout.
  system4     16 MiB come to a range that a userfaultfd serves, by UFFDIO_MOVE and by UFFDIO_COPY:
              in one call, in 256, in 4,096, and fault by fault, served by a thread.
  fork        A child writes 1 MiB of the 16 MiB that its parent has touched, or all of them.
  compaction  The live objects of a heap of 32 MiB move together, in ranges of 4 KiB, 64 KiB and
              2 MiB, by MOVE and by COPY, while two threads read and write them. Pages are recycled
              or fresh.
  kernel-map  The kernel maps 1 MiB for itself and unmaps it, 100 times each: vmalloc, with huge
              mappings too (and 16 MiB), vmap of single and of larger pages, ioremap. Linux does
              it in a module, Bindery's kernel at boot. Folio sizes do not matter.
  proc        A process reads /proc/self/maps of 30,000 mappings, of 2,000 by 1 KiB, smaps of 1,000,
              statm while pages come and go, and queries mappings by PROCMAP_QUERY. Base pages.
  copy        A program reads and writes 1 MiB, a page and a byte of files in memory, and passes
              64 KiB, a page and a byte through a pipe. Base pages.
  Each combination of workload, kernel, architecture and folio size has a machine of its own: one
  CPU, 3 GiB, a clock that counts instructions. Folio sizes are set as on any Linux, by
  /sys/kernel/mm/transparent_hugepage.

Requirements
  QEMU, compilers and BusyBox (`bindery doctor`). Linux is Debian's newest kernel, fetched with
  apt-get and kept under target/guest (nothing is installed); --linux takes another one. For
  kernel-map, its headers and the compiler that built it are fetched as well (70 MB for each
  architecture), for system3 its modules (24 MB; the swap device is one; xz unpacks it). A part
  that cannot be fetched is not run: recorded figures are shown, labeled as recorded.
  A machine that ran before, with the same QEMU, kernel and programs, would do exactly the same, so
  the counts of that run are shown; --again starts it anyway.

Examples
  bindery compare                                       everything, some minutes
  bindery compare system1 --arch x86-64 --folio 64k     one row of machines
  bindery compare kernel-map                            mappings of the kernel, both architectures
  bindery compare --no-linux --json figures.json        Bindery's kernel beside recorded figures
  bindery compare --profile mremap-1m --folio 64k       the hottest functions of Bindery's kernel
  bindery compare working-set                           pages moved where memory is short, an hour
  bindery compare applications                          answers where memory is short, some minutes
  bindery compare cold-reads                            a file on the disk is read
  bindery compare interrupts                            interrupts of other CPUs
  bindery compare conflicts                             cache lines that calls of two CPUs share
  bindery compare wide                                  every operation there is, dearest first
  bindery compare random --programs 300                 programs at random, dearest steps first
  bindery compare gate                                  Bindery beside the committed table";

/// Run the same work on Bindery's kernel and on Linux, and count what each executes
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More, with examples: bindery compare --help",
          args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub struct Arguments {
    #[command(subcommand)]
    other: Option<Other>,

    /// The workloads to run [default: all]
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<Workload>,

    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// The folio sizes: powers of two from 4k to 2m, separated by commas
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4k,64k,2m")]
    folio: Vec<FolioSize>,

    /// Write all figures to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Compare with this kernel image instead of Debian's; for one architecture
    #[arg(long, value_name = "FILE", conflicts_with = "no_linux")]
    linux: Option<PathBuf>,

    /// Do not run Linux: show recorded figures instead
    #[arg(long)]
    no_linux: bool,

    /// Start machines again even if they were measured before
    #[arg(long)]
    again: bool,

    /// Show instead which functions of Bindery's kernel execute the instructions of one operation
    #[arg(long, value_name = "OPERATION", value_parser = Row::from_key,
          conflicts_with_all = ["workloads", "json", "linux", "no_linux", "again"])]
    profile: Option<Row>,
}

/// Comparisons other than that of the workloads' operations.
#[derive(clap::Subcommand)]
enum Other {
    Applications(applications::Arguments),
    WorkingSet(working_set::Arguments),
    ColdReads(cold_reads::Arguments),
    Interrupts(interrupts::Arguments),
    Conflicts(conflicts::Arguments),
    Random(random::Arguments),
    Gate(gate::Arguments),
    Wide(wide::Arguments),
}

/// Runs the comparison of the arguments.
///
/// # Errors
/// If a requirement is missing, or a machine failed.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    match &arguments.other {
        Some(Other::Applications(arguments)) => return applications::run(arguments),
        Some(Other::WorkingSet(arguments)) => return working_set::run(arguments),
        Some(Other::ColdReads(arguments)) => return cold_reads::run(arguments),
        Some(Other::Interrupts(arguments)) => return interrupts::run(arguments),
        Some(Other::Conflicts(arguments)) => return conflicts::run(arguments),
        Some(Other::Random(arguments)) => return random::run(arguments),
        Some(Other::Gate(arguments)) => return gate::run(arguments),
        Some(Other::Wide(arguments)) => return wide::run(arguments),
        None => {}
    }
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    if arguments.linux.is_some() && architectures.len() != 1 {
        let text =
            "--linux names an image for one architecture; name that architecture with --arch";
        return Err(Problem::Wrong(text.to_owned()));
    }
    if let Some(row) = arguments.profile {
        return profiles(row, &architectures, &arguments.folio);
    }
    // Created before the measurements, so that a wrong name is reported at once.
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let mut document =
        json::Document { bindery: env!("CARGO_PKG_VERSION"), architectures: Vec::new() };
    let mut problems = Vec::new();
    for architecture in architectures {
        document.architectures.push(compare(arguments, architecture, &mut problems)?);
    }
    show(report::LEGEND)?;
    if let Some(file) = file {
        file.write(&document)?;
    }
    match &*problems {
        [] => Ok(ExitCode::SUCCESS),
        problems => {
            let texts: Vec<String> = problems.iter().map(Problem::to_string).collect();
            Err(Problem::Failed(texts.join("\nerror: ")))
        }
    }
}

/// Measures both kernels on one architecture and shows the table.
fn compare(
    arguments: &Arguments,
    architecture: Architecture,
    problems: &mut Vec<Problem>,
) -> Result<json::ArchitectureResults, Problem> {
    let workloads = match &*arguments.workloads {
        [] => Workload::value_variants(),
        chosen => chosen,
    };
    let (bench, c_library) = prepare(architecture, workloads)?;
    let plan = Plan {
        bindery: ours(architecture).map_err(|problem| problems.push(problem)).ok(),
        linux: theirs(arguments, architecture, workloads),
        workloads,
        folios: &arguments.folio,
        repeat: if arguments.again { Repeat::Always } else { Repeat::Never },
    };
    let pairs = measure::all(&bench, &plan, problems);
    let comparisons = Comparison::all(architecture, &pairs);
    let name = |pick: fn(&results::Pair) -> &Option<guests::Measurement>| {
        pairs.iter().find_map(|pair| pick(pair).as_ref().map(|found| found.kernel.clone()))
    };
    let (bindery_kernel, linux_kernel) = (name(|pair| &pair.bindery), name(|pair| &pair.linux));
    let emulator = &bench.emulator;
    let linked = c_library.as_ref().map(|library| format!(", workloads linked with {library}"));
    let linked = linked.unwrap_or_default();
    show(&format!(
        "\n{architecture}, QEMU {emulator}{linked}\n\
         Bindery  {}\nLinux    {}\n\n{}\n\n{}{}",
        bindery_kernel.as_deref().unwrap_or("not measured"),
        linux_kernel.as_deref().unwrap_or("not measured; recorded figures of Linux 7.2.13"),
        report::table(&comparisons),
        report::conclusion(&comparisons),
        compaction::table(&comparisons),
    ))?;
    Ok(json::ArchitectureResults {
        architecture: architecture.to_string(),
        qemu: emulator.clone(),
        c_library,
        bindery_kernel,
        linux_kernel,
        operations: comparisons.iter().map(json::Operation::new).collect(),
        other_phases: pairs.iter().flat_map(json::other_phases).collect(),
    })
}

/// Builds the inputs of both kernels; the second value is the C library of the workloads that are
/// programs.
fn prepare(
    architecture: Architecture,
    workloads: &[Workload],
) -> Result<(Bench, Option<String>), Problem> {
    let emulator = Emulator::installed(architecture)?;
    let mut programs = BTreeMap::new();
    let mut library = None;
    for &workload in workloads {
        if let Runner::Program(_) = workload.runner() {
            let program = programs::build(architecture, workload.name())?;
            programs.insert(workload, program.path);
            library = Some(program.library);
        }
    }
    let bench = Bench {
        architecture,
        plugin: plugin::build(Plugin::Count, &emulator)?,
        emulator: emulator.version,
        busybox: busybox::program(architecture)?,
        programs,
    };
    Ok((bench, library))
}

fn ours(architecture: Architecture) -> Result<Kernel, Problem> {
    let kernel::Kernel { image, symbols, .. } = kernel::build(architecture)?;
    Ok(Kernel::Bindery { image, symbols })
}

/// Debian's newest Linux, if it is available.
fn newest(architecture: Architecture, workloads: &[Workload]) -> Option<Kernel> {
    let arguments = Arguments {
        other: None,
        workloads: Vec::new(),
        arch: Vec::new(),
        folio: Vec::new(),
        json: None,
        linux: None,
        no_linux: false,
        again: false,
        profile: None,
    };
    theirs(&arguments, architecture, workloads)
}

/// Linux, if it is wanted and available. If it is unavailable, reports the reason on standard
/// error.
fn theirs(
    arguments: &Arguments,
    architecture: Architecture,
    workloads: &[Workload],
) -> Option<Kernel> {
    if arguments.no_linux {
        return None;
    }
    let image = match &arguments.linux {
        Some(image) => Ok(image.clone()),
        None => linux::newest(architecture),
    };
    let image = image
        .map_err(|problem| {
            eprintln!("bindery: cannot run Linux, so recorded figures are shown: {problem}");
        })
        .ok()?;
    let mut modules = BTreeMap::new();
    for &workload in workloads.iter().filter(|workload| workload.runner() == Runner::Kernel) {
        match module(arguments, architecture, workload) {
            Ok(module) => drop(modules.insert(workload, module)),
            Err(problem) => eprintln!(
                "bindery: cannot run {} on Linux, so recorded figures are shown: {problem}",
                workload.name()
            ),
        }
    }
    let swap = if workloads.iter().any(|workload| workload.swaps()) {
        swap_modules(arguments, architecture).unwrap_or_else(|problem| {
            eprintln!(
                "bindery: cannot give Linux a swap device, so recorded figures are shown: {problem}"
            );
            Vec::new()
        })
    } else {
        Vec::new()
    };
    Some(Kernel::Linux { image, modules, swap })
}

/// The modules of Linux's compressed swap device.
fn swap_modules(
    arguments: &Arguments,
    architecture: Architecture,
) -> Result<Vec<PathBuf>, Problem> {
    match &arguments.linux {
        // The modules must be built for this very kernel.
        Some(image) => Err(Problem::Missing(format!(
            "{} is an image of your own, and its module zram is not known",
            image.display()
        ))),
        None => linux::ready_made::modules(architecture, "zram"),
    }
}

/// The module that is a workload on Linux.
fn module(
    arguments: &Arguments,
    architecture: Architecture,
    workload: Workload,
) -> Result<PathBuf, Problem> {
    match &arguments.linux {
        // The module must be built for this very kernel.
        Some(image) => Err(Problem::Missing(format!(
            "the workload is a module, and {} is an image of your own, whose headers are not known",
            image.display()
        ))),
        None => linux::module::build(architecture, &workload.name().replace('-', "_")),
    }
}

/// Shows the instructions of our kernel by function.
fn profiles(
    row: Row,
    architectures: &[Architecture],
    folios: &[FolioSize],
) -> Result<ExitCode, Problem> {
    for &architecture in architectures {
        let (bench, _) = prepare(architecture, &[row.workload])?;
        let Kernel::Bindery { image, symbols } = ours(architecture)? else { continue };
        let kernel = Kernel::Bindery { image, symbols: symbols.clone() };
        for folio in row.workload.folios(folios) {
            let profile = bench.profile(&kernel, row, folio)?;
            let folios = folio.map_or_else(String::new, |folio| format!(", folios of {folio}"));
            show(&format!(
                "\n{}{folios}, {architecture}: one occurrence, everything warm\n\n{}\n",
                row.name,
                profile::table(&profile, &symbols)?
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn workloads_and_the_working_set_are_told_apart() {
        let parsed = |words: &[&str]| Cli::try_parse_from([&["compare"], words].concat());
        let counted = parsed(&["system1", "--no-linux"]).unwrap().arguments;
        assert_eq!(counted.folio, rows::FOLIOS);
        assert!(counted.other.is_none() && counted.workloads == [Workload::System1]);
        let other = parsed(&["working-set", "--no-linux", "--seeds", "2"]).unwrap().arguments;
        assert!(matches!(other.other, Some(Other::WorkingSet(_))) && !other.no_linux);
        assert!(parsed(&["--no-linux", "working-set"]).is_err());
    }
}
