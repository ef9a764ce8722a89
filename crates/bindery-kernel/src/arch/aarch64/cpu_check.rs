//! Features without which the kernel cannot run, checked before anything else.
//!
//! This is assembly, which runs with the MMU off. If the processor lacks a feature, the kernel says
//! so on the console and over the control channel, and the machine ends. Since the device tree is
//! not read yet, the console's address is that of QEMU's `virt`.

use core::arch::global_asm;

use super::control::semihosting::{APPLICATION_EXIT, EXIT_EXTENDED, WRITE_TEXT};
use super::page_tables;

/// The PL011 of QEMU's `virt`.
const CONSOLE: u64 = 0x0900_0000;

/// Prefix of a message on the control channel; the console gets only the message.
const MARK: &str = "panic ";

global_asm!(
    r#"
    .section .text.entry, "ax"
    // Returns if no feature is missing; changes x0 to x4.
    .global check_processor
check_processor:
    mrs     x1, id_aa64mmfr0_el1
    ubfx    x1, x1, #28, #4         // TGran4: all ones is none
    cmp     x1, #0xf
    adr     x0, without_small_pages
    b.eq    8f
    mrs     x1, id_aa64pfr0_el1
    ubfx    x2, x1, #16, #4         // FP: all ones is none
    cmp     x2, #0xf
    adr     x0, without_floats
    b.eq    8f
    ubfx    x2, x1, #20, #4         // AdvSIMD: all ones is none
    cmp     x2, #0xf
    adr     x0, without_vectors
    b.eq    8f
    ret

    // The same for the atomic instructions of another CPU than the first.
    .global check_atomics
check_atomics:
    mrs     x1, id_aa64isar0_el1
    ubfx    x1, x1, #20, #4         // Atomic: 2 is FEAT_LSE
    cmp     x1, #2
    b.hs    7f
    adrp    x1, {has_loops}
    ldrb    w1, [x1, :lo12:{has_loops}]
    adr     x0, without_atomics
    cbz     w1, 8f
7:  ret

8:  mov     x2, #{console}
    add     x1, x0, #{mark}
9:  ldrb    w3, [x1], #1
    cbz     w3, 11f
10: ldr     w4, [x2, #0x18]
    tbnz    w4, #5, 10b             // no room to send
    str     w3, [x2]
    b       9b
11: mov     x1, x0
    mov     w0, #{write}
    hlt     #0xf000
    adr     x1, failed
    mov     w0, #{exit}
    hlt     #0xf000
12: wfi
    b       12b

    .balign 8
failed:
    .quad   {application}, 1
without_atomics:
    .asciz  "panic this processor has no atomic instructions (FEAT_LSE), and the first one has them: the kernel needs them in all or in none\n"
without_small_pages:
    .asciz  "panic this processor has no pages of 4 KiB (ID_AA64MMFR0_EL1.TGran4): the kernel needs them\n"
without_floats:
    .asciz  "panic this processor has no floating point (ID_AA64PFR0_EL1.FP): programs need it\n"
without_vectors:
    .asciz  "panic this processor has no vectors (ID_AA64PFR0_EL1.AdvSIMD): programs need them\n"
    .balign 4
    "#,
    has_loops = sym page_tables::HAS_LOOPS,
    console = const CONSOLE,
    mark = const MARK.len(),
    write = const WRITE_TEXT,
    exit = const EXIT_EXTENDED,
    application = const APPLICATION_EXIT,
);
