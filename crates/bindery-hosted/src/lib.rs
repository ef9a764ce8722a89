//! A machine inside a process, for running [`bindery`] without any hardware.
//!
//! | part | implementation |
//! |---|---|
//! | physical memory | one reserved region of the process |
//! | CPUs | threads ([`Machine::on_cpu`]) |
//! | MMU | a walker of the real table formats, written from the manuals ([`Walk`]) |
//! | TLB | as bad as the architecture allows ([`TlbKind::Strict`]), or fast ([`TlbKind::Plain`]) |
//! | files | in the memory of this process ([`MemoryFiles`]), or answered late ([`DelayedFiles`]) |
//! | swap device | a file of the host ([`SwapFile`]) |
//! | load | working sets larger than memory ([`Pattern`]) |
//!
//! An error of the core between tables and TLBs shows as a [`Violation`]: a missing flush, a broken
//! break-before-make, a frame reused too early, a reserved bit.
//!
//! ```
//! use bindery::addr::Order;
//! use bindery::arch::X86_64;
//! use bindery_hosted::{Config, Machine};
//!
//! let machine = Machine::<X86_64>::new(Config { cpus: 2, ..Config::default() });
//! let (first, count) = machine.frames();
//! assert_eq!((first.0, count), (0x8_0000, 16_384));
//! let memory = machine.memory()?;
//! assert!(memory.total_frames() < 16_384, "the metadata takes some");
//! // As Linux by default: a first touch takes the huge size where it fits, and no size between.
//! let orders = [Order(3), Order(9)].map(|order| memory.folio_policy().get(order));
//! assert_eq!(orders, [bindery::SizeMode::Never, bindery::SizeMode::Inherit]);
//! let space = bindery::AddressSpace::new(&memory, Default::default()).unwrap();
//! let protection = bindery::Protection::READ | bindery::Protection::WRITE;
//! let request = bindery::MapRequest { length: 4 << 20, protection, ..Default::default() };
//! let at = space.mmap(&request).unwrap().align_up(2 << 20).unwrap();
//! let before = memory.free_frame_count();
//! space.fault(at, bindery::Access::Write).unwrap();
//! assert!(before - memory.free_frame_count() >= 512);
//! machine.assert_clean();
//! # Ok::<(), bindery::FramesError>(())
//! ```

#![deny(
    clippy::wildcard_enum_match_arm,
    clippy::match_wildcard_for_single_variants,
    reason = "a new variant leads by errors to each place that must decide about it"
)]

mod access;
mod collections;
mod config;
mod control;
mod cpu;
mod delayed_files;
mod dispatch;
mod files;
#[cfg(all(feature = "instances", debug_assertions, not(test)))]
pub mod instances;
mod instructions;
mod loaded_root;
mod machine;
mod memory;
mod mmu;
mod pager_thread;
mod parking;
mod pass_on;
mod program;
mod signals;
mod stats;
mod swap_file;
mod tlb;
mod violation;
mod working_set;

pub use config::{Config, Contents};
pub use control::{BrokenControl, SelfTest};
pub use cpu::OnCpu;
pub use delayed_files::{Asked, DelayedFiles};
pub use dispatch::{ArchitectureName, UnknownArchitecture, Visitor, dispatch};
pub use files::{MemoryFiles, PagerCounts};
pub use instructions::InstructionCache;
pub use machine::Machine;
pub use mmu::{
    AccessKind, Denial, Fetches, InvalidEntries, Leaf, Meaning, MmuFault, Mode, Rights, Rules,
    Translation, Walk,
};
pub use pager_thread::for_pager;
pub use parking::served_in_place;
pub use program::Program;
pub use stats::Statistics;
pub use swap_file::{SwapFile, SwapFileCounts, SwapService};
pub use tlb::TlbKind;
pub use violation::{Place, Violation};
pub use working_set::{PagesMoved, Pattern, fewest_moved};

/// The examples of the page for embedders, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/embedding.md")]
struct Embedding;

/// The example of the page about swap.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/swap.md")]
struct Swap;
