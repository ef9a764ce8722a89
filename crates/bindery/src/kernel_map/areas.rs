//! All areas of a map: reserves, claims and finds them, and lists them for the next purge.
//!
//! One index holds all areas by address. It finds the lowest gap that fits, or the area of an
//! address, in logarithmic time. The freed list's lock is also the index's writer lock; a caller
//! holds it for one search.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Release};

use crate::Memory;
use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::collections::range_skip_list::{GapShape, Index};
use crate::platform::Platform;
use crate::sync::Mutex;
use crate::table::ReadSection;

use super::area::{Area, AreaList, Claim, State};
use super::request::AreaKind;
use super::reserve::Placement;
use super::{KernelMapError, Purging};

/// The areas of a map.
pub(super) struct Areas<'m, P: Platform> {
    memory: &'m Memory<P>,
    /// The addresses available for areas.
    pub(super) arena: VirtRange,
    /// All areas; writers hold the lock of `freed`.
    index: Index<Area>,
    freed: Mutex<P::SpinLock, FreedList>,
    /// Changes when a claim ends that another thread waits for; the waiting thread parks on it.
    claims_ended: AtomicU32,
}

/// The areas that wait for a purge.
struct FreedList {
    /// The area freed last; it links to the one freed before it.
    first: Option<NonNull<Area>>,
    /// The number of pages in the listed areas' ranges.
    pages: u64,
    /// Areas that the current purge has yet to process.
    detached: Option<AreaList>,
    /// The range from the lowest to the highest address of `detached`; `None` once no TLB holds any
    /// of them.
    detached_freeable: Option<VirtRange>,
    /// The end of the last search for free addresses; cleared when addresses become free.
    last_found: Option<LastFound>,
}

/// The gap that the last search found. No lower gap satisfied that request.
struct LastFound {
    area: NonNull<Area>,
    shape: GapShape,
}

// SAFETY: the pointers lead to an `Area`, whose fields are atomic or never change; the areas belong
// to the map, and any CPU may work on them.
unsafe impl Send for FreedList {}

/// Adjacent areas that are being purged.
pub(super) struct Purged {
    /// All their addresses.
    pub(super) own: VirtRange,
    /// Their addresses and the free ones around them, up to the nearest areas that remain.
    pub(super) free: VirtRange,
}

/// The areas that one round of a purge takes from the freed list.
pub(super) struct Round {
    pub(super) areas: AreaList,
    /// The addresses of all rounds; only the first round has them.
    pub(super) freeable: Option<VirtRange>,
}

/// The maximum number of areas in one round of a purge, limited by the time under a spin lock. A
/// table shared by areas of several rounds is detached in the last of these rounds.
const ROUND: usize = 128;
/// The number of areas that are removed from the index under one hold of the lock.
const CHUNK: usize = 32;

impl<'m, P: Platform> Areas<'m, P> {
    pub(super) fn new(memory: &'m Memory<P>, arena: VirtRange) -> Self {
        let (first, detached, detached_freeable, last_found) = (None, None, None, None);
        let freed = FreedList { first, pages: 0, detached, detached_freeable, last_found };
        Self {
            memory,
            arena,
            index: Index::new(memory.index_key()),
            freed: Mutex::new(freed),
            claims_ended: AtomicU32::new(0),
        }
    }

    /// The area of a node of the index.
    ///
    /// # Safety
    /// 1. The area is not freed while the result is used. A purge removes areas from the index
    ///    under the freed list's lock and frees them a grace period later.
    #[inline]
    unsafe fn area(&self, node: NonNull<Area>) -> &Area {
        // SAFETY: the caller's obligation 1.
        unsafe { node.as_ref() }
    }

    /// The area around `at`, guard page included.
    pub(super) fn at<'s>(
        &'s self,
        _section: &'s ReadSection<'_, P>,
        at: VirtAddr,
    ) -> Option<&'s Area> {
        let node = self.index.find_at_or_before(at.0)?;
        // SAFETY: 1. the section lasts as long as the result.
        Some(unsafe { self.area(node) }).filter(|area| at.0 < area.end())
    }

    /// Calls `f`, under the freed list's lock, with the first area that ends after `from`.
    pub(super) fn with_first_after<R>(&self, from: u64, f: impl FnOnce(&Area) -> R) -> Option<R> {
        let _writer = self.freed.lock();
        // SAFETY: 1. the lock is held.
        self.index.first_ending_after(from).map(|node| f(unsafe { self.area(node) }))
    }

    /// Inserts the area at the lowest gap that satisfies `placement`. Returns whether such a gap
    /// exists.
    ///
    /// # Safety
    /// 1. The area came from the slab and is in no index; once inserted, only a purge frees it.
    pub(super) unsafe fn insert(&self, node: NonNull<Area>, placement: &Placement) -> bool {
        let shape = placement.gap();
        let (low, high) = (self.arena.start().0, self.arena.end().0);
        let mut freed = self.freed.lock();
        // A gap that was too small or unaligned for the last request is equally useless for an
        // equal or larger one. (Most consecutive requests are for areas of one kind.)
        let after = freed.last_found.as_ref().and_then(|found| {
            let after = || {
                // SAFETY: 1. `remove` clears `last_found` before it removes an area from the index,
                // under the lock held here.
                let area = unsafe { self.area(found.area) };
                self.index.find_gap_after(area, shape, high)
            };
            shape.covers(found.shape).then(after)?
        });
        let anywhere = || self.index.find_gap_bottom_up(shape, low, high);
        let Some(start) = after.or_else(anywhere) else {
            return false;
        };
        freed.last_found = Some(LastFound { area: node, shape });
        // SAFETY: 1. the caller's obligation 1.
        let area = unsafe { self.area(node) };
        area.set_bounds(start, start + shape.len);
        area.set_pages(placement.pages);
        // SAFETY: 1. The lock is held. 2. The caller's obligation 1. 3. It is freed a grace period
        // after a purge has taken it out. 4. The index is private to this module, which uses it
        // with the lock held, in a read section, or in the purge; it has no spots.
        unsafe { self.index.insert(node) };
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

    /// Like [`Areas::claim`], for the area of this kind that starts at `start`.
    pub(super) fn claim_start(
        &self,
        start: VirtAddr,
        expected: AreaKind,
    ) -> Result<Claim<'_>, KernelMapError> {
        self.claim(start, |area| {
            let area = area.describe();
            if area.kind != expected {
                Err(KernelMapError::WrongKind { area, expected })
            } else if area.range.start() != start {
                Err(KernelMapError::NotTheStart { area })
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

    /// Extends a claimed area to `pages` pages and a guard page, if the addresses after it are
    /// free.
    pub(super) fn extend(&self, area: &Claim<'_>, pages: u64) -> bool {
        let _writer = self.freed.lock();
        let Some(end) = area.start().checked_add((pages + 1) * PAGE_SIZE) else { return false };
        if end > area.end() {
            // SAFETY: 1. the lock is held.
            let start_of = |next| unsafe { self.area(next) }.start();
            let limit = self.index.next(area).map_or(u64::MAX, start_of);
            if end > limit.min(self.arena.end().0) {
                return false;
            }
            area.set_bounds(area.start(), end);
            self.index.bounds_changed(area);
        }
        true
    }

    /// Removes the addresses from `end` on from a claimed area, which has nothing mapped there.
    /// `rest` takes over these addresses and waits for the next purge.
    ///
    /// # Safety
    /// 1. `rest` is an area fresh from the slab of areas and outside the index, and the caller does
    ///    not use it again.
    pub(super) unsafe fn put_off_rest(&self, area: &Claim<'_>, end: u64, rest: NonNull<Area>) {
        // SAFETY: 1. only a purge frees it, which needs the lock below.
        let tail = unsafe { self.area(rest) };
        let mut freed = self.freed.lock();
        tail.set_bounds(end, area.end());
        tail.set_state(State::Freed);
        tail.set_next(freed.first);
        area.set_bounds(area.start(), end);
        self.index.bounds_changed(area);
        // SAFETY: as in `insert`.
        unsafe { self.index.insert(rest) };
        freed.first = Some(rest);
    }

    /// Adds a claimed area, whose entries are empty now, to the list for the next purge. Returns
    /// the number of pages that wait for that purge.
    pub(super) fn put_off(&self, area: Claim<'_>) -> u64 {
        let mut freed = self.freed.lock();
        if area.end_claim(State::Freed) {
            self.claim_ended();
        }
        area.set_next(freed.first);
        freed.first = Some(area.node());
        freed.pages += area.range().pages();
        freed.pages
    }

    /// Lists all areas for the next purge and calls `clear` with each first. Returns whether any
    /// area exists.
    ///
    /// # Safety
    /// 1. No other thread uses the map until the call has returned.
    pub(super) unsafe fn put_off_all(&self, mut clear: impl FnMut(&Area)) -> bool {
        let first = self.index.first_ending_after(0);
        let mut at = first;
        while let Some(node) = at {
            // SAFETY: 1. the caller's obligation 1: no purge runs.
            let area = unsafe { self.area(node) };
            at = self.index.next(area);
            // The other areas are already listed; a second `put_off` would list them twice.
            if matches!(area.state(), State::Live | State::Busy) {
                clear(area);
                // SAFETY: 1. the caller's obligation 1.
                self.put_off(unsafe { Claim::new(node) });
            }
        }
        first.is_some()
    }
}

/// The purge's side.
impl<P: Platform> Areas<'_, P> {
    /// The number of pages that wait for a purge.
    pub(super) fn freed_pages(&self) -> u64 {
        self.freed.lock().pages
    }

    /// Transfers all freed areas to the purge that begins. Returns whether any exist. Called only
    /// by the running purge.
    pub(super) fn begin_purge(&self, _purging: &Purging) -> bool {
        let first = {
            let mut freed = self.freed.lock();
            freed.pages = 0;
            freed.first.take()
        };
        let Some(first) = first else { return false };
        // SAFETY: 1. this purge has detached the list and frees its areas.
        let areas = unsafe { AreaList::new(first) };
        let freeable = areas.range();
        let mut freed = self.freed.lock();
        freed.detached = Some(areas);
        freed.detached_freeable = Some(freeable);
        true
    }

    /// Detaches the areas of the purge's next round and marks them. Calls `detach` for each group
    /// of adjacent areas under the lock, so no area is reserved around them.
    pub(super) fn take_round(&self, mut detach: impl FnMut(Purged)) -> Option<Round> {
        let mut freed = self.freed.lock();
        let mut areas = freed.detached.take()?;
        freed.detached = areas.split_off(ROUND);
        let freeable = freed.detached_freeable.take();
        areas.for_each(|area| area.set_state(State::Purging));
        areas.for_each(|area| {
            if area.state() == State::Purging {
                // SAFETY: 1. the lock is held.
                detach(unsafe { self.survey(area) });
            }
        });
        Some(Round { areas, freeable })
    }

    /// Finds the adjacent areas around `area` that are being purged and marks them surveyed.
    ///
    /// # Safety
    /// 1. The caller holds the lock of the freed list.
    unsafe fn survey(&self, area: &Area) -> Purged {
        // SAFETY: 1. the caller's obligation 1.
        let found = |node: Option<NonNull<Area>>| node.map(|node| unsafe { self.area(node) });
        let is_purged = |area: &&Area| area.state() == State::Purging;
        let mut first = area;
        let mut before = found(self.index.previous(first));
        while let Some(other) = before.filter(is_purged) {
            first = other;
            before = found(self.index.previous(first));
        }
        let mut last = first;
        let after = loop {
            last.set_state(State::Surveyed);
            match found(self.index.next(last)) {
                Some(other) if is_purged(&other) => last = other,
                after => break after,
            }
        };
        let own = VirtRange::raw(first.start(), last.end());
        let low = before.map_or(0, Area::end);
        let high = after.map_or(u64::MAX, Area::start);
        Purged { own, free: VirtRange::raw(low, high) }
    }

    /// Frees the addresses of purged areas. TLBs no longer hold these addresses.
    ///
    /// # Safety
    /// 1. The areas are of this map and in the index.
    /// 2. They are freed a grace period later.
    pub(super) unsafe fn remove(&self, areas: &AreaList) {
        let mut nodes = areas.nodes().peekable();
        while nodes.peek().is_some() {
            let mut freed = self.freed.lock();
            freed.last_found = None;
            for node in nodes.by_ref().take(CHUNK) {
                // SAFETY: 1. The lock is held. 2. The caller's obligation 1, and no two areas have
                // the same start. 3. The caller's obligation 2.
                unsafe { self.index.remove(node) };
            }
        }
    }
}

/// The auditor's side.
impl<P: Platform> Areas<'_, P> {
    /// Whether no area is left.
    pub(super) fn is_empty(&self) -> bool {
        self.index.len() == 0
    }

    /// Whether the areas' addresses are correct and no area is busy.
    pub(super) fn is_sound(&self) -> bool {
        let in_arena = |node: NonNull<Area>| {
            // SAFETY: 1. the lock is held.
            let area = unsafe { self.area(node) };
            let whole = VirtRange::raw(area.start(), area.end());
            let guarded = area.range().end() < whole.end();
            self.arena.covers(whole) && guarded && area.state() != State::Busy
        };
        let _writer = self.freed.lock();
        self.index.check() && self.index.iter().all(in_arena)
    }

    /// The areas, in rising order.
    ///
    /// # Safety
    /// 1. No other call of the map runs while the iterator or an item is in use.
    pub(super) unsafe fn iter(&self) -> impl Iterator<Item = &Area> {
        // SAFETY: 1. the caller's obligation 1.
        self.index.iter().map(|node| unsafe { self.area(node) })
    }

    /// The live area that contains `at`.
    ///
    /// # Safety
    /// 1. No other call of the map runs while the result is in use.
    pub(super) unsafe fn owner_of(&self, at: VirtAddr) -> Option<&Area> {
        let node = self.index.find_at_or_before(at.0)?;
        // SAFETY: 1. the caller's obligation 1.
        let area = unsafe { self.area(node) };
        (area.state() == State::Live && area.range().contains(at)).then_some(area)
    }
}
