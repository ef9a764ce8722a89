//! `mmap`, `munmap`, `mremap`, `remap_file_pages`, `mseal`.

use linux_raw_sys::general as raw;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{
    AddressSpace, Errno, FileAccess, MapFlags, MapObject, MapRequest, Operation, Place, Platform,
    Protection, Remap, Sharing,
};

use super::{Begun, Events, OpenFile, Outcome, Process, errno};

/// The kinds of mapping, in the low bits of the flags.
const MAP_TYPE: u32 = 0xf;

/// The flags that programs may rely on being obeyed or ignored; a mapping with
/// `MAP_SHARED_VALIDATE` refuses all others.
const LEGACY_FLAGS: u32 = MAP_TYPE & raw::MAP_SHARED_VALIDATE
    | raw::MAP_FIXED
    | raw::MAP_ANONYMOUS
    | raw::MAP_DENYWRITE
    | raw::MAP_EXECUTABLE
    | raw::MAP_UNINITIALIZED
    | raw::MAP_GROWSDOWN
    | raw::MAP_LOCKED
    | raw::MAP_NORESERVE
    | raw::MAP_POPULATE
    | raw::MAP_NONBLOCK
    | raw::MAP_STACK
    | raw::MAP_HUGETLB
    | MAP_32BIT
    | MAP_ABOVE4G
    | raw::MAP_HUGE_2MB
    | raw::MAP_HUGE_1GB;

/// Only x86-64 defines these; other architectures ignore them.
const MAP_32BIT: u32 = 0x40;
const MAP_ABOVE4G: u32 = 0x80;

/// The content of a new mapping.
enum FileSource<'m, P: Platform> {
    Anonymous,
    /// `/dev/zero`.
    Zeroes(FileAccess),
    File(OpenFile<'m, P>),
}

pub(super) fn protection(bits: u64) -> Protection {
    Protection::from_bits_truncate(bits as u8)
}

pub(super) fn mmap<'m, P: Platform>(
    process: &impl Process<'m, P>,
    [addr, length, bits, flags, descriptor, offset]: [u64; 6],
    events: &mut Events<'m, P>,
) -> Begun {
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let flags = flags as u32;
    let has = |flag: u32| flags & flag != 0;
    let descriptor = descriptor as i32;
    let source = if has(raw::MAP_ANONYMOUS) {
        FileSource::Anonymous
    } else if let Some(access) = process.zeroes(descriptor) {
        FileSource::Zeroes(access)
    } else {
        FileSource::File(process.file(descriptor).ok_or(Errno::EBADF)?)
    };
    let is_file = !matches!(source, FileSource::Anonymous);
    if has(raw::MAP_HUGETLB) {
        // No pool of huge pages exists.
        return Err(Errno::EINVAL);
    }
    let place = if has(raw::MAP_FIXED_NOREPLACE) {
        Place::FixedNoReplace(VirtAddr(addr))
    } else if has(raw::MAP_FIXED) {
        Place::Fixed(VirtAddr(addr))
    } else {
        Place::Near(VirtAddr(addr))
    };
    let mut asked = MapFlags::empty();
    asked.set(MapFlags::LOCKED, has(raw::MAP_LOCKED));
    asked.set(MapFlags::NO_RESERVE, has(raw::MAP_NORESERVE));
    asked.set(MapFlags::GROWS_DOWN, has(raw::MAP_GROWSDOWN));
    asked.set(MapFlags::STACK, has(raw::MAP_STACK));
    let populates = flags & (raw::MAP_POPULATE | raw::MAP_NONBLOCK) == raw::MAP_POPULATE;
    asked.set(MapFlags::POPULATE, populates);
    let mut request = MapRequest {
        length,
        protection: protection(bits),
        place,
        sharing: Sharing::Private,
        flags: asked,
    };
    let space = process.space();
    let kind = flags & MAP_TYPE;
    match kind {
        raw::MAP_PRIVATE => {}
        raw::MAP_SHARED => request.sharing = Sharing::Shared,
        raw::MAP_SHARED_VALIDATE if is_file && flags & !LEGACY_FLAGS != 0 => {
            // Linux searches for a place first, so errors of the place take precedence.
            space.check_place(&request).map_err(errno(Operation::Mmap))?;
            let beyond = offset.saturating_add(length) > i64::MAX as u64;
            return Err(if beyond { Errno::EOVERFLOW } else { Errno::EOPNOTSUPP });
        }
        raw::MAP_SHARED_VALIDATE if is_file => request.sharing = Sharing::Shared,
        raw::MAP_DROPPABLE if !is_file => request.flags |= MapFlags::DROPPABLE,
        _ => {
            // Errors of the place take precedence, as above.
            space.check_place(&request).map_err(errno(Operation::Mmap))?;
            let beyond = offset.saturating_add(length) > i64::MAX as u64;
            return Err(if is_file && beyond { Errno::EOVERFLOW } else { Errno::EINVAL });
        }
    }
    let (mapped, caused) = match &source {
        FileSource::Anonymous => space.begin_mmap(&request),
        FileSource::Zeroes(access) => space.begin_mmap_zeroes(&request, offset, *access),
        FileSource::File(file) => {
            let source = MapObject { object: &file.object, offset, access: file.access };
            space.begin_mmap_object(&request, &source)
        }
    };
    events.keep(caused);
    mapped.map(|(at, populate)| (at.0, populate)).map_err(errno(Operation::Mmap))
}

pub(super) fn munmap<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    addr: u64,
    length: u64,
    events: &mut Events<'m, P>,
) -> Outcome {
    let (unmapped, caused) = space.begin_munmap(VirtAddr(addr), length);
    events.keep(caused);
    unmapped.map(|()| 0).map_err(errno(Operation::Munmap))
}

pub(super) fn mremap<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    [old, old_length, length, flags, target, _]: [u64; 6],
    events: &mut Events<'m, P>,
) -> Begun {
    let [may_move, fixed, stays] =
        [raw::MREMAP_MAYMOVE, raw::MREMAP_FIXED, raw::MREMAP_DONTUNMAP].map(u64::from);
    if flags & !(may_move | fixed | stays) != 0 {
        return Err(Errno::EINVAL);
    }
    let target = VirtAddr(target);
    let remap = match (flags & may_move != 0, flags & fixed != 0, flags & stays != 0) {
        (false, false, false) => Remap::InPlace,
        (true, false, false) => Remap::MayMove,
        (true, true, false) => Remap::To(target),
        (true, false, true) => Remap::Leave(target),
        (true, true, true) => Remap::LeaveTo(target),
        // Linux performs other checks before this one, but they return the same errno.
        (false, ..) => return Err(Errno::EINVAL),
    };
    let (moved, caused) = space.begin_mremap(VirtAddr(old), old_length, length, remap);
    events.keep(caused);
    moved.map(|(at, populate)| (at.0, populate)).map_err(errno(Operation::Mremap))
}

/// Only `MAP_NONBLOCK` has an effect; without this flag, the call populates the pages.
pub(super) fn remap_file_pages<P: Platform>(
    space: &AddressSpace<'_, P>,
    [addr, length, protection, page, flags, _]: [u64; 6],
) -> Begun {
    if protection != 0 {
        return Err(Errno::EINVAL);
    }
    let mut asked = MapFlags::empty();
    asked.set(MapFlags::POPULATE, flags & u64::from(raw::MAP_NONBLOCK) == 0);
    let begun = space.begin_remap_file_pages(VirtAddr(addr), length, page, asked);
    begun.map(|populate| (0, populate)).map_err(errno(Operation::Mmap))
}

pub(super) fn mseal<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: u64,
    length: u64,
    flags: u64,
) -> Outcome {
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    space.mseal(VirtAddr(addr), length).map(|()| 0).map_err(errno(Operation::Mseal))
}
