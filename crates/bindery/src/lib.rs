//! Bindery: a virtual-memory subsystem with Linux semantics, for people who build kernels.
//!
//! You bring physical memory and TLB invalidation ([`Platform`]); you get address spaces with
//! `mmap`, `munmap`, `mprotect`, `mremap`, `fork` and faults ([`AddressSpace`]), on x86-64,
//! AArch64 and RISC-V ([`arch`]), tested on your host before it ever boots (`bindery-hosted`).
//!
//! The idea: **every operation works on the largest piece that the page table can name**, a run of
//! entries, a contiguous run, a whole table, never page by page.
//!
//! # Terms
//!
//! | term | meaning |
//! |---|---|
//! | frame | a base page of physical memory (4 KiB) |
//! | folio | 2^order consecutive frames that are counted as one; order 0 to 9 |
//! | entry, leaf, table | an 8-byte page-table entry; one that maps memory; 512 entries in a frame |
//! | level | how far a table is from the leaves: 1 (Linux: PTE), 2 (PMD), 3 (PUD), ... the root |
//! | span | the bytes that one entry of a level covers: 4 KiB, 2 MiB, 1 GiB, ... |
//! | run | consecutive entries that one operation may treat as one thing |
//! | contiguous run | 16 leaves that the MMU may cache as one (AArch64, RISC-V Svnapot) |
//! | VMA | a mapping: a stretch of addresses with one purpose and one protection |
//! | freeable span | a range that is unmapped, with what is free around it: its tables can go whole |
//! | absent entry | one that only software understands: swapped out, a marker, or `PROT_NONE` |
//! | `PROT_NONE` | mapped with no permission (`PROT_NONE`), so that the MMU sees nothing |
//! | anon-exclusive | no other address space maps this anonymous page: a write needs no copy |
//! | gather | what must be flushed before it may be freed |
//! | stray | a table that was detached from its tree |
//! | area | a stretch of the kernel's addresses with one purpose ([`KernelMap`]) |
//! | purge | freed areas become free: one flush for all of them |
//!
//! # Layers
//!
//! Lower never imports higher: [`addr`], [`arch`], [`platform`], `frame`, `table` with `tlb`,
//! `space`, `kernel_map`, [`check`].

#![no_std]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")
)]

#[cfg(test)]
extern crate std;

pub mod addr;
pub mod arch;
mod bytes;
pub mod check;
mod commit;
mod deferred;
mod effort;
mod error;
mod events;
mod frame;
mod interrupt;
mod kernel_map;
pub mod linux;
mod memory;
mod object;
mod parking;
pub mod platform;
mod rmap;
mod space;
mod stats;
pub mod sync;
mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tlb;
mod word;

pub use commit::{Commitment, Overcommit};
pub use deferred::Deferred;
pub use effort::LargeFolioEffort;
pub use error::{Errno, Error, FaultError, Operation, PinError};
pub use events::Events;
pub use frame::{FrameRange, FrameUsage, FrameUse, FrameView, FramesError};
pub use kernel_map::{
    AreaKind, Content, KernelAddress, KernelArea, KernelMap, KernelMapError, KernelPiece, Pauses,
    Pieces, Resolution, UnmapTime, VmallocOptions, VmapOptions,
};
pub use memory::{FolioPolicy, FrameKind, Memory, SizeMode};
pub use object::{Accounting, Growth, Object, Pager, PagerError, Quota, Sealing, Seals};
pub use platform::Platform;
pub use space::{
    Access, AddressSpace, Advice, CollapseLimits, CollapseProgress, ExecGain, FileAccess,
    FolioError, Inspection, LargeFolios, Limits, LockAll, LockPages, Locking, MapFlags, MapObject,
    MapRequest, Mapping, MappingFlags, PartialCopy, PinTime, Pinned, Place, ProtectFrom,
    Protection, Remap, Residence, Resolved, Sharing, SpaceOptions, SyncFlags, Usage,
};
pub use stats::Counts;
pub use table::Reach;
pub use tlb::TlbOnLeave;

/// The example of the README, compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
