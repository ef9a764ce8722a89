//! Lists of items that wait for readers, linked through the items themselves. They need no memory,
//! and two lists are spliced in constant time.

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::Memory;
use crate::addr::Frame;
use crate::frame::Frames;
use crate::frame::meta::NONE;
use crate::kernel_map::Area;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::vma::Vma;
use crate::table::{link, release_table};

/// A record that has a link for the time when nobody can find it any more.
pub(crate) trait Linked: Sized {
    /// The link.
    fn next(&self) -> &AtomicPtr<Self>;
}

/// Records of one type that were unlinked from where others could find them.
pub(crate) struct Chain<T> {
    first: Option<NonNull<T>>,
    last: Option<NonNull<T>>,
    count: u32,
}

// SAFETY: the records on the chain belong to it alone but for readers, which share nothing but
// atomics with it; all three types of records are `Sync`.
unsafe impl<T: Sync> Send for Chain<T> {}

impl<T> Default for Chain<T> {
    #[inline]
    fn default() -> Self {
        Self { first: None, last: None, count: 0 }
    }
}

impl<T: Linked> Chain<T> {
    /// Adds a record in front of the others.
    ///
    /// # Safety
    /// 1. The record lives until it is taken off the chain ([`Chain::pop`]).
    /// 2. It is on no chain yet, and nobody else uses its link.
    pub(crate) unsafe fn push(&mut self, node: NonNull<T>) {
        let next = self.first.map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: it lives (1).
        unsafe { node.as_ref() }.next().store(next, Relaxed);
        self.first = Some(node);
        if self.last.is_none() {
            self.last = Some(node);
        }
        self.count += 1;
    }

    /// Takes the first record off the chain.
    pub(crate) fn pop(&mut self) -> Option<NonNull<T>> {
        let node = self.first?;
        // SAFETY: what is on the chain lives (`push`, 1).
        self.first = NonNull::new(unsafe { node.as_ref() }.next().load(Relaxed));
        if self.first.is_none() {
            self.last = None;
        }
        self.count -= 1;
        Some(node)
    }

    /// Takes over the records of the other. Constant time.
    pub(crate) fn append(&mut self, other: Self) {
        let Some(first) = other.first else { return };
        match self.last {
            // SAFETY: what is on the chain lives (`push`, 1).
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
            // SAFETY: what is on the chain lives (`push`, 1), and stays on it while it is borrowed.
            let node = unsafe { next?.as_ref() };
            next = NonNull::new(node.next().load(Relaxed));
            Some(node)
        })
    }

    /// Whether there are none.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }
}

/// Page tables that were detached, linked through their metadata.
pub(crate) struct Tables {
    first: u32,
    last: u32,
    count: u32,
}

impl Default for Tables {
    #[inline]
    fn default() -> Self {
        Self { first: NONE, last: NONE, count: 0 }
    }
}

impl Tables {
    /// Adds a detached table, which is on no other list, in front of the others.
    #[inline]
    pub(crate) fn push<P: Platform>(&mut self, frames: &Frames<P>, table: Frame) {
        frames.meta(table).next.store(self.first, Relaxed);
        self.first = table.0;
        if self.last == NONE {
            self.last = table.0;
        }
        self.count += 1;
    }

    /// Takes the first table off the list.
    fn pop<P: Platform>(&mut self, frames: &Frames<P>) -> Option<Frame> {
        let table = link(self.first)?;
        self.first = frames.meta(table).next.load(Relaxed);
        if self.first == NONE {
            self.last = NONE;
        }
        self.count -= 1;
        Some(table)
    }

    /// Takes over the tables of the other. Constant time.
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

    /// Whether there are none.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first == NONE
    }

    /// How many there are.
    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }
}

/// What nobody can find any more, and somebody may still be reading.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) tables: Tables,
    pub(crate) vmas: Chain<Vma>,
    pub(crate) groups: Chain<AnonGroup>,
    pub(crate) areas: Chain<Area>,
}

/// A table's share of the bound, where a record counts 1: a frame has room for about as many.
const TABLE: u64 = 8;

impl Batch {
    /// Whether nothing is in it.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty()
            && self.vmas.is_empty()
            && self.groups.is_empty()
            && self.areas.is_empty()
    }

    /// Takes over what the other has. Constant time.
    pub(super) fn append<P: Platform>(&mut self, frames: &Frames<P>, other: Self) {
        self.tables.append(frames, other.tables);
        self.vmas.append(other.vmas);
        self.groups.append(other.groups);
        self.areas.append(other.areas);
    }

    /// How many records are in it.
    pub(super) fn records(&self) -> u64 {
        u64::from(self.vmas.count())
            + u64::from(self.groups.count())
            + u64::from(self.areas.count())
    }

    /// What it counts for at the bound, in eighths of a frame.
    pub(super) fn weight(&self) -> u64 {
        u64::from(self.tables.count()) * TABLE + self.records()
    }

    /// The weight of so many frames.
    pub(super) const fn weight_of_frames(frames: u64) -> u64 {
        frames * TABLE
    }

    /// As many frames as a weight stands for, rounded up.
    pub(super) const fn frames_of_weight(weight: u64) -> u64 {
        weight.div_ceil(TABLE)
    }

    /// Frees at most `most` items. All read sections that could know them have been left.
    pub(super) fn free<P: Platform>(&mut self, memory: &Memory<P>, most: u32) {
        let (frames, platform) = (&memory.frames, &memory.platform);
        let mut left = most;
        while left > 0
            && let Some(table) = self.tables.pop(frames)
        {
            release_table(memory, table);
            left -= 1;
        }
        while left > 0
            && let Some(node) = self.vmas.pop()
        {
            // SAFETY: the VMA came from this slab (`AddressSpace::new_vma`), was taken out of the
            // index and of all lists, and no lookup that may have met it is left.
            unsafe { memory.vmas.free(frames, platform, node) };
            left -= 1;
        }
        while left > 0
            && let Some(node) = self.groups.pop()
        {
            // SAFETY: the group came from this slab (`Groups::create`); nobody holds it, so no VMA
            // and no child names it, and the walkers that saw it named by a folio have left.
            unsafe { memory.groups.free(frames, platform, node) };
            left -= 1;
        }
        while left > 0
            && let Some(node) = self.areas.pop()
        {
            // SAFETY: the area came from this slab, and was taken out of the index of its map; no
            // lookup that may have met it is left.
            unsafe { memory.kernel_areas.free(frames, platform, node) };
            left -= 1;
        }
    }
}

/// No record weighs more than its share of the bound says.
const _: () = {
    let share = crate::addr::PAGE_SIZE as usize / TABLE as usize;
    assert!(size_of::<Vma>() <= share && size_of::<AnonGroup>() <= share);
    assert!(size_of::<Area>() <= share);
};
