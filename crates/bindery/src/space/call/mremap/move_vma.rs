//! Moves a part of one VMA to a place of its own.

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{Failure, NoMemory};
use crate::platform::Platform;
use crate::rmap::RmapGuard;
use crate::space::op::Op;
use crate::space::userfault::events;
use crate::stats::Counts;
use crate::table::locking::End;
use crate::vma::{MappingFlags, Purpose, Vma, VmaWriteGuard};
use crate::vmas::{Between, NewVma, VmaView, freeable_between};

use super::RemapCall;
use super::plan::RemapPlan;

/// The VMA of a move's target.
#[derive(Clone, Copy)]
struct Destination<'op> {
    range: VirtRange,
    purpose: Purpose<'op>,
    page_offset: u64,
}

/// A free range of `length` bytes, congruent with `source` modulo the largest entry span that fits
/// into it twice (so that at least one slot is covered whole), else modulo the contiguous run.
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

/// Moves the plan's source, a part of `vma`, to `target`, in which nothing is mapped. Allocates all
/// that the move needs before the first page moves: an error leaves the source as it was.
pub(super) fn move_vma<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    plan: &RemapPlan,
    target: VirtRange,
) -> Result<VirtAddr, Failure> {
    let source = plan.source;
    let committed = if !vma.has(MappingFlags::ACCOUNT) {
        0
    } else if plan.keeps_source() {
        target.pages()
    } else {
        target.pages() - source.pages()
    };
    let _reservation = op.memory().commitment().reserve(committed)?;
    // A VMA that never had a page may take a new page offset, and merge at its new place (as on
    // Linux).
    let never_written = vma.is_anonymous() && vma.group_pointer().is_none();
    let page_offset = if never_written {
        target.start().0 >> PAGE_SHIFT
    } else {
        vma.page_offset_of(source.start())
    };
    let mut destination = Destination { range: target, purpose: vma.purpose(), page_offset };
    let purpose = &mut destination.purpose;
    let served = purpose.holds().userfault.is_some();
    let locked = MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
    if purpose.flags & locked == MappingFlags::LOCKED && target.len() > source.len() {
        call.grown = Some(VirtRange::raw(target.start().0 + source.len(), target.end().0));
    }
    if source.len() >= P::Arch::PMD.span() {
        // Tables that move whole carry entries along unread, and each moved page counts as
        // written.
        purpose.flags |= MappingFlags::SOFT_DIRTY;
    }
    if served {
        return move_served(op, call, vma, plan, destination);
    }
    if !plan.keeps_source() && source.covers(vma.range()) {
        let between = op.vmas.between(vma);
        if between.free.start <= target.start().0
            && target.end().0 <= between.free.end
            && let Some(slid) = slide(op, call, &between, &destination)
        {
            return Ok(slid?);
        }
    }
    move_apart(op, call, vma, plan, &destination)
}

/// As [`move_vma`], of a VMA with a userfaultfd: it follows, if it subscribed to moves.
#[cold]
fn move_served<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    plan: &RemapPlan,
    mut destination: Destination<'op>,
) -> Result<VirtAddr, Failure> {
    let (source, to) = (plan.source, destination.range.start());
    let (notices, follows) = match call.supplies.told.take() {
        Some(told) => told,
        None => events::prepare_move(op, vma, (source, to), !plan.remap.keeps_source())?,
    };
    // A second view of shared memory has no userfaultfd.
    let follows = follows && !source.is_empty();
    if !follows {
        destination.purpose = destination.purpose.without_userfault();
    }
    let done = move_apart(op, call, vma, plan, &destination);
    if done.is_ok() && !follows {
        strip_moved(op, VirtRange::from_len(to, source.len()));
    }
    match done {
        Ok(_) => op.notices.append(notices),
        Err(_) => notices.cancel(op.memory()),
    }
    done
}

/// Lifts the write-protection by a userfaultfd in a range that has moved away from it.
fn strip_moved<P: Platform>(op: &mut Op<'_, '_, P>, moved: Option<VirtRange>) {
    let Some(moved) = moved.filter(|moved| !moved.is_empty()) else { return };
    if let Some(vma) = op.vmas.at(moved.start()) {
        let locked = vma.lock_write(op.platform());
        // If memory for that runs out, the first write lifts the protection.
        let _ = op.edit.userfault_lift(moved);
        drop(locked);
    }
}

/// Moves the source into a VMA of its own; if that fails, nothing has changed. The trees of the
/// reverse map are locked for each piece, and contain both places during the move, so that a walker
/// finds each page at its old or at its new one.
fn move_apart<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    plan: &RemapPlan,
    destination: &Destination<'op>,
) -> Result<VirtAddr, Failure> {
    let (source, platform) = (plan.source, op.platform());
    let &Destination { range: target, purpose, page_offset } = destination;
    let reserved = call.supplies.moved.take().map_or_else(|| op.vmas.reserve(), Ok)?;
    let moved = op.vmas.new_vma_in(reserved, target, purpose, page_offset);
    if source.is_empty() {
        let moved = op.vmas.insert(moved);
        op.vmas.merge_around(moved);
        return Ok(target.start());
    }
    let stays = plan.keeps_source();
    // Cut out of the middle, the VMA leaves two parts.
    let upper = if !stays && vma.start() < source.start().0 && source.end().0 < vma.end() {
        let range = VirtRange::raw(source.end().0, vma.end());
        let offset = vma.page_offset_of(source.end());
        let reserved = call.supplies.upper.take().map_or_else(|| op.vmas.reserve(), Ok)?;
        Some(op.vmas.new_vma_in(reserved, range, vma.purpose(), offset))
    } else {
        None
    };
    // From here on faults in the source wait, and look up their VMA again afterwards.
    let vma = vma.lock_write(platform);
    let freeable = if stays { source } else { op.vmas.freeable(source, target) };
    let end = End { range: source, freeable };
    let mut counts = Counts::default();
    let mut mover = op.edit.mover(end, target.start(), &mut call.supplies.tables, &mut counts);
    let moved = if mover.is_one_piece() {
        let held = RmapGuard::new(platform, &vma);
        let done = mover.move_one_piece();
        op.edit.count(&counts);
        done?;
        if stays {
            let moved = op.vmas.insert_held(moved, &held);
            drop(held);
            leave_source(op, vma, source, moved);
            moved
        } else {
            cut_away(op, vma, source, upper, &held);
            op.vmas.insert_held(moved, &held)
        }
    } else {
        if let Err(error) = mover.preallocate_tables() {
            op.edit.count(&counts);
            return Err(error.into());
        }
        // Before the first page arrives: a walker that misses it at the source looks here.
        let linked = op.vmas.link(moved);
        mover.move_in_pieces(|work| {
            let held = RmapGuard::new(platform, &vma);
            work();
            linked.received(&held);
        });
        op.edit.count(&counts);
        if stays {
            let moved = op.vmas.insert_linked(linked);
            leave_source(op, vma, source, moved);
            moved
        } else {
            let held = RmapGuard::new(platform, &vma);
            cut_away(op, vma, source, upper, &held);
            drop(held);
            op.vmas.insert_linked(linked)
        }
    };
    // A source that stays is not merged with its neighbors, though it may fit them now (as on
    // Linux).
    op.vmas.merge_around(moved);
    Ok(target.start())
}

/// The source stays mapped, empty and not locked into memory.
fn leave_source<'op, P: Platform>(
    op: &mut Op<'op, '_, P>,
    vma: VmaWriteGuard<'op, P>,
    source: VirtRange,
    moved: &'op Vma,
) {
    if source.covers(vma.range()) {
        // Future pages get a new anon group.
        op.vmas.leave_group(&vma, moved);
    }
    let locked = MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
    op.vmas.change_flags(&vma, vma.flags() - locked);
}

/// Moves all of a VMA to a place between its neighbors: the index keeps its node where it is. The
/// locks are those of any other move. `None` if that takes more than one piece: between two of
/// them, a walker would look at only one of the places.
fn slide<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    between: &Between<'op>,
    destination: &Destination<'_>,
) -> Option<Result<VirtAddr, NoMemory>> {
    let (vma, target) = (between.vma, destination.range);
    let source = vma.range();
    let locked = vma.lock_write(op.platform());
    let freeable = freeable_between::<P::Arch>(source, between.free.clone(), target);
    let end = End { range: source, freeable };
    let mut counts = Counts::default();
    let platform = op.platform();
    let mut mover = op.edit.mover(end, target.start(), &mut call.supplies.tables, &mut counts);
    if !mover.is_one_piece() {
        return None;
    }
    let held = RmapGuard::new(platform, &locked);
    let done = mover.move_one_piece();
    op.edit.count(&counts);
    if done.is_err() {
        return Some(Err(NoMemory));
    }
    op.vmas.slide_held(
        (between, &locked),
        target,
        (destination.purpose.flags, destination.page_offset),
        &held,
    );
    drop(held);
    drop(locked);
    if between.free.start == target.start().0 || between.free.end == target.end().0 {
        op.vmas.merge_around(vma);
    }
    Some(Ok(target.start()))
}

/// Takes `source` out of its VMA, whose trees are locked.
fn cut_away<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    vma: VmaWriteGuard<'op, P>,
    source: VirtRange,
    upper: Option<NewVma<'op, 'm, P>>,
    held: &RmapGuard<'_, P>,
) {
    let outer = vma.range();
    let below = outer.start() < source.start();
    if source.covers(outer) {
        op.vmas.remove_held(vma, held);
    } else if below {
        op.vmas.resize_held(&vma, outer.start().0, source.start().0, held);
    } else {
        op.vmas.resize_held(&vma, source.end().0, outer.end().0, held);
    }
    // If the target was all of the VMA before the source, the VMA itself is the part above.
    if let Some(upper) = upper.filter(|_| below && source.end() < outer.end()) {
        debug_assert_eq!(upper.end(), outer.end().0);
        op.vmas.insert_held(upper, held);
    }
}
