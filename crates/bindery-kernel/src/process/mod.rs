//! Processes and threads.
//!
//! | file | what |
//! |---|---|
//! | [`state`] | a process, and what changes in its life |
//! | [`thread`] | a thread and its kernel stack |
//! | [`scheduler`] | which thread runs |
//! | [`cpus`] | the CPUs that run threads |
//! | [`ready`] | the run queue |
//! | [`wait_queue`] | sleep until an event |
//! | [`parking`] | sleep until a word of the kernel changes |
//! | [`table`] | all processes and threads, by number |
//! | [`program`] | an ELF program becomes an address space |
//! | [`properties`] | what a program says of its code |
//! | [`facts`] | facts about a program, for `/proc` |
//! | [`execute`] | `execve`, and the first program |
//! | [`clone`] | `fork`, `vfork`, `clone` |
//! | [`provoke`] | defects on purpose |
//! | [`barriers`] | `membarrier` |
//! | [`kill`] | the end of a process, as other threads ask for it |
//! | [`end`] | how threads, processes and the machine end |
//! | [`kernel_thread`] | threads of the kernel itself |
//! | [`background`] | the kernel's own thread: large folios of small ones |
//! | [`wait`] | `wait4` and `waitid` |
//! | [`futex`] | sleep until a word of a program's memory changes |
//! | [`signal`], [`deliver`] | signals: sent and pending; delivered |
//! | [`information`] | what a signal carries |
//! | [`clock`] | clocks and sleeps |
//! | [`timer`] | timers that send signals |
//! | [`limits`] | resource limits and usage |
//! | [`identity`] | groups, sessions |
//! | [`jobs`] | groups that have lost their shell |
//! | [`name`] | short names of threads |
//! | [`credentials`] | users, groups, capabilities |
//! | [`memory_shortage`] | the out-of-memory killer |
//! | [`random`] | random numbers |
//! | [`calls`] | the system calls, by number |
//!
//! # No preemption
//! The kernel is not preempted, and one CPU at a time runs it ([`crate::kernel_lock`]), so code
//! between two sleeps is atomic. Programs run on other CPUs meanwhile, and change their memory.
//! Each call of the core that allocates is a sleep, because reclaim yields the CPU; so is each copy
//! to or from a program. `docs/kernel.md` lists the consequences for each part. Most locks of this
//! directory only guard against reentry by their own holder; those of queues and signals are also
//! taken in the core, without the kernel's lock. No lock is held across a sleep, or while another
//! function acquires the same lock.

pub mod background;
mod barriers;
pub mod calls;
mod clock;
mod clone;
pub mod cpus;
mod credentials;
mod deliver;
mod end;
mod execute;
mod facts;
mod futex;
mod identity;
mod information;
mod jobs;
pub mod kernel_thread;
mod kill;
mod limits;
mod memory_shortage;
mod name;
pub mod parking;
mod program;
mod properties;
mod provoke;
pub mod random;
mod ready;
pub mod scheduler;
pub mod signal;
mod state;
mod table;
pub mod thread;
mod timer;
mod wait;
pub mod wait_queue;

pub use clock::{deadline_of_call, interrupted_until};
pub use credentials::{
    ALL as ALL_CAPABILITIES, Capability, Credentials, acting_as, credentials, may_look_into,
};
pub use deliver::{From, do_work};
pub use end::{audit, prepare_audits};
pub use execute::run_first;
pub use identity::{dying_space_behind, may_advise_others, space_behind, space_of};
pub use limits::{descriptor_limit, file_is_too_large, file_size_limit, locked_memory_limit};
pub use memory_shortage::{free_kept, memory_ran_out};
pub use scheduler::{current, with_space};
pub use state::Process;
pub use table::{
    MAXIMUM_IDS, all, created, find, find_behind, maximum_id, maximum_mappings, set_maximum_id,
    set_maximum_mappings, spaces,
};
pub use thread::{Thread, ThreadFiles};
pub use wait_queue::{Interrupted, WaitQueue};
