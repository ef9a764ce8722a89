//! Zeroing and copying whole frames; `memcpy` and its kin; instruction fetches that see what was
//! written (Arm ARM, B2.4.4 "Concurrent modification and execution of instructions", D7.5
//! "Caches").

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicUsize, Ordering};

use super::direct_map;

/// The number of bytes that one `DC ZVA` zeroes; 0 if the instruction cannot be used.
static BLOCK: AtomicUsize = AtomicUsize::new(0);

/// Blocks zeroed per round; a frame must be a whole number of rounds.
const ROUND: usize = 8;

/// Reads the size of the block that `DC ZVA` zeroes.
pub fn begin() {
    let identification: usize;
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {}, dczid_el0", out(reg) identification,
            options(nomem, nostack, preserves_flags));
    }
    let prohibited = identification & 1 << 4 != 0;
    let block = 4 << (identification & 0xf);
    BLOCK.store(if prohibited || block * ROUND > 4096 { 0 } else { block }, Ordering::Relaxed);
}

/// Fills with zeroes.
///
/// # Safety
/// 1. `length` bytes at `at` are the caller's to write.
/// 2. Address and length are multiples of 4,096.
#[inline]
pub unsafe fn zero(at: *mut u8, length: usize) {
    let block = BLOCK.load(Ordering::Relaxed);
    if block == 0 {
        // SAFETY: the caller's promise.
        return unsafe { at.write_bytes(0, length) };
    }
    // SAFETY: the caller's promise; whole rounds, so nothing behind the end is written.
    unsafe {
        asm!(
            "2:",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "dc zva, {at}", "add {at}, {at}, {block}",
            "cmp {at}, {end}",
            "b.lo 2b",
            at = inout(reg) at => _, block = in(reg) block, end = in(reg) at.add(length),
            options(nostack)
        );
    }
}

/// Copies.
///
/// # Safety
/// 1. `from` is valid for reads and `to` for writes of `length` bytes, and the two do not overlap.
/// 2. Both addresses and the length are multiples of 4,096.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise. The vector registers, which would take half the instructions,
    // hold a program's values here.
    unsafe {
        asm!(
            "2:",
            "ldp {a}, {b}, [{from}, #16]", "ldp {c}, {d}, [{from}, #32]",
            "ldp {e}, {f}, [{from}, #48]", "ldp {g}, {h}, [{from}], #64",
            "stp {a}, {b}, [{to}, #16]", "stp {c}, {d}, [{to}, #32]",
            "stp {e}, {f}, [{to}, #48]", "stp {g}, {h}, [{to}], #64",
            "ldp {a}, {b}, [{from}, #16]", "ldp {c}, {d}, [{from}, #32]",
            "ldp {e}, {f}, [{from}, #48]", "ldp {g}, {h}, [{from}], #64",
            "stp {a}, {b}, [{to}, #16]", "stp {c}, {d}, [{to}, #32]",
            "stp {e}, {f}, [{to}, #48]", "stp {g}, {h}, [{to}], #64",
            "cmp {to}, {end}",
            "b.lo 2b",
            from = inout(reg) from => _, to = inout(reg) to => _, end = in(reg) to.add(length),
            a = out(reg) _, b = out(reg) _, c = out(reg) _, d = out(reg) _,
            e = out(reg) _, f = out(reg) _, g = out(reg) _, h = out(reg) _,
            options(nostack)
        );
    }
}

/// Cleaning data caches to the point of unification is not needed.
const IDC: u64 = 1 << 28;
/// Invalidating instruction caches is not needed.
const DIC: u64 = 1 << 29;

/// Base-2 logarithms of words in the smallest line, in `CTR_EL0`.
const DATA_LINE: u32 = 16;
const INSTRUCTION_LINE: u32 = 0;

/// `CTR_EL0.L1Ip`: the instruction cache is physically indexed and tagged.
const PIPT: u64 = 0b11;

/// Makes instruction fetches of all CPUs see `length` bytes of memory from `physical` on, both
/// whole pages.
pub fn synchronize_instructions(physical: u64, length: u64) {
    synchronize_at(direct_map(physical).as_ptr().expose_provenance() as u64, length);
}

/// As [`synchronize_instructions`], for memory that the kernel has mapped at `start`.
#[inline(always)]
pub(super) fn synchronize_at(start: u64, length: u64) {
    let caches: u64;
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {}, ctr_el0", out(reg) caches, options(nomem, nostack, preserves_flags));
    }
    let lines = |position: u32| (start..start + length).step_by(4 << (caches >> position & 0xf));
    if caches & IDC == 0 {
        for line in lines(DATA_LINE) {
            // SAFETY: a write-back changes no content; the address is mapped.
            unsafe { asm!("dc cvau, {}", in(reg) line, options(nostack, preserves_flags)) };
        }
    }
    // SAFETY: orders accesses.
    unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    if caches & DIC == 0 {
        if caches >> 14 & 0b11 == PIPT {
            for line in lines(INSTRUCTION_LINE) {
                // SAFETY: drops cached copies of memory.
                unsafe { asm!("ic ivau, {}", in(reg) line, options(nostack, preserves_flags)) };
            }
        } else {
            // Programs fetch instructions at addresses outside the direct map. SAFETY: as above.
            unsafe { asm!("ic ialluis", options(nostack, preserves_flags)) };
        }
        // SAFETY: orders accesses.
        unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    }
    // SAFETY: as above.
    unsafe { asm!("isb", options(nostack, preserves_flags)) };
}

// `memcpy`, `memmove`, `memset`, `memcmp`: the compiler calls them for values that it does not move
// itself. Rust's own versions copy byte by byte up to the next multiple of eight; most calls here
// are too short for that to pay off.
//
// - The MMU is on, and memory is normal memory: accesses need not be aligned (`SCTLR_EL1.A` is 0).
// - A head and a tail that overlap replace single-byte accesses: 11 bytes take two accesses of
//   eight.
// - Every load of a short copy comes before its stores, so that it serves `memmove` too. A long
//   copy loads in advance the bytes that its loop does not reach.
global_asm!(
    r#"
    .section .text.memcpy, "ax"
    .global memmove, memcpy
    .type   memmove, @function
    .type   memcpy, @function
memmove:                            // x0: to, x1: from, x2: how many
    sub     x3, x0, x1
    cmp     x3, x2
    b.hs    memcpy
    cmp     x2, #32
    b.hi    6f                      // the end of the source would be overwritten
memcpy:
    add     x4, x1, x2              // the ends
    add     x5, x0, x2
    cmp     x2, #16
    b.lo    2f
    cmp     x2, #32
    b.hi    4f
    ldp     x6, x7, [x1]
    ldp     x8, x9, [x4, #-16]
    stp     x6, x7, [x0]
    stp     x8, x9, [x5, #-16]
    ret
2:  tbz     x2, #3, 3f              // 8 to 15
    ldr     x6, [x1]
    ldr     x7, [x4, #-8]
    str     x6, [x0]
    str     x7, [x5, #-8]
    ret
3:  tbz     x2, #2, 1f              // 4 to 7
    ldr     w6, [x1]
    ldr     w7, [x4, #-4]
    str     w6, [x0]
    str     w7, [x5, #-4]
    ret
1:  cbz     x2, 8f                  // 1 to 3: the first, the middle, the last
    lsr     x3, x2, #1
    ldrb    w6, [x1]
    ldrb    w7, [x1, x3]
    ldrb    w8, [x4, #-1]
    strb    w6, [x0]
    strb    w7, [x0, x3]
    strb    w8, [x5, #-1]
8:  ret
4:  ldp     x6, x7, [x4, #-32]      // the last 32, stored behind the loop
    ldp     x8, x9, [x4, #-16]
    mov     x3, x0
    sub     x2, x2, #32
5:  ldp     x10, x11, [x1], #32
    ldp     x12, x13, [x1, #-16]
    stp     x10, x11, [x3], #32
    stp     x12, x13, [x3, #-16]
    subs    x2, x2, #32
    b.hi    5b
    stp     x6, x7, [x5, #-32]
    stp     x8, x9, [x5, #-16]
    ret
6:  add     x4, x1, x2              // from the end; the first 32 are stored behind the loop
    add     x5, x0, x2
    ldp     x6, x7, [x1]
    ldp     x8, x9, [x1, #16]
    sub     x2, x2, #32
7:  ldp     x10, x11, [x4, #-16]
    ldp     x12, x13, [x4, #-32]!
    stp     x10, x11, [x5, #-16]
    stp     x12, x13, [x5, #-32]!
    subs    x2, x2, #32
    b.hi    7b
    stp     x6, x7, [x0]
    stp     x8, x9, [x0, #16]
    ret

    .section .text.memset, "ax"
    .global memset
    .type   memset, @function
memset:                             // x0: to, w1: the byte, x2: how many
    bfi     w1, w1, #8, #8
    bfi     w1, w1, #16, #16
    bfi     x1, x1, #32, #32
    add     x4, x0, x2
    cmp     x2, #16
    b.lo    4f
    stp     x1, x1, [x0]
    stp     x1, x1, [x4, #-16]
    subs    x2, x2, #32             // what lies between the two
    b.ls    3f
    add     x3, x0, #16
    subs    x2, x2, #64
    b.lo    2f
1:  stp     x1, x1, [x3]
    stp     x1, x1, [x3, #16]
    stp     x1, x1, [x3, #32]
    stp     x1, x1, [x3, #48]
    add     x3, x3, #64
    subs    x2, x2, #64
    b.hs    1b
2:  adds    x2, x2, #64
    b.eq    3f
5:  stp     x1, x1, [x3], #16
    subs    x2, x2, #16
    b.hi    5b
3:  ret
4:  tbz     x2, #3, 6f              // 8 to 15
    str     x1, [x0]
    str     x1, [x4, #-8]
    ret
6:  tbz     x2, #2, 7f              // 4 to 7
    str     w1, [x0]
    str     w1, [x4, #-4]
    ret
7:  cbz     x2, 3b                  // 1 to 3
    lsr     x3, x2, #1
    strb    w1, [x0]
    strb    w1, [x0, x3]
    strb    w1, [x4, #-1]
    ret

    .section .text.memcmp, "ax"
    .global memcmp, bcmp
    .type   memcmp, @function
    .type   bcmp, @function
memcmp:                             // x0, x1: what is compared, x2: how many
bcmp:
    subs    x2, x2, #8
    b.lo    2f
1:  ldr     x3, [x0], #8
    ldr     x4, [x1], #8
    cmp     x3, x4
    b.ne    4f
    subs    x2, x2, #8
    b.hs    1b
2:  adds    x2, x2, #8
    b.eq    5f
3:  ldrb    w3, [x0], #1
    ldrb    w4, [x1], #1
    subs    w3, w3, w4
    b.ne    6f
    subs    x2, x2, #1
    b.ne    3b
5:  mov     w0, wzr
    ret
6:  mov     w0, w3
    ret
4:  rev     x3, x3                  // the first byte that differs decides
    rev     x4, x4
    cmp     x3, x4
    cset    w0, hi
    csinv   w0, w0, wzr, hs
    ret
    .text
    "#
);
