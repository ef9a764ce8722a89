//! `shmat` and `shmdt`.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{
    AddressSpace, Errno, Error, FileAccess, MapObject, MapRequest, Object, Operation, Place,
    Platform, Protection, Sharing,
};

use super::{IpcUser, Outcome, Segments, raw};

const SHM_RDONLY: u32 = 0o10000;
const SHM_RND: u32 = 0o20000;
const SHM_REMAP: u32 = 0o40000;
const SHM_EXEC: u32 = 0o100_000;

const READ_BY_ALL: u32 = 0o444;
const WRITE_BY_ALL: u32 = 0o222;
const EXECUTE_BY_ALL: u32 = 0o111;

/// `shmat(2)`. Takes raw arguments (identifier, address, flags) and returns the address or
/// `-errno`. `space` is the caller's memory.
///
/// Context: may sleep. Complexity: as [`AddressSpace::mmap_object`].
pub fn shmat<'m, P: Platform>(
    segments: &'m Segments<'m, P>,
    space: &AddressSpace<'m, P>,
    user: &IpcUser<'_>,
    [id, at, flags]: [u64; 3],
) -> i64 {
    raw(attach(segments, space, user, id as i32, at, flags as u32))
}

/// `shmdt(2)`. Returns 0 or `-errno`.
///
/// Context: may sleep. Complexity: linear in the mappings after the address, and as
/// [`AddressSpace::munmap`].
pub fn shmdt<P: Platform>(space: &AddressSpace<'_, P>, at: u64) -> i64 {
    let detached = space.detach_segment(VirtAddr(at));
    raw(detached.map(|()| 0).map_err(|error| error.errno(Operation::Munmap)))
}

fn attach<'m, P: Platform>(
    segments: &'m Segments<'m, P>,
    space: &AddressSpace<'m, P>,
    user: &IpcUser<'_>,
    id: i32,
    at: u64,
    flags: u32,
) -> Outcome {
    let id = u32::try_from(id).map_err(|_| Errno::EINVAL)?;
    let replaces = flags & SHM_REMAP != 0;
    let rounded = if flags & SHM_RND != 0 { at & !(PAGE_SIZE - 1) } else { at };
    if !rounded.is_multiple_of(PAGE_SIZE) || rounded == 0 && replaces {
        return Err(Errno::EINVAL);
    }
    // Only a null argument means any address; an address rounded down to 0 does not.
    let place = match VirtAddr(rounded) {
        _ if at == 0 => Place::Anywhere,
        at if replaces => Place::Fixed(at),
        at => Place::FixedNoReplace(at),
    };
    let (mut protection, mut access) = (Protection::READ, FileAccess::READ);
    let mut wanted = READ_BY_ALL;
    if flags & SHM_RDONLY == 0 {
        protection |= Protection::WRITE;
        access |= FileAccess::WRITE;
        wanted |= WRITE_BY_ALL;
    }
    if flags & SHM_EXEC != 0 {
        protection |= Protection::EXECUTE;
        wanted |= EXECUTE_BY_ALL;
    }
    let attaching = Attaching::begin(segments, id, user, wanted)?;
    if at != 0 && !replaces && rounded.checked_add(attaching.size).is_none() {
        return Err(Errno::EINVAL);
    }
    let request = MapRequest {
        length: attaching.size,
        protection,
        place,
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let source = MapObject { object: &attaching.object, offset: 0, access };
    let mapped = space.mmap_object(&request, &source);
    mapped.map(|at| at.0).map_err(|error| {
        let taken = matches!(error, Error::Exists(_));
        if taken { Errno::EINVAL } else { error.errno(Operation::Mmap) }
    })
}

/// A temporary attachment during the mapping call, so that the segment is not destroyed before it
/// is mapped.
struct Attaching<'m, P: Platform> {
    segments: &'m Segments<'m, P>,
    id: u32,
    object: Object<'m, P>,
    /// The size in bytes.
    size: u64,
}

impl<'m, P: Platform> Attaching<'m, P> {
    fn begin(
        segments: &'m Segments<'m, P>,
        id: u32,
        user: &IpcUser<'_>,
        wanted: u32,
    ) -> Result<Self, Errno> {
        segments.change(id, |segment| {
            segment.check(user, wanted)?;
            segment.attached += 1;
            Ok(Self { segments, id, object: segment.object.clone(), size: segment.size })
        })
    }
}

impl<P: Platform> Drop for Attaching<'_, P> {
    fn drop(&mut self) {
        // `Segments::clear` may have dropped the segment.
        let _ = self.segments.change(self.id, |segment| {
            segment.attached = segment.attached.saturating_sub(1);
            Ok(())
        });
    }
}
