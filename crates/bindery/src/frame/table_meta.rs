//! The metadata of a frame that holds a page table, with one method for each recorded property.
//! [`super::meta`] describes the layout.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::addr::Frame;
use crate::arch::Level;
use crate::platform::Platform;

use super::Frames;
use super::meta::{FrameMeta, GUARDS, LOCK, MetaKind, NONE, STRAY, level_in, link, state_of_table};
use super::pending::{self, Last};

/// The metadata of one table.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct TableMeta<'a>(&'a FrameMeta);

impl<'a> TableMeta<'a> {
    /// Turns a zeroed frame into an empty, locked table of `level`.
    pub(crate) fn init<A>(self, level: Level<A>) {
        self.0.next.store(NONE, Relaxed);
        self.0.previous.store(0, Relaxed);
        self.0.owner.store(NONE, Relaxed);
        self.0.word.store(0, Relaxed);
        self.0.state.store(state_of_table(level) | LOCK, Release);
    }

    /// Turns an empty table on deposit into a locked table of `level`, which keeps the tables that
    /// were on deposit with it. No other thread can find the table yet.
    pub(crate) fn init_from_deposit<A>(self, level: Level<A>) {
        let below = self.0.owner.load(Relaxed);
        self.init(level);
        self.0.owner.store(below, Relaxed);
    }

    /// Whether the frame is a table.
    #[inline]
    pub(crate) fn is_table(self) -> bool {
        self.0.kind() == MetaKind::Table
    }

    /// Whether the frame is a table of `level`.
    pub(crate) fn is_table_of<A>(self, level: Level<A>) -> bool {
        self.is_table() && self.level() == level
    }

    /// The table's level.
    #[inline]
    pub(crate) fn level<A>(self) -> Level<A> {
        level_in(self.0.state.load(Relaxed))
    }

    /// Takes the lock if it is free, with acquire ordering.
    #[inline]
    pub(crate) fn try_lock(self) -> bool {
        self.0.state.fetch_or(LOCK, Acquire) & LOCK == 0
    }

    /// Unlocks, with release ordering.
    #[inline]
    pub(crate) fn unlock(self) {
        // A plain store: only the holder changes the other bits, and waiting threads set only the
        // lock bit, which does not give them the lock.
        self.0.state.store(self.0.state.load(Relaxed) & !LOCK, Release);
    }

    /// Whether a thread holds the lock, with acquire ordering.
    #[inline]
    pub(crate) fn is_locked(self) -> bool {
        self.0.state.load(Acquire) & LOCK != 0
    }

    /// Whether the table was detached.
    #[inline]
    pub(crate) fn is_stray(self) -> bool {
        self.0.state.load(Relaxed) & STRAY != 0
    }

    /// Marks the table as detached.
    #[inline]
    pub(crate) fn mark_stray(self) {
        self.0.state.fetch_or(STRAY, Relaxed);
    }

    /// Clears the mark of a detached table.
    pub(crate) fn clear_stray(self) {
        self.0.state.fetch_and(!STRAY, Relaxed);
    }

    /// Whether the table may have a guard marker.
    #[inline]
    pub(crate) fn has_guards(self) -> bool {
        self.0.state.load(Relaxed) & GUARDS != 0
    }

    /// Records that the table may contain a guard marker from now on. The caller holds the lock.
    pub(crate) fn note_guards(self) {
        if !self.has_guards() {
            self.0.state.fetch_or(GUARDS, Relaxed);
        }
    }

    /// The number of nonempty entries.
    #[inline]
    pub(crate) fn entry_count(self) -> u32 {
        self.0.word.load(Relaxed) as u32
    }

    /// Changes the entry count. The caller holds the lock, or no other thread can find the table.
    #[inline]
    pub(crate) fn change_entry_count(self, added: u32, removed: u32) {
        let entry_count = self.0.word.load(Relaxed);
        self.0.word.store(entry_count + u64::from(added) - u64::from(removed), Relaxed);
    }

    /// Adds entries to the count of a table without a lock and returns the previous count. With
    /// acquire ordering.
    #[inline]
    pub(crate) fn count_in(self, entries: u64) -> u64 {
        self.0.word.fetch_add(entries, Acquire)
    }

    /// Subtracts entries from the count of a table without a lock. With release ordering.
    #[inline]
    pub(crate) fn count_out(self, entries: u64) {
        self.0.word.fetch_sub(entries, Release);
    }

    /// The count of pending flushes.
    #[inline]
    pub(crate) fn pending(self) -> &'a AtomicU32 {
        &self.0.previous
    }

    /// Records that the table was detached and no reader can reach it. Returns whether the caller
    /// frees it.
    pub(crate) fn release(self) -> Last {
        pending::release(self.pending())
    }

    /// The next table on the list that contains this table.
    #[inline]
    pub(crate) fn next(self) -> Option<Frame> {
        link(self.0.next.load(Relaxed))
    }

    /// The first table of the deposit; [`TableMeta::next`] leads to the others.
    pub(crate) fn deposit(self) -> Option<Frame> {
        link(self.0.owner.load(Relaxed))
    }

    /// Links the table before `next` on a list.
    #[inline]
    pub(crate) fn set_next(self, next: Option<Frame>) {
        self.0.next.store(next.map_or(NONE, |next| next.0), Relaxed);
    }
}

impl<P: Platform> Frames<P> {
    /// The metadata of `table`.
    #[inline]
    pub(crate) fn table(&self, table: Frame) -> TableMeta<'_> {
        TableMeta(self.meta(table))
    }

    /// Puts an empty table into the deposit of `holder`, whose lock the caller holds.
    #[inline]
    pub(crate) fn deposit_table(&self, holder: Frame, table: Frame) {
        let head = &self.meta(holder).owner;
        self.meta(table).next.store(head.load(Relaxed), Relaxed);
        head.store(table.0, Relaxed);
    }

    /// Moves up to `count` tables from the deposit of `from` to that of `to`. The caller holds the
    /// locks of both. The tables remain linked, and only the ends of their list are written.
    pub(crate) fn move_deposits(&self, from: Frame, to: Frame, count: u32) {
        let head = &self.meta(from).owner;
        let Some(first) = link(head.load(Relaxed)) else { return };
        let mut last = first;
        for _ in 1..count {
            match link(self.meta(last).next.load(Relaxed)) {
                Some(next) => last = next,
                None => break,
            }
        }
        let (rest, to) = (&self.meta(last).next, &self.meta(to).owner);
        head.store(rest.load(Relaxed), Relaxed);
        rest.store(to.load(Relaxed), Relaxed);
        to.store(first.0, Relaxed);
    }

    /// Removes a table from the deposit of `holder`, whose lock the caller holds.
    #[inline]
    pub(crate) fn withdraw_table(&self, holder: Frame) -> Option<Frame> {
        let head = &self.meta(holder).owner;
        let table = link(head.load(Relaxed))?;
        head.store(self.meta(table).next.load(Relaxed), Relaxed);
        Some(table)
    }
}

/// Tables on a list, linked through their metadata, last in, first out.
#[derive(Default)]
pub(crate) struct TableStack(Option<Frame>);

impl TableStack {
    /// The empty list.
    #[inline]
    pub(crate) const fn new() -> Self {
        Self(None)
    }

    /// Whether the list is empty.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Adds a table that is on no other list.
    #[inline]
    pub(crate) fn push<P: Platform>(&mut self, frames: &Frames<P>, table: Frame) {
        frames.table(table).set_next(self.0);
        self.0 = Some(table);
    }

    /// The tables. The caller may overwrite the link of a returned one.
    pub(crate) fn iter<P: Platform>(&self, frames: &Frames<P>) -> impl Iterator<Item = Frame> {
        core::iter::successors(self.0, |table| frames.table(*table).next())
    }

    /// Removes a table.
    #[inline]
    pub(crate) fn pop<P: Platform>(&mut self, frames: &Frames<P>) -> Option<Frame> {
        let table = self.0?;
        self.0 = frames.table(table).next();
        Some(table)
    }
}
