//! `shmctl`.

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Errno, Platform};

use super::lock::{SegmentLocking, lock, unlock};
use super::segment::{DESTROYED, PERMISSIONS, Segment};
use super::{INDEX_BITS, IpcUser, MOST_SLOTS, Outcome, Segments, UNLIMITED, raw};

const IPC_RMID: i32 = 0;
const IPC_SET: i32 = 1;
const IPC_STAT: i32 = 2;
const IPC_INFO: i32 = 3;
const SHM_LOCK: i32 = 11;
const SHM_UNLOCK: i32 = 12;
const SHM_STAT: i32 = 13;
const SHM_INFO: i32 = 14;
const SHM_STAT_ANY: i32 = 15;

const READ_BY_ALL: u32 = 0o444;

/// Words of `struct shmid_ds`.
const STATUS_WORDS: usize = 14;

/// `shmctl(2)`. Takes raw arguments (identifier, command, buffer) and returns the result or
/// `-errno`. `space` is the caller's memory, which holds the buffer.
///
/// A locked segment (`SHM_LOCK`) is not swapped out. Pages already in swap stay there until a
/// program touches them. The segment is charged to the account of the user that locked it.
/// `SHM_LOCK` fails with `EPERM` if the limit of `locking` is 0, and with `ENOMEM` if the account
/// would exceed this limit.
///
/// Context: may sleep. Complexity: linear in the slots.
pub fn shmctl<'m, P: Platform>(
    segments: &Segments<'m, P>,
    space: &AddressSpace<'_, P>,
    user: &IpcUser<'_>,
    locking: &SegmentLocking<'m>,
    [id, command, buffer]: [u64; 3],
) -> i64 {
    let Ok(id) = u32::try_from(id as i32) else { return raw(Err(Errno::EINVAL)) };
    raw(match command as i32 {
        SHM_LOCK => lock(segments, user, locking, id),
        SHM_UNLOCK => unlock(segments, user, locking, id),
        command => control(segments, space, user, id, command, VirtAddr(buffer)),
    })
}

fn control<P: Platform>(
    segments: &Segments<'_, P>,
    space: &AddressSpace<'_, P>,
    user: &IpcUser<'_>,
    id: u32,
    command: i32,
    buffer: VirtAddr,
) -> Outcome {
    let put = |words: &[u64]| words_to_user(space, buffer, words);
    match command {
        IPC_INFO => {
            let (most, last) = {
                let slots = segments.slots.lock();
                (slots.slots.len() as u64, slots.last_index())
            };
            put(&[UNLIMITED, 1, most, most, UNLIMITED, 0, 0, 0, 0])?;
            Ok(last as u64)
        }
        SHM_INFO => {
            let usage = Usage::of(segments);
            put(&[usage.segments, usage.pages, usage.resident, usage.swapped, 0, 0])?;
            Ok(usage.last_index)
        }
        SHM_STAT | SHM_STAT_ANY => {
            let (id, words) = {
                let mut slots = segments.slots.lock();
                let found = slots.by_index(id as usize % MOST_SLOTS).ok_or(Errno::EINVAL)?;
                if command == SHM_STAT {
                    found.1.check(user, READ_BY_ALL)?;
                }
                (found.0, status(found.0, found.1))
            };
            put(&words)?;
            Ok(id.into())
        }
        IPC_STAT => {
            let words = segments.change(id, |segment| {
                segment.check(user, READ_BY_ALL)?;
                Ok(status(id, segment))
            })?;
            put(&words)?;
            Ok(0)
        }
        IPC_SET => {
            let words = words_of_user(space, buffer)?;
            set_owner_and_mode(segments, user, id, &words)
        }
        IPC_RMID => segments.change(id, |segment| {
            segment.check_owner(user)?;
            segment.mode |= DESTROYED;
            // `shmget` must no longer find the segment.
            segment.key = 0;
            Ok(0)
        }),
        _ => Err(Errno::EINVAL),
    }
}

/// The memory of all segments together.
struct Usage {
    segments: u64,
    pages: u64,
    resident: u64,
    swapped: u64,
    /// The highest index that a segment has.
    last_index: u64,
}

impl Usage {
    fn of<P: Platform>(segments: &Segments<'_, P>) -> Self {
        let slots = segments.slots.lock();
        let mut usage = Self {
            segments: slots.used.into(),
            pages: slots.pages,
            resident: 0,
            swapped: 0,
            last_index: slots.last_index() as u64,
        };
        for segment in slots.slots.iter().filter_map(|slot| slot.segment.as_ref()) {
            usage.resident += segment.object.resident_pages();
            usage.swapped += segment.object.swapped_pages();
        }
        usage
    }
}

/// `IPC_SET`: sets owner and permissions from a `struct shmid_ds`, passed as words.
fn set_owner_and_mode<P: Platform>(
    segments: &Segments<'_, P>,
    user: &IpcUser<'_>,
    id: u32,
    words: &[u64; STATUS_WORDS],
) -> Outcome {
    let owner = ((words[0] >> 32) as u32, words[1] as u32);
    let mode = (words[2] >> 32) as u32;
    let now = (segments.clock.now)();
    segments.change(id, |segment| {
        segment.check_owner(user)?;
        if owner.0 == u32::MAX || owner.1 == u32::MAX {
            return Err(Errno::EINVAL);
        }
        segment.owner = owner;
        segment.mode = segment.mode & !PERMISSIONS | mode & PERMISSIONS;
        segment.changed_at = now;
        Ok(0)
    })
}

/// `struct shmid_ds`, in words.
fn status<P: Platform>(id: u32, segment: &Segment<'_, P>) -> [u64; STATUS_WORDS] {
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    [
        pair(segment.key as u32, segment.owner.0),
        pair(segment.owner.1, segment.creator.0),
        pair(segment.creator.1, segment.mode),
        (id >> INDEX_BITS).into(),
        0,
        0,
        segment.size,
        segment.attached_at as u64,
        segment.detached_at as u64,
        segment.changed_at as u64,
        pair(segment.created_by as u32, segment.last_process as u32),
        segment.attached,
        0,
        0,
    ]
}

fn words_to_user<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    words: &[u64],
) -> Result<(), Errno> {
    let mut bytes = [0; STATUS_WORDS * 8];
    let bytes = &mut bytes[..words.len() * 8];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    space.write_user(at, bytes).map_err(|_| Errno::EFAULT)
}

fn words_of_user<P: Platform, const N: usize>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
) -> Result<[u64; N], Errno> {
    let mut bytes = [[0_u8; 8]; N];
    space.read_user(at, bytes.as_flattened_mut()).map_err(|_| Errno::EFAULT)?;
    Ok(bytes.map(u64::from_le_bytes))
}
