//! What an architecture brings. Each submodule gives the same names; the rest of the kernel uses
//! them through this one, and holds no instruction of its own.
//!
//! | name | what |
//! |---|---|
//! | `EntryFormat` | the core's [`bindery::arch`] type of the tables |
//! | `window(physical) -> NonNull<u8>` | the direct map |
//! | `zero`, `copy` | the fastest plain instructions |
//! | `copy_to_user`, `copy_from_user` | by addresses of the running program, until the first fault |
//! | `copy_bytes` | any bytes of the kernel's, those that programs change among them |
//! | `kernel_root() -> Option<Frame>` | the table whose upper half new roots copy; `None` with separate roots |
//! | `own_root() -> Frame` | the table of the highest level for the kernel's own addresses |
//! | `largest_leaf() -> u8` | the highest level of a leaf that the processor takes |
//! | `begin_devices()` | maps and sets up what needs memory to be mapped; time works afterwards |
//! | `load_root(Frame)`, `unload_root()` | the tables of a program; those of none |
//! | `invalidate(root, &Invalidation)` | this CPU's TLB (AArch64: all CPUs') |
//! | `invalidate_kernel(&Invalidation)` | all CPUs' TLBs, for addresses of the kernel |
//! | `invalidate_local(root, &Invalidation)` | this CPU's TLB, of a program's or the kernel's few addresses |
//! | `publish_entries()` | makes table writes visible to walkers |
//! | `cpu() -> u16` | the CPU that asks |
//! | `start_other_cpus(count)` | starts them; each says so on the console, and is idle from then on |
//! | `wait_for_interrupt()` | interrupts on, sleep, off again: called by the idle loop |
//! | `nanoseconds() -> u64` | since power-on, monotonic |
//! | `real_time() -> u64` | seconds since 1970 by the machine's clock, read at boot |
//! | `set_timer(Option<u64>)` | the next timer interrupt of this CPU, in [`nanoseconds`] |
//! | `write_console`, `read_console` | the serial line; reading gives `None` where nothing has come |
//! | `write_control` | a byte for the control channel |
//! | `power_off(failed: Ended) -> !` | ends the machine |
//! | `Registers` | a program's registers, as they lie on the thread's kernel stack |
//! | `FloatingPoint` | a thread's floating-point state: `new`, `save`, `restore` |
//! | `Context`, `switch` | what the kernel keeps of a thread that does not run |
//! | `prepare(stack_top, &Registers) -> Context` | a thread that begins in its program with those |
//! | `prepare_kernel(stack_top, entry) -> Context` | a thread of the kernel's own, which begins with `entry` |
//! | `set_kernel_stack(top)` | where this CPU enters the kernel from a program |
//! | `thread_pointer()`, `set_thread_pointer(u64)` | the TLS register of the running thread |
//! | `protection_keys() -> u8` | how many there are; 1 where there are none |
//! | `key_rights() -> KeyRights`, `set_key_rights` | what the running thread may do with each |
//! | `signal` | `push` and `pop` of signal frames as the C libraries know them |
//! | `call` | system calls that only this architecture has |
//! | `hardware_capabilities() -> [u64; 2]`, `PLATFORM_NAME` | what programs learn of the CPU: `AT_HWCAP`, `AT_HWCAP2`, `AT_PLATFORM` |
//! | `random_word() -> Option<u64>` | from the CPU's generator, if it has one |
//! | `mark_begin`, `mark_end` | what does nothing, and is known to who counts instructions |
//! | `return_addresses(FnMut(u64))` | the frames above the caller, for a panic |

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

/// How the machine ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The first program has ended with this status.
    Program(u8),
    /// The kernel has failed.
    Failed,
}
