//! Zeroing and copying whole frames.

use core::arch::asm;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The bytes that one `DC ZVA` zeroes; 0 where it cannot be used.
static BLOCK: AtomicUsize = AtomicUsize::new(0);

/// Blocks that are zeroed in one round; a frame must be whole rounds.
const ROUND: usize = 8;

/// Asks the CPU what `DC ZVA` does.
pub fn begin() {
    let identification: usize;
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {}, dczid_el0", out(reg) identification, options(nomem, nostack, preserves_flags));
    }
    let prohibited = identification & 1 << 4 != 0;
    let block = 4 << (identification & 0xf);
    BLOCK.store(if prohibited || block * ROUND > 4096 { 0 } else { block }, Ordering::Relaxed);
}

/// Fills with zeroes.
///
/// # Safety
/// `length` bytes at `at` are the caller's to write; both are multiples of 4,096.
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
/// `length` bytes at `from` may be read, as many at `to` are the caller's to write, and the two do
/// not overlap; all are multiples of 4,096.
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
