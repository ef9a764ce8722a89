//! Areas: ranges of addresses, each with one owner.
//!
//! All areas are in one index by address. The index finds the lowest gap that fits, or the area of
//! an address, in logarithmic time. The lock of the freed list is the index's writer lock; a caller
//! holds it for one search.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::error::Failure;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64};

use crate::Memory;
use crate::addr::{Frame, Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Level, MemoryType};
use crate::collections::range_skip_list::{GapShape, Indexed, Links};
use crate::deferred::Linked;
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;
use crate::table::ReadSection;

use super::blocks::Blocks;
use super::request::{AreaKind, KernelArea, Pauses, Pieces};
use super::{KernelMap, KernelMapError};

/// An area's record. Fields that change are written by the caller that has claimed the area, or
/// under the lock.
pub(crate) struct Area {
    links: Links<Self>,
    start: AtomicU64,
    /// Includes the guard page, and the addresses that a shrunken area has kept.
    end: AtomicU64,
    /// Pages that are or will be mapped.
    pages: AtomicU64,
    state: AtomicU8,
    pub(super) kind: AreaKind,
    pub(super) pieces: Pieces,
    pub(super) pauses: Pauses,
    pub(super) memory: MemoryType,
    /// The area's own frames.
    pub(super) blocks: Blocks,
    /// The next in the freed list, or in a purge.
    next: AtomicPtr<Self>,
}

/// A bit in an area's state, beside [`State::Busy`]: a thread waits for the claim to end.
const WANTED: u8 = 1 << 7;

/// The owner of an area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum State {
    /// A caller that changes it.
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
    fn links(&self) -> &Links<Self> {
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

    /// The byte after the last.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.end.load(Relaxed)
    }

    /// An area for a caller that is about to map it; not in the index yet.
    pub(super) fn new(kind: AreaKind, pieces: Pieces, pauses: Pauses, memory: MemoryType) -> Self {
        Self {
            links: Links::new(),
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            state: AtomicU8::new(State::Busy as u8),
            kind,
            pieces,
            pauses,
            memory,
            blocks: Blocks::new(),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Its addresses, without the guard page.
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

    pub(super) fn set_end(&self, end: u64) {
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

    /// Asks to be woken when the claim ends. Returns whether the area is still busy. The caller
    /// holds the lock of the freed list, so that the area is not freed.
    fn want(&self) -> bool {
        self.state.fetch_or(WANTED, AcqRel) & !WANTED == State::Busy as u8
    }

    /// Ends a claim. Returns whether a thread waits for that. From then on another caller may free
    /// the area at any time.
    fn end_claim(&self, state: State) -> bool {
        self.state.swap(state as u8, AcqRel) & WANTED != 0
    }

    pub(super) fn next(&self) -> Option<NonNull<Self>> {
        NonNull::new(self.next.load(Relaxed))
    }

    pub(super) fn set_next(&self, next: Option<NonNull<Self>>) {
        self.next.store(next.map_or(ptr::null_mut(), NonNull::as_ptr), Relaxed);
    }

    /// Whether a caller owns its address.
    pub(crate) fn is_live(&self) -> bool {
        self.state() == State::Live
    }

    /// Whether the area owns its frames. For the auditor.
    pub(crate) fn owns_frames(&self) -> bool {
        self.kind == AreaKind::Vmalloc
    }

    /// Whether the area may have a leaf of `level` and of this type, in a contiguous run or not.
    /// For the auditor.
    pub(crate) fn allows<A>(&self, level: Level<A>, contig: bool, memory: MemoryType) -> bool {
        let single = level == Level::PTE && !contig;
        // Some architectures know fewer types.
        let strict = |memory| matches!(memory, MemoryType::Device | MemoryType::Uncached);
        let same = self.memory == memory || strict(self.memory) && strict(memory);
        same && (single || self.pieces == Pieces::Largest)
    }

    /// The blocks of frames that the area owns: heads and orders. For the auditor.
    pub(crate) fn frames<'a, P: Platform>(
        &'a self,
        memory: &'a Memory<P>,
    ) -> impl Iterator<Item = (Frame, Order)> + 'a {
        self.blocks.iter(memory)
    }

    /// The area as its users see it.
    pub(super) fn describe(&self) -> KernelArea {
        KernelArea { range: self.range(), kind: self.kind }
    }
}

/// The areas that wait for a purge, the last first.
pub(super) struct FreedList {
    pub(super) first: Option<NonNull<Area>>,
    /// The pages of their ranges.
    pub(super) pages: u64,
    /// Areas that the current purge has still to process.
    pub(super) detached: Option<NonNull<Area>>,
    /// From the lowest to the highest address of `detached`; `None` once the TLBs hold none of
    /// them.
    pub(super) detached_freeable: Option<VirtRange>,
    /// The end of the last search for free addresses; cleared when addresses become free.
    pub(super) last_found: Option<LastFound>,
}

/// The gap that the last search found. No lower gap satisfied that request.
pub(super) struct LastFound {
    area: NonNull<Area>,
    shape: GapShape,
}

// SAFETY: the pointers lead to an `Area`, whose fields are atomic or never change; the areas belong
// to the map, and any CPU may work on them.
unsafe impl Send for FreedList {}

impl FreedList {
    pub(super) const fn new() -> Self {
        Self { first: None, pages: 0, detached: None, detached_freeable: None, last_found: None }
    }
}

/// A constraint on an area's address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placement {
    /// Without the guard page.
    pub(super) pages: u64,
    /// The start's remainder by `align`, a power of two, is `congruent`.
    pub(super) align: u64,
    pub(super) congruent: u64,
}

/// A claimed area. Having one tells you that no other caller changes or frees the area. The claim
/// ends by [`KernelMap::release`] or [`KernelMap::put_off`], which take it.
#[must_use = "an area whose claim does not end stays busy"]
pub(super) struct Claim<'k> {
    node: NonNull<Area>,
    map: PhantomData<&'k Area>,
}

impl Claim<'_> {
    /// The claim of an area.
    ///
    /// # Safety
    /// 1. No other claim of the area exists, and the area is not freed without this one.
    pub(super) unsafe fn new(node: NonNull<Area>) -> Self {
        Self { node, map: PhantomData }
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

impl<P: Platform> KernelMap<'_, P> {
    /// The area of a node of the index or of the freed list.
    ///
    /// # Safety
    /// 1. The area is not freed as long as the result is used. A purge takes areas out of the index
    ///    under the lock of the freed list, and frees them when the read sections of that time have
    ///    ended.
    #[inline]
    pub(super) unsafe fn area(&self, area: NonNull<Area>) -> &Area {
        // SAFETY: the caller's obligation 1.
        unsafe { area.as_ref() }
    }

    /// The area around `at`, guard page included, if there is one.
    pub(super) fn area_at<'s>(
        &'s self,
        _section: &'s ReadSection<'_, P>,
        at: VirtAddr,
    ) -> Option<&'s Area> {
        let node = self.index.find_at_or_before(at.0)?;
        // SAFETY: 1. the section lasts as long as the result.
        Some(unsafe { self.area(node) }).filter(|area| at.0 < area.end())
    }

    /// Calls `f` with the first area that ends after `from`, with the lock of the freed list held.
    pub(super) fn with_first_after<R>(&self, from: u64, f: impl FnOnce(&Area) -> R) -> Option<R> {
        let _writer = self.freed.lock();
        // SAFETY: 1. the lock is held.
        self.index.first_ending_after(from).map(|node| f(unsafe { self.area(node) }))
    }

    /// Reserves free addresses for a new area, which begins busy.
    fn reserve(
        &self,
        placement: Placement,
        make: impl Fn() -> Area,
    ) -> Result<Claim<'_>, Failure<KernelMapError>> {
        let memory = self.memory;
        let mut area = None;
        // A purge of freed areas may provide missing addresses or memory.
        for attempt in [Attempt::First, Attempt::AfterPurge] {
            if attempt == Attempt::AfterPurge {
                self.purge_freed();
            }
            let areas = &memory.slab::<Area>();
            let allocate = || areas.allocate_with(&memory.frames, &make);
            area = area.or_else(allocate);
            if let Some(area) = area
                // SAFETY: 1. just made, or refused before; an area that no place was found for is
                // freed below.
                && unsafe { self.insert(area, &placement) }
            {
                // SAFETY: 1. it was made busy.
                return Ok(unsafe { Claim::new(area) });
            }
        }
        let Some(area) = area else { return Err(Failure::NoMemory) };
        // SAFETY: it came from this slab and was never in an index, so no other reference exists.
        unsafe { memory.slab::<Area>().free(&memory.frames, area) };
        Err(KernelMapError::OutOfAddresses.into())
    }

    /// Like [`KernelMap::reserve`], at the best-aligned place, or else anywhere with an alignment
    /// of only `least` bytes.
    pub(super) fn reserve_at_best(
        &self,
        best: Placement,
        least: u64,
        make: impl Fn() -> Area,
    ) -> Result<Claim<'_>, Failure<KernelMapError>> {
        match self.reserve(best, &make) {
            Err(Failure::Refused(KernelMapError::OutOfAddresses)) if best.align > least => {
                self.reserve(Placement { align: least, congruent: 0, ..best }, make)
            }
            result => result,
        }
    }

    /// Inserts the area at the lowest gap that satisfies `placement`, and says whether there is one.
    ///
    /// # Safety
    /// 1. The area came from the slab, is in no index, and if inserted, only a purge frees it.
    unsafe fn insert(&self, area: NonNull<Area>, placement: &Placement) -> bool {
        let Placement { pages, align, congruent } = *placement;
        let shape = GapShape { len: (pages + 1) * PAGE_SIZE, align, congruent };
        let (low, high) = (self.arena.start().0, self.arena.end().0);
        let mut freed = self.freed.lock();
        // A gap that was too small or unaligned for the last request is so for an equal or larger
        // one. (Mostly, areas of one kind are made in a row.)
        let after = freed.last_found.as_ref().and_then(|found| {
            let after = || {
                // SAFETY: 1. `give_back` forgets it before it takes an area out of the index, under
                // the lock that is held.
                let area = unsafe { self.area(found.area) };
                self.index.find_gap_after(area, shape, high)
            };
            shape.covers(found.shape).then(after)?
        });
        let anywhere = || self.index.find_gap_bottom_up(shape, low, high);
        let Some(start) = after.or_else(anywhere) else {
            return false;
        };
        freed.last_found = Some(LastFound { area, shape });
        // SAFETY: 1. the caller's obligation 1.
        let place = unsafe { self.area(area) };
        place.start.store(start, Relaxed);
        place.end.store(start + shape.len, Relaxed);
        place.set_pages(pages);
        // SAFETY: 1. The lock is held. 2. The caller's obligation 1. 3. It is freed a grace period
        // after a purge has taken it out. 4. The index is private to this module, which uses it with
        // the lock held, in a read section, or in the purge; it has no spots.
        unsafe { self.index.insert(area) };
        true
    }

    /// Claims the live area around `at`. `fits` decides whether the caller can use it.
    pub(super) fn claim(
        &self,
        at: VirtAddr,
        fits: impl Fn(&Area) -> Result<(), KernelMapError>,
    ) -> Result<Claim<'_>, KernelMapError> {
        loop {
            let ended = {
                let _writer = self.freed.lock();
                let none = KernelMapError::NotAnArea(at);
                let node = self.index.find_at_or_before(at.0).ok_or(none)?;
                // SAFETY: 1. the lock is held.
                let area = unsafe { self.area(node) };
                if at.0 >= area.end() {
                    return Err(none);
                }
                match area.state() {
                    State::Live => {
                        fits(area)?;
                        area.set_state(State::Busy);
                        // SAFETY: 1. it was live, and is busy now.
                        return Ok(unsafe { Claim::new(node) });
                    }
                    State::Busy => {
                        // Read before asking for the wakeup: the end of the claim changes the
                        // counter.
                        let ended = self.claims_ended.load(Acquire);
                        if !area.want() {
                            continue;
                        }
                        ended
                    }
                    State::Freed | State::Purging | State::Surveyed => {
                        return Err(KernelMapError::Freed { area: area.describe() });
                    }
                }
            };
            // The thread parks on the map's counter, not on the area's state, since the area may be
            // freed.
            self.memory.platform().park(&self.claims_ended, ended);
        }
    }

    /// Like [`KernelMap::claim`], for the area of this kind that starts at `start`.
    pub(super) fn claim_start(
        &self,
        start: VirtAddr,
        expected: AreaKind,
    ) -> Result<Claim<'_>, KernelMapError> {
        self.claim(start, |area| {
            let told = area.describe();
            if area.kind != expected {
                Err(KernelMapError::WrongKind { area: told, expected })
            } else if told.range.start() != start {
                Err(KernelMapError::NotTheStart { area: told })
            } else {
                Ok(())
            }
        })
    }

    /// Publishes a claimed area: from here on, its address is valid.
    pub(super) fn release(&self, claim: Claim<'_>) {
        // No lock is needed: only the claimer changes the state of a busy area.
        if claim.end_claim(State::Live) {
            self.claim_ended();
        }
    }

    /// Wakes the threads that wait for the end of a claim.
    #[cold]
    fn claim_ended(&self) {
        self.claims_ended.fetch_add(1, Release);
        self.memory.platform().unpark(&self.claims_ended);
    }

    /// Takes the addresses from `end` on away from a claimed area, which has nothing mapped there.
    /// `rest` receives them and waits for the next purge.
    ///
    /// # Safety
    /// 1. `rest` is an area outside the index, fresh from the slab of areas, and not used again.
    pub(super) unsafe fn put_off_rest(&self, area: &Claim<'_>, end: u64, rest: NonNull<Area>) {
        // SAFETY: 1. a purge frees it, which needs the lock below.
        let tail = unsafe { self.area(rest) };
        let mut freed = self.freed.lock();
        tail.start.store(end, Relaxed);
        tail.end.store(area.end(), Relaxed);
        tail.set_state(State::Freed);
        tail.set_next(freed.first);
        area.set_end(end);
        self.index.bounds_changed(area);
        // SAFETY: as in `insert`.
        unsafe { self.index.insert(rest) };
        freed.first = Some(rest);
    }

    /// Puts a claimed area, whose entries are empty now, on the list for the next purge. Returns
    /// how many pages wait for it.
    pub(super) fn put_off(&self, area: Claim<'_>) -> u64 {
        let mut freed = self.freed.lock();
        if area.end_claim(State::Freed) {
            self.claim_ended();
        }
        area.set_next(freed.first);
        freed.first = Some(area.node);
        freed.pages += area.range().pages();
        freed.pages
    }
}

/// Which try a retried operation is at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    First,
    AfterPurge,
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for Area {
    const KIND: RecordKind = RecordKind::KernelArea;
}
