//! The reference kernel of Bindery: it boots in QEMU and runs static Linux programs unmodified. All
//! memory management is the crate `bindery`, used through its public interface.
//!
//! It is an embedder like any other. [`platform`] is its part of memory management; the rest is
//! processes ([`process`]), files ([`files`]), and the machine ([`arch`]).
//!
//! # One rule that makes it small
//! Threads run on the first CPU; the others are started and idle. In the kernel interrupts are off
//! and nothing is preempted: a thread gives the CPU away where it sleeps ([`process::scheduler`]),
//! or on its way back to its program. So a read section of the core needs no bookkeeping, and a
//! fault in the kernel is always a defect of the kernel.

#![no_std]
#![no_main]

extern crate alloc;

mod arch;
mod boot;
mod calls;
mod console;
mod control;
mod errno;
mod failure;
mod files;
mod heap;
mod memory;
mod memory_functions;
mod options;
mod page_fault;
mod platform;
mod process;
mod self_test;
mod sync;
mod time;
mod trap;
mod user;
mod workload;

use boot::Information;

/// Where every architecture's entry code ends: the MMU is on, the kernel runs where it was linked,
/// on a stack of its own, with exceptions caught and interrupts off.
fn start(information: &Information) -> ! {
    options::read(information.command_line);
    let information = &information.without_first(options::unused_memory());
    let taken = heap::begin(information);
    memory::begin(information, taken);
    arch::begin_devices();
    process::prepare_audits();
    self_test::run();
    memory::boot_is_over();
    time::begin();
    files::begin(information.initramfs);
    arch::start_other_cpus(information.cpus);
    workload::run();
    process::run_first()
}
