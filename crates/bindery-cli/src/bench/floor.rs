//! The *floor* of a call: the minimum of entry writes and invalidations that its work needs, on a
//! page table of given geometry without other mappings.
//!
//! ```text
//! source   |edge|   a whole table   |edge|      an entry that moves is cleared once, set once;
//! moves 4 KiB one entry 4 KiB as large an entry as both addresses allow
//! target   |edge|   a whole table   |edge|      a table that must come into being is hooked once
//! ```
//!
//! Freeing tables that the call leaves empty is housekeeping and not counted. The floor does not
//! depend on the method: it applies to moves page by page, to moves of whole tables and to Linux
//! alike.

use std::collections::BTreeSet;

use bindery::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange};
use serde::Serialize;

use super::kernel;
use super::workload::Call;
use crate::size::FolioSize;

/// The division of addresses by an architecture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// The level of the root; leaves of base pages are at level 1.
    pub levels: u8,
    /// Base-2 logarithm of the entries in a table.
    pub index_bits: u32,
    /// The highest level of leaves in the kernel's tables.
    pub largest_leaf: u8,
    /// Leaves in a contiguous run; 1 if the architecture has none.
    pub block: u32,
    /// The highest level of leaves that form such blocks; 0 if the architecture has none.
    pub largest_block: u8,
    /// Whether the MMU may cache invalid entries.
    pub remembers_invalid: bool,
}

impl Geometry {
    /// The geometry of x86-64.
    #[cfg(test)]
    pub const FOUR_LEVELS: Self = Self {
        levels: 4,
        index_bits: 9,
        largest_leaf: 3,
        block: 1,
        largest_block: 0,
        remembers_invalid: false,
    };

    /// Bytes that one entry at `level` covers.
    pub fn span(self, level: u8) -> u64 {
        1 << (PAGE_SHIFT + self.index_bits * (u32::from(level) - 1))
    }

    /// The level at which a folio of this size is one entry, if any.
    fn leaf_level(self, folio: FolioSize) -> u8 {
        let huge = u32::from(folio.order()) == self.index_bits;
        if huge { 2 } else { 1 }
    }

    /// Numbers of the entries at `level` that `range` touches.
    fn slots(self, range: VirtRange, level: u8) -> std::ops::Range<u64> {
        let span = self.span(level);
        range.start().0 / span..range.end().0.div_ceil(span)
    }
}

/// The minimum work of a call on a page table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Floor {
    /// Entries that must be set or cleared because their page or table is added, removed or moved.
    pub entries_written: u64,
    /// Entries that must also be set, to link missing tables.
    pub tables_installed: u64,
    /// Invalidations that must be sent.
    pub invalidations: u64,
}

impl Floor {
    /// The needs of `call` if first touches get folios of size `folio`.
    pub fn of(call: Call, folio: FolioSize, geometry: Geometry) -> Self {
        match call {
            // The first touch sets the entries.
            Call::Map(_) | Call::Advise(_) => Self::default(),
            Call::Touch(range) | Call::Write(range) => {
                let mut hooks = Hooks::default();
                let leaves = geometry.leaf_level(folio);
                let pieces = pieces(range, 0, leaves, geometry);
                pieces.iter().for_each(|piece| hooks.need(piece.at, piece.level, geometry));
                let entries_written = pieces.len() as u64;
                Self { entries_written, tables_installed: hooks.count(), invalidations: 0 }
            }
            Call::PageOut(range) => {
                let leaves = pieces(range, 0, geometry.leaf_level(folio), geometry);
                let entries_written = leaves.len() as u64;
                Self { entries_written, tables_installed: 0, invalidations: 1 }
            }
            Call::Move { from, to } => {
                let delta = to.0.wrapping_sub(from.start().0);
                Self::of_move(from, delta, geometry.leaf_level(folio), geometry)
            }
            // Everything below the root's entries is removed with them.
            Call::Unmap(range) => {
                let slots = geometry.slots(range, geometry.levels);
                Self {
                    entries_written: slots.end - slots.start,
                    tables_installed: 0,
                    invalidations: 1,
                }
            }
            Call::Kernel(call) => kernel::floor(call, geometry),
        }
    }

    fn of_move(from: VirtRange, delta: u64, leaves: u8, geometry: Geometry) -> Self {
        let mut hooks = Hooks::default();
        // The tables of the source exist, and may be the target's too.
        for level in leaves..geometry.levels {
            hooks.are_there(from, level, geometry);
        }
        let pieces = pieces(from, delta, geometry.levels, geometry);
        let set = pieces.len() as u64;
        let (mut cleared, mut split) = (0, 0);
        for piece in &pieces {
            hooks.need(piece.at.wrapping_add(delta), piece.level, geometry);
            if piece.level < leaves {
                // A huge leaf whose pages cannot stay together is cleared once.
                split += geometry.span(piece.level);
            } else {
                cleared += 1;
            }
        }
        cleared += split.div_ceil(geometry.span(leaves));
        Self { entries_written: cleared + set, tables_installed: hooks.count(), invalidations: 1 }
    }
}

/// A part of a range that one entry can cover, at both of its addresses.
pub struct Piece {
    pub at: u64,
    pub level: u8,
}

/// Splits `range` into the largest pieces, at most at level `top`, whose entries have the same
/// alignment `delta` bytes higher.
pub fn pieces(range: VirtRange, delta: u64, top: u8, geometry: Geometry) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut at, end) = (range.start().0, range.end().0);
    while at < end {
        let fits = |level: &u8| {
            let span = geometry.span(*level);
            (at | delta).is_multiple_of(span) && end - at >= span
        };
        let level = (2..=top).rev().find(fits).unwrap_or(1);
        pieces.push(Piece { at, level });
        at += geometry.span(level).max(PAGE_SIZE);
    }
    pieces
}

/// Tables by level and number.
#[derive(Default)]
pub struct Hooks {
    there: BTreeSet<(u8, u64)>,
    needed: BTreeSet<(u8, u64)>,
}

impl Hooks {
    /// Marks the tables of `level` for `range` as existing.
    pub fn are_there(&mut self, range: VirtRange, level: u8, geometry: Geometry) {
        self.there.extend(geometry.slots(range, level + 1).map(|slot| (level, slot)));
    }

    /// Marks the tables for an entry at `level` for `addr` and of all levels above it as needed.
    pub fn need(&mut self, addr: u64, level: u8, geometry: Geometry) {
        for level in level..geometry.levels {
            self.needed.insert((level, addr / geometry.span(level + 1)));
        }
    }

    /// The number of missing tables.
    pub fn count(&self) -> u64 {
        self.needed.difference(&self.there).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use bindery::addr::VirtAddr;

    use super::*;
    use crate::bench::workload::range;
    use crate::size::{GIB, KIB, MIB};

    const FOUR_LEVELS: Geometry = Geometry::FOUR_LEVELS;
    const THREE_LEVELS: Geometry = Geometry { levels: 3, ..FOUR_LEVELS };

    fn floor(call: Call, folio: &str, geometry: Geometry) -> (u64, u64, u64) {
        let Floor { entries_written, tables_installed, invalidations } =
            Floor::of(call, folio.parse().unwrap(), geometry);
        (entries_written, tables_installed, invalidations)
    }

    fn moved(len: u64, by: u64, folio: &str) -> (u64, u64, u64) {
        let from = range(64 * GIB, len);
        floor(Call::Move { from, to: VirtAddr(from.start().0 + by) }, folio, FOUR_LEVELS)
    }

    #[test]
    fn a_move_inside_a_table_moves_by_pages() {
        assert_eq!(moved(MIB, MIB, "4k"), (512, 0, 1));
        assert_eq!(moved(MIB, MIB + 4 * KIB, "64k"), (512, 1, 1), "the last page needs a table");
    }

    #[test]
    fn a_congruent_gigabyte_moves_in_its_largest_entries() {
        assert_eq!(moved(GIB, GIB, "4k"), (2, 0, 1));
        assert_eq!(moved(GIB, 64 * GIB, "2m"), (2, 0, 1));
        assert_eq!(moved(GIB, 64 * GIB + 2 * MIB, "4k"), (1_024, 2, 1));
        assert_eq!(moved(GIB, 64 * GIB + 2 * MIB, "2m"), (1_024, 2, 1));
    }

    #[test]
    fn a_shifted_gigabyte_moves_page_by_page() {
        // 513 tables at level 1 and two at level 2.
        assert_eq!(moved(GIB, 64 * GIB + 64 * KIB, "64k"), (524_288, 515, 1));
        // Huge leaves are cleared as such, and set as pages.
        assert_eq!(moved(GIB, 64 * GIB + 4 * KIB, "2m"), (262_144 + 512, 515, 1));
    }

    #[test]
    fn a_move_has_page_edges_and_whole_tables() {
        let from = range(64 * GIB + 2 * MIB - 8 * KIB, 2 * MIB + 12 * KIB);
        let call = Call::Move { from, to: VirtAddr(from.start().0 + 64 * GIB) };
        // Two pages, one table, one page; each edge needs a table, and a third table links both.
        assert_eq!(floor(call, "4k", FOUR_LEVELS), (8, 3, 1));
    }

    #[test]
    fn a_first_touch_sets_leaves_and_links_tables() {
        let touch = |len| Call::Touch(range(GIB, len));
        assert_eq!(floor(touch(MIB), "4k", FOUR_LEVELS), (256, 3, 0));
        assert_eq!(floor(touch(MIB), "64k", THREE_LEVELS), (256, 2, 0));
        assert_eq!(floor(touch(GIB), "4k", FOUR_LEVELS), (262_144, 514, 0));
        assert_eq!(floor(touch(GIB), "2m", FOUR_LEVELS), (512, 2, 0));
        assert_eq!(floor(touch(MIB), "2m", FOUR_LEVELS), (256, 3, 0), "no huge leaf fits");
    }

    #[test]
    fn an_unmap_writes_one_entry_of_the_root() {
        assert_eq!(floor(Call::Unmap(range(GIB, MIB)), "4k", FOUR_LEVELS), (1, 0, 1));
        let across = Call::Unmap(range(64 * GIB + 2 * MIB, GIB));
        assert_eq!(floor(across, "4k", FOUR_LEVELS), (1, 0, 1));
        assert_eq!(floor(across, "4k", THREE_LEVELS), (2, 0, 1));
    }

    #[test]
    fn mapping_alone_touches_no_entry() {
        assert_eq!(floor(Call::Map(range(GIB, GIB)), "4k", FOUR_LEVELS), (0, 0, 0));
    }
}
