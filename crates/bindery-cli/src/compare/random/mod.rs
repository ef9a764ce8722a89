//! `bindery compare random`: random programs on both kernels.
//!
//! | file | contents |
//! |---|---|
//! | `grammar` | programs at random |
//! | `report` | both kernels side by side, dearest against Linux first |
//! | `dearer` | operations that are known to be dearer, with the reasons |

mod dearer;
pub mod grammar;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use bindery_cli::guest::{Architecture, Problem};
use serde::Serialize;

use super::guests::Kernel;
use super::interpreter::{Program, linux, measure, prepare};
use super::ours;
use crate::output::{JsonFile, show};
use report::Line;

const HELP: &str = "\
The programs
  Each seed makes a program of 24 to 60 steps: mappings of 4 KiB to 16 MiB at aligned and odd
  places, private, shared and of files; reads and writes of all pages or of some; mprotect, mremap,
  munmap, madvise, mlock, mincore, msync, holes in files, fork and exit of up to four processes,
  swap, and UFFDIO_COPY, MOVE, ZEROPAGE and WRITEPROTECT; with folios of 4 KiB, 64 KiB or 2 MiB.
  programs/workloads/random.c runs it on both kernels, step by step, and the plugin counts each
  step.

Exit status
  0  no step takes more than 1.1 times Linux's instructions, but for those in a list with their
     reasons (crates/bindery-cli/src/compare/random/dearer.rs)
  1  another one does

Examples
  bindery compare random                                      20 programs, both architectures
  bindery compare random --seed 17 --programs 1 --arch x86-64 one program
  bindery compare random --programs 300 --json random.json
  bindery compare random --seed 17 --profile 23 --arch x86-64 the hottest functions of one step";

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

/// All steps, in machine-readable form.
#[derive(Serialize)]
struct Document {
    bindery: &'static str,
    first_seed: u64,
    programs: u64,
    steps: Vec<Line>,
}

/// Runs the comparison of the arguments.
///
/// # Errors
/// If a requirement is missing, or a machine failed.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    if let Some(step) = arguments.profile {
        return profile(&grammar::program(arguments.seed), step, &architectures);
    }
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let programs: Vec<Program> = (0..arguments.programs)
        .map(|number| grammar::program(arguments.seed.wrapping_add(number)))
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

/// Shows the instructions of our kernel in one step, by function.
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

/// Measures both kernels on one architecture and shows the tables.
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
