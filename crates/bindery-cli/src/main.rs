//! The program `bindery`: runs workloads and scripts on the engine, either in a machine inside this
//! process or in QEMU, and compares the results with Linux.

#![deny(
    clippy::wildcard_enum_match_arm,
    clippy::match_wildcard_for_single_variants,
    reason = "a new variant leads by errors to each place that must decide about it"
)]

mod bench;
mod check;
mod compare;
mod conformance;
mod doctor;
mod output;
mod plugin;
mod random;
mod run;
mod setup;
mod text;

use std::process::ExitCode;

use bindery_cli::{guest, size};
use clap::{Parser, Subcommand};

const AFTER_HELP: &str = "\
Begin with `bindery bench --quick`, or with `bindery check --script docs/examples/share.bindery`. \
Exit status: 0 on success, 1 if a run failed, 2 if the command line or a script was invalid.";

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
    Random(random::Arguments),
    Run(run::Arguments),
    Compare(compare::Arguments),
    Conformance(conformance::Arguments),
    Doctor(doctor::Arguments),
    Setup(setup::Arguments),
    Size(text::Arguments),
}

/// The reason for an exit status other than 0.
enum Problem {
    /// A run failed.
    Failed(String),
    /// The command line or the script is invalid.
    Wrong(String),
}

impl From<guest::Problem> for Problem {
    fn from(problem: guest::Problem) -> Self {
        match problem {
            guest::Problem::Wrong(text) => Self::Wrong(text),
            guest::Problem::Missing(text) | guest::Problem::Failed(text) => Self::Failed(text),
        }
    }
}

impl From<String> for Problem {
    fn from(text: String) -> Self {
        Self::Failed(text)
    }
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let result = match command {
        Command::Bench(arguments) => bench::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Check(arguments) => check::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Random(arguments) => random::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Run(arguments) => run::run(&arguments).map_err(Problem::from),
        Command::Compare(arguments) => compare::run(&arguments).map_err(Problem::from),
        Command::Conformance(arguments) => conformance::run(&arguments).map_err(Problem::from),
        Command::Doctor(arguments) => doctor::run(&arguments).map_err(Problem::from),
        Command::Setup(arguments) => setup::run(&arguments).map_err(Problem::from),
        Command::Size(arguments) => text::run(&arguments).map_err(Problem::from),
    };
    let (status, problem) = match result {
        Ok(status) => return status,
        Err(Problem::Failed(problem)) => (ExitCode::FAILURE, problem),
        Err(Problem::Wrong(problem)) => (ExitCode::from(2), problem),
    };
    eprintln!("error: {problem}");
    status
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    use super::*;

    /// Collects the names of the commands whose text after the help has a line wider than the help:
    /// clap breaks such a line in the middle.
    fn with_broken_lines(command: &Command, broken: &mut Vec<String>) {
        let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
        let wide = text.lines().filter(|line| line.chars().count() > 100);
        broken.extend(wide.map(|line| format!("{}: {line}", command.get_name())));
        command.get_subcommands().for_each(|command| with_broken_lines(command, broken));
    }

    #[test]
    fn no_line_of_the_help_is_broken() {
        let mut broken = Vec::new();
        with_broken_lines(&Cli::command(), &mut broken);
        assert_eq!(broken, Vec::<String>::new());
        let wide = Command::new("wide").after_long_help("x".repeat(101));
        with_broken_lines(&wide, &mut broken);
        assert_eq!(broken.len(), 1);
    }
}
