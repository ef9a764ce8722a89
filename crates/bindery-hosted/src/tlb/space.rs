//! The entries of a strict TLB for one address space.

use std::collections::{BTreeMap, BTreeSet};

use bindery::platform::Invalidation;

use super::loaded::Past;
use crate::mmu::walk::{MAX_LEVELS, Table};
use crate::mmu::{Rules, Translation};

#[derive(Debug, Default)]
pub(crate) struct Space {
    /// By first address, without overlaps.
    pub(crate) leaves: BTreeMap<u64, Translation>,
    /// For each level, the tables of the cached entries of this level, by first address.
    pub(crate) tables: [BTreeMap<u64, Table>; MAX_LEVELS],
    /// For each level, the first addresses of entries that were invalid.
    pub(crate) invalid: [BTreeSet<u64>; MAX_LEVELS],
    pub(super) past: Past,
}

impl Space {
    pub(crate) fn leaf(&self, addr: u64) -> Option<Translation> {
        let (_, leaf) = self.leaves.range(..=addr).next_back()?;
        leaf.covers(addr).then_some(*leaf)
    }

    /// The translations that overlap `start..=last`. (Ranges are inclusive here, since an exclusive
    /// end may be 2^64.)
    pub(crate) fn leaves_in(&self, start: u64, last: u64) -> impl Iterator<Item = Translation> {
        let from = self.leaf(start).map_or(start, |leaf| leaf.start);
        self.leaves.range(from..=last).map(|(_, leaf)| *leaf)
    }

    /// The cached table of the lowest level on the path to `addr`, with that level.
    pub(crate) fn nearest_table(&self, rules: &Rules, addr: u64) -> Option<(Table, u8)> {
        (2..=rules.levels).find_map(|level| {
            let table = self.tables[usize::from(level)].get(&rules.start(addr, level))?;
            Some((*table, level - 1))
        })
    }

    /// Whether an entry on the path to `addr` is cached as invalid.
    pub(crate) fn is_invalid(&self, rules: &Rules, addr: u64) -> bool {
        (1..=rules.levels)
            .any(|level| self.invalid[usize::from(level)].contains(&rules.start(addr, level)))
    }

    /// The intermediate entries that overlap `start..=last`: their levels and first addresses.
    pub(crate) fn tables_in(&self, rules: &Rules, start: u64, last: u64) -> Vec<(u8, u64, Table)> {
        let mut found = Vec::new();
        for level in 2..=rules.levels {
            let from = rules.start(start, level);
            let tables = self.tables[usize::from(level)].range(from..=last);
            found.extend(tables.map(|(start, table)| (level, *start, *table)));
        }
        found
    }

    /// The entries cached as invalid that overlap `start..=last`.
    pub(crate) fn invalid_in(&self, rules: &Rules, start: u64, last: u64) -> Vec<(u8, u64)> {
        let mut found = Vec::new();
        for level in 1..=rules.levels {
            let from = rules.start(start, level);
            let entries = self.invalid[usize::from(level)].range(from..=last);
            found.extend(entries.map(|start| (level, *start)));
        }
        found
    }
}

/// Whether an invalidation that steps by the stride, like real ones, hits an address in
/// `start..=last`. The range is not empty.
///
/// ```text
/// range           |=======================|
/// named       *       *       *       *        (multiples of the stride)
/// start..=last           |-|                   not named: the stride was too large
/// ```
pub(crate) fn names(what: &Invalidation, start: u64, last: u64) -> bool {
    assert!(what.stride.is_power_of_two(), "a stride of {:#x} bytes", what.stride);
    let first = what.range.start().align_down(what.stride).0;
    let Some(next) = start.checked_next_multiple_of(what.stride) else {
        // No multiple follows below 2^64.
        return false;
    };
    next.max(first) <= last.min(what.range.end().0 - 1)
}

#[cfg(test)]
mod tests {
    use bindery::addr::{VirtAddr, VirtRange};
    use bindery::platform::Tables;

    use super::*;

    const PAGE: u64 = 4096;
    const LAST_PAGE: u64 = 0u64.wrapping_sub(PAGE);
    const LAST_MIB2: u64 = 0u64.wrapping_sub(2 << 20);

    fn what(start: u64, end: u64, stride: u64) -> Invalidation {
        let range = VirtRange::new(VirtAddr(start), VirtAddr(end)).unwrap();
        Invalidation { range, stride, tables: Tables::Unchanged }
    }

    fn leaf(start: u64, order: u8) -> Translation {
        Translation {
            start,
            order,
            frame: 0,
            permissions: Default::default(),
            memory: Default::default(),
            accessed: true,
            dirty: true,
            key: 0,
        }
    }

    #[test]
    fn a_range_to_the_end_hits_its_pages() {
        assert!(names(&what(LAST_PAGE - PAGE, LAST_PAGE, PAGE), LAST_MIB2, u64::MAX));
        assert!(names(&what(LAST_PAGE, u64::MAX, PAGE), LAST_MIB2, u64::MAX));
        assert!(names(&what(LAST_PAGE, u64::MAX, PAGE), LAST_PAGE, u64::MAX));
        assert!(names(&what(LAST_PAGE, u64::MAX, 2 << 20), LAST_MIB2, u64::MAX));
        // A stride of 2 MiB hits only the first page.
        assert!(!names(&what(LAST_MIB2, u64::MAX, 2 << 20), LAST_PAGE, u64::MAX));
        assert!(!names(&what(LAST_PAGE - PAGE, LAST_PAGE, PAGE), LAST_PAGE, u64::MAX));
        assert!(!names(&what(0, PAGE, PAGE), LAST_MIB2, u64::MAX));
    }

    #[test]
    fn a_range_to_the_end_overlaps_its_translations() {
        let mut space = Space::default();
        let huge = leaf(LAST_MIB2, 9);
        space.leaves.insert(huge.start, huge);
        assert_eq!((huge.last(), huge.end()), (u64::MAX, 0));
        let overlap = |start, last| space.leaves_in(start, last).count();
        assert_eq!(overlap(LAST_PAGE, u64::MAX), 1);
        assert_eq!(overlap(LAST_MIB2 - PAGE, u64::MAX), 1);
        assert_eq!(overlap(LAST_MIB2 - PAGE, LAST_MIB2), 1);
        assert_eq!(overlap(LAST_MIB2 - PAGE, LAST_MIB2 - 1), 0);
        assert_eq!(overlap(0, u64::MAX), 1);
    }
}
