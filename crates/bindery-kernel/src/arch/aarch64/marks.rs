//! Marks around a measured phase, for a tool that counts instructions.

use core::arch::asm;

/// Marks the beginning of a phase for a tool that counts instructions: a move to the zero register
/// (programs/include/mark.h).
#[inline(always)]
pub fn mark_begin<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe { asm!("movz xzr, #{}", const 0x5000 | PHASE, options(nostack, preserves_flags)) };
}

/// Marks the end of the phase.
#[inline(always)]
pub fn mark_end<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe { asm!("movz xzr, #{}", const 0x5800 | PHASE, options(nostack, preserves_flags)) };
}
