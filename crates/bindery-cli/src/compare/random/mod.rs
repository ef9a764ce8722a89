//! `bindery compare random`: programs that no author chose, on both kernels.
//!
//! | file | what |
//! |---|---|
//! | `grammar` | programs at random |
//! | `step` | one call or access, and its class |
//! | `machines` | several programs in one machine, and what was counted |
//! | `report` | both kernels side by side, dearest against Linux first |
//! | `dearer` | operations that are known to be dearer, and why |

mod dearer;
pub mod grammar;
pub mod machines;
mod report;
pub mod step;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bindery_cli::guest::{Architecture, Problem, busybox, linux};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::guests::Kernel;
use super::plugin::{self, Emulator};
use super::{ours, programs};
use crate::output::{JsonFile, show};
use grammar::Program;
use machines::{Bench, Measured};
use report::Line;

const HELP: &str = "\
The programs
  Each seed makes a program of 24 to 60 steps: mappings of 4 KiB to 16 MiB at aligned and odd places,
  private, shared and of files; reads and writes of all pages or of some; mprotect, mremap, munmap,
  madvise, mlock, mincore, msync, holes in files, fork and exit of up to four processes, swap, and
  UFFDIO_COPY, MOVE, ZEROPAGE and WRITEPROTECT; with folios of 4 KiB, 64 KiB or 2 MiB.
  programs/workloads/random.c runs it on both kernels, step by step, and the plugin counts each step.

Exit status
  0  no step takes more than 1.1 times Linux's instructions, but for those in a list with their reasons
     (crates/bindery-cli/src/compare/random/dearer.rs)
  1  another one does

Examples
  bindery compare random                                      20 programs, both architectures
  bindery compare random --seed 17 --programs 1 --arch x86-64 one program
  bindery compare random --programs 300 --json random.json
  bindery compare random --seed 17 --profile 23 --arch x86-64 the hottest functions of one step";

/// Programs in a machine: booting one takes as long as some of them.
const BATCH: usize = 20;
/// Each machine takes 3 GiB.
const MOST_AT_A_TIME: usize = 4;

/// Run random programs on both kernels, and list the operations that are dearest against Linux
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More, with examples: bindery compare random --help")]
pub struct Arguments {
    /// The seed of the first program; each other one has the next seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// How many programs
    #[arg(long, value_name = "M", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    programs: u64,

    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// How many of the dearest steps are shown
    #[arg(long, value_name = "N", default_value_t = 40)]
    worst: usize,

    /// Show instead which functions of Bindery's kernel execute the instructions of one step of the
    /// first program
    #[arg(long, value_name = "STEP", conflicts_with_all = ["programs", "worst", "json"])]
    profile: Option<usize>,

    /// Write all steps to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// All steps, for programs.
#[derive(Serialize)]
struct Document {
    bindery: &'static str,
    first_seed: u64,
    programs: u64,
    steps: Vec<Line>,
}

/// Runs what the arguments ask for.
///
/// # Errors
/// Something is missing, or a machine failed.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    if let Some(step) = arguments.profile {
        return profile(&Program::from_seed(arguments.seed), step, &architectures);
    }
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let programs: Vec<Program> = (0..arguments.programs)
        .map(|number| Program::from_seed(arguments.seed.wrapping_add(number)))
        .collect();
    let mut document = Document {
        bindery: env!("CARGO_PKG_VERSION"),
        first_seed: arguments.seed,
        programs: arguments.programs,
        steps: Vec::new(),
    };
    let mut unexplained = 0;
    for architecture in architectures {
        let lines = compare(architecture, &programs, arguments.worst)?;
        unexplained += lines.iter().filter(|line| line.is_unexplained()).count();
        document.steps.extend(lines);
    }
    if let Some(file) = file {
        file.write(&document)?;
    }
    Ok(if unexplained == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Shows where our kernel's instructions of one step go.
fn profile(
    program: &Program,
    step: usize,
    architectures: &[Architecture],
) -> Result<ExitCode, Problem> {
    let Some(made) = program.steps.get(step) else {
        let text = format!("program {} has {} steps", program.seed, program.steps.len());
        return Err(Problem::Wrong(text));
    };
    for &architecture in architectures {
        let (bench, _) = prepare(architecture)?;
        let Kernel::Bindery { image, symbols } = ours(architecture)? else { continue };
        let kernel = Kernel::Bindery { image, symbols: symbols.clone() };
        let lines = bench.profile(&kernel, program, step)?;
        show(&format!(
            "\n{}: {}, folios of {}, {architecture}\n\n{}\n",
            made.class,
            made.detail,
            program.folio,
            super::profile::table(&lines, &symbols)?
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Debian's newest Linux, with a swap device.
///
/// # Errors
/// It cannot be fetched.
pub fn linux(architecture: Architecture) -> Result<Kernel, Problem> {
    Ok(Kernel::Linux {
        image: linux::newest(architecture)?,
        modules: Default::default(),
        swap: linux::ready_made::modules(architecture, "zram")?,
    })
}

/// Builds what both kernels need; the second value is the C library in the programs.
///
/// # Errors
/// QEMU or a compiler is missing.
pub fn prepare(architecture: Architecture) -> Result<(Bench, String), Problem> {
    let emulator = Emulator::installed(architecture)?;
    let workload = programs::build(architecture, machines::WORKLOAD)?;
    let bench = Bench {
        architecture,
        plugin: plugin::build(&emulator)?,
        emulator: emulator.version,
        busybox: busybox::program(architecture)?,
        program: workload.path,
    };
    Ok((bench, workload.library))
}

/// Measures both kernels on one architecture, and shows the tables.
fn compare(
    architecture: Architecture,
    programs: &[Program],
    worst: usize,
) -> Result<Vec<Line>, Problem> {
    let (bench, library) = prepare(architecture)?;
    let [ours, linux] = measure(&bench, [&ours(architecture)?, &linux(architecture)?], programs)?;
    let lines = report::lines(architecture, programs, &ours, &linux);
    show(&format!(
        "\n{architecture}, QEMU {}, programs linked with {}\nBindery  {}\nLinux    {}\n\n{}\n{}",
        bench.emulator,
        library,
        ours.kernel,
        linux.kernel,
        report::tables(&lines, worst),
        report::conclusion(&lines),
    ))?;
    Ok(lines)
}

/// Runs all batches on both kernels, several machines at a time.
///
/// # Errors
/// A machine failed.
pub fn measure(
    bench: &Bench,
    kernels: [&Kernel; 2],
    programs: &[Program],
) -> Result<[Measured; 2], Problem> {
    let batches: Vec<_> = programs.chunks(BATCH).collect();
    let tasks: Vec<_> =
        batches.iter().flat_map(|batch| kernels.map(|kernel| (kernel, *batch))).collect();
    let progress = progress(bench, tasks.len());
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((kernel, batch)) = tasks.get(number) else { break };
            let result = bench.measure(kernel, batch);
            progress.inc(1);
            match results.lock() {
                Ok(mut results) => results.push((number, result)),
                Err(poisoned) => poisoned.into_inner().push((number, result)),
            }
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from).min(MOST_AT_A_TIME);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(work);
        }
    });
    progress.finish_and_clear();
    let mut results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    results.sort_by_key(|(number, _)| *number);
    let nothing = || Measured { kernel: String::new(), programs: Vec::new() };
    let mut all = [nothing(), nothing()];
    for (number, result) in results {
        let Measured { kernel, programs } = result?;
        let sum = &mut all[number % 2];
        sum.kernel = kernel;
        sum.programs.extend(programs);
    }
    Ok(all)
}

/// A bar on standard error; indicatif hides it where that is no terminal.
fn progress(bench: &Bench, machines: usize) -> ProgressBar {
    let template = "{msg:8} [{bar:40}] {pos} of {len} machines  {elapsed}";
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    let progress = ProgressBar::new(machines as u64).with_style(style);
    progress.set_message(bench.architecture.name());
    progress.enable_steady_tick(Duration::from_secs(1));
    progress
}
