//! Spare tables for an operation that holds locks.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::mem;

use crate::Memory;
use crate::addr::Frame;
use crate::arch::{Arch, Level};
use crate::frame::table_meta::TableStack;
use crate::platform::Platform;
use crate::stats::Counts;

use super::{NoMemory, free_table, new_table};

/// The source of new tables while locks are held: first the tables allocated beforehand, then the
/// allocator if it has a table immediately available.
///
/// Nothing waits for memory under a table lock or in a read section:
/// 1. CPU A holds a table's lock, finds no free frame, and waits for memory;
/// 2. CPU B reclaims, chooses a page of that table, and waits for the table's lock.
///
/// If the attempt fails, the operation therefore releases its locks, fills the pool outside them,
/// and checks again ([`super::PageTable::with_tables`]).
pub(crate) struct TablePool<'m, P: Platform> {
    memory: &'m Memory<P>,
    tables: TableStack,
    pub(crate) counts: Counts,
}

impl<'m, P: Platform> TablePool<'m, P> {
    /// An empty pool.
    #[inline]
    pub(crate) fn new(memory: &'m Memory<P>) -> Self {
        Self { memory, tables: TableStack::new(), counts: Counts::default() }
    }

    /// A pool of `count` tables. May wait for memory.
    pub(crate) fn fill(memory: &'m Memory<P>, count: u64) -> Result<Self, NoMemory> {
        let mut pool = Self::new(memory);
        if count > 0 {
            // On failure, dropping the pool frees its tables.
            pool.add(count)?;
        }
        Ok(pool)
    }

    /// Adds the tables that one place of the tree can need: one per level, and one on deposit. May
    /// wait for memory.
    pub(crate) fn refill(&mut self) -> Result<(), NoMemory> {
        self.add(u64::from(P::Arch::LEVELS))
    }

    #[inline(never)]
    pub(crate) fn add(&mut self, count: u64) -> Result<(), NoMemory> {
        for _ in 0..count {
            self.memory.may_wait();
            let table = new_table(self.memory, Level::PTE, &mut self.counts).ok_or(NoMemory)?;
            self.put(table);
        }
        Ok(())
    }

    /// Adds an empty table to which nothing refers.
    pub(crate) fn put(&mut self, table: Frame) {
        self.tables.push(&self.memory.frames, table);
    }

    /// A locked, empty table for `level`. Counts the table if it comes from the allocator.
    #[inline(never)]
    pub(crate) fn take(
        &mut self,
        level: Level<P::Arch>,
        counts: &mut Counts,
    ) -> Result<Frame, NoMemory> {
        let Some(table) = self.tables.pop(&self.memory.frames) else {
            return new_table(self.memory, level, counts).ok_or(NoMemory);
        };
        self.memory.frames.table(table).init(level);
        Ok(table)
    }

    /// Whether the pool has no table.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Whether the pool contains tables that were allocated beforehand and are not yet counted.
    pub(crate) fn is_used(&self) -> bool {
        self.counts.tables_allocated > 0
    }

    /// Frees the unneeded tables and adds the cost of the pool to `counts`.
    #[inline]
    pub(crate) fn settle(&mut self, counts: &mut Counts) {
        if self.is_used() {
            self.free_unused();
            *counts += mem::take(&mut self.counts);
        }
    }

    /// Frees the unneeded tables.
    #[inline(never)]
    pub(crate) fn free_unused(&mut self) {
        while let Some(table) = self.tables.pop(&self.memory.frames) {
            // SAFETY: 1. and 2. nothing refers to the pool's tables (`put`).
            unsafe { free_table(self.memory, table, &mut self.counts) };
        }
    }
}

impl<P: Platform> Drop for TablePool<'_, P> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_empty() {
            self.free_unused();
        }
    }
}
