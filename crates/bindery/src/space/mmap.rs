//! `mmap(2)`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::commit::Overcommit;
use crate::error::{Error, Failure};
use crate::object::{Accounting, MAX_SIZE, ObjectState, Sealing, WritableMapping};
use crate::platform::Platform;
use crate::tlb::Gather;

use super::change::Removed;
use super::map_request::{FileAccess, MapFlags, MapObject, MapRequest, Sharing};
use super::vma::{MappingFlags, Protection, Purpose, Vma};
use super::{AddressSpace, MmapLocked};

/// The backing of a new mapping, besides the request.
pub(super) struct Backing {
    pub(super) object: Option<NonNull<ObjectState>>,
    /// In pages; `None` for private anonymous memory, whose address determines it.
    pub(super) offset: Option<u64>,
    /// The protection that `mprotect` may set.
    pub(super) may: MappingFlags,
    /// Whether it is secret memory: only the program accesses it.
    pub(super) is_secret: bool,
}

impl Backing {
    /// Private anonymous memory.
    pub(super) fn anonymous(may: MappingFlags) -> Self {
        Self { object: None, offset: None, may, is_secret: false }
    }
}

/// How many pages of a range are mapped.
struct MappedPages {
    all: u64,
    /// The pages that count as committed.
    committed: u64,
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Maps anonymous memory, and returns its address. It reads as zeroes; frames are allocated at
    /// the first access. (Linux: `mmap(2)` with `MAP_ANONYMOUS`.)
    ///
    /// If no address is given, one is chosen downwards from the top. A mapping of at least one
    /// table's span (2 MiB) begins at a multiple of it if there is room, so that large folios and
    /// whole-table moves fit. Nothing is put within 1 MiB below a mapping that grows down.
    ///
    /// Context: may sleep. Complexity: logarithmic in the mappings; for the mappings that
    /// [`super::Place::Fixed`] replaces, as [`AddressSpace::munmap`].
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::TooLong`] and [`Error::OutOfRange`] if it would not fit into
    /// user space; [`Error::Unaligned`] for a fixed address; [`Error::BelowMinimum`];
    /// [`Error::Exists`] for [`super::Place::FixedNoReplace`]; [`Error::Invalid`] for flags that
    /// exclude each other; [`Error::LockForbidden`], [`Error::LockLimit`]; [`Error::Sealed`] if a
    /// sealed mapping would be replaced; [`Error::LimitReached`]; [`Error::Overcommitted`];
    /// [`Error::TooManyMappings`]; [`Error::NoRoom`]; [`Error::OutOfMemory`]. An error changes
    /// nothing.
    pub fn mmap(&self, request: &MapRequest) -> Result<VirtAddr, Error> {
        let may = MappingFlags::MAY_ALL;
        if request.sharing == Sharing::Private {
            return self.map(request, Backing::anonymous(may));
        }
        // Before any allocation for it.
        let length = self.map_length(request)?;
        let accounting =
            if self.may_skip_reserve(request) { Accounting::None } else { Accounting::Whole };
        let memory = self.page_table.memory;
        let object = memory.shared_memory(length, Sealing::Forbidden, accounting)?;
        let backing =
            Backing { object: Some(object.state), offset: Some(0), may, is_secret: false };
        self.map(request, backing)
    }

    /// Maps a part of an object: shared memory or a file. A private mapping shows the object's
    /// pages until they are written, and copies from then on. Pages beyond the object's end are
    /// mapped too, and an access to them fails ([`crate::FaultError::Bus`]) until the object grows.
    /// (Linux: `mmap(2)` with a file descriptor.)
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::mmap`]; also [`Error::Unaligned`] and [`Error::TooLarge`] for the offset,
    /// [`Error::AccessDenied`] if the object was not opened for such access, [`Error::SealForbids`]
    /// for a shared writable mapping of an object that is sealed against writing, and
    /// [`Error::Invalid`] for an object of another [`crate::Memory`].
    pub fn mmap_object(
        &self,
        request: &MapRequest,
        source: &MapObject<'_, 'm, P>,
    ) -> Result<VirtAddr, Error> {
        let length = self.map_length(request)?;
        let offset = source.offset >> PAGE_SHIFT;
        if !source.offset.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Unaligned(VirtAddr(source.offset)));
        }
        // The last page's offset in bytes must fit in 64 bits, as on Linux.
        if offset.checked_add(length >> PAGE_SHIFT).is_none_or(|end| end > u64::MAX >> PAGE_SHIFT) {
            return Err(Error::TooLarge);
        }
        if !core::ptr::eq(source.object.memory, self.page_table.memory) {
            return Err(Error::Invalid);
        }
        match admit(request, source) {
            Ok((may, _admitted)) => {
                let object = Some(source.object.state);
                let is_secret = source.object.state().is_secret();
                self.map(request, Backing { object, offset: Some(offset), may, is_secret })
            }
            Err(error) => {
                // Linux looks for a place first.
                self.check_place(request)?;
                Err(error)
            }
        }
    }

    /// Whether a place exists for such a mapping: the first half of [`AddressSpace::mmap`].
    ///
    /// Context: may sleep. Complexity: as that of the search of `mmap`.
    ///
    /// # Errors
    /// Those of `mmap` for a length, a place and limits.
    pub fn check_place(&self, request: &MapRequest) -> Result<(), Error> {
        let length = self.map_length(request)?;
        let mm = self.mmap_lock.lock();
        // As on Linux, a new mapping may be the first beyond the limit.
        self.room_for(0)?;
        self.find_place(&mm, length, request.place, PAGE_SIZE)?;
        let locked = request.flags.contains(MapFlags::LOCKED);
        if locked {
            self.may_lock_at_all()?;
        }
        if locked || self.future_locks().contains(MappingFlags::LOCKED) {
            self.may_lock(length >> PAGE_SHIFT)?;
        }
        Ok(())
    }

    /// The length of a mapping in whole pages.
    pub(super) fn map_length(&self, request: &MapRequest) -> Result<u64, Error> {
        if request.length == 0 {
            return Err(Error::ZeroLength);
        }
        let length = request.length.checked_next_multiple_of(PAGE_SIZE).ok_or(Error::TooLong)?;
        if length > self.limit().0 {
            return Err(Error::TooLong);
        }
        Ok(length)
    }

    pub(super) fn may_skip_reserve(&self, request: &MapRequest) -> bool {
        // Droppable memory need not be committed in any mode, as on Linux.
        request.flags.contains(MapFlags::DROPPABLE)
            || request.flags.contains(MapFlags::NO_RESERVE)
                && self.page_table.memory.commitment().mode() != Overcommit::Never
    }

    /// The flags of the requested mapping.
    fn map_flags(&self, request: &MapRequest, backing: &Backing) -> MappingFlags {
        let asked = request.flags;
        let mut flags = MappingFlags::of(self.heeded(request.protection)) | backing.may;
        flags |= MappingFlags::SOFT_DIRTY;
        flags |= self.future_locks();
        let shared = request.sharing == Sharing::Shared;
        flags.set(MappingFlags::SHARED, shared);
        flags.set(MappingFlags::GROWS_DOWN, asked.contains(MapFlags::GROWS_DOWN));
        flags.set(MappingFlags::NO_HUGE, asked.contains(MapFlags::STACK));
        if asked.contains(MapFlags::LOCKED) {
            flags |= MappingFlags::LOCKED;
        }
        if backing.is_secret {
            flags |= MappingFlags::SECRET | MappingFlags::LOCKED | MappingFlags::DONT_DUMP;
        }
        if asked.contains(MapFlags::DROPPABLE) {
            flags |= MappingFlags::DROPPABLE | MappingFlags::WIPE_ON_FORK | MappingFlags::DONT_DUMP;
            flags -= MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
        }
        if self.may_skip_reserve(request) {
            flags |= MappingFlags::NO_RESERVE;
        }
        if flags.is_accountable() {
            flags |= MappingFlags::ACCOUNT;
        }
        flags | self.future_merging(flags)
    }

    pub(super) fn map(&self, request: &MapRequest, backing: Backing) -> Result<VirtAddr, Error> {
        let length = self.map_length(request)?;
        let map = || self.map_once(request, length, &backing);
        let (range, flags) = self.page_table.memory.outermost(map)?;
        let locked = flags & (MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT);
        if request.flags.contains(MapFlags::POPULATE) || locked == MappingFlags::LOCKED {
            // The mapping stays even if its pages cannot be populated, as on Linux.
            let _ = self.populate(range);
        }
        Ok(range.start())
    }

    /// An error changes nothing.
    fn map_once(
        &self,
        request: &MapRequest,
        length: u64,
        backing: &Backing,
    ) -> Result<(VirtRange, MappingFlags), Failure> {
        self.transaction(|mm, gather, removed| {
            self.map_locked(mm, request, length, backing, gather, removed)
        })
    }

    /// The alignment at which folios of shared memory are mapped whole: that of the largest folio
    /// for which the mapping has room.
    #[inline(never)]
    fn object_alignment(
        &self,
        object: NonNull<ObjectState>,
        backing: &Backing,
        flags: MappingFlags,
        length: u64,
    ) -> u64 {
        // SAFETY: the caller of `mmap` holds the object until the mapping does.
        let object = unsafe { object.as_ref() };
        let mut orders = object.orders(self.page_table.memory, flags);
        while let Some(order) = orders.take_largest() {
            let first = backing.offset.unwrap_or(0);
            if !object.is_file()
                && order.bytes() <= length
                && first.is_multiple_of(u64::from(order.pages()))
            {
                return order.bytes();
            }
        }
        PAGE_SIZE
    }

    pub(super) fn map_locked(
        &self,
        mm: &MmapLocked,
        request: &MapRequest,
        length: u64,
        backing: &Backing,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<(VirtRange, MappingFlags), Failure> {
        // As on Linux, a new mapping may be the first beyond the limit.
        self.room_for(0)?;
        let flags = self.map_flags(request, backing);
        let align = match backing.object {
            Some(object) => self.object_alignment(object, backing, flags, length),
            None => PAGE_SIZE,
        };
        let range = self.find_place(mm, length, request.place, align)?;
        if request.flags.contains(MapFlags::LOCKED) {
            self.may_lock_at_all()?;
        }
        let asked = request.flags;
        let grows = asked.contains(MapFlags::GROWS_DOWN);
        let droppable = asked.contains(MapFlags::DROPPABLE);
        // Linux checks the limit before it finds that such memory is not locked.
        let locked = if droppable { self.future_locks() } else { flags };
        if locked.contains(MappingFlags::LOCKED) {
            self.may_lock(range.pages())?;
        }
        if grows && (request.sharing == Sharing::Shared || droppable)
            || droppable && asked.contains(MapFlags::LOCKED)
        {
            return Err(Error::Invalid.into());
        }
        self.refuse_exec_gain(flags, flags)?;
        let MappedPages { all: replaced, committed: given_back } = self.pages_mapped(mm, range)?;
        self.may_expand(flags, range.pages() - replaced)?;
        let committed = if flags.contains(MappingFlags::ACCOUNT) { range.pages() } else { 0 };
        // The replaced pages were committed already, as on Linux.
        let kept = given_back.min(committed);
        let commitment = self.page_table.memory.commitment();
        let _reservation = commitment.reserve(committed - kept)?;
        let _kept = commitment.keep(kept);
        let offset = backing.offset.unwrap_or(range.start().0 >> PAGE_SHIFT);
        let purpose = Purpose { flags, object: backing.object, ..Purpose::default() };
        if replaced == 0 && self.extend_neighbor(mm, range, &purpose, offset) {
            return Ok((range, flags));
        }
        let node = self.new_vma(range, purpose, offset)?;
        if replaced > 0
            && let Err(error) = self.unmap_locked(mm, range, gather, removed)
        {
            return Err(self.give_back([Some(node), None], error));
        }
        self.flush(gather);
        self.insert(mm, node);
        self.merge_around(mm, self.vma(node), removed);
        Ok((range, flags))
    }

    /// How many pages of `range` are mapped; none of them may be sealed.
    fn pages_mapped(&self, mm: &MmapLocked, range: VirtRange) -> Result<MappedPages, Error> {
        let mut pages = MappedPages { all: 0, committed: 0 };
        for vma in self.vmas_in(mm, range) {
            if vma.has(MappingFlags::SEALED) {
                return Err(Error::Sealed(VirtAddr(vma.start())));
            }
            let part = vma.range().intersection(range).pages();
            pages.all += part;
            pages.committed += if vma.has(MappingFlags::ACCOUNT) { part } else { 0 };
        }
        Ok(pages)
    }

    /// Extends the VMA below or above a free `range` over it, if the new mapping would continue
    /// that VMA and does not touch a third one. Needs no memory and no grace period.
    pub(super) fn extend_neighbor(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        purpose: &Purpose,
        offset: u64,
    ) -> bool {
        let next = self.first_ending_after(mm, range.start().0);
        let previous = match next {
            Some(next) => self.vmas.previous(NonNull::from(next)),
            None => self.vmas.find_at_or_before(range.start().0),
        };
        let previous = previous.map(|node| self.vma(node));
        let below = previous.filter(|vma| {
            vma.end() == range.start().0
                && vma.page_offset_of(range.start()) == offset
                && continues_new(vma, purpose)
        });
        let above = next.filter(|vma| {
            vma.start() == range.end().0
                && vma.page_offset() == offset.wrapping_add(range.pages())
                && continues_new(vma, purpose)
        });
        let vma = match (below, above) {
            (Some(vma), None) | (None, Some(vma)) => vma,
            _ => return false,
        };
        self.extend_over(mm, vma, range);
        true
    }

    /// As [`AddressSpace::extend_neighbor`], but only for the VMA below.
    pub(super) fn extend_below(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        purpose: &Purpose,
        offset: u64,
    ) -> bool {
        let below = self.vmas.find_at_or_before(range.start().0).map(|node| self.vma(node));
        let below = below.filter(|vma| {
            vma.end() == range.start().0
                && vma.page_offset_of(range.start()) == offset
                && continues_new(vma, purpose)
        });
        below.map(|vma| self.extend_over(mm, vma, range)).is_some()
    }

    fn extend_over(&self, mm: &MmapLocked, vma: &Vma, range: VirtRange) {
        let (start, end) = (vma.start().min(range.start().0), vma.end().max(range.end().0));
        let vma = vma.lock_write(self.platform());
        self.change_flags(mm, &vma, vma.flags() | MappingFlags::SOFT_DIRTY);
        self.resize(mm, &vma, start, end);
    }
}

/// The protection that `mprotect` may set for a mapping of an object, and a guard that blocks seals
/// until the mapping is inserted and blocks them itself.
pub(super) fn admit<'a, P: Platform>(
    request: &MapRequest,
    source: &MapObject<'a, '_, P>,
) -> Result<(MappingFlags, Option<WritableMapping<'a>>), Error> {
    let mut may = MappingFlags::MAY_ALL;
    if source.offset.saturating_add(request.length) > MAX_SIZE {
        return Err(Error::TooLarge);
    }
    let shared = request.sharing == Sharing::Shared;
    let writes = request.protection.contains(Protection::WRITE);
    let writable = source.access.contains(FileAccess::WRITE);
    if !source.access.contains(FileAccess::READ) || shared && writes && !writable {
        return Err(Error::AccessDenied);
    }
    if request.flags.intersects(MapFlags::GROWS_DOWN | MapFlags::DROPPABLE)
        || !shared && source.object.state().is_secret()
    {
        return Err(Error::Invalid);
    }
    let tells = source.access.intersects(FileAccess::WRITE | FileAccess::OWNER);
    may.set(MappingFlags::HIDES_RESIDENCE, source.object.state().is_file() && !tells);
    if !shared {
        return Ok((may, None));
    }
    if !writable {
        may -= MappingFlags::MAY_WRITE;
        return Ok((may, None));
    }
    match source.object.state().admit_writable() {
        Ok(admitted) => Ok((may, Some(admitted))),
        Err(error) if writes => Err(error),
        Err(_) => Ok((may - MappingFlags::MAY_WRITE, None)),
    }
}

/// Whether a new mapping with this purpose may become a part of `vma`, which touches it.
fn continues_new(vma: &Vma, purpose: &Purpose) -> bool {
    let alike = |flags: MappingFlags| flags - MappingFlags::STICKY;
    alike(vma.flags()) == alike(purpose.flags)
        && vma.object_pointer() == purpose.object
        && vma.group().is_none_or(|group| !group.is_inherited())
}
