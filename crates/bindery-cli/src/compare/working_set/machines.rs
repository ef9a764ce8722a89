//! The machines of both kernels, with the same memory for programs.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use bindery_cli::guest::command_line::CommandLine;
use bindery_cli::guest::initramfs::{EXECUTABLE, PLAIN};
use bindery_cli::guest::kernel::SYMBOLS_PATH;
use bindery_cli::guest::machine::{Machine, Output, TimedOut};
use bindery_cli::guest::{Architecture, Problem};

use super::super::guests::{self, Kernel};
use super::run::{Moved, Run, Told, WORKLOAD, judge, script};
use crate::size::{KIB, MIB};

/// A machine that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// With so little difference between the memory available to both kernels, the search ends.
const CLOSE: u64 = 256 * KIB;

/// How much more or less memory one kernel may have available than the other. What is available
/// differs from boot to boot.
const TOLERANCE: u64 = MIB;

/// How many machines are tried to find one with as much memory available as another.
const TRIES: u32 = 8;

/// How much memory a kernel is first supposed to need more than ours.
const SUPPOSED: u64 = 64 * MIB;

/// All that the machines of one architecture have in common.
pub struct Bench {
    pub architecture: Architecture,
    pub busybox: PathBuf,
    pub program: PathBuf,
}

/// A kernel, the memory of its machine, and what it has told.
pub struct Booted {
    pub name: &'static str,
    /// The version, as it says itself.
    pub version: String,
    /// Bytes of its machine's memory.
    pub memory: u64,
    /// Bytes of it for programs.
    pub available: u64,
    kernel: Kernel,
}

impl Bench {
    /// A kernel in a machine of this much memory.
    ///
    /// # Errors
    /// It does not come up.
    pub fn boot(&self, name: &'static str, kernel: Kernel, memory: u64) -> Result<Booted, Problem> {
        let told = self.start(name, &kernel, memory, None)?;
        Ok(Booted { name, version: told.kernel, memory, available: told.available, kernel })
    }

    /// A kernel in a machine in which as much memory is available as in another's.
    ///
    /// # Errors
    /// It does not come up, or no such machine was found.
    pub fn boot_like(
        &self,
        other: &Booted,
        name: &'static str,
        kernel: Kernel,
    ) -> Result<Booted, Problem> {
        let mut version = String::new();
        let (memory, available) = fit(other.available, other.memory + SUPPOSED, |memory| {
            let told = self.start(name, &kernel, memory, None)?;
            version = told.kernel;
            Ok(told.available)
        })?;
        Ok(Booted { name, version, memory, available, kernel })
    }

    /// Runs the workload.
    ///
    /// # Errors
    /// QEMU does not start, the kernel dies, or the workload fails or finds wrong contents.
    pub fn measure(&self, booted: &Booted, run: Run) -> Result<Moved, Problem> {
        let told = self.start(booted.name, &booted.kernel, booted.memory, Some(run))?;
        told.moved.ok_or_else(|| Problem::Failed(format!("{} moved no page", booted.name)))
    }

    fn start(
        &self,
        name: &str,
        kernel: &Kernel,
        memory: u64,
        run: Option<Run>,
    ) -> Result<Told, Problem> {
        let outcome = self.machine(kernel, memory, run)?.run(Output::Capture)?;
        let console = String::from_utf8_lossy(&outcome.console);
        let failed = |problem: &dyn std::fmt::Display| {
            let (architecture, memory) = (self.architecture, memory / MIB);
            Problem::Failed(format!("{name} on {architecture} with {memory} MiB: {problem}"))
        };
        if let Some(panic) = outcome.panic {
            return Err(failed(&format!("the kernel died: {panic}")));
        }
        if let TimedOut::After(time) = outcome.timed_out {
            return Err(failed(&format!("it was ended after {} s:\n{console}", time.as_secs())));
        }
        judge(&console, run).map_err(|problem| failed(&problem))
    }

    fn machine(&self, kernel: &Kernel, memory: u64, run: Option<Run>) -> Result<Machine, Problem> {
        let mut files = guests::file_system(&self.busybox)?;
        let program =
            fs::read(&self.program).map_err(|error| Problem::io("read", &self.program, &error))?;
        files.file(&format!("/bin/{WORKLOAD}"), EXECUTABLE, program)?;
        files.file("/init", EXECUTABLE, script(run))?;
        let (image, command_line) = match kernel {
            Kernel::Linux { image, swap, .. } => {
                guests::add_swap_modules(&mut files, swap)?;
                (image, guests::lean_command_line(self.architecture))
            }
            Kernel::Bindery { image, symbols } => {
                files.file(SYMBOLS_PATH, PLAIN, symbols.as_str())?;
                let mut line = CommandLine::new();
                line.argument("/bin/busybox").argument("sh").argument("/init");
                (image, line.to_string())
            }
        };
        let mut machine = Machine::new(self.architecture, image.clone());
        machine.memory = memory;
        machine.initramfs = files.archive();
        machine.command_line = command_line;
        machine.timeout = Some(TIMEOUT);
        Ok(machine)
    }
}

/// The memory of a machine in which about `wanted` bytes are available, and how many are. A kernel
/// keeps a part of its memory that grows with it, so that several are tried, from `first` on.
///
/// # Errors
/// As those of `available`, or no such memory was found.
fn fit(
    wanted: u64,
    first: u64,
    mut available: impl FnMut(u64) -> Result<u64, Problem>,
) -> Result<(u64, u64), Problem> {
    let mut memory = first;
    let mut best: Option<(u64, u64, u64)> = None;
    for _ in 0..TRIES {
        let found = available(memory)?;
        let difference = found.abs_diff(wanted);
        if best.is_none_or(|(least, ..)| difference < least) {
            best = Some((difference, memory, found));
        }
        if difference <= CLOSE {
            break;
        }
        // Whole pages.
        memory = (memory + wanted).saturating_sub(found) / (4 * KIB) * (4 * KIB);
    }
    match best {
        Some((difference, memory, found)) if difference <= TOLERANCE => Ok((memory, found)),
        _ => {
            let wanted = wanted / MIB;
            let text = format!("no machine was found in which {wanted} MiB are available");
            Err(Problem::Failed(text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_leaves_as_much_for_programs_is_found() {
        // 80 MiB for itself, and a sixteenth of the rest.
        let available = |memory: u64| (memory - 80 * MIB) / 16 * 15;
        let mut tries = 0;
        let (memory, found) = fit(480 * MIB, 576 * MIB, |memory| {
            tries += 1;
            Ok(available(memory))
        })
        .unwrap();
        assert!(found.abs_diff(480 * MIB) <= CLOSE && found == available(memory));
        assert!((2..=4).contains(&tries), "{tries}");
        assert!(memory.is_multiple_of(4 * KIB));
    }

    #[test]
    fn the_closest_of_kernels_that_never_come_close_is_taken() {
        let mut found = [486, 478, 481, 483, 477, 479, 482, 484].map(|mib| mib * MIB).into_iter();
        let mut memory = Vec::new();
        let fitting = fit(480 * MIB, 576 * MIB, |tried| {
            memory.push(tried);
            Ok(found.next().unwrap())
        });
        assert_eq!(fitting.unwrap(), (memory[2], 481 * MIB));
        assert_eq!(memory.len() as u32, TRIES);
    }

    #[test]
    fn a_kernel_that_has_never_enough_ends_the_search() {
        let mut tries = 0;
        let problem = fit(480 * MIB, 576 * MIB, |_| {
            tries += 1;
            Ok(100 * MIB)
        });
        assert!(problem.unwrap_err().to_string().contains("480 MiB"));
        assert_eq!(tries, TRIES);
        let dead = fit(MIB, MIB, |_| Err(Problem::Failed("no kernel".to_owned())));
        assert_eq!(dead.unwrap_err().to_string(), "no kernel");
    }
}
