//! `bindery run`: one program on the reference kernel, in QEMU.

mod boot;
mod terminal;

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::ValueParser;

use crate::guest::machine::{Clock, Machine, Outcome, Output, TimedOut, models};
use crate::guest::{Architecture, Problem, kernel};
use crate::size::{KIB, parse_bytes};
use boot::{AddedFile, Boot};
use terminal::Terminal;

/// The exit status after a kernel panic.
const KERNEL_DIED: u8 = 101;
/// The exit status at the time limit, as that of `timeout`.
const TIME_WAS_UP: u8 = 124;
/// The exit status if the user ended the machine, as after an interrupt.
const LEFT: u8 = 130;

const HELP: &str = "\
The program
  A static ELF program on the host; its header gives the architecture. A file that ends in .c is
  built first, for --arch or the host's architecture. `busybox`, if there is no such file, is
  Debian's static BusyBox. The machine's file system has only the program in /bin, the files added
  by --file, and the kernel's /dev, /proc, /sys and /tmp.

Keys
  If standard input is a terminal, all keys go to the program: Ctrl-C interrupts it, Ctrl-\\ kills
  it. Ctrl-A x ends the machine, Ctrl-A Ctrl-A is Ctrl-A. If standard output is not a terminal, the
  program's is not one either.

Exit status
  The program's own; 128 plus the signal's number if a signal killed it; 101 if the kernel died
  (its message is on standard error); 124 if the time was up; 130 after Ctrl-A x; 1 if a requirement
  is missing; 2 if the command line was invalid.

Examples
  bindery run programs/tests/start.c
  bindery run --arch aarch64 busybox sh -c 'cat /proc/self/maps'
  bindery run --file script.sh:/script.sh busybox sh /script.sh
  bindery run --icount --check ./my-static-program argument";

/// Run a static Linux program on the reference kernel, in QEMU
///
/// Builds the kernel if needed. Shows the program's output, and ends with its exit status.
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More, with examples: bindery run --help")]
pub struct Arguments {
    /// The machine's architecture, x86-64 or aarch64 [default: the program's]
    #[arg(long, value_name = "ARCH")]
    arch: Option<Architecture>,

    /// The number of CPUs
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,

    /// The model of the CPUs, as QEMU names it (`-cpu help` lists them), for example cortex-a53
    /// [default: max, with all features]
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,

    /// The machine's memory
    #[arg(long, value_name = "SIZE", default_value = "256m", value_parser = parse_memory)]
    memory: u64,

    /// Make the machine's clock count instructions: the same run repeats exactly
    #[arg(long)]
    icount: bool,

    /// Add a file of the host as /NAME, or as TARGET
    #[arg(long = "file", value_name = "PATH[:TARGET]", value_parser = ValueParser::new(boot::parse_file))]
    files: Vec<AddedFile>,

    /// Set a variable of the program's environment
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = parse_pair)]
    environment: Vec<String>,

    /// Audit all invariants at the exit of every process, and leaked frames at the end; the kernel
    /// panics if it finds a violation
    #[arg(long)]
    check: bool,

    /// Log every call that a program makes
    #[arg(long)]
    log_calls: bool,

    /// Give the kernel another option
    #[arg(long = "option", value_name = "KEY=VALUE", value_parser = parse_pair)]
    options: Vec<String>,

    /// Attach a raw image as the machine's disk, whose files are under /disk; made if it does not
    /// exist
    #[arg(long, value_name = "FILE")]
    disk: Option<PathBuf>,

    /// The size of a disk that is made
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = parse_memory)]
    disk_size: u64,

    /// Stop the machine after this time
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,

    /// The program: a static ELF file, a C file, or `busybox`
    #[arg(value_name = "PROGRAM")]
    program: PathBuf,

    /// Its arguments
    #[arg(value_name = "ARG", trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

fn parse_memory(text: &str) -> Result<u64, String> {
    match parse_bytes(text) {
        Some(bytes) if bytes >= KIB && bytes.is_multiple_of(KIB) => Ok(bytes),
        Some(_) => Err("the size must be a multiple of 1 KiB, and not 0".to_owned()),
        None => Err("this is not a size; write for example 256m or 2g".to_owned()),
    }
}

fn parse_pair(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(text.to_owned()),
        _ => Err("write a name, `=` and a value, as in NAME=VALUE".to_owned()),
    }
}

/// Runs the program and returns its exit status.
///
/// # Errors
/// The message for the user. The machine was not started.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let terminal = Terminal::find();
    let boot = Boot::prepare(arguments, &terminal)?;
    // Checked first, because the build takes minutes.
    if let Some(processor) = &arguments.cpu {
        models::demand(boot.architecture, processor)?;
    }
    let kernel = kernel::build(boot.architecture)?;
    let mut files = boot.files;
    files.file(kernel::SYMBOLS_PATH, crate::guest::initramfs::PLAIN, kernel.symbols)?;
    let mut machine = Machine::new(boot.architecture, kernel.image);
    machine.processors = arguments.cpus;
    machine.processor.clone_from(&arguments.cpu);
    machine.memory = arguments.memory;
    if let Some(disk) = &arguments.disk {
        make_disk(disk, arguments.disk_size)?;
        machine.disk = Some(disk.clone());
    }
    machine.clock = if arguments.icount { Clock::Instructions } else { Clock::Host };
    machine.initramfs = files.archive();
    machine.command_line = boot.command_line.to_string();
    machine.timeout = arguments.timeout.map(Duration::from_secs);
    let output = terminal.output();
    let kept = terminal.keep();
    let outcome = machine.run(output)?;
    drop(kept);
    Ok(report(&outcome, machine.clock, output))
}

/// Creates the image of a disk unless it exists.
fn make_disk(disk: &Path, size: u64) -> Result<(), Problem> {
    let problem = |error: &std::io::Error| Problem::io("create the disk image", disk, error);
    match File::create_new(disk) {
        Ok(file) => file.set_len(size).map_err(|error| problem(&error)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(problem(&error)),
    }
}

/// Reports the outcome on standard error and returns the exit status.
fn report(outcome: &Outcome, clock: Clock, output: Output) -> ExitCode {
    for line in &outcome.log {
        eprintln!("kernel: {line}");
    }
    if let (Some(time), Clock::Instructions) = (outcome.first_user_instruction, clock) {
        eprintln!("bindery: the program began after {time} instructions");
    }
    if let Some(panic) = &outcome.panic {
        eprintln!("error: the kernel died: {panic}");
        return ExitCode::from(KERNEL_DIED);
    }
    match (outcome.status.map(u8::try_from), outcome.timed_out) {
        (Some(Ok(status)), _) => ExitCode::from(status),
        (_, TimedOut::After(time)) => {
            eprintln!("error: the machine was stopped after {} s, its --timeout", time.as_secs());
            ExitCode::from(TIME_WAS_UP)
        }
        _ if output == Output::Terminal && outcome.emulator_messages.is_empty() => {
            eprintln!("bindery: the machine was stopped from the keyboard");
            ExitCode::from(LEFT)
        }
        _ => {
            eprintln!("error: {}", unexplained(&outcome.emulator_messages));
            ExitCode::from(KERNEL_DIED)
        }
    }
}

/// The message for a machine whose kernel reported neither a status nor a panic.
fn unexplained(emulator_messages: &str) -> String {
    if emulator_messages.is_empty() {
        "the kernel died without a message; --log-calls shows the last call before its end"
            .to_owned()
    } else {
        format!("QEMU ended before the kernel reported a status:\n{emulator_messages}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unexplained_end_is_attributed_to_its_source() {
        let message = "qemu-system-x86_64: unable to find CPU model 'x'";
        let text = unexplained(message);
        assert!(text.starts_with("QEMU ended") && text.ends_with(message), "{text}");
        assert!(unexplained("").starts_with("the kernel died"));
    }

    #[test]
    fn memory_is_a_size_in_whole_kibibytes() {
        assert_eq!(parse_memory("256m"), Ok(256 << 20));
        for wrong in ["", "0", "1000", "much", "-1m"] {
            assert!(parse_memory(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn variables_and_options_have_name_and_value() {
        assert_eq!(parse_pair("A=b=c"), Ok("A=b=c".to_owned()));
        assert_eq!(parse_pair("A="), Ok("A=".to_owned()));
        assert!(parse_pair("A").is_err() && parse_pair("=b").is_err());
    }
}
