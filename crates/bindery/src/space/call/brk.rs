//! `brk(2)`.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;
use crate::userfault::Notices;
use crate::vma::{MappingFlags, Purpose};
use crate::vmas::STACK_GUARD_GAP;

use super::munmap::unmap;
use crate::space::AddressSpace;
use crate::space::call::populate::Populate;
use crate::space::op::Op;
use crate::space::userfault::pending_events::PendingEvents;

/// The start and end of the program's heap; both 0 until [`AddressSpace::set_break_start`].
#[derive(Default)]
pub(in crate::space) struct ProgramBreak {
    start: AtomicU64,
    end: AtomicU64,
}

impl ProgramBreak {
    pub(in crate::space) fn copy_from(&self, other: &Self) {
        self.start.store(other.start.load(Ordering::Relaxed), Ordering::Relaxed);
        self.end.store(other.end.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Sets the start of an empty heap. The embedder's program loader calls this.
    ///
    /// Context: may sleep.
    pub fn set_break_start(&self, start: VirtAddr) {
        let _guard = self.vmas.lock();
        self.program_break.start.store(start.0, Ordering::Relaxed);
        self.program_break.end.store(start.0, Ordering::Relaxed);
    }

    /// The range of the heap (Linux: `start_brk`, `brk`); null until
    /// [`AddressSpace::set_break_start`]. The two ends are consistent only while the mutex is held
    /// ([`AddressSpace::view_mapping`]).
    ///
    /// Context: any.
    pub fn heap(&self) -> VirtRange {
        let read = |at: &AtomicU64| at.load(Ordering::Relaxed);
        VirtRange::raw(read(&self.program_break.start), read(&self.program_break.end))
    }

    /// Moves the end of the heap to `end`. Returns the new end, or the old one if the call fails
    /// (Linux: `brk(2)`; the C library turns the old end into an error).
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::munmap`] if the heap shrinks; logarithmic
    /// in the number of mappings if it grows.
    pub fn set_break(&self, end: VirtAddr) -> VirtAddr {
        let (now, populate) = self.deliver_after(|notices| set_break(self, end, notices));
        let _ = populate.finish(self);
        now
    }

    /// As [`AddressSpace::set_break`], up to the waits. The steps of the [`Populate`] map the pages
    /// of memory locked by [`crate::LockAll::FUTURE`]; they do not fail. They follow the steps of
    /// the [`PendingEvents`], which tell userfaultfds that the heap has shrunk.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::set_break`].
    pub fn begin_set_break(&self, end: VirtAddr) -> ((VirtAddr, Populate), PendingEvents<'m, P>) {
        PendingEvents::of(self, |notices| set_break(self, end, notices))
    }
}

fn set_break<P: Platform>(
    space: &AddressSpace<'_, P>,
    end: VirtAddr,
    notices: &mut Notices,
) -> (VirtAddr, Populate) {
    let mut now = end;
    let moved = space.operate_with_reclaim_untold(notices, |op| {
        let moved = move_break(op, end);
        if moved.is_ok() {
            space.program_break.end.store(end.0, Ordering::Relaxed);
        }
        now = VirtAddr(space.program_break.end.load(Ordering::Relaxed));
        moved
    });
    let populate = match moved {
        Ok(Some(range)) => Populate::as_possible(range),
        _ => Populate::default(),
    };
    (now, populate)
}

/// Moves the end of the heap. Returns the new range if it must be populated.
fn move_break<P: Platform>(
    op: &mut Op<'_, '_, P>,
    end: VirtAddr,
) -> Result<Option<VirtRange>, Failure> {
    let limit = op.space.limit();
    let start = op.space.program_break.start.load(Ordering::Relaxed);
    let old = op.space.program_break.end.load(Ordering::Relaxed);
    let round = |addr: u64| addr.checked_next_multiple_of(PAGE_SIZE);
    if end.0 < start || end.0 - start > op.space.limits().data {
        return Err(Error::LimitReached.into());
    }
    let new_end = round(end.0).ok_or(Error::OutOfRange { limit })?;
    let old_end = round(old).ok_or(Error::OutOfRange { limit })?;
    if new_end == old_end {
        return Ok(None);
    }
    if new_end < old_end {
        let range = VirtRange::raw(new_end, old_end);
        // Linux refuses to shrink the heap if the program has unmapped this part of it.
        op.vmas.first_in(range).ok_or(Error::NotMapped(VirtAddr(new_end)))?;
        unmap(op, range)?;
        return Ok(None);
    }
    grow_break(op, VirtRange::raw(old_end, new_end))
}

fn grow_break<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
) -> Result<Option<VirtRange>, Failure> {
    let limit = op.space.limit();
    if range.end() > limit {
        return Err(Error::OutOfRange { limit }.into());
    }
    let minimum = op.vmas.minimum();
    if range.start() < minimum {
        return Err(Error::BelowMinimum { minimum }.into());
    }
    // Keeps one page free above the heap, as well as the guard gap of a mapping above that grows
    // down.
    let guard = VirtRange::raw(range.start().0, range.end().0.saturating_add(PAGE_SIZE));
    if let Some(next) = op.vmas.first_ending_after(range.start().0) {
        let grows = next.has(MappingFlags::GROWS_DOWN);
        let gap = if grows { STACK_GUARD_GAP } else { 0 };
        if guard.end().0 > next.start().saturating_sub(gap) {
            return Err(Error::Exists(VirtAddr(next.start())).into());
        }
    }
    let flags = MappingFlags::READ
        | MappingFlags::WRITE
        | MappingFlags::MAY_ALL
        | MappingFlags::ACCOUNT
        | MappingFlags::SOFT_DIRTY
        | op.space.future_locks.get();
    let flags = flags | op.space.settings.future_merging(flags);
    let locked = flags.contains(MappingFlags::LOCKED);
    if locked {
        op.vmas.account().may_lock(range.pages())?;
    }
    op.vmas.account().may_expand(flags, range.pages())?;
    // Linux checks the number of mappings before it counts the new one.
    op.vmas.room_for(0)?;
    op.vmas.commit(range.pages())?;
    let offset = range.start().0 >> PAGE_SHIFT;
    let purpose = Purpose::anonymous(flags);
    // The heap is extended or gets a new mapping; it is never merged with other neighbors, as on
    // Linux.
    let start = op.space.program_break.start.load(Ordering::Relaxed);
    let heap = VirtRange::raw(start.min(range.start().0), range.start().0);
    let has_heap = op.vmas.first_in(heap).is_some();
    if !(has_heap && op.vmas.extend_below(range, &purpose, offset)) {
        let new = op.vmas.new_vma(range, purpose, offset)?;
        op.vmas.insert(new);
    }
    Ok(locked.then_some(range))
}
