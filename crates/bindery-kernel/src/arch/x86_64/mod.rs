//! x86-64.
//!
//! | file | what |
//! |---|---|
//! | `boot` | from the PVH entry to `crate::start` |
//! | `required` | what the kernel cannot do without |
//! | `paging` | the kernel's tables, the direct map, the TLB |
//! | `features` | what of the processor is switched on |
//! | `local` | what each CPU has of its own: segments, stacks, the way in |
//! | `entry` | into the kernel and out of it; threads |
//! | `exceptions` | what an exception means |
//! | `floating_point` | x87, SSE, AVX |
//! | `protection_keys` | PKRU |
//! | `user_copy` | bytes from and to programs |
//! | `acpi` | CPUs and timers, as the firmware tells |
//! | `interrupts` | the local APIC |
//! | `time` | clocks and the timer |
//! | `other_cpus` | starting them |
//! | `devices` | the serial line, the control channel, power-off |
//! | `signal` | signal frames |
//!
//! Side channels of speculation are left open: no mitigation is switched on, and kernel and
//! programs share their tables. Whoever runs programs that must not learn from each other needs
//! another kernel.

mod acpi;
mod boot;
mod devices;
mod entry;
mod exceptions;
mod features;
mod floating_point;
mod interrupts;
mod local;
mod other_cpus;
mod paging;
mod protection_keys;
mod required;
pub mod signal;
mod time;
mod user_copy;

use core::arch::asm;

use linux_raw_sys::general::__NR_arch_prctl;
use x86_64::VirtAddr;
use x86_64::registers::model_specific::{FsBase, KernelGsBase};

use super::Ended;
use crate::errno::{Errno, Outcome};
use crate::user;

pub use devices::{power_off, read_console, write_console, write_control};
pub use entry::{Context, Registers, prepare, prepare_kernel, switch};
pub use features::random_word;
pub use floating_point::FloatingPoint;
pub use local::{cpu, set_kernel_stack};
pub use other_cpus::start_other_cpus;
pub use paging::{
    invalidate, invalidate_kernel, invalidate_local, kernel_root, largest_leaf, load_root,
    own_root, unload_root, window,
};
pub use protection_keys::{key_rights, protection_keys, set_key_rights};
pub use time::{nanoseconds, real_time, set_timer};
pub use user_copy::{copy_bytes, copy_from_user, copy_to_user};

/// The tables that the MMU walks: four levels.
pub type EntryFormat = bindery::arch::X86_64;

/// `AT_PLATFORM`.
pub const PLATFORM_NAME: &str = "x86_64";

/// `AT_HWCAP` (the features of CPUID leaf 1, EDX, that every x86-64 processor has) and `AT_HWCAP2`.
/// Programs ask the processor itself for more.
pub fn hardware_capabilities() -> [u64; 2] {
    [0x078b_fbff, 0]
}

/// Where programs' addresses end.
const USER_END: u64 = <EntryFormat as bindery::arch::Arch>::USER_END;

/// Fills with zeroes.
///
/// Eight bytes at a time: processors that have fast string operations are as fast so as byte by
/// byte, and an emulator, which makes one step after the other, is faster.
///
/// # Safety
/// `at` is valid for writes of `length` bytes, a multiple of 8.
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
/// `from` is valid for reads and `to` for writes of `length` bytes, a multiple of 8; the two do not
/// overlap.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise; the direction flag is clear everywhere in the kernel.
    unsafe {
        asm!("rep movsq", inout("rcx") length / 8 => _, inout("rsi") from => _,
            inout("rdi") to => _, options(nostack, preserves_flags));
    }
}

/// Nothing to do: walkers see writes in the order in which they were made, at once.
#[inline]
pub fn publish_entries() {}

/// Sets up what has registers in memory, and the clocks.
pub fn begin_devices() {
    let machine = acpi::machine();
    interrupts::begin(machine);
    time::calibrate(machine);
}

/// Tells who counts instructions that a phase begins: a long NOP (programs/include/mark.h).
#[inline(always)]
pub fn mark_begin<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe {
        asm!(".byte 0x0f, 0x1f, 0x84, 0x00", ".long {}", const 0x4d41_0000 | PHASE,
            options(nostack, preserves_flags));
    }
}

/// Tells that it ends.
#[inline(always)]
pub fn mark_end<const PHASE: u32>() {
    // SAFETY: does nothing.
    unsafe {
        asm!(".byte 0x0f, 0x1f, 0x84, 0x00", ".long {}", const 0x4d41_0800 | PHASE,
            options(nostack, preserves_flags));
    }
}

/// Sleeps until an interrupt has come, and been served.
pub fn wait_for_interrupt() {
    // One after the other: an interrupt that waits already is served behind `hlt`, which then ends.
    x86_64::instructions::interrupts::enable_and_hlt();
    x86_64::instructions::interrupts::disable();
}

/// The base of FS: where the running program has its thread-local storage.
pub fn thread_pointer() -> u64 {
    // SAFETY: the register exists. Read raw: a program may have written any number to it
    // (`wrfsbase`), where the emulator lets it.
    unsafe { FsBase::MSR.read() }
}

/// Sets [`thread_pointer`]; an address that is none is taken for 0.
pub fn set_thread_pointer(value: u64) {
    FsBase::write(VirtAddr::try_new(value).unwrap_or(VirtAddr::zero()));
}

/// `arch_prctl`, the one call that only x86-64 has.
pub fn call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    const ARCH_SET_GS: u64 = 0x1001;
    const ARCH_SET_FS: u64 = 0x1002;
    const ARCH_GET_FS: u64 = 0x1003;
    const ARCH_GET_GS: u64 = 0x1004;
    if number != __NR_arch_prctl {
        return None;
    }
    let [operation, address, ..] = arguments;
    let base = || if address < USER_END { Ok(VirtAddr::new(address)) } else { Err(Errno::EPERM) };
    Some(match operation {
        ARCH_SET_FS => base().map(FsBase::write).map(|()| 0),
        // In the kernel the program's GS is the other one (`swapgs`).
        ARCH_SET_GS => base().map(KernelGsBase::write).map(|()| 0),
        ARCH_GET_FS => user::write(address, &thread_pointer()).map(|()| 0),
        ARCH_GET_GS => {
            // SAFETY: as for FS.
            let base: u64 = unsafe { KernelGsBase::MSR.read() };
            user::write(address, &base).map(|()| 0)
        }
        _ => Err(Errno::EINVAL),
    })
}

/// Gives the addresses to which the functions above the caller return, the nearest first. Follows
/// the frame pointers as far as they lead through mapped memory of the kernel; from the stack of a
/// double fault they lead to another one.
pub fn return_addresses(mut each: impl FnMut(u64)) {
    const MOST: usize = 64;
    let mut frame: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rbp", out(reg) frame, options(nomem, nostack, preserves_flags)) };
    for _ in 0..MOST {
        if !frame.is_multiple_of(8)
            || !paging::is_mapped(frame)
            || !paging::is_mapped(frame.wrapping_add(8))
        {
            break;
        }
        // SAFETY: both words lie in pages that are mapped, and are only looked at.
        let [next, address] = unsafe { (frame as *const [u64; 2]).read_volatile() };
        if address == 0 {
            break;
        }
        each(address);
        frame = next;
    }
}
