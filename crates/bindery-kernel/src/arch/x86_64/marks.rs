//! Marks around a measured phase, for a tool that counts instructions.

use core::arch::asm;

/// Marks the beginning of a phase for a tool that counts instructions: a long NOP
/// (programs/include/mark.h).
#[inline(always)]
pub fn mark_begin<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe {
        asm!(".byte 0x0f, 0x1f, 0x84, 0x00", ".long {}", const 0x4d41_0000 | PHASE,
            options(nostack, preserves_flags));
    }
}

/// Marks the end of the phase.
#[inline(always)]
pub fn mark_end<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe {
        asm!(".byte 0x0f, 0x1f, 0x84, 0x00", ".long {}", const 0x4d41_0800 | PHASE,
            options(nostack, preserves_flags));
    }
}
