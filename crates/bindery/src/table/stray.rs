//! Stray marks, which show threads that still reach a detached table that the table is detached.
//!
//! [`super::locking`] describes the protocol. This module marks one table, or all tables below a
//! table.

use crate::addr::Frame;
use crate::arch::{EntryIndex, Level};

use super::locking::{LockTree, Node};

/// Whether the tables of a subtree may be detached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Keep {
    /// All tables, whatever they contain.
    Nothing,
    /// All tables, unless one of them may have a guard marker.
    Guards,
}

/// Marks the tables of `node` and below as stray, unless one of them has to be kept, in which case
/// no table is marked and `false` is returned. The subtree is still in the tree. A thread that
/// meets the mark therefore descends to the table repeatedly, as if waiting for a lock, until the
/// caller has cleared the entry or the mark. The caller holds the parent's lock.
///
/// The mark precedes the clearing of the entry, so that a guard is never lost:
/// 1. CPU A, truncating, clears the entry that refers to table X, which has no guard;
/// 2. CPU B locks X, which it had found before, writes a guard into it, and returns;
/// 3. CPU A marks X stray and drops its entries.
pub(crate) fn try_mark_stray<T: LockTree>(
    tree: &T,
    node: Node<T::Arch, T::Table>,
    keep: Keep,
) -> bool {
    if keep == Keep::Nothing {
        return true;
    }
    tree.lock(node.table.into());
    let free = !tree.has_guards(node.table.into());
    if free {
        tree.mark_stray(node.table.into());
    }
    tree.unlock(node.table.into());
    if !free || node.level == Level::PTE {
        return free;
    }
    let (entry_count, mut children) = (tree.entry_count(node.table.into()), 0);
    for index in EntryIndex::all::<T::Arch>() {
        if children == entry_count {
            break;
        }
        let Some(table) = tree.child(node, index) else { continue };
        children += 1;
        let child = node.child(table);
        if !try_mark_stray(tree, child, keep) {
            for index in EntryIndex::FIRST.up_to(index) {
                if let Some(table) = tree.child(node, index) {
                    unmark_subtree(tree, node.child(table));
                }
            }
            unmark(tree, node.table.into());
            return false;
        }
    }
    true
}

fn unmark<T: LockTree>(tree: &T, table: Frame) {
    tree.lock(table);
    tree.clear_stray(table);
    tree.unlock(table);
}

fn unmark_subtree<T: LockTree>(tree: &T, node: Node<T::Arch, T::Table>) {
    unmark(tree, node.table.into());
    if node.level > Level::PTE {
        for index in EntryIndex::all::<T::Arch>() {
            if let Some(table) = tree.child(node, index) {
                unmark_subtree(tree, node.child(table));
            }
        }
    }
}

/// Marks the tables that hang in the table of `node`, which is detached and already marked, and
/// passes each to `met`. Returns the number of these tables. Called inside a read section, without
/// locks.
pub(crate) fn mark_children<T: LockTree>(
    tree: &T,
    node: Node<T::Arch, T::Table>,
    met: &mut impl FnMut(T::Table),
) -> u32 {
    let (entry_count, mut children) = (tree.entry_count(node.table.into()), 0);
    for index in EntryIndex::all::<T::Arch>() {
        if children == entry_count {
            break;
        }
        let Some(table) = tree.child(node, index) else { continue };
        children += 1;
        tree.lock(table.into());
        tree.mark_stray(table.into());
        tree.unlock(table.into());
        met(table);
    }
    children
}

/// Marks the just-detached table of `node` and all tables below it as stray, in pre-order, and
/// passes each to `met` with the number of tables that hang in it. The caller has already locked
/// the tables at level `held` and above.
pub(crate) fn mark_subtree_stray<T: LockTree>(
    tree: &T,
    node: Node<T::Arch, T::Table>,
    held: Level<T::Arch>,
    met: &mut impl FnMut(T::Table, u32),
) {
    if node.level < held {
        tree.lock(node.table.into());
    }
    tree.mark_stray(node.table.into());
    if node.level < held {
        tree.unlock(node.table.into());
    }
    let mut children = 0;
    if node.level > Level::PTE {
        let entry_count = tree.entry_count(node.table.into());
        for index in EntryIndex::all::<T::Arch>() {
            if children == entry_count {
                break;
            }
            if let Some(table) = tree.child(node, index) {
                children += 1;
                mark_subtree_stray(tree, node.child(table), held, met);
            }
        }
    }
    met(node.table, children);
}
