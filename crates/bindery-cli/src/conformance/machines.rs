//! Machines that run the tests: on our kernel one machine per test, so that a test that crashes the
//! kernel does not affect others; on Linux one machine for all tests, since Linux boots slowly.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use bindery_cli::guest::command_line::CommandLine;
use bindery_cli::guest::initramfs::{EXECUTABLE, Initramfs, PLAIN};
use bindery_cli::guest::kernel::SYMBOLS_PATH;
use bindery_cli::guest::machine::{Machine, Outcome, Output, TimedOut};
use bindery_cli::guest::{Architecture, Problem, busybox, kernel};

use super::programs;
use super::script::{self, Told};
use super::source::Source;
use super::suite::{TESTS, Test};
use super::tap::{self, Report};
use crate::size::GIB;

/// The memory of all machines. Tests map 2 GiB, which must not be refused.
const MEMORY: u64 = 3 * GIB;

/// The time that a machine may take in addition to its tests.
const BOOT: Duration = Duration::from_secs(240);

/// The initial content of the machines of one architecture, the same for both kernels.
#[derive(Clone, Debug)]
pub struct Bench {
    architecture: Architecture,
    processors: u32,
    initramfs: Vec<u8>,
}

/// The run of a test on a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// The test's report.
    pub report: Report,
    /// How the run ended.
    pub end: End,
    /// The seconds that the test ran, if it ended by itself or at its time limit.
    pub seconds: Option<u64>,
    /// The whole output of the test.
    pub text: String,
}

/// The end of a test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// The test ended by itself, with this exit status.
    Status(i32),
    /// The test broke for another reason, which the text gives.
    Broken(String),
}

/// The results of one machine.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Results {
    /// The kernel's own name.
    pub kernel: Option<String>,
    /// The runs, by the tests' names.
    pub runs: BTreeMap<&'static str, Run>,
}

impl Bench {
    /// Builds all tests, and the initial content of machines with `processors` CPUs. `swap`: the
    /// modules of Linux's swap device, in loading order.
    ///
    /// # Errors
    /// If a compiler or BusyBox is missing, or a test does not compile.
    pub fn prepare(
        architecture: Architecture,
        processors: u32,
        source: &Source,
        kernel: &kernel::Kernel,
        swap: &[PathBuf],
    ) -> Result<Self, Problem> {
        let mut files = Initramfs::new();
        for directory in ["/dev", "/proc", "/sys", "/tmp"] {
            files.directory(directory)?;
        }
        files.host_file("/bin/busybox", &busybox::program(architecture)?)?;
        // Some tests start a shell.
        files.symlink("/bin/sh", "busybox")?;
        files.symlink("/bin/cat", "busybox")?;
        let mut built = BTreeSet::new();
        for test in TESTS.iter().filter(|test| built.insert(test.program)) {
            let program = programs::build(source, architecture, test)?;
            files.host_file(&format!("{}/{}", script::DIRECTORY, test.program), &program)?;
        }
        files.file("/init", EXECUTABLE, script::text())?;
        // Each kernel ignores the files for the other; both boot the same archive.
        for (number, module) in swap.iter().enumerate() {
            files.host_file(&format!("{}/{number}.ko", script::SWAP_MODULES), module)?;
        }
        files.file(SYMBOLS_PATH, PLAIN, kernel.symbols.as_str())?;
        Ok(Self { architecture, processors, initramfs: files.archive() })
    }

    /// Runs tests on our kernel, in one machine.
    ///
    /// # Errors
    /// If QEMU is missing or does not start.
    pub fn on_bindery(
        &self,
        kernel: &kernel::Kernel,
        tests: &[&'static Test],
    ) -> Result<Results, Problem> {
        let mut line = CommandLine::new();
        // Linux's are covered by another file system.
        if tests.iter().any(|test| test.hides_hugetlb) {
            line.option("huge-page-pools", "none");
        }
        line.argument("/bin/busybox").argument("sh").argument("/init");
        for test in tests {
            line.argument(test.name);
        }
        self.run(kernel.image.clone(), line.to_string(), tests)
    }

    /// Runs tests on Linux, in one machine.
    ///
    /// # Errors
    /// The errors of [`Self::on_bindery`].
    pub fn on_linux(&self, image: PathBuf, tests: &[&'static Test]) -> Result<Results, Problem> {
        // Both kernels use four-level page tables, so that `mmap` behaves the same above 2^47.
        let (console, levels) = match self.architecture {
            Architecture::X86_64 => ("ttyS0", " no5lvl"),
            Architecture::AArch64 => ("ttyAMA0", ""),
        };
        let names: Vec<&str> = tests.iter().map(|test| test.name).collect();
        let line =
            format!("console={console}{levels} quiet loglevel=1 panic=-1 -- {}", names.join(" "));
        self.run(image, line, tests)
    }

    fn run(
        &self,
        image: PathBuf,
        command_line: String,
        tests: &[&'static Test],
    ) -> Result<Results, Problem> {
        let mut machine = Machine::new(self.architecture, image);
        machine.processors = self.processors;
        machine.memory = MEMORY;
        machine.initramfs = self.initramfs.clone();
        machine.command_line = command_line;
        let seconds = tests.iter().map(|test| test.seconds).sum();
        machine.timeout = Some(BOOT + Duration::from_secs(seconds));
        let outcome = machine.run(Output::Capture)?;
        Ok(results(&outcome, tests))
    }
}

fn results(outcome: &Outcome, tests: &[&'static Test]) -> Results {
    let console = String::from_utf8_lossy(&outcome.console);
    let (kernel, mut told) = script::read(&console);
    let run = |test: &&'static Test| {
        let told = told.remove(test.name).unwrap_or_default();
        let (report, end) = (tap::read(&told.text), end(&told, test, outcome));
        (test.name, Run { report, end, seconds: told.seconds, text: told.text })
    };
    let runs = tests.iter().map(run).collect();
    Results { kernel, runs }
}

fn end(told: &Told, test: &Test, outcome: &Outcome) -> End {
    /// The shell's exit status for a program ended by a signal, minus the signal's number.
    const SIGNALED: i32 = 128;
    /// The signal that `timeout` sends.
    const SIGKILL: i32 = 9;
    End::Broken(match (told.status, &outcome.panic) {
        (Some(status), _) if status < SIGNALED => return End::Status(status),
        (Some(status), _)
            if status == SIGNALED + SIGKILL
                && told.seconds.is_none_or(|seconds| seconds + 1 >= test.seconds) =>
        {
            format!("it took more than its {} s", test.seconds)
        }
        (Some(status), _) => format!("signal {} ended it", status - SIGNALED),
        (None, Some(panic)) => format!("the kernel died: {panic}"),
        (None, None) => match outcome.timed_out {
            TimedOut::After(time) => format!("it hung; ended after {} s", time.as_secs()),
            TimedOut::No if told.text.is_empty() => {
                "the machine ended before the test began".to_owned()
            }
            TimedOut::No => "the machine ended during the test".to_owned(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(console: &str) -> Outcome {
        Outcome {
            status: Some(0),
            first_user_instruction: None,
            panic: None,
            console: console.as_bytes().to_vec(),
            log: Vec::new(),
            timed_out: TimedOut::No,
            emulator_messages: String::new(),
        }
    }

    #[test]
    fn every_test_has_a_run_whatever_the_console() {
        let tests: Vec<&Test> = TESTS.iter().take(2).collect();
        let console = "conformance: kernel Linux 7\nconformance: begin mremap_test\nok 1 a\n\
                       conformance: end 0\n";
        let found = results(&outcome(console), &tests);
        assert_eq!(found.kernel.as_deref(), Some("Linux 7"));
        assert_eq!(found.runs["mremap_test"].end, End::Status(0));
        assert_eq!(found.runs["mremap_test"].report.cases.len(), 1);
        let second = &found.runs["mremap_dontunmap"];
        assert_eq!(second.end, End::Broken("the machine ended before the test began".to_owned()));
    }

    #[test]
    fn a_badly_ended_test_has_a_reason() {
        let test = &TESTS[0];
        let told = |text: &str, status| Told { text: text.to_owned(), status, seconds: None };
        let why = |told: &Told, outcome: &Outcome| match end(told, test, outcome) {
            End::Broken(why) => why,
            End::Status(status) => panic!("it ended with {status}"),
        };
        let fine = outcome("");
        assert_eq!(end(&told("ok 1 a\n", Some(1)), test, &fine), End::Status(1));
        assert_eq!(why(&told("", Some(139)), &fine), "signal 11 ended it");
        let late = Told { seconds: Some(300), ..told("", Some(137)) };
        assert_eq!(why(&late, &fine), "it took more than its 300 s");
        let killed = Told { seconds: Some(3), ..late };
        assert_eq!(why(&killed, &fine), "signal 9 ended it");
        assert!(why(&told("ok 1 a\n", None), &fine).contains("during the test"));
        let died = Outcome { panic: Some("bad".to_owned()), ..fine.clone() };
        assert_eq!(why(&told("ok 1 a\n", None), &died), "the kernel died: bad");
        let hung = Outcome { timed_out: TimedOut::After(Duration::from_secs(9)), ..fine };
        assert!(why(&told("ok 1 a\n", None), &hung).contains("9 s"));
    }
}
