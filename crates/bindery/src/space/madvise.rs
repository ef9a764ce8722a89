//! `madvise(2)`.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::KeyRights;
use crate::error::{Error, Failure, NoMemory};
use crate::interrupt;
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::table::rewrite::use_bits::UseBits;
use crate::table::zap::Flush;
use crate::table::zap_except::{Exceptions, Protected, Spared};
use crate::tlb::Gather;

use super::advice::{Advice, Call, Change, EntryChange, Loss, VmaChange};
use super::change::Removed;
use super::parts::Parts;
use super::vma::{MappingFlags, Protection, Vma};
use super::{AddressSpace, MmapLocked};

/// Advice to the VMAs of a range, from a thread with `rights` to their protection keys.
#[derive(Clone, Copy)]
struct VmaAdvice {
    change: VmaChange,
    loss: Loss,
    rights: KeyRights,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Applies advice to `length` bytes (rounded up to pages) at `start`.
    ///
    /// Context: may sleep. Complexity: in the mappings and runs of the range; contents are dropped
    /// by whole tables.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::OutOfRange`] if the range wraps; [`Error::Invalid`] if the
    /// advice does not apply to a mapping's kind, or the mapping is locked; [`Error::AccessDenied`]
    /// for [`Advice::Remove`] of memory that may not be written; [`Error::Sealed`];
    /// [`Error::NotMapped`] if the range has holes, after the mapped parts are done;
    /// [`Error::TryAgain`] if a mapping cannot be split; those of [`AddressSpace::collapse_range`];
    /// [`Error::Fault`] and [`Error::OutOfMemory`] if a page is not available;
    /// [`Error::Interrupted`] if a fatal signal came before all pages of [`Advice::PopulateRead`]
    /// or [`Advice::PopulateWrite`], before a run of [`Advice::WillNeed`], or before a mapping of
    /// [`Advice::Free`], [`Advice::Cold`] or [`Advice::PageOut`]. The part before an error is done.
    pub fn madvise(&self, start: VirtAddr, length: u64, advice: Advice) -> Result<(), Error> {
        self.madvise_with_keys(start, length, advice, KeyRights::ALL)
    }

    /// As [`AddressSpace::madvise`], for a thread with these `rights` to the memory of each
    /// protection key. Of a sealed mapping, it may discard only what it could overwrite.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::madvise`].
    pub fn madvise_with_keys(
        &self,
        start: VirtAddr,
        length: u64,
        advice: Advice,
        rights: KeyRights,
    ) -> Result<(), Error> {
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        let limit = self.limit();
        let rounded = length.checked_next_multiple_of(PAGE_SIZE);
        let range = rounded
            .and_then(|length| VirtRange::from_len(start, length))
            .ok_or(Error::OutOfRange { limit })?;
        if range.is_empty() {
            return Ok(());
        }
        let effect = advice.effect();
        if effect.loss == Loss::Contents && self.has_userfaults() {
            self.tell_of_removal(range)?;
        }
        match effect.change {
            Change::Call(Call::WillNeed) => self.will_need(range),
            Change::Call(Call::Populate(want)) => self.populate_as(range, want),
            Change::Call(Call::Remove) => self.remove_contents(range, effect.loss),
            Change::Call(Call::Collapse) => self.collapse_range(range),
            Change::Vmas(change) => {
                let advice = VmaAdvice { change, loss: effect.loss, rights };
                let result = self.page_table.memory.outermost(|| self.advise_once(range, advice));
                match change {
                    VmaChange::Entries(_) => result,
                    // As Linux: a mapping that cannot be cut now may be cut later.
                    VmaChange::Flags(_) => result.map_err(|error| {
                        let later = matches!(error, Error::OutOfMemory | Error::TooManyMappings);
                        if later { Error::TryAgain } else { error }
                    }),
                }
            }
        }
    }

    /// The part before an error is done; a second attempt does it again without harm.
    fn advise_once(&self, range: VirtRange, advice: VmaAdvice) -> Result<(), Failure> {
        self.transaction(|mm, gather, removed| {
            self.advise_locked(mm, range, advice, gather, removed)
        })
    }

    /// Drops the contents of `length` bytes (rounded up to pages) at `start`: they read as zeroes
    /// again, or as the object's content. Tables that become empty are freed.
    ///
    /// Context: may sleep. Complexity: in the mappings and whole tables, plus the runs of the
    /// tables at the edges.
    ///
    /// # Errors
    /// As [`AddressSpace::madvise`] with [`Advice::DontNeed`].
    pub fn discard(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        self.madvise(start, length, Advice::DontNeed)
    }

    fn advise_locked(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        advice: VmaAdvice,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<(), Failure> {
        let mut parts = Parts::of(range);
        while let Some((vma, part)) = parts.next(mm, self) {
            if !may_be_advised(vma, advice.loss, advice.rights) {
                return Err(Error::Sealed(part.start()).into());
            }
            match advice.change {
                VmaChange::Entries(change) => {
                    if change.is_page_by_page() {
                        interrupt::check(self.platform())?;
                    }
                    self.change_entries(mm, vma, part, change, gather)?;
                }
                VmaChange::Flags(change) => {
                    let flags = change.of(vma)?;
                    if flags != vma.flags() {
                        self.with_flags(mm, vma, part, flags, removed, |_| Ok(()))?;
                    }
                }
            }
        }
        Ok(parts.end()?)
    }

    fn change_entries(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        part: VirtRange,
        change: EntryChange,
        gather: &mut Gather,
    ) -> Result<(), Failure> {
        let locked = vma.has(MappingFlags::LOCKED);
        match change {
            EntryChange::Drop { locked: false } if locked => Err(Error::Invalid.into()),
            EntryChange::Drop { .. } => Ok(self.drop_contents(vma, part, gather)?),
            EntryChange::Free if locked || !vma.is_anonymous() => Err(Error::Invalid.into()),
            EntryChange::Free => {
                Ok(self.forget_contents(vma, part, UseBits::AccessedAndDirty, gather)?)
            }
            EntryChange::Cold | EntryChange::PageOut if locked => Err(Error::Invalid.into()),
            // Droppable pages need no place in swap.
            EntryChange::PageOut if vma.has(MappingFlags::DROPPABLE) => {
                Ok(self.drop_contents(vma, part, gather)?)
            }
            EntryChange::PageOut
                if self.page_table.memory.has_swap()
                    && (vma.group_pointer().is_some() || shared_memory(vma).is_some()) =>
            {
                if vma.group_pointer().is_some() {
                    self.page_out(vma, part, gather)?;
                }
                shared_memory(vma)
                    .map_or(Ok(()), |object| self.page_out_shared(vma, object, part, gather))
            }
            EntryChange::Cold | EntryChange::PageOut => {
                Ok(self.forget_contents(vma, part, UseBits::Accessed, gather)?)
            }
            EntryChange::InstallGuards => self.install_guards(mm, vma, part, gather),
            EntryChange::RemoveGuards => Ok(self.remove_guards(vma, part)?),
        }
    }

    pub(super) fn drop_contents(
        &self,
        vma: &Vma,
        part: VirtRange,
        gather: &mut Gather,
    ) -> Result<(), NoMemory> {
        self.note_resident();
        let locked = vma.lock_write(self.platform());
        gather.vma_stays();
        let protected = vma.dropped_protection();
        let spares = vma.has(MappingFlags::MAYBE_GUARDS) || protected == Protected::Marked;
        let zapped = if spares {
            self.page_table.zap_sparing(
                part,
                Exceptions { spared: Spared::Guards, protected },
                gather,
            )
        } else {
            let zapped = self.page_table.zap(part, part, Flush::BeforeUnlock, gather);
            self.page_table.prune(part.start(), gather);
            self.page_table.prune(VirtAddr(part.end().0 - 1), gather);
            zapped
        };
        // Before the VMA is unlocked: a fault would map a new page while stale TLB entries reach the
        // old one.
        self.flush(gather);
        drop(locked);
        zapped
    }

    /// Punches a hole in the objects behind the range (`MADV_REMOVE`).
    fn remove_contents(&self, range: VirtRange, loss: Loss) -> Result<(), Error> {
        let mut parts = Parts::of(range);
        loop {
            let (object, offset, length) = {
                let mm = self.mmap_lock.lock();
                let Some((vma, part)) = parts.next(&mm, self) else { break };
                if !may_be_advised(vma, loss, KeyRights::ALL) {
                    return Err(Error::Sealed(part.start()));
                }
                if vma.has(MappingFlags::LOCKED) {
                    return Err(Error::Invalid);
                }
                let object = self.object_of(vma).ok_or(Error::Invalid)?;
                if !vma.has(MappingFlags::SHARED | MappingFlags::MAY_WRITE) {
                    return Err(Error::AccessDenied);
                }
                // Saturated, the offset lies behind the largest object: `Invalid`, as on Linux.
                let offset = vma.page_offset_of(part.start()).saturating_mul(PAGE_SIZE);
                (object, offset, part.len())
            };
            object.punch_hole(offset, length)?;
        }
        parts.end()
    }
}

/// The object of the mapping, if it is shared memory.
pub(super) fn shared_memory(vma: &Vma) -> Option<&ObjectState> {
    vma.object().filter(|object| !object.is_file())
}

/// Whether a sealed mapping allows the advice: anonymous contents that the program could not
/// overwrite anyway must not vanish (mseal(2)).
fn may_be_advised(vma: &Vma, loss: Loss, rights: KeyRights) -> bool {
    !vma.has(MappingFlags::SEALED)
        || loss == Loss::Nothing
        || !vma.is_anonymous()
        || vma.protection().contains(Protection::WRITE) && rights.may_store(vma.flags().key())
}
