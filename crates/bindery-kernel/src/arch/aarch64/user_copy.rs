//! The routines behind [`super::super::user_copy`].
//!
//! The MMU checks the rights in the program's entries. With PAN off, the kernel may read what the
//! program may read and write what the program may write. (The kernel may also read pages that a
//! program may execute, since the core has no execute-only entries.) A fault leads to the end of
//! the routine. If the block crossed a page, the code there copies the bytes up to the end of the
//! first page. It returns how many bytes are left.
//!
//! Long copies use vector registers. Eight of them hold values of the program, which are saved on
//! the stack during the copy. The kernel is never interrupted, and a fault continues here.

use core::arch::global_asm;
use core::sync::atomic::{AtomicU64, Ordering};

use aarch64_cpu::registers::{ID_AA64MMFR1_EL1, Readable};

/// Bytes of one round of the vector loop.
const BLOCK: usize = 128;

/// From this length on, saving eight vector registers pays off.
const LONG: usize = 256;

global_asm!(
    r#"
    .arch_extension fp
    .arch_extension simd
    .macro  user_copy name, user    // x0: to, x1: from, x2: how many; x0: how many are left
    .global \name
\name:
    adrp    x3, {has_pan}
    ldr     x6, [x3, :lo12:{has_pan}]
    sub     x5, x1, x0
    cbz     x6, 1f
    .inst   0xd500409f              // msr pan, #0
1:  cmp     x2, #{long}
    b.lo    3f
    stp     q0, q1, [sp, #-128]!
    stp     q2, q3, [sp, #32]
    stp     q4, q5, [sp, #64]
    stp     q6, q7, [sp, #96]
\name\()_blocks:
2:  ldp     q0, q1, [x1]
    ldp     q2, q3, [x1, #32]
    ldp     q4, q5, [x1, #64]
    ldp     q6, q7, [x1, #96]
    stp     q0, q1, [x0]
    stp     q2, q3, [x0, #32]
    stp     q4, q5, [x0, #64]
    stp     q6, q7, [x0, #96]
    add     x1, x1, #{block}
    add     x0, x0, #{block}
    sub     x2, x2, #{block}
    cmp     x2, #{block}
    b.hs    2b
\name\()_blocks_end:
    ldp     q2, q3, [sp, #32]
    ldp     q4, q5, [sp, #64]
    ldp     q6, q7, [sp, #96]
    ldp     q0, q1, [sp], #128
3:  subs    x2, x2, #16
    b.lo    5f
\name\()_pairs:
4:  ldp     x3, x4, [x1], #16
    stp     x3, x4, [x0], #16
    subs    x2, x2, #16
    b.hs    4b
\name\()_pairs_end:
5:  adds    x2, x2, #16
    b.eq    7f
\name\()_bytes:
6:  ldrb    w3, [x1], #1
    strb    w3, [x0], #1
    subs    x2, x2, #1
    b.ne    6b
\name\()_bytes_end:
7:  cbz     x6, 8f
    .inst   0xd500419f              // msr pan, #1
8:  mov     x0, x2
    ret
\name\()_block_faults:
    ldp     q2, q3, [sp, #32]
    ldp     q4, q5, [sp, #64]
    ldp     q6, q7, [sp, #96]
    ldp     q0, q1, [sp], #128
    b       9f
\name\()_pair_faults:
    add     x2, x2, #16
9:  add     x1, x0, x5              // a load may have advanced, and no store
    neg     x4, \user
    ands    x4, x4, #4095           // bytes to the end of the page
    b.eq    7b
    cmp     x4, #{block}
    b.hs    7b                      // the block lies in one page: its first byte is refused
    cmp     x4, x2
    b.hi    7b
\name\()_end_of_page:
10: ldrb    w3, [x1], #1
    strb    w3, [x0], #1
    sub     x2, x2, #1
    subs    x4, x4, #1
    b.ne    10b
\name\()_end_of_page_end:
    b       7b
\name\()_byte_faults:
    b       7b
    .endm

    .section .text.user_copy, "ax"
    user_copy copy_to_program, x0
    user_copy copy_from_program, x1

    // x0: where, w1: old, w2: new; x0: the word, or -1
    .global exchange_in_program
exchange_in_program:
    adrp    x3, {has_pan}
    ldr     x6, [x3, :lo12:{has_pan}]
    cbz     x6, 1f
    .inst   0xd500409f              // msr pan, #0
1:
exchange_in_program_word:
    ldaxr   w4, [x0]
    cmp     w4, w1
    b.ne    2f
    stlxr   w5, w2, [x0]
    cbnz    w5, 1b
exchange_in_program_word_end:
2:  mov     w0, w4
3:  cbz     x6, 4f
    .inst   0xd500419f              // msr pan, #1
4:  ret
exchange_in_program_faults:
    mov     x0, #-1
    b       3b

    .section .rodata.user_copy, "a"
    .balign 8
    .global user_copy_faults
user_copy_faults:
    .irp    name, copy_to_program, copy_from_program
    .quad   \name\()_blocks, \name\()_blocks_end, \name\()_block_faults
    .quad   \name\()_pairs, \name\()_pairs_end, \name\()_pair_faults
    .quad   \name\()_bytes, \name\()_bytes_end, \name\()_byte_faults
    .quad   \name\()_end_of_page, \name\()_end_of_page_end, \name\()_byte_faults
    .endr
    .quad   exchange_in_program_word, exchange_in_program_word_end, exchange_in_program_faults
    .text
    "#,
    has_pan = sym HAS_PAN,
    long = const LONG,
    block = const BLOCK,
);

unsafe extern "C" {
    /// The first and the last instruction that may fault, and the address where a fault continues.
    static user_copy_faults: [[u64; 3]; 9];
}

/// Whether PAN is available (1 or 0). If it is, the processor refuses the kernel's accesses to
/// programs' pages unless PAN is cleared.
static HAS_PAN: AtomicU64 = AtomicU64::new(0);

/// Reads the processor's features.
pub(super) fn begin() {
    HAS_PAN.store(u64::from(ID_AA64MMFR1_EL1.read(ID_AA64MMFR1_EL1::PAN) != 0), Ordering::Relaxed);
}

/// The address at which a fault of the kernel at `instruction` continues, if the instruction may
/// fault.
pub(super) fn continuation(instruction: u64) -> Option<u64> {
    // SAFETY: the table above, which is never written.
    let faults = unsafe { &user_copy_faults };
    let found = faults.iter().find(|[from, to, _]| (*from..*to).contains(&instruction));
    found.map(|[_, _, then]| *then)
}
