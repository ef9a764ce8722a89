//! The meaning of an exception. For a program it is a fault or a signal; for the kernel it is
//! fatal.

use aarch64_cpu::registers::{ELR_EL1, FAR_EL1, Readable};
use bindery::Access;
use bindery::arch::{Arch, Permissions};
use linux_raw_sys::general::{
    BUS_ADRALN, BUS_ADRERR, BUS_OBJERR, FPE_FLTDIV, FPE_FLTINV, FPE_FLTOVF, FPE_FLTRES, FPE_FLTUND,
    FPE_FLTUNK, ILL_ILLOPC, SIGBUS, SIGFPE, SIGILL, SIGTRAP, TRAP_BRKPT, TRAP_HWBKPT, TRAP_TRACE,
};

use crate::process::scheduler;
use crate::trap::{self, From};
use crate::{arch, kernel_lock, log, memory, page_fault};

use super::interrupts::{self, Taken};
use super::{Registers, control, probe, user_copy};

/// Panics for an exception in the kernel if the exception's frame does not fit on the stack.
pub(super) extern "C" fn has_run_over(stack_pointer: u64) -> ! {
    // The pointer is in the guard page, or so little above it that a frame does not fit.
    scheduler::check_stack(stack_pointer);
    scheduler::check_stack(stack_pointer - (size_of::<Registers>() + 16) as u64);
    panic!(
        "an exception of the kernel at {:#x} finds no stack at {stack_pointer:#x}{}",
        ELR_EL1.get(),
        memory::Explained(stack_pointer)
    );
}

/// Exception classes, `ESR_EL1.EC` (Arm ARM, D24 "ESR_EL1").
mod class {
    pub const UNKNOWN: u64 = 0x00;
    pub const WAIT: u64 = 0x01;
    pub const SYSTEM_CALL: u64 = 0x15;
    pub const INSTRUCTION_ABORT: u64 = 0x20;
    pub const INSTRUCTION_ABORT_OF_KERNEL: u64 = 0x21;
    pub const PROGRAM_COUNTER: u64 = 0x22;
    pub const DATA_ABORT: u64 = 0x24;
    pub const DATA_ABORT_OF_KERNEL: u64 = 0x25;
    pub const STACK_POINTER: u64 = 0x26;
    pub const FLOATING_POINT: u64 = 0x2c;
    pub const HARDWARE_BREAKPOINT: u64 = 0x30;
    pub const STEP: u64 = 0x32;
    pub const WATCHPOINT: u64 = 0x34;
    pub const BREAKPOINT_INSTRUCTION: u64 = 0x3c;
}

/// A program's system call, fault or other synchronous exception.
pub(super) extern "C" fn synchronous(registers: &mut Registers) {
    if kernel_lock::is_used() {
        handle_with_lock(registers);
    } else {
        handle(registers);
    }
}

/// Apart, so that a machine with one CPU pays for one test.
#[inline(never)]
fn handle_with_lock(registers: &mut Registers) {
    if registers.syndrome >> 26 == class::SYSTEM_CALL {
        return trap::system_call_beside_others(registers);
    }
    if let Some(access) = access(registers.syndrome)
        && is_for_the_core(registers.syndrome)
    {
        return page_fault::page_fault_beside_others(registers, FAR_EL1.get(), access);
    }
    kernel_lock::lock();
    handle(registers);
    kernel_lock::unlock();
}

// Inlined into both callers: a fault of a program is a few hundred instructions in all.
#[inline(always)]
fn handle(registers: &mut Registers) {
    if registers.syndrome >> 26 == class::SYSTEM_CALL {
        return trap::system_call(registers);
    }
    match access(registers.syndrome) {
        Some(access) => abort(registers, access),
        None => other(registers),
    }
}

/// The kind of access of a program that was aborted; `None` for any other exception.
#[inline(always)]
fn access(syndrome: u64) -> Option<Access> {
    match syndrome >> 26 {
        class::DATA_ABORT => {
            // Cache maintenance (bit 8) counts as a read, whatever bit 6 says.
            Some(if syndrome >> 6 & 0b101 == 0b001 { Access::Write } else { Access::Read })
        }
        class::INSTRUCTION_ABORT => Some(Access::Execute),
        _ => None,
    }
}

/// Whether an abort is one that the core may resolve: translation, access flag, permission.
#[inline(always)]
fn is_for_the_core(syndrome: u64) -> bool {
    matches!(syndrome >> 2 & 0b1111, 1..=3)
}

/// A fault at an address; the low bits of the syndrome give its kind.
#[inline]
fn abort(registers: &mut Registers, access: Access) {
    const ALIGNMENT: u64 = 0b10_0001;
    let address = FAR_EL1.get();
    let status = registers.syndrome & 0b11_1111;
    match status >> 2 {
        _ if is_for_the_core(status) => page_fault::page_fault(registers, address, access),
        _ if status == ALIGNMENT => trap::exception(registers, SIGBUS, BUS_ADRALN as i32, address),
        // A table entry contains too large an address. The core never writes such an entry.
        0 => trap::exception(registers, SIGBUS, BUS_ADRERR as i32, address),
        _ => trap::exception(registers, SIGBUS, BUS_OBJERR as i32, address),
    }
}

fn other(registers: &mut Registers) {
    let at = registers.program_counter;
    let (signal, code, address) = match registers.syndrome >> 26 {
        // WFI and WFE: yields to another thread; the program continues afterwards.
        class::WAIT => {
            registers.skip_instruction();
            scheduler::yield_now();
            return trap::interrupt(Some(registers));
        }
        class::PROGRAM_COUNTER => (SIGBUS, BUS_ADRALN, FAR_EL1.get()),
        class::STACK_POINTER => (SIGBUS, BUS_ADRALN, registers.stack_pointer),
        class::FLOATING_POINT => (SIGFPE, floating_point_code(registers.syndrome), at),
        class::BREAKPOINT_INSTRUCTION => (SIGTRAP, TRAP_BRKPT, at),
        class::STEP => (SIGTRAP, TRAP_TRACE, at),
        class::HARDWARE_BREAKPOINT => (SIGTRAP, TRAP_HWBKPT, at),
        class::WATCHPOINT => (SIGTRAP, TRAP_HWBKPT, FAR_EL1.get()),
        // Undefined instructions and system registers; branches into a guarded page that miss a
        // landing pad (FEAT_BTI), reported at the branch target; SVE and SME, which are not
        // offered.
        _ => (SIGILL, ILL_ILLOPC, at),
    };
    trap::exception(registers, signal, code as i32, address);
}

fn floating_point_code(syndrome: u64) -> u32 {
    const VALID: u64 = 1 << 23;
    let flags = [FPE_FLTINV, FPE_FLTDIV, FPE_FLTOVF, FPE_FLTUND, FPE_FLTRES];
    let raised = (0..flags.len()).find(|bit| syndrome & 1 << bit != 0);
    raised.filter(|_| syndrome & VALID != 0).map_or(FPE_FLTUNK, |bit| flags[bit])
}

/// An interrupt while a program ran. The wait for the lock answers the requests of its holder.
pub(super) extern "C" fn interrupt(registers: &mut Registers) {
    kernel_lock::lock();
    arch::answer();
    match interrupts::take() {
        Taken::Timer => trap::timer(Some(registers)),
        Taken::Other => {
            scheduler::look();
            trap::interrupt(Some(registers));
        }
        Taken::None => {}
    }
    kernel_lock::unlock();
}

/// The first function of a new thread.
pub(super) extern "C" fn begin(registers: &mut Registers) {
    scheduler::finish_switch();
    trap::leave(registers, From::Exception);
    kernel_lock::unlock();
}

/// Whether an abort is a translation or permission fault of a known address. All other aborts
/// (alignment, external aborts) would recur forever, whatever the tables contain.
fn is_about_tables(syndrome: u64) -> bool {
    const ADDRESS_UNKNOWN: u64 = 1 << 10;
    const TRANSLATION: u64 = 0b00_0100;
    const PERMISSION: u64 = 0b00_1100;
    let kind = syndrome & 0b11_1100;
    syndrome & ADDRESS_UNKNOWN == 0 && (kind == TRANSLATION || kind == PERMISSION)
}

/// Dispatches a fault on a program's address by an instruction of the kernel that may fault.
fn goes_on_elsewhere(registers: &mut Registers, address: u64) -> bool {
    let next = user_copy::continuation(registers.program_counter);
    let next = next.filter(|_| address < super::EntryFormat::USER_END);
    next.inspect(|next| registers.program_counter = *next).is_some()
}

/// Any other exception. It is a defect of the kernel or the machine, except in these cases: a
/// semihosting call that the emulator does not serve, and a fault in a copy of a program's memory,
/// in the self-test, or at an address that the kernel map was just changing.
pub(super) extern "C" fn kernel(registers: &mut Registers, number: u64) {
    const KINDS: [&str; 4] = ["exception", "interrupt", "fast interrupt", "system error"];
    const SYNCHRONOUS: u64 = 4;
    let address = FAR_EL1.get();
    let syndrome = registers.syndrome;
    let is_resolved = |needed| is_about_tables(syndrome) && memory::is_resolved(address, needed);
    let is_served = number == SYNCHRONOUS
        && match syndrome >> 26 {
            class::UNKNOWN => control::is_absent_semihosting(registers),
            class::INSTRUCTION_ABORT_OF_KERNEL => {
                probe::ends(registers, address) || is_resolved(Permissions::EXECUTE)
            }
            class::DATA_ABORT_OF_KERNEL => {
                let writes = syndrome & 1 << 6 != 0;
                let needed = if writes { Permissions::WRITE } else { Permissions::READ };
                goes_on_elsewhere(registers, address)
                    || probe::ends(registers, address)
                    || is_resolved(needed)
            }
            _ => false,
        };
    if is_served {
        return;
    }
    let kind = KINDS[number as usize % 4];
    for (index, pair) in registers.general.chunks(2).enumerate() {
        log!("x{:<2} {:016x?}", index * 2, pair);
    }
    panic!(
        "{kind} in the kernel (vector {number}): syndrome {:#x}, address {address:#x}, at {:#x}, \
         state {:#x}{}",
        registers.syndrome,
        registers.program_counter,
        registers.state,
        memory::Explained(address),
    );
}
