//! `madvise(2)`.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::KeyRights;
use crate::error::{Error, Failure, NoMemory};
use crate::interrupt;
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::table::age::Forget;
use crate::table::zap::Flush;
use crate::table::zap_except::{Exceptions, Protected, Spared};
use crate::tlb::Gather;

use super::change::Removed;
use super::parts::Parts;
use super::populate::Want;
use super::vma::{MappingFlags, Protection, Vma};
use super::{AddressSpace, MmapLocked};

/// Advice of a program about a range of its memory.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{Advice, AddressSpace, Error, Platform};
///
/// fn forget<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> Result<(), Error> {
///     space.madvise(at, 1 << 20, Advice::DontNeed)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// Nothing special (`MADV_NORMAL`).
    Normal,
    /// Pages are used in no order (`MADV_RANDOM`).
    Random,
    /// Pages are used in order (`MADV_SEQUENTIAL`).
    Sequential,
    /// Pages are used soon (`MADV_WILLNEED`): those in swap come in, as long as memory is not short.
    /// Pages of files do not.
    WillNeed,
    /// The contents are not needed any more (`MADV_DONTNEED`).
    DontNeed,
    /// As `DontNeed`, of locked memory too (`MADV_DONTNEED_LOCKED`).
    DontNeedLocked,
    /// The contents are not needed any more, unless they are written again before memory is short
    /// (`MADV_FREE`). Those in swap are gone at once. A large folio that the range covers in part is
    /// split; one that another process maps, or somebody has pinned, is left alone.
    Free,
    /// The contents are not used for a while (`MADV_COLD`). Large folios are split or left alone as
    /// with [`Advice::Free`].
    Cold,
    /// The contents are not used for a while, and may leave memory now (`MADV_PAGEOUT`). Large
    /// folios are split or left alone as with [`Advice::Free`].
    PageOut,
    /// The contents of the object are not needed any more (`MADV_REMOVE`).
    Remove,
    /// A child does not inherit it (`MADV_DONTFORK`).
    DontFork,
    /// A child inherits it (`MADV_DOFORK`).
    DoFork,
    /// A child inherits it empty (`MADV_WIPEONFORK`).
    WipeOnFork,
    /// A child inherits it with its contents (`MADV_KEEPONFORK`).
    KeepOnFork,
    /// It is not part of a core dump (`MADV_DONTDUMP`).
    DontDump,
    /// It is part of a core dump (`MADV_DODUMP`).
    DoDump,
    /// Pages with equal contents may be merged (`MADV_MERGEABLE`). They never are, as on a Linux
    /// whose `ksmd` was not started. No effect on memory that is not private.
    Mergeable,
    /// Pages may not be merged (`MADV_UNMERGEABLE`).
    Unmergeable,
    /// Large folios are wanted (`MADV_HUGEPAGE`).
    Huge,
    /// Large folios are not wanted (`MADV_NOHUGEPAGE`).
    NoHuge,
    /// Large folios are wanted now (`MADV_COLLAPSE`).
    Collapse,
    /// All pages are to be readable without a fault (`MADV_POPULATE_READ`).
    PopulateRead,
    /// All pages are to be writable without a fault (`MADV_POPULATE_WRITE`).
    PopulateWrite,
    /// An access raises a signal, whatever the protection allows (`MADV_GUARD_INSTALL`).
    GuardInstall,
    /// Guards are removed (`MADV_GUARD_REMOVE`).
    GuardRemove,
}

impl Advice {
    /// All of them, for tests of what holds for each.
    #[cfg(any(test, feature = "testing"))]
    pub const ALL: &[Self] = &[
        Self::Normal,
        Self::Random,
        Self::Sequential,
        Self::WillNeed,
        Self::DontNeed,
        Self::DontNeedLocked,
        Self::Free,
        Self::Cold,
        Self::PageOut,
        Self::Remove,
        Self::DontFork,
        Self::DoFork,
        Self::WipeOnFork,
        Self::KeepOnFork,
        Self::DontDump,
        Self::DoDump,
        Self::Mergeable,
        Self::Unmergeable,
        Self::Huge,
        Self::NoHuge,
        Self::Collapse,
        Self::PopulateRead,
        Self::PopulateWrite,
        Self::GuardInstall,
        Self::GuardRemove,
    ];

    /// Whether each page is looked at and nothing depends on its being all of them, so that the
    /// call may stop anywhere.
    fn looks_at_pages(self) -> bool {
        matches!(self, Self::Free | Self::Cold | Self::PageOut)
    }

    /// Whether it changes nothing but what a mapping is for.
    fn is_about_flags(self) -> bool {
        !matches!(
            self,
            Self::DontNeed
                | Self::DontNeedLocked
                | Self::Free
                | Self::Cold
                | Self::PageOut
                | Self::GuardInstall
                | Self::GuardRemove
        )
    }

    /// Whether it throws contents away that a userfaultfd's handler may know.
    fn drops_contents(self) -> bool {
        matches!(self, Self::DontNeed | Self::DontNeedLocked | Self::Free | Self::Remove)
    }

    /// Whether it throws contents away, or what a child would get of them.
    fn discards(self) -> bool {
        matches!(
            self,
            Self::DontNeed
                | Self::DontNeedLocked
                | Self::Free
                | Self::Remove
                | Self::DontFork
                | Self::WipeOnFork
                | Self::GuardInstall
        )
    }
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
        if self.has_userfaults() && advice.drops_contents() {
            self.tell_of_removal(range)?;
        }
        match advice {
            Advice::WillNeed => return self.will_need(range),
            Advice::PopulateRead => return self.populate_as(range, Want::Readable),
            Advice::PopulateWrite => return self.populate_as(range, Want::Writable),
            Advice::Remove => return self.remove_contents(range),
            Advice::Collapse => return self.collapse_range(range),
            _ => {}
        }
        let result = self.page_table.memory.outermost(|| self.advise_once(range, advice, rights));
        if advice.is_about_flags() {
            // As Linux: a mapping that cannot be cut now may be cut later.
            return result.map_err(|error| match error {
                Error::OutOfMemory | Error::TooManyMappings => Error::TryAgain,
                error => error,
            });
        }
        result
    }

    /// What lies before an error is done, and is as it should be when it is done once more.
    fn advise_once(
        &self,
        range: VirtRange,
        advice: Advice,
        rights: KeyRights,
    ) -> Result<(), Failure> {
        self.transaction(|mm, gather, removed| {
            self.advise_locked(mm, range, advice, rights, gather, removed)
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
        advice: Advice,
        rights: KeyRights,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<(), Failure> {
        let mut parts = Parts::of(range);
        while let Some((vma, part)) = parts.next(mm, self) {
            if !may_be_advised(vma, advice, rights) {
                return Err(Error::Sealed(part.start()).into());
            }
            if advice.looks_at_pages() {
                interrupt::check(self.platform())?;
            }
            self.advise(mm, vma, part, advice, gather, removed)?;
        }
        Ok(parts.end()?)
    }

    fn advise(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        part: VirtRange,
        advice: Advice,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<(), Failure> {
        let locked = vma.has(MappingFlags::LOCKED);
        match advice {
            Advice::DontNeed if locked => Err(Error::Invalid.into()),
            Advice::DontNeed | Advice::DontNeedLocked => Ok(self.drop_contents(vma, part, gather)?),
            Advice::Free if locked || !vma.is_anonymous() => Err(Error::Invalid.into()),
            Advice::Free => Ok(self.forget_contents(vma, part, Forget::Use, gather)?),
            Advice::Cold | Advice::PageOut if locked => Err(Error::Invalid.into()),
            // What may vanish when memory is short vanishes: there is no need of a place for it.
            Advice::PageOut if vma.has(MappingFlags::DROPPABLE) => {
                Ok(self.drop_contents(vma, part, gather)?)
            }
            Advice::PageOut
                if self.page_table.memory.has_swap()
                    && (vma.group_pointer().is_some() || shared_memory(vma).is_some()) =>
            {
                if vma.group_pointer().is_some() {
                    self.page_out(vma, part, gather)?;
                }
                shared_memory(vma)
                    .map_or(Ok(()), |object| self.page_out_shared(vma, object, part, gather))
            }
            Advice::Cold | Advice::PageOut => {
                Ok(self.forget_contents(vma, part, Forget::Accessed, gather)?)
            }
            Advice::GuardInstall => self.install_guards(mm, vma, part, gather),
            Advice::GuardRemove => Ok(self.remove_guards(vma, part)?),
            _ => {
                let flags = advised_flags(vma, advice)?;
                if flags == vma.flags() {
                    return Ok(());
                }
                self.with_flags(mm, vma, part, flags, removed, |_| Ok(()))
            }
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
        // Before a fault is let in: it would map a new page while others still use the old.
        self.flush(gather);
        drop(locked);
        zapped
    }

    /// Throws away what objects have in the range (`MADV_REMOVE`).
    fn remove_contents(&self, range: VirtRange) -> Result<(), Error> {
        let mut parts = Parts::of(range);
        loop {
            let (object, offset, length) = {
                let mm = self.mmap_lock.lock();
                let Some((vma, part)) = parts.next(&mm, self) else { break };
                if !may_be_advised(vma, Advice::Remove, KeyRights::ALL) {
                    return Err(Error::Sealed(part.start()));
                }
                if vma.has(MappingFlags::LOCKED) {
                    return Err(Error::Invalid);
                }
                let object = self.object_of(vma).ok_or(Error::Invalid)?;
                if !vma.has(MappingFlags::SHARED | MappingFlags::MAY_WRITE) {
                    return Err(Error::AccessDenied);
                }
                // Behind all that an object can have, where that is too much: `Invalid`, as on
                // Linux.
                let offset = vma.page_offset_of(part.start()).saturating_mul(PAGE_SIZE);
                (object, offset, part.len())
            };
            object.punch_hole(offset, length)?;
        }
        parts.end()
    }
}

/// The object that the mapping shows, if that is shared memory.
pub(super) fn shared_memory(vma: &Vma) -> Option<&ObjectState> {
    vma.object().filter(|object| !object.is_file())
}

/// Whether a sealed mapping allows the advice: anonymous contents that the program could not
/// overwrite anyway must not vanish (mseal(2)).
fn may_be_advised(vma: &Vma, advice: Advice, rights: KeyRights) -> bool {
    !vma.has(MappingFlags::SEALED)
        || !advice.discards()
        || !vma.is_anonymous()
        || vma.protection().contains(Protection::WRITE) && rights.may_store(vma.flags().key())
}

/// The flags that a mapping has after the advice.
fn advised_flags(vma: &Vma, advice: Advice) -> Result<MappingFlags, Error> {
    let flags = vma.flags();
    let order = MappingFlags::SEQUENTIAL | MappingFlags::RANDOM;
    Ok(match advice {
        Advice::Normal => flags - order,
        Advice::Random => (flags - order) | MappingFlags::RANDOM,
        Advice::Sequential => (flags - order) | MappingFlags::SEQUENTIAL,
        Advice::DontFork => flags | MappingFlags::DONT_FORK,
        Advice::DoFork => flags - MappingFlags::DONT_FORK,
        Advice::WipeOnFork if !vma.is_anonymous() => return Err(Error::Invalid),
        Advice::WipeOnFork => flags | MappingFlags::WIPE_ON_FORK,
        Advice::KeepOnFork | Advice::DoDump if vma.has(MappingFlags::DROPPABLE) => {
            return Err(Error::Invalid);
        }
        Advice::KeepOnFork => flags - MappingFlags::WIPE_ON_FORK,
        Advice::DontDump => flags | MappingFlags::DONT_DUMP,
        Advice::DoDump => flags - MappingFlags::DONT_DUMP,
        Advice::Mergeable => flags | super::merging::mergeable(flags),
        Advice::Unmergeable => flags - MappingFlags::MERGEABLE,
        Advice::Huge => (flags - MappingFlags::NO_HUGE) | MappingFlags::HUGE,
        Advice::NoHuge => (flags - MappingFlags::HUGE) | MappingFlags::NO_HUGE,
        _ => return Err(Error::Invalid),
    })
}
