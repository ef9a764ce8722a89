//! The kernel's command line: `key=value` words, then ` -- ` and the words of the first program.
//! Each word may encode bytes as `%XX`.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use spin::Once;

/// The release that `uname` reports, which is the release of Linux whose system calls the kernel
/// implements.
pub const RELEASE: &str = "6.18.0-bindery";

static LINE: Once<&'static str> = Once::new();

/// Whether the end of every process triggers an audit.
pub static CHECK_AT_EXIT: AtomicBool = AtomicBool::new(false);

/// Whether every system call is logged.
pub static LOG_CALLS: AtomicBool = AtomicBool::new(false);

/// The maximum number of processes.
pub static PROCESSES: AtomicUsize = AtomicUsize::new(512);

/// The seed for the shapes of the core's lists and trees; 0 selects a random one.
pub static SEED: AtomicU64 = AtomicU64::new(0);

/// Reads the command line. Called once, before the heap exists.
pub fn read(line: &'static str) {
    LINE.call_once(|| line);
    for (key, value) in pairs() {
        match (key, value) {
            ("check", "exit") => CHECK_AT_EXIT.store(true, Ordering::Relaxed),
            ("log", "calls") => LOG_CALLS.store(true, Ordering::Relaxed),
            ("processes", number) => {
                if let Ok(number) = number.parse() {
                    PROCESSES.store(number, Ordering::Relaxed);
                }
            }
            ("seed", number) => {
                if let Ok(number) = number.parse() {
                    SEED.store(number, Ordering::Relaxed);
                }
            }
            _ => {}
        }
    }
}

/// The value of a rarely used key.
pub fn value(key: &str) -> Option<&'static str> {
    pairs().find(|(other, _)| *other == key).map(|(_, value)| value)
}

/// The number of bytes at the beginning of memory that stay unused, including the image:
/// `unused=BYTES`. If it exceeds the image's size, the free frames are the same for kernels of
/// different sizes.
pub fn unused_memory() -> u64 {
    value("unused").and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

fn parts() -> (&'static str, &'static str) {
    let line = LINE.get().copied().unwrap_or("");
    line.split_once(" -- ")
        .or(line.strip_prefix("-- ").map(|rest| ("", rest)))
        .unwrap_or((line, ""))
}

fn pairs() -> impl Iterator<Item = (&'static str, &'static str)> {
    parts().0.split_whitespace().filter_map(|word| word.split_once('='))
}

/// The kind of a standard descriptor of the first program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standard {
    /// The console, as a terminal.
    Terminal,
    /// The console as a stream of bytes.
    Stream,
}

/// Standard input, and standard output and error: `input=stream`, `output=stream`.
pub fn standard() -> (Standard, Standard) {
    let kind = |key| match value(key) {
        Some("stream") => Standard::Stream,
        _ => Standard::Terminal,
    };
    (kind("input"), kind("output"))
}

/// The size of an interactive terminal, in rows and columns: `terminal=ROWSxCOLUMNS`.
pub fn terminal() -> Option<(u16, u16)> {
    let (rows, columns) = value("terminal")?.split_once('x')?;
    Some((rows.parse().ok()?, columns.parse().ok()?))
}

/// The first program: `init=`, else the first word behind `--`, else `/init`.
pub fn first_program() -> Vec<u8> {
    decode(value("init").or(parts().1.split_whitespace().next()).unwrap_or("/init"))
}

/// The arguments of the first program, its own name first.
pub fn arguments() -> Vec<Vec<u8>> {
    let words: Vec<_> = parts().1.split_whitespace().map(decode).collect();
    if words.is_empty() { [first_program()].into() } else { words }
}

/// The first program's environment.
pub fn environment() -> Vec<Vec<u8>> {
    pairs().filter(|(key, _)| *key == "env").map(|(_, value)| decode(value)).collect()
}

/// A word in which each `%XX` is replaced by its byte.
fn decode(word: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word.as_bytes();
    while let [first, tail @ ..] = rest {
        let digit = |at: usize| tail.get(at).and_then(|byte| (*byte as char).to_digit(16));
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high << 4 | low) as u8);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}
