//! The reference kernel of Bindery: it boots in QEMU and runs static Linux programs unmodified. All
//! memory management is the crate `bindery`, used through its public interface.
//!
//! It is an embedder like any other. [`platform`] implements the memory-management interface; the
//! rest is processes ([`process`]), files ([`files`]), and the machine ([`arch`]).
//!
//! # One rule that makes it small
//! Programs and the core run on all CPUs, and one CPU at a time is in the rest of the kernel
//! ([`kernel_lock`]). In all of it interrupts are off and nothing is preempted: a thread yields the
//! CPU only when it sleeps ([`process::scheduler`]), or on the return to its program. So a read
//! section of the core needs no bookkeeping, and a fault in the kernel is always a defect of the
//! kernel.
//!
//! # Layers
//! A layer may name only itself and the layers before it, in every `use` and every path. A test of
//! the core reads this table (`crates/bindery/tests/layers/main.rs`). A lower layer that has to
//! call a higher one has a trait for it, which the higher one implements and registers at boot
//! (`services`).
//!
//! | modules | idea |
//! |---|---|
//! | `boot`, `errno`, `options`, `symbols` | boot facts and error numbers |
//! | `arch`, `console`, `control` | the machine: CPU, tables, clocks, serial line |
//! | `kernel_lock`, `sync`, `time`, `heap` | locks, timers, the kernel's heap |
//! | `platform`, `memory`, `memory_functions` | memory management: the core's platform, kernel mappings |
//! | `arch::x86_64::disk`, `arch::aarch64::disk`, `disk` | the driver of the disk |
//! | `user`, `arch::aarch64::signal`, `arch::x86_64::signal`, `arch::aarch64::own_calls`, `arch::x86_64::own_calls`, `arch::aarch64::devices`, `arch::x86_64::devices`, `self_test` | memory of programs; the frames of signals |
//! | `process::facts`, `process::state`, `process::thread`, `process::cpus`, `process::ready`, `process::scheduler`, `process::parking`, `process::wait_queue`, `process::information`, `process::signal`, `process::kill`, `process::table`, `process::credentials`, `process::limits`, `process::name`, `process::clock`, `process::timer`, `process::barriers`, `process::memory_shortage` | processes and threads: scheduler, sleep, signals, credentials, limits, timers |
//! | `process::futex`, `process::kernel_thread`, `process::background`, `process::random`, `process::provoke`, `process::properties`, `calls::segments` | single services of the kernel for programs |
//! | `files::attributes`, `files::inode`, `files::segments`, `files::sequence`, `files::listing`, `files::node`, `files::store`, `files::root`, `files::permission`, `files::descriptor` | files: attributes, nodes, descriptors |
//! | `files::poll`, `files::manner`, `files::transfer` | transfers and waits for files |
//! | `files::memory`, `files::generated`, `files::console`, `files::stream`, `files::pipe`, `files::socket`, `files::event`, `files::userfault`, `files::epoll` | kinds of files |
//! | `files::disk` | the file system of the disk |
//! | `files::path`, `files::swap`, `files::huge_pages`, `files::proc`, `files::sys` | from a path to a file; swap; `/proc` and `/sys` |
//! | `files::silent_file`, `files::device`, `files::tree`, `files::program`, `files::names`, `files::status`, `files::splice`, `files::calls`, `files` | the tree of files, and the calls that use it |
//! | `process` | life of processes: `clone`, `execve`, `wait`, the end |
//! | `calls` | system calls by number |
//! | `trap`, `page_fault`, `services`, `arch::aarch64::exceptions`, `arch::x86_64::exceptions`, `arch::aarch64::entry`, `arch::x86_64::entry`, `arch::aarch64::cpu_check`, `arch::x86_64::cpu_check`, `arch::aarch64::smp`, `arch::x86_64::smp`, `arch::aarch64::boot`, `arch::x86_64::boot`, `workload`, `start`, `failure` | entries from programs, and the kernel's start |

#![no_std]
#![no_main]

extern crate alloc;

mod arch;
mod boot;
mod calls;
mod console;
mod control;
mod disk;
mod errno;
mod failure;
mod files;
mod heap;
mod kernel_lock;
mod memory;
mod memory_functions;
mod options;
mod page_fault;
mod platform;
mod process;
mod self_test;
mod services;
mod start;
mod symbols;
mod sync;
mod time;
mod trap;
mod user;
mod workload;
