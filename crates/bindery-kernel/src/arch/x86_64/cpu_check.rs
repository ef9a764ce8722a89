//! Features without which the kernel or its programs cannot run, checked before anything else, in
//! 32-bit mode. If the processor lacks a feature, the kernel says so on the console and over the
//! control channel, and the machine ends. One feature is reported only in 64-bit mode and is
//! checked there ([`check_calls`]).

use core::arch::global_asm;

use super::{control, cpu_features, serial};
use crate::arch::Ended;

/// Prefix of a message on the control channel; the console gets only the message.
const MARK: &str = "panic ";

// Each entry: a leaf of CPUID, a bit of EDX, the message.
global_asm!(r#"
.section .boot.text, "ax"
.code32
    // Continues at EBP if no feature is missing; changes all registers except EDI and EBP.
.global check_processor
check_processor:
    mov esi, offset required
1:  mov ecx, [esi]
    test ecx, ecx
    jz 3f
    mov eax, ecx
    and eax, 0x80000000
    cpuid
    cmp eax, [esi]                  // the highest leaf
    jb 4f
    mov eax, [esi]
    cpuid
    test edx, [esi + 4]
    jz 4f
    add esi, 12
    jmp 1b
3:  jmp ebp

4:  mov esi, [esi + 8]
    mov ecx, {mark}
5:  mov al, [esi]
    inc esi
    test al, al
    jz 8f
    mov dx, 0xe9
    out dx, al
    test ecx, ecx
    jz 6f
    dec ecx
    jmp 5b
6:  mov ah, al
    mov dx, 0x3fd
7:  in al, dx
    test al, 0x20                   // no room to send
    jz 7b
    mov al, ah
    mov dx, 0x3f8
    out dx, al
    jmp 5b
8:  mov eax, 1
    mov dx, 0xf4
    out dx, eax
9:  hlt
    jmp 9b

    .balign 4
required:
    .long 0x80000001, 1 << 29, without_long_mode
    .long 0x80000001, 1 << 20, without_no_execute
    .long 1, 1 << 0, without_floats
    .long 1, 1 << 3, without_large_pages
    .long 1, 1 << 4, without_counter
    .long 1, 1 << 5, without_registers
    .long 1, 1 << 6, without_extension
    .long 1, 1 << 8, without_exchange
    .long 1, 1 << 9, without_controller
    .long 1, 1 << 13, without_global
    .long 1, 1 << 15, without_moves
    .long 1, 1 << 16, without_attributes
    .long 1, 1 << 23, without_small_vectors
    .long 1, 1 << 24, without_saving
    .long 1, 1 << 25, without_single_vectors
    .long 1, 1 << 26, without_vectors
    .long 0
without_long_mode:
    .asciz "panic this processor has no 64-bit mode (CPUID 80000001 EDX bit 29): the kernel needs it\n"
without_no_execute:
    .asciz "panic this processor has no no-execute bit (NX): the kernel needs it\n"
without_floats:
    .asciz "panic this processor has no floating-point unit (FPU): programs need it\n"
without_large_pages:
    .asciz "panic this processor has no large pages (PSE): the kernel needs them\n"
without_counter:
    .asciz "panic this processor has no time-stamp counter (TSC): the kernel needs it\n"
without_registers:
    .asciz "panic this processor has no model-specific registers (MSR): the kernel needs them\n"
without_extension:
    .asciz "panic this processor has no physical-address extension (PAE): the kernel needs it\n"
without_exchange:
    .asciz "panic this processor has no CMPXCHG8B (CX8): programs need it\n"
without_controller:
    .asciz "panic this processor has no local interrupt controller (APIC): the kernel needs it\n"
without_global:
    .asciz "panic this processor has no global pages (PGE): the kernel needs them\n"
without_moves:
    .asciz "panic this processor has no conditional moves (CMOV): the kernel needs them\n"
without_attributes:
    .asciz "panic this processor has no page attribute table (PAT): the kernel needs it\n"
without_small_vectors:
    .asciz "panic this processor has no MMX: programs need it\n"
without_saving:
    .asciz "panic this processor has no FXSAVE (FXSR): the kernel needs it\n"
without_single_vectors:
    .asciz "panic this processor has no SSE: programs need it\n"
without_vectors:
    .asciz "panic this processor has no SSE2: programs need it\n"
.code64
.text
"#, mark = const MARK.len());

/// `SYSCALL`, in EDX of leaf 0x8000_0001.
const CALLS: u32 = 1 << 11;

/// Ends the machine if programs cannot make system calls. Intel's processors report the feature in
/// 64-bit mode only.
pub(super) fn check_calls() {
    if cpu_features::leaf(0x8000_0001, 0).edx & CALLS != 0 {
        return;
    }
    let message = "this processor has no system calls (SYSCALL): programs need them\n";
    message.bytes().for_each(serial::write_console);
    MARK.bytes().chain(message.bytes()).for_each(control::write_control);
    control::power_off(Ended::Failed)
}
