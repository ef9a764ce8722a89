//! The dispatch of system calls by number to modules.
//!
//! | file | what |
//! |---|---|
//! | `memory` | the core's calls, by `bindery_linux` |
//! | `nodes` | memory nodes: there is one |
//! | [`segments`] | System V shared memory |
//! | `vm_copy` | `process_vm_readv`, `process_vm_writev`, `process_mrelease` |
//! | [`crate::process::calls`] | processes, threads, signals, time, limits |
//! | [`crate::files::calls`] | everything with a descriptor or a path |
//! | [`crate::arch::own_calls`] | calls that only one architecture has |

mod memory;
mod nodes;
pub mod segments;
mod vm_copy;

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::{self, Registers};
use crate::errno::{Errno, Outcome};
use crate::{files, log, options, process};
use memory::OfTheCore;

/// A call that needs no kernel's lock.
pub enum BesideOthers {
    /// A call about memory that runs in the core alone.
    OfTheCore(OfTheCore),
    /// A call that returns a number that only the running thread changes.
    Number(u32),
}

impl BesideOthers {
    /// The call in the registers; `None` for a call that needs the lock, or that is logged.
    pub fn of(registers: &Registers) -> Option<Self> {
        let number = registers.number();
        let call = match OfTheCore::from_number(number, registers.arguments()) {
            Some(call) => Self::OfTheCore(call),
            None => Self::Number(process::calls::own_number(u32::try_from(number).ok()?)?),
        };
        (!options::LOG_CALLS.load(Ordering::Relaxed)).then_some(call)
    }

    /// Makes the call.
    pub fn make(self) -> Outcome {
        match self {
            Self::OfTheCore(call) => call.make(),
            Self::Number(number) => Ok(number.into()),
        }
    }
}

/// Makes the call whose number is in the registers. `None` if the registers already have the
/// program's new state (a return from a signal handler, a new program).
#[inline]
pub fn dispatch(registers: &mut Registers) -> Option<Outcome> {
    let (number, arguments) = (registers.number(), registers.arguments());
    let outcome = match memory::call(number, &arguments) {
        Some(outcome) => outcome,
        None => other(number, arguments, registers)?,
    };
    if options::LOG_CALLS.load(Ordering::Relaxed) {
        log_call(number, arguments, outcome);
    }
    Some(outcome)
}

/// Any other call. Out of line, so that calls about memory stay fast.
#[inline(never)]
fn other(number: u64, arguments: [u64; 6], registers: &mut Registers) -> Option<Outcome> {
    let Ok(known) = u32::try_from(number) else {
        return Some(unknown(number));
    };
    // First, because reads and writes are the most frequent calls.
    if let Some(outcome) = files::calls::call(known, arguments) {
        return Some(outcome);
    }
    if let Some(result) = process::calls::call(known, arguments, registers) {
        return result;
    }
    let outcome = nodes::call(known, arguments)
        .or_else(|| segments::call(known, arguments))
        .or_else(|| vm_copy::call(known, arguments))
        .or_else(|| arch::own_calls::call(known, arguments));
    Some(outcome.unwrap_or_else(|| unknown(number)))
}

#[cold]
#[inline(never)]
fn log_call(number: u64, arguments: [u64; 6], outcome: Outcome) {
    let thread = process::current().id();
    log!("thread {thread}: call {number} {arguments:x?} = {outcome:x?}");
}

/// The unknown calls that were logged; the last bit covers all larger numbers.
static LOGGED: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

fn unknown(number: u64) -> Outcome {
    let index = number.min(511) as usize;
    let bit = 1 << (index % 64);
    if LOGGED[index / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        log!("thread {}: no system call {number}", process::current().id());
    }
    Err(Errno::ENOSYS)
}
