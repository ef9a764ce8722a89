//! Zeroing and copying whole frames; instruction fetches that see what was written (Arm ARM, B2.4.4
//! "Concurrent modification and execution of instructions", D7.5 "Caches").

use core::arch::asm;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::direct_map;

/// The bytes that one `DC ZVA` zeroes; 0 where it cannot be used.
static BLOCK: AtomicUsize = AtomicUsize::new(0);

/// Blocks that are zeroed in one round; a frame must be whole rounds.
const ROUND: usize = 8;

/// Asks the CPU what `DC ZVA` does.
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

/// Cleaning data caches to the point of unification is not needed.
const IDC: u64 = 1 << 28;
/// Invalidating instruction caches is not needed.
const DIC: u64 = 1 << 29;

/// Base-2 logarithms of words in the smallest line, in `CTR_EL0`.
const DATA_LINE: u32 = 16;
const INSTRUCTION_LINE: u32 = 0;

/// `CTR_EL0.L1Ip`: an instruction cache that is looked up by physical addresses alone.
const PIPT: u64 = 0b11;

/// Makes instruction fetches of all CPUs see `length` bytes of memory from `physical` on, both
/// whole pages.
pub fn synchronize_instructions(physical: u64, length: u64) {
    let start = direct_map(physical).as_ptr().expose_provenance() as u64;
    let caches: u64;
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {}, ctr_el0", out(reg) caches, options(nomem, nostack, preserves_flags));
    }
    let lines = |position: u32| (start..start + length).step_by(4 << (caches >> position & 0xf));
    if caches & IDC == 0 {
        for line in lines(DATA_LINE) {
            // SAFETY: writes back what memory holds anyway; the direct map has the address.
            unsafe { asm!("dc cvau, {}", in(reg) line, options(nostack, preserves_flags)) };
        }
    }
    // SAFETY: orders accesses.
    unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    if caches & DIC == 0 {
        if caches >> 14 & 0b11 == PIPT {
            for line in lines(INSTRUCTION_LINE) {
                // SAFETY: forgets copies of what is in memory.
                unsafe { asm!("ic ivau, {}", in(reg) line, options(nostack, preserves_flags)) };
            }
        } else {
            // Programs fetch by other addresses than those of the direct map.
            // SAFETY: as above.
            unsafe { asm!("ic ialluis", options(nostack, preserves_flags)) };
        }
        // SAFETY: orders accesses.
        unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    }
    // SAFETY: as above.
    unsafe { asm!("isb", options(nostack, preserves_flags)) };
}
