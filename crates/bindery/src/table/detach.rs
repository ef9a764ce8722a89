//! Detaches tables, together with all tables below them, by clearing the single entry that refers
//! to them. [`super::locking`] describes which tables are marked and when.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, EntryIndex, Kind, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::edit::Edit;
use super::locking::{Depth, Node};
use super::run::{Run, What};
use super::span::Span;
use super::stray::{mark_children, mark_subtree_stray};
use super::{EntryAt, PageTable, Table};

/// Detaches the empty tables for `addr`, from the lowest up. Each table is locked again from one
/// level higher and checked again, because a fault may have filled it since.
pub(super) fn prune<P: Platform>(edit: &mut Edit<'_, '_, P>, addr: VirtAddr) {
    let page_table = edit.table();
    for level in Level::PMD.up_to(P::Arch::ROOT) {
        let size = level.span();
        let Some(part) = VirtRange::from_len(addr.align_down(size), size) else { return };
        let section = edit.table().read_section();
        let mut span = edit.span(&section, part, Depth::Floor(level.below()));
        let Some(found) = span.parent_of(addr, level.below()) else { continue };
        let EntryAt { node, index, entry } = found;
        if level.kind(entry) != Kind::Table {
            continue;
        }
        // SAFETY: 1. `parent_of` has read the entry in this table, which is locked.
        let table = unsafe { Table::new(P::Arch::frame(entry)) };
        if page_table.entry_count(table) > 0 {
            return;
        }
        let what = What::Table(table);
        let run = Run { at: part.start(), node, index, count: 1, what };
        span.clear_table_entry(&run, part);
        page_table.change_entry_count(node.table, 0, 1);
        span.gather_subtree(node.child(table), level.below());
        // Flushed under the lock: the neighbor's next fault may install another table there, and no
        // walker may still have the old table cached at that point.
        span.flush();
    }
}

/// Marks the tables below the gather's detached tables and adds all of them to the list of detached
/// tables. Called without locks and outside of read sections.
pub(super) fn gather_detached<P: Platform>(
    page_table: &PageTable<'_, P>,
    gather: &mut Gather,
    counts: &mut Counts,
) {
    while let Some(table) = gather.unscanned.pop(&page_table.memory.frames) {
        let level = page_table.meta(table).level();
        // SAFETY: 1. a detached table, freed at the end of the edit that owns the gather.
        let node = Node { table: unsafe { Table::new(table) }, level };
        gather_below(page_table, node, gather, counts);
    }
}

fn gather_below<P: Platform>(
    page_table: &PageTable<'_, P>,
    node: Node<P::Arch, Table<'_>>,
    gather: &mut Gather,
    counts: &mut Counts,
) {
    let memory = page_table.memory;
    let level = node.level.below();
    let children = {
        let section = page_table.read_section();
        mark_children(&page_table.tables(&section), node, &mut |child| {
            memory.worked(1, 1);
            if level == Level::PTE {
                gather.detached.push(&memory.frames, child.frame());
            }
        })
    };
    if level > Level::PTE {
        // The entries of a marked table do not change.
        for index in EntryIndex::all::<P::Arch>() {
            if let Some(table) = page_table.child_of(node, index) {
                gather_below(page_table, Node { table, level }, gather, counts);
            }
        }
    }
    counts.entries_descended += u64::from(children);
    counts.tables_locked += u64::from(children);
    // The child tables are on the list themselves.
    page_table.change_entry_count(node.table, 0, children);
    gather.detached.push(&memory.frames, node.table.frame());
}

/// Marks the detached table of `node` and all tables below it, and adds each to the gather's list,
/// so that dropping them needs no search. The caller has locked the tables at level `held` and
/// above.
pub(super) fn gather_subtree<P: Platform>(
    page_table: &PageTable<'_, P>,
    node: Node<P::Arch, Table<'_>>,
    held: Level<P::Arch>,
    gather: &mut Gather,
    counts: &mut Counts,
) {
    let section = page_table.read_section();
    mark_subtree_stray(&page_table.tables(&section), node, held, &mut |table, children| {
        counts.entries_descended += u64::from(children);
        counts.tables_locked += 1;
        page_table.memory.worked(0, 1);
        // The child tables are on the list themselves.
        page_table.change_entry_count(table, 0, children);
        gather.detached.push(&page_table.memory.frames, table.frame());
    });
}

impl<P: Platform> Span<'_, '_, P> {
    /// Adds the detached table of `node` and all tables below it to the gather's list. The span
    /// holds the locks of tables at level `held` and above.
    pub(super) fn gather_subtree(&mut self, node: Node<P::Arch, Table<'_>>, held: Level<P::Arch>) {
        let (page_table, counts, gather) = self.parts();
        gather_subtree(page_table, node, held, gather, counts);
    }

    /// Detaches the `table` of `run`, whose mappings all lay in `mapped`; the table is freed when
    /// the gather is finished. Only this table is marked. The tables below it are marked later,
    /// after all locks are released but before their entries are dropped. A thread that locks one
    /// of these tables first finds that the table is no longer in the tree. The marking waits for a
    /// thread that already holds such a lock.
    ///
    /// The caller must flush, as after [`Span::clear_table_entry`].
    pub(super) fn detach(&mut self, run: &Run<P::Arch>, table: Table<'_>, mapped: VirtRange) {
        let page_table = self.page_table;
        self.clear_table_entry(run, mapped);
        page_table.change_entry_count(run.node.table, 0, 1);
        page_table.lock(table);
        page_table.mark_stray(table);
        page_table.unlock(table);
        self.counts.tables_locked += 1;
        page_table.memory.worked(0, 1);
        let frames = &page_table.memory.frames;
        if run.node.level == Level::PMD {
            self.gather.detached.push(frames, table.frame());
        } else {
            self.gather.unscanned.push(frames, table.frame());
        }
    }
}
