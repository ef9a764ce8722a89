//! The frames in a strict TLB, so that the release of a frame is checked without a search through
//! all entries.
//!
//! A translation of order n begins at a frame that is a multiple of 2^n, so the translations that
//! overlap a range of frames begin between the start of the range, rounded down to 2^n, and its
//! end. One search for each order in use finds them.

use std::collections::{BTreeMap, BTreeSet};

use bindery::addr::Frame;

use crate::mmu::Translation;

/// Root and first address of a cached translation.
pub(crate) type LeafKey = (u32, u64);
/// Root, level and first address of a cached intermediate entry.
pub(crate) type TableKey = (u32, u8, u64);

#[derive(Debug, Default)]
pub(crate) struct FrameIndex {
    leaves: BTreeMap<u8, BTreeSet<(u32, LeafKey)>>,
    tables: BTreeSet<(u32, TableKey)>,
}

impl FrameIndex {
    pub(crate) fn add_leaf(&mut self, root: Frame, leaf: &Translation) {
        let key = (leaf.frame, (root.0, leaf.start));
        self.leaves.entry(leaf.order).or_default().insert(key);
    }

    pub(crate) fn remove_leaf(&mut self, root: Frame, leaf: &Translation) {
        if let Some(leaves) = self.leaves.get_mut(&leaf.order) {
            leaves.remove(&(leaf.frame, (root.0, leaf.start)));
        }
    }

    pub(crate) fn add_table(&mut self, root: Frame, level: u8, start: u64, table: Frame) {
        self.tables.insert((table.0, (root.0, level, start)));
    }

    pub(crate) fn remove_table(&mut self, root: Frame, level: u8, start: u64, table: Frame) {
        self.tables.remove(&(table.0, (root.0, level, start)));
    }

    /// The translations to any of the frames.
    pub(crate) fn leaves_to(&self, first: Frame, count: u32) -> Vec<LeafKey> {
        let end = u64::from(first.0) + u64::from(count);
        let mut found = Vec::new();
        for (order, leaves) in &self.leaves {
            let from = first.0 >> order << order;
            let candidates = leaves.range((from, (0, 0))..);
            found.extend(
                candidates.take_while(|(frame, _)| u64::from(*frame) < end).map(|(_, key)| *key),
            );
        }
        found
    }

    /// The intermediate entries that point to any of the frames.
    pub(crate) fn tables_in(&self, first: Frame, count: u32) -> Vec<TableKey> {
        let end = u64::from(first.0) + u64::from(count);
        let candidates = self.tables.range((first.0, (0, 0, 0))..);
        candidates.take_while(|(frame, _)| u64::from(*frame) < end).map(|(_, key)| *key).collect()
    }
}
