//! `bindery conformance`: runs Linux's own tests on our kernel and compares the results with Linux.
//!
//! | file | contents |
//! |---|---|
//! | `suite` | the tests, and the cases that are set apart |
//! | `source` | their sources |
//! | `programs` | the tests, built |
//! | `script` | the first program of both kernels |
//! | `machines` | machines that run the tests |
//! | `tap` | the report of a test |
//! | `results` | both kernels side by side, and the verdict |
//! | `report`, `json` | the results in readable and machine-readable form |

mod json;
mod machines;
mod programs;
mod report;
mod results;
mod script;
mod source;
mod suite;
mod tap;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use bindery_cli::guest::requirements::Requirement;
use bindery_cli::guest::{Architecture, Problem, kernel, linux};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{JsonFile, create, show};
use machines::{Bench, Results};
use results::Comparison;
use source::Source;
use suite::{TESTS, Test};

const HELP: &str = "\
The tests
  mremap_test, mremap_dontunmap, map_fixed_noreplace, map_populate, mlock2-tests, droppable,
  madv_populate, mkdirty, mseal_test, merge, process_madv, mrelease_test, mdwe_test,
  prctl_thp_disable, transhuge-stress, khugepaged, khugepaged-shmem, cow, guard-regions,
  folio_split_race_test, va_high_addr_switch, uffd-unit-tests, uffd-stress, uffd-stress-shmem,
  uffd-wp-mremap, pagemap_ioctl and soft-dirty: Linux's own, from tools/testing/selftests/mm of
  the source of Debian's newest kernel. The same static programs run on that kernel, in the same
  machine. A case that passes on Linux has failed if it fails or is skipped on Bindery. A test that
  exceeds its time limit is stopped and has failed. Cases that need a missing feature (hugetlb) are
  set apart, and listed with the reason.

Requirements
  QEMU, compilers and BusyBox (`bindery doctor`). Debian's packages with Linux's source (160 MB),
  its headers and its kernel are fetched with apt-get and kept under target/guest; nothing is
  installed.

Exit status
  0 if all cases are as good as on Linux, 1 if not, or if a requirement is missing.

Examples
  bindery conformance                                     everything, less than an hour
  bindery conformance mremap_test --arch x86-64           one test, one architecture
  bindery conformance --cpus 4 --arch x86-64              on machines with four CPUs
  bindery conformance --no-linux --json results.json      only Bindery's kernel
  bindery conformance cow --logs logs                     each test's output in a file";

/// Run Linux's own tests on Bindery's kernel, and compare with Linux
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More, with examples: bindery conformance --help")]
pub struct Arguments {
    /// The tests to run [default: all]
    #[arg(value_name = "TEST", value_parser = Test::from_name)]
    tests: Vec<&'static Test>,

    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// The number of CPUs of each machine
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,

    /// Do not run Linux: each case must pass
    #[arg(long)]
    no_linux: bool,

    /// Write all results to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write the report to a file as well
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Write each test's output to a file in this directory
    #[arg(long, value_name = "DIRECTORY")]
    logs: Option<PathBuf>,
}

/// Runs the tests of the arguments.
///
/// # Errors
/// If a requirement is missing, or a machine could not be started.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    let tests: Vec<&'static Test> = match &*arguments.tests {
        [] => TESTS.iter().collect(),
        chosen => TESTS.iter().filter(|test| chosen.contains(test)).collect(),
    };
    // Created before the tests run, so that a wrong name is reported at once.
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let mut output = arguments.output.as_deref().map(create).transpose()?;
    if let Some(logs) = &arguments.logs {
        fs::create_dir_all(logs).map_err(|error| Problem::io("make", logs, &error))?;
    }
    for &architecture in &architectures {
        Requirement::Emulator(architecture).demand()?;
    }
    let source = Source::newest()?;
    let mut document = json::Document {
        bindery: env!("CARGO_PKG_VERSION"),
        tests_of_linux: source.release.clone(),
        architectures: Vec::new(),
    };
    let mut is_good = true;
    for architecture in architectures {
        let (comparisons, results, text) = compare(arguments, architecture, &source, &tests)?;
        show(&text)?;
        if let Some((path, file)) = &mut output {
            file.write_all(text.as_bytes()).map_err(|error| Problem::io("write", path, &error))?;
        }
        is_good &= comparisons.iter().all(Comparison::is_good);
        document.architectures.push(results);
    }
    if let Some(file) = file {
        file.write(&document)?;
    }
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the tests on both kernels of one architecture; returns the text to show.
fn compare(
    arguments: &Arguments,
    architecture: Architecture,
    source: &Source,
    tests: &[&'static Test],
) -> Result<(Vec<Comparison>, json::ArchitectureResults, String), Problem> {
    let kernel = kernel::build(architecture)?;
    let (image, swap) = if arguments.no_linux { None } else { linux_to_run(architecture) }.unzip();
    let bench =
        Bench::prepare(architecture, arguments.cpus, source, &kernel, &swap.unwrap_or_default())?;
    let progress = progress(architecture, tests.len() + usize::from(image.is_some()));
    let (ours, theirs) = thread::scope(|scope| {
        let linux = image.map(|image| {
            scope.spawn(|| {
                let results = bench.on_linux(image, tests);
                progress.inc(1);
                results
            })
        });
        let ours = on_bindery(&bench, &kernel, tests, &progress);
        let linux = linux.map(|thread| {
            thread.join().unwrap_or_else(|_| {
                Err(Problem::Failed(
                    "the thread that runs Linux panicked; its message is above".to_owned(),
                ))
            })
        });
        (ours, linux.transpose())
    });
    progress.finish_and_clear();
    let (ours, theirs) = (ours?, theirs?);
    if let Some(directory) = &arguments.logs {
        write_logs(directory, &format!("{architecture}-bindery"), &ours)?;
        if let Some(theirs) = &theirs {
            write_logs(directory, &format!("{architecture}-linux"), theirs)?;
        }
    }
    let compare = |&test: &&'static Test| {
        let linux = theirs.as_ref().and_then(|results| results.runs.get(test.name));
        Comparison::new(test, ours.runs.get(test.name), linux)
    };
    let comparisons: Vec<Comparison> = tests.iter().map(compare).collect();
    let results = json::ArchitectureResults {
        architecture: architecture.to_string(),
        bindery_kernel: ours.kernel,
        linux_kernel: theirs.and_then(|results| results.kernel),
        tests: comparisons.iter().map(json::TestResults::new).collect(),
    };
    let text = format!(
        "\n{architecture}, tests of Linux {}\nBindery  {}\nLinux    {}\n\n{}\n\n{}\n{}\n",
        source.release,
        results.bindery_kernel.as_deref().unwrap_or("not known: no machine came up"),
        results.linux_kernel.as_deref().unwrap_or("not run"),
        report::table(&comparisons),
        report::remarks(&comparisons),
        report::conclusion(&comparisons),
    );
    Ok((comparisons, results, text))
}

/// Writes each test's output to a file.
fn write_logs(directory: &Path, kernel: &str, results: &Results) -> Result<(), Problem> {
    for (name, run) in &results.runs {
        let path = directory.join(format!("{kernel}-{name}.txt"));
        fs::write(&path, &run.text).map_err(|error| Problem::io("write", &path, &error))?;
    }
    Ok(())
}

/// Linux and the modules of its swap device. If they are unavailable, reports the reason on
/// standard error.
fn linux_to_run(architecture: Architecture) -> Option<(PathBuf, Vec<PathBuf>)> {
    let image = linux::newest(architecture);
    match image.and_then(|image| Ok((image, linux::ready_made::modules(architecture, "zram")?))) {
        Ok(found) => Some(found),
        Err(problem) => {
            eprintln!("bindery: cannot run Linux beside Bindery: {problem}");
            None
        }
    }
}

fn on_bindery(
    bench: &Bench,
    kernel: &kernel::Kernel,
    tests: &[&'static Test],
    progress: &ProgressBar,
) -> Result<Results, Problem> {
    let mut all = Results::default();
    for test in tests {
        let Results { kernel, runs } = bench.on_bindery(kernel, &[test])?;
        all.kernel = all.kernel.or(kernel);
        all.runs.extend(runs);
        progress.inc(1);
    }
    Ok(all)
}

/// A progress bar on standard error; indicatif hides it if standard error is not a terminal.
fn progress(architecture: Architecture, machines: usize) -> ProgressBar {
    let template = "{msg:8} [{bar:40}] {pos} of {len} machines  {elapsed}";
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    let progress = ProgressBar::new(machines as u64).with_style(style);
    progress.set_message(architecture.name());
    progress.enable_steady_tick(Duration::from_secs(1));
    progress
}
