//! Bindery: a virtual-memory subsystem with Linux semantics, for kernel developers.
//!
//! You supply physical memory and a TLB-invalidation hook ([`Platform`]). Bindery supplies
//! Linux-compatible address spaces with `mmap`, `munmap`, `mprotect`, `mremap`, `fork` and faults
//! ([`AddressSpace`]), and kernel mappings ([`KernelMap`]), on x86-64, AArch64 and RISC-V
//! ([`arch`]). Everything runs and is tested in an ordinary process (`bindery-hosted`).
//!
//! The idea: **every operation works on the largest piece that the page table can name**: a run of
//! entries, a contiguous (contpte) run, or a whole table. No operation works page by page.
//!
//! # Terms
//!
//! | term | meaning | Linux / Arm |
//! |---|---|---|
//! | frame | a base page of physical memory (4 KiB) | page frame (PFN) / granule |
//! | folio | 2^order consecutive frames with one reference count; order 0 to 9 | folio |
//! | entry | an 8-byte page-table entry | `pte_t`, `pmd_t`, ... / descriptor |
//! | leaf | an entry that maps memory | present PTE, `pmd_leaf` / page or block descriptor |
//! | huge leaf | a leaf above level 1 | PMD or PUD mapping / block descriptor |
//! | object | the pages of shared memory or of a file, whatever maps them | `address_space` of an inode |
//! | page index | the tree that finds the folio of an object's page | `i_pages`, an xarray |
//! | table | 512 entries in one frame | page-table page, `struct ptdesc` / translation table |
//! | level | a table's distance from the leaves: 1 for base pages, up to the root | 1: PTE, 2: PMD, 3: PUD, 4: P4D or PGD / level 3, 2, 1, 0 |
//! | span | the bytes that one entry of a level covers: 4 KiB, 2 MiB, 1 GiB, ... | `PAGE_SIZE`, `PMD_SIZE`, `PUD_SIZE` |
//! | run | consecutive entries that one operation may treat as one thing | PTE batch (`folio_pte_batch`) |
//! | contiguous run | 16 leaves that the MMU may cache as one (AArch64, RISC-V Svnapot) | contpte / Contiguous bit |
//! | fold, unfold | write leaves as a contiguous run; write a contiguous run as single leaves | `contpte_convert` |
//! | saturated | accessed and dirty bits that the hardware can no longer change | - / hardware dirty state |
//! | VMA | a range of addresses with one purpose and one protection | `vm_area_struct` |
//! | freeable span | an unmapped range, extended to the neighboring VMAs; tables entirely inside it can be freed | floor and ceiling of `free_pgtables` |
//! | absent entry | an entry that only software reads: a swap entry, a marker or a `PROT_NONE` page | swap entry, PTE marker, `pte_protnone` / invalid descriptor |
//! | slot | room for one page in a swap area | swap slot |
//! | marker | an absent entry that keeps something for its address: soft-dirty, write-protected, a guard | PTE marker |
//! | mark | a bit beside a table or a page that tells a later call what is left to do | page flag, mark of an xarray |
//! | deposit | a spare table that is kept with a huge leaf, so that splitting the leaf cannot fail | `pgtable_trans_huge_deposit` |
//! | anon group | the owner of anonymous folios: the VMAs that may map them | `anon_vma` |
//! | anon-exclusive | no other address space maps this anonymous page, so a write needs no copy | `PageAnonExclusive` |
//! | gather | the ranges to invalidate, and the tables to free after the flush | `mmu_gather` |
//! | pending | marked for a flush that has not been made yet | `mm_tlb_flush_pending` |
//! | stray | detached from its tree | - |
//! | read section | code during which no table or VMA that it can reach is freed | RCU read-side critical section |
//! | hold | take a counted reference | `folio_get`, `get_file` |
//! | pin | a reference that keeps a page mapped for a device | `pin_user_pages`, `FOLL_PIN` |
//! | area | a range of the kernel's addresses with one owner ([`KernelMap`]) | `vmap_area`, `vm_struct` |
//! | arena | the kernel addresses that a [`KernelMap`] manages | `VMALLOC_START` to `VMALLOC_END` |
//! | userfault | a fault that waits until a program has served it | `userfaultfd` |
//! | purge | one flush for all freed areas, after which their addresses can be used again | `__purge_vmap_area_lazy` |
//!
//! # Contexts
//!
//! The documentation of each public function names one of three contexts in which it may be called.
//! If all functions of a type, trait or module have the same context, a section "Context" of the
//! type, trait or module names it once. A test finds functions without a context
//! (`tests/contexts.rs`).
//!
//! | context | sleeps | acquires a [`Platform::SpinLock`] | with interrupts off, in an interrupt handler |
//! |---|---|---|---|
//! | may sleep | yes: in [`Platform::Mutex`], [`Platform::park`], [`Platform::synchronize`], a [`Pager`] | yes | no; nor in a read section, nor with a spin lock held |
//! | spins | no | yes, briefly | if that turns interrupts off |
//! | any | no | no | yes |
//!
//! The drop of an [`AddressSpace`], an [`Object`], a [`Pinned`] or a [`KernelMap`] may sleep.
//!
//! # Documents
//!
//! In the repository, `docs/embedding.md` lists the obligations of an embedder, `docs/design.md`
//! explains decisions, and `docs/invariants.md` numbers the invariants and names the check of each.
//!
//! # Layers
//!
//! A layer refers only to itself and to earlier layers, in every `use` and every path; a test reads
//! this table (`tests/layers/main.rs`). `docs/design.md` explains why some modules share a layer.
//!
//! | modules | idea |
//! |---|---|
//! | `addr`, `arch`, `platform`, `error`, `stats`, `sync`, `bytes`, `events`, `interrupt`, `commit`, `cpu` | addresses, entry formats, locks, and what the embedder supplies |
//! | `frame` | frames and their metadata, the allocator, slabs |
//! | `folio` | user memory: references, mappings, locks, owners |
//! | `collections` | trees and lists whose nodes come from slabs |
//! | `memory`, `deferred`, `effort`, `huge_zero`, `swap` | what all address spaces share; frees that wait for readers; swap slots |
//! | `tlb` | which CPUs must flush, and what a flush covers |
//! | `table` | page tables: locks, runs, cursors, moves |
//! | `userfault` | queues of the faults that programs serve |
//! | `vma`, `rmap`, `object`, `reclaim` | mappings, the reverse map, shared memory and files; pages leave memory |
//! | `vmas` | the VMAs of an address space: look-ups, changes, limits |
//! | `space` | address spaces: the memory calls and faults |
//! | `kernel_map` | the kernel's own mappings |
//! | `check` | the auditor |

#![no_std]
// Code used only by a feature remains in its module: it is generic, so it produces no machine code
// if nothing calls it.
#![cfg_attr(
    not(all(
        feature = "check",
        feature = "collapse",
        feature = "compression",
        feature = "swap",
        feature = "userfault"
    )),
    allow(dead_code, unused_imports, reason = "code of features that are left out")
)]
#![deny(missing_debug_implementations)]
#![cfg_attr(
    not(any(test, loom, shuttle)),
    deny(unsafe_code, reason = "only rooms of docs/invariants.md have any")
)]
#![deny(
    clippy::wildcard_enum_match_arm,
    clippy::match_wildcard_for_single_variants,
    reason = "a new variant leads by errors to each place that must decide about it"
)]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")
)]

#[cfg(test)]
extern crate std;

pub mod addr;
pub mod arch;
mod bytes;
#[cfg(feature = "check")]
pub mod check;
mod collections;
mod commit;
mod cpu;
mod deferred;
mod effort;
mod error;
mod events;
mod folio;
mod frame;
mod huge_zero;
mod interrupt;
mod kernel_map;
mod memory;
mod object;
pub mod platform;
mod reclaim;
mod rmap;
mod space;
mod stats;
mod swap;
pub mod sync;
mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tlb;
mod userfault;
mod vma;
mod vmas;

pub use commit::Overcommit;
pub use deferred::Deferred;
pub use effort::LargeFolioEffort;
pub use error::{Errno, Error, FaultError, Operation, PinError};
pub use events::Events;
pub use folio::{FrameUsage, FrameUse, FrameView, OwnerKind};
pub use frame::{FrameRange, FramesError};
pub use kernel_map::{
    AreaKind, Content, KernelAddress, KernelArea, KernelMap, KernelMapError, KernelPiece, Pauses,
    Pieces, Resolution, UnmapTime, VmallocOptions, VmapOptions,
};
pub use memory::{Commitment, DirtyLimit, FolioPolicy, FrameKind, Memory, SizeMode};
pub use object::{
    Accounting, Attachments, ErrorMark, FileSystem, FrameList, FramePiece, FrameSource, Growth,
    KeptRead, KeptWrite, Object, Pager, PagerError, ParkedOn, Preparation, Quota, ReadBuffer,
    ReadPattern, ReadRequest, Sealing, Seals, SegmentId, StoredBytes, WeakObject, WriteAccess,
    WriteRequest,
};
pub use platform::Platform;
pub use reclaim::Reclaimed;
pub use space::{
    Access, AddressSpace, Advice, CallPoll, CallReady, CallWait, CollapseLimits, CollapseProgress,
    ExecGain, FaultPoll, FaultReady, FaultWait, FileAccess, FillMode, FillOrder, FillSource,
    FolioError, FolioView, Inspection, LargeFolios, Limits, LockAll, LockPages, Locking, MapFlags,
    MapObject, MapRequest, MappedWriteback, Mapping, MappingFlags, MappingView, MoveMode,
    ObjectView, PageCategories, PageRegion, PageRegions, PageRun, PageRunContent, PageScan,
    PartialCopy, PartialFill, PendingCopy, PendingEvents, PendingMadvise, PendingObjectSwapIn,
    PendingProtect, PendingRead, PendingSwapIn, PendingUserCopy, PendingWrite, PinTime, Pinned,
    Place, Populate, ProtectFrom, Protection, Remap, Residence, Resident, Resolved, Scanned,
    Sharing, SpaceOptions, Step, SyncFlags, TriedFault, Usage, UserfaultHandler, WriteProtectMode,
    Writeback,
};
pub use stats::Counts;
pub use swap::{
    CompressedUsage, MAX_SWAP_AREAS, SwapArea, SwapDevice, SwapDeviceError, SwapError,
    SwapOperation, SwapRequest, SwapUsage,
};
#[cfg(feature = "baseline")]
pub use table::Reach;
pub use userfault::{
    ForkIsNext, Userfault, UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultMessage,
    UserfaultModes, UserfaultScope, WaitingFaults,
};

/// The example of the README, compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
