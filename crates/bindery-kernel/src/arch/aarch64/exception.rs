//! Exceptions: the vector table, and what each exception of a program means.

use core::arch::global_asm;
use core::mem::{offset_of, size_of};

use aarch64_cpu::registers::{ELR_EL1, FAR_EL1, Readable};
use bindery::Access;
use bindery::arch::{Arch, Permissions};
use linux_raw_sys::general::{
    BUS_ADRALN, BUS_ADRERR, BUS_OBJERR, FPE_FLTDIV, FPE_FLTINV, FPE_FLTOVF, FPE_FLTRES, FPE_FLTUND,
    FPE_FLTUNK, ILL_ILLOPC, SIGBUS, SIGFPE, SIGILL, SIGTRAP, TRAP_BRKPT, TRAP_HWBKPT, TRAP_TRACE,
};

use crate::process::scheduler;
use crate::{log, memory, trap};

use super::{Registers, firmware, interrupts, user_copy};

unsafe extern "C" {
    /// The vector table.
    pub fn vectors();
    /// Goes back to a program with the [`Registers`] that the stack pointer points at.
    pub fn return_to_program();
}

const SIZE: usize = size_of::<Registers>();
// The offsets below follow `Registers`.
const _: () = assert!(SIZE == 288 && offset_of!(Registers, program_counter) == 256);

global_asm!(
    r#"
    // Saves all of a program's registers; leaves x0 at them.
    .macro  save
    sub     sp, sp, #{size}
    stp     x0, x1, [sp]
    stp     x2, x3, [sp, #16]
    stp     x4, x5, [sp, #32]
    stp     x6, x7, [sp, #48]
    stp     x8, x9, [sp, #64]
    stp     x10, x11, [sp, #80]
    stp     x12, x13, [sp, #96]
    stp     x14, x15, [sp, #112]
    stp     x16, x17, [sp, #128]
    stp     x18, x19, [sp, #144]
    stp     x20, x21, [sp, #160]
    stp     x22, x23, [sp, #176]
    stp     x24, x25, [sp, #192]
    stp     x26, x27, [sp, #208]
    stp     x28, x29, [sp, #224]
    mrs     x1, sp_el0
    mrs     x2, elr_el1
    mrs     x3, spsr_el1
    mrs     x4, esr_el1
    stp     x30, x1, [sp, #240]
    stp     x2, x3, [sp, #256]
    stp     x0, x4, [sp, #272]
    mov     x0, sp
    .endm

    .macro  from_program handler
    .balign 128
    save
    mov     x29, xzr                // backtraces end here
    bl      \handler
    b       return_to_program
    .endm

    // A fault on a stack that has run over would only fault again: first the MMU is asked whether
    // there is a place right below the stack pointer, which may be the stack's end, and further
    // down. SP_EL0 is free meanwhile, a program's stands in its registers; PAR_EL1 is nobody's.
    .macro  from_kernel number
    .balign 128
    msr     sp_el0, x0
    sub     x0, sp, #16
    at      s1e1w, x0
    isb
    mrs     x0, par_el1
    tbnz    x0, #0, run_over
    sub     x0, sp, #({size} + 16)
    at      s1e1w, x0
    isb
    mrs     x0, par_el1
    tbnz    x0, #0, run_over
    mrs     x0, sp_el0
    b       from_kernel_\number
    .endm

    .macro  from_kernel_behind number
from_kernel_\number:
    save
    mov     x1, #\number
    stp     x29, x2, [sp, #-16]!    // a frame record, so that backtraces show where it was
    mov     x29, sp
    bl      {kernel}
    add     sp, sp, #16
    b       return_to_program       // to the kernel, where SPSR_EL1 says so
    .endm

    .section .text.vectors, "ax"
    .balign 2048
    .global vectors
vectors:
    from_kernel 0
    from_kernel 1
    from_kernel 2
    from_kernel 3
    from_kernel 4
    from_kernel 5
    from_kernel 6
    from_kernel 7
    from_program {synchronous}
    from_program {interrupt}
    from_kernel 10
    from_kernel 11
    from_kernel 12
    from_kernel 13
    from_kernel 14
    from_kernel 15

    .irp number, 0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15
    from_kernel_behind \number
    .endr

    // Whoever ran over its stack dies on another one, which the CPUs share.
run_over:
    mov     x0, sp
    adrp    x1, {last_stack}
    add     x1, x1, :lo12:{last_stack}
    add     sp, x1, #{last_stack_size}
    bl      {has_run_over}
    brk     #0

    .global return_to_program
return_to_program:
    ldp     x30, x1, [sp, #240]
    ldp     x2, x3, [sp, #256]
    msr     sp_el0, x1
    msr     elr_el1, x2
    msr     spsr_el1, x3
    ldp     x0, x1, [sp]
    ldp     x2, x3, [sp, #16]
    ldp     x4, x5, [sp, #32]
    ldp     x6, x7, [sp, #48]
    ldp     x8, x9, [sp, #64]
    ldp     x10, x11, [sp, #80]
    ldp     x12, x13, [sp, #96]
    ldp     x14, x15, [sp, #112]
    ldp     x16, x17, [sp, #128]
    ldp     x18, x19, [sp, #144]
    ldp     x20, x21, [sp, #160]
    ldp     x22, x23, [sp, #176]
    ldp     x24, x25, [sp, #192]
    ldp     x26, x27, [sp, #208]
    ldp     x28, x29, [sp, #224]
    add     sp, sp, #{size}
    eret
    "#,
    size = const SIZE,
    synchronous = sym synchronous,
    interrupt = sym interrupt,
    kernel = sym kernel,
    last_stack = sym LAST_STACK,
    last_stack_size = const LAST_STACK_SIZE,
    has_run_over = sym has_run_over,
);

const LAST_STACK_SIZE: usize = 16 << 10;

#[repr(align(16))]
struct LastStack(#[expect(dead_code, reason = "a stack")] [u8; LAST_STACK_SIZE]);

/// For the message of a CPU whose stack has run over.
static mut LAST_STACK: LastStack = LastStack([0; LAST_STACK_SIZE]);

/// Where an exception in the kernel ends that has no place on the stack.
extern "C" fn has_run_over(stack_pointer: u64) -> ! {
    // The pointer stands in the guard page, or right above where nothing fits any more.
    scheduler::check_stack(stack_pointer);
    scheduler::check_stack(stack_pointer - (SIZE + 16) as u64);
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

/// A program's system call, fault or other exception of its own making.
extern "C" fn synchronous(registers: &mut Registers) {
    let syndrome = registers.syndrome;
    match syndrome >> 26 {
        class::SYSTEM_CALL => trap::system_call(registers),
        class::DATA_ABORT => {
            // Cache maintenance (bit 8) reads, whatever bit 6 says.
            let access = match syndrome >> 6 & 0b101 {
                0b001 => Access::Write,
                _ => Access::Read,
            };
            abort(registers, access);
        }
        class::INSTRUCTION_ABORT => abort(registers, Access::Execute),
        _ => other(registers),
    }
}

/// A fault at an address; what kind of fault is said by the low bits of the syndrome.
#[inline]
fn abort(registers: &mut Registers, access: Access) {
    const ALIGNMENT: u64 = 0b10_0001;
    let address = FAR_EL1.get();
    let status = registers.syndrome & 0b11_1111;
    match status >> 2 {
        // Translation, access flag, permission.
        1..=3 => trap::page_fault(registers, address, access),
        _ if status == ALIGNMENT => trap::exception(registers, SIGBUS, BUS_ADRALN as i32, address),
        // Addresses in tables that are too large: no table of the core says so.
        0 => trap::exception(registers, SIGBUS, BUS_ADRERR as i32, address),
        _ => trap::exception(registers, SIGBUS, BUS_OBJERR as i32, address),
    }
}

fn other(registers: &mut Registers) {
    let at = registers.program_counter;
    let (signal, code, address) = match registers.syndrome >> 26 {
        // WFI and WFE: somebody else may run, and the program goes on.
        class::WAIT => {
            registers.program_counter += 4;
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
        // Undefined instructions and system registers; SVE and SME, which are not offered.
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

/// An interrupt while a program ran.
extern "C" fn interrupt(registers: &mut Registers) {
    interrupts::serve(Some(registers));
}

/// Whether an abort is a translation or permission fault of a known address. All others (alignment,
/// external aborts) would come again for ever, whatever the tables say.
fn is_about_tables(syndrome: u64) -> bool {
    const ADDRESS_UNKNOWN: u64 = 1 << 10;
    const TRANSLATION: u64 = 0b00_0100;
    const PERMISSION: u64 = 0b00_1100;
    let kind = syndrome & 0b11_1100;
    syndrome & ADDRESS_UNKNOWN == 0 && (kind == TRANSLATION || kind == PERMISSION)
}

/// Leads a fault about a program's address, in an instruction that may have one, to where it is dealt
/// with.
fn goes_on_elsewhere(registers: &mut Registers, address: u64) -> bool {
    let next = user_copy::continuation(registers.program_counter);
    let next = next.filter(|_| address < super::EntryFormat::USER_END);
    next.inspect(|next| registers.program_counter = *next).is_some()
}

/// Any other exception is a defect of the kernel, or of the machine; but for the semihosting call
/// where nobody listens, and faults where a program's memory was copied, or the kernel map was just
/// changing what is there.
extern "C" fn kernel(registers: &mut Registers, number: u64) {
    const KINDS: [&str; 4] = ["exception", "interrupt", "fast interrupt", "system error"];
    const SYNCHRONOUS: u64 = 4;
    let address = FAR_EL1.get();
    let syndrome = registers.syndrome;
    let is_resolved = |needed| is_about_tables(syndrome) && memory::is_resolved(address, needed);
    let is_served = number == SYNCHRONOUS
        && match syndrome >> 26 {
            class::UNKNOWN => firmware::is_absent_semihosting(registers),
            class::INSTRUCTION_ABORT_OF_KERNEL => is_resolved(Permissions::EXECUTE),
            class::DATA_ABORT_OF_KERNEL => {
                let writes = syndrome & 1 << 6 != 0;
                let needed = if writes { Permissions::WRITE } else { Permissions::READ };
                goes_on_elsewhere(registers, address) || is_resolved(needed)
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
