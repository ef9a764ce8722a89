//! Starts a machine inside QEMU, watches it and judges how it ends.
//!
//! The machine has a console, which is QEMU's standard input and output, and a control channel (see
//! [`control`]), by which the kernel reports the end of the first program to the host. Without that
//! report the kernel has died, whatever QEMU's own exit status.

pub mod control;
pub mod models;

mod emulator;
mod watch;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use super::requirements::Requirement;
use super::{Architecture, Problem};
use control::Report;
use watch::{End, Ended, Watched};

/// The source of the machine's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Clock {
    /// The host's clock.
    Host,
    /// The clock counts the instructions that the machine has executed, one nanosecond each, so the
    /// same run yields the same times and the same order of events every time.
    Instructions,
}

/// A plugin that QEMU loads.
#[derive(Clone, Debug)]
pub struct Plugin {
    /// The shared object.
    pub path: PathBuf,
    /// The plugin's arguments.
    pub arguments: Vec<(String, OsString)>,
}

/// A machine, and its inputs.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The machine's architecture.
    pub architecture: Architecture,
    /// The model of the machine's CPUs, by QEMU's name; by default with all features of QEMU.
    pub processor: Option<String>,
    /// The machine's number of CPUs.
    pub processors: u32,
    /// The machine's memory in bytes, rounded up to a whole KiB.
    pub memory: u64,
    /// The source of the machine's clock.
    pub clock: Clock,
    /// The image of the machine's disk.
    pub disk: Option<PathBuf>,
    /// Whether a flush by the guest waits until the host's disk has the image. A guest that flushes
    /// often is then as slow as that disk.
    pub syncs_disk: bool,
    /// A plugin for QEMU.
    pub plugin: Option<Plugin>,
    /// The image that QEMU boots: on x86-64 an ELF file with a PVH note or a bzImage, on AArch64 a
    /// flat image.
    pub kernel: PathBuf,
    /// The archive of the initial file system.
    pub initramfs: Vec<u8>,
    /// The kernel's command line.
    pub command_line: String,
    /// The time limit; none by default.
    pub timeout: Option<Duration>,
}

/// The destination of the machine's console.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// To this process's standard output, as it arrives; the console reads this process's standard
    /// input.
    PassThrough,
    /// As [`Output::PassThrough`], with standard input at a terminal. Every key is sent to the
    /// console, except that Ctrl-A begins a command to the machine (x ends it, Ctrl-A is Ctrl-A).
    Terminal,
    /// Into [`Outcome::console`]; the console gets no input.
    Capture,
}

/// The outcome of a machine's run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The first program's exit status, from 0 to 255; `None` if the kernel has not reported it.
    pub status: Option<i32>,
    /// The machine's clock at the first instruction of the first program, in nanoseconds.
    pub first_user_instruction: Option<u64>,
    /// The reason for a kernel panic, if it was reported.
    pub panic: Option<String>,
    /// The output of the console, if it was captured.
    pub console: Vec<u8>,
    /// Messages of the kernel's log.
    pub log: Vec<String>,
    /// Whether the time limit ended the machine.
    pub timed_out: TimedOut,
    /// QEMU's own output on standard error.
    pub emulator_messages: String,
}

/// Whether the time limit ended a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimedOut {
    /// The machine ended by itself.
    No,
    /// The machine was ended after this time.
    After(Duration),
}

impl Machine {
    /// A machine with one CPU and 256 MiB that boots `kernel` with nothing else.
    #[must_use]
    pub fn new(architecture: Architecture, kernel: PathBuf) -> Self {
        Self {
            architecture,
            processor: None,
            processors: 1,
            memory: 256 << 20,
            clock: Clock::Host,
            disk: None,
            syncs_disk: true,
            plugin: None,
            kernel,
            initramfs: Vec::new(),
            command_line: String::new(),
            timeout: None,
        }
    }

    /// Starts the machine and waits until it has ended. The machine also ends when this process
    /// does.
    ///
    /// # Errors
    /// If QEMU is not installed, or does not start the machine.
    pub fn run(&self, output: Output) -> Result<Outcome, Problem> {
        Requirement::emulator(self.architecture).demand()?;
        let directory = tempfile::Builder::new().prefix("bindery-").tempdir().map_err(|error| {
            Problem::Failed(format!(
                "cannot make a temporary directory: {error}; TMPDIR names another place for it"
            ))
        })?;
        let initramfs = directory.path().join("initramfs");
        let control = directory.path().join("control");
        fs::write(&initramfs, &self.initramfs)
            .map_err(|error| Problem::io("write", &initramfs, &error))?;
        let files = emulator::Files { initramfs: &initramfs, control: &control };
        let mut command = emulator::command(self, &files, output);
        command.stderr(Stdio::piped());
        match output {
            Output::PassThrough | Output::Terminal => {}
            Output::Capture => {
                command.stdin(Stdio::null()).stdout(Stdio::piped());
            }
        }
        let ended = Watched::start(&mut command)?.wait(self.timeout)?;
        self.judge(ended, &control)
    }

    fn judge(&self, ended: Ended, control: &Path) -> Result<Outcome, Problem> {
        let emulator_messages = String::from_utf8_lossy(&ended.messages).trim_end().to_owned();
        let channel = fs::read(control).unwrap_or_default();
        let timed_out = match ended.end {
            End::Stopped(time) => TimedOut::After(time),
            End::Exited(status) if channel.is_empty() && refused(status, &emulator_messages) => {
                return Err(Problem::Failed(emulator_messages));
            }
            End::Exited(_) => TimedOut::No,
        };
        let Report { status, first_user_instruction, panic, log } = control::read(&channel);
        Ok(Outcome {
            status,
            first_user_instruction,
            panic,
            console: ended.output,
            log,
            timed_out,
            emulator_messages,
        })
    }
}

/// Whether QEMU did not start the machine. Its exit status is not enough, since a kernel can choose
/// the same status. But a QEMU that starts prints nothing, or only warnings.
fn refused(status: ExitStatus, messages: &str) -> bool {
    let complains = messages
        .lines()
        .any(|line| !line.contains(": warning: ") && !line.contains(": terminating on signal "));
    status.code() == Some(1) && complains
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn ended(code: i32, messages: &str) -> Ended {
        let end = End::Exited(ExitStatus::from_raw(code << 8));
        Ended { end, output: b"hello".to_vec(), messages: messages.as_bytes().to_vec() }
    }

    fn judged(ended: Ended, channel: Option<&str>) -> Result<Outcome, Problem> {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control");
        if let Some(channel) = channel {
            fs::write(&control, channel).unwrap();
        }
        Machine::new(Architecture::X86_64, PathBuf::from("kernel")).judge(ended, &control)
    }

    #[test]
    fn the_kernels_report_beats_the_emulators_exit_status() {
        for code in [0, 1, 3] {
            let outcome = judged(ended(code, ""), Some("status 7\n")).unwrap();
            assert_eq!((outcome.status, outcome.console.as_slice()), (Some(7), &b"hello"[..]));
            let outcome = judged(ended(code, ""), Some("")).unwrap();
            assert_eq!((outcome.status, outcome.timed_out), (None, TimedOut::No));
        }
    }

    #[test]
    fn a_complaining_emulator_has_not_started() {
        let complaint = "qemu-system-x86_64: could not load kernel 'kernel'";
        for channel in [None, Some("")] {
            let problem = judged(ended(1, complaint), channel).unwrap_err();
            assert_eq!(problem, Problem::Failed(complaint.to_owned()));
        }
        let warning = "qemu-system-x86_64: warning: no active timers\n";
        let outcome = judged(ended(1, warning), Some("")).unwrap();
        assert_eq!(outcome.emulator_messages, warning.trim_end());
    }

    #[test]
    fn a_stopped_machine_keeps_its_output() {
        let end = End::Stopped(Duration::from_secs(3));
        let stopped = Ended { end, output: Vec::new(), messages: Vec::new() };
        let outcome = judged(stopped, Some("first-user-instruction 5\n")).unwrap();
        assert_eq!(outcome.timed_out, TimedOut::After(Duration::from_secs(3)));
        assert_eq!((outcome.status, outcome.first_user_instruction), (None, Some(5)));
    }
}
