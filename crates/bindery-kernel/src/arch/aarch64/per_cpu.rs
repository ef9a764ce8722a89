//! The state of each CPU: its number, in `TPIDR_EL1`.

use aarch64_cpu::registers::{Readable, TPIDR_EL1, Writeable};

/// Sets the number of the calling CPU.
pub fn begin(number: u64) {
    TPIDR_EL1.set(number);
}

/// The number of the calling CPU.
#[inline]
pub fn cpu() -> u16 {
    TPIDR_EL1.get() as u16
}

/// No operation: the CPU retains SP_EL1, so an exception enters the kernel on the stack that it
/// left.
#[inline]
pub fn set_kernel_stack(_top: *mut u8) {}
