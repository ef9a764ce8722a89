//! `mmap(2)`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, PageRange, VirtAddr, VirtRange};
use crate::arch::{Arch, MemoryType};
use crate::commit::Overcommit;
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::object::{Accounting, MAX_SIZE, Object, ObjectState, Sealing, WritableMapping};
use crate::platform::Platform;
use crate::userfault::Notices;
use crate::vma::{Holds, MappingFlags, Protection, Purpose, Vma};
use crate::vmas::{Alignment, Continues, VmaView};

use super::map_alignment::object_alignment;
use super::map_request::{FileAccess, MapFlags, MapObject, MapRequest, Sharing};
use super::munmap::unmap;
use crate::space::AddressSpace;
use crate::space::call::mprotect::heeded;
use crate::space::call::populate::{Populate, populate_frames, populated};
use crate::space::op::{Op, Unmappings};
use crate::space::userfault::pending_events::PendingEvents;

/// The backing of a new mapping, besides the request. The value borrows a handle to its object, so
/// the object exists.
pub(in crate::space) struct MapSource<'o> {
    object: Option<NonNull<ObjectState>>,
    handle: PhantomData<&'o ()>,
    /// The offset in pages; `None` for private anonymous memory, whose address determines the
    /// offset.
    offset: Option<u64>,
    /// The protection that `mprotect` may set.
    may: MappingFlags,
    /// Flags that follow from the object.
    flags: MappingFlags,
}

impl<'o> MapSource<'o> {
    /// Private anonymous memory.
    pub(in crate::space) fn anonymous(may: MappingFlags) -> Self {
        Self { object: None, handle: PhantomData, offset: None, may, flags: MappingFlags::empty() }
    }

    /// The object of this handle, from page `offset` on.
    pub(in crate::space) fn of<P: Platform>(
        object: &'o Object<'_, P>,
        offset: u64,
        may: MappingFlags,
    ) -> Self {
        let flags = object_flags(object.state());
        let (object, offset) = (Some(object.state), Some(offset));
        Self { object, handle: PhantomData, offset, may, flags }
    }

    fn object(&self) -> Option<&'o ObjectState> {
        // SAFETY: a handle of the object is borrowed for 'o.
        self.object.map(|object| unsafe { object.as_ref() })
    }
}

/// The flags of every mapping of the object, in addition to the requested ones.
fn object_flags(object: &ObjectState) -> MappingFlags {
    if object.is_secret() {
        MappingFlags::SECRET | MappingFlags::LOCKED | MappingFlags::DONT_DUMP
    } else if object.frames().is_some() {
        MappingFlags::FRAMES | MappingFlags::DONT_EXPAND | MappingFlags::DONT_DUMP
    } else {
        MappingFlags::empty()
    }
}

/// The number of mapped pages in a range.
struct MappedPages {
    all: u64,
    /// The pages that count as committed.
    committed: u64,
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Maps anonymous memory and returns its address. The memory reads as zeroes; frames are
    /// allocated at the first access. (Linux: `mmap(2)` with `MAP_ANONYMOUS`.)
    ///
    /// If no address is given, the call searches for one downwards from the top. A mapping of at
    /// least one table's span (2 MiB) starts at a multiple of that span if there is room, so that
    /// large folios and whole-table moves fit. The 1 MiB below a mapping that grows down is left
    /// free.
    ///
    /// Context: may sleep. Complexity: logarithmic in the number of mappings; for the mappings that
    /// [`crate::Place::Fixed`] replaces, as [`AddressSpace::munmap`].
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::TooLong`] and [`Error::OutOfRange`] if the mapping would not
    /// fit into user space; [`Error::Unaligned`] for a fixed address; [`Error::BelowMinimum`];
    /// [`Error::Exists`] for [`crate::Place::FixedNoReplace`]; [`Error::Invalid`] for flags that
    /// exclude each other; [`Error::LockForbidden`], [`Error::LockLimit`]; [`Error::Sealed`] if a
    /// sealed mapping would be replaced; [`Error::LimitReached`]; [`Error::Overcommitted`];
    /// [`Error::TooManyMappings`]; [`Error::NoRoom`]; [`Error::OutOfMemory`]. An error changes
    /// nothing.
    pub fn mmap(&self, request: &MapRequest) -> Result<VirtAddr, Error> {
        populated(self, self.deliver_after(|notices| mmap(self, request, notices)))
    }

    /// As [`AddressSpace::mmap`], up to the waits: the call maps the memory. The steps of the
    /// [`PendingEvents`] tell userfaultfds of the mappings that it replaces; then those of the
    /// [`Populate`], which do not fail, map the pages of [`MapFlags::POPULATE`] and locked memory.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mmap`].
    ///
    /// # Errors
    /// As [`AddressSpace::mmap`].
    pub fn begin_mmap(
        &self,
        request: &MapRequest,
    ) -> (Result<(VirtAddr, Populate), Error>, PendingEvents<'m, P>) {
        PendingEvents::of(self, |notices| mmap(self, request, notices))
    }

    /// Maps a part of an object: shared memory or a file. A private mapping shows each of the
    /// object's pages until the first write to the page, and a copy from then on. The range beyond
    /// the object's end is also mapped, and an access there fails ([`crate::FaultError::Bus`])
    /// until the object grows. (Linux: `mmap(2)` with a file descriptor.)
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mmap`]; for a private mapping of a
    /// [`crate::Memory::frame_object`], also linear in the number of its pieces.
    ///
    /// # Errors
    /// As [`AddressSpace::mmap`]; also [`Error::Unaligned`] and [`Error::TooLarge`] for the offset,
    /// [`Error::AccessDenied`] if the object was not opened for such access or if device memory
    /// would be executable ([`crate::arch::MemoryType::is_executable`]), [`Error::SealForbids`] for
    /// a shared writable mapping of an object that is sealed against writing, [`Error::Invalid`]
    /// for an object of another [`crate::Memory`], the errors that
    /// [`crate::Memory::frame_object`] adds for private mappings, and [`Error::Interrupted`] for a
    /// fatal signal while their pieces are asked for.
    pub fn mmap_object(
        &self,
        request: &MapRequest,
        source: &MapObject<'_, 'm, P>,
    ) -> Result<VirtAddr, Error> {
        populated(self, self.deliver_after(|notices| mmap_object(self, request, source, notices)))
    }

    /// As [`AddressSpace::mmap_object`], up to the waits; see [`AddressSpace::begin_mmap`].
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::mmap_object`].
    pub fn begin_mmap_object(
        &self,
        request: &MapRequest,
        source: &MapObject<'_, 'm, P>,
    ) -> (Result<(VirtAddr, Populate), Error>, PendingEvents<'m, P>) {
        PendingEvents::of(self, |notices| mmap_object(self, request, source, notices))
    }

    /// Whether a place exists for such a mapping. This check is the first half of
    /// [`AddressSpace::mmap`].
    ///
    /// Context: may sleep. Complexity: as the search of `mmap`.
    ///
    /// # Errors
    /// The errors of `mmap` for a length, an address and limits.
    pub fn check_place(&self, request: &MapRequest) -> Result<(), Error> {
        check_place(self, request)
    }
}

fn check_place<P: Platform>(
    space: &AddressSpace<'_, P>,
    request: &MapRequest,
) -> Result<(), Error> {
    let length = map_length::<P>(request)?;
    let vmas = space.vmas.lock();
    // As on Linux, a new mapping may be the first to exceed the limit.
    vmas.view().room_for(0)?;
    vmas.view().find_place(length, request.place, Alignment::PAGE)?;
    let (locked, account) = (request.flags.contains(MapFlags::LOCKED), space.vmas.account());
    if locked {
        account.may_lock_at_all()?;
    }
    if locked || space.future_locks.get().contains(MappingFlags::LOCKED) {
        account.may_lock(length >> PAGE_SHIFT)?;
    }
    Ok(())
}

pub(super) fn mmap_object<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    request: &MapRequest,
    source: &MapObject<'_, 'm, P>,
    notices: &mut Notices,
) -> Result<(VirtAddr, Populate), Error> {
    let length = map_length::<P>(request)?;
    let offset = source.offset >> PAGE_SHIFT;
    if !source.offset.is_multiple_of(PAGE_SIZE) {
        return Err(Error::Unaligned(VirtAddr(source.offset)));
    }
    // The last page's offset in bytes must fit in 64 bits, as on Linux.
    if offset.checked_add(length >> PAGE_SHIFT).is_none_or(|end| end > u64::MAX >> PAGE_SHIFT) {
        return Err(Error::TooLarge);
    }
    if !core::ptr::eq(source.object.memory, space.page_table.memory) {
        return Err(Error::Invalid);
    }
    match admit(request, source) {
        Ok((may, _admitted)) => {
            map_unpopulated(space, request, MapSource::of(source.object, offset, may), notices)
        }
        Err(error) => {
            // Linux also searches for an address first.
            space.check_place(request)?;
            Err(error)
        }
    }
}

fn mmap<P: Platform>(
    space: &AddressSpace<'_, P>,
    request: &MapRequest,
    notices: &mut Notices,
) -> Result<(VirtAddr, Populate), Error> {
    let may = MappingFlags::MAY_ALL;
    if request.sharing == Sharing::Private {
        return map_unpopulated(space, request, MapSource::anonymous(may), notices);
    }
    // Checked before any allocation for the object.
    let length = map_length::<P>(request)?;
    let accounting = if may_skip_reserve(space.page_table.memory, request) {
        Accounting::None
    } else {
        Accounting::Whole
    };
    let memory = space.page_table.memory;
    let object = memory.shared_memory(length, Sealing::Forbidden, accounting)?;
    map_unpopulated(space, request, MapSource::of(&object, 0, may), notices)
}

pub(in crate::space) fn map_unpopulated<P: Platform>(
    space: &AddressSpace<'_, P>,
    request: &MapRequest,
    backing: MapSource<'_>,
    notices: &mut Notices,
) -> Result<(VirtAddr, Populate), Error> {
    let length = map_length::<P>(request)?;
    let (range, flags) =
        space.operate_with_reclaim_untold(notices, |op| map(op, request, length, &backing))?;
    let locked = flags & (MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT);
    if flags.contains(MappingFlags::FRAMES) {
        if request.flags.contains(MapFlags::POPULATE) {
            let _ = populate_frames(space, range, flags);
        }
    } else if request.flags.contains(MapFlags::POPULATE) || locked == MappingFlags::LOCKED {
        // The mapping stays even if its pages cannot be populated, as on Linux.
        return Ok((range.start(), Populate::as_possible(range)));
    }
    Ok((range.start(), Populate::default()))
}

/// The flags of the requested mapping.
fn map_flags<P: Platform>(
    space: &AddressSpace<'_, P>,
    request: &MapRequest,
    backing: &MapSource<'_>,
) -> MappingFlags {
    let asked = request.flags;
    let mut flags = MappingFlags::of(heeded(space, request.protection)) | backing.may;
    flags |= MappingFlags::SOFT_DIRTY;
    flags |= space.future_locks.get();
    let shared = request.sharing == Sharing::Shared;
    flags.set(MappingFlags::SHARED, shared);
    flags.set(MappingFlags::GROWS_DOWN, asked.contains(MapFlags::GROWS_DOWN));
    flags.set(MappingFlags::NO_HUGE, asked.contains(MapFlags::STACK));
    if asked.contains(MapFlags::LOCKED) {
        flags |= MappingFlags::LOCKED;
    }
    flags |= backing.flags;
    if asked.contains(MapFlags::DONT_EXPAND) {
        flags |= MappingFlags::DONT_EXPAND;
    }
    if flags.contains(MappingFlags::DONT_EXPAND) && !flags.contains(MappingFlags::SECRET) {
        // Linux ignores the lock of a special mapping.
        flags -= MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
    }
    if asked.contains(MapFlags::DROPPABLE) {
        flags |= MappingFlags::DROPPABLE | MappingFlags::WIPE_ON_FORK | MappingFlags::DONT_DUMP;
        flags -= MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT;
    }
    if may_skip_reserve(space.page_table.memory, request) {
        flags |= MappingFlags::NO_RESERVE;
    }
    if flags.is_accountable() {
        flags |= MappingFlags::ACCOUNT;
    }
    flags | space.settings.future_merging(flags)
}

pub(in crate::space) fn may_skip_reserve<P: Platform>(
    memory: &Memory<P>,
    request: &MapRequest,
) -> bool {
    // Droppable memory need not be committed in any mode, as on Linux.
    request.flags.contains(MapFlags::DROPPABLE)
        || request.flags.contains(MapFlags::NO_RESERVE)
            && memory.commitment().mode() != Overcommit::Never
}

/// The length of a mapping in whole pages.
pub(in crate::space) fn map_length<P: Platform>(request: &MapRequest) -> Result<u64, Error> {
    if request.length == 0 {
        return Err(Error::ZeroLength);
    }
    let length = request.length.checked_next_multiple_of(PAGE_SIZE).ok_or(Error::TooLong)?;
    if length > P::Arch::USER_END {
        return Err(Error::TooLong);
    }
    Ok(length)
}

/// Maps `length` bytes according to the request. An error changes nothing.
pub(in crate::space) fn map<P: Platform>(
    op: &mut Op<'_, '_, P>,
    request: &MapRequest,
    length: u64,
    backing: &MapSource<'_>,
) -> Result<(VirtRange, MappingFlags), Failure> {
    // As on Linux, a new mapping may be the first to exceed the limit.
    op.vmas.room_for(0)?;
    let flags = map_flags(op.space, request, backing);
    let preferred = match backing.object() {
        Some(object) => {
            object_alignment(op.memory(), object, backing.offset.unwrap_or(0), (flags, length))
        }
        None => Alignment::PAGE,
    };
    if backing.object().is_some_and(|object| object.segment().is_some()) {
        op.unmappings = Unmappings::Unreported;
    }
    let range = op.vmas.find_place(length, request.place, preferred)?;
    let account = op.vmas.account();
    if request.flags.contains(MapFlags::LOCKED) {
        account.may_lock_at_all()?;
    }
    let asked = request.flags;
    let grows = asked.contains(MapFlags::GROWS_DOWN);
    let droppable = asked.contains(MapFlags::DROPPABLE);
    // Linux checks the limit before it finds that such memory cannot be locked.
    let locked = if droppable || flags.contains(MappingFlags::FRAMES) {
        op.space.future_locks.get()
    } else {
        flags
    };
    if locked.contains(MappingFlags::LOCKED) {
        account.may_lock(range.pages())?;
    }
    if grows && (request.sharing == Sharing::Shared || droppable)
        || droppable && asked.contains(MapFlags::LOCKED)
    {
        return Err(Error::Invalid.into());
    }
    op.space.settings.refuse_exec_gain(flags, flags)?;
    let first = op.vmas.first_ending_after(range.start().0);
    let MappedPages { all: replaced, committed: given_back } =
        pages_mapped(*op.vmas, range, first)?;
    account.may_expand(flags, range.pages() - replaced)?;
    let committed = if flags.contains(MappingFlags::ACCOUNT) { range.pages() } else { 0 };
    // As on Linux, the replaced pages have already been committed.
    op.vmas.commit(committed.saturating_sub(given_back))?;
    let offset = backing.offset.unwrap_or(range.start().0 >> PAGE_SHIFT);
    let holds = Holds { object: backing.object, ..Holds::default() };
    // SAFETY: 1. `backing` keeps the object during the call: an inserted VMA holds the object, and
    // a VMA that is not inserted ends within the call.
    let purpose = unsafe { Purpose::holding(flags, holds) };
    let mut continues = Continues::Both;
    if replaced == 0 {
        continues = op.vmas.extend_neighbor(range, first, &purpose, offset);
        if continues == Continues::Extended {
            return Ok((range, flags));
        }
    }
    let new = op.vmas.new_vma(range, purpose, offset)?;
    if replaced > 0 {
        unmap(op, range)?;
    }
    op.edit.flush();
    let vma = op.vmas.insert(new);
    if continues == Continues::Both {
        op.vmas.merge_around(vma);
    }
    Ok((range, flags))
}

/// The number of mapped pages in `range`; no mapping in the range may be sealed. `first` is the
/// first VMA that ends after the start of `range`.
fn pages_mapped<'op, P: Platform>(
    vmas: VmaView<'op, P>,
    range: VirtRange,
    first: Option<&'op Vma>,
) -> Result<MappedPages, Error> {
    let mut pages = MappedPages { all: 0, committed: 0 };
    for vma in vmas.overlapping_from(first, range) {
        if vma.has(MappingFlags::SEALED) {
            return Err(Error::Sealed(VirtAddr(vma.start())));
        }
        let part = vma.range().intersection(range).pages();
        pages.all += part;
        pages.committed += if vma.has(MappingFlags::ACCOUNT) { part } else { 0 };
    }
    Ok(pages)
}

/// The protection that `mprotect` may set for a mapping of an object, and a guard that blocks seals
/// until the mapping is inserted and itself blocks them.
pub(in crate::space) fn admit<'a, P: Platform>(
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
    let frames = source.object.state().frames();
    if !shared && frames.is_some_and(|frames| frames.memory != MemoryType::Normal) {
        // A write would copy the page, but the core can read only normal memory through the direct
        // map.
        if writes {
            return Err(Error::Invalid);
        }
        may -= MappingFlags::MAY_WRITE;
    }
    if !shared
        && may.contains(MappingFlags::MAY_WRITE)
        && let Some(frames) = frames
    {
        // As Linux's `remap_pfn_range` for a mapping that is or may become private and writable.
        let (first, count) = (source.offset >> PAGE_SHIFT, request.length.div_ceil(PAGE_SIZE));
        let (pages, platform) =
            (PageRange::from_count(first, count), source.object.memory.platform());
        frames.check_all(pages, source.object.state().size_in_pages(), || {
            platform.yield_if_due();
            interrupt::check(platform)
        })?;
    }
    if frames.is_some_and(|frames| !frames.memory.is_executable()) {
        if request.protection.contains(Protection::EXECUTE) {
            return Err(Error::AccessDenied);
        }
        may -= MappingFlags::MAY_EXECUTE;
    }
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
