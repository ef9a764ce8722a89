//! The host's Linux: the requests to it, and the processes that run them.
//!
//! ```text
//! the test             the judge                    a runner for every sequence, and its child
//! Judge::ask  -------> serve: reads the sequence,
//!                      forks ---------------------> Runner::run, writes what it sees to
//!             <------- sends what was seen <------- memory that all of them share
//! ```
//!
//! The judge is this test program, started again with [`SOCKET`] as its standard input. A runner
//! begins with a copy of the judge's memory, which lies far from the region, and shares no other
//! state.

mod access;
mod fixture;
mod look;
mod runner;

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use super::observation::{Counters, Observation};
use super::operation::Operation;
use super::words::{Sink, Source};

/// The environment variable that makes this program the judge.
const ENVIRONMENT: &str = "BINDERY_ORACLE_JUDGE";

/// The maximum number of words in a message; more is an error.
const LONGEST_MESSAGE: u64 = 1 << 24;

/// Linux's answer to a sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The process's mappings before the sequence, outside the region. Its locked memory is the
    /// maximum that a limited process may ever lock.
    pub before: Counters,
    pub observations: Vec<Observation>,
}

/// A process that answers for Linux.
pub struct Judge {
    process: Child,
    socket: UnixStream,
}

impl Judge {
    /// Starts this program again; `test` is the name of the test that calls [`serve`].
    pub fn start(test: &str) -> Self {
        let (socket, theirs) = UnixStream::pair().expect("a pair of sockets");
        let process = Command::new(std::env::current_exe().expect("the program's path"))
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ENVIRONMENT, "1")
            // Uses a single heap, since each further heap would reserve 64 MiB of addresses.
            .env("MALLOC_ARENA_MAX", "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("this program starts once more");
        Self { process, socket }
    }

    /// Runs a sequence on Linux.
    pub fn ask(&mut self, operations: &[Operation]) -> Verdict {
        let mut words = Vec::new();
        words.put(operations.len() as u64);
        for operation in operations {
            operation.put(&mut words);
        }
        send(&mut self.socket, &words).expect("the judge listens");
        let answer = receive(&mut self.socket).expect("the judge answers").expect("an answer");
        let mut source = Source(&answer);
        let before = Counters { mapped: source.take(), data: source.take(), locked: source.take() };
        let mut observations = Vec::new();
        while !source.0.is_empty() {
            observations.push(Observation::take(&mut source));
        }
        assert!(!observations.is_empty(), "Linux has not run {operations:#?}");
        Verdict { before, observations }
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        // The judge reads end-of-file and exits.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}

fn send(socket: &mut UnixStream, words: &[u64]) -> io::Result<()> {
    let count = words.len() as u64;
    let bytes: Vec<u8> =
        std::iter::once(&count).chain(words).flat_map(|word| word.to_le_bytes()).collect();
    socket.write_all(&bytes)
}

/// The next message; `None` if the other end is closed.
fn receive(socket: &mut UnixStream) -> io::Result<Option<Vec<u64>>> {
    let mut count = [0; 8];
    match socket.read_exact(&mut count) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let count = u64::from_le_bytes(count);
    assert!(count < LONGEST_MESSAGE, "a message of {count} words");
    let mut bytes = vec![0; count as usize * 8];
    socket.read_exact(&mut bytes)?;
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    Ok(Some(words.collect()))
}

/// If this program was started as the judge, answers requests until no more arrive.
pub fn serve() {
    if std::env::var_os(ENVIRONMENT).is_none() {
        return;
    }
    // SAFETY: standard input is the socket that `Judge::start` made, and no other code uses it.
    let mut socket = unsafe { <UnixStream as std::os::fd::FromRawFd>::from_raw_fd(0) };
    let mut fixture = fixture::Fixture::new();
    while let Some(question) = receive(&mut socket).expect("a question") {
        let mut source = Source(&question);
        let count = source.take() as usize;
        let operations = source.take_many(count, Operation::take);
        let answer = fixture.run(&operations);
        send(&mut socket, &answer).expect("somebody listens");
    }
    std::process::exit(0);
}

/// The reason why Linux cannot be the judge here, if any.
pub fn unable() -> Option<String> {
    fixture::unable()
}
