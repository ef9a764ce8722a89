//! System V shared memory: segments by key and identifier (sysvipc(7), shmget(2), shmop(2),
//! shmctl(2)).
//!
//! A segment is an object with a name. [`Segments`] holds a handle of each segment until the
//! segment is destroyed and counts the segment's attachments. Like Linux, it counts one attachment
//! for each VMA that maps the segment. So `fork`, `mremap`, a split by `munmap` or `mprotect`,
//! `execve` and the end of a process all count. `IPC_RMID` destroys a segment at once if it has no
//! attachments, otherwise with its last attachment; until then the segment can be attached by its
//! identifier.
//!
//! | file | contents |
//! |---|---|
//! | `segment` | one segment, and its permissions |
//! | `attach` | [`shmat`], [`shmdt`] |
//! | `control` | [`shmctl`] |
//! | `lock` | `SHM_LOCK`, and the users' accounts of locked segments |
//! | `listing` | `/proc/sysvipc/shm` |

mod attach;
mod control;
#[cfg(feature = "procfs")]
mod listing;
mod lock;
mod segment;

use core::fmt;

use bindery::addr::{PAGE_SHIFT, PAGE_SIZE};
use bindery::sync::Mutex;
use bindery::{Accounting, Attachments, Errno, Error, Memory, Platform, SegmentId};

use super::{Outcome, raw};

pub use attach::{shmat, shmdt};
pub use control::shmctl;
#[cfg(feature = "procfs")]
pub use listing::sysvipc_shm;
pub use lock::{LockAccount, SegmentLocking};
pub use segment::{IpcUser, SegmentSlot};

use segment::{DESTROYED, PERMISSIONS, Segment};

const IPC_CREAT: u32 = 0o1000;
const IPC_EXCL: u32 = 0o2000;
const SHM_HUGETLB: u32 = 0o4000;
const SHM_NORESERVE: u32 = 0o10000;

/// The low bits of an identifier are the index of the slot; the bits above count its uses.
const INDEX_BITS: u32 = 15;
/// The maximum number of slots that an identifier can address.
const MOST_SLOTS: usize = 1 << INDEX_BITS;

/// The default limit on Linux of a segment's bytes and of all segments' pages: unlimited, but low
/// enough that sums do not wrap.
const UNLIMITED: u64 = u64::MAX - (1 << 24);

/// The time and the current process, which are recorded when a segment is created or attached.
///
/// ```
/// use bindery_linux::IpcClock;
///
/// // A unikernel has one process, and may have no clock.
/// let clock = IpcClock { now: || 0, process: || 1 };
/// assert_eq!((clock.process)(), 1);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct IpcClock {
    /// The time, in seconds since 1970.
    pub now: fn() -> i64,
    /// The number of the current process (`shm_cpid`, `shm_lpid`).
    pub process: fn() -> i32,
}

/// The permission to create a segment. One caller at a time holds this permission, so a slot that
/// the holder found free stays free.
struct Making(());

/// All segments of a machine or of an IPC namespace. The functions may be called from several CPUs
/// at once. A spin lock is held for up to one scan of all slots.
///
/// The value outlives the address spaces that map its segments. Dropping it drops the remaining
/// segments. An embedder that never drops it calls [`Segments::clear`] at shutdown.
pub struct Segments<'m, P: Platform> {
    memory: &'m Memory<P>,
    clock: IpcClock,
    /// Serializes the creation of segments: only its holder fills free slots.
    making: Mutex<P::Mutex, Making>,
    slots: Mutex<P::SpinLock, Slots<'m, P>>,
}

struct Slots<'m, P: Platform> {
    slots: &'m mut [SegmentSlot<'m, P>],
    used: u32,
    /// The pages of all segments together.
    pages: u64,
}

impl<'m, P: Platform> Slots<'m, P> {
    /// The segment with this identifier.
    fn by_id(&mut self, id: u32) -> Option<&mut Segment<'m, P>> {
        let slot = self.slots.get_mut(id as usize % MOST_SLOTS)?;
        let uses = slot.uses;
        slot.segment.as_mut().filter(|_| u32::from(uses) == id >> INDEX_BITS)
    }

    /// The segment in a slot, and its identifier.
    fn by_index(&mut self, index: usize) -> Option<(u32, &mut Segment<'m, P>)> {
        let slot = self.slots.get_mut(index)?;
        let id = slot.id(index);
        slot.segment.as_mut().map(|segment| (id, segment))
    }

    fn by_key(&mut self, key: i32) -> Option<(u32, &mut Segment<'m, P>)> {
        let has = |slot: &SegmentSlot<'m, P>| {
            slot.segment.as_ref().is_some_and(|segment| segment.key == key)
        };
        let index = self.slots.iter().position(has)?;
        self.by_index(index)
    }

    /// The highest index in use; 0 without segments.
    fn last_index(&self) -> usize {
        self.slots.iter().rposition(|slot| slot.segment.is_some()).unwrap_or(0)
    }

    /// Removes a segment. The caller drops it after releasing the lock.
    fn take(&mut self, id: u32) -> Option<Segment<'m, P>> {
        self.by_id(id)?;
        let slot = self.slots.get_mut(id as usize % MOST_SLOTS)?;
        let segment = slot.segment.take()?;
        slot.uses = slot.uses.wrapping_add(1);
        self.used -= 1;
        self.pages -= pages_of(segment.size);
        Some(segment)
    }

    /// As [`Slots::take`], if the segment was removed by `IPC_RMID` and has no attachments.
    fn take_if_over(&mut self, id: u32) -> Option<Segment<'m, P>> {
        let segment = self.by_id(id)?;
        let over = segment.mode & DESTROYED != 0 && segment.attached == 0;
        if over { self.take(id) } else { None }
    }
}

fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE)
}

impl<'m, P: Platform> Segments<'m, P> {
    /// An empty set of segments. Each of `slots` has room for one segment (Linux: `shmmni`); slots
    /// beyond 32,768 are not used.
    ///
    /// Context: any.
    pub fn new(
        memory: &'m Memory<P>,
        slots: &'m mut [SegmentSlot<'m, P>],
        clock: IpcClock,
    ) -> Self {
        let most = slots.len().min(MOST_SLOTS);
        let slots = &mut slots[..most];
        let slots = Mutex::new(Slots { slots, used: 0, pages: 0 });
        Self { memory, clock, making: Mutex::new(Making(())), slots }
    }

    /// Drops all segments, attached or not. Mapped segments stay mapped, but their attachments are
    /// no longer counted.
    ///
    /// Context: may sleep.
    pub fn clear(&self) {
        for index in 0..MOST_SLOTS {
            let taken = {
                let mut slots = self.slots.lock();
                let id = slots.by_index(index).map(|(id, _)| id);
                id.and_then(|id| slots.take(id))
            };
            drop(taken);
        }
    }

    fn get(&'m self, user: &IpcUser<'_>, key: i32, size: u64, flags: u32) -> Outcome {
        let _making = self.making.lock();
        let mut slots = self.slots.lock();
        if key != 0 {
            if let Some((id, segment)) = slots.by_key(key) {
                if flags & (IPC_CREAT | IPC_EXCL) == IPC_CREAT | IPC_EXCL {
                    return Err(Errno::EEXIST);
                }
                if segment.size < size {
                    return Err(Errno::EINVAL);
                }
                segment.check(user, flags)?;
                return Ok(id.into());
            }
            if flags & IPC_CREAT == 0 {
                return Err(Errno::ENOENT);
            }
        }
        if size == 0 || size > UNLIMITED {
            return Err(Errno::EINVAL);
        }
        let pages = pages_of(size);
        if slots.pages.checked_add(pages).is_none_or(|all| all > UNLIMITED) {
            return Err(Errno::ENOSPC);
        }
        // No pool of huge pages exists.
        if flags & SHM_HUGETLB != 0 || pages > i64::MAX as u64 >> PAGE_SHIFT {
            return Err(Errno::EINVAL);
        }
        let free = slots.slots.iter().position(|slot| slot.segment.is_none());
        let id = free.map(|index| slots.slots[index].id(index));
        drop(slots);
        let accounting =
            if flags & SHM_NORESERVE == 0 { Accounting::Whole } else { Accounting::PerPage };
        let named = SegmentId { segment: u64::from(id.unwrap_or(0)), key: key as u32 };
        let memory = self.memory.segment_memory(self, named, size, accounting);
        let object =
            memory.map_err(
                |error| {
                    if error == Error::TooLarge { Errno::EINVAL } else { Errno::ENOMEM }
                },
            )?;
        // Linux creates the memory before it looks for a free identifier, so `ENOMEM` takes
        // precedence.
        let id = id.ok_or(Errno::ENOSPC)?;
        let segment = Segment {
            object,
            key,
            size,
            mode: flags & PERMISSIONS,
            owner: (user.user, user.group),
            creator: (user.user, user.group),
            attached_at: 0,
            detached_at: 0,
            changed_at: (self.clock.now)(),
            created_by: (self.clock.process)(),
            last_process: 0,
            attached: 0,
            locked_by: None,
        };
        let mut slots = self.slots.lock();
        slots.used += 1;
        slots.pages += pages;
        slots.slots[id as usize % MOST_SLOTS].segment = Some(segment);
        Ok(id.into())
    }

    /// Calls `change` on a segment. Then destroys the segment if it is marked for destruction and
    /// has no attachments left.
    fn change<R>(
        &self,
        id: u32,
        change: impl FnOnce(&mut Segment<'m, P>) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let mut slots = self.slots.lock();
        let result = change(slots.by_id(id).ok_or(Errno::EINVAL)?);
        let over = slots.take_if_over(id);
        drop(slots);
        // Frees the memory without holding locks.
        drop(over);
        result
    }
}

impl<P: Platform> Attachments for Segments<'_, P> {
    fn attached(&self, segment: u64) {
        let (now, process) = ((self.clock.now)(), (self.clock.process)());
        if let Some(segment) = self.slots.lock().by_id(segment as u32) {
            segment.attached += 1;
            segment.attached_at = now;
            segment.last_process = process;
        }
    }

    fn detached(&self, segment: u64) {
        let (now, process) = ((self.clock.now)(), (self.clock.process)());
        // `Segments::clear` may have dropped the segment.
        let _ = self.change(segment as u32, |segment| {
            segment.attached = segment.attached.saturating_sub(1);
            segment.detached_at = now;
            segment.last_process = process;
            Ok(())
        });
    }
}

impl<P: Platform> Drop for Segments<'_, P> {
    fn drop(&mut self) {
        self.clear();
    }
}

impl<P: Platform> fmt::Debug for Segments<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots.lock();
        f.debug_struct("Segments").field("used", &slots.used).field("pages", &slots.pages).finish()
    }
}

/// `shmget(2)`. Takes raw arguments and returns the identifier or `-errno`.
///
/// Context: may sleep. Complexity: linear in the slots.
pub fn shmget<'m, P: Platform>(
    segments: &'m Segments<'m, P>,
    user: &IpcUser<'_>,
    [key, size, flags]: [u64; 3],
) -> i64 {
    raw(segments.get(user, key as i32, size, flags as u32))
}
