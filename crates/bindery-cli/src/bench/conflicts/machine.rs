//! Builds the plugin and the program of the operations, then runs both under QEMU.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use bindery_cli::guest::requirements::Requirement;
use bindery_cli::guest::{Problem, process};

use crate::bench::programs;
use crate::plugin::{self, Emulator, Plugin};

/// The outputs of one run.
pub struct Outputs {
    /// The program, with debug information.
    pub program: PathBuf,
    /// The program's output.
    pub printed: String,
    /// The plugin's output.
    pub pairs: String,
}

/// Builds and runs.
///
/// # Errors
/// If QEMU or a compiler is missing, or if a step fails.
pub fn run() -> Result<Outputs, Problem> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Problem::Failed("`bench conflicts` runs only on x86-64 hosts".to_owned()));
    }
    let emulator = Emulator::of_programs()?;
    let plugin = plugin::build(Plugin::Conflicts, &emulator)?;
    let program = programs::build("bindery-conflicts")?;
    let failed = |error| Problem::io("write to", &std::env::temp_dir(), &error);
    let pairs = tempfile::NamedTempFile::new().map_err(failed)?;
    let argument = format!("{},out={}", plugin.display(), pairs.path().display());
    let mut command = Command::new(Requirement::ProgramEmulator.program());
    let printed = process::output(command.arg("-plugin").arg(argument).arg(&program))?;
    let pairs = fs::read_to_string(pairs.path())
        .map_err(|error| Problem::io("read", pairs.path(), &error))?;
    Ok(Outputs { program, printed, pairs })
}
