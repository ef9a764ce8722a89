//! Collapse: large folios replace small ones, on demand (`MADV_COLLAPSE`) and in the background.
//!
//! | file | contents |
//! |---|---|
//! | `call` | the two calls, and the collapse of one table span |
//! | `pending` | the call in steps |
//! | `scan_pmd` | counts of the entries of a span |
//! | `left_out` | the calls in a build without the feature `collapse` |

#[cfg(feature = "collapse")]
mod call;
#[cfg(not(feature = "collapse"))]
mod left_out;
#[cfg(feature = "collapse")]
mod pending;
#[cfg(feature = "collapse")]
mod scan_pmd;

use crate::addr::VirtAddr;

#[cfg(not(feature = "collapse"))]
pub(super) use left_out::PendingCollapse;
#[cfg(feature = "collapse")]
pub(super) use pending::PendingCollapse;

/// The limits of the background collapser, in pages of one table span (Linux:
/// `khugepaged/max_ptes_none`, `max_ptes_swap`, `max_ptes_shared`), and its effort to get a folio.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, CollapseLimits, Platform};
///
/// /// The step of a background thread.
/// fn collapse<P: Platform>(space: &AddressSpace<'_, P>, next: VirtAddr) -> VirtAddr {
///     let limits = CollapseLimits { missing: 64, ..CollapseLimits::default() };
///     space.collapse_some(next, 8, &limits).next
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CollapseLimits {
    /// The maximum number of pages that are missing or zero pages. The collapse allocates memory
    /// for these pages, which the program may never use.
    pub missing: u32,
    /// The maximum number of pages in swap. The collapse first swaps these pages in.
    pub swapped: u32,
    /// The maximum number of pages with other mappings. The collapse copies these pages.
    pub shared: u32,
    /// Whether memory is collected ([`crate::Memory::collect`]) if no folio is free (Linux:
    /// `khugepaged/defrag`).
    pub collects: bool,
}

impl Default for CollapseLimits {
    fn default() -> Self {
        Self { missing: 511, swapped: 64, shared: 256, collects: true }
    }
}

/// The progress of [`AddressSpace::collapse_some`](crate::AddressSpace::collapse_some).
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, CollapseLimits, Platform};
///
/// /// One turn of a background thread over an address space.
/// fn turn<P: Platform>(space: &AddressSpace<'_, P>, limits: &CollapseLimits) -> u32 {
///     let (mut from, mut collapsed) = (VirtAddr(0), 0);
///     loop {
///         let progress = space.collapse_some(from, 8, limits);
///         collapsed += progress.collapsed;
///         if progress.out_of_memory || progress.next == VirtAddr(0) {
///             return collapsed;
///         }
///         from = progress.next;
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CollapseProgress {
    /// The number of examined table spans.
    pub looked_at: u32,
    /// The number of collapsed table spans.
    pub collapsed: u32,
    /// The address at which the next call continues; null after the last mapping.
    pub next: VirtAddr,
    /// Whether the call stopped because no large folio is free.
    pub out_of_memory: bool,
}
