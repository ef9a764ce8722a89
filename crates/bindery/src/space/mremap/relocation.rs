//! Moves a part of one VMA to a place of its own.

use core::ops::Range;
use core::ptr::NonNull;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::collections::range_skip_list::Spot;
use crate::error::{Failure, NoMemory};
use crate::platform::Platform;
use crate::rmap::RmapGuard;
use crate::space::{AddressSpace, MmapLocked};
use crate::stats::Counts;
use crate::table::move_range::{LockSpans, Move};
use crate::vma::{MappingFlags, Purpose, Vma, VmaWriteGuard};

use super::RemapCall;

/// What becomes of the source of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SourceFate {
    /// It is unmapped.
    Goes,
    /// It stays mapped, empty (`MREMAP_DONTUNMAP`).
    Stays,
}

/// A move of `source`, a part of one VMA, to the beginning of `target`, which becomes one VMA. An
/// empty source is a duplicate: a second view of what a shared mapping shows.
pub(super) struct Relocation {
    pub(super) source: VirtRange,
    pub(super) target: VirtRange,
    pub(super) fate: SourceFate,
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// A free range of `length` bytes, congruent with `source` modulo the largest entry span that
    /// fits into it twice (so that at least one slot is covered whole), else modulo the
    /// contiguous run.
    pub(super) fn congruent_place(
        &self,
        mm: &MmapLocked,
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
            .find_map(|align| self.find_free(mm, length, align, start & (align - 1)))
    }

    /// Moves what the source, a part of `vma`, maps. Nothing is mapped in the target. Everything
    /// that can fail is done before anything is moved.
    pub(super) fn relocate(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        what: &Relocation,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let (source, target) = (what.source, what.target);
        let stays = what.fate == SourceFate::Stays || source.is_empty();
        let committed = match what.fate {
            SourceFate::Stays | SourceFate::Goes if !vma.has(MappingFlags::ACCOUNT) => 0,
            SourceFate::Stays => target.pages(),
            SourceFate::Goes => target.pages() - source.pages(),
        };
        let _reservation = self.page_table.memory.commitment().reserve(committed)?;
        // As Linux: what has no page yet may take a new page offset, and merge where it goes.
        let never_written = vma.is_anonymous() && vma.group_pointer().is_none();
        let page_offset = if never_written {
            target.start().0 >> PAGE_SHIFT
        } else {
            vma.page_offset_of(source.start())
        };
        let purpose = vma.purpose();
        let mut arriving = purpose;
        if source.len() >= P::Arch::PMD.span() {
            // Tables that move whole carry entries along that are not looked at, and all that moves
            // counts as written.
            arriving.flags |= MappingFlags::SOFT_DIRTY;
        }
        let locked = MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
        if purpose.flags & locked == MappingFlags::LOCKED && target.len() > source.len() {
            call.grown = Some(VirtRange::raw(target.start().0 + source.len(), target.end().0));
        }
        if !stays && purpose.userfault.is_none() && source.covers(vma.range()) {
            let spot = self.vmas.spot(NonNull::from(vma));
            let Range { start: floor, end: ceiling } =
                self.vmas.between_neighbors(&spot, NonNull::from(vma));
            if floor <= target.start().0 && target.end().0 <= ceiling {
                let flags = arriving.flags;
                let slide = Slide { spot: &spot, floor, ceiling, flags, page_offset };
                if let Some(slid) = self.slide(mm, vma, what, &slide, call) {
                    return Ok(slid?);
                }
            }
        }
        if purpose.userfault.is_some() {
            return self.relocate_served(mm, vma, what, arriving, page_offset, call);
        }
        self.relocate_apart(mm, vma, what, arriving, page_offset, call)
    }

    /// As [`AddressSpace::relocate`], of memory that a userfaultfd serves: it follows, if it is
    /// told of moves.
    #[cold]
    fn relocate_served(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        what: &Relocation,
        mut arriving: Purpose,
        page_offset: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let (to, goes) = (what.target.start(), what.fate == SourceFate::Goes);
        let (notices, follows) = match call.supplies.told.take() {
            Some(told) => told,
            None => self.tell_of_move(vma, what.source, to, goes)?,
        };
        // A second view of shared memory is served by nobody.
        if !follows || what.source.is_empty() {
            arriving.flags -= MappingFlags::USERFAULT;
            arriving.userfault = None;
        }
        let done = self.relocate_apart(mm, vma, what, arriving, page_offset, call);
        if done.is_ok() && arriving.userfault.is_none() {
            self.strip_moved(mm, VirtRange::from_len(to, what.source.len()));
        }
        match done {
            Ok(_) => call.removed.notices.append(notices),
            Err(_) => notices.cancel(self.page_table.memory),
        }
        done
    }

    /// Lifts what a userfaultfd had protected in what has moved and is served by nobody.
    fn strip_moved(&self, mm: &MmapLocked, moved: Option<VirtRange>) {
        let Some(moved) = moved.filter(|moved| !moved.is_empty()) else { return };
        if let Some(vma) = self.vma_at(mm, moved.start()) {
            let locked = vma.lock_write(self.platform());
            // What cannot be lifted now is lifted by the first write.
            let _ = self.strip_userfault(moved);
            drop(locked);
        }
    }

    /// Moves the source into a VMA of its own.
    fn relocate_apart(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        what: &Relocation,
        arriving: Purpose,
        page_offset: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let (source, target) = (what.source, what.target);
        let stays = what.fate == SourceFate::Stays || source.is_empty();
        let purpose = vma.purpose();
        let locked = MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
        let reserved = call.supplies.moved.take().map_or_else(|| self.reserve_vma(), Ok)?;
        let moved = self.vma_in(reserved, target, arriving, page_offset);
        // Cut out of the middle, the VMA leaves two parts.
        let upper = if !stays && vma.start() < source.start().0 && source.end().0 < vma.end() {
            let range = VirtRange::raw(source.end().0, vma.end());
            let offset = vma.page_offset_of(source.end());
            match call.supplies.upper.take().map_or_else(|| self.reserve_vma(), Ok) {
                Ok(reserved) => Some(self.vma_in(reserved, range, purpose, offset)),
                Err(error) => return Err(self.give_back([Some(moved), None], error.into())),
            }
        } else {
            None
        };
        if source.is_empty() {
            self.insert(mm, moved);
            self.merge_around(mm, self.vma(moved), call.removed);
            return Ok(target.start());
        }
        // From here on faults in the source wait, and find themselves outside of the VMA
        // afterwards.
        let vma = vma.lock_write(self.platform());
        let to = target.start();
        let whole = source.covers(vma.range());
        let Ok(left) = self.move_held(mm, vma, what, &Nodes { moved, upper }, call) else {
            return Err(self.give_back([Some(moved), upper], Failure::NoMemory));
        };
        if stays && let Some(vma) = &left {
            if whole {
                // Its next page begins a life of its own.
                self.leave_group(mm, vma, call.removed);
            }
            self.change_flags(mm, vma, vma.flags() - locked);
        }
        drop(left);
        // As Linux: what stays is not joined with its neighbors, though it may fit them now.
        self.merge_around(mm, self.vma(moved), call.removed);
        Ok(to)
    }

    /// The move itself; nothing has changed where it fails. The trees of the reverse map are locked
    /// for each piece, and name both places meanwhile, so that a walker finds each page at its old
    /// or at its new one. Returns the VMA, if the move leaves something of it.
    fn move_held<'v>(
        &self,
        mm: &MmapLocked,
        vma: VmaWriteGuard<'v, P>,
        what: &Relocation,
        nodes: &Nodes,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<Option<VmaWriteGuard<'v, P>>, NoMemory> {
        let (source, target) = (what.source, what.target);
        let stays = what.fate == SourceFate::Stays;
        let freeable = if stays { source } else { self.freeable(mm, source, target) };
        let mut counts = Counts::default();
        let moved = Move { source, to: target.start(), freeable };
        let first = match self.page_table.lock_spans(&moved, &mut counts) {
            LockSpans::One(piece) => {
                let held = RmapGuard::new(self.platform(), vma.vma());
                let done = self.page_table.move_one_piece(
                    &moved,
                    piece,
                    &mut call.supplies.tables,
                    call.gather,
                    &mut counts,
                );
                self.page_table.stats.add(&counts);
                if done.is_err() {
                    drop(held);
                    drop(vma);
                    return Err(NoMemory);
                }
                let left = if stays {
                    Some(vma)
                } else {
                    self.cut_away(mm, vma, source, nodes.upper, &held, call)
                };
                self.insert_held(mm, nodes.moved, &held);
                return Ok(left);
            }
            LockSpans::Several(first) => first,
        };
        if let Err(error) =
            self.page_table.lay(&moved, first, &mut call.supplies.tables, &mut counts)
        {
            self.page_table.stats.add(&counts);
            return Err(error);
        }
        // Before the first page comes: a walker that does not find it at the source comes here.
        self.link(mm, nodes.moved);
        let within = |work: &mut dyn FnMut()| {
            let held = RmapGuard::new(self.platform(), &vma);
            work();
            held.moved(self.vma(nodes.moved));
        };
        self.page_table.move_in_pieces(&moved, first, call.gather, &mut counts, within);
        let left = if stays {
            Some(vma)
        } else {
            let held = RmapGuard::new(self.platform(), vma.vma());
            self.cut_away(mm, vma, source, nodes.upper, &held, call)
        };
        self.insert_linked(mm, nodes.moved);
        self.page_table.stats.add(&counts);
        Ok(left)
    }

    /// Moves all of a VMA to where it passes none of its neighbors: the index keeps its node where
    /// it is. The locks are those of any other move. `None` if that takes more than one piece:
    /// between two of them, a walker would look at one of the places alone.
    fn slide(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        what: &Relocation,
        slide: &Slide<'_>,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Option<Result<VirtAddr, NoMemory>> {
        let (source, target) = (what.source, what.target);
        let locked = vma.lock_write(self.platform());
        let freeable = Self::freeable_between(source, slide.floor, slide.ceiling, target);
        let what = Move { source, to: target.start(), freeable };
        let mut counts = Counts::default();
        let LockSpans::One(piece) = self.page_table.lock_spans(&what, &mut counts) else {
            return None;
        };
        let held = RmapGuard::new(self.platform(), vma);
        let done = self.page_table.move_one_piece(
            &what,
            piece,
            &mut call.supplies.tables,
            call.gather,
            &mut counts,
        );
        self.page_table.stats.add(&counts);
        if done.is_err() {
            return Some(Err(NoMemory));
        }
        held.set_place(target, slide.page_offset);
        vma.set_flags(slide.flags);
        self.vmas.bounds_changed_at(slide.spot, NonNull::from(vma));
        drop(held);
        if target.len() > source.len() {
            self.account(mm, slide.flags, (target.pages() - source.pages()) as i64);
        }
        drop(locked);
        if slide.floor == target.start().0 || slide.ceiling == target.end().0 {
            self.merge_around(mm, vma, call.removed);
        }
        Some(Ok(target.start()))
    }

    /// Takes `source` out of its VMA. Returns the VMA, if something is left of it.
    fn cut_away<'v>(
        &self,
        mm: &MmapLocked,
        vma: VmaWriteGuard<'v, P>,
        source: VirtRange,
        upper: Option<NonNull<Vma>>,
        held: &RmapGuard<'_, P>,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Option<VmaWriteGuard<'v, P>> {
        let outer = vma.range();
        let left = if source.covers(outer) {
            self.remove_held(mm, vma, held, call.removed);
            None
        } else if outer.start() < source.start() {
            self.resize_held(mm, &vma, outer.start().0, source.start().0, held);
            Some(vma)
        } else {
            self.resize_held(mm, &vma, source.end().0, outer.end().0, held);
            Some(vma)
        };
        match upper {
            // Not where the target was all before the source: then the VMA itself is what
            // is left above.
            Some(upper) if outer.start() < source.start() && source.end() < outer.end() => {
                debug_assert_eq!(self.vma(upper).end(), outer.end().0);
                self.insert_held(mm, upper, held);
            }
            Some(upper) => self.free_unused(upper),
            None => {}
        }
        left
    }
}

/// A move of a whole VMA between its neighbors.
struct Slide<'a> {
    /// The VMA's spot in the index, before and after.
    spot: &'a Spot<Vma>,
    /// Where the neighbor below ends and the one above begins.
    floor: u64,
    ceiling: u64,
    /// What the VMA's flags and offset are to be.
    flags: MappingFlags,
    page_offset: u64,
}

/// The new VMAs of a move.
struct Nodes {
    moved: NonNull<Vma>,
    /// What is left above the source, where it is cut out of the middle.
    upper: Option<NonNull<Vma>>,
}
