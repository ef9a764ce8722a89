//! One measurement: a kernel boots in a machine of its own, runs one workload with folios of one
//! size, and the plugin counts.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use bindery_cli::guest::command_line::CommandLine;
use bindery_cli::guest::initramfs::{EXECUTABLE, Initramfs, PLAIN};
use bindery_cli::guest::kernel::SYMBOLS_PATH;
use bindery_cli::guest::machine::{Clock, Machine, Output, Plugin, TimedOut};
use bindery_cli::guest::{Architecture, Problem};

use super::cache::{self, Record};
use super::counts::{self, Summary};
use super::rows::{Row, Workload};
use super::script;
use crate::size::{FolioSize, GIB};

/// Of all machines: enough for 1 GiB of workload and then some.
const MEMORY: u64 = 3 * GIB;

/// A machine that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Which occurrence of a phase is profiled: one that finds everything warm.
const PROFILED_OCCURRENCE: u64 = 2;

/// A kernel that can be measured.
#[derive(Clone, Debug)]
pub enum Kernel {
    /// The reference kernel.
    Bindery {
        /// What QEMU boots.
        image: PathBuf,
        /// The text of its file of symbols.
        symbols: String,
    },
    /// Linux.
    Linux {
        /// What QEMU boots.
        image: PathBuf,
    },
}

/// All that the machines of one architecture have in common.
#[derive(Clone, Debug)]
pub struct Bench {
    pub architecture: Architecture,
    /// The version of QEMU.
    pub emulator: String,
    pub plugin: PathBuf,
    pub busybox: PathBuf,
    pub programs: BTreeMap<Workload, PathBuf>,
}

/// What is to be measured.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub workload: Workload,
    pub folio: FolioSize,
}

/// Whether a machine that was measured before is started again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeat {
    Never,
    Always,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The kernel, as it names itself.
    pub kernel: String,
    /// What was counted, by the number of the phase.
    pub phases: BTreeMap<u16, Summary>,
}

impl Bench {
    /// Boots the kernel and counts, or finds what was counted before.
    ///
    /// # Errors
    /// QEMU does not start, the kernel dies, or the workload fails.
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
        let record = match known {
            Some(record) => record,
            None => {
                let kernel = run(&machine, job)?;
                let counts = fs::read_to_string(&counts)
                    .map_err(|error| Problem::io("read", &counts, &error))?;
                let record = Record { kernel, counts };
                cache::write(&place, &record)?;
                record
            }
        };
        Ok(Measurement { kernel: record.kernel, phases: counts::read(&record.counts)? })
    }

    /// Boots the kernel and counts each of its instructions in one occurrence of a phase: lines of
    /// an address and a number.
    ///
    /// # Errors
    /// As [`Self::measure`].
    pub fn profile(&self, kernel: &Kernel, row: Row, folio: FolioSize) -> Result<String, Problem> {
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
        let mut files = Initramfs::new();
        for directory in ["/dev", "/proc", "/sys", "/tmp"] {
            files.directory(directory)?;
        }
        files.host_file("/bin/busybox", &self.busybox)?;
        let program = self
            .programs
            .get(&job.workload)
            .ok_or_else(|| Problem::Failed(format!("{} was not built", job.workload.name())))?;
        let program = fs::read(program).map_err(|error| Problem::io("read", program, &error))?;
        files.file(&format!("/bin/{}", job.workload.name()), EXECUTABLE, program)?;
        files.file("/init", EXECUTABLE, script::text(job.workload, job.folio))?;
        let (image, command_line) = match kernel {
            Kernel::Linux { image } => (image, lean_command_line(self.architecture)),
            Kernel::Bindery { image, symbols } => {
                files.file(SYMBOLS_PATH, PLAIN, symbols.as_str())?;
                let mut line = CommandLine::new();
                line.argument("/bin/busybox").argument("sh").argument("/init");
                (image, line.to_string())
            }
        };
        let mut machine = Machine::new(self.architecture, image.clone());
        machine.memory = MEMORY;
        machine.clock = Clock::Instructions;
        machine.plugin = Some(Plugin { path: self.plugin.clone(), arguments });
        machine.initramfs = files.archive();
        machine.command_line = command_line;
        machine.timeout = Some(TIMEOUT);
        Ok(machine)
    }
}

/// Linux without what would cost it instructions here and that we do not have: fair to it.
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

/// Runs a machine to its end, and gives the name of its kernel.
fn run(machine: &Machine, job: Job) -> Result<String, Problem> {
    let outcome = machine.run(Output::Capture)?;
    let console = String::from_utf8_lossy(&outcome.console);
    let Job { workload, folio } = job;
    let failed = |problem: &dyn std::fmt::Display| {
        let (name, architecture) = (workload.name(), machine.architecture);
        Problem::Failed(format!("{name} with folios of {folio} on {architecture}: {problem}"))
    };
    if let Some(panic) = outcome.panic {
        return Err(failed(&format!("the kernel died: {panic}")));
    }
    if let TimedOut::After(time) = outcome.timed_out {
        let seconds = time.as_secs();
        return Err(failed(&format!("it was ended after {seconds} s; the console:\n{console}")));
    }
    script::judge(&console, workload).map_err(|problem| failed(&problem))
}

fn temporary_directory() -> Result<tempfile::TempDir, Problem> {
    tempfile::Builder::new()
        .prefix("bindery-")
        .tempdir()
        .map_err(|error| Problem::Failed(format!("cannot make a temporary directory: {error}")))
}
