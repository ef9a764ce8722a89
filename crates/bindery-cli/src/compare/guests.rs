//! One measurement: a kernel boots in its own machine and runs one workload with folios of one size
//! while the plugin counts.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindery_cli::guest::command_line::CommandLine;
use bindery_cli::guest::initramfs::{EXECUTABLE, Initramfs, PLAIN};
use bindery_cli::guest::kernel::SYMBOLS_PATH;
use bindery_cli::guest::machine::{Clock, Machine, Output, Plugin, TimedOut};
use bindery_cli::guest::{Architecture, Problem};

use super::cache::{self, Record};
use super::counts::{self, Summary};
use super::rows::{Row, Runner, Workload};
use super::script;
use crate::size::{FolioSize, GIB};

/// The memory of all machines: enough for 1 GiB of workload and some spare.
const MEMORY: u64 = 3 * GIB;

/// A machine that takes longer counts as hung.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The occurrence of a phase to profile, in which everything is warm.
const PROFILED_OCCURRENCE: u64 = 2;

/// A kernel to measure.
#[derive(Clone, Debug)]
pub enum Kernel {
    /// The reference kernel.
    Bindery {
        /// The image that QEMU boots.
        image: PathBuf,
        /// The text of the kernel's symbol file.
        symbols: String,
    },
    /// Linux.
    Linux {
        /// The image that QEMU boots.
        image: PathBuf,
        /// For workloads of the kernel: the available modules.
        modules: BTreeMap<Workload, PathBuf>,
        /// The modules of its swap device, in loading order; empty if they are not available.
        swap: Vec<PathBuf>,
    },
}

impl Kernel {
    /// Whether this kernel can run the workload.
    pub fn can_run(&self, workload: Workload) -> bool {
        match (self, workload.runner()) {
            (Self::Linux { swap, .. }, _) if workload.swaps() => !swap.is_empty(),
            (Self::Linux { modules, .. }, Runner::Kernel) => modules.contains_key(&workload),
            _ => true,
        }
    }
}

/// The common parts of all machines of one architecture.
#[derive(Clone, Debug)]
pub struct Bench {
    pub architecture: Architecture,
    /// The version of QEMU.
    pub emulator: String,
    pub plugin: PathBuf,
    pub busybox: PathBuf,
    /// The workloads that are programs.
    pub programs: BTreeMap<Workload, PathBuf>,
}

/// A measurement to make.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub workload: Workload,
    /// `None` for a workload without folios.
    pub folio: Option<FolioSize>,
}

/// Whether to rerun machines that were measured before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeat {
    Never,
    Always,
}

/// The result of a measurement.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The kernel's own name.
    pub kernel: String,
    /// The counts, by the number of the phase.
    pub phases: BTreeMap<u16, Summary>,
}

impl Bench {
    /// Boots the kernel and counts, or reads the counts from the cache.
    ///
    /// # Errors
    /// If QEMU does not start, the kernel dies, or the workload fails.
    pub fn measure(
        &self,
        kernel: &Kernel,
        job: Job,
        repeat: Repeat,
    ) -> Result<Measurement, Problem> {
        let directory = temporary_directory()?;
        let counts = directory.path().join("counts");
        let machine = self.machine(kernel, job, vec![("out".to_owned(), counts.clone().into())])?;
        let place = cache::place(&machine, &self.emulator)?;
        let known = if repeat == Repeat::Always { None } else { cache::read(&place) };
        if let Some(record) = known {
            return measurement(record, job);
        }
        let kernel = run(&machine, job)?;
        let counts =
            fs::read_to_string(&counts).map_err(|error| Problem::io("read", &counts, &error))?;
        let record = Record { kernel, counts };
        let measurement = measurement(record.clone(), job)?;
        cache::write(&place, &record)?;
        Ok(measurement)
    }

    /// Boots the kernel and counts each of its instructions in one occurrence of a phase: lines of
    /// an address and a number.
    ///
    /// # Errors
    /// The errors of [`Self::measure`].
    pub fn profile(
        &self,
        kernel: &Kernel,
        row: Row,
        folio: Option<FolioSize>,
    ) -> Result<String, Problem> {
        let directory = temporary_directory()?;
        let [counts, profile] = ["counts", "profile"].map(|name| directory.path().join(name));
        let job = Job { workload: row.workload, folio };
        let arguments = vec![
            ("out".to_owned(), counts.into()),
            ("profile".to_owned(), profile.clone().into()),
            ("phase".to_owned(), row.phase.to_string().into()),
            ("occurrence".to_owned(), PROFILED_OCCURRENCE.to_string().into()),
        ];
        run(&self.machine(kernel, job, arguments)?, job)?;
        fs::read_to_string(&profile).map_err(|error| Problem::io("read", &profile, &error))
    }

    fn machine(
        &self,
        kernel: &Kernel,
        job: Job,
        arguments: Vec<(String, std::ffi::OsString)>,
    ) -> Result<Machine, Problem> {
        let mut files = file_system(&self.busybox)?;
        let Job { workload, folio } = job;
        let not_built = || {
            Problem::Failed(format!(
                "the workload {} has no program or module for this kernel",
                workload.name()
            ))
        };
        if let Runner::Program(_) = workload.runner() {
            let program = self.programs.get(&workload).ok_or_else(not_built)?;
            let program =
                fs::read(program).map_err(|error| Problem::io("read", program, &error))?;
            files.file(&format!("/bin/{}", workload.name()), EXECUTABLE, program)?;
        }
        files.file("/init", EXECUTABLE, script::text(workload, folio))?;
        let mut options = CALM.to_vec();
        match kernel {
            Kernel::Linux { modules, swap, .. } => {
                if workload.swaps() {
                    add_swap_modules(&mut files, swap)?;
                }
                if workload.runner() == Runner::Kernel {
                    let module = modules.get(&workload).ok_or_else(not_built)?;
                    files.host_file(script::MODULE, module)?;
                }
            }
            Kernel::Bindery { .. } => {
                options.push(SAME_FRAMES);
                if workload.runner() == Runner::Kernel {
                    options.push(("workload", workload.name()));
                }
            }
        }
        let mut machine = machine(self.architecture, kernel, files, &options)?;
        machine.plugin = Some(Plugin { path: self.plugin.clone(), arguments });
        Ok(machine)
    }
}

/// Options of our kernel under which a program takes the same instructions every time. Without a
/// seed, the tower heights of a dozen mappings would be random. The self-test would also consume
/// the first random heights.
pub const CALM: [(&str, &str); 2] = [("seed", "1"), ("self-test", "off")];

/// An option for machines with memory to spare that makes frame numbers independent of our kernel's
/// image, because otherwise the frames next to the image would depend on its size. The first 32 MiB
/// hold any image.
pub const SAME_FRAMES: (&str, &str) = ("unused", "33554432");

/// The initramfs ends at the end of memory, and our heap ends below it. With its size rounded up to
/// whole steps, both have the same addresses for any number of symbols.
const INITRAMFS_STEP: usize = 4 << 20;

/// A machine with this kernel, whose first program is the script `/init`, and whose clock counts
/// instructions.
///
/// # Errors
/// If there are too many files.
pub fn machine(
    architecture: Architecture,
    kernel: &Kernel,
    mut files: Initramfs,
    options: &[(&str, &str)],
) -> Result<Machine, Problem> {
    let (image, command_line) = match kernel {
        Kernel::Linux { image, .. } => (image, lean_command_line(architecture)),
        Kernel::Bindery { image, symbols } => {
            files.file(SYMBOLS_PATH, PLAIN, symbols.as_str())?;
            let mut line = CommandLine::new();
            for (name, value) in options {
                line.option(name, value);
            }
            line.argument("/bin/busybox").argument("sh").argument("/init");
            (image, line.to_string())
        }
    };
    let mut machine = Machine::new(architecture, image.clone());
    machine.memory = MEMORY;
    machine.clock = Clock::Instructions;
    machine.initramfs = files.archive();
    if let Kernel::Bindery { .. } = kernel {
        let length = machine.initramfs.len().next_multiple_of(INITRAMFS_STEP);
        machine.initramfs.resize(length, 0);
    }
    machine.command_line = command_line;
    machine.timeout = Some(TIMEOUT);
    Ok(machine)
}

/// Runs a machine to its end and returns its console output.
///
/// # Errors
/// An error that names `what`, the machine's task, and the failure: QEMU does not start, or the
/// kernel dies or hangs.
pub fn console(machine: &Machine, what: &dyn fmt::Display) -> Result<String, Problem> {
    let outcome = machine.run(Output::Capture)?;
    let console = String::from_utf8_lossy(&outcome.console).into_owned();
    if let Some(panic) = outcome.panic {
        return Err(Problem::Failed(format!("{what}: the kernel died: {panic}")));
    }
    if let TimedOut::After(time) = outcome.timed_out {
        let seconds = time.as_secs();
        let text =
            format!("{what}: the workload did not end within {seconds} s; the console:\n{console}");
        return Err(Problem::Failed(text));
    }
    Ok(console)
}

/// The files of every machine.
pub fn file_system(busybox: &Path) -> Result<Initramfs, Problem> {
    let mut files = Initramfs::new();
    for directory in ["/dev", "/proc", "/sys", "/tmp"] {
        files.directory(directory)?;
    }
    files.host_file("/bin/busybox", busybox)?;
    Ok(files)
}

/// Adds the modules of Linux's swap device, numbered in loading order.
pub fn add_swap_modules(files: &mut Initramfs, modules: &[PathBuf]) -> Result<(), Problem> {
    for (number, module) in modules.iter().enumerate() {
        files.host_file(&format!("{}/{number}.ko", script::SWAP_MODULES), module)?;
    }
    Ok(())
}

/// Options that disable features of Linux that would cost instructions here and that we lack, for a
/// fair comparison.
fn lean_command_line(architecture: Architecture) -> String {
    let (console, more) = match architecture {
        Architecture::X86_64 => ("ttyS0", "no5lvl"),
        Architecture::AArch64 => ("ttyAMA0", "kpti=0"),
    };
    format!(
        "console={console} quiet panic=-1 nokaslr mitigations=off kfence.sample_interval=0 \
         init_on_alloc=0 cgroup_disable=memory lsm=capability audit=0 {more}"
    )
}

/// Runs a machine to its end and returns the name of its kernel.
fn run(machine: &Machine, job: Job) -> Result<String, Problem> {
    let Job { workload, folio } = job;
    let folios = folio.map_or_else(String::new, |folio| format!(" with folios of {folio}"));
    let what = format!("{}{folios} on {}", workload.name(), machine.architecture);
    let console = console(machine, &what)?;
    script::judge(&console, workload)
        .map_err(|problem| Problem::Failed(format!("{what}: {problem}")))
}

/// Reads a record.
///
/// # Errors
/// If an operation of the workload never ran, because the kernel does not know the workload or uses
/// other mark numbers.
fn measurement(record: Record, job: Job) -> Result<Measurement, Problem> {
    let phases = counts::read(&record.counts)?;
    let mut missing = job.workload.rows().filter(|row| !phases.contains_key(&row.phase));
    match missing.next() {
        None => Ok(Measurement { kernel: record.kernel, phases }),
        Some(Row { name, phase, .. }) => Err(Problem::Failed(format!(
            "{}, {}: nothing was counted for {name:?}: the workload marks no phase {phase} \
             (programs/include/mark.h)",
            record.kernel,
            job.workload.name()
        ))),
    }
}

/// A directory for the plugin's output.
pub fn temporary_directory() -> Result<tempfile::TempDir, Problem> {
    tempfile::Builder::new().prefix("bindery-").tempdir().map_err(|error| {
        Problem::Failed(format!(
            "cannot make a temporary directory: {error}; TMPDIR names another place for it"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::super::rows::ROWS;
    use super::*;

    fn record(phases: impl Iterator<Item = u16>) -> Record {
        let mut counts = format!("phase\t{}\n", counts::NAMES.join("\t"));
        for phase in phases {
            counts += &format!("{phase}{}\n", "\t1".repeat(counts::NAMES.len()));
        }
        Record { kernel: "Kernel 1".to_owned(), counts }
    }

    #[test]
    fn a_kernel_without_an_operation_was_not_measured() {
        let job = Job { workload: Workload::KernelMap, folio: None };
        let all = ROWS.iter().map(|row| row.phase);
        assert_eq!(measurement(record(all.clone()), job).unwrap().kernel, "Kernel 1");
        let problem = measurement(record(all.filter(|phase| *phase != 68)), job).unwrap_err();
        assert!(problem.to_string().contains("phase 68"), "{problem}");
    }

    #[test]
    fn linux_runs_a_workload_with_its_modules() {
        let image = PathBuf::from("vmlinuz");
        let modules = BTreeMap::new();
        let mut linux = Kernel::Linux { image: image.clone(), modules, swap: Vec::new() };
        assert!(linux.can_run(Workload::System1) && !linux.can_run(Workload::KernelMap));
        assert!(!linux.can_run(Workload::System3));
        let modules = BTreeMap::from([(Workload::KernelMap, PathBuf::from("kernel_map.ko"))]);
        linux = Kernel::Linux { image: image.clone(), modules, swap: vec!["zram.ko".into()] };
        assert!(linux.can_run(Workload::KernelMap) && linux.can_run(Workload::System3));
        assert!(Kernel::Bindery { image, symbols: String::new() }.can_run(Workload::KernelMap));
    }
}
