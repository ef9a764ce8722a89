//! Swaps out shared memory: the page index refers to slots in place of frames.
//!
//! ```text
//! index    | 0  1  2  3 |            | s0 s1 s2 s3 |            | s0 s1 s2 s3 |
//! folio    |f0 f1 f2 f3 |  unmapped  |f0 f1 f2 f3 | in the     freed
//!           mapped         ------->   swap cache      ------->
//! ```
//!
//! A slot of an object has one entry in its cell's count: the index. The rest works as for
//! anonymous memory ([`crate::swap`]): the folio is in the swap cache while it is written out. A
//! thread that finds the slot in the index finds the folio through the slot and waits for the
//! folio's lock.
//!
//! 1. The folios are locked and referenced, so their owner is known.
//! 2. The invalidate lock is tried for writing. From then on no fault maps pages of the object, and
//!    no call reads or writes them. The changes are tried for reading, because a thread that holds
//!    them relies on pages that it has seen, without the invalidate lock.
//! 3. All folios lose their mappings, in one walk ([`crate::table::zap_chosen`]). Entries are
//!    cleared, because the index records the location of the pages. As on Linux, the entries'
//!    soft-dirty bits are lost. Copies of private mappings stay.
//! 4. In one step, under the index lock, each folio is checked to be unmapped and without other
//!    holders, and its frames in the index are replaced by the slots.
//! 5. The locks are released, and the folio is written out.
//!
//! A folio that cannot be swapped out has lost only its mappings; the next access finds it in the
//! index.
//!
//! A reclaimer calls this, so locks are only tried.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr;
use core::sync::atomic::{Ordering, fence};

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT, PageRange, VirtAddr};
use crate::collections::page_tree::{PageFlags, SwapSlot};
use crate::folio::{Age, Eviction, FolioOwner, LockedFolio, Owner, Turn};
use crate::platform::Platform;
use crate::rmap::{HOLD, WalkLocking, WalkProgress, for_each_sight};
use crate::swap::{CachedFolio, SlotRun};
use crate::table::out_batch::{InCache, OutBatch};
use crate::table::zap_chosen::{MappedFolio, ZapChoice};
use crate::vma::MappingFlags;

use super::ObjectState;
use super::invalidate::PagesMayGo;
use super::placed_folio::PlacedFolio;
use super::reclaim::{ObjectFolio, Obstacle, Spare};

/// The maximum number of folios of one walk, and thus of one flush.
pub(crate) const FOLIOS: usize = 32;

/// A folio of an object that will be swapped out, locked, with a reference.
pub(crate) struct Leaving<'m, P: Platform> {
    pub(super) locked: LockedFolio<'m, P>,
    /// The page index of the folio's first page.
    pub(crate) first: u64,
    plan: Plan,
}

/// The slots for a folio, and the reason why the folio stays if it does.
#[derive(Default)]
struct Plan {
    /// `None` until the folio is examined.
    slots: Option<SlotRun>,
    mapped: bool,
    /// Whether an entry was used since the last walk.
    used: bool,
    /// The reason why the folio stays, if it does.
    stays: Option<ObjectFolio>,
}

impl<'m, P: Platform> Leaving<'m, P> {
    /// The folio that contains `frame`, if the folio belongs to the object and is unlocked.
    pub(crate) fn new(memory: &'m Memory<P>, object: &ObjectState, frame: Frame) -> Option<Self> {
        let locked = memory.frames.try_hold(frame)?.try_into_locked()?;
        let FolioOwner { owner, first } = locked.owner();
        let ours = matches!(owner, Owner::Memory(owner) if ptr::addr_eq(owner.as_ptr(), object));
        ours.then(|| Self::locked(locked, first.first()))
    }

    /// The number of entries that map the folio's pages.
    pub(crate) fn mappings(&self, memory: &Memory<P>) -> u32 {
        memory.frames.folio(self.locked.folio()).mappings()
    }

    /// Whether reclaim has examined the folio in this turn. Marks it as examined.
    pub(super) fn is_looked_at(&self, memory: &Memory<P>, turn: Turn) -> bool {
        let looked = memory.frames.folio(self.locked.folio()).reclaim_state().is_looked_at(turn);
        memory.frames.folio(self.locked.folio()).reclaim_state().note_look(turn);
        looked
    }

    /// Whether the folio is passing.
    pub(super) fn is_passing(&self, memory: &Memory<P>) -> bool {
        memory.frames.folio(self.locked.folio()).reclaim_state().age() == Age::Passing
    }

    /// The page index of the page after the folio's last.
    pub(crate) fn end(&self) -> u64 {
        self.first + u64::from(self.locked.folio().pages())
    }

    /// Wraps a folio that is locked and known to belong to the object.
    pub(super) fn locked(locked: LockedFolio<'m, P>, first: u64) -> Self {
        Self { locked, first, plan: Plan::default() }
    }

    /// The folio at its position in the object.
    fn placed<'a>(&self, memory: &'a Memory<P>, object: &'a ObjectState) -> PlacedFolio<'a, P> {
        PlacedFolio { memory, object, folio: self.locked.folio(), first: self.first }
    }

    /// Whether the folio contains one of the pages.
    fn has_any(&self, pages: PageRange) -> bool {
        self.first < pages.end && pages.first < self.end()
    }
}

/// Adds the folios of the pages that [`Leaving::new`] finds and `accept` accepts, until `folios` is
/// full. Returns the page to continue at, or the end if all were added.
pub(crate) fn add_folios<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    folios: &mut ArrayVec<Leaving<'m, P>, FOLIOS>,
    accept: impl Fn(&Leaving<'m, P>) -> bool,
) -> u64 {
    let PageRange { first: mut from, end } = pages;
    while !folios.is_full() {
        let next = object
            .pages
            .look(memory.platform(), |index| index.next_run_with(PageFlags::empty(), from, end));
        let Some(run) = next else { return end };
        let after = run.page + u64::from(run.count);
        from = run.page;
        while from < after && !folios.is_full() {
            let frame = run.frame.plus((from - run.page) as u32);
            from += 1;
            let leaving = Leaving::new(memory, object, frame);
            if let Some(leaving) = leaving.filter(&accept) {
                from = leaving.end().max(from);
                folios.push(leaving);
            }
        }
    }
    from
}

/// Swaps out those folios of `object` that can be swapped out; the folios are in ascending order.
/// Adds the folios that left the index to the batch, to be written out. Never waits for a sleeping
/// lock; not called in a read section. Returns the result for the last folio, or the reason why a
/// folio stays that a later attempt may swap out.
///
/// Complexity: O(log n) for each VMA that maps pages of the folios, where n VMAs map the object,
/// and linear in the entries there and the slots of the index.
pub(crate) fn swap_out<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    folios: &mut ArrayVec<Leaving<'m, P>, FOLIOS>,
    spare: Spare,
    batch: &mut OutBatch,
) -> ObjectFolio {
    if !object.may_be_swapped() {
        folios.clear();
        return ObjectFolio::NotReclaimable;
    }
    // Dropped last, because it keeps the object.
    let alone = object.invalidate_lock.try_write(memory.platform());
    let changes = object.changes.try_read(memory.platform());
    let (Some(alone), Some(_)) = (&alone, &changes) else {
        // Dropped first: without `alone`, the locks of the folios keep the object.
        drop(changes);
        folios.clear();
        return ObjectFolio::Busy;
    };
    let mut last = None;
    let mut note = |what: ObjectFolio| {
        if !last.is_some_and(ObjectFolio::may_go_later) {
            last = Some(what);
        }
    };
    let count = folios.len() as u32;
    for (number, leaving) in (0..).zip(folios.iter_mut()) {
        match plan(&leaving.placed(memory, object), spare, batch, count - number) {
            Ok(plan) => leaving.plan = plan,
            Err(why) => note(why),
        }
    }
    folios.retain(|leaving| leaving.plan.slots.is_some());
    if folios.iter().any(|leaving| leaving.plan.mapped) {
        unmap(memory, object, folios, spare, &alone.proof);
    }
    // After the entries that lead to the folios were cleared: a pin that was taken through such an
    // entry is visible here.
    fence(Ordering::SeqCst);
    for leaving in folios.drain(..) {
        let Plan { slots: Some(slots), mapped, stays, .. } = leaving.plan else { continue };
        note(match stays {
            Some(why) => {
                slots.free_unused(memory);
                if mapped && why == ObjectFolio::NotReclaimable {
                    memory.frames.folio(leaving.locked.folio()).reclaim_state().mark_unevictable();
                }
                why
            }
            None => match send(memory, object, leaving, slots, batch) {
                Ok(pages) => ObjectFolio::Freed(pages),
                Err(why) => why,
            },
        });
    }
    last.unwrap_or(ObjectFolio::Busy)
}

/// Checks whether the folio may be swapped out, and allocates slots for it.
fn plan<P: Platform>(
    victim: &PlacedFolio<'_, P>,
    spare: Spare,
    batch: &mut OutBatch,
    left: u32,
) -> Result<Plan, ObjectFolio> {
    let PlacedFolio { memory, object, folio, .. } = *victim;
    let may = object.pages.look(memory.platform(), |index| victim.may_go(index, spare));
    let mapped = match may {
        Ok(_) => false,
        Err(Obstacle::Mapped) => true,
        Err(Obstacle::Stays(why)) => return Err(why),
    };
    let slots = batch.slots(memory, folio.order, left).ok_or(ObjectFolio::NotReclaimable)?;
    Ok(Plan { slots: Some(slots), mapped, used: false, stays: None })
}

/// Unmaps the folios, in one walk with one flush for each VMA. With [`Spare::Used`], a recently
/// used folio is recorded and stays mapped. A folio that is locked into memory also stays mapped.
fn unmap<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    folios: &mut [Leaving<'_, P>],
    spare: Spare,
    _: &PagesMayGo,
) {
    let mapped = || folios.iter().filter(|leaving| leaving.plan.mapped);
    let first = mapped().map(|leaving| leaving.first).min().unwrap_or(0);
    let end = mapped().map(Leaving::end).max();
    let ranges = [PageRange { first, end: end.unwrap_or(first) }];
    let walked = for_each_sight(memory, object, &ranges, WalkLocking::Try, |hit, edit| {
        let part = hit.range;
        // `mlock` sets the flag with the VMA locked for writing, and then examines the pages.
        let locked = hit.vma.try_read(memory.platform());
        let stays = match &locked {
            None => Some(ObjectFolio::Busy),
            Some(_) if hit.vma.has(MappingFlags::LOCKED) => Some(ObjectFolio::NotReclaimable),
            Some(_) => None,
        };
        if stays.is_some() {
            let pages = PageRange::from_count(hit.vma.page_offset_of(part.start()), part.pages());
            folios
                .iter_mut()
                .filter(|leaving| leaving.has_any(pages))
                .for_each(|leaving| leaving.plan.stays = stays);
        } else {
            // Linux does the same: sequential and random readers declare that they do not return to
            // a page.
            let once = MappingFlags::SEQUENTIAL | MappingFlags::RANDOM;
            let recurs = !hit.vma.flags().intersects(once);
            let protected = hit.vma.dropped_protection();
            let start = hit.vma.page_offset_of(part.start());
            // The runs are in ascending order, like the folios.
            let mut next = 0;
            let zapped = edit.zap_chosen(part, protected, |mapped| {
                let page = start + u64::from(mapped.number);
                let passed = folios[next..].iter().take_while(|leaving| leaving.end() <= page);
                next += passed.count();
                let here =
                    folios.get_mut(next).filter(|leaving| leaving.locked.folio() == mapped.folio);
                here.map_or(ZapChoice::Stays, |leaving| {
                    fate(memory, &mut leaving.plan, mapped, spare, recurs)
                })
            });
            debug_assert!(zapped.is_ok(), "a huge leaf has lost its deposit");
        }
        WalkProgress { until: part.end(), entries: part.pages().min(HOLD) }
    });
    for Leaving { locked, plan, .. } in folios {
        if !plan.mapped || plan.stays.is_some() {
            continue;
        }
        if walked.is_err() {
            plan.stays = Some(ObjectFolio::Busy);
        } else if spare == Spare::Used
            && memory.frames.folio(locked.folio()).reclaim_state().update_age(plan.used)
                == Eviction::Later
        {
            plan.stays = Some(ObjectFolio::Used);
        }
    }
}

/// Decides the fate of entries from the state of their folio so far.
fn fate<P: Platform>(
    memory: &Memory<P>,
    plan: &mut Plan,
    mapped: MappedFolio,
    spare: Spare,
    recurs: bool,
) -> ZapChoice {
    if plan.stays.is_some() {
        return ZapChoice::Stays;
    }
    plan.used |= mapped.used && recurs;
    match spare {
        Spare::Used
            if plan.used || memory.frames.folio(mapped.folio).reclaim_state().age() == Age::Hot =>
        {
            if mapped.used {
                ZapChoice::Ages
            } else {
                ZapChoice::Stays
            }
        }
        Spare::Used | Spare::Nothing => ZapChoice::Goes,
    }
}

/// Replaces a folio's frames in the index by its slots, if the folio has no other holders. Returns
/// the number of pages.
fn send<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    leaving: Leaving<'_, P>,
    slots: SlotRun,
    batch: &mut OutBatch,
) -> Result<u32, ObjectFolio> {
    let victim = leaving.placed(memory, object);
    let Leaving { locked, first, .. } = leaving;
    let folio = locked.folio();
    let cached = CachedFolio::send_out(memory, locked.locked(), slots, 0, 0);
    let sent = enter_slots(&victim, slots);
    let named = match sent {
        Ok(named) => named,
        Err(obstacle) => {
            cached.call_back();
            slots.free_unused(memory);
            return Err(match obstacle {
                Obstacle::Stays(why) => why,
                Obstacle::Mapped => ObjectFolio::Busy,
            });
        }
    };
    locked.lock().detach_from_object();
    // One of the index's references now belongs to the swap cache. The caller's reference now
    // belongs to the batch.
    if named > 1 {
        // SAFETY: 1. the index has replaced the pages by the slots and passed on the references to
        // the pages.
        unsafe { memory.frames.folio(folio).release_pages(named - 1) };
    }
    batch.add(slots, VirtAddr(first << PAGE_SHIFT), InCache::New);
    locked.leave_to_batch();
    Ok(folio.pages())
}

/// Counts a reference to the slots of the victim's pages and enters the slots into the index. On
/// failure, only the counts of the slots have changed. Returns the number of pages.
fn enter_slots<P: Platform>(victim: &PlacedFolio<'_, P>, slots: SlotRun) -> Result<u32, Obstacle> {
    let PlacedFolio { memory, object, first, .. } = *victim;
    let mut from = first;
    let next = |from| {
        let flags = PageFlags::empty();
        object.pages.look(memory.platform(), |index| victim.next_run(index, flags, from))
    };
    // The pages stay: the invalidate lock is held for writing.
    while let Some(run) = next(from) {
        from = run.page + u64::from(run.count);
        let named = SlotRun { first: slots.first + (run.page - first), count: run.count, ..slots };
        if named.dup(memory).is_err() {
            return Err(Obstacle::Stays(ObjectFolio::Busy));
        }
    }
    object.pages.change(memory, |index, _| {
        let named = match victim.may_go(index, Spare::Nothing) {
            Ok(named) => named,
            Err(obstacle) => return (Err(obstacle), 0),
        };
        let mut from = first;
        while let Some(run) = victim.next_run(index, PageFlags::empty(), from) {
            from = run.page + u64::from(run.count);
            let slot = SwapSlot { area: slots.area, slot: slots.first + (run.page - first) };
            index.send_out(run.page, slot, run.count);
        }
        object.pages.count_swapped(i64::from(named));
        (Ok(named), -i64::from(named))
    })
}
