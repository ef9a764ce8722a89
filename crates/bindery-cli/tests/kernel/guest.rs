//! Runs one program on a machine of its own.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, io, process};

use bindery_cli::guest::command_line::CommandLine;
use bindery_cli::guest::directives::Directives;
use bindery_cli::guest::initramfs::{EXECUTABLE, Initramfs, PLAIN};
use bindery_cli::guest::kernel::{self, Kernel, SYMBOLS_PATH};
use bindery_cli::guest::machine::{Machine, Outcome, Output, TimedOut};
use bindery_cli::guest::requirements::Requirement;
use bindery_cli::guest::{Architecture, Problem, busybox, programs};
use libtest_mimic::{Completion, Failed};

use crate::options;

/// The number of the console's last lines in a failure's message.
const LINES_SHOWN: usize = 60;

/// The program of a trial.
#[derive(Clone)]
pub enum Program {
    /// A program from this C file.
    C(PathBuf),
    /// This script, by BusyBox.
    Script(PathBuf),
}

/// The reason why a trial ends wrongly.
enum Trouble {
    /// The trial cannot run on this host.
    Missing(String),
    /// The trial failed.
    Failed(String),
}

impl From<Problem> for Trouble {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Missing(text) => Self::Missing(text),
            Problem::Wrong(text) | Problem::Failed(text) => Self::Failed(text),
        }
    }
}

/// Runs a program and judges its exit status.
pub fn trial(
    architecture: Architecture,
    program: &Program,
    directives: &Directives,
) -> Result<Completion, Failed> {
    let (Program::C(source) | Program::Script(source)) = program;
    let directives = options::applied(architecture, &stem(source), directives);
    if options::leave_out(&directives) {
        return Ok(Completion::ignored_with(options::COUNTS_INSTRUCTIONS));
    }
    match run(architecture, program, &directives) {
        Ok(()) => Ok(Completion::Completed),
        Err(Trouble::Missing(why)) if !is_required() => Ok(Completion::ignored_with(why)),
        Err(Trouble::Missing(why) | Trouble::Failed(why)) => Err(Failed::from(why)),
    }
}

/// Whether a trial that cannot run is a failure.
pub fn is_required() -> bool {
    env::var_os("BINDERY_REQUIRE_KERNEL").is_some_and(|value| value == "1")
}

fn run(
    architecture: Architecture,
    program: &Program,
    directives: &Directives,
) -> Result<(), Trouble> {
    // Checked first, because the build takes minutes.
    Requirement::Emulator(architecture).demand()?;
    let kernel = built(architecture)?;
    let mut files = Initramfs::new();
    files.file(SYMBOLS_PATH, PLAIN, kernel.symbols.as_str())?;
    let mut line = CommandLine::new();
    line.option("check", "exit");
    for (key, value) in &directives.options {
        line.option(key, value);
    }
    if directives.disk.is_some() {
        line.option("disk", "virtio");
    }
    install(architecture, program, directives, &mut files, &mut line)?;
    for argument in &directives.arguments {
        line.argument(argument);
    }
    let mut machine = Machine::new(architecture, kernel.image.clone());
    machine.processors = directives.processors;
    machine.processor.clone_from(&directives.processor);
    machine.memory = directives.memory;
    machine.clock = directives.clock;
    machine.initramfs = files.archive();
    machine.command_line = line.to_string();
    machine.timeout = Some(directives.timeout);
    let disk = directives.disk.map(|size| Disk::new(architecture, program, size)).transpose();
    let disk = disk.map_err(|error| Trouble::Failed(format!("no disk can be made: {error}")))?;
    // Each further machine finds the files of the previous one on the disk.
    for _ in 0..if disk.is_some() { directives.starts } else { 1 } {
        machine.disk = disk.as_ref().map(|Disk(path)| path.clone());
        // The image ends with the trial, and a power failure is one of the guest's driver.
        machine.syncs_disk = false;
        let outcome = machine.run(Output::Capture)?;
        judge(&outcome, directives.status).map_err(Trouble::Failed)?;
    }
    Ok(())
}

/// The image of an initially empty disk, removed on drop.
struct Disk(PathBuf);

impl Disk {
    fn new(architecture: Architecture, program: &Program, size: u64) -> io::Result<Self> {
        /// Two trials may run one program at the same time.
        static DISKS: AtomicU32 = AtomicU32::new(0);
        let (Program::C(source) | Program::Script(source)) = program;
        let (name, number) = (stem(source), DISKS.fetch_add(1, Ordering::Relaxed));
        let name = format!("bindery-{}-{}-{name}-{number}", process::id(), architecture.name());
        let path = env::temp_dir().join(name);
        File::create_new(&path)?.set_len(size)?;
        Ok(Self(path))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Installs the program with the files that it needs and adds it to the command line.
fn install(
    architecture: Architecture,
    program: &Program,
    directives: &Directives,
    files: &mut Initramfs,
    line: &mut CommandLine,
) -> Result<(), Problem> {
    match program {
        Program::C(source) => {
            let built = programs::build_variant(architecture, source, directives.variant)?;
            let path = format!("/bin/{}", stem(source));
            files.file(&path, EXECUTABLE, read(&built)?)?;
            line.argument(path);
        }
        Program::Script(source) => {
            files.file("/bin/busybox", EXECUTABLE, read(&busybox::program(architecture)?)?)?;
            files.symlink("/bin/sh", "busybox")?;
            files.file("/script.sh", EXECUTABLE, read(source)?)?;
            line.argument("/bin/busybox").argument("sh").argument("/script.sh");
        }
    }
    Ok(())
}

/// The kernel, which is built once.
fn built(architecture: Architecture) -> Result<&'static Kernel, Problem> {
    static KERNELS: [OnceLock<Result<Kernel, Problem>>; Architecture::ALL.len()] =
        [const { OnceLock::new() }; Architecture::ALL.len()];
    let index = Architecture::ALL.iter().position(|&other| other == architecture);
    let index = index.expect("ALL has every architecture");
    KERNELS[index].get_or_init(|| kernel::build(architecture)).as_ref().map_err(Problem::clone)
}

fn judge(outcome: &Outcome, expected: i32) -> Result<(), String> {
    let what = match (&outcome.panic, outcome.status, outcome.timed_out) {
        (Some(panic), ..) => format!("the kernel died: {panic}"),
        (None, Some(status), _) if status == expected => return Ok(()),
        (None, Some(status), _) => format!("exit status {status}, expected {expected}"),
        (None, None, TimedOut::After(time)) => format!("it did not end in {} s", time.as_secs()),
        (None, None, TimedOut::No) => "the kernel died without a word".to_owned(),
    };
    let console = String::from_utf8_lossy(&outcome.console);
    let lines: Vec<&str> = console.lines().collect();
    let shown = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n");
    let log = outcome.log.join("\n");
    let emulator = &outcome.emulator_messages;
    Err(format!("{what}\n--- console ---\n{shown}\n--- log ---\n{log}\n--- QEMU ---\n{emulator}"))
}

fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    std::fs::read(path).map_err(|error| Problem::io("read", path, &error))
}

/// The name of a source without its extension.
pub fn stem(source: &Path) -> String {
    source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
