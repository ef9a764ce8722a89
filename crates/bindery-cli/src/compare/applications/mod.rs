//! `bindery compare applications`: well-known programs, in memory that is too small for them.
//!
//! Nothing is counted. An answer must be the same in ample memory, in too little memory, and on
//! Linux.
//!
//! | file | contents |
//! |---|---|
//! | `suite` | the applications, and their memory |
//! | `build` | the applications, built |
//! | `run` | one run, and its report |
//! | `report` | a line for each application, and the verdict |

mod build;
mod report;
mod run;
mod suite;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bindery_cli::guest::initramfs::EXECUTABLE;
use bindery_cli::guest::machine::Clock;
use bindery_cli::guest::{Architecture, Problem, busybox};

use super::guests::{self, Kernel};
use super::{ours, parallel, working_set};
use crate::output::show;
use crate::size::MIB;
use report::Runs;
use run::Told;
use suite::{APPLICATIONS, Application};

const HELP: &str = "\
The applications
  sort      BusyBox sorts lines of half a KiB.
  restore   Three processes come back from a snapshot, page by page, by userfaultfd.
  sqlite    SQLite: a database in memory with indexes, changed, joined, sorted, deleted.
  lua       Lua: tables, strings and trees, and its collector.
  quickjs   QuickJS: objects, maps, typed arrays, big integers.
  trees     Go: goroutines, trees, maps, and its collector.
  redis     Redis: a snapshot (BGSAVE, a fork) while all keys change, and the snapshot loaded.
  connections
            SQLite: four connections in threads, a database for each and one for all.
  malloc    glibc's allocator: four threads that resize blocks and pass them on.

The machines
  Each application runs three times: on Bindery's kernel with much memory, on the same kernel with
  memory of which a third or more of what it uses must go to swap, and on Linux with 64 MiB more
  than that. Bindery's kernel audits all invariants at each end of a process. The swap device is
  /dev/zram0 on both.

Requirements
  QEMU, compilers, make and BusyBox (`bindery doctor`); go, for trees. Libraries and sources are
  Debian's: they are fetched with apt-get, which checks their signature, and kept under
  target/guest. Nothing is installed.

Exit status
  0 if all answers are equal and memory was short each time, else 1.

Examples
  bindery compare applications                               everything, some minutes
  bindery compare applications sqlite redis --arch x86-64
  bindery compare applications trees --cpus 4                goroutines on four CPUs
  bindery compare applications sort --no-linux               with the recorded answer of Linux";

/// Run programs in memory that is too small for them, and compare their answers with Linux's
#[derive(clap::Args)]
#[command(after_long_help = HELP,
          after_help = "More, with examples: bindery compare applications --help")]
pub struct Arguments {
    /// The applications to run [default: all]
    #[arg(value_name = "APPLICATION", value_parser = Application::from_name)]
    applications: Vec<&'static Application>,

    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// The number of CPUs of each machine
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,

    /// Do not run Linux: compare with its recorded answers
    #[arg(long)]
    no_linux: bool,
}

/// The memory that is enough, in bytes.
const AMPLE: u64 = 256 * MIB;

/// The extra memory of Linux, in bytes: its own needs.
const MORE_FOR_LINUX: u64 = 64 * MIB;

/// The alignment of entries of the initial file system, in bytes; the name of the last entry ends
/// with a zero byte.
const CPIO_ALIGNMENT: usize = 4;

/// A machine that takes longer counts as hung.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Runs the applications of the arguments and prints a line for each.
///
/// # Errors
/// If a requirement is missing, an answer is wrong, or memory was not short. The other applications
/// have been run.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    let applications: Vec<&Application> = match &*arguments.applications {
        [] => APPLICATIONS.iter().collect(),
        chosen => APPLICATIONS.iter().filter(|known| chosen.contains(known)).collect(),
    };
    let mut problems = Vec::new();
    for architecture in architectures {
        let linux = working_set::linux(arguments.no_linux, architecture)?;
        let bench = Bench {
            architecture,
            processors: arguments.cpus,
            busybox: busybox::program(architecture)?,
            runner: build::runner(architecture)?,
            bindery: ours(architecture)?,
            linux,
        };
        show(&format!("\n{architecture}\n{}", report::HEAD))?;
        for application in &applications {
            let shown = bench.all(application).and_then(|runs| {
                show(&runs.line(application))?;
                runs.verdict(application)
            });
            problems.extend(shown.err().map(|problem| format!("{architecture}: {problem}")));
        }
    }
    match &*problems {
        [] => Ok(ExitCode::SUCCESS),
        problems => Err(Problem::Failed(problems.join("\nerror: "))),
    }
}

/// The common parts of all machines of one architecture.
struct Bench {
    architecture: Architecture,
    processors: u32,
    busybox: PathBuf,
    runner: PathBuf,
    bindery: Kernel,
    linux: Option<Kernel>,
}

impl Bench {
    /// All runs of an application.
    fn all(&self, application: &Application) -> Result<Runs, Problem> {
        let program = build::build(self.architecture, application)?;
        let short = application.memory * MIB;
        let mut machines = vec![(&self.bindery, AMPLE), (&self.bindery, short)];
        machines.extend(self.linux.as_ref().map(|kernel| (kernel, short + MORE_FOR_LINUX)));
        let results = parallel::all(self.architecture, &machines, |(kernel, memory)| {
            self.run(kernel, application, program.as_ref(), *memory)
        });
        let mut told = results.into_iter();
        let mut next = || told.next().transpose();
        let missing = || Problem::Failed("no machine was started for a run".to_owned());
        Ok(Runs {
            ample: next()?.ok_or_else(missing)?,
            short: next()?.ok_or_else(missing)?,
            linux: next()?,
        })
    }

    /// One run.
    fn run(
        &self,
        kernel: &Kernel,
        application: &Application,
        program: Option<&PathBuf>,
        memory: u64,
    ) -> Result<Told, Problem> {
        let mut files = guests::file_system(&self.busybox)?;
        files.host_file("/bin/run", &self.runner)?;
        if let Some(program) = program {
            files.host_file(&format!("/bin/{}", application.name), program)?;
        } else {
            let source = application.source();
            files.host_file(&format!("/{source}"), &build::directory()?.join(&source))?;
            // Scripts start BusyBox under this name.
            files.symlink("/bin/sh", "busybox")?;
        }
        if let Some(file) = application.reads {
            files.host_file(&format!("/{file}"), &build::directory()?.join(file))?;
        }
        files.file("/init", EXECUTABLE, run::script(application))?;
        if let Kernel::Linux { swap, .. } = kernel {
            guests::add_swap_modules(&mut files, swap)?;
        }
        let options = [&guests::CALM[..], &[("check", "exit"), ("env", "PATH=/bin")]].concat();
        let mut machine = guests::machine(self.architecture, kernel, files, &options)?;
        // Padding to whole steps would use a few MiB, but memory must be scarce.
        let last = machine.initramfs.iter().rposition(|byte| *byte != 0).unwrap_or(0);
        let end = (last + 2).next_multiple_of(CPIO_ALIGNMENT);
        machine.initramfs.truncate(end);
        machine.processors = self.processors;
        machine.memory = memory;
        machine.clock = Clock::Host;
        machine.timeout = Some(TIMEOUT);
        let name = match kernel {
            Kernel::Bindery { .. } => "Bindery",
            Kernel::Linux { .. } => "Linux",
        };
        let what = format!("{} on {name} with {} MiB", application.name, memory / MIB);
        let console = guests::console(&machine, &what)?;
        run::judge(&console).map_err(|problem| Problem::Failed(format!("{what}: {problem}")))
    }
}
