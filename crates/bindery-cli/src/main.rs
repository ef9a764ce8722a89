//! The program `bindery`: runs workloads on the engine, in a machine inside this process, and shows
//! them beside Linux.

mod bench;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const AFTER_HELP: &str = "\
Begin with `bindery bench --quick`. Exit status: 0 if all went well, 1 if a run failed, 2 if the \
command line was wrong.";

/// Bindery: a virtual-memory subsystem in which every operation works on the largest piece that the
/// page table can name
#[derive(Parser)]
#[command(version, after_help = AFTER_HELP, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Arguments),
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let result = match command {
        Command::Bench(arguments) => bench::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}
