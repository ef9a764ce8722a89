//! Contracts chains of dead anon groups that forks leave behind.
//!
//! A daemon that repeatedly forks and exits leaves a chain of dead groups, one for each generation
//! and VMA, because folios may still name each of these groups. So a `fork` first examines the
//! groups above each group `g` of the parent. If at least [`LONGEST`] of them are *dead and unary*
//! (no VMA, one child, not the root), it transfers those of their folios that the VMAs of `g` map.
//! The new owners are groups that are not dead and unary:
//!
//! ```text
//! before   root -- dead 1 -- dead 2 -- p -- dead 3 -- g      p, g: living, or with several children
//! after    root ---------------------- p ------------ g
//!          what belonged to 1 and 2 belongs to p, what belonged to 3 to g
//! ```
//!
//! 1. *Mark.* Under the family lock each dead group gets the family's clock as its *stamp*, and as
//!    its *new parent* the first group below that is not dead and unary.
//! 2. *Survey.* Each folio in `g`'s VMAs that belongs to a dead group gets that group's new parent
//!    as its owner. The folio's index does not change, because the whole family uses the same
//!    offsets. If no folio was locked, and no folio that the survey did not see may count as
//!    mapped, the stamp of `g` becomes the time of step 1: *no page in these VMAs belongs to a
//!    group that was found dead up to then*. A child inherits the stamp, because it maps what its
//!    parent maps.
//! 3. *Detach.* Under the family lock, a dead group is removed if every group below it that has
//!    VMAs has its stamp or a later one. A group that a walker holds is not removed.
//! 4. *Free*, after a grace period ([`crate::deferred`]).
//!
//! So if each parent exits only after its child has forked, the children that inherit the stamp
//! free the groups as soon as the older generations have exited.
//!
//! # Why a folio may change its owner
//! A page of a dead and unary group is mapped only below the group's only child, and thus below its
//! new parent, so walks from either group visit the same VMAs. This does not change, because the
//! group gets no further VMA and no second child.
//!
//! # Why no folio is missed
//! `fork` holds the mutex of the address space and its VMAs for writing, so no fault, fork or move
//! runs there. Only these pages may count as mapped although no table maps them:
//! - *A VMA that is being removed.* Such a VMA holds its group until its pages are counted down. So
//!   a group with more VMA holders than listed VMAs gets no stamp, and a group with such holders
//!   but no listed VMA counts as a group with VMAs.
//! - *A part of a VMA, or its contents.* The pages are counted down before the mutex is released.
//! - *Private copies of an object's pages*, which a truncation drops without the mutex. The
//!   truncation shares the lock of the object's tree with other walkers until the copies are
//!   counted down, and the survey takes that lock exclusively whenever it locks tables. The survey
//!   has seen every page that a truncation drops afterwards.
//!
//! After the survey, no page of a dead group enters the VMAs. New pages and claimed pages belong to
//! the VMAs' own group. No survey makes a dead group an owner again, because a family has only one
//! survey at a time. With two:
//! 1. CPU A surveys and has decided to assign a folio to `p`, which is not dead.
//! 2. `p` becomes dead; CPU B finds it dead, surveys, and skips the folio, which does not belong to
//!    `p` yet.
//! 3. CPU A assigns the folio to `p`; CPU B, whose VMAs also map the folio, has `p` freed.
//!
//! For the same reason, the survey may read an owner without the folio's lock. Any other change of
//! the owner requires locking all tables that map the folio, and the survey has locked one of these
//! tables.
//!
//! # Why the groups are not freed at once
//! A walker may have found a group in a read section, before the folio changed its owner.
//!
//! # The bound
//! A fork looks for dead groups when [`LONGEST`] groups with children have died in the family since
//! the stamp. The survey fails only if another thread has one of the folios locked. So a chain in
//! which each generation lives as long as `k` later ones has about `k` + 3 [`LONGEST`] groups for a
//! VMA. A process that continues to run without forking keeps the dead groups that were above it at
//! its own fork and those above it that died later, but no group created afterwards. In a large
//! family, a search for all groups that could be freed may cost more than it gains, so the search
//! visits at most [`BELOW`] groups for each dead group. The number of dead groups with several
//! children is less than that of childless groups, as in every tree.
//!
//! # Why groups are not shared instead
//! Linux lets a child use a dead ancestor's `anon_vma` for its own pages. In a tree, the child
//! would have to use its living parent's group, and a walk for a page of one VMA would visit the
//! VMAs of all. A chain that ends in a parent with 50 children would visit 51 VMAs for a page that
//! only one of them can map. A contracted group has only pages of its own VMAs.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::ops::ControlFlow;
use core::ptr;

use crate::Memory;
use crate::deferred::Chain;
use crate::folio::{FolioOwner, Owner};
use crate::platform::Platform;
use crate::table::PageTable;
use crate::table::look;
use crate::table::look::{MappedRun, Stretch};
use crate::vma::Vma;

use super::anon_group::AnonGroup;
use crate::collections::interval_tree::Asked;

/// The minimum number of dead unary anon groups that are worth a survey.
const LONGEST: u32 = 4;
/// The maximum number of anon groups below a dead one that are visited.
const BELOW: u32 = 16;

/// Whether there may be enough dead anon groups above that of `vma`. Takes no lock, because a wrong
/// answer costs only a missed or useless attempt. The caller holds the mutex of the VMA's address
/// space.
#[inline]
pub(crate) fn may_contract(vma: &Vma) -> bool {
    vma.group().is_some_and(|group| {
        group.is_inherited() && group.now().saturating_sub(group.stamp()) >= u64::from(LONGEST)
    })
}

/// Takes over the folios of dead anon groups above the group of `vma`, if `vma` is the first VMA of
/// its group and there are enough dead groups. Removes the dead groups that have no folio left. The
/// next fork retries if a folio was locked. Allocates no memory.
///
/// # Safety
/// 1. The caller holds the mutex of the VMA's address space and locks all its VMAs for writing.
pub(crate) unsafe fn contract<P: Platform>(
    page_table: &PageTable<'_, P>,
    vma: &Vma,
) -> Option<Chain<AnonGroup>> {
    let group = vma.group().filter(|_| may_contract(vma))?;
    let (memory, lock) = (page_table.memory, group.family_lock());
    // SAFETY: 1. the lock is held.
    let look = lock.with_write(memory.platform(), || unsafe { look(group, vma) })?;
    // SAFETY: 1. only VMAs of this address space are in the tree, and its mutex is held (obligation
    // 1).
    let vmas = unsafe { group.vmas.locked() };
    let complete = vmas.iter(Asked::ALL).fold(true, |complete, vma| {
        // SAFETY: 1. `look` has begun the survey, which ends below.
        complete & unsafe { take_over(memory, page_table, vma) }
    });
    lock.with_write(memory.platform(), || {
        group.end_survey();
        let listed = vmas.iter(Asked::ALL).count() as u32;
        // SAFETY: 1. the lock is held.
        if !complete || unsafe { group.active_vmas() } != listed {
            return None;
        }
        group.set_stamp(look.now);
        // SAFETY: 1. the lock is held.
        unsafe { detach_above(group, BELOW * look.dead) }
    })
}

/// The state of the groups above a group.
struct Look {
    /// The clock at the time of this look.
    now: u64,
    /// The number of dead unary anon groups.
    dead: u32,
}

/// Finds the dead anon groups above `group`, and sets their new parents. `None` if there are too
/// few for a survey, another survey runs, or the caller's VMA is not the first of its anon group.
///
/// # Safety
/// 1. The caller holds the family lock exclusively.
unsafe fn look(group: &AnonGroup, vma: &Vma) -> Option<Look> {
    // SAFETY: 1. the caller's obligation 1.
    if !unsafe { group.is_first(vma) } {
        return None;
    }
    // SAFETY: 1. the caller's obligation 1.
    let above = || unsafe { ancestors(group) };
    let dead = above().filter(|above| above.is_dead()).count() as u32;
    if dead == 0 {
        // No group above has pages that could be in the VMAs.
        group.set_stamp(group.now());
    }
    if dead < LONGEST || !group.begin_survey() {
        return None;
    }
    let now = group.tick();
    let mut new_parent = group;
    for above in above() {
        if above.is_dead() {
            above.reparent(new_parent, now);
        } else {
            new_parent = above;
        }
    }
    Some(Look { now, dead })
}

/// The anon groups above, starting with the parent.
///
/// # Safety
/// 1. The caller holds the family lock while the iterator or an item is in use.
unsafe fn ancestors(group: &AnonGroup) -> impl Iterator<Item = &AnonGroup> {
    // SAFETY: 1. of both: the caller's obligation 1.
    unsafe { core::iter::successors(group.parent(), |above| above.parent()) }
}

/// Assigns the folios that the VMA maps and that belong to dead anon groups to the groups' new
/// parents. Returns whether it could lock all these folios.
///
/// # Safety
/// 1. The VMA's anon group has claimed the survey of its family.
unsafe fn take_over<P: Platform>(
    memory: &Memory<P>,
    page_table: &PageTable<'_, P>,
    vma: &Vma,
) -> bool {
    let frames = &memory.frames;
    let complete = Cell::new(true);
    // Locked for each span of table locks, so that no other thread waits for the whole mapping.
    let within = |work: &mut dyn FnMut()| match vma.object() {
        Some(object) => object.mapping_lock.with_write(memory.platform(), work),
        None => work(),
    };
    look::survey_within(page_table, vma.range(), within, |stretch: &Stretch<_>| {
        let MappedRun::Pages { folio: Some(folio), .. } = stretch.what else { return };
        // Read without the folio's lock (see "Why no folio is missed"), so a folio whose owner does
        // not change cannot delay the contraction while a walker holds its lock.
        let FolioOwner { owner, first } = frames.folio(folio).owner();
        let Owner::Group(owner) = owner else { return };
        let owner = owner.cast::<AnonGroup>();
        // SAFETY: the folio is mapped, so its owner is the VMA's anon group or a group above. These
        // groups remain alive: the VMA's group holds them, and no other survey, which could
        // contract them, runs in the family (obligation 1).
        let owner = unsafe { owner.as_ref() };
        // SAFETY: 1. this survey's VMA is below the owner.
        let Some(new_parent) = (unsafe { owner.new_parent() }) else { return };
        // SAFETY: 1. the mapping that the survey has found; the survey has locked its table.
        match unsafe { frames.folio(folio).try_lock() } {
            Some(lock) => lock.set_owner(AnonGroup::as_owner(Some(new_parent)), first),
            None => complete.set(false),
        }
    });
    complete.get()
}

/// Removes from the tree each dead anon group above `group` whose pages no group below still maps.
/// Stops after visiting `left` groups below.
///
/// # Safety
/// 1. The caller holds the family lock exclusively.
unsafe fn detach_above(group: &AnonGroup, mut left: u32) -> Option<Chain<AnonGroup>> {
    let mut retired = Chain::default();
    // The time up to which all VMAs below the next anon group are clear of pages of dead groups.
    // SAFETY: 1. the caller's obligation 1.
    let mut clear = unsafe { clear_below(group, &mut left) };
    let mut at = group;
    while let Some(since) = clear
        // SAFETY: 1. the caller's obligation 1.
        && let Some(above) = unsafe { at.parent() }.filter(|above| above.is_inherited())
    {
        let known = above.has_new_parent();
        // SAFETY: 1. the caller's obligation 1.
        if known && above.stamp() <= since && unsafe { above.detach(at, &mut retired) } {
            continue;
        }
        if !known {
            // SAFETY: 1. of both: the caller's obligation 1.
            let (children, alone) = unsafe { (above.children(), clear_alone(above)) };
            clear = children.filter(|child| !ptr::eq(*child, at)).try_fold(
                alone.min(since),
                |clear, child| {
                    // SAFETY: 1. the caller's obligation 1.
                    Some(clear.min(unsafe { clear_below(child, &mut left) }?))
                },
            );
        }
        at = above;
    }
    (!retired.is_empty()).then_some(retired)
}

/// The time up to which all VMAs of the anon group and of the groups below are clear of pages of
/// dead groups. `None` after `left` groups.
///
/// # Safety
/// 1. The caller holds the family lock.
unsafe fn clear_below(group: &AnonGroup, left: &mut u32) -> Option<u64> {
    let mut clear = u64::MAX;
    let each = |below: &AnonGroup| {
        // SAFETY: 1. the caller's obligation 1.
        clear = clear.min(unsafe { clear_alone(below) });
        *left = left.saturating_sub(1);
        if *left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    // SAFETY: 1. the caller's obligation 1.
    let seen = unsafe { group.try_for_each_below(each) };
    seen.is_continue().then_some(clear)
}

/// Like [`clear_below`], but only for the anon group itself.
///
/// # Safety
/// 1. The caller holds the family lock.
unsafe fn clear_alone(group: &AnonGroup) -> u64 {
    // SAFETY: 1. the caller's obligation 1.
    let is_clear = || group.has_new_parent() || unsafe { group.active_vmas() } == 0;
    if is_clear() { u64::MAX } else { group.stamp() }
}
