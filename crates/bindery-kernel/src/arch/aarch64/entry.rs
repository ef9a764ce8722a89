//! Entry from a program into the kernel and return to it: the vector table.
//!
//! All registers of the program lie at the top of the thread's kernel stack as [`Registers`].

use core::arch::global_asm;
use core::mem::{offset_of, size_of};

use crate::errno::Errno;

use super::exceptions;

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
    // down. SP_EL0 is free meanwhile, a program's is saved in its registers; PAR_EL1 is nobody's.
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

    // A thread that ran over its stack dies on another one, which the CPUs share.
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
    synchronous = sym exceptions::synchronous,
    interrupt = sym exceptions::interrupt,
    kernel = sym exceptions::kernel,
    last_stack = sym LAST_STACK,
    last_stack_size = const LAST_STACK_SIZE,
    has_run_over = sym exceptions::has_run_over,
);

const LAST_STACK_SIZE: usize = 16 << 10;

#[repr(align(16))]
struct LastStack(#[expect(dead_code, reason = "a stack")] [u8; LAST_STACK_SIZE]);

/// For the message of a CPU whose stack has run over.
static mut LAST_STACK: LastStack = LastStack([0; LAST_STACK_SIZE]);

/// A program's registers, as the entry code lays them on the kernel stack.
#[repr(C, align(16))]
#[derive(Clone)]
pub struct Registers {
    /// x0 to x30.
    pub(super) general: [u64; 31],
    pub(super) stack_pointer: u64,
    pub(super) program_counter: u64,
    /// PSTATE, in the format of `SPSR_EL1`.
    pub(super) state: u64,
    /// x0 when the kernel was entered: the first argument, where the result stands afterwards.
    pub(super) first_argument: u64,
    /// `ESR_EL1`: why the kernel was entered.
    pub(super) syndrome: u64,
}

/// The length of an instruction.
const INSTRUCTION: u64 = 4;

impl Registers {
    /// The registers of a new program.
    pub fn new(entry: u64, stack: u64) -> Self {
        Self {
            general: [0; 31],
            stack_pointer: stack,
            program_counter: entry,
            state: 0, // EL0, nothing masked
            first_argument: 0,
            syndrome: 0,
        }
    }

    /// The system call's number.
    #[inline]
    pub fn number(&self) -> u64 {
        self.general[8] & 0xffff_ffff // a C `int`
    }

    /// The system call's arguments.
    #[inline]
    pub fn arguments(&self) -> [u64; 6] {
        let [first, second, third, fourth, fifth, sixth, ..] = self.general;
        [first, second, third, fourth, fifth, sixth]
    }

    /// Sets the result.
    #[inline]
    pub fn set_result(&mut self, value: i64) {
        self.general[0] = value as u64;
    }

    /// The result, unchanged.
    #[inline]
    pub fn result(&self) -> i64 {
        self.general[0] as i64
    }

    /// Whether the result asks for the call to be made again.
    #[inline]
    pub fn is_restart(&self) -> bool {
        let errno = self.result().wrapping_neg();
        errno == i64::from(Errno::RESTART.0) || errno == i64::from(Errno::RESTART_WITHOUT_HANDLER.0)
    }

    /// Goes on behind the instruction, as if it had been executed: BTYPE (bits 11:10) is 0 then.
    pub(super) fn skip_instruction(&mut self) {
        self.program_counter += INSTRUCTION;
        self.state &= !(0b11 << 10);
    }

    /// Goes back to the system call's instruction, with its number and arguments as they were.
    pub fn restart(&mut self) {
        self.general[0] = self.first_argument;
        self.program_counter -= INSTRUCTION;
    }

    /// The stack pointer.
    pub fn stack_pointer(&self) -> u64 {
        self.stack_pointer
    }

    /// Sets the stack pointer.
    pub fn set_stack_pointer(&mut self, at: u64) {
        self.stack_pointer = at;
    }
}
