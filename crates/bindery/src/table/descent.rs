//! The one descent: from a table to the entry or the table of a lower level that covers an
//! address.

use core::sync::atomic::Ordering;

use crate::addr::{Frame, VirtAddr};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level};
use crate::platform::Platform;

use super::locking::Node;
use super::{NoMemory, PageTable};

/// The place of an entry.
#[derive(Clone, Copy)]
pub(crate) struct TableEntry {
    pub(crate) table: Frame,
    pub(crate) index: EntryIndex,
}

impl TableEntry {
    /// The entry `count` further on in the table.
    #[inline]
    pub(crate) fn plus(self, count: u32) -> Self {
        Self { index: self.index + count, ..self }
    }
}

impl<A: Arch> Node<A> {
    /// The place of an entry of this table.
    #[inline]
    pub(crate) fn place(&self, index: EntryIndex) -> TableEntry {
        TableEntry { table: self.table, index }
    }
}

/// An entry as it was read.
#[derive(Clone, Copy)]
pub(crate) struct EntryAt<A: Arch> {
    /// Its table.
    pub(crate) node: Node<A>,
    /// Its index there.
    pub(crate) index: EntryIndex,
    /// The entry as it is in memory.
    pub(crate) entry: Entry,
}

impl<A: Arch> EntryAt<A> {
    /// The end of the addresses that the entry covers, `at` among them.
    #[inline]
    pub(super) fn end(&self, at: u64) -> u64 {
        (at | (self.node.level.span() - 1)).saturating_add(1)
    }
}

impl<P: Platform> PageTable<'_, P> {
    /// The table of `level` for `addr`, from `node` down, which spans it. If there is none, the
    /// entry above it that refers to no table, and its place. In a read section, with acquire, or
    /// with the tables locked.
    #[inline(always)]
    pub(super) fn table_below(
        &self,
        mut node: Node<P::Arch>,
        addr: VirtAddr,
        level: Level<P::Arch>,
        order: Ordering,
    ) -> Result<Node<P::Arch>, EntryAt<P::Arch>> {
        while node.level > level {
            let found = self.entry_in(node, addr, order);
            if node.level.kind(found.entry) != Kind::Table {
                return Err(found);
            }
            node = node.child(P::Arch::frame(found.entry));
        }
        Ok(node)
    }

    /// The table of `level` for `addr`, from `node` down, a locked table that spans it. `put` makes
    /// a table, locked, in each entry on the way that names none. If it fails, the tables that it
    /// has made stay.
    #[inline(always)]
    pub(super) fn table_under(
        &self,
        mut node: Node<P::Arch>,
        addr: VirtAddr,
        level: Level<P::Arch>,
        mut put: impl FnMut(EntryAt<P::Arch>) -> Result<Frame, NoMemory>,
    ) -> Result<Frame, NoMemory> {
        loop {
            match self.table_below(node, addr, level, Ordering::Relaxed) {
                Ok(found) => return Ok(found.table),
                Err(missing) => node = missing.node.child(put(missing)?),
            }
        }
    }

    /// The entry for `addr` at `level`, or the one above it that has no table below it, and its
    /// place. Conditions as for [`PageTable::table_below`].
    #[inline(always)]
    pub(super) fn entry_below(
        &self,
        node: Node<P::Arch>,
        addr: VirtAddr,
        level: Level<P::Arch>,
        order: Ordering,
    ) -> EntryAt<P::Arch> {
        match self.table_below(node, addr, level, order) {
            Ok(node) => self.entry_in(node, addr, order),
            Err(found) => found,
        }
    }

    /// The entry for `addr` in the table of `node`.
    #[inline(always)]
    fn entry_in(&self, node: Node<P::Arch>, addr: VirtAddr, order: Ordering) -> EntryAt<P::Arch> {
        let index = node.level.index_of(addr);
        let entry = Entry(self.entries(node.table)[index.position()].load(order));
        EntryAt { node, index, entry }
    }

    /// The root and its level.
    #[inline]
    pub(super) fn root_node(&self) -> Node<P::Arch> {
        Node { table: self.root, level: P::Arch::ROOT }
    }
}
