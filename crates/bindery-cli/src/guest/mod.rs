//! A machine inside QEMU and all its inputs.
//!
//! | module | contents |
//! |---|---|
//! | [`architecture`] | the architectures, and their names in the tools |
//! | [`workspace`] | the directories of the sources and of build outputs |
//! | [`toolchain`] | builds for bare metal with the installed Rust |
//! | [`kernel`] | the kernel image and its symbols |
//! | [`programs`] | C programs for the machine |
//! | [`directives`] | directives in the source of a test program |
//! | [`executable`] | the properties of an ELF file |
//! | [`busybox`] | Debian's static BusyBox |
//! | [`initramfs`] | the initial file system |
//! | [`command_line`] | the kernel's command line |
//! | [`linux`] | Debian's newest Linux, to compare with |
//! | [`machine`] | QEMU: started, watched, judged |
//! | [`packages`] | Debian packages that are fetched and unpacked aside |
//! | [`process`] | host programs that do a step of the work |
//! | [`requirements`] | the required host programs |
//!
//! The order of work: [`kernel::build`] and [`programs::build`] create files, the caller fills an
//! [`initramfs::Initramfs`] and a [`command_line::CommandLine`], and [`machine::Machine::run`]
//! returns the outcome.

pub mod architecture;
pub mod busybox;
pub mod command_line;
pub mod directives;
pub mod executable;
pub mod initramfs;
pub mod kernel;
pub mod linux;
pub mod machine;
pub mod packages;
pub mod problem;
pub mod process;
pub mod programs;
pub mod requirements;
pub mod toolchain;
pub mod workspace;

pub use architecture::Architecture;
pub use problem::Problem;
