//! Collapse: large folios replace small ones, on demand (`MADV_COLLAPSE`) and in the background.
//!
//! | file | contents |
//! |---|---|
//! | `call` | the two calls, and one table span |
//! | `scan_pmd` | counts of the entries of a span |
//! | `left_out` | the calls in a build without the feature `collapse` |

#[cfg(feature = "collapse")]
mod call;
#[cfg(not(feature = "collapse"))]
mod left_out;
#[cfg(feature = "collapse")]
mod scan_pmd;

use crate::addr::VirtAddr;

/// Limits of the background collapser in pages of a table's span (Linux: `khugepaged/max_ptes_none`,
/// `max_ptes_swap`, `max_ptes_shared`), and its effort for a folio.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, CollapseLimits, Platform};
///
/// /// What a background thread does now and then.
/// fn collapse<P: Platform>(space: &AddressSpace<'_, P>, next: VirtAddr) -> VirtAddr {
///     let limits = CollapseLimits { missing: 64, ..CollapseLimits::default() };
///     space.collapse_some(next, 8, &limits).next
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CollapseLimits {
    /// The most pages that may be missing, or be the zero page: they would take memory that nobody
    /// uses.
    pub missing: u32,
    /// The most pages that may be in swap: they come back first.
    pub swapped: u32,
    /// The most pages that may also be mapped elsewhere: they are copied.
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
    /// Table spans that it has looked at.
    pub looked_at: u32,
    /// Of these, those that it has collapsed.
    pub collapsed: u32,
    /// The address at which to go on; null after the last mapping.
    pub next: VirtAddr,
    /// Whether it stopped because no large folio is free.
    pub out_of_memory: bool,
}
