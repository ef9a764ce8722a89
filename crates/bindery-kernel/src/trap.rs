//! Entries from a program into the kernel: system calls, exceptions, interrupts. Page faults are in
//! [`crate::page_fault`]. The architecture's entry code saves the registers and calls one of these
//! functions; all of these functions end with [`leave`], the way back.

use core::sync::atomic::Ordering;

use crate::arch::Registers;
use crate::errno::{Errno, Outcome};
use crate::process::{self, scheduler, signal};

use crate::calls::BesideOthers;
pub use crate::process::From;
use crate::{calls, kernel_lock, time};

/// Handles a system call and leaves the result in the registers.
pub fn system_call(registers: &mut Registers) {
    let Some(outcome) = calls::dispatch(registers) else {
        // The registers are a program's own, and have no result of a call.
        return leave(registers, From::Exception);
    };
    set_result(registers, outcome);
    leave(registers, From::SystemCall);
}

/// As [`system_call`], where several CPUs run threads and the calling CPU does not hold the
/// kernel's lock. Most calls about memory run without it. Apart, so that a machine with one CPU
/// pays for one test.
#[inline(never)]
pub fn system_call_beside_others(registers: &mut Registers) {
    let Some(call) = BesideOthers::of(registers) else {
        kernel_lock::lock();
        system_call(registers);
        return kernel_lock::unlock();
    };
    // Another thread may ignore or take the fatal signal that ended the call, before this CPU has
    // the lock.
    let outcome = kernel_lock::beside(|| call.make()).map_err(|errno| match errno {
        Errno::EINTR => Errno::RESTART_WITHOUT_HANDLER,
        other => other,
    });
    set_result(registers, outcome);
    // An interrupt announces work that comes later, and arrives in the program.
    if needs_work(registers, From::SystemCall) {
        kernel_lock::lock();
        leave(registers, From::SystemCall);
        kernel_lock::unlock();
    }
}

#[inline(always)]
fn set_result(registers: &mut Registers, outcome: Outcome) {
    registers.set_result(match outcome {
        Ok(value) => value as i64,
        Err(errno) => -i64::from(errno.0),
    });
}

/// Another exception of a program. Sends the program a signal with `si_code` and `si_addr`.
pub fn exception(registers: &mut Registers, signal: u32, code: i32, address: u64) {
    signal::exception(signal, code, address);
    leave(registers, From::Exception);
}

/// Handles a timer interrupt; in a program if there are registers, otherwise in the idle loop.
pub fn timer(registers: Option<&mut Registers>) {
    let Some(registers) = registers else { return time::expired() };
    // First, so that the timer is not set for the end of a time slice that is over.
    scheduler::tick();
    time::expired();
    leave(registers, From::Exception);
}

/// Any other interrupt, after which the thread may have pending work before it continues.
pub fn interrupt(registers: Option<&mut Registers>) {
    if let Some(registers) = registers {
        leave(registers, From::Exception);
    }
}

/// Whether the running thread has work on its way to its program.
#[inline(always)]
pub fn has_work() -> bool {
    process::current().work.load(Ordering::Relaxed) != 0
}

/// Performs the pending work of a thread on its way to its program: yields the CPU, ends, or runs a
/// signal handler.
#[inline(always)]
pub fn leave(registers: &mut Registers, from: From) {
    if needs_work(registers, from) {
        work(registers, from);
    }
}

/// Whether [`leave`] has to do something.
#[inline(always)]
fn needs_work(registers: &Registers, from: From) -> bool {
    has_work() || from == From::SystemCall && registers.is_restart()
}

/// The rare part of [`leave`], out of line.
#[cold]
#[inline(never)]
fn work(registers: &mut Registers, from: From) {
    process::do_work(registers, from);
}
