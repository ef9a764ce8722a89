//! `bindery random`: random calls and threads on hosted machines.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bindery::arch::{AArch64, Arch, Riscv64, X86_64};
use bindery_cli::drivers::calls::{self, Target};
use bindery_cli::drivers::threads::{self, OnFailure};
use bindery_cli::drivers::{Setup, sequence};
use bindery_hosted::{ArchitectureName, BrokenControl, Walk};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::Problem;
use crate::output::{self, JsonFile, thousands};

/// Make random calls with extreme arguments, with a strict TLB and an audit after each call; or
/// random calls from three CPUs at once, with a slow and failing swap device
///
/// Exit status: 0 if nothing went wrong, 1 at a failure, 2 if the command line was invalid.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    driver: Driver,
}

#[derive(clap::Subcommand)]
enum Driver {
    /// One CPU, an audit after each call; a failure is made shorter, and printed as a test
    Calls(Options),
    /// Three CPUs, an audit after each round; a failure prints the last calls of each CPU
    Threads(Options),
}

#[derive(clap::Args)]
struct Options {
    /// Only this architecture: x86-64, aarch64, riscv64-sv39 or riscv64-sv48; all four by default
    #[arg(long, value_name = "ARCH")]
    arch: Option<ArchitectureName>,

    /// The first seed; each machine has the next one. A new one each time by default
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// How long to run, in seconds
    #[arg(long, value_name = "S", default_value_t = 10.0, conflicts_with = "hours")]
    seconds: f64,

    /// How long to run, in hours
    #[arg(long, value_name = "H")]
    hours: Option<f64>,

    /// How many failures end the run; the first one always does with threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    failures: usize,

    /// A machine whose TLBs ignore invalidations, to see that the driver notices
    #[arg(long, hide = true)]
    without_invalidation: bool,

    /// Write the results to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Options {
    fn targets(&self) -> Result<Vec<Target>, Problem> {
        let Some(name) = self.arch else { return Ok(targets().into()) };
        let found = targets().into_iter().find(|target| target.name == name.as_str());
        found.map(|target| vec![target]).ok_or_else(|| {
            let known = targets().map(|target| target.name).join(", ");
            Problem::Wrong(format!("the drivers do not run on {name}; give one of {known}"))
        })
    }

    fn duration(&self) -> Result<Duration, Problem> {
        let seconds = self.hours.map_or(self.seconds, |hours| hours * 3600.0);
        Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|time| time.as_secs() < 1 << 32)
            .ok_or_else(|| {
                Problem::Wrong(format!(
                    "cannot run for {seconds} seconds; give a positive number, for example 10"
                ))
            })
    }

    /// Applies the options to the machine of a seed.
    fn change(&self, setup: &mut Setup) {
        setup.broken = self.without_invalidation.then_some(BrokenControl::Invalidation);
    }

    fn seed(&self) -> u64 {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH);
        self.seed.unwrap_or_else(|| now().map_or(1, |now| now.as_millis() as u64))
    }
}

fn target<A: Walk>(name: ArchitectureName, code: &'static str) -> Target {
    Target {
        name: name.as_str(),
        code,
        user_end: <A as Arch>::USER_END,
        run: sequence::run::<A>,
        run_threads: threads::run::<A>,
    }
}

fn targets() -> [Target; 4] {
    [
        target::<X86_64<4>>(ArchitectureName::X86_64, "X86_64<4>"),
        target::<AArch64>(ArchitectureName::AArch64, "AArch64"),
        target::<Riscv64<3>>(ArchitectureName::Riscv64Sv39, "Riscv64<3>"),
        target::<Riscv64<4>>(ArchitectureName::Riscv64Sv48, "Riscv64<4>"),
    ]
}

/// The results of a run. Fields are only ever added.
#[derive(Debug, Serialize)]
struct Report {
    /// The version of the program.
    bindery: &'static str,
    driver: &'static str,
    first_seed: u64,
    /// The number of machines built, each with its own seed.
    machines: u64,
    calls: u64,
    /// The maximum number of entries that one call examined.
    most_work: u64,
    /// Each failure, as printed.
    failures: Vec<String>,
}

impl Report {
    fn new(driver: &'static str, first_seed: u64) -> Self {
        Self {
            bindery: env!("CARGO_PKG_VERSION"),
            driver,
            first_seed,
            machines: 0,
            calls: 0,
            most_work: 0,
            failures: Vec::new(),
        }
    }

    /// The summary in one line.
    fn summary(&self) -> String {
        let Self { machines, calls, first_seed, most_work, .. } = self;
        let work = match self.driver {
            "calls" => format!(", at most {} entries for one", thousands(*most_work)),
            _ => String::new(),
        };
        let last = first_seed + machines.saturating_sub(1);
        let (machines, calls) = (thousands(*machines), thousands(*calls));
        format!("{machines} machines, {calls} calls{work}; seeds {first_seed} to {last}\n")
    }

    /// Prints the results and writes them to the file.
    fn show(&self, json: Option<&Path>) -> Result<(), Problem> {
        if let Some(path) = json {
            JsonFile::create(path)?.write(self)?;
        }
        for failure in &self.failures {
            output::show(&format!("{failure}\n"))?;
        }
        output::show(&self.summary())?;
        Ok(())
    }
}

/// Runs a driver.
///
/// # Errors
/// The message for the user.
pub fn run(arguments: &Arguments) -> Result<(), Problem> {
    let (Driver::Calls(options) | Driver::Threads(options)) = &arguments.driver;
    // Created before the work begins, so that a wrong name is reported at once.
    options.json.as_deref().map(output::create).transpose()?;
    let report = match &arguments.driver {
        Driver::Calls(options) => random_calls(options)?,
        Driver::Threads(options) => random_threads(options)?,
    };
    report.show(options.json.as_deref())?;
    match report.failures.len() {
        0 => Ok(()),
        1 => Err(Problem::Failed(
            "a sequence of calls failed; it is printed above as a test (docs/testing.md)"
                .to_owned(),
        )),
        failures => Err(Problem::Failed(format!(
            "{failures} sequences of calls failed; they are printed above as tests (docs/testing.md)"
        ))),
    }
}

fn random_calls(options: &Options) -> Result<Report, Problem> {
    let targets = options.targets()?;
    let deadline = Instant::now() + options.duration()?;
    let progress = progress();
    let mut report = Report::new("calls", options.seed());
    while Instant::now() < deadline && report.failures.len() < options.failures {
        let (target, seed) = next(&targets, &report, &progress);
        let sequence = calls::sequence(target, seed, |setup| options.change(setup), deadline);
        report.machines += 1;
        report.calls += sequence.steps as u64;
        report.most_work = report.most_work.max(sequence.most_work);
        report.failures.extend(sequence.found.map(|found| found.to_string()));
    }
    progress.finish_and_clear();
    Ok(report)
}

fn random_threads(options: &Options) -> Result<Report, Problem> {
    let targets = options.targets()?;
    let deadline = Instant::now() + options.duration()?;
    let progress = progress();
    let mut report = Report::new("threads", options.seed());
    while Instant::now() < deadline {
        let (target, seed) = next(&targets, &report, &progress);
        report.machines += 1;
        let so_far = Report { failures: Vec::new(), ..report };
        let (json, bar) = (options.json.clone(), progress.clone());
        let so_far = Mutex::new(so_far);
        let on_failure: OnFailure = Arc::new(move |text: &str| {
            bar.finish_and_clear();
            let mut report = so_far.lock().unwrap_or_else(PoisonError::into_inner);
            report.failures.push(text.to_owned());
            if report.show(json.as_deref()).is_ok() {
                eprintln!(
                    "error: the machine of this seed failed; docs/testing.md says how to repeat it"
                );
            }
        });
        let change = |setup: &mut Setup| options.change(setup);
        report.calls += threads::run_seed(target, seed, change, deadline, &on_failure);
    }
    progress.finish_and_clear();
    Ok(report)
}

/// The architecture and the seed of the next machine.
fn next<'a>(targets: &'a [Target], report: &Report, progress: &ProgressBar) -> (&'a Target, u64) {
    let target = &targets[report.machines as usize % targets.len()];
    let seed = report.first_seed.wrapping_add(report.machines);
    let calls = thousands(report.calls);
    progress.set_message(format!("{}, seed {seed}: {calls} calls", target.name));
    (target, seed)
}

/// A line on standard error; indicatif hides it if standard error is not a terminal.
fn progress() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg}  {elapsed}");
    let progress = match std::io::stderr().is_terminal() {
        true => ProgressBar::new_spinner(),
        false => ProgressBar::hidden(),
    };
    let progress = progress.with_style(style.expect("the template is a constant"));
    progress.enable_steady_tick(Duration::from_millis(200));
    progress
}
