//! The single descent: from a table to the entry or the table of a lower level that covers an
//! address.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::sync::atomic::Ordering;

use crate::addr::{Frame, VirtAddr};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level};
use crate::platform::Platform;

use super::locking::{LockTree, Node};
use super::{NoMemory, PageTable, ReadSection};

/// A table of a tree. A value of this type proves that:
/// 1. The frame holds a table: the root, or a table to which an entry of a table refers.
/// 2. The table is not freed during `'s`, which is not longer than the read section in which the
///    table was found. The table may be detached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct Table<'s> {
    frame: Frame,
    _found_in: PhantomData<&'s Frame>,
}

impl Table<'_> {
    /// # Safety
    /// 1. The frame holds a table, which is not freed during the lifetime of the result.
    #[inline(always)]
    pub(crate) const unsafe fn new(frame: Frame) -> Self {
        Self { frame, _found_in: PhantomData }
    }

    /// Its frame.
    #[inline(always)]
    pub(crate) const fn frame(self) -> Frame {
        self.frame
    }
}

impl From<Table<'_>> for Frame {
    #[inline(always)]
    fn from(table: Table<'_>) -> Self {
        table.frame
    }
}

/// A tree in a read section, by which the locking protocol finds tables.
#[derive(Clone, Copy)]
pub(crate) struct SectionTree<'s, 'm, P: Platform>(&'s PageTable<'m, P>);

/// The position of an entry.
#[derive(Clone, Copy)]
pub(crate) struct TableEntry<'s> {
    pub(crate) table: Table<'s>,
    pub(crate) index: EntryIndex,
}

impl TableEntry<'_> {
    /// The entry `count` further on in the table.
    #[inline]
    pub(crate) fn plus(self, count: u32) -> Self {
        Self { index: self.index + count, ..self }
    }
}

impl<'s, A: Arch> Node<A, Table<'s>> {
    /// The position of an entry of this table.
    #[inline]
    pub(crate) fn place(&self, index: EntryIndex) -> TableEntry<'s> {
        TableEntry { table: self.table, index }
    }
}

/// An entry together with its value when it was read.
#[derive(Clone, Copy)]
pub(crate) struct EntryAt<A: Arch, T = Frame> {
    /// Its table.
    pub(crate) node: Node<A, T>,
    /// The index in the table.
    pub(crate) index: EntryIndex,
    /// The entry as stored in memory.
    pub(crate) entry: Entry,
}

impl<A: Arch, T> EntryAt<A, T> {
    /// The end of the addresses that the entry covers, which include `at`.
    #[inline]
    pub(super) fn end(&self, at: u64) -> u64 {
        (at | (self.node.level.span() - 1)).saturating_add(1)
    }
}

impl<P: Platform> PageTable<'_, P> {
    /// The table of `level` for `addr`, from `node` downwards, which spans `addr`. If no such table
    /// exists, the position and the value of the lowest entry above it, which refers to no table.
    /// Called in a read section, with acquire loads, or with the tables locked.
    #[inline(always)]
    pub(super) fn table_below<'s>(
        &self,
        mut node: Node<P::Arch, Table<'s>>,
        addr: VirtAddr,
        level: Level<P::Arch>,
        order: Ordering,
    ) -> Result<Node<P::Arch, Table<'s>>, EntryAt<P::Arch, Table<'s>>> {
        while node.level > level {
            let found = self.entry_in(node, addr, order);
            if node.level.kind(found.entry) != Kind::Table {
                return Err(found);
            }
            // SAFETY: 1. `entry_in` has read the entry in this table, and the entry refers to a
            // table.
            let table = unsafe { Table::new(P::Arch::frame(found.entry)) };
            node = Node { table, level: node.level.below() };
        }
        Ok(node)
    }

    /// The table of `level` for `addr`, from `node` downwards. `node` is a locked table that spans
    /// `addr`. `put` installs a new locked table in each entry on the way that refers to no table.
    /// If `put` fails, the tables that it has installed stay.
    #[inline(always)]
    pub(super) fn table_under<'s>(
        &self,
        mut node: Node<P::Arch, Table<'s>>,
        addr: VirtAddr,
        level: Level<P::Arch>,
        mut put: impl FnMut(EntryAt<P::Arch, Table<'s>>) -> Result<Table<'s>, NoMemory>,
    ) -> Result<Table<'s>, NoMemory> {
        loop {
            match self.table_below(node, addr, level, Ordering::Relaxed) {
                Ok(found) => return Ok(found.table),
                Err(missing) => node = missing.node.child(put(missing)?),
            }
        }
    }

    /// The entry for `addr` at `level`, or the lowest entry above that level with no table below
    /// it, together with its place. The conditions of [`PageTable::table_below`] apply.
    #[inline(always)]
    pub(super) fn entry_below<'s>(
        &self,
        node: Node<P::Arch, Table<'s>>,
        addr: VirtAddr,
        level: Level<P::Arch>,
        order: Ordering,
    ) -> EntryAt<P::Arch, Table<'s>> {
        match self.table_below(node, addr, level, order) {
            Ok(node) => self.entry_in(node, addr, order),
            Err(found) => found,
        }
    }

    /// The entry for `addr` in the table of `node`.
    #[inline(always)]
    pub(super) fn entry_in<'s>(
        &self,
        node: Node<P::Arch, Table<'s>>,
        addr: VirtAddr,
        order: Ordering,
    ) -> EntryAt<P::Arch, Table<'s>> {
        let index = node.level.index_of(addr);
        let entry = Entry(self.entries(node.table)[index.position()].load(order));
        EntryAt { node, index, entry }
    }

    /// The table to which the entry refers, if any.
    #[inline(always)]
    pub(super) fn child_of<'s>(
        &self,
        node: Node<P::Arch, Table<'s>>,
        index: EntryIndex,
    ) -> Option<Table<'s>> {
        let entry = Entry(self.entries(node.table)[index.position()].load(Ordering::Acquire));
        let is_table = node.level.kind(entry) == Kind::Table;
        // SAFETY: 1. the entry was read in this table, and it refers to a table.
        is_table.then(|| unsafe { Table::new(P::Arch::frame(entry)) })
    }

    /// The root, obtained in a read section.
    #[inline(always)]
    pub(super) fn root_in<'s>(
        &'s self,
        _section: &'s ReadSection<'_, P>,
    ) -> Node<P::Arch, Table<'s>> {
        // SAFETY: 1. the root is a table and is freed with the tree, which is borrowed.
        Node { table: unsafe { Table::new(self.root) }, level: P::Arch::ROOT }
    }

    /// The tables of the tree, for descents in a read section.
    #[inline(always)]
    pub(crate) fn tables<'s>(&'s self, _section: &'s ReadSection<'_, P>) -> SectionTree<'s, 's, P> {
        SectionTree(self)
    }
}

impl<'s, P: Platform> LockTree for SectionTree<'s, '_, P> {
    type Arch = P::Arch;
    type Table = Table<'s>;

    #[inline]
    fn root(&self) -> Table<'s> {
        // SAFETY: 1. the root is a table and is freed with the tree, which is borrowed.
        unsafe { Table::new(self.0.root) }
    }

    #[inline]
    fn lock(&self, table: Frame) {
        self.0.lock(table);
    }

    #[inline]
    fn unlock(&self, table: Frame) {
        self.0.unlock(table);
    }

    fn start_again(&self) {
        // The table may still be in the tree: the thread that marked it is about to clear the
        // entry.
        self.0.memory.platform().relax();
    }

    #[inline]
    fn is_stray(&self, table: Frame) -> bool {
        self.0.is_stray(table)
    }

    #[inline]
    fn is_locked(&self, table: Frame) -> bool {
        self.0.is_locked(table)
    }

    #[inline]
    fn is_pending(&self, table: Frame) -> bool {
        self.0.is_pending(table)
    }

    #[inline]
    fn mark_stray(&self, table: Frame) {
        self.0.mark_stray(table);
    }

    fn clear_stray(&self, table: Frame) {
        self.0.meta(table).clear_stray();
    }

    fn has_guards(&self, table: Frame) -> bool {
        self.0.meta(table).has_guards()
    }

    #[inline]
    fn entry_count(&self, table: Frame) -> u32 {
        self.0.entry_count(table)
    }

    #[inline]
    fn child(&self, node: Node<P::Arch, Table<'s>>, index: EntryIndex) -> Option<Table<'s>> {
        self.0.child_of(node, index)
    }
}
