//! The one descent: from a table to the entry or the table of a lower level that covers an
//! address.

use core::sync::atomic::Ordering;

use crate::addr::VirtAddr;
use crate::arch::{self, Arch, Entry, Kind, Level};
use crate::platform::Platform;

use super::PageTable;
use super::locking::Node;

impl<P: Platform> PageTable<'_, P> {
    /// The table of `level` for `addr`, from `node` down, which spans it. Where there is none, the
    /// entry above it that names no table, and its place. In a read section, with acquire, or with
    /// the tables locked.
    #[inline(always)]
    pub(super) fn table_below(
        &self,
        mut node: Node,
        addr: VirtAddr,
        level: Level,
        order: Ordering,
    ) -> Result<Node, (Node, u32, Entry)> {
        while node.level > level {
            let (_, index, entry) = self.entry_in(node, addr, order);
            if arch::kind::<P::Arch>(entry, node.level) != Kind::Table {
                return Err((node, index, entry));
            }
            node = node.child(P::Arch::frame(entry));
        }
        Ok(node)
    }

    /// The entry for `addr` at `level`, or the one above it that has no table below it, and its
    /// place. Conditions as for [`PageTable::table_below`].
    #[inline(always)]
    pub(super) fn entry_below(
        &self,
        node: Node,
        addr: VirtAddr,
        level: Level,
        order: Ordering,
    ) -> (Node, u32, Entry) {
        match self.table_below(node, addr, level, order) {
            Ok(node) => self.entry_in(node, addr, order),
            Err(found) => found,
        }
    }

    /// The entry for `addr` in the table of `node`.
    #[inline(always)]
    fn entry_in(&self, node: Node, addr: VirtAddr, order: Ordering) -> (Node, u32, Entry) {
        let index = node.level.index_of::<P::Arch>(addr);
        (node, index, Entry(self.slots(node.table)[index as usize].load(order)))
    }

    /// The root and its level.
    #[inline]
    pub(super) fn root_node(&self) -> Node {
        Node { table: self.root, level: P::Arch::ROOT }
    }
}
