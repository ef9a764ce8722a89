//! Entry from a program into the kernel and return to it: system calls, exceptions, interrupts.
//!
//! Every entry into the kernel stores the program's registers at the top of the thread's kernel
//! stack, as [`Registers`]. The only way back is `iretq`, which unlike `sysret` is safe for
//! non-canonical addresses. In the kernel GS points to this CPU's block (`per_cpu`); programs have
//! their own GS.

use core::arch::global_asm;
use core::mem::offset_of;

use crate::kernel_lock;
use crate::process::scheduler;
use crate::trap::{self, From};

use super::per_cpu::{KERNEL_STACK, USER_CODE, USER_DATA, USER_STACK, VECTORS};
use super::registers::{Registers, SYSTEM_CALL};
use super::{cpu_features, exceptions, user_copy};

/// Bytes from one exception's entry to the next.
const ENTRY_SIZE: usize = 16;

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
    begin = sym begin,
    exception = sym exceptions::exception,
    exception_in_kernel = sym exceptions::exception_in_kernel,
);

unsafe extern "C" {
    /// The entry of `syscall`.
    pub fn system_call_entry();
    /// The entry of a new thread: calls [`begin`] and enters the program.
    pub fn begin_thread();
    static exception_entries: u8;
    static forbid_user_access: u8;
}

/// The address of an exception's or interrupt's entry.
pub fn exception_entry(vector: usize) -> u64 {
    &raw const exception_entries as u64 + (vector * ENTRY_SIZE) as u64
}

/// Patches `clac` into the entry code if the processor has it, since a program could otherwise turn
/// access prevention off for the kernel. Runs before code becomes read-only.
pub fn adapt() {
    user_copy::adapt();
    if cpu_features::has_smap() {
        let place = (&raw const forbid_user_access).cast_mut().cast::<[u8; 3]>();
        // SAFETY: the place is three bytes long, still writable, and has not run.
        unsafe { place.write_volatile([0x0f, 0x01, 0xca]) };
    }
}

extern "C" fn system_call(registers: &mut Registers) {
    if kernel_lock::is_used() {
        trap::system_call_beside_others(registers);
    } else {
        trap::system_call(registers);
    }
}

/// The first function of a new thread.
extern "C" fn begin(registers: &mut Registers) {
    scheduler::finish_switch();
    trap::leave(registers, From::Exception);
    kernel_lock::unlock();
}
