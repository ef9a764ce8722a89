//! Programs on the reference kernel, in QEMU, on every architecture: the test programs of
//! `programs/tests`, BusyBox with a script, and the workloads with their contents verified. At the
//! exit of every process the kernel audits all invariants, and at the end it checks for leaked
//! frames. A violation makes the kernel panic, and the trial fails.
//!
//! If QEMU or a compiler is missing, trials are ignored, and the reason is shown. With
//! `BINDERY_REQUIRE_KERNEL=1` in the environment they fail instead. One trial runs per CPU of the
//! host, each on a machine of its own. `options.rs` lists variables of the environment that change all
//! machines.

mod command;
mod damaged_disk;
mod guest;
mod options;
mod terminal;
mod trials;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    match trials::all() {
        Ok(trials) => {
            if !arguments.list {
                announce(&trials);
            }
            libtest_mimic::run(&arguments, trials).exit_code()
        }
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Announces the slow steps and their duration.
fn announce(trials: &[Trial]) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    eprintln!(
        "{} trials, of which those that are chosen run: each boots the reference kernel in QEMU, {} \
         at a time. All of them take about six minutes of one CPU, and a first build of the kernel \
         one or two for each architecture.",
        trials.len(),
        processors,
    );
}
