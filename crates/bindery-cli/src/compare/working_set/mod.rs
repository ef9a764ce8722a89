//! `bindery compare working-set`: a working set larger than memory, and the number of pages that
//! each kernel moves between memory and its compressed swap device.
//!
//! No plugin is used, because each kernel reports in `/proc/vmstat` the pages that it has moved.
//! The machines' clock counts instructions, so a run moves the same pages every time, and the clock
//! shows the run's number of instructions. Each kernel performs all runs in one boot.
//!
//! | file | contents |
//! |---|---|
//! | `run` | the runs of the workload, and their reports |
//! | `machines` | the machines: both kernels have equal numbers of frames for programs |
//! | `report` | a line for each run, and the medians |

mod machines;
mod report;
mod run;

use std::collections::BTreeMap;
use std::process::ExitCode;

use bindery_cli::guest::{Architecture, Problem, busybox, linux};

use super::guests::Kernel;
use super::{ours, parallel, programs};
use crate::output::show;
use crate::plugin::Emulator;
use crate::size::{GIB, MIB, parse_bytes};
use machines::{Bench, Booted};
use report::Line;
use run::{Order, Run, WORKLOAD};

const HELP: &str = "\
The workload
  programs/workloads/working_set.c writes all pages of its working set, visits each once on average,
  and reads all again. Each page is checked whenever it is visited. One visit in four writes the
  page anew.

The machines
  Each kernel makes all runs in one boot, Linux once with its multi-generational LRU and once with
  its classic lists. Both have the same program, the same BusyBox, base pages, and a swap device as
  large as the working set, made anew for each run: /dev/zram0, with the compressor that each
  kernel has by default. Bindery's machine has --memory. Linux needs more memory for itself, so its
  machine gets as much more as gives the working set as many frames (mincore counts them), within
  1 %. A few trial runs find it. A boot that was made before is read from target/guest/compare.

The tables
  Pages moved in both directions, and the least that any choice of victims moves (MIN). Instructions
  of the kernel are those that a run takes more than the program takes on pages in memory.

Examples
  bindery compare working-set --arch x86-64                     an hour
  bindery compare working-set --order zipf,scan --seeds 1       some minutes
  bindery compare working-set --seeds 1 --order random --processes 1 --no-linux";

/// Count the pages that a working set larger than memory moves to swap and back, beside Linux
#[derive(clap::Args)]
#[command(after_long_help = HELP,
          after_help = "More, with examples: bindery compare working-set --help")]
pub struct Arguments {
    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// How large the working set is, of all processes together
    #[arg(long, value_name = "SIZE", default_value = "160m", value_parser = parse_size)]
    size: u64,

    /// The memory of Bindery's machine
    #[arg(long, value_name = "SIZE", default_value = "128m", value_parser = parse_size)]
    memory: u64,

    /// How many seeds: the numbers from 1
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,

    /// In which order pages are visited, separated by commas
    #[arg(long, value_name = "ORDER", value_delimiter = ',',
          default_values_t = Order::ALL)]
    order: Vec<Order>,

    /// How many processes share the working set, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1],
          value_parser = clap::value_parser!(u64).range(1..=16))]
    processes: Vec<u64>,

    /// Do not run Linux
    #[arg(long)]
    no_linux: bool,
}

/// Reads a size in whole MiB, since the workload accepts no other sizes.
fn parse_size(text: &str) -> Result<u64, String> {
    match parse_bytes(text) {
        Some(bytes) if bytes >= MIB && bytes.is_multiple_of(MIB) && bytes <= MOST => Ok(bytes),
        Some(_) => Err("the size must be a multiple of 1 MiB, and at most 1 TiB".to_owned()),
        None => Err("this is not a size; write for example 256m or 1g".to_owned()),
    }
}

/// No machine has more memory.
const MOST: u64 = 1024 * GIB;

/// Runs the comparison of the arguments and prints each run as it ends.
///
/// # Errors
/// If a requirement is missing, or a machine failed. Earlier results have been printed.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    for architecture in architectures {
        compare(arguments, architecture)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn compare(arguments: &Arguments, architecture: Architecture) -> Result<(), Problem> {
    let program = programs::build(architecture, WORKLOAD)?;
    let bench = Bench {
        architecture,
        emulator: Emulator::installed(architecture)?.version,
        busybox: busybox::program(architecture)?,
        program: program.path,
    };
    let first = Run { size: arguments.size, order: Order::Random, processes: 1, seed: 1 };
    let bindery = bench.boot("Bindery", ours(architecture)?, arguments.memory, first)?;
    let linux = match linux(arguments.no_linux, architecture)? {
        Some(kernel) => Some(bench.boot_like(&bindery, "Linux", kernel, first)?),
        None => None,
    };
    let kernels: Vec<Booted> = [Some(bindery), linux].into_iter().flatten().collect();
    let emulator = &bench.emulator;
    show(&report::heading(architecture, emulator, &program.library, arguments.size, &kernels))?;
    let runs = runs(arguments);
    let measured = parallel::all(architecture, &kernels, |kernel| bench.measure(kernel, &runs));
    let mut lines = Vec::new();
    for measured in measured {
        let line = |(lists, run, moved)| Line { run, lists, moved };
        lines.extend(measured?.into_iter().map(line));
    }
    for run in runs {
        for line in lines.iter().filter(|line| line.run == run) {
            show(&format!("{line}\n"))?;
        }
    }
    show(&report::medians(&lines))
}

/// Linux with its swap device, unless it is not wanted.
///
/// # Errors
/// If Linux or its swap device is not available, since there are no recorded figures to use
/// instead.
pub fn linux(no_linux: bool, architecture: Architecture) -> Result<Option<Kernel>, Problem> {
    if no_linux {
        return Ok(None);
    }
    let image = linux::newest(architecture)?;
    let swap = linux::ready_made::modules(architecture, "zram")?;
    Ok(Some(Kernel::Linux { image, modules: BTreeMap::new(), swap }))
}

/// All runs; the runs of one row of the medians are consecutive.
fn runs(arguments: &Arguments) -> Vec<Run> {
    let mut runs = Vec::new();
    for &order in &arguments.order {
        for &processes in &arguments.processes {
            let seeds = 1..=arguments.seeds;
            runs.extend(seeds.map(|seed| Run { size: arguments.size, order, processes, seed }));
        }
    }
    runs
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

    fn parsed(words: &[&str]) -> Result<Arguments, String> {
        let words = ["working-set"].iter().chain(words);
        Cli::try_parse_from(words).map(|cli| cli.arguments).map_err(|error| error.to_string())
    }

    #[test]
    fn by_default_each_order_has_five_seeds() {
        let runs = runs(&parsed(&[]).unwrap());
        assert_eq!(runs.len(), 35);
        let (first, last) = (runs[0], runs[34]);
        assert_eq!((first.order, first.processes, first.seed), (Order::Sequential, 1, 1));
        assert_eq!((last.order, last.processes, last.seed), (Order::Shared, 1, 5));
        assert!(runs.iter().all(|run| run.size == 160 * MIB));
    }

    #[test]
    fn runs_are_chosen_by_order_processes_and_seeds() {
        let words = ["--order", "80-20", "--processes", "2", "--seeds", "3", "--size", "64m"];
        let runs = runs(&parsed(&words).unwrap());
        let seeds: Vec<u64> = runs.iter().map(|run| run.seed).collect();
        assert_eq!(seeds, [1, 2, 3]);
        let same = |run: &Run| run.order == Order::Hot80 && run.processes == 2;
        assert!(runs.iter().all(|run| same(run) && run.size == 64 * MIB));
    }

    #[test]
    fn sizes_are_whole_mebibytes() {
        for wrong in ["0", "4k", "1500k", "much", "2048g"] {
            let problem = parsed(&["--size", wrong]).err().unwrap();
            assert!(problem.contains("--size"), "{problem}");
        }
        assert!(parsed(&["--processes", "17"]).is_err() && parsed(&["--seeds", "0"]).is_err());
    }
}
