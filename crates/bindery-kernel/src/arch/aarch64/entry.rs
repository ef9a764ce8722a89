//! Entry from a program into the kernel and return to it: the vector table.
//!
//! All registers of the program are stored at the top of the thread's kernel stack as
//! [`Registers`].

use core::arch::global_asm;
use core::mem::{offset_of, size_of};

use super::exceptions;
use super::registers::Registers;

unsafe extern "C" {
    /// The vector table.
    pub fn vectors();
    /// Returns to a program with the [`Registers`] at the stack pointer.
    pub fn return_to_program();
    /// The entry of a new thread: finishes the switch to it and enters its program.
    pub fn begin_thread();
}

const SIZE: usize = size_of::<Registers>();
// The offsets below follow `Registers`.
const _: () = assert!(SIZE == 288 && offset_of!(Registers, program_counter) == 256);

global_asm!(
    r#"
    // Saves all of a program's registers and leaves their address in x0.
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

    // A fault on an overflowed stack would only fault again. So the entry code first asks the MMU
    // whether the word right below the stack pointer, which may be the stack's end, is mapped, and
    // then checks the words further down. SP_EL0 is free here, because the program's is saved in
    // its registers; nothing else uses PAR_EL1.
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

    // A thread that overflowed its stack panics on another stack, which all CPUs share.
run_over:
    mov     x0, sp
    adrp    x1, {last_stack}
    add     x1, x1, :lo12:{last_stack}
    add     sp, x1, #{last_stack_size}
    bl      {has_run_over}
    brk     #0

    .global begin_thread
begin_thread:
    mov     x0, sp
    mov     x29, xzr                // backtraces end here
    bl      {arrived}

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
    arrived = sym exceptions::begin,
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

/// The message of a CPU whose stack has overflowed.
static mut LAST_STACK: LastStack = LastStack([0; LAST_STACK_SIZE]);
