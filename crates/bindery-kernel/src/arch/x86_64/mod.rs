//! x86-64: entered by PVH, with ACPI tables, a local APIC and a 16550.
//!
//! Side channels of speculation are open: the kernel enables no mitigation, and kernel and programs
//! share their tables. Programs that must not learn from each other need another kernel.

mod backtrace;
mod boot;
mod context;
mod control;
mod cpu_check;
mod cpu_features;
mod entry;
mod exceptions;
mod floating_point;
mod interrupts;
mod machine;
mod marks;
mod page_copy;
mod page_tables;
mod per_cpu;
mod probe;
mod protection_keys;
mod serial;
pub mod signal;
mod smp;
mod time;
mod tlb;
mod user_copy;

use linux_raw_sys::general::__NR_arch_prctl;
use x86_64::VirtAddr;
use x86_64::registers::model_specific::{FsBase, KernelGsBase};

use super::Ended;
use crate::errno::{Errno, Outcome};
use crate::user;

pub use backtrace::return_addresses;
pub use context::{Context, prepare, prepare_kernel, switch};
pub use control::{power_off, write_control};
pub use cpu_features::{
    branch_target_identification, hardware_capabilities, huge_page_sizes, random_word,
};
pub use entry::Registers;
pub use floating_point::FloatingPoint;
pub use interrupts::wait_for_interrupt;
pub use marks::{mark_begin, mark_end};
pub use page_copy::{copy, synchronize_instructions, zero};
pub use page_tables::{direct_map, kernel_root, largest_leaf, own_root};
pub use per_cpu::{cpu, set_kernel_stack};
pub use probe::{RETURN, break_control_bit, control_register, told};
pub use protection_keys::{key_rights, protection_keys, set_key_rights};
pub use serial::{read_console, write_console};
pub use smp::start_other_cpus;
pub use time::{nanoseconds, real_time, set_timer};
pub use tlb::{
    invalidate, invalidate_kernel, invalidate_local, load_root, publish_entries, unload_root,
};

/// The tables that the MMU walks: four levels.
pub type EntryFormat = bindery::arch::X86_64;

/// `AT_PLATFORM`.
pub const PLATFORM_NAME: &str = "x86_64";

/// Where programs' addresses end.
const USER_END: u64 = <EntryFormat as bindery::arch::Arch>::USER_END;

/// Sets up what has registers in memory, and the clocks.
pub fn begin_devices() {
    let machine = machine::get();
    interrupts::begin(machine);
    time::calibrate(machine);
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
