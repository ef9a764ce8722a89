//! Moves mappings between two places of one tree: `mremap` ([`range`]) and `UFFDIO_MOVE`
//! ([`pages`]).
//!
//! | | `range` | `pages` |
//! |---|---|---|
//! | VMAs of both places | held for writing | held for reading, concurrently with faults |
//! | reverse map | its trees are locked | each folio is locked and gets a new index |
//! | unit | tables of any level, runs | tables of level 1, whole folios |
//! | failure | none after the first entry | stops at any page |
//!
//! Both split a move into *pieces* ([`Piece`]). A piece moves under one set of table locks
//! ([`LockedPiece`]), which are the locks of both ranges' tables, acquired in one pass. Its
//! [`MovePolicy`] describes how the VMAs are held.
//!
//! A move of one piece flushes before it releases the locks. Otherwise:
//! 1. CPU A moves the entry of a page and releases the locks without a flush.
//! 2. CPU B swaps the page out through its new address, flushes that address and reuses the frame.
//! 3. CPU C still writes through its translation of the old address, into the reused frame.
//!
//! A move of several pieces flushes once for many pieces. Until then, each table at either end is
//! marked as pending ([`crate::tlb`]), and the tree records the move ([`Moving`]). A thread that
//! finds the mark flushes the source as well as its own range.

mod moving;
pub(crate) mod pages;
mod piece;
pub(crate) mod range;

use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::locking::LockSet;
use super::{PageTable, ReadSection, TablePool};
use piece::{LockedPiece, MovePolicy, Piece};

pub(crate) use moving::Moving;

/// A move in progress, of one kind: [`range::RangeMove`] or [`pages::MoveProgress`].
pub(crate) struct Mover<'a, 'm, P: Platform, K> {
    page_table: &'a PageTable<'m, P>,
    /// The source of tables.
    pool: &'a mut TablePool<'m, P>,
    gather: &'a mut Gather,
    counts: &'a mut Counts,
    /// Whether the move marks tables and flushes after it has released their locks.
    marks: bool,
    kind: K,
}

impl<'m, P: Platform, K> Mover<'_, 'm, P, K> {
    /// Locks the tables of both places of `piece` and lends them to `work`.
    ///
    /// Unless the move marks tables, every TLB has dropped the old translations before the locks
    /// are released.
    #[inline(always)]
    fn with_piece<'s, S: MovePolicy, R>(
        &mut self,
        tree: (&'s PageTable<'m, P>, &'s ReadSection<'_, P>),
        piece: Piece<P::Arch>,
        policy: S,
        work: impl FnOnce(&mut LockedPiece<'_, 's, 'm, P, S>) -> R,
    ) -> R {
        let (page_table, section) = tree;
        let mut locks = LockSet::new();
        let root = page_table.root_in(section);
        let mut locked = LockedPiece {
            page_table,
            locks: &mut locks,
            pool: self.pool,
            gather: self.gather,
            counts: self.counts,
            from: root,
            to: root,
            marks: self.marks,
            piece,
            policy,
        };
        locked.lock(section);
        let result = work(&mut locked);
        if !locked.marks {
            locked.page_table.flush(locked.gather, locked.counts);
        }
        result
    }

    /// Flushes the old addresses of the moved pages from every TLB.
    fn flush(&mut self) {
        self.page_table.flush(self.gather, self.counts);
    }
}
