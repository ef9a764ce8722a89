//! Lists of items that wait for a grace period, linked through the items themselves. The lists need
//! no memory, and two lists are spliced in constant time.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::Memory;
use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::frame::Frames;
use crate::frame::meta::{NONE, link};
use crate::frame::pending::Last;
use crate::memory::{DEFERRED_KINDS, Opaque, Record, RecordKind};
use crate::platform::Platform;

/// A record with a link for use after it was unlinked from all lookups.
pub(crate) trait Linked: Record + Sync {
    /// The link.
    fn next(&self) -> &AtomicPtr<Self>;
}

/// Records of one type that were unlinked from all lookups.
pub(crate) struct Chain<T> {
    first: Option<NonNull<T>>,
    last: Option<NonNull<T>>,
    count: u32,
}

// SAFETY: only readers share the records on the chain, and they use only atomics; all three types
// of records are `Sync`.
unsafe impl<T: Sync> Send for Chain<T> {}

impl<T> Default for Chain<T> {
    #[inline]
    fn default() -> Self {
        Self { first: None, last: None, count: 0 }
    }
}

impl<T: Linked> Chain<T> {
    /// Prepends a record.
    ///
    /// # Safety
    /// 1. The record lives until it is freed as part of a [`Batch`].
    /// 2. The record is on no chain yet, and no other thread uses its link.
    pub(crate) unsafe fn push(&mut self, node: NonNull<T>) {
        let next = self.first.map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the record lives (1).
        unsafe { node.as_ref() }.next().store(next, Relaxed);
        self.first = Some(node);
        if self.last.is_none() {
            self.last = Some(node);
        }
        self.count += 1;
    }

    /// Takes over the records of another chain. Constant time.
    pub(crate) fn append(&mut self, other: Self) {
        let Some(first) = other.first else { return };
        match self.last {
            // SAFETY: records on the chain are live (`push`, 1).
            Some(last) => unsafe { last.as_ref() }.next().store(first.as_ptr(), Relaxed),
            None => self.first = Some(first),
        }
        self.last = other.last;
        self.count += other.count;
    }

    /// The records.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let mut next = self.first;
        core::iter::from_fn(move || {
            // SAFETY: records on the chain are live (`push`, 1) and remain on it while the chain is
            // borrowed.
            let node = unsafe { next?.as_ref() };
            next = NonNull::new(node.next().load(Relaxed));
            Some(node)
        })
    }

    /// Whether the batch is empty.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Frees the records.
    ///
    /// # Safety
    /// 1. The records were unlinked from all lookups, and every lookup that may have found them has
    ///    ended.
    #[inline]
    pub(super) unsafe fn free<P: Platform>(self, memory: &Memory<P>) {
        let mut next = self.first;
        while let Some(node) = next {
            // SAFETY: records on the chain are live (`push`, 1).
            next = NonNull::new(unsafe { node.as_ref() }.next().load(Relaxed));
            // SAFETY: 1. The record came from the slab of its type. 2. It is no longer used (1).
            unsafe { memory.slab::<T>().free(&memory.frames, node) };
        }
    }
}

/// Detached page tables, linked through their metadata.
pub(crate) struct DetachedTables {
    first: u32,
    last: u32,
    count: u32,
}

impl Default for DetachedTables {
    #[inline]
    fn default() -> Self {
        Self { first: NONE, last: NONE, count: 0 }
    }
}

impl DetachedTables {
    /// Prepends a detached table.
    ///
    /// # Safety
    /// 1. The table is in no tree and on no other list.
    /// 2. The table is flushed before the list is passed to [`Batch`] or `free_unlinked`.
    #[inline]
    pub(crate) unsafe fn push<P: Platform>(&mut self, frames: &Frames<P>, table: Frame) {
        frames.meta(table).next.store(self.first, Relaxed);
        self.first = table.0;
        if self.last == NONE {
            self.last = table.0;
        }
        self.count += 1;
    }

    /// Removes the first table from the list.
    fn pop<P: Platform>(&mut self, frames: &Frames<P>) -> Option<Frame> {
        let table = link(self.first)?;
        self.first = frames.meta(table).next.load(Relaxed);
        if self.first == NONE {
            self.last = NONE;
        }
        self.count -= 1;
        Some(table)
    }

    /// Takes over the tables of another list. Constant time.
    fn append<P: Platform>(&mut self, frames: &Frames<P>, other: Self) {
        if other.first == NONE {
            return;
        }
        match link(self.last) {
            Some(last) => frames.meta(last).next.store(other.first, Relaxed),
            None => self.first = other.first,
        }
        self.last = other.last;
        self.count += other.count;
    }

    /// The tables.
    pub(crate) fn iter<'a, P: Platform>(
        &'a self,
        frames: &'a Frames<P>,
    ) -> impl Iterator<Item = Frame> + 'a {
        let mut next = link(self.first);
        core::iter::from_fn(move || {
            let table = next?;
            next = link(frames.meta(table).next.load(Relaxed));
            Some(table)
        })
    }

    /// Whether the list is empty.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first == NONE
    }

    /// Frees the tables. All read sections that could have found them have ended.
    #[inline]
    pub(super) fn free<P: Platform>(mut self, memory: &Memory<P>) {
        while let Some(table) = self.pop(&memory.frames) {
            // SAFETY: 1. obligations 1 and 2 of `push`, and the read sections have ended; 2. the
            // table was on this list.
            unsafe { release_table(memory, table) };
        }
    }

    /// The number of tables.
    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }
}

/// A [`Chain`] of records with their type erased.
struct RecordChain<P: Platform> {
    first: *mut Opaque,
    /// The link of the last record.
    last: *const AtomicPtr<Opaque>,
    count: u32,
    /// The instance of [`RecordChain::free_as`] for the record type, once the chain has records.
    free: unsafe fn(&mut Self, &Memory<P>, u32),
}

// SAFETY: as for a `Chain`: the records are `Sync`.
unsafe impl<P: Platform> Send for RecordChain<P> {}

impl<P: Platform> RecordChain<P> {
    const NONE: Self =
        Self { first: ptr::null_mut(), last: ptr::null(), count: 0, free: |_, _, _| {} };

    fn of<T: Linked>(chain: Chain<T>) -> Self {
        let (Some(first), Some(last)) = (chain.first, chain.last) else { return Self::NONE };
        // SAFETY: records on the chain are live (`Chain::push`, 1).
        let last = ptr::from_ref(unsafe { last.as_ref() }.next());
        let (first, last) = (first.as_ptr().cast(), last.cast());
        Self { first, last, count: chain.count, free: Self::free_as::<T> }
    }

    /// Takes over the records of another list with the same type. Constant time.
    fn append(&mut self, other: Self) {
        if other.count == 0 {
            return;
        }
        if self.count == 0 {
            *self = other;
            return;
        }
        // SAFETY: records on the chain are live (`Chain::push`, 1). All pointers to records have
        // the same layout, and therefore so do their links.
        unsafe { &*self.last }.store(other.first, Relaxed);
        self.last = other.last;
        self.count += other.count;
    }

    /// Frees up to `most` records.
    ///
    /// # Safety
    /// 1. The records are of this type.
    /// 2. The records were unlinked from all lookups, and every lookup that may have found them has
    ///    ended.
    unsafe fn free_as<T: Linked>(&mut self, memory: &Memory<P>, most: u32) {
        for _ in 0..most.min(self.count) {
            let Some(node) = NonNull::new(self.first.cast::<T>()) else { return };
            // SAFETY: records on the chain are live (`Chain::push`, 1) and have this type (1).
            self.first = unsafe { node.as_ref() }.next().load(Relaxed).cast();
            self.count -= 1;
            // SAFETY: 1. The record came from the slab of its type. 2. It is no longer used (2).
            unsafe { memory.slab::<T>().free(&memory.frames, node) };
        }
    }
}

/// Unlinked items that readers may still use.
pub(crate) struct Batch<P: Platform> {
    pub(crate) tables: DetachedTables,
    records: [RecordChain<P>; DEFERRED_KINDS],
}

impl<P: Platform> Default for Batch<P> {
    #[inline]
    fn default() -> Self {
        Self::of(DetachedTables::default())
    }
}

/// A table's weight against the limit, where a record counts 1: a frame has room for about that
/// number of records.
const TABLE: u64 = 8;

impl<P: Platform> Batch<P> {
    /// A batch that contains only tables.
    #[inline]
    pub(crate) fn of(tables: DetachedTables) -> Self {
        Self { tables, records: [const { RecordChain::NONE }; DEFERRED_KINDS] }
    }

    /// The batch with the records of the chain, which are the only records of their type in it.
    #[inline]
    pub(crate) fn with<T: Linked>(mut self, chain: Chain<T>) -> Self {
        // No record is larger than its weight implies.
        const { assert!(size_of::<T>() <= PAGE_SIZE as usize / TABLE as usize) };
        self.records[T::KIND as usize] = RecordChain::of(chain);
        self
    }

    /// The number of records of a kind, one of the first [`DEFERRED_KINDS`].
    pub(crate) fn count(&self, kind: RecordKind) -> u32 {
        self.records[kind as usize].count
    }

    /// Whether the batch is empty.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.records.iter().all(|records| records.count == 0)
    }

    /// Takes over the items of another batch. Constant time.
    pub(super) fn append(&mut self, frames: &Frames<P>, other: Self) {
        self.tables.append(frames, other.tables);
        self.records.iter_mut().zip(other.records).for_each(|(mine, other)| mine.append(other));
    }

    /// The number of records in the batch.
    pub(super) fn records(&self) -> u64 {
        self.records.iter().map(|records| u64::from(records.count)).sum()
    }

    /// The weight against the limit, in eighths of a frame.
    pub(super) fn weight(&self) -> u64 {
        u64::from(self.tables.count()) * TABLE + self.records()
    }

    /// Frees up to `most` items. All read sections that could have found them have ended.
    pub(super) fn free(&mut self, memory: &Memory<P>, most: u32) {
        let mut left = most;
        while left > 0
            && let Some(table) = self.tables.pop(&memory.frames)
        {
            // SAFETY: 1. obligations 1 and 2 of `push`, and the read sections have ended; 2. the
            // table was on this list.
            unsafe { release_table(memory, table) };
            left -= 1;
        }
        for records in self.records.iter_mut().filter(|records| records.count > 0) {
            let before = records.count;
            // SAFETY: 1. The function came with the records. 2. They were unlinked before
            // (obligation 2 of `push`): a VMA from the index and all lists, an anon group without
            // VMAs and children, an area from the index of its map. The read sections have ended.
            unsafe { (records.free)(records, memory, left) };
            left -= before - records.count;
        }
    }
}

/// The weight of `frames` frames.
pub(super) const fn weight_of_frames(frames: u64) -> u64 {
    frames * TABLE
}

/// The number of frames that a weight represents, rounded up.
pub(super) const fn frames_of_weight(weight: u64) -> u64 {
    weight.div_ceil(TABLE)
}

/// Frees a detached table, or leaves the free to the thread that lowers its pending count to zero.
///
/// # Safety
/// 1. The table is detached and flushed, and all read sections that could have found it have ended.
/// 2. The table is released only once.
unsafe fn release_table<P: Platform>(memory: &Memory<P>, table: Frame) {
    if memory.frames.table(table).release() == Last::Yes {
        // SAFETY: 1. the caller's obligation 2, and no flush is pending; 2. the caller's obligation
        // 1.
        unsafe { memory.frames.free(table, Order::PAGE) };
    }
}
