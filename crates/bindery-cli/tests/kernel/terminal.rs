//! `bindery run` at a terminal: the keys that reach the program, the way to leave, and the
//! terminal's settings afterwards.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use std::{fs, thread};

use bindery_cli::guest::Architecture;
use bindery_cli::guest::requirements::Requirement;
use libtest_mimic::{Completion, Failed, Trial};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

use crate::guest::is_required;
use crate::options;

/// The time that a machine may take for each request.
const PATIENCE: Duration = Duration::from_secs(240);

const CTRL_A: u8 = 1;
const CTRL_C: u8 = 3;
const CTRL_Z: u8 = 26;
const CTRL_BACKSLASH: u8 = 28;

/// The trials for one architecture.
pub fn trials(architecture: Architecture) -> Vec<Trial> {
    let trial = |what: &str, run: fn(Architecture) -> Result<Completion, Failed>| {
        let name = format!("{}::terminal_{what}", architecture.directory());
        Trial::ignorable_test(name, move || run(architecture))
    };
    vec![
        trial("interrupts_a_program_that_does_not_read", interrupts),
        trial("ends_the_machine_by_ctrl_a_x", ends),
        trial("kills_by_ctrl_backslash_and_does_not_stop", quits),
    ]
}

fn interrupts(architecture: Architecture) -> Result<Completion, Failed> {
    let script = "[ -t 0 ] && [ -t 1 ] && stty size; trap 'echo caught; exit 5' INT; \
                  echo ready; while :; do :; done";
    at_terminal(architecture, script, |session| {
        session.expect("Ctrl-A x ends the machine")?;
        session.expect("31 117")?;
        session.expect("ready")?;
        session.send(&[CTRL_C])?;
        session.expect("caught")?;
        session.status(5)
    })
}

fn ends(architecture: Architecture) -> Result<Completion, Failed> {
    at_terminal(architecture, "echo ready; sleep 10000", |session| {
        session.expect("ready")?;
        session.send(&[CTRL_A, b'x'])?;
        session.expect("stopped from the keyboard")?;
        session.status(130)
    })
}

fn quits(architecture: Architecture) -> Result<Completion, Failed> {
    at_terminal(architecture, "echo ready; read line; echo \"got $line\"; exec cat", |session| {
        session.expect("ready")?;
        // No shell could continue the first program.
        session.send(&[CTRL_Z])?;
        session.send(b"worx\x7fd\r")?;
        session.expect("got word")?;
        // BusyBox's shell ignores the signal of Ctrl-\, also on Linux, so the program that replaces
        // the shell must have started. Both the terminal and the program print the line.
        session.send(b"again\r")?;
        session.expect("again")?;
        session.expect("again")?;
        session.send(&[CTRL_BACKSLASH])?;
        session.status(128 + 3)
    })
}

/// Runs a BusyBox script at a terminal of 31 rows and 117 columns and checks that the terminal's
/// settings are unchanged afterwards.
fn at_terminal(
    architecture: Architecture,
    script: &str,
    act: impl FnOnce(&mut Session) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    let needed = [Requirement::Emulator, Requirement::Rust, Requirement::BusyBox];
    for requirement in needed.map(|requirement| requirement(architecture)) {
        match requirement.demand() {
            Err(problem) if !is_required() => return Ok(Completion::ignored_with(problem)),
            other => other?,
        }
    }
    let mut session = Session::start(architecture, script)?;
    let before = tcgetattr(&session.terminal)?;
    act(&mut session)?;
    let after = tcgetattr(&session.terminal)?;
    if modes(&before) != modes(&after) {
        return Err(Failed::from("the terminal has other settings than before"));
    }
    Ok(Completion::Completed)
}

fn modes(of: &Termios) -> [u64; 4] {
    [
        of.input_modes.bits().into(),
        of.output_modes.bits().into(),
        of.control_modes.bits().into(),
        of.local_modes.bits().into(),
    ]
}

/// One run, with this process at the other end of the run's terminal.
struct Session {
    keyboard: File,
    terminal: OwnedFd,
    child: Child,
    screen: Receiver<Vec<u8>>,
    seen: String,
}

impl Session {
    fn start(architecture: Architecture, script: &str) -> Result<Self, Failed> {
        let other_end = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&other_end)?;
        unlockpt(&other_end)?;
        let path = ptsname(&other_end, Vec::new())?.into_string()?;
        let terminal = OwnedFd::from(fs::OpenOptions::new().read(true).write(true).open(path)?);
        let size = Winsize { ws_row: 31, ws_col: 117, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size)?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_bindery"));
        command.args(["run", "--arch", architecture.name()]);
        command.args(options::of_run(architecture, &[])).args(["busybox", "sh", "-c", script]);
        command.stdin(terminal.try_clone()?).stdout(terminal.try_clone()?);
        let child = command.stderr(terminal.try_clone()?).spawn()?;
        drop(command);
        let keyboard = File::from(other_end);
        let mut reader = keyboard.try_clone()?;
        let (sender, screen) = channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count) = reader.read(&mut bytes)
                && count > 0
                && sender.send(bytes[..count].to_vec()).is_ok()
            {}
        });
        Ok(Self { keyboard, terminal, child, screen, seen: String::new() })
    }

    /// Waits for a text; drops the output before it.
    fn expect(&mut self, text: &str) -> Result<(), Failed> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.seen.find(text) {
                self.seen.drain(..at + text.len());
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(Failed::from(format!("no {text:?} in {:?}", self.seen)));
                }
            }
        }
    }

    fn send(&mut self, keys: &[u8]) -> Result<(), Failed> {
        Ok(self.keyboard.write_all(keys)?)
    }

    /// Waits for the run to end with this status.
    fn status(&mut self, expected: i32) -> Result<(), Failed> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                let right = status.code() == Some(expected);
                let rest: Vec<u8> = self.screen.try_iter().flatten().collect();
                let rest = String::from_utf8_lossy(&rest);
                let problem = || Failed::from(format!("{status}, not {expected}: {rest:?}"));
                return right.then_some(()).ok_or_else(problem);
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(Failed::from(format!("it does not end; {:?}", self.seen)))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Both calls fail only if the child has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
