//! What `/proc/self` shows of a process' memory, as Linux 6.18 formats it.
//!
//! | file there | function | file here |
//! |---|---|---|
//! | `maps` | [`maps()`] | `maps`, `naming` |
//! | `smaps`, `smaps_rollup` | [`smaps()`], [`smaps_rollup`] | `smaps`, `tally` |
//! | `pagemap` | [`pagemap()`] | `pagemap` |
//! | `clear_refs` | [`clear_refs()`] | `clear_refs` |
//! | `statm`, `status` | [`statm`], [`status()`], [`resident`] | `status` |
//!
//! # Nobody waits for a reader
//! A listing looks at one mapping at a time, with the address space's mutex held, and writes with
//! nothing held: whoever reads slowly, or faults in this very address space while it copies what it
//! was given, stops nobody. The next mapping is the first that ends behind the last, as in Linux's
//! listings: what changes in between is shown as it was or as it is, and a mapping that has grown
//! over its neighbour meanwhile may be shown again.
//!
//! Page tables are locked for at most 64 tables at a time, and their entries are taken in runs: the
//! metadata of a folio is read once for each run, not for each page.
//!
//! # What is estimated
//! The core counts the mappings of a folio, not of each of its pages (`sharing` tells how the rest
//! follows). For folios of one page, for anonymous pages that are nobody else's, and for folios that
//! each process maps whole, nothing is estimated.
//!
//! # What is always zero
//! KSM and pools of huge pages do not exist here, and nothing is swapped out yet.

mod clear_refs;
mod maps;
mod naming;
mod pagemap;
mod sharing;
mod smaps;
mod status;
mod tally;

pub use clear_refs::{ClearRefs, clear_refs};
pub use maps::maps;
pub use naming::{Backing, FileId, Naming, Unnamed};
pub use pagemap::{PhysicalAddresses, pagemap};
pub use smaps::{smaps, smaps_rollup};
pub use status::{Resident, resident, statm, status};
