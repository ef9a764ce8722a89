//! Chains of forks: dead groups are contracted.
//!
//! A daemon that forks and exits, over and over, leaves a chain of dead groups, one for each
//! generation and VMA: folios may still name each of them. So a `fork` first looks above each group
//! of the parent. Where at least [`LONGEST`] groups stand in a row that are *dead and unary* (no
//! VMA, one child, not the root), it contracts them into the group:
//!
//! ```text
//! before   root -- dead -- dead -- dead -- dead -- g        pages of all six in g's VMAs
//! after    root ---------------------------------- g        pages of root and g
//! ```
//!
//! 1. *Re-own.* The VMAs of the group are surveyed, and each folio there that belongs to one of the
//!    dead groups gets this one for its owner. Its index stays: offsets are the family's.
//! 2. *Detach.* Under the family's gate the group takes the place of the topmost dead one. A dead
//!    group that a walker holds stays, and so do those above it.
//! 3. *Free*, when the address space ends ([`Retired`]): see below.
//!
//! # Why no folio is missed
//! A page of a dead group is mapped in VMAs below that group, and all of these are VMAs of `g`:
//! each dead group has one child, and `g` has none. `g`'s VMAs are those of one address space,
//! whose mutex `fork` holds, and it holds them for writing. So no fault, no fork and no move runs in
//! them. Where `g` has children, they may map what `g` does not map any more, and nothing is done;
//! they contract, as soon as `g` is dead too.
//!
//! # Why the groups are not freed at once
//! 1. CPU A unmaps a part of a VMA: the tables are detached, the mutex is free, the folios are still
//!    counted as mapped.
//! 2. CPU B forks. The survey does not see those folios, and the dead group is contracted.
//! 3. CPU C has found one of the folios on a list: it is mapped, and names the dead group.
//!
//! CPU A's operation borrows the address space, so it is over when that ends; the grace period then
//! ends C's read section.
//!
//! # The bound
//! A group without children has fewer than [`LONGEST`] dead unary groups right above it after a
//! fork of its VMAs, if nobody had a folio locked. So where each generation forks after its parent's
//! exit, a family has at most [`LONGEST`] + 3 groups for each living VMA (root, dead ones, the
//! parent's, the child's), and at most [`LONGEST`] + 1 wait for the parent's end. Dead groups with
//! several children are fewer than the groups without any, as in every tree.
//!
//! It does not hold where each parent exits only after its child has forked: a living group then
//! stands between the one that forks and the dead ones, at each fork. To contract those, the fork
//! would have to survey VMAs of other address spaces, and to know that none of these has folios
//! detached and not yet counted down.
//!
//! # Why groups are not shared instead
//! Linux lets a child take a dead ancestor's `anon_vma` for its own pages. With a tree it would have
//! to take its living parent's: then the pages of one are looked for in the VMAs of all. A chain
//! that ends in a parent with 50 children would visit 51 VMAs for a page that one can map. A
//! contracted group has pages of its own VMAs alone.

use core::cell::Cell;
use core::ptr::{self, NonNull};

use crate::Memory;
use crate::frame::Owner;
use crate::platform::Platform;
use crate::space::vma::Vma;
use crate::table::PageTable;
use crate::table::look::{Standing, Stretch};

use super::group::{AnonGroup, Retired};

/// So many dead unary groups in a row are contracted.
const LONGEST: u32 = 4;

/// Whether there may be enough dead groups above that of `vma`. Takes no lock: a wrong answer costs no
/// more than a contraction that is not tried, or not done. The caller holds the mutex of the VMA's
/// address space.
#[inline]
pub(crate) fn may_contract(vma: &Vma) -> bool {
    // The root is above the dead ones, so it is not counted among them.
    let deep = |group: &&AnonGroup| group.depth() > LONGEST;
    vma.group().filter(deep).and_then(AnonGroup::parent).is_some_and(|above| above.vmas.is_empty())
}

/// Contracts the dead groups above that of `vma`, if `vma` is the first of its group, there are
/// enough of them, and the group has no children. Nothing where a folio's lock is taken: the next
/// fork tries again. Allocates nothing.
///
/// The caller holds the mutex of the VMA's address space and all its VMAs for writing.
pub(crate) fn contract<P: Platform>(table: &PageTable<'_, P>, vma: &Vma) -> Option<Retired> {
    let group = vma.group().filter(|_| may_contract(vma))?;
    let memory = table.memory;
    let count =
        group.family_gate().together(&memory.platform, || dead_above(group, group.is_first(vma)));
    if count < LONGEST {
        return None;
    }
    // The list is this address space's, and its mutex is held; the dead groups stay, since their
    // one child does.
    for vma in group.vmas.iter() {
        if !reown(memory, table, vma, group, count) {
            return None;
        }
    }
    group.detach_above(&memory.platform, count)
}

/// How many dead unary groups stand in a row right above the group; the root is not one. 0 where the
/// group has children, or the caller does not come for its first VMA. The family's gate is held.
fn dead_above(group: &AnonGroup, first: bool) -> u32 {
    if !first || !group.is_childless() {
        return 0;
    }
    let mut count = 0;
    let mut at = group.parent();
    while let Some(above) = at.filter(|above| above.is_inherited() && above.is_dead_and_unary()) {
        count += 1;
        at = above.parent();
    }
    count
}

/// Lets the folios that the VMA maps and that belong to one of the `count` groups above `group`
/// belong to `group`. Says whether it could lock them all.
fn reown<P: Platform>(
    memory: &Memory<P>,
    table: &PageTable<'_, P>,
    vma: &Vma,
    group: &AnonGroup,
    count: u32,
) -> bool {
    let frames = &memory.frames;
    let complete = Cell::new(true);
    table.survey(vma.range(), |stretch: &Stretch| {
        let Standing::Pages { folio: Some(folio), .. } = stretch.what else { return };
        // Read without the folio's lock: an owner is changed by those who have locked all tables
        // that map the folio, and one of these is locked here. So a folio that stays as it is does
        // not put the contraction off because somebody walks to it.
        let (owner, index) = frames.owner(&memory.platform, folio);
        let dead = match owner {
            Owner::Group(owner) => is_above(group, owner.as_ptr(), count),
            Owner::Nobody | Owner::Object(_) => false,
        };
        if !dead || !complete.get() {
            return;
        }
        match frames.try_lock_folio(folio) {
            Some(lock) => lock.set_owner(Owner::Group(NonNull::from(group)), index),
            None => complete.set(false),
        }
    });
    complete.get()
}

/// Whether `owner` is one of the `count` groups above `group`.
fn is_above(group: &AnonGroup, owner: *const AnonGroup, count: u32) -> bool {
    let mut at = group.parent();
    for _ in 0..count {
        let Some(above) = at else { return false };
        if ptr::eq(above, owner) {
            return true;
        }
        at = above.parent();
    }
    false
}
