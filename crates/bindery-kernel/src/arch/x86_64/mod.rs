//! x86-64: PVH entry, ACPI tables, local APIC, 16550.
//!
//! Speculative side channels are open, because the kernel enables no mitigation and shares its
//! tables with programs. Programs that must not learn from each other need another kernel.

mod backtrace;
mod boot;
mod context;
mod control;
mod cpu_check;
mod cpu_features;
pub mod devices;
pub mod disk;
pub mod entry;
mod exceptions;
mod floating_point;
mod interrupts;
mod machine;
mod marks;
pub mod own_calls;
mod page_copy;
mod page_tables;
mod per_cpu;
mod probe;
mod protection_keys;
mod registers;
mod serial;
pub mod signal;
pub mod smp;
mod time;
mod tlb;
mod user_copy;

use x86_64::VirtAddr;
use x86_64::registers::model_specific::FsBase;

use super::Ended;

pub use backtrace::return_addresses;
pub use context::{Context, prepare, prepare_kernel, switch};
pub use control::{power_off, write_control};
pub use core::hint::spin_loop as pause;
pub use cpu_features::{
    branch_target_identification, hardware_capabilities, huge_page_sizes, random_word,
};
pub use floating_point::FloatingPoint;
pub use interrupts::{INTERRUPT_NAMES, after_sleep, interrupt, sleep};
pub use marks::{mark_begin, mark_end};
pub use page_copy::{copy, synchronize_instructions, zero};
pub use page_tables::{direct_map, kernel_root, largest_leaf, own_root};
pub use per_cpu::{cpu, loaded_space, running, set_kernel_stack, this_cpu};
pub use probe::{RETURN, break_control_bit, control_register, decode_fault};
pub use protection_keys::{key_rights, protection_keys, set_key_rights};
pub use registers::Registers;
pub use serial::{read_console, write_console};
pub use time::{nanoseconds, real_time, set_timer};
pub use tlb::{
    answer, answer_apart, invalidate, invalidate_kernel, invalidate_local, load_root, order_others,
    publish_entries, shoot_down, unload_root,
};

/// The tables that the MMU walks: four levels.
pub type EntryFormat = bindery::arch::X86_64;

/// `AT_PLATFORM`.
pub const PLATFORM_NAME: &str = "x86_64";

/// The end of programs' addresses.
const USER_END: u64 = <EntryFormat as bindery::arch::Arch>::USER_END;

/// The base of FS: the address of the running program's thread-local storage.
pub fn thread_pointer() -> u64 {
    // SAFETY: the register exists. Read raw: a program may have written any number to it
    // (`wrfsbase`), where the emulator lets it.
    unsafe { FsBase::MSR.read() }
}

/// Sets [`thread_pointer`]. A non-canonical address counts as 0.
pub fn set_thread_pointer(value: u64) {
    FsBase::write(VirtAddr::try_new(value).unwrap_or(VirtAddr::zero()));
}
