//! The memory calls, one per file, as functions of the operation ([`super::op::Op`]) or of the
//! parts that they use. The methods of [`crate::AddressSpace`] in these files check the arguments,
//! lend the operation, and retry after reclaim.
//!
//! | file | contents |
//! |---|---|
//! | `mmap`, `map_request`, `map_alignment` | `mmap(2)`; its arguments; where huge leaves fit |
//! | `munmap`, `mprotect`, `mremap`, `madvise`, `mlock`, `mincore`, `msync`, `mseal`, `brk`, `fork`, `remap_file_pages` | the call of that name |
//! | `pkey`, `shmdt`, `dev_zero` | `pkey_alloc(2)`; `shmdt(2)`; `mmap(2)` of `/dev/zero` |
//! | `advice` | the kinds of advice and the table of their effects |
//! | `guard_pages`, `collapse`, `page_out` | the larger operations of `madvise(2)` |
//! | `cold_or_free` | `MADV_COLD` and `MADV_FREE` |
//! | `will_need`, `remove` | `MADV_WILLNEED`; `MADV_REMOVE` |
//! | `scan_pages` | `ioctl(PAGEMAP_SCAN)` |
//! | `range` | the pages that a call specifies by a start and a length |
//! | `populate` | maps pages before the first access (`MAP_POPULATE`, `mlock`) |
//! | `steps`, `lock_wait` | calls that stop instead of waiting, and continue later; their waits for locks |
//! | `writeback`, `read_steps`, `write_steps` | `fsync(2)`, `read(2)` and `write(2)` in steps |
//! | `swap_off`, `swap_off_steps`, `reap` | `swapoff(2)`, also in steps; the OOM reaper |

pub(super) mod advice;
pub(super) mod brk;
mod cold_or_free;
pub(super) mod collapse;
mod dev_zero;
mod fork;
mod guard_pages;
mod lock_wait;
pub(super) mod madvise;
mod map_alignment;
pub(super) mod map_request;
pub(super) mod mincore;
pub(super) mod mlock;
mod mmap;
pub(super) mod mprotect;
pub(super) mod mremap;
mod mseal;
pub(super) mod msync;
mod munmap;
mod page_out;
pub(super) mod pkey;
pub(super) mod populate;
mod range;
pub(super) mod read_steps;
mod reap;
mod remap_file_pages;
mod remove;
pub(super) mod scan_pages;
mod shmdt;
pub(super) mod steps;
mod swap_off;
pub(super) mod swap_off_steps;
mod will_need;
pub(super) mod write_steps;
pub(super) mod writeback;
