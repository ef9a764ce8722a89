//! An area: a range of addresses with one owner, and the claim by which a caller owns it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64};

use crate::Memory;
use crate::addr::{Frame, Order, PAGE_SIZE, VirtRange};
use crate::arch::{Level, MemoryType};
use crate::collections::range_skip_list::{Indexed, SkipLinks};
use crate::deferred::Linked;
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;

use super::blocks::Blocks;
use super::request::{AreaKind, KernelArea, Pauses, Pieces};

/// An area's record. Mutable fields are written by the caller that has claimed the area, or under
/// the lock of the freed list.
pub(crate) struct Area {
    links: SkipLinks<Self>,
    start: AtomicU64,
    /// Includes the guard page and any addresses that a shrunken area has retained.
    end: AtomicU64,
    /// Pages that are or will be mapped.
    pages: AtomicU64,
    state: AtomicU8,
    pub(super) traits: AreaTraits,
    /// The area's own frames.
    pub(super) blocks: Blocks,
    /// The next area in the freed list or in a purge.
    next: AtomicPtr<Self>,
}

/// The immutable properties of an area.
#[derive(Clone, Copy)]
pub(super) struct AreaTraits {
    pub(super) kind: AreaKind,
    pub(super) pieces: Pieces,
    pub(super) pauses: Pauses,
    pub(super) memory: MemoryType,
}

/// A bit in an area's state, combined with [`State::Busy`]: a thread waits for the claim to end.
const WANTED: u8 = 1 << 7;

/// The owner of an area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum State {
    /// A caller that changes the area.
    Busy,
    /// The caller that was given the address.
    Live,
    /// No owner: the area waits for a purge.
    Freed,
    /// The purge.
    Purging,
    /// The purge, which has looked up the areas around it.
    Surveyed,
}

impl Indexed for Area {
    #[inline]
    fn links(&self) -> &SkipLinks<Self> {
        &self.links
    }

    #[inline]
    fn start(&self) -> u64 {
        self.start()
    }

    #[inline]
    fn end(&self) -> u64 {
        self.end()
    }
}

impl Linked for Area {
    fn next(&self) -> &AtomicPtr<Self> {
        &self.next
    }
}

impl Area {
    /// The first byte.
    #[inline]
    pub(super) fn start(&self) -> u64 {
        self.start.load(Relaxed)
    }

    /// The exclusive end.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.end.load(Relaxed)
    }

    /// An area for a caller that is about to map it. It is not in the index yet.
    pub(super) fn new(traits: AreaTraits) -> Self {
        Self {
            links: SkipLinks::new(),
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            state: AtomicU8::new(State::Busy as u8),
            traits,
            blocks: Blocks::new(),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The area's addresses, without the guard page.
    pub(crate) fn range(&self) -> VirtRange {
        VirtRange::raw(self.start(), self.start() + self.pages() * PAGE_SIZE)
    }

    /// Pages that are or will be mapped.
    pub(super) fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    pub(super) fn set_pages(&self, pages: u64) {
        self.pages.store(pages, Relaxed);
    }

    pub(super) fn set_bounds(&self, start: u64, end: u64) {
        self.start.store(start, Relaxed);
        self.end.store(end, Relaxed);
    }

    pub(super) fn state(&self) -> State {
        match self.state.load(Acquire) & !WANTED {
            0 => State::Busy,
            1 => State::Live,
            2 => State::Freed,
            3 => State::Purging,
            _ => State::Surveyed,
        }
    }

    pub(super) fn set_state(&self, state: State) {
        // Release: the next claimer sees all changes to the area.
        self.state.store(state as u8, Release);
    }

    /// Requests a wakeup at the end of the claim. Returns whether the area is still busy. The
    /// caller holds the freed list's lock, which prevents the area from being freed.
    pub(super) fn want(&self) -> bool {
        self.state.fetch_or(WANTED, AcqRel) & !WANTED == State::Busy as u8
    }

    /// Ends a claim. Returns whether a thread waits for its end. From then on another caller may
    /// free the area at any time.
    pub(super) fn end_claim(&self, state: State) -> bool {
        self.state.swap(state as u8, AcqRel) & WANTED != 0
    }

    fn next(&self) -> Option<NonNull<Self>> {
        NonNull::new(self.next.load(Relaxed))
    }

    pub(super) fn set_next(&self, next: Option<NonNull<Self>>) {
        self.next.store(next.map_or(ptr::null_mut(), NonNull::as_ptr), Relaxed);
    }

    /// Whether a caller owns the area's address.
    pub(crate) fn is_live(&self) -> bool {
        self.state() == State::Live
    }

    /// Whether the area owns its frames. For the auditor.
    pub(crate) fn owns_frames(&self) -> bool {
        self.traits.kind == AreaKind::Vmalloc
    }

    /// Whether the area may have a leaf of `level` and of this type, in a contiguous run or not.
    /// For the auditor.
    pub(crate) fn allows<A>(&self, level: Level<A>, contig: bool, memory: MemoryType) -> bool {
        let single = level == Level::PTE && !contig;
        // Some architectures have fewer types.
        let strict = |memory| matches!(memory, MemoryType::Device | MemoryType::Uncached);
        let own = self.traits.memory;
        let same = own == memory || strict(own) && strict(memory);
        same && (single || self.traits.pieces == Pieces::Largest)
    }

    /// The blocks of frames that the area owns: heads and orders. For the auditor.
    pub(crate) fn frames<'a, P: Platform>(
        &'a self,
        memory: &'a Memory<P>,
    ) -> impl Iterator<Item = (Frame, Order)> + 'a {
        self.blocks.iter(memory)
    }

    /// The description of the area for callers.
    pub(super) fn describe(&self) -> KernelArea {
        KernelArea { range: self.range(), kind: self.traits.kind }
    }
}

/// A claimed area. While this value exists, no other caller changes or frees the area.
/// `Areas::release` or `Areas::put_off` consumes the value and ends the claim.
#[must_use = "an area whose claim does not end stays busy"]
pub(super) struct Claim<'k> {
    node: NonNull<Area>,
    map: PhantomData<&'k Area>,
}

impl Claim<'_> {
    /// The claim of an area.
    ///
    /// # Safety
    /// 1. No other claim of the area exists, and the area is not freed while this claim exists.
    pub(super) unsafe fn new(node: NonNull<Area>) -> Self {
        Self { node, map: PhantomData }
    }

    /// The area as its index and lists name it.
    pub(super) fn node(&self) -> NonNull<Area> {
        self.node
    }
}

impl Deref for Claim<'_> {
    type Target = Area;

    #[inline]
    fn deref(&self) -> &Area {
        // SAFETY: a claimed area is not freed (obligation 1 of `new`).
        unsafe { self.node.as_ref() }
    }
}

/// Linked areas that a purge has detached. While this value exists, they are not freed, and no
/// other thread uses their links.
pub(super) struct AreaList {
    first: NonNull<Area>,
}

// SAFETY: an `Area`'s fields are atomic or never change, and only the list's holder follows links.
unsafe impl Send for AreaList {}

impl AreaList {
    /// The list that begins with `first`.
    ///
    /// # Safety
    /// 1. The areas wait for a purge by the caller, which frees them only after this list is
    ///    dropped.
    pub(super) unsafe fn new(first: NonNull<Area>) -> Self {
        Self { first }
    }

    /// The areas' nodes. The iterator advances past each node before it returns it, so the node's
    /// link may change then.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NonNull<Area>> + '_ {
        let mut next = Some(self.first);
        core::iter::from_fn(move || {
            let node = next?;
            // SAFETY: the areas of a list are not freed (obligation 1 of `new`).
            next = unsafe { node.as_ref() }.next();
            Some(node)
        })
    }

    /// Calls `f` for all areas.
    pub(super) fn for_each(&self, mut f: impl FnMut(&Area)) {
        // SAFETY: as in `nodes`.
        self.nodes().for_each(|node| f(unsafe { node.as_ref() }));
    }

    /// The range from the lowest to the highest address.
    pub(super) fn range(&self) -> VirtRange {
        let (mut low, mut high) = (u64::MAX, 0);
        self.for_each(|area| {
            low = low.min(area.start());
            high = high.max(area.end());
        });
        VirtRange::raw(low.min(high), high)
    }

    /// Shortens the list to `count` areas and returns the rest.
    pub(super) fn split_off(&mut self, count: usize) -> Option<Self> {
        let last = self.nodes().take(count).last()?;
        // SAFETY: as in `nodes`.
        let last = unsafe { last.as_ref() };
        let rest = last.next()?;
        last.set_next(None);
        // SAFETY: 1. these areas were in this list, which no longer contains them.
        Some(unsafe { Self::new(rest) })
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for Area {
    const KIND: RecordKind = RecordKind::KernelArea;
}
