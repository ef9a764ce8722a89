//! Kernel threads on the CPU: the context of a thread that does not run, and the switch to another.

use core::arch::naked_asm;

use spin::Once;

use super::registers::Registers;

/// The saved state of a thread that does not run: its stack pointer. The registers lie on the
/// stack.
pub struct Context(#[allow(dead_code, reason = "`switch_stacks` reads it")] *mut u64);

impl Context {
    /// The context of no thread.
    pub const EMPTY: Self = Self(core::ptr::null_mut());
}

/// The entry code that a thread begins with, on the stack that [`prepare`] has filled.
static BEGIN: Once<unsafe extern "C" fn()> = Once::new();

/// Names the entry code that threads begin with.
pub fn set_beginning(begin: unsafe extern "C" fn()) {
    BEGIN.call_once(|| begin);
}

/// A thread that begins in its program with `registers`.
///
/// # Safety
/// 1. `top` is the aligned top of an unused stack.
pub unsafe fn prepare(top: *mut u8, registers: &Registers) -> Context {
    let begin = *BEGIN.get().expect("boot names the entry of threads");
    // SAFETY: there is room: the registers, and below them the words that `switch` pops.
    unsafe {
        let place = top.cast::<Registers>().sub(1);
        place.write(registers.clone());
        let frame = place.cast::<u64>().sub(7);
        frame.write_bytes(0, 6);
        frame.add(6).write(begin as *const () as u64);
        Context(frame)
    }
}

/// A thread that begins in the kernel, with `entry`, and has no program.
///
/// # Safety
/// 1. `top` is the aligned top of an unused stack.
pub unsafe fn prepare_kernel(top: *mut u8, entry: extern "C" fn() -> !) -> Context {
    // SAFETY: there is room: the words that `switch` pops, and a word in the place of the return
    // address, so that the stack is aligned as after a call.
    unsafe {
        let frame = top.cast::<u64>().sub(8);
        frame.write_bytes(0, 8);
        frame.add(6).write(entry as *const () as u64);
        Context(frame)
    }
}

/// Leaves the running thread and continues another. Returns when a thread switches back.
///
/// # Safety
/// 1. Both places live.
/// 2. `to` was filled by `prepare` or an earlier `switch`, and is used once.
/// 3. Interrupts are off.
pub unsafe fn switch(from: *mut Context, to: *const Context) {
    // SAFETY: the caller's promise.
    unsafe { switch_stacks(from, to) }
}

#[unsafe(naked)]
unsafe extern "C" fn switch_stacks(from: *mut Context, to: *const Context) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, [rsi]",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}
