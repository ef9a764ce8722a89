//! The memory part of `fork(2)`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::error::{Error, Failure, NoMemory};
use crate::interrupt;
use crate::platform::Platform;
use crate::rmap::{AnonGroup, Groups};
use crate::table::copy::{Copied, ForkCopy};
use crate::table::edit::Edit;
use crate::userfault::Notices;
use crate::vma::{Holds, MappingFlags, Purpose, Vma};
use crate::vmas::VmaSet;

use super::swap_off::swap_in_full_slots;
use crate::space::AddressSpace;
use crate::space::op::Op;
use crate::space::userfault::events;
use crate::space::userfault::pending_events::PendingEvents;

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Copies the address space: the child has the same mappings with the same contents. Private
    /// pages are shared until either side writes, but the child gets copies of pinned pages. Shared
    /// mappings stay shared. The child has no locked memory, no `MADV_DONTFORK` mappings, and empty
    /// `MADV_WIPEONFORK` mappings.
    ///
    /// No entries are copied for a mapping that never had a private page or a guard, unless it shows
    /// frames of a [`crate::FrameSource`]. The child's faults in such a mapping map the same pages
    /// as the parent's.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings, and in the number of runs
    /// in mappings with private pages or of frames; one write to a folio's counts per run, one
    /// invalidation per 64 tables.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Overcommitted`], and [`Error::Interrupted`] if a fatal
    /// signal was pending before the end. An error changes nothing, except that the parent's next
    /// writes may fault once more. (Linux also checks for signals at each mapping. Its check before
    /// the copy, at which any signal restarts the call, is the embedder's task.)
    /// [`Error::LimitReached`] if 32,768 entries already refer to the slot of a page in swap, and
    /// the page cannot be read.
    pub fn fork(&self) -> Result<Self, Error> {
        self.deliver_after(|notices| fork(self, notices))
    }

    /// As [`AddressSpace::fork`], up to the waits for handlers: the steps of the [`PendingEvents`]
    /// wait until userfaultfds have received those of the child. As on Linux, the child must not
    /// run before. If the events are dropped, the child's faults are served like those of memory
    /// that is not registered.
    ///
    /// The call itself waits for a device only if an entry cannot be copied because 32,768 others
    /// refer to its slot.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::fork`].
    ///
    /// # Errors
    /// As [`AddressSpace::fork`].
    pub fn begin_fork(&self) -> (Result<Self, Error>, PendingEvents<'m, P>) {
        PendingEvents::of(self, |notices| fork(self, notices))
    }
}

fn fork<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    notices: &mut Notices,
) -> Result<AddressSpace<'m, P>, Error> {
    loop {
        match space.page_table.memory.outermost(|| fork_once(space, notices)) {
            // The limit of a slot. Nothing limits the processes that map a page in memory.
            Err(Error::LimitReached) => swap_in_full_slots(space).map_err(|error| {
                let lost = matches!(error, Error::Fault(_));
                if lost { Error::LimitReached } else { error }
            })?,
            result => return result,
        }
    }
}

fn fork_once<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    notices: &mut Notices,
) -> Result<AddressSpace<'m, P>, Failure> {
    let (memory, reach) = (space.page_table.memory, space.page_table.reach);
    let child = AddressSpace::with_limit(memory, space.vmas.bounds(), reach)?;
    child.set_limits(&space.limits());
    child.inherit_settings(space);
    let result = space.operate_untold(notices, |op| {
        child.program_break.copy_from(&space.program_break);
        child.keys.copy_from(&space.keys);
        child.change_vmas(|vmas| {
            ForkCopies { space: &child, vmas, notices: Notices::default() }.copy_all(op)
        })
    });
    // On failure, dropping the child frees its memory.
    result.map(|()| child)
}

/// The child, and the VMA copies made so far.
struct ForkCopies<'c, 'op, 'm, P: Platform> {
    space: &'c AddressSpace<'m, P>,
    vmas: &'c mut VmaSet<'op, 'm, P>,
    /// Messages about the child, sent if the fork succeeds.
    notices: Notices,
}

impl<'m, P: Platform> ForkCopies<'_, '_, 'm, P> {
    /// Copies all VMAs, with their entries, to the child.
    fn copy_all(mut self, op: &mut Op<'_, 'm, P>) -> Result<(), Failure> {
        let Op { space, vmas, edit, .. } = op;
        // All VMAs stay locked until the flush, and one flush covers up to 64 tables. A fault
        // before the flush would find the mark of the pending flush and perform the flush itself.
        let result = vmas.with_all_locked(|vmas| {
            let result = vmas.iter().try_for_each(|vma| {
                interrupt::check(space.platform())?;
                if vma.has(MappingFlags::DONT_FORK) {
                    return Ok(());
                }
                // Linux reserves each mapping separately, which matters for the overcommit
                // heuristic: it refuses a single large request. The child has already been charged
                // for earlier mappings.
                let committed = if vma.has(MappingFlags::ACCOUNT) { vma.pages() } else { 0 };
                self.vmas.commit(committed)?;
                self.copy(edit, vma)
            });
            edit.flush();
            result
        });
        if result.is_ok() {
            op.notices.append(self.notices);
        } else {
            self.notices.cancel(op.memory());
        }
        result
    }

    /// Copies one VMA.
    fn copy(&mut self, edit: &mut Edit<'_, 'm, P>, vma: &Vma) -> Result<(), Failure> {
        let (child, child_vmas) = (self.space, &mut *self.vmas);
        let range = vma.range();
        // First, because a failure of this step leaves nothing to undo.
        let userfault = match vma.userfault_pointer() {
            Some(_) => events::child_userfault(child, vma, &mut self.notices)?,
            None => None,
        };
        let wiped = vma.has(MappingFlags::WIPE_ON_FORK);
        let parent = vma.group().filter(|_| !wiped);
        // Reserved before the anon group is created, because no step after that may fail.
        let reserved = child_vmas.reserve()?;
        let group = match parent {
            None => None,
            Some(parent) => Some(Groups::create(edit.memory, Some(parent)).ok_or(NoMemory)?),
        };
        let flags = vma.flags() - (MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT);
        let unserved = MappingFlags::USERFAULT;
        let flags = if userfault.is_some() { flags } else { flags - unserved };
        let holds = Holds { object: vma.object_pointer(), group, userfault };
        // SAFETY: 1. the parent's VMA holds the object; the group is fresh, and no other thread
        // knows it yet; the message of the userfaultfd, which is sent after the insertion, holds
        // its state.
        let purpose = unsafe { Purpose::holding(flags, holds) };
        let new = child_vmas.new_vma_in(reserved, range, purpose, vma.page_offset());
        // Inserted before any entry is copied, and behind the parent's VMA in the trees of the
        // reverse map (`rmap::walk`).
        let inserted = child_vmas.insert(new);
        let guarded = vma.has(MappingFlags::MAYBE_GUARDS);
        // The write-protection of shared memory is recorded only in its entries, so they are
        // copied.
        let marked = flags.contains(MappingFlags::USERFAULT_WRITE_PROTECT);
        // By now the source may name other frames than those that the parent maps, or none.
        let shown = flags.contains(MappingFlags::FRAMES);
        if wiped || group.is_none() && !guarded && !marked && !shown {
            return Ok(());
        }
        let copied = if vma.is_shared() { Copied::Shared } else { Copied::Private };
        let owner = AnonGroup::as_owner(inserted.group());
        let page_offset = vma.page_offset();
        let what = ForkCopy { range, copied, owner, page_offset, userfault: userfault.is_some() };
        edit.copy_to(&child.page_table, &what)
    }
}
