//! A child process. Its output is collected while it runs, and it never outlives this process.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process, pidfd_open, set_parent_process_death_signal,
};

use crate::guest::Problem;

/// The time that a child has to end on request before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// A running child. The child is killed when this value is dropped.
pub struct Watched {
    name: String,
    child: Child,
    output: Option<JoinHandle<io::Result<Vec<u8>>>>,
    messages: Option<JoinHandle<io::Result<Vec<u8>>>>,
}

/// The end of a child.
pub enum End {
    /// By itself.
    Exited(ExitStatus),
    /// At this time limit.
    Stopped(Duration),
}

/// A child that has ended.
pub struct Ended {
    /// The reason.
    pub end: End,
    /// The child's standard output, if it was a pipe.
    pub output: Vec<u8>,
    /// The child's standard error, if it was a pipe.
    pub messages: Vec<u8>,
}

impl Watched {
    /// Starts a command.
    ///
    /// # Errors
    /// If the child cannot be started.
    pub fn start(command: &mut Command) -> Result<Self, Problem> {
        let name = command.get_program().display().to_string();
        // The signal is sent when the thread that started the child ends, so that thread must wait
        // for the child: `wait` takes `self`, and nothing sends a `Watched` to another thread.
        //
        // SAFETY: code between fork and exec must be async-signal-safe; this code is one system
        // call, which touches no memory and acquires no lock.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let mut child = command
            .spawn()
            .map_err(|error| Problem::Failed(format!("cannot start {name}: {error}")))?;
        let output = child.stdout.take().map(gather);
        let messages = child.stderr.take().map(gather);
        Ok(Self { name, child, output, messages })
    }

    /// Waits until the child has ended and ends it at the time limit.
    ///
    /// # Errors
    /// If the host does not let this process wait, or read the child's output.
    pub fn wait(mut self, timeout: Option<Duration>) -> Result<Ended, Problem> {
        let failed = {
            let name = self.name.clone();
            move |error: io::Error| Problem::Failed(format!("cannot wait for {name}: {error}"))
        };
        let end = self.wait_for_end(timeout).map_err(&failed)?;
        let output = collect(self.output.take()).map_err(&failed)?;
        let messages = collect(self.messages.take()).map_err(&failed)?;
        Ok(Ended { end, output, messages })
    }

    fn wait_for_end(&mut self, timeout: Option<Duration>) -> io::Result<End> {
        let pid = Pid::from_child(&self.child);
        let descriptor = pidfd_open(pid, PidfdFlags::empty())?;
        let ended_within = |timeout: Option<Duration>| -> io::Result<bool> {
            let deadline = timeout.map(|timeout| Instant::now() + timeout);
            loop {
                let left = deadline.map(|deadline| deadline.duration_since(Instant::now()));
                let left = left.map(|left| Timespec {
                    tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                    tv_nsec: left.subsec_nanos().into(),
                });
                match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], left.as_ref()) {
                    Ok(ready) => return Ok(ready != 0),
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        };
        if ended_within(timeout)? {
            return self.child.wait().map(End::Exited);
        }
        // The child has not been waited for, so its id is still its own.
        kill_process(pid, Signal::TERM)?;
        if !ended_within(Some(GRACE))? {
            self.child.kill()?;
        }
        self.child.wait()?;
        Ok(End::Stopped(timeout.unwrap_or_default()))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Both calls fail only if the child has already been waited for; then nothing is left to
        // do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn gather(mut pipe: impl Read + Send + 'static) -> JoinHandle<io::Result<Vec<u8>>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes)?;
        Ok(bytes)
    })
}

fn collect(thread: Option<JoinHandle<io::Result<Vec<u8>>>>) -> io::Result<Vec<u8>> {
    match thread.map(JoinHandle::join) {
        None => Ok(Vec::new()),
        Some(Ok(result)) => result,
        Some(Err(_)) => Err(io::Error::other("the thread that reads its output panicked")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    fn shell(script: &str, timeout: Option<Duration>) -> Ended {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Watched::start(&mut command).unwrap().wait(timeout).unwrap()
    }

    #[test]
    fn both_streams_of_a_child_are_gathered() {
        let ended = shell("yes | head -c 200000; echo problem >&2; exit 3", None);
        assert_eq!((ended.output.len(), ended.messages.as_slice()), (200_000, &b"problem\n"[..]));
        assert!(matches!(ended.end, End::Exited(status) if status.code() == Some(3)));
    }

    #[test]
    fn a_child_that_ignores_requests_is_killed() {
        let started = Instant::now();
        // Enough for a loaded host to start the child.
        let time = Duration::from_secs(5);
        let asked = shell("echo begun; exec sleep 60", Some(time));
        assert!(matches!(asked.end, End::Stopped(after) if after == time));
        assert_eq!(asked.output, b"begun\n");
        let time = Duration::from_millis(200);
        let stubborn = shell("trap '' TERM; while :; do :; done", Some(time));
        assert!(matches!(stubborn.end, End::Stopped(_)));
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_child_that_nobody_waits_for_is_killed() {
        let watched = Watched::start(Command::new("sleep").arg("60")).unwrap();
        let pid = Pid::from_child(&watched.child);
        drop(watched);
        assert!(rustix::process::test_kill_process(pid).is_err(), "it still runs");
    }
}
