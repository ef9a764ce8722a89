//! What the kernel keeps of a thread: a program's registers, its floating-point state, and the
//! kernel's own place while another thread runs.

use core::arch::global_asm;
use core::mem::{offset_of, size_of};

use crate::errno::Errno;
use crate::process::scheduler;

use super::exception;

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
    /// Those of a program that begins.
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

    /// The result as it stands.
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

    /// Goes back to the system call's instruction, with its number and arguments as they were.
    pub fn restart(&mut self) {
        self.general[0] = self.first_argument;
        self.program_counter -= INSTRUCTION;
    }

    /// Where the program goes on.
    pub fn program_counter(&self) -> u64 {
        self.program_counter
    }

    /// Lets it go on elsewhere.
    pub fn set_program_counter(&mut self, at: u64) {
        self.program_counter = at;
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

/// Floating-point state: the kernel uses none, so it stays in the CPU until another thread runs.
#[repr(C, align(16))]
#[derive(Clone)]
pub struct FloatingPoint {
    /// V0 to V31.
    pub(super) vectors: [u128; 32],
    pub(super) status: u32,
    pub(super) control: u32,
}

impl FloatingPoint {
    /// That of a new program.
    pub fn new() -> Self {
        Self { vectors: [0; 32], status: 0, control: 0 }
    }

    /// Stores the CPU's state here.
    pub fn save(&mut self) {
        // SAFETY: writes the structure and nothing else.
        unsafe { store_floating_point(self) };
    }

    /// Loads the CPU's state from here.
    pub fn restore(&self) {
        // SAFETY: the kernel itself has no floating-point state that could be lost.
        unsafe { load_floating_point(self) };
    }
}

const _: () = {
    assert!(offset_of!(FloatingPoint, status) == 512 && offset_of!(FloatingPoint, control) == 516);
};

/// What the kernel keeps of a thread that does not run: its stack pointer, below which lie the
/// registers that a call preserves.
#[repr(C)]
pub struct Context {
    stack: usize,
}

impl Context {
    /// Of nobody yet.
    pub const EMPTY: Self = Self { stack: 0 };
}

/// x19 to x30.
const PRESERVED: usize = 12;

unsafe extern "C" {
    fn store_floating_point(into: &mut FloatingPoint);
    fn load_floating_point(from: &FloatingPoint);
    fn begin_thread();
    /// Stores the kernel's place in `from`, and goes on at `to`.
    ///
    /// # Safety
    /// `to` was filled by a switch or by [`prepare`], on a stack that is whole; interrupts are off.
    pub fn switch(from: *mut Context, to: *const Context);
}

const _: () = assert!(offset_of!(Context, stack) == 0);

global_asm!(
    r#"
    .arch_extension fp
    .arch_extension simd
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

    .global begin_thread
begin_thread:
    bl      {arrived}
    b       {return_to_program}

    .macro  vectors_by instruction
    \instruction q0, q1, [x0]
    \instruction q2, q3, [x0, #32]
    \instruction q4, q5, [x0, #64]
    \instruction q6, q7, [x0, #96]
    \instruction q8, q9, [x0, #128]
    \instruction q10, q11, [x0, #160]
    \instruction q12, q13, [x0, #192]
    \instruction q14, q15, [x0, #224]
    \instruction q16, q17, [x0, #256]
    \instruction q18, q19, [x0, #288]
    \instruction q20, q21, [x0, #320]
    \instruction q22, q23, [x0, #352]
    \instruction q24, q25, [x0, #384]
    \instruction q26, q27, [x0, #416]
    \instruction q28, q29, [x0, #448]
    \instruction q30, q31, [x0, #480]
    .endm

    .global store_floating_point
store_floating_point:
    vectors_by stp
    mrs     x1, fpsr
    mrs     x2, fpcr
    str     w1, [x0, #512]
    str     w2, [x0, #516]
    ret

    .global load_floating_point
load_floating_point:
    vectors_by ldp
    ldr     w1, [x0, #512]
    ldr     w2, [x0, #516]
    msr     fpsr, x1
    msr     fpcr, x2
    ret
    "#,
    preserved = const PRESERVED * 8,
    arrived = sym scheduler::finish_switch,
    return_to_program = sym exception::return_to_program,
);

/// A thread that begins in its program with `registers`.
///
/// # Safety
/// `top` is the end of a stack, aligned by 16 bytes, with room for both, that nobody runs on.
pub unsafe fn prepare(top: *mut u8, registers: &Registers) -> Context {
    // SAFETY: the caller promises the room. The switch takes x30 from the second word.
    unsafe {
        let program = top.sub(size_of::<Registers>()).cast::<Registers>();
        program.write(registers.clone());
        let preserved = program.cast::<[u64; PRESERVED]>().sub(1);
        let mut values = [0; PRESERVED];
        values[1] = begin_thread as *const () as u64;
        preserved.write(values);
        Context { stack: preserved.addr() }
    }
}

/// A thread that begins in the kernel, with `entry`, and has no program.
///
/// # Safety
/// `top` is the end of a stack, aligned by 16 bytes, that nobody runs on.
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

/// The kernel is entered on the stack that it was left on: nothing to do.
#[inline]
pub fn set_kernel_stack(_top: *mut u8) {}
