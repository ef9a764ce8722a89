//! Detaches tables, with all tables below them, by clearing the one entry that names them.
//! [`super::locking`] says which tables are marked when.

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Arch, EntryIndex, Kind, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::cursor::Cursor;
use super::locking::{Depth, LockTree, Node};
use super::run::{Run, What};
use super::stray::{mark_children, mark_subtree_stray};
use super::{EntryAt, PageTable, ReadSection};

impl<P: Platform> PageTable<'_, P> {
    /// Detaches the tables for `addr` that are empty, from the lowest up: each is locked again from
    /// one level higher and looked at again, since a fault may have filled it in between.
    pub(crate) fn prune(&self, addr: VirtAddr, gather: &mut Gather) {
        for level in Level::PMD.up_to(P::Arch::ROOT) {
            let span = level.span();
            let Some(slot) = VirtRange::from_len(addr.align_down(span), span) else { return };
            let mut cursor = self.cursor(slot, Depth::Floor(level.below()));
            let Some(found) = cursor.parent_of(addr, level.below()) else { continue };
            let EntryAt { node, index, entry } = found;
            if level.kind(entry) != Kind::Table {
                continue;
            }
            let table = P::Arch::frame(entry);
            if self.entry_count(table) > 0 {
                return;
            }
            let what = What::Table(table);
            let run = Run { at: slot.start(), node, index, count: 1, what };
            cursor.clear_table_entry(&run, slot, gather);
            self.change_entry_count(node.table, 0, 1);
            self.gather_subtree(node.child(table), level.below(), gather, &mut cursor.counts);
            // Under the lock: the neighbor's next fault may install another table in its place,
            // and no walker may then remember the old one.
            cursor.flush(gather);
        }
    }

    /// Marks what hangs in the detached tables, and puts all of it on the list of detached ones.
    /// Called without locks and outside of read sections.
    pub(super) fn gather_detached(&self, gather: &mut Gather, counts: &mut Counts) {
        while let Some(table) = gather.unscanned.pop(&self.memory.frames) {
            let node = Node { table, level: self.meta(table).level() };
            self.gather_below(node, gather, counts);
        }
    }

    fn gather_below(&self, node: Node<P::Arch>, gather: &mut Gather, counts: &mut Counts) {
        let level = node.level.below();
        let children = {
            let _section = ReadSection::enter(self.memory.platform());
            mark_children(self, node, &mut |child| {
                self.memory.worked(1, 1);
                if level == Level::PTE {
                    gather.detached.push(&self.memory.frames, child);
                }
            })
        };
        if level > Level::PTE {
            // The entries of a marked table do not change.
            for index in EntryIndex::all::<P::Arch>() {
                if let Some(table) = self.child(node, index) {
                    self.gather_below(Node { table, level }, gather, counts);
                }
            }
        }
        counts.entries_descended += u64::from(children);
        counts.tables_locked += u64::from(children);
        // They are on the list themselves.
        self.change_entry_count(node.table, 0, children);
        gather.detached.push(&self.memory.frames, node.table);
    }

    /// Marks the detached table of `node` and all below it, and puts each on the gather's list, so
    /// that dropping them is no search. Tables at `held` and above are locked by the caller.
    pub(crate) fn gather_subtree(
        &self,
        node: Node<P::Arch>,
        held: Level<P::Arch>,
        gather: &mut Gather,
        counts: &mut Counts,
    ) {
        mark_subtree_stray(self, node, held, &mut |table, children| {
            counts.entries_descended += u64::from(children);
            counts.tables_locked += 1;
            self.memory.worked(0, 1);
            // The children are on the list themselves.
            self.change_entry_count(table, 0, children);
            gather.detached.push(&self.memory.frames, table);
        });
    }
}

impl<P: Platform> Cursor<'_, '_, P> {
    /// Detaches the `table` of `run`, in which at most `mapped` was mapped; it is freed when the
    /// gather is finished. Only this table is marked. Those below it are marked later, when no lock
    /// is held any more but before their entries are dropped: a thread that locks one of them until
    /// then finds that it is not in the tree, and the present holder of a lock is waited for.
    ///
    /// The caller must flush as after [`Cursor::clear_table_entry`].
    pub(super) fn detach(
        &mut self,
        run: &Run<P::Arch>,
        table: Frame,
        mapped: VirtRange,
        gather: &mut Gather,
    ) {
        let page_table = self.page_table;
        self.clear_table_entry(run, mapped, gather);
        page_table.change_entry_count(run.node.table, 0, 1);
        page_table.lock(table);
        page_table.mark_stray(table);
        page_table.unlock(table);
        self.counts.tables_locked += 1;
        page_table.memory.worked(0, 1);
        let frames = &page_table.memory.frames;
        if run.node.level == Level::PMD {
            gather.detached.push(frames, table);
        } else {
            gather.unscanned.push(frames, table);
        }
    }
}
