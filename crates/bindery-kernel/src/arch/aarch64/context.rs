//! Kernel threads on the CPU: the context of a thread that does not run, and the switch to another.

use core::arch::global_asm;
use core::mem::{offset_of, size_of};

use spin::Once;

use super::registers::Registers;

/// The saved state of a thread that does not run: its stack pointer. The callee-saved registers lie
/// below it.
#[repr(C)]
pub struct Context {
    stack: usize,
}

impl Context {
    /// The context of no thread.
    pub const EMPTY: Self = Self { stack: 0 };
}

/// x19 to x30.
const PRESERVED: usize = 12;

unsafe extern "C" {
    /// Saves the running context in `from` and resumes `to`.
    ///
    /// # Safety
    /// 1. `to` was filled by a switch or by [`prepare`], on a stack that is whole.
    /// 2. Interrupts are off.
    pub fn switch(from: *mut Context, to: *const Context);
}

const _: () = assert!(offset_of!(Context, stack) == 0);

global_asm!(
    r#"
    .section .text.switch, "ax"
    .global switch
switch:
    stp     x29, x30, [sp, #-{preserved}]!
    stp     x19, x20, [sp, #16]
    stp     x21, x22, [sp, #32]
    stp     x23, x24, [sp, #48]
    stp     x25, x26, [sp, #64]
    stp     x27, x28, [sp, #80]
    mov     x9, sp
    str     x9, [x0]
    ldr     x9, [x1]
    mov     sp, x9
    ldp     x19, x20, [sp, #16]
    ldp     x21, x22, [sp, #32]
    ldp     x23, x24, [sp, #48]
    ldp     x25, x26, [sp, #64]
    ldp     x27, x28, [sp, #80]
    ldp     x29, x30, [sp], #{preserved}
    ret
    "#,
    preserved = const PRESERVED * 8,
);

/// The entry code that a thread begins with, on the stack that [`prepare`] has filled.
static BEGIN: Once<unsafe extern "C" fn()> = Once::new();

/// Names the entry code that threads begin with.
pub fn set_beginning(begin: unsafe extern "C" fn()) {
    BEGIN.call_once(|| begin);
}

/// A thread that begins in its program with `registers`.
///
/// # Safety
/// 1. `top` is the end of a stack, aligned by 16 bytes, with room for both, in use by no thread.
pub unsafe fn prepare(top: *mut u8, registers: &Registers) -> Context {
    let begin = *BEGIN.get().expect("boot names the entry of threads");
    // SAFETY: the caller promises the room. The switch takes x30 from the second word.
    unsafe {
        let program = top.sub(size_of::<Registers>()).cast::<Registers>();
        program.write(registers.clone());
        let preserved = program.cast::<[u64; PRESERVED]>().sub(1);
        let mut values = [0; PRESERVED];
        values[1] = begin as *const () as u64;
        preserved.write(values);
        Context { stack: preserved.addr() }
    }
}

/// A thread that begins in the kernel, with `entry`, and has no program.
///
/// # Safety
/// 1. `top` is the end of a stack, aligned by 16 bytes, in use by no thread.
pub unsafe fn prepare_kernel(top: *mut u8, entry: extern "C" fn() -> !) -> Context {
    // SAFETY: a stack has the room. The switch takes x30 from the second word.
    unsafe {
        let preserved = top.cast::<[u64; PRESERVED]>().sub(1);
        let mut values = [0; PRESERVED];
        values[1] = entry as *const () as u64;
        preserved.write(values);
        Context { stack: preserved.addr() }
    }
}
