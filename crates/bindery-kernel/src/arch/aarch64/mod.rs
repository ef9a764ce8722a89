//! AArch64: arm64 boot protocol, device tree, GICv3, PL011.
//!
//! The kernel never takes an interrupt; the idle loop polls the controller instead. TLB
//! invalidations reach all CPUs by the hardware, so CPUs interrupt each other only for work and for
//! barriers.
//!
//! # What a real machine needs in addition
//! The kernel runs on QEMU, which keeps accesses of a CPU whose MMU is off coherent with its
//! caches. Hardware would need the boot tables cleaned before the MMU is enabled. Programs that
//! write code synchronize it themselves, as on Linux: they may read `CTR_EL0` and execute the
//! instructions.

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

use aarch64_cpu::registers::{Readable, TPIDR_EL0, Writeable};

pub use backtrace::return_addresses;
pub use context::{Context, prepare, prepare_kernel, switch};
pub use control::{power_off, write_control};
pub use cpu_features::{
    branch_target_identification, hardware_capabilities, huge_page_sizes, random_word,
};
pub use floating_point::FloatingPoint;
pub use interrupts::{INTERRUPT_NAMES, after_sleep, interrupt, pause, sleep};
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

/// The tables that the MMU walks: four levels, 4 KiB pages.
pub type EntryFormat = bindery::arch::AArch64;

/// `AT_PLATFORM`.
pub const PLATFORM_NAME: &str = "aarch64";

/// `TPIDR_EL0`: the address of the running program's thread-local storage.
pub fn thread_pointer() -> u64 {
    TPIDR_EL0.get()
}

/// Sets [`thread_pointer`].
pub fn set_thread_pointer(value: u64) {
    TPIDR_EL0.set(value);
}
