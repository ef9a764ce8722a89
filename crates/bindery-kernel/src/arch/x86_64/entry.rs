//! Entry from a program into the kernel and return to it: system calls, exceptions, interrupts.
//!
//! Every way into the kernel puts the program's registers at the top of its kernel stack, as
//! [`Registers`]. The only way back is `iretq`, which unlike `sysret` is safe for non-canonical
//! addresses. In the kernel GS points to this CPU's block (`per_cpu`); in a program it is the
//! program's.

use core::arch::global_asm;
use core::mem::offset_of;

use crate::errno::Errno;
use crate::trap;

use super::per_cpu::{USER_CODE, USER_DATA, VECTORS};
use super::{USER_END, context, cpu_features, exceptions, user_copy};

/// Offsets in the block that GS points to.
pub(super) const KERNEL_STACK: usize = 0;
pub(super) const USER_STACK: usize = 8;

/// Takes the place of the vector after the `syscall` instruction.
const SYSTEM_CALL: u64 = 256;

/// Bytes from one exception's entry to the next.
const ENTRY_SIZE: usize = 16;

/// The flags of a program that begins: interrupts on, and the bit that is always set.
const FLAGS: u64 = 0x202;

global_asm!(r#"
.macro save_registers
    push rdi
    push rsi
    push rdx
    push rcx
    push rax
    push r8
    push r9
    push r10
    push r11
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
.endm

.macro restore_registers            // ... and takes vector and error code from the stack
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    pop r11
    pop r10
    pop r9
    pop r8
    pop rax
    pop rcx
    pop rdx
    pop rsi
    pop rdi
    add rsp, 16
.endm

.global system_call_entry
system_call_entry:
    swapgs
    mov gs:[{user_stack}], rsp
    mov rsp, gs:[{kernel_stack}]
    push {user_data}
    push qword ptr gs:[{user_stack}]
    push r11
    push {user_code}
    push rcx
    push rax
    push {system_call_vector}
    save_registers
    xor ebp, ebp                    // a backtrace ends here
    mov rdi, rsp
    call {system_call}
return_to_program:
    restore_registers
    swapgs
    iretq

.global begin_thread
begin_thread:
    mov rdi, rsp
    xor ebp, ebp
    call {begin}
    jmp return_to_program

exception_common:
    save_registers
    test byte ptr [rsp + {code_segment}], 3
    jz 1f
    swapgs
    cld
.global forbid_user_access
forbid_user_access:
    nop dword ptr [rax]             // CLAC where there is SMAP (see `adapt`)
    xor ebp, ebp
    mov rdi, rsp
    call {exception}
    jmp return_to_program
1:  mov rdi, rsp
    call {exception_in_kernel}
    restore_registers
    iretq

.balign {entry_size}
.global exception_entries
exception_entries:
.set vector, 0
.rept {vectors}
    .balign {entry_size}
    .if !(vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21 || vector == 29 || vector == 30)
    push 0                          // the others have an error code here
    .endif
    push vector
    jmp exception_common
    .set vector, vector + 1
.endr
"#,
    user_stack = const USER_STACK,
    kernel_stack = const KERNEL_STACK,
    user_data = const USER_DATA,
    user_code = const USER_CODE,
    system_call_vector = const SYSTEM_CALL,
    code_segment = const offset_of!(Registers, cs),
    entry_size = const ENTRY_SIZE,
    vectors = const VECTORS,
    system_call = sym system_call,
    begin = sym context::begin,
    exception = sym exceptions::exception,
    exception_in_kernel = sym exceptions::exception_in_kernel,
);

unsafe extern "C" {
    /// Where `syscall` leads.
    pub fn system_call_entry();
    /// Where a new thread begins: calls [`context::begin`] and goes to the program.
    pub fn begin_thread();
    static exception_entries: u8;
    static forbid_user_access: u8;
}

/// Where an exception or interrupt leads.
pub fn exception_entry(vector: usize) -> u64 {
    &raw const exception_entries as u64 + (vector * ENTRY_SIZE) as u64
}

/// Puts `clac` into the entry code where the processor has it: a program could else switch the
/// prevention of accesses off for the kernel. Runs before code becomes read-only.
pub fn adapt() {
    user_copy::adapt();
    if cpu_features::has_smap() {
        let place = (&raw const forbid_user_access).cast_mut().cast::<[u8; 3]>();
        // SAFETY: the place is three bytes long, writable as yet, and has not run.
        unsafe { place.write_volatile([0x0f, 0x01, 0xca]) };
    }
}

extern "C" fn system_call(registers: &mut Registers) {
    trap::system_call(registers);
}

/// A program's registers, as they lie on the thread's kernel stack.
#[derive(Clone, Default)]
#[repr(C)]
pub struct Registers {
    pub(super) r15: u64,
    pub(super) r14: u64,
    pub(super) r13: u64,
    pub(super) r12: u64,
    pub(super) rbp: u64,
    pub(super) rbx: u64,
    pub(super) r11: u64,
    pub(super) r10: u64,
    pub(super) r9: u64,
    pub(super) r8: u64,
    pub(super) rax: u64,
    pub(super) rcx: u64,
    pub(super) rdx: u64,
    pub(super) rsi: u64,
    pub(super) rdi: u64,
    /// What brought the program into the kernel.
    pub(super) vector: u64,
    /// An exception's error code; the number of a system call.
    pub(super) error: u64,
    pub(super) rip: u64,
    pub(super) cs: u64,
    pub(super) flags: u64,
    pub(super) rsp: u64,
    pub(super) ss: u64,
}

// The stack stays aligned to 16 where the entry code calls.
const _: () = assert!(size_of::<Registers>().is_multiple_of(16));

impl Registers {
    /// The registers of a new program.
    pub fn new(entry: u64, stack: u64) -> Self {
        let mut registers = Self {
            cs: u64::from(USER_CODE),
            ss: u64::from(USER_DATA),
            flags: FLAGS,
            rsp: stack,
            ..Self::default()
        };
        registers.set_program_counter(entry);
        registers
    }

    /// The system call's number.
    #[inline]
    pub fn number(&self) -> u64 {
        self.error
    }

    /// The system call's arguments.
    #[inline]
    pub fn arguments(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Sets the system call's result.
    #[inline]
    pub fn set_result(&mut self, value: i64) {
        self.rax = value as u64;
    }

    /// The system call's result.
    pub fn result(&self) -> i64 {
        self.rax as i64
    }

    /// Whether a system call ended with one of the results that no program gets to see.
    #[inline]
    pub fn is_restart(&self) -> bool {
        const RESTART: u64 = -(Errno::RESTART.0 as i64) as u64;
        const RESTART_WITHOUT_HANDLER: u64 = -(Errno::RESTART_WITHOUT_HANDLER.0 as i64) as u64;
        (self.rax == RESTART || self.rax == RESTART_WITHOUT_HANDLER) && self.vector == SYSTEM_CALL
    }

    /// Goes back to the system call's instruction.
    pub fn restart(&mut self) {
        self.rax = self.error;
        self.rip -= 2;
    }

    /// Sets the next instruction. The processor refuses in the kernel what is no address at all, so
    /// that and the kernel's half become the first address behind a program's own: there it
    /// faults.
    pub fn set_program_counter(&mut self, at: u64) {
        self.rip = at.min(USER_END);
    }

    /// The stack pointer.
    pub fn stack_pointer(&self) -> u64 {
        self.rsp
    }

    /// Sets the stack pointer.
    pub fn set_stack_pointer(&mut self, at: u64) {
        self.rsp = at;
    }

    /// Forgets what brought the program here: the registers are no longer those of that moment.
    pub(super) fn forget_cause(&mut self) {
        (self.vector, self.error) = (0, 0);
    }
}
