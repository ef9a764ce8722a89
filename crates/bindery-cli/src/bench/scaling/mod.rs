//! `bindery bench scaling`: operations of many CPUs at once, on the core and on the host's Linux,
//! and a model of more CPUs than the host has.
//!
//! | file | contents |
//! |---|---|
//! | `read` | the output of the program that measures |
//! | `rows` | the operations that the model knows, and the targets |
//! | `model` | the model |
//! | `report` | the tables |

mod model;
mod read;
mod report;
mod rows;

use std::process::Command;
use std::thread::available_parallelism;

use bindery_cli::guest::{Problem, process, workspace};

use super::{conflicts, programs};
use crate::output::show;
use read::Figures;

const HELP: &str = "\
What is measured
  The rate of each operation on one CPU, and on several that make it at once: as threads of one
  address space, as processes (one memory), and as a control with a memory each, which shows the
  host's own limit. Each sample takes 0.05 to 0.5 ms: the threads sleep until all have come, spin
  until all are awake, then work. A sample with a preemption is left out and counted. The numbers of
  CPUs alternate, so other load on the host meets all of them. The core runs as a library with its
  own spin locks, on base pages, without a TLB; the host's Linux makes the same calls as threads or
  processes, without large folios, and its times include the system calls and the faults. The first
  six operations have targets; the others are those of will-it-scale, written anew.

The model
  Time without others, lines that are exchanged (the committed table of bindery bench conflicts)
  times the cost of one here, and the wait for the common lock that is held longest, for any number
  of CPUs. It is compared with the measurement on two CPUs, and predicts 64 and 384.

Times are noisy: compare ratios within one run, and trust only their first digit.

Examples
  bindery bench scaling
  bindery bench scaling --cpus 1,2,4,8 --rounds 2000
  bindery bench scaling --quick --no-linux";

/// Measure operations of many CPUs at once, beside Linux, and predict those of more CPUs
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More: bindery bench scaling --help")]
pub struct Arguments {
    /// The numbers of CPUs besides one, separated by commas [default: all of the host]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u16).range(2..=256))]
    cpus: Vec<u16>,

    /// Samples of each operation on each number of CPUs
    #[arg(long, value_name = "N", default_value_t = 400)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: u32,

    /// Take 24 samples of each: a few seconds in all
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,

    /// Leave out Linux
    #[arg(long)]
    no_linux: bool,
}

/// Runs the measurement.
///
/// # Errors
/// The message for the user: the host has too few CPUs, or a step failed.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let text = measure(arguments)?;
    Ok(show(&text)?)
}

fn measure(arguments: &Arguments) -> Result<String, Problem> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Problem::Failed("`bench scaling` runs only on x86-64 hosts".to_owned()));
    }
    let available = available_parallelism().map_or(1, usize::from);
    let mut cpus = arguments.cpus.clone();
    if cpus.is_empty() && available > 1 {
        cpus.push(available.min(usize::from(u16::MAX)) as u16);
    }
    if let Some(many) = cpus.iter().find(|cpus| usize::from(**cpus) > available) {
        return Err(Problem::Failed(format!(
            "the host has {available} CPUs, not {many}; give --cpus at most {available}"
        )));
    }
    cpus.sort_unstable();
    cpus.dedup();
    let program = programs::build("bindery-scaling")?;
    let rounds = if arguments.quick { 24 } else { arguments.rounds };
    let all: Vec<String> = [1].iter().chain(&cpus).map(u16::to_string).collect();
    let figures = |subject: &str| -> Result<Figures, Problem> {
        let mut command = Command::new(&program);
        let printed =
            process::output(command.args([subject, &rounds.to_string(), &all.join(",")]))?;
        Figures::read(&printed).map_err(Problem::Failed)
    };
    let core = figures("library")?;
    let linux = if arguments.no_linux { None } else { Some(figures("linux")?) };
    let path = workspace::root()?.join(conflicts::TABLE);
    let lines =
        std::fs::read_to_string(&path).map_err(|error| Problem::io("read", &path, &error))?;
    let lines_of = |row: &str| {
        let [threads, processes, ..] = conflicts::committed_row(&lines, row)?;
        Some([threads, processes])
    };
    let rates = cpus.iter().map(|cpus| report::rates(*cpus, &core, linux.as_ref()));
    let rates: Vec<String> = rates.collect();
    let model = report::model(&core, lines_of);
    Ok(format!("{}\n{model}{}", rates.join("\n"), report::LEGEND))
}
