//! Reclaim of a file's clean pages: they leave the page index, and the pager supplies them again
//! when they are needed. (Shared memory is swapped out instead: [`super::swap_out`].) Dirty pages
//! that were not used recently are stored first, later and without a waiting thread
//! ([`super::detached_batch::store_for_reclaim`]).
//!
//! A reclaimer has found the folio by its frame number, and may have VMAs of any program locked for
//! reading. So it only tries locks, does not call the pager here and allocates nothing:
//!
//! 1. It tries the folio's lock. This fixes the owner, which lives for as long as it owns the
//!    folio.
//! 2. It tries the invalidate lock for writing. From then on no fault maps pages of the object, no
//!    call reads them, and no page is marked dirty. The last holder does not free the object,
//!    because it waits for this lock before it drops the pages ([`super::state`]).
//! 3. If the folio is mapped, it walks the object's mappings. If an entry was used since the last
//!    walk, its accessed bit is cleared and the folio stays. Otherwise the entries are cleared. An
//!    entry of a clean page allows no write ([`super::pages::mark_dirty`]), so no cleared entry is
//!    dirty.
//! 4. In one step, under the index lock, it checks that the folio is clean, idle and without other
//!    holders, and removes the folio's pages from the index.
//!
//! # Why nothing may be in flight in step 4
//! A *change* relies on pages that it has seen, without the invalidate lock. During a *write*, the
//! pager reads the frames. During a *read*, its pages must not leave the index; otherwise, this
//! could happen:
//! 1. CPU A fetches page 3, and the pager has read the old bytes.
//! 2. CPU B writes all of page 3, which needs no fetch, and saves it. The page is clean.
//! 3. CPU C reclaims the page.
//! 4. CPU A inserts the old bytes into the index.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::Memory;
#[cfg(any(test, feature = "testing"))]
use crate::addr::Frame;
use crate::addr::PageRange;
use crate::collections::page_tree::{PageFlags, PageIndex};
use crate::folio::{Eviction, FolioLock, FolioOwner, FolioRef, Owner};
use crate::platform::Platform;
use crate::rmap::{HOLD, RmapHit, WalkLocking, WalkProgress, for_each_sight};
use crate::swap;
use crate::table::edit::Edit;
use crate::table::out_batch::OutBatch;
use crate::table::rewrite::use_bits::UseBits;
use crate::table::zap_except::{Exceptions, Spared};
use crate::vma::MappingFlags;

#[cfg(any(test, feature = "testing"))]
use super::Object;
use super::ObjectState;
use super::invalidate::PagesMayGo;
use super::placed_folio::PlacedFolio;
use super::save::{Tried, next_to_store};
use super::swap_out::{Leaving, swap_out};

/// The result for a folio of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectFolio {
    /// The folio has no mapping or index entry left; the number is that of its freed pages.
    Freed(u32),
    /// The folio stays because programs have used it recently (`ReclaimState::update_age`).
    Used,
    /// The folio stays because it has other holders, or because another thread holds one of the
    /// locks.
    Busy,
    /// The folio stays until it is saved.
    Dirty,
    /// The folio stays until it is saved, which reclaim may begin.
    Storable,
    /// The folio stays because it is locked into memory, or because it is shared memory without a
    /// free swap slot.
    NotReclaimable,
}

impl ObjectFolio {
    /// Whether the folio stays but a later attempt may free it.
    pub(crate) fn may_go_later(self) -> bool {
        matches!(self, Self::Used | Self::Busy)
    }
}

/// The result of a reclaim attempt on folios.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LookedAt {
    /// The number of freed pages.
    pub(crate) freed: u64,
    /// Whether another attempt may free more, because a folio was used or another thread had it
    /// locked.
    pub(crate) later: bool,
}

impl LookedAt {
    pub(crate) const NOTHING: Self = Self { freed: 0, later: false };
}

impl From<ObjectFolio> for LookedAt {
    fn from(folio: ObjectFolio) -> Self {
        let freed = if let ObjectFolio::Freed(pages) = folio { u64::from(pages) } else { 0 };
        Self { freed, later: folio.may_go_later() }
    }
}

/// The reason for which a folio is spared from reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spare {
    /// Recent use by programs.
    Used,
    /// Nothing: recent use is ignored.
    Nothing,
}

/// Drops the pages of the folio, which the caller has not locked, if the pager can supply them
/// again; swaps out shared memory. Consumes the reference. Never waits for a sleeping lock; not
/// called in a read section.
///
/// Complexity: O(log n) for each VMA that maps pages of the folio, where n VMAs map the object, and
/// linear in the folio's entries there and its slots in the index.
pub(crate) fn reclaim_folio<P: Platform>(
    memory: &Memory<P>,
    held: FolioRef<'_, P>,
    spare: Spare,
) -> ObjectFolio {
    let Some(locked) = held.try_into_locked() else { return ObjectFolio::Busy };
    let FolioOwner { owner, first } = locked.owner();
    let first = first.first();
    match owner {
        // SAFETY: 1. the object is the owner of the locked folio.
        Owner::File(object) => unsafe { evict(memory, object.cast(), first, locked.lock(), spare) },
        Owner::Memory(object) if memory.swap.has_room(&memory.frames) => {
            let leaving = Leaving::locked(locked, first);
            // SAFETY: 1. the object is the owner of the locked folio.
            unsafe { send_to_swap(memory, object.cast(), leaving, spare) }
        }
        Owner::Memory(_) => ObjectFolio::NotReclaimable,
        Owner::Group(_) | Owner::None => ObjectFolio::Busy,
    }
}

/// Swaps out a folio of shared memory.
///
/// # Safety
/// 1. `object` owns the folio.
// Not inlined, because its lists take stack space that folios of files do not need.
#[inline(never)]
unsafe fn send_to_swap<P: Platform>(
    memory: &Memory<P>,
    object: NonNull<ObjectState>,
    leaving: Leaving<'_, P>,
    spare: Spare,
) -> ObjectFolio {
    let mut folios = ArrayVec::new();
    folios.push(leaving);
    let mut batch = OutBatch::new();
    let sent = {
        // SAFETY: as in `evict` (the caller's obligation 1); the callee's last use of the object
        // comes before it releases the invalidate lock.
        let object = unsafe { object.as_ref() };
        swap_out(memory, object, &mut folios, spare, &mut batch)
    };
    match (sent, batch.write_out(memory)) {
        // The swap area had no room for the content.
        (ObjectFolio::Freed(_), 0) => ObjectFolio::NotReclaimable,
        (sent, _) => sent,
    }
}

/// Reclaims the folio of `frame`, whatever the frame's current use. `None` if the frame is in no
/// folio.
#[cfg(any(test, feature = "testing"))]
pub fn reclaim_frame<P: Platform>(
    memory: &Memory<P>,
    frame: Frame,
    spare: Spare,
) -> Option<ObjectFolio> {
    let held = memory.frames.try_hold(frame)?;
    Some(reclaim_folio(memory, held, spare))
}

/// As [`reclaim_frame`], for a page of an object. `None` if the page is not in memory.
#[cfg(any(test, feature = "testing"))]
pub fn reclaim_page<P: Platform>(
    object: &Object<'_, P>,
    page: u64,
    spare: Spare,
) -> Option<ObjectFolio> {
    reclaim_frame(object.memory, frame_of_page(object, page)?, spare)
}

/// The frame that holds a page of an object, if it is in memory.
#[cfg(any(test, feature = "testing"))]
pub fn frame_of_page<P: Platform>(object: &Object<'_, P>, page: u64) -> Option<Frame> {
    let slot = object.state().pages.look(object.memory.platform(), |index| index.get(page));
    slot.map(|slot| slot.frame)
}

/// Drops the pages of a folio of `object`, whose first page belongs at `first`.
///
/// # Safety
/// 1. `object` owns the folio.
unsafe fn evict<P: Platform>(
    memory: &Memory<P>,
    object: NonNull<ObjectState>,
    first: u64,
    lock: &FolioLock<'_, P>,
    spare: Spare,
) -> ObjectFolio {
    // SAFETY: the object owns the folio (the caller's obligation 1), whose lock is held, so the
    // object lives until it has dropped the folio. Before that, it waits for the invalidate lock,
    // which is released after the last use here.
    let object = unsafe { object.as_ref() };
    let Some(alone) = object.invalidate_lock.try_write(memory.platform()) else {
        return ObjectFolio::Busy;
    };
    let folio = lock.folio();
    let victim = PlacedFolio { memory, object, folio, first };
    let dropped = match victim.take(spare, &alone.proof) {
        Err(Obstacle::Mapped) => victim.unmap(spare, &alone.proof).and_then(|()| {
            // Mappings without an entry are being added or removed.
            victim.take(Spare::Nothing, &alone.proof)
        }),
        result @ (Ok(_) | Err(Obstacle::Stays(_))) => result,
    };
    match dropped {
        Ok(pages) => {
            lock.detach_from_object();
            // SAFETY: 1. `take` has removed these pages from the index and passed on their
            // references.
            unsafe { memory.frames.folio(folio).release_pages(pages) };
            ObjectFolio::Freed(folio.pages())
        }
        Err(Obstacle::Stays(ObjectFolio::Dirty)) if object.has_lasting_pager() => {
            victim.while_dirty(spare, &alone.proof)
        }
        Err(Obstacle::Stays(why)) => why,
        Err(Obstacle::Mapped) => ObjectFolio::Busy,
    }
}

/// The reason why pages cannot be taken.
pub(super) enum Obstacle {
    /// Entries map the pages.
    Mapped,
    /// The pages stay.
    Stays(ObjectFolio),
}

impl<P: Platform> PlacedFolio<'_, P> {
    /// Removes the folio's pages from the index if they are unused. Returns their number; the
    /// index's references to them now belong to the caller. The folio's lock and the invalidate
    /// lock are held.
    fn take(&self, spare: Spare, _: &PagesMayGo) -> Result<u32, Obstacle> {
        let memory = self.memory;
        let range = PageRange { first: self.first, end: self.end() };
        let evicted = swap::shadow(memory);
        let taken = self.object.pages.change_at_rest(memory, range, |index, nodes| {
            let named = match self.may_go(index, spare) {
                Ok(named) => named,
                Err(obstacle) => return (Err(obstacle), 0),
            };
            let mut from = self.first;
            while let Some(run) = self.next_run(index, PageFlags::empty(), from) {
                from = run.page + u64::from(run.count);
                index.take_run(run.page, from, nodes);
                index.leave_shadows(run.page, run.count, evicted);
            }
            (Ok(named), -i64::from(named))
        });
        if let Some(Ok(named)) = taken {
            swap::note_evicted(memory, named);
        }
        taken.unwrap_or(Err(Obstacle::Stays(ObjectFolio::Busy)))
    }

    /// The number of the folio's pages in the index, if they are clean and unmapped, and only the
    /// reclaimer and the index hold the folio.
    pub(super) fn may_go(&self, index: &PageIndex, spare: Spare) -> Result<u32, Obstacle> {
        let (frames, folio) = (&self.memory.frames, self.folio);
        let (mut named, mut from) = (0, self.first);
        while let Some(run) = self.next_run(index, PageFlags::empty(), from) {
            from = run.page + u64::from(run.count);
            named += run.count;
        }
        if index.has_dirty() && self.next_run(index, PageFlags::DIRTY, self.first).is_some() {
            return Err(Obstacle::Stays(ObjectFolio::Dirty));
        }
        // One load for all holders. Pins are created through mappings, so a folio that has neither
        // at one moment gets no new pin. With a load for each:
        // 1. CPU A finds no pin.
        // 2. CPU B pins the page through its mapping, and unmaps it.
        // 3. CPU A finds no mapping, and takes a pinned page out of the index.
        let holders = frames.folio(folio).holders();
        if named == 0 || holders.pins > 0 || holders.references != named + 1 {
            return Err(Obstacle::Stays(ObjectFolio::Busy));
        }
        if holders.mappings > 0 {
            return Err(Obstacle::Mapped);
        }
        self.look(spare, false).map(|()| named)
    }

    /// Updates the folio's age, and returns whether the folio may be reclaimed.
    fn look(&self, spare: Spare, used: bool) -> Result<(), Obstacle> {
        if spare == Spare::Used
            && self.memory.frames.folio(self.folio).reclaim_state().update_age(used)
                == Eviction::Later
        {
            return Err(Obstacle::Stays(ObjectFolio::Used));
        }
        Ok(())
    }

    /// The reason why a dirty folio stays: it was used recently, or has to be saved.
    #[cold]
    fn while_dirty(&self, spare: Spare, proof: &PagesMayGo) -> ObjectFolio {
        let pages = PageRange { first: self.first, end: self.end() };
        if next_to_store(self.memory, self.object, pages, Tried::Never).is_none() {
            return ObjectFolio::Dirty;
        }
        match self.age(spare, proof) {
            Ok(()) => ObjectFolio::Storable,
            Err(Obstacle::Stays(why)) => why,
            Err(Obstacle::Mapped) => ObjectFolio::Busy,
        }
    }

    /// Fails if programs have used the folio recently, or it is locked into memory.
    fn age(&self, spare: Spare, _: &PagesMayGo) -> Result<(), Obstacle> {
        if spare == Spare::Nothing {
            return Ok(());
        }
        let mut used = 0;
        self.visit(|hit, edit| {
            let concerned = |folio, _| folio == Some(self.folio);
            let aged = edit.clear_use(hit.range, UseBits::Accessed, concerned);
            debug_assert!(aged.is_ok(), "a huge leaf has lost its deposit");
            // Linux does the same: sequential and random readers declare that they do not return
            // to a page.
            let recurs = MappingFlags::SEQUENTIAL | MappingFlags::RANDOM;
            if !hit.vma.flags().intersects(recurs) {
                used += aged.unwrap_or(0);
            }
        })?;
        self.look(spare, used > 0)
    }

    /// Removes all entries that map the folio, unless it was used or is locked into memory.
    fn unmap(&self, spare: Spare, proof: &PagesMayGo) -> Result<(), Obstacle> {
        self.age(spare, proof)?;
        self.visit(|hit, edit| {
            let protected = hit.vma.dropped_protection();
            let except = Exceptions { spared: Spared::AllBut(self.folio), protected };
            let zapped = edit.zap_sparing(hit.range, except);
            debug_assert!(zapped.is_ok(), "a huge leaf has lost its deposit");
        })
    }

    /// Calls `work` for each VMA that may map pages of the folio, with the VMA locked for reading.
    /// Stops at a VMA that is locked into memory, or when another thread holds a lock.
    fn visit<'m>(
        &self,
        mut work: impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>),
    ) -> Result<(), Obstacle>
    where
        Self: 'm,
    {
        let ranges = [PageRange { first: self.first, end: self.end() }];
        let mut stop = None;
        let walked =
            for_each_sight(self.memory, self.object, &ranges, WalkLocking::Try, |hit, edit| {
                // `mlock` sets the flag with the VMA locked for writing, and then examines the
                // pages.
                match hit.vma.try_read(self.memory.platform()) {
                    _ if stop.is_some() => {}
                    None => stop = Some(ObjectFolio::Busy),
                    Some(_) if hit.vma.has(MappingFlags::LOCKED) => {
                        stop = Some(ObjectFolio::NotReclaimable);
                    }
                    Some(_vma) => work(hit, edit),
                }
                WalkProgress { until: hit.range.end(), entries: hit.range.pages().min(HOLD) }
            });
        let stop = stop.or(walked.is_err().then_some(ObjectFolio::Busy));
        stop.map_or(Ok(()), |why| Err(Obstacle::Stays(why)))
    }
}
