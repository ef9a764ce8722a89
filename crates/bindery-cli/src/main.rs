//! The program `bindery`: runs workloads and scripts on the engine, in a machine inside this process,
//! and shows them beside Linux.

mod bench;
mod check;
mod size;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const AFTER_HELP: &str = "\
Begin with `bindery bench --quick`, or with `bindery check --script docs/examples/share.bindery`. \
Exit status: 0 if all went well, 1 if a run failed, 2 if the command line or a script was wrong.";

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
    Check(check::Arguments),
}

/// Why the program ends with another exit status than 0.
enum Problem {
    /// A run failed.
    Failed(String),
    /// What the user wrote means nothing.
    Wrong(String),
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let result = match command {
        Command::Bench(arguments) => bench::run(&arguments).map_err(Problem::Failed),
        Command::Check(arguments) => check::run(&arguments),
    };
    let (status, problem) = match result {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Problem::Failed(problem)) => (ExitCode::FAILURE, problem),
        Err(Problem::Wrong(problem)) => (ExitCode::from(2), problem),
    };
    eprintln!("error: {problem}");
    status
}
