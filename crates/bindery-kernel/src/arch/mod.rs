//! The architectures. Each submodule exports the same names; the rest of the kernel uses them
//! through this one, and holds no instruction of its own.
//!
//! Both, `x86_64` and `aarch64`, have the same files:
//!
//! | file | what |
//! |---|---|
//! | `x86_64`, `aarch64` | the two |
//! | `boot_tables` | for both: the mappings that the kernel makes at boot |
//! | `cpu_record` | for both: the record of a CPU |
//! | `shootdowns` | for both: requests of one CPU to others |
//! | `interrupt_counts` | for both: the interrupts that CPUs have sent to each other |
//! | `delivery` | for both: what a signal frame is made of |
//! | `exclusives` | for AArch64: loops instead of atomic instructions that the processor lacks |
//! | `boot` | from the boot protocol to [`crate::start`] |
//! | `cpu_check` | features without which the kernel cannot run |
//! | `cpu_features` | optional features that it uses; `AT_HWCAP` |
//! | `machine` | memory, CPUs and devices, by ACPI or the device tree |
//! | `page_tables` | the kernel's own tables, the direct map |
//! | `tlb` | the table root that is loaded, TLB invalidation |
//! | `registers` | a program's [`Registers`] while it is in the kernel |
//! | `entry` | entry from a program and return to it |
//! | `exceptions` | what an exception means |
//! | `user_copy` | copies from and to programs |
//! | `probe` | single accesses that may fault, and control registers, for the self-test |
//! | `signal` | signal frames |
//! | `context` | threads: [`Context`], [`switch`] |
//! | `floating_point` | a thread's floating-point state |
//! | `protection_keys` | a thread's rights to protection keys |
//! | `per_cpu` | what each CPU has of its own |
//! | `own_calls` | system calls that only one architecture has |
//! | `devices` | devices whose registers the kernel map has |
//! | `disk` | the virtio device that is the disk |
//! | `smp` | the start of the other CPUs |
//! | `interrupts` | the local APIC or the GICv3 |
//! | `time` | clocks and the timer |
//! | `serial` | the console |
//! | `control` | the control channel to the host, power-off |
//! | `page_copy` | zeroing and copying frames; `memcpy` and its kin (AArch64); instruction caches |
//! | `backtrace` | return addresses, for a panic |
//! | `marks` | marks for a tool that counts instructions |
//!
//! They export:
//!
//! | name | what |
//! |---|---|
//! | `EntryFormat` | the core's [`bindery::arch`] type of the tables |
//! | `direct_map(physical) -> NonNull<u8>` | where the kernel reads and writes physical memory |
//! | `zero`, `copy` | whole frames, by the fastest plain instructions |
//! | `copy_to_user`, `copy_from_user` | by addresses of the running program, until the first fault |
//! | `exchange_in_user(at, old, new)` | one word of the running program, in one step |
//! | `probe::load`, `store`, `call` | one access that may fault, of the self-test at boot |
//! | `RETURN` | instructions that return to their caller at once |
//! | `decode_fault(u64) -> AccessFault` | what the processor says of a fault |
//! | `control_register(Register) -> Option<u64>` | a control register of the calling CPU |
//! | `break_control_bit()` | breaks the machine, to show that the self-test finds it |
//! | `copy_bytes` | any bytes of the kernel, also bytes that a program may change meanwhile |
//! | `kernel_root() -> Option<Frame>` | the table whose upper half new roots copy; `None` with separate roots |
//! | `own_root() -> Frame` | the root table of the kernel's own addresses |
//! | `largest_leaf() -> Level<EntryFormat>` | the highest level at which the processor takes a leaf |
//! | `devices::begin()` | maps and sets up devices once memory can be mapped; time works afterwards |
//! | `disk::find()`, `disk::Found` | the disk, its transport, and the route of its interrupt |
//! | `load_root(Frame)`, `unload_root()` | loads a program's tables; loads those of no program |
//! | `invalidate(root, &Invalidation)` | this CPU's TLB (AArch64: all CPUs' TLBs) |
//! | `shoot_down(root, &CpuSet, &Invalidation)` | the TLBs of several CPUs |
//! | `invalidate_kernel(&Invalidation)` | all CPUs' TLBs, for addresses of the kernel |
//! | `invalidate_local(root, &Invalidation)` | this CPU's TLB, for a few addresses of a program or the kernel |
//! | `synchronize_instructions(physical, length)` | instruction fetches of all CPUs see what was written |
//! | `publish_entries()` | makes table writes visible to walkers |
//! | `cpu() -> u16` | the number of the calling CPU |
//! | `this_cpu() -> &CpuRecord` | the record of the calling CPU |
//! | `running() -> *mut ()` | the running thread, from that record |
//! | `loaded_space() -> *mut ()` | the loaded address space, from that record |
//! | `smp::start_other_cpus(count)` | starts the other CPUs; each reports on the console and idles |
//! | `sleep()` | sleeps until an interrupt arrives: the idle loop, without the kernel's lock |
//! | `after_sleep() -> bool` | with the lock: whether the caller has to serve the timer |
//! | `interrupt(cpu)` | makes another CPU look for work |
//! | `INTERRUPT_NAMES` | the reasons for interrupts of other CPUs, as `/proc/interrupts` shows them |
//! | `answer()` | answers requests of other CPUs, while this one waits with interrupts off |
//! | `answer_apart()` | the same, without a register that its caller has to save |
//! | `order_others()` | a barrier on all other CPUs |
//! | `nanoseconds() -> u64` | since power-on, monotonic |
//! | `real_time() -> u64` | seconds since 1970 by the machine's clock, read at boot |
//! | `set_timer(Option<u64>)` | the next timer interrupt of this CPU, in [`nanoseconds`] |
//! | `write_console`, `read_console` | the serial line; reading gives `None` where no byte has come |
//! | `write_control` | sends a byte over the control channel |
//! | `power_off(Ended) -> !` | ends the machine |
//! | `Registers` | a program's registers, as they lie on the thread's kernel stack |
//! | `FloatingPoint` | a thread's floating-point state: `new`, `save`, `restore` |
//! | `Context`, `switch` | the kernel context of a thread that does not run |
//! | `prepare(stack_top, &Registers) -> Context` | a thread that begins in its program with these registers |
//! | `prepare_kernel(stack_top, entry) -> Context` | a kernel thread, which begins with `entry` |
//! | `set_kernel_stack(top)` | the stack on which this CPU enters the kernel from a program |
//! | `thread_pointer()`, `set_thread_pointer(u64)` | the TLS register of the running thread |
//! | `protection_keys() -> u8` | the number of protection keys; 1 where there are none |
//! | `branch_target_identification() -> bool` | whether branches into guarded pages are checked |
//! | `key_rights() -> KeyRights`, `set_key_rights` | the running thread's rights to each key |
//! | `signal` | `push` and `pop` of signal frames as the C libraries know them |
//! | `own_calls::call` | system calls that only this architecture has |
//! | `hardware_capabilities() -> [u64; 2]`, `PLATFORM_NAME` | `AT_HWCAP`, `AT_HWCAP2`, `AT_PLATFORM` |
//! | `huge_page_sizes() -> &[u32]` | the sizes of hugetlb pools, as binary logarithms |
//! | `random_word() -> Option<u64>` | from the CPU's generator, if it has one |
//! | `mark_begin`, `mark_end` | no operation; a tool that counts instructions knows the encoding |
//! | `return_addresses(FnMut(u64))` | the return addresses above the caller, for a panic |

mod boot_tables;
mod cpu_record;
pub mod delivery;
#[cfg(target_arch = "aarch64")]
mod exclusives;
pub mod interrupt_counts;
pub mod probe;
mod shootdowns;
mod user_copy;

pub use cpu_record::CpuRecord;
pub use shootdowns::others;
pub use user_copy::{copy_bytes, copy_from_user, copy_to_user, exchange_in_user};

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::*;

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use self::x86_64::*;

#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
compile_error!("the kernel runs on x86-64 and AArch64; RISC-V follows");

/// The end of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The first program has ended with this status.
    Program(u8),
    /// The kernel has failed.
    Failed,
}
