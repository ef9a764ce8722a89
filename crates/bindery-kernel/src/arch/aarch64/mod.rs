//! AArch64.
//!
//! | file | what |
//! |---|---|
//! | `entry` | from the boot protocol to [`begin`]; other CPUs |
//! | `required` | what the kernel cannot do without |
//! | `device_tree` | memory, devices and CPUs, as the device tree tells |
//! | `tables` | the kernel's mappings, the direct map |
//! | `tlb` | the tables of programs, and what the TLBs remember |
//! | `exception` | into the kernel and out of it; what an exception means |
//! | `registers` | a thread's registers, floating-point state, switch |
//! | `signal` | signal frames |
//! | `frames` | zeroing and copying |
//! | `user_copy` | bytes from and to programs |
//! | `clock` | clocks and the timer |
//! | `interrupts` | the GICv3 |
//! | `serial` | the console |
//! | `firmware` | semihosting (control channel, power-off), PSCI |
//! | `processors` | starting the other CPUs |
//! | `capabilities` | what programs learn of the CPU |
//!
//! Interrupts are never taken in the kernel: the idle loop asks the controller itself.
//!
//! # What a real machine would need besides
//! The kernel is made for QEMU, which keeps instruction fetches and the accesses of a CPU whose
//! MMU is off coherent with data. A processor that does not (`CTR_EL0.DIC` or `IDC` clear) needs
//! `DC CVAU` and `IC IVAU` for pages that the kernel has filled before a program first runs them,
//! and cleaning of the boot tables before the MMU is on. Programs that write code of their own do
//! the former themselves, as on Linux: `CTR_EL0` and the instructions are theirs to use.

mod capabilities;
mod clock;
mod device_tree;
mod entry;
mod exception;
mod firmware;
mod frames;
mod interrupts;
mod processors;
mod registers;
mod required;
mod serial;
pub mod signal;
mod tables;
mod tlb;
mod user_copy;

use core::arch::asm;
use core::ptr::NonNull;

use aarch64_cpu::registers::{PAR_EL1, Readable, TPIDR_EL0, TPIDR_EL1, Writeable};

use bindery::arch::KeyRights;

use crate::errno::Outcome;

pub use capabilities::{hardware_capabilities, random_word};
pub use clock::{nanoseconds, real_time, set_timer};
pub use device_tree::begin_devices;
pub use firmware::{power_off, write_control};
pub use frames::{copy, zero};
pub use interrupts::wait_for_interrupt;
pub use processors::{cpu, start_other_cpus};
pub use registers::{
    Context, FloatingPoint, Registers, prepare, prepare_kernel, set_kernel_stack, switch,
};
pub use serial::{read_console, write_console};
pub use tables::own_root;
pub use tlb::{
    invalidate, invalidate_kernel, invalidate_local, kernel_root, load_root, publish_entries,
    unload_root,
};

pub use user_copy::{copy_bytes, copy_from_user, copy_to_user};

/// The highest level of a leaf that the processor takes.
pub fn largest_leaf() -> u8 {
    3
}

/// The tables that the MMU walks: four levels, 4 KiB pages.
pub type EntryFormat = bindery::arch::AArch64;

/// `AT_PLATFORM`.
pub const PLATFORM_NAME: &str = "aarch64";

/// Where the entry code ends: the image runs where it was linked, and nothing else is mapped.
/// `device_tree` and `image` are physical addresses.
extern "C" fn begin(device_tree: u64, image: u64) -> ! {
    tables::begin(image);
    TPIDR_EL1.set(0); // this is CPU 0
    frames::begin();
    user_copy::begin();
    tlb::begin();
    crate::start(&device_tree::read(device_tree))
}

/// Where the kernel reads and writes physical memory.
#[inline]
pub fn window(physical: u64) -> NonNull<u8> {
    // SAFETY: the direct map does not begin at 0.
    unsafe { NonNull::new_unchecked(tables::direct(physical)) }
}

/// Tells who counts instructions that a phase begins: a move to the zero register
/// (programs/include/mark.h).
#[inline(always)]
pub fn mark_begin<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe { asm!("movz xzr, #{}", const 0x5000 | PHASE, options(nostack, preserves_flags)) };
}

/// Tells that it ends.
#[inline(always)]
pub fn mark_end<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe { asm!("movz xzr, #{}", const 0x5800 | PHASE, options(nostack, preserves_flags)) };
}

/// `TPIDR_EL0`: where the running program has its thread-local storage.
pub fn thread_pointer() -> u64 {
    TPIDR_EL0.get()
}

/// Sets [`thread_pointer`].
pub fn set_thread_pointer(value: u64) {
    TPIDR_EL0.set(value);
}

/// There are no protection keys: permission overlays (FEAT_S1POE) are not used.
#[inline]
pub fn protection_keys() -> u8 {
    1
}

/// Nothing is forbidden by keys.
#[inline]
pub fn key_rights() -> KeyRights {
    KeyRights::ALL
}

/// Nobody has keys, so nobody asks.
pub fn set_key_rights(_rights: KeyRights) {}

/// AArch64 has no system calls of its own.
pub fn call(_number: u32, _arguments: [u64; 6]) -> Option<Outcome> {
    None
}

/// Gives the addresses to which the functions above the caller return, the nearest first. Follows
/// the frame pointers as far as they lead through mapped memory of the kernel; from the stack for
/// those that have run over they lead to another one.
pub fn return_addresses(mut each: impl FnMut(u64)) {
    const MOST: usize = 64;
    let mut frame: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, x29", out(reg) frame, options(nomem, nostack, preserves_flags)) };
    // A frame is two words, and aligned by as much: it lies in one page.
    for _ in 0..MOST {
        if !frame.is_multiple_of(16) || !is_readable(frame) {
            break;
        }
        let words = core::ptr::with_exposed_provenance::<[usize; 2]>(frame);
        // SAFETY: the page is mapped, and only looked at.
        let [next, address] = unsafe { words.read_volatile() };
        if address == 0 {
            break;
        }
        each(address as u64);
        frame = next;
    }
}

/// Whether the kernel can read at an address of its half.
fn is_readable(address: usize) -> bool {
    const FAILED: u64 = 1;
    if (address as u64) < tables::DIRECT {
        return false;
    }
    // SAFETY: asks the MMU; changes nothing but PAR_EL1, which nobody else uses.
    unsafe { asm!("at s1e1r, {}", "isb", in(reg) address, options(nostack, preserves_flags)) };
    PAR_EL1.get() & FAILED == 0
}
