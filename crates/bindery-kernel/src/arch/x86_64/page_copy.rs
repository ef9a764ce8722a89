//! Zeroing and copying frames.

use core::arch::asm;

/// Fills with zeroes.
///
/// Eight bytes at a time: processors that have fast string operations are as fast so as byte by
/// byte, and an emulator, which makes one step after the other, is faster.
///
/// # Safety
/// 1. `at` is valid for writes of `length` bytes, a multiple of 8.
#[inline]
pub unsafe fn zero(at: *mut u8, length: usize) {
    // SAFETY: the caller's promise; the direction flag is clear everywhere in the kernel.
    unsafe {
        asm!("rep stosq", inout("rcx") length / 8 => _, inout("rdi") at => _, in("rax") 0,
            options(nostack, preserves_flags));
    }
}

/// Copies.
///
/// # Safety
/// 1. `from` is valid for reads and `to` for writes of `length` bytes, a multiple of 8.
/// 2. The two do not overlap.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise; the direction flag is clear everywhere in the kernel.
    unsafe {
        asm!("rep movsq", inout("rcx") length / 8 => _, inout("rsi") from => _,
            inout("rdi") to => _, options(nostack, preserves_flags));
    }
}

/// Nothing to do: fetches see writes at once. The core does not ask.
pub fn synchronize_instructions(_physical: u64, _length: u64) {}
