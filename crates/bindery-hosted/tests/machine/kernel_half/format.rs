//! The entries of a kernel on each architecture, as handwritten bits.

use bindery::addr::Frame;
use bindery::arch::{AArch64, MemoryType, Riscv64, X86_64};
use bindery_hosted::Walk;

/// The bits of an architecture.
pub trait Format: Walk {
    /// A kernel leaf: readable, writable, not executable; accessed and dirty are set.
    const KERNEL: u64;
    /// The change that makes an entry executable and not writable.
    const CODE: fn(u64) -> u64;
    /// The same leaf for user mode.
    const USER: u64;
    /// The change that makes an entry clean.
    const CLEAN: fn(u64) -> u64;
    /// Memory behind write buffers, and devices.
    const WRITE_COMBINING: u64;
    const DEVICE: u64;
    /// The memory type that the device's bits decode to.
    const STRICTEST: MemoryType;

    /// The entry that refers to the table in `frame`.
    fn names(frame: Frame) -> u64;

    /// The leaf of `frame` at `level` with these bits.
    fn maps(frame: u64, level: u8, bits: u64) -> u64;
}

impl<const LEVELS: u8> Format for X86_64<LEVELS> {
    const KERNEL: u64 = 0x8000_0000_0000_0163;
    const CODE: fn(u64) -> u64 = |bits| bits & !(1 << 63 | 1 << 6 | 1 << 1);
    const USER: u64 = 0x8000_0000_0000_0067;
    const CLEAN: fn(u64) -> u64 = |bits| bits & !(1 << 6);
    const WRITE_COMBINING: u64 = 1 << 3;
    const DEVICE: u64 = 1 << 4 | 1 << 3;
    const STRICTEST: MemoryType = MemoryType::Uncached;

    fn names(frame: Frame) -> u64 {
        frame.start().0 | 0x27
    }

    fn maps(frame: u64, level: u8, bits: u64) -> u64 {
        frame << 12 | bits | if level > 1 { 1 << 7 } else { 0 }
    }
}

impl Format for AArch64 {
    /// AF, inner shareable, DBM, PXN, UXN; global.
    const KERNEL: u64 = 1 << 54 | 1 << 53 | 1 << 51 | 1 << 10 | 3 << 8 | 1;
    const CODE: fn(u64) -> u64 = |bits| bits & !(1 << 53 | 1 << 51) | 1 << 7;
    /// The same, not global and with AP[1].
    const USER: u64 = Self::KERNEL | 1 << 11 | 1 << 6;
    const CLEAN: fn(u64) -> u64 = |bits| bits | 1 << 7;
    const WRITE_COMBINING: u64 = 2 << 2;
    const DEVICE: u64 = 1 << 2;
    const STRICTEST: MemoryType = MemoryType::Device;

    fn names(frame: Frame) -> u64 {
        frame.start().0 | 3
    }

    fn maps(frame: u64, level: u8, bits: u64) -> u64 {
        frame << 12 | bits | if level == 1 { 2 } else { 0 }
    }
}

impl<const LEVELS: u8> Format for Riscv64<LEVELS> {
    const KERNEL: u64 = 0xe7;
    const CODE: fn(u64) -> u64 = |bits| bits & !(1 << 2) | 1 << 3;
    const USER: u64 = 0xd7;
    const CLEAN: fn(u64) -> u64 = |bits| bits & !(1 << 7);
    const WRITE_COMBINING: u64 = 1 << 61;
    const DEVICE: u64 = 2 << 61;
    const STRICTEST: MemoryType = MemoryType::Uncached;

    fn names(frame: Frame) -> u64 {
        u64::from(frame.0) << 10 | 1
    }

    fn maps(frame: u64, _level: u8, bits: u64) -> u64 {
        frame << 10 | bits
    }
}
