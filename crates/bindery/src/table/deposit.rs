//! Tables on deposit: with them, the split of a huge leaf needs no memory.
//!
//! A table above level 1 has one table on deposit for each of its leaves and absent entries. A leaf
//! of level 3 becomes a table of 512 leaves of level 2, which need deposits in turn. So the table
//! that it has on deposit has 512 tables on deposit itself, and they change hands with it: a move, a
//! split or a free of one deposited table is all that any leaf needs, whatever its level. Together
//! they take the memory that 512 leaves of level 2 would take.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::Frame;
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::stats::Counts;

use super::locking::LockSet;
use super::{NoMemory, PageTable, Table, free_table, new_table};

/// The number of tables that a table on deposit for a leaf of `level` has on deposit itself.
pub(crate) fn deposits_below<A: Arch>(level: Level<A>) -> u32 {
    if level > Level::PMD { A::ENTRIES } else { 0 }
}

/// A table that is about to be put on deposit for a leaf of level 3, with the deposits that the
/// table brings along. Made without locks, because clearing so many tables takes as long as
/// clearing a huge page. Dropping it frees the tables.
pub(crate) struct LargeDeposit<'t, 'm, P: Platform> {
    page_table: &'t PageTable<'m, P>,
    table: Option<Frame>,
}

impl<'t, 'm, P: Platform> LargeDeposit<'t, 'm, P> {
    /// The tables for one leaf of `level`. May wait for memory. Called without table locks and
    /// outside of read sections.
    pub(crate) fn new(
        page_table: &'t PageTable<'m, P>,
        level: Level<P::Arch>,
    ) -> Result<Self, NoMemory> {
        let mut counts = Counts::default();
        let made = new_deposit(page_table.memory, level, &mut counts);
        page_table.count(&counts);
        Ok(Self { page_table, table: Some(made?) })
    }

    /// Puts the tables on deposit with `holder`, whose lock the caller holds.
    pub(crate) fn give_to(mut self, holder: Table<'_>) {
        if let Some(table) = self.table.take() {
            self.page_table.deposit_table(holder, table);
        }
    }
}

impl<P: Platform> Drop for LargeDeposit<'_, '_, P> {
    fn drop(&mut self) {
        let Some(table) = self.table.take() else { return };
        let mut counts = Counts::default();
        // SAFETY: 1. made by `new`, and given to no holder.
        unsafe { free_deposited(self.page_table.memory, table, &mut counts) };
        self.page_table.count(&counts);
    }
}

fn new_deposit<P: Platform>(
    memory: &Memory<P>,
    level: Level<P::Arch>,
    counts: &mut Counts,
) -> Result<Frame, NoMemory> {
    memory.may_wait();
    let table = new_table(memory, Level::PTE, counts).ok_or(NoMemory)?;
    for _ in 0..deposits_below(level) {
        memory.may_wait();
        let Some(below) = new_table(memory, Level::PTE, counts) else {
            // SAFETY: 1. made above, and known to no other thread.
            unsafe { free_deposited(memory, table, counts) };
            return Err(NoMemory);
        };
        memory.frames.deposit_table(table, below);
    }
    Ok(table)
}

/// Frees one deposited table of `holder`, if the deposit is not empty. `holder` is one of the
/// tables of `locks`.
pub(super) fn free_deposit<P: Platform>(
    memory: &Memory<P>,
    locks: &LockSet,
    holder: Table<'_>,
    counts: &mut Counts,
) {
    let holder = holder.frame();
    if !locks.tables().contains(&holder) {
        debug_assert!(false, "{holder:?} is not locked");
        return;
    }
    // SAFETY: 1. checked above.
    unsafe { free_deposit_held(memory, holder, counts) };
}

/// Frees one deposited table of `holder`. Returns whether the deposit had one.
///
/// # Safety
/// 1. The caller has locked the holder, or has detached it and holds the only reference.
pub(super) unsafe fn free_deposit_held<P: Platform>(
    memory: &Memory<P>,
    holder: Frame,
    counts: &mut Counts,
) -> bool {
    let Some(table) = memory.frames.withdraw_table(holder) else { return false };
    // SAFETY: 1. withdrawn above, which no other thread can do (obligation 1).
    unsafe { free_deposited(memory, table, counts) };
    true
}

/// Frees a table that was on deposit or was made for one, and the tables on deposit with it.
///
/// # Safety
/// 1. The table belongs to the caller: it is on no deposit, and no entry refers to it.
unsafe fn free_deposited<P: Platform>(memory: &Memory<P>, table: Frame, counts: &mut Counts) {
    while let Some(below) = memory.frames.withdraw_table(table) {
        // SAFETY: 1. a table on deposit is a table, and only the caller can withdraw it (obligation
        // 1). 2. No entry and no TLB has ever referred to the table.
        unsafe { free_table(memory, below, counts) };
    }
    // SAFETY: 1. and 2. as above.
    unsafe { free_table(memory, table, counts) };
}
