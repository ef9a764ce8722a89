//! The meaning of an exception. For a program it is a fault or a signal; for the kernel it is
//! fatal.

use core::arch::asm;

use bindery::Access;
use bindery::arch::Permissions;
use linux_raw_sys::general::{
    BUS_ADRALN, FPE_FLTDIV, FPE_FLTINV, FPE_FLTOVF, FPE_FLTRES, FPE_FLTUND, FPE_INTDIV, ILL_ILLOPN,
    SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP, TRAP_BRKPT, TRAP_TRACE,
};
use x86_64::registers::debug::{Dr6, Dr6Flags};

use crate::process::scheduler;
use crate::{disk, kernel_lock, log, memory, page_fault, symbols, trap};

use super::interrupts::{self, DISK, FALSE_ALARM, FORGET, LOOK, TIMER};
use super::probe::{PRESENT, RESERVED, fault_address};
use super::registers::Registers;
use super::{USER_END, probe, tlb, user_copy};

const DEBUG: u64 = 1;
const DOUBLE_FAULT: u64 = 8;
const PAGE_FAULT: u64 = 14;

/// Further bits of a page fault's error code.
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const FETCH: u64 = 1 << 4;

/// The `si_code` of a signal without further details.
const SI_KERNEL: u32 = 0x80;

/// An exception or an interrupt of a program.
pub extern "C" fn exception(registers: &mut Registers) {
    if kernel_lock::is_used() {
        handle_with_lock(registers);
    } else {
        handle(registers);
    }
}

/// Apart, so that a machine with one CPU pays for one test.
#[inline(never)]
fn handle_with_lock(registers: &mut Registers) {
    if registers.vector == FORGET {
        // Without the lock, whose holder waits for the answer.
        tlb::answer();
        return interrupts::served();
    }
    if registers.vector == PAGE_FAULT && is_for_the_core(registers.error) {
        let access = access(registers.error);
        return page_fault::page_fault_beside_others(registers, fault_address(), access);
    }
    kernel_lock::lock();
    handle(registers);
    kernel_lock::unlock();
}

/// Whether a program's page fault is one that the core may resolve.
fn is_for_the_core(error: u64) -> bool {
    error & (PRESENT | USER) != PRESENT && error & RESERVED == 0
}

/// The kind of access that has caused a page fault.
#[inline(always)]
fn access(error: u64) -> Access {
    match error & (FETCH | WRITE) {
        0 => Access::Read,
        FETCH => Access::Execute,
        _ => Access::Write,
    }
}

// Inlined into both callers: a fault of a program is a few hundred instructions in all.
#[inline(always)]
fn handle(registers: &mut Registers) {
    if registers.vector == PAGE_FAULT {
        if registers.error & (PRESENT | USER) == PRESENT {
            // QEMU reads the words that `iretq` pops with the rights of the kernel and reports such
            // a fault; a processor never reports a program's access like this. No mapping could
            // allow such an access.
            return trap::exception(registers, SIGSEGV, SI_KERNEL as i32, 0);
        }
        if registers.error & RESERVED != 0 {
            die(registers);
        }
        return page_fault::page_fault(registers, fault_address(), access(registers.error));
    }
    let here = registers.rip;
    // The signals that Linux sends. A signal without an address has the code `SI_KERNEL`.
    let (signal, code, address) = match registers.vector {
        TIMER => {
            interrupts::served();
            return trap::timer(Some(registers));
        }
        DISK => {
            interrupts::served();
            disk::interrupt();
            return trap::interrupt(Some(registers));
        }
        LOOK => {
            interrupts::served();
            scheduler::look();
            return trap::interrupt(Some(registers));
        }
        FALSE_ALARM => return trap::interrupt(Some(registers)),
        0 => (SIGFPE, FPE_INTDIV, here),
        DEBUG => (SIGTRAP, step_or_breakpoint(), here),
        3 => (SIGTRAP, SI_KERNEL, 0),
        6 => (SIGILL, ILL_ILLOPN, here),
        16 => (SIGFPE, x87_code(), here),
        17 => (SIGBUS, BUS_ADRALN, 0),
        19 => (SIGFPE, sse_code(), here),
        4 | 5 | 10 | 13 => (SIGSEGV, SI_KERNEL, 0),
        11 | 12 => (SIGBUS, SI_KERNEL, 0),
        // Double fault, machine check, non-maskable interrupt, and vectors that no device uses.
        _ => die(registers),
    };
    trap::exception(registers, signal, code as i32, address);
}

/// Handles an exception or an interrupt that arrived while the kernel ran. Interrupts are enabled
/// only in the idle loop. A page fault is expected in a copy from or to a program, in the
/// self-test, and while the kernel map changes. Every other exception is a defect of the kernel.
pub extern "C" fn exception_in_kernel(registers: &mut Registers) {
    match registers.vector {
        TIMER => {
            interrupts::served();
            kernel_lock::lock();
            trap::timer(None);
            kernel_lock::unlock();
        }
        DISK => {
            interrupts::served();
            kernel_lock::lock();
            disk::interrupt();
            kernel_lock::unlock();
        }
        FALSE_ALARM => trap::interrupt(None),
        FORGET => {
            tlb::answer();
            interrupts::served();
        }
        // It has ended the sleep of the idle loop, which looks for work.
        LOOK => interrupts::served(),
        PAGE_FAULT => {
            let is_served = goes_on_elsewhere(registers)
                || probe::ends(registers)
                || is_resolved(registers.error);
            if !is_served {
                die(registers);
            }
        }
        _ => die(registers),
    }
}

/// Dispatches a fault on a program's address by an instruction of the kernel that may fault.
fn goes_on_elsewhere(registers: &mut Registers) -> bool {
    let next = user_copy::continuation(registers.rip).filter(|_| fault_address() < USER_END);
    next.inspect(|next| registers.rip = *next).is_some()
}

#[cold]
fn is_resolved(error: u64) -> bool {
    let needed = match error & (FETCH | WRITE) {
        0 => Permissions::READ,
        FETCH => Permissions::EXECUTE,
        _ => Permissions::WRITE,
    };
    error & RESERVED == 0 && memory::is_resolved(fault_address(), needed)
}

#[cold]
fn die(registers: &Registers) -> ! {
    let Registers { vector, error, rip, cs, flags, rsp, rax, rbx, rcx, rdx, .. } = registers;
    let Registers { rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15, .. } = registers;
    log!("rax {rax:016x} rbx {rbx:016x} rcx {rcx:016x} rdx {rdx:016x}");
    log!("rsi {rsi:016x} rdi {rdi:016x} rbp {rbp:016x} rsp {rsp:016x}");
    log!(" r8 {r8:016x}  r9 {r9:016x} r10 {r10:016x} r11 {r11:016x}");
    log!("r12 {r12:016x} r13 {r13:016x} r14 {r14:016x} r15 {r15:016x}");
    log!("cs {cs:#x} flags {flags:#x} cr2 {:016x}", fault_address());
    let has_address = matches!(*vector, DOUBLE_FAULT | PAGE_FAULT);
    let address = if has_address { fault_address() } else { 0 };
    // An overflowed stack has no room for the exception's frame either, so the exception becomes a
    // double fault, which has its own stack.
    scheduler::check_stack(address);
    let (name, offset) = symbols::name(*rip).unwrap_or(("?", 0));
    panic!(
        "exception {vector} (error code {error:#x}) at {rip:#x} {name}+{offset:#x}{}",
        memory::Explained(address)
    );
}

/// The cause of a debug exception, read from a register that the kernel must clear.
fn step_or_breakpoint() -> u32 {
    let step = Dr6::read_raw() & Dr6Flags::STEP.bits() != 0;
    // SAFETY: clears the processor's flags; the bits above are always set.
    unsafe {
        asm!("mov dr6, {}", in(reg) 0xffff_0ff0_u64, options(nomem, nostack, preserves_flags))
    };
    if step { TRAP_TRACE } else { TRAP_BRKPT }
}

fn x87_code() -> u32 {
    let (status, control): (u16, u16);
    let mut word = 0_u16;
    // SAFETY: both instructions only query; they write only `word` and raise no exception.
    unsafe {
        asm!("fnstsw ax", out("ax") status, options(nomem, nostack, preserves_flags));
        asm!("fnstcw [{}]", in(reg) &raw mut word, options(nostack, preserves_flags));
    }
    control = word;
    floating_point_code(u32::from(status & !control))
}

fn sse_code() -> u32 {
    let mut mxcsr = 0_u32;
    // SAFETY: writes `mxcsr`.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack, preserves_flags)) };
    floating_point_code(mxcsr & !(mxcsr >> 7))
}

/// The exception bits of both units have the same meaning. The first bit that is set and not masked
/// counts.
fn floating_point_code(raised: u32) -> u32 {
    match raised & 0x3f {
        bits if bits & 1 != 0 => FPE_FLTINV,
        bits if bits & 4 != 0 => FPE_FLTDIV,
        bits if bits & 8 != 0 => FPE_FLTOVF,
        bits if bits & 0x12 != 0 => FPE_FLTUND,
        bits if bits & 0x20 != 0 => FPE_FLTRES,
        _ => 0,
    }
}
