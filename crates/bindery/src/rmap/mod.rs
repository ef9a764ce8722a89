//! The reverse map: from a folio to the entries that map it.
//!
//! It goes *by index*. A folio knows whom it belongs to, an object or a group of anonymous memory,
//! and the index of its first page there; the owner knows its VMAs; a VMA knows at which address an
//! index stands. So a move of entries or whole tables writes nothing into any folio, since the
//! VMA takes its offset along, and a fork writes nothing but the VMAs' own records. (By structure,
//! with tables that know their parents, an entry-wise move would have to write to each folio.)
//!
//! ```text
//! folio: owner, index 7 --> group A --> VMA offset 0..16 at 0x10000 --> 0x17000
//!                              |----- > VMA offset 4..8  at 0x90000 (moved) --> not there any more
//!                              '- child group B (after fork) --> VMA offset 0..16 --> 0x17000
//! ```
//!
//! Anonymous memory is grouped as Linux does it (`anon_vma`): a VMA gets a group with its first
//! page, and neighbours that could be one VMA share it. The groups of a family of processes form a
//! *tree*: `fork` gives each VMA of the child a group of its own below that of the parent's. A page
//! that was there before the fork belongs to the parent's group and may be mapped by any group
//! below it; a page that came later belongs to the child's own. Linux links each VMA with all
//! groups above it instead, so its fork takes one more allocation for each generation; the folios
//! that a walk has to look at are the same.
//!
//! A walk from a group visits the VMAs of the group and of those below: each of them can map the
//! group's pages, but for the parts of a VMA that was split, which share one group. Dead groups,
//! which a chain of forks leaves behind, are contracted; [`chain`] says how and what bounds their
//! number.
//!
//! # Locks
//! The list of an object has a lock, and a family of groups has one, in its root. Whoever changes
//! which entries a VMA in the list is responsible for (its bounds, its offset, a move of its
//! tables) holds them ([`Held`]), so a walker with the lock misses nothing:
//! 1. CPU A walks: looks for the page at the destination, nothing there yet;
//! 2. CPU B moves the entry from the source to the destination;
//! 3. CPU A looks at the source: nothing there any more, and takes the page for unmapped.
//!
//! Two verbs change entries without the lists' locks, and keep to an order instead. `fork` copies
//! entries into VMAs that stand behind their parents in the list of the object ([`list::VmaList`]), and in
//! groups that a walk reaches behind the parents' own: a walker that has passed the parent before
//! the copy meets the child after it. Whoever takes entries away does so while their VMA is in the
//! lists, and flushes before it releases the tables' locks, or leaves a mark ([`crate::tlb`]). So a
//! walker that finds nothing, in a table that is not pending, may rely on it: no TLB has it either.
//!
//! A walker that finds fewer entries than the folio has mappings takes the folio for *busy*, never
//! for unmapped. A verb may have detached a table and not counted down yet, or have counted up and
//! not yet written its entries.
//!
//! Order: the address space's mutex, the VMA's lock, the folio's lock, the object's list, the family
//! of groups, table locks.

mod chain;
mod group;
mod list;
mod walk;

use core::ptr::NonNull;

use crate::platform::Platform;
use crate::space::vma::Vma;

pub(crate) use chain::{contract, may_contract};
pub(crate) use group::{AnonGroup, Groups, Retired};
pub(crate) use list::{ListLinks, ObjectList};
pub(crate) use walk::for_each_sight;
#[cfg(any(test, feature = "testing"))]
pub(crate) use walk::{Walked, for_each_anonymous_sight};

/// The locks of all lists in which a VMA stands, held until the guard is dropped.
pub(crate) struct Held<'a> {
    vma: &'a Vma,
    group: Option<NonNull<AnonGroup>>,
}

impl<'a> Held<'a> {
    /// Waits for the locks.
    pub(crate) fn new<P: Platform>(platform: &P, vma: &'a Vma) -> Self {
        if let Some(object) = vma.object() {
            object.mappers_gate.write(platform);
        }
        let group = vma.group_pointer();
        if let Some(group) = vma.group() {
            group.family_gate().write(platform);
        }
        Self { vma, group }
    }

    /// Adds a VMA of the same object and group to the lists.
    pub(crate) fn add(&self, other: &Vma) {
        debug_assert_eq!(other.object_pointer(), self.vma.object_pointer());
        debug_assert_eq!(other.group_pointer(), self.group);
        if let Some(object) = other.object() {
            object.mappers.add(other);
        }
        if let Some(group) = other.group() {
            group.vmas.add(other);
        }
    }

    /// Takes the VMA out of the lists.
    pub(crate) fn take(&self) {
        if let Some(object) = self.vma.object() {
            object.mappers.take(self.vma);
        }
        if let Some(group) = self.vma.group() {
            group.vmas.take(self.vma);
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        debug_assert_eq!(self.group, self.vma.group_pointer(), "a group changed under its lock");
        if let Some(group) = self.vma.group() {
            group.family_gate().end_write();
        }
        if let Some(object) = self.vma.object() {
            object.mappers_gate.end_write();
        }
    }
}

/// Puts a VMA into the lists of its object and its group. It is in none yet.
pub(crate) fn link<P: Platform>(platform: &P, vma: &Vma) {
    Held::new(platform, vma).add(vma);
}

/// Takes a VMA out of the lists. It keeps what it holds of them until it is freed.
pub(crate) fn unlink<P: Platform>(platform: &P, vma: &Vma) {
    Held::new(platform, vma).take();
}
