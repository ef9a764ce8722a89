//! A machine inside QEMU and all that goes into it.
//!
//! | module | what |
//! |---|---|
//! | [`architecture`] | the architectures, and what each is called by the tools |
//! | [`workspace`] | where the sources stand, and where what is built goes |
//! | [`toolchain`] | how to build for bare metal with the Rust that is installed |
//! | [`kernel`] | the kernel image and its symbols |
//! | [`programs`] | C programs for the machine |
//! | [`directives`] | what the source of a test program says about how it is run |
//! | [`executable`] | what an ELF file says about itself |
//! | [`busybox`] | Debian's static BusyBox |
//! | [`initramfs`] | the initial file system |
//! | [`command_line`] | the kernel's command line |
//! | [`linux`] | Debian's newest Linux, to compare with |
//! | [`machine`] | QEMU: started, watched, judged |
//! | [`packages`] | Debian packages that are fetched and unpacked aside |
//! | [`process`] | host programs that do a step of the work |
//! | [`requirements`] | the host programs that all this needs |
//!
//! The order of work: [`kernel::build`] and [`programs::build`] give files, an
//! [`initramfs::Initramfs`] and a [`command_line::CommandLine`] are filled, and
//! [`machine::Machine::run`] tells how it went.

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
