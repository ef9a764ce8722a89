//! The marks that `tools/conflicts/plugin.c` finds: instructions that do nothing.

use std::arch::asm;

/// One of the two operations of a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// The operation that runs first.
    First,
    /// The operation that the plugin compares with the first.
    Second,
}

/// Executes the mark `NUMBER`.
#[inline(always)]
fn mark<const NUMBER: u16>() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a NOP of eight bytes; its displacement holds the number and two fixed bytes.
    unsafe {
        asm!(
            ".byte 0x0F, 0x1F, 0x84, 0x00",
            ".short {number}",
            ".byte 0x41, 0x4D",
            number = const NUMBER
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a move to the register that is always zero.
    unsafe {
        asm!("movz xzr, #{number}", number = const 0x5000 + NUMBER);
    }
}

/// Runs `operation` between the marks of its turn.
#[inline(never)]
pub fn marked(turn: Turn, operation: impl FnOnce()) {
    match turn {
        Turn::First => {
            mark::<1>();
            operation();
            mark::<3>();
        }
        Turn::Second => {
            mark::<2>();
            operation();
            mark::<4>();
        }
    }
}
