//! Zeroing and copying frames.

use core::arch::asm;

/// Fills with zeroes.
///
/// Eight bytes at a time: with fast string operations this is as fast as single bytes, and an
/// emulator, which executes each step, needs fewer steps.
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

/// No operation, because fetches see writes at once. The core never calls this function.
pub fn synchronize_instructions(_physical: u64, _length: u64) {}
