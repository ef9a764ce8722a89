//! Moves a part of one VMA to a different address.

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{Failure, NoMemory};
use crate::platform::Platform;
use crate::rmap::RmapGuard;
use crate::space::op::Op;
use crate::space::userfault::events;
use crate::table::locking::End;
use crate::vma::{MappingFlags, Vma, VmaWriteGuard};
use crate::vmas::{Between, NewVma, VmaSet, VmaView, freeable_between};

use super::plan::RemapPlan;
use super::supplies::RemapCall;

/// A free range of `length` bytes, congruent with `source` modulo the largest entry span that fits
/// into the range twice (so that at least one entry is covered completely), or else modulo the
/// contiguous run.
pub(super) fn congruent_place<P: Platform>(
    vmas: VmaView<'_, P>,
    source: VirtRange,
    length: u64,
) -> Option<VirtRange> {
    let start = source.start().0;
    let spans = P::Arch::PMD.up_to(P::Arch::ROOT).rev().map(Level::span);
    let whole = spans.filter(|span| {
        let first = start.next_multiple_of(*span);
        first.saturating_add(*span) <= source.end().0
    });
    let contig = u64::from(P::Arch::CONTIG_ENTRIES) * PAGE_SIZE;
    whole
        .chain([P::Arch::PMD.span(), contig, PAGE_SIZE])
        .find_map(|align| vmas.find_free(length, align, start & (align - 1)))
}

/// Moves the source range, a part of `vma`, to the free range `target`. All allocations precede the
/// first page move, so an error leaves the source unchanged.
pub(super) fn move_vma<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    target: VirtRange,
) -> Result<VirtAddr, Failure> {
    let RemapPlan { source, .. } = call.plan;
    let committed = if !vma.has(MappingFlags::ACCOUNT) {
        0
    } else if call.plan.keeps_source() {
        target.pages()
    } else {
        target.pages() - source.pages()
    };
    op.vmas.commit(committed)?;
    let locked = MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
    if vma.flags() & locked == MappingFlags::LOCKED && target.len() > source.len() {
        call.grown = Some(VirtRange::raw(target.start().0 + source.len(), target.end().0));
    }
    if vma.userfault_pointer().is_some() {
        return call.move_served(op, vma, target);
    }
    let moved = move_unserved(op, call, vma, target)?;
    if vma.has(MappingFlags::FRAMES)
        && let Some(object) = vma.object()
    {
        object.note_moved(source, moved);
    }
    Ok(moved)
}

/// As [`move_vma`], for a VMA without a userfaultfd.
#[inline(always)]
fn move_unserved<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    target: VirtRange,
) -> Result<VirtAddr, Failure> {
    if !call.plan.keeps_source() && call.plan.source.covers(vma.range()) {
        let between = op.vmas.between(vma);
        if between.free.start <= target.start().0
            && target.end().0 <= between.free.end
            && let Some(slid) = call.slide(op, &between, target)
        {
            return Ok(slid?);
        }
    }
    call.move_apart(op, vma, target)
}

impl<'m, P: Platform> RemapCall<'m, P> {
    /// As [`move_vma`], for a VMA with a userfaultfd, which follows the move if it has
    /// subscribed to moves.
    #[cold]
    fn move_served<'op>(
        &mut self,
        op: &mut Op<'op, 'm, P>,
        vma: &'op Vma,
        target: VirtRange,
    ) -> Result<VirtAddr, Failure> {
        let RemapPlan { source, remap, .. } = self.plan;
        let to = target.start();
        if self.notices.is_none() {
            let unmaps = !remap.keeps_source();
            self.notices = Some(events::prepare_move(op, vma, (source, to), unmaps)?);
        }
        let done = self.move_apart(op, vma, target);
        let Some((notices, follows)) = self.notices.take() else { return done };
        if done.is_ok() && !follows {
            strip_moved(op, VirtRange::from_len(to, source.len()));
        }
        match done {
            Ok(_) => op.notices.append(notices),
            Err(_) => notices.cancel(op.memory()),
        }
        done
    }

    /// Creates the VMA of the target and, if the source is cut out of the middle, the VMA of the
    /// part above it. Neither VMA is in the set yet.
    #[inline]
    fn make_room<'op>(
        &mut self,
        op: &Op<'op, 'm, P>,
        vma: &'op Vma,
        target: VirtRange,
    ) -> Result<(NewVma<'op, 'm, P>, Option<NewVma<'op, 'm, P>>), NoMemory> {
        let source = self.plan.source;
        let (flags, offset) = moved_attributes::<P>(vma, source, target);
        let mut purpose = vma.purpose();
        purpose.flags = flags;
        if let Some((_, false)) = self.notices {
            purpose = purpose.without_userfault();
        }
        let reserved = self.moved.take().map_or_else(|| op.vmas.reserve(), Ok)?;
        let moved = op.vmas.new_vma_in(reserved, target, purpose, offset);
        let range = VirtRange::raw(source.end().0, vma.end());
        if self.plan.keeps_source() || vma.start() >= source.start().0 || range.is_empty() {
            return Ok((moved, None));
        }
        let reserved = self.upper.take().map_or_else(|| op.vmas.reserve(), Ok)?;
        let offset = vma.page_offset_of(range.start());
        Ok((moved, Some(op.vmas.new_vma_in(reserved, range, vma.purpose(), offset))))
    }

    /// Moves the source into a VMA of its own. An error changes nothing. The trees of the reverse
    /// map are locked for each piece and contain both ranges during the move, so a walker finds
    /// each page either at its old or at its new address.
    fn move_apart<'op>(
        &mut self,
        op: &mut Op<'op, 'm, P>,
        vma: &'op Vma,
        target: VirtRange,
    ) -> Result<VirtAddr, Failure> {
        let (source, platform) = (self.plan.source, op.platform());
        let (moved, upper) = self.make_room(op, vma, target)?;
        if source.is_empty() {
            let moved = op.vmas.insert(moved);
            op.vmas.merge_around(moved);
            return Ok(target.start());
        }
        let stays = self.plan.keeps_source();
        // From this point on, faults in the source wait and afterwards look their VMA up again.
        let vma = vma.lock_write(platform);
        let freeable = if stays { source } else { op.vmas.freeable(source, Some(&vma), target) };
        let end = End { range: source, freeable };
        let Op { vmas, edit, .. } = op;
        let moved = edit.move_range(end, target.start(), &mut self.tables, |mover| {
            if mover.is_one_piece() {
                let held = RmapGuard::new(platform, &vma);
                mover.move_one_piece()?;
                if stays {
                    let moved = vmas.insert_held(moved, &held);
                    drop(held);
                    leave_source(vmas, vma, source, moved);
                    return Ok(moved);
                }
                cut_away(vmas, vma, source, upper, &held);
                return Ok(vmas.insert_held(moved, &held));
            }
            mover.preallocate_tables()?;
            // Linked before the first page arrives: a walker that misses the page at the source
            // then looks at the target.
            let linked = vmas.link(moved);
            mover.move_in_pieces(|work| {
                let held = RmapGuard::new(platform, &vma);
                work();
                linked.received(&held);
            });
            if stays {
                let moved = vmas.insert_linked(linked);
                leave_source(vmas, vma, source, moved);
                return Ok(moved);
            }
            let held = RmapGuard::new(platform, &vma);
            cut_away(vmas, vma, source, upper, &held);
            drop(held);
            Ok::<_, NoMemory>(vmas.insert_linked(linked))
        })?;
        // A source that stays is not merged with its neighbors, even if it now could be (as on
        // Linux).
        op.vmas.merge_around(moved);
        Ok(target.start())
    }

    /// Moves a whole VMA to addresses between its neighbors, so the index keeps its node in place.
    /// The locks are those of any other move. `None` if the move takes more than one piece, because
    /// between two pieces a walker would look at only one of the ranges.
    fn slide<'op>(
        &mut self,
        op: &mut Op<'op, 'm, P>,
        between: &Between<'op>,
        target: VirtRange,
    ) -> Option<Result<VirtAddr, NoMemory>> {
        let vma = between.vma;
        let source = vma.range();
        let locked = vma.lock_write(op.platform());
        let freeable = freeable_between::<P::Arch>(source, between.free.clone(), target);
        let end = End { range: source, freeable };
        let Op { vmas, edit, .. } = op;
        let slid = edit.move_range(end, target.start(), &mut self.tables, |mover| {
            if !mover.is_one_piece() {
                return None;
            }
            let held = RmapGuard::new(vmas.platform(), &locked);
            if mover.move_one_piece().is_err() {
                return Some(Err(NoMemory));
            }
            let attributes = moved_attributes::<P>(vma, source, target);
            vmas.slide_held((between, &locked), target, attributes, &held);
            Some(Ok(target.start()))
        });
        drop(locked);
        if let Some(Ok(_)) = slid
            && (between.free.start == target.start().0 || between.free.end == target.end().0)
        {
            op.vmas.merge_around(vma);
        }
        slid
    }
}

/// The flags and the page offset of the target of a move of `source`. Tables that move as a whole
/// carry entries along unread, and each moved page counts as written. A VMA that never had a page
/// may get a new offset and merge at its new address (as on Linux).
fn moved_attributes<P: Platform>(
    vma: &Vma,
    source: VirtRange,
    target: VirtRange,
) -> (MappingFlags, u64) {
    let carries_tables = source.len() >= P::Arch::PMD.span();
    let flags = if carries_tables { vma.flags() | MappingFlags::SOFT_DIRTY } else { vma.flags() };
    let offset = if vma.is_anonymous() && vma.group_pointer().is_none() {
        target.start().0 >> PAGE_SHIFT
    } else {
        vma.page_offset_of(source.start())
    };
    (flags, offset)
}

/// Lifts the write-protection by a userfaultfd in a range that has moved away from that
/// userfaultfd.
fn strip_moved<P: Platform>(op: &mut Op<'_, '_, P>, moved: Option<VirtRange>) {
    let Some(moved) = moved.filter(|moved| !moved.is_empty()) else { return };
    if let Some(vma) = op.vmas.at(moved.start()) {
        let locked = vma.lock_write(op.platform());
        // If memory for the lift runs out, the first write lifts the protection.
        let _ = op.edit.userfault_lift(moved);
        drop(locked);
    }
}

/// The source stays mapped, but empty and not locked into memory.
fn leave_source<'op, P: Platform>(
    vmas: &mut VmaSet<'op, '_, P>,
    vma: VmaWriteGuard<'op, P>,
    source: VirtRange,
    moved: &'op Vma,
) {
    if source.covers(vma.range()) {
        // Future pages get a new anon group.
        vmas.leave_group(&vma, moved);
    }
    let locked = MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
    vmas.change_flags(&vma, vma.flags() - locked);
}

/// Removes `source` from its VMA. The VMA's trees are locked.
fn cut_away<'op, 'm, P: Platform>(
    vmas: &mut VmaSet<'op, 'm, P>,
    vma: VmaWriteGuard<'op, P>,
    source: VirtRange,
    upper: Option<NewVma<'op, 'm, P>>,
    held: &RmapGuard<'_, P>,
) {
    let outer = vma.range();
    let below = outer.start() < source.start();
    if source.covers(outer) {
        vmas.remove_held(vma, held);
    } else if below {
        vmas.shorten_held(&vma, VirtRange::raw(outer.start().0, source.start().0), held);
    } else {
        vmas.shorten_held(&vma, VirtRange::raw(source.end().0, outer.end().0), held);
    }
    if let Some(upper) = upper {
        debug_assert_eq!(upper.end(), outer.end().0);
        vmas.insert_held(upper, held);
    }
}
