//! The files about memory under `/proc/self`, in the format of Linux 6.18.
//!
//! | file of `/proc/self` | function | module |
//! |---|---|---|
//! | `maps` | [`maps()`], [`maps_entry`] | `maps`, `line`, `naming` |
//! | `PROCMAP_QUERY` of it | [`procmap_query`] | `query` |
//! | `smaps`, `smaps_rollup` | [`smaps()`], [`smaps_entry`], [`smaps_rollup`] | `smaps`, `tally` |
//! | `pagemap` | [`pagemap()`] | `pagemap` |
//! | `PAGEMAP_SCAN` of it | [`pagemap_scan()`] | `pagemap_scan` |
//! | `clear_refs` | [`clear_refs()`] | `clear_refs` |
//! | `statm`, `status` | [`statm`], [`status()`] | `status` |
//!
//! Files about the machine:
//!
//! | file | function | module |
//! |---|---|---|
//! | `/proc/vmstat` | [`vmstat()`] | `vmstat` |
//! | `/proc/sysvipc/shm` | `sysvipc_shm`, with the feature `sysv` | `../shm/listing` |
//! | `/proc/kpageflags`, `/proc/kpagecount` | [`kpageflags`], [`kpagecount`] | `frames` |
//!
//! # A reader blocks no other thread
//! A listing examines one mapping at a time with the address space's mutex held and writes its text
//! without locks. So a slow reader blocks no other thread, even if its buffer faults in the same
//! address space. The next mapping is the first that ends after the previous one, as in Linux's
//! listings. A concurrent change shows either its old or its new state. A mapping that has grown
//! over its neighbor may be shown twice.
//!
//! Page tables are locked for at most 1,024 entries at a time, and their entries are read in runs,
//! so the metadata of a folio is read once per run instead of once per page.
//!
//! # Estimates
//! The core counts the mappings of a folio, not of each page; `sharing` derives per-page figures.
//! These figures are exact for folios of one page, for anon-exclusive pages, and for folios that
//! each process maps whole.
//!
//! # Always zero
//! KSM and pools of huge pages do not exist here.

mod clear_refs;
mod frames;
mod line;
mod maps;
mod naming;
mod pagemap;
mod pagemap_scan;
mod query;
mod sharing;
mod smaps;
mod status;
mod tally;
mod vmstat;

use bindery::addr::{VirtAddr, VirtRange};

#[cfg(feature = "sysv")]
pub use super::shm::sysvipc_shm;
pub use clear_refs::{ClearRefs, clear_refs};
pub use frames::{
    KPF_ANON, KPF_BUDDY, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_DIRTY, KPF_LOCKED, KPF_MMAP,
    KPF_NOPAGE, KPF_PGTABLE, KPF_SLAB, KPF_SWAPBACKED, KPF_THP, KPF_UPTODATE, KPF_ZERO_PAGE,
    kpagecount, kpageflags,
};
pub use maps::{maps, maps_entry};
pub use naming::{FileId, NameSource, Naming, Unnamed};
pub use pagemap::{PhysicalAddresses, pagemap};
pub use pagemap_scan::{PAGEMAP_SCAN, RegionSink, SCAN_END, SCAN_WORDS, pagemap_scan};
pub use query::{CallerMemory, procmap_query};
pub use smaps::{smaps, smaps_entry, smaps_rollup};
pub use status::{statm, status};
pub use vmstat::{FaultCounts, vmstat};

/// The range from `start` to `end`; empty if `end` is before `start`.
#[inline]
fn range(start: VirtAddr, end: VirtAddr) -> VirtRange {
    VirtRange::new(start, end.max(start)).unwrap_or_default()
}
