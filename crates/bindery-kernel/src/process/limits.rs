//! Resource limits (`getrlimit`) and usage (`getrusage`, `times`).

use core::ops::Add;
use core::sync::atomic::Ordering;

use bindery::{Limits as SpaceLimits, Locking};
use linux_raw_sys::general::{
    RLIMIT_AS, RLIMIT_CORE, RLIMIT_DATA, RLIMIT_FSIZE, RLIMIT_MEMLOCK, RLIMIT_MSGQUEUE,
    RLIMIT_NICE, RLIMIT_NOFILE, RLIMIT_NPROC, RLIMIT_RTPRIO, RLIMIT_SIGPENDING, RLIMIT_STACK,
    RUSAGE_CHILDREN, RUSAGE_SELF, RUSAGE_THREAD, SIGXFSZ,
};

use crate::errno::{Errno, Outcome};
use crate::memory::Space;
use crate::{time, user};

use super::credentials::{Capability, Ids, credentials};
use super::{Process, find, scheduler, signal, table};

/// A limit, in the unit of its resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// The limit in force; `u64::MAX` for none.
    pub current: u64,
    /// The maximum of `current`.
    pub maximum: u64,
}

/// The limits of a process.
#[derive(Clone)]
pub(super) struct Limits([Limit; COUNT]);

const COUNT: usize = 16;
const NONE: u64 = u64::MAX;

/// The maximum number of descriptors of a process.
const DESCRIPTORS: u64 = 4096;

impl Default for Limits {
    /// Linux's limits for the first process, without the limits of features that this kernel lacks.
    fn default() -> Self {
        let mut limits = Self([Limit { current: NONE, maximum: NONE }; COUNT]);
        let both = |value| Limit { current: value, maximum: value };
        for (resource, limit) in [
            (RLIMIT_STACK, Limit { current: 8 << 20, maximum: NONE }),
            (RLIMIT_NOFILE, Limit { current: 1024, maximum: DESCRIPTORS }),
            (RLIMIT_CORE, Limit { current: 0, maximum: NONE }),
            (RLIMIT_MEMLOCK, both(8 << 20)),
            (RLIMIT_SIGPENDING, both(1024)),
            (RLIMIT_NPROC, both(crate::options::PROCESSES.load(Ordering::Relaxed) as u64)),
            (RLIMIT_MSGQUEUE, both(819_200)),
            (RLIMIT_NICE, both(0)),
            (RLIMIT_RTPRIO, both(0)),
        ] {
            limits.0[resource as usize] = limit;
        }
        limits
    }
}

impl Limits {
    /// A limit; `None` if the resource is unknown.
    pub(super) fn get(&self, resource: u32) -> Limit {
        self.0.get(resource as usize).copied().unwrap_or(Limit { current: NONE, maximum: NONE })
    }

    /// Passes the limits on memory to the core.
    pub(super) fn apply(&self, space: &Space, locks_without_limit: bool) {
        space.set_limits(&SpaceLimits {
            address_space: self.get(RLIMIT_AS).current,
            data: self.get(RLIMIT_DATA).current,
            locked: self.get(RLIMIT_MEMLOCK).current,
            pinned: self.get(RLIMIT_MEMLOCK).current,
            stack: self.get(RLIMIT_STACK).current,
            locking: if locks_without_limit { Locking::Privileged } else { Locking::Limited },
        });
    }
}

/// The maximum file size for the running process (`RLIMIT_FSIZE`), in bytes.
pub fn file_size_limit() -> u64 {
    scheduler::current().process.limit(RLIMIT_FSIZE).current
}

/// The maximum size of the running process's locked memory (`RLIMIT_MEMLOCK`), in bytes.
pub fn locked_memory_limit() -> u64 {
    scheduler::current().process.limit(RLIMIT_MEMLOCK).current
}

/// The maximum number of the running process's descriptors (`RLIMIT_NOFILE`).
pub fn descriptor_limit() -> u64 {
    scheduler::current().process.limit(RLIMIT_NOFILE).current.min(DESCRIPTORS)
}

/// The error of a write beyond the file size limit. The running thread gets `SIGXFSZ` and `EFBIG`.
pub fn file_is_too_large() -> Errno {
    signal::send_to_this_thread(SIGXFSZ);
    Errno::EFBIG
}

/// `prlimit64(2)`: a resource and two addresses.
pub(super) fn prlimit(id: u64, resource: u64, new: u64, old: u64) -> Outcome {
    // Copied first, because during the copy the process may acquire credentials that the caller has
    // no rights to.
    let new = if new == 0 { None } else { Some(user::read::<[u64; 2]>(new)?) };
    let process = by_id(id)?;
    check_peer(&process)?;
    let index =
        usize::try_from(resource).ok().filter(|index| *index < COUNT).ok_or(Errno::EINVAL)?;
    let was = process.limits.lock().0[index];
    if let Some([current, maximum]) = new {
        if current > maximum || index == RLIMIT_NOFILE as usize && maximum > DESCRIPTORS {
            return Err(if current > maximum { Errno::EINVAL } else { Errno::EPERM });
        }
        if maximum > was.maximum {
            credentials().demand(Capability::Resource)?;
        }
        process.limits.lock().0[index] = Limit { current, maximum };
        process.apply_limits();
    }
    if old != 0 {
        user::write(old, &[was.current, was.maximum])?;
    }
    Ok(0)
}

/// Checks that the running thread may read and set the limits of another process.
fn check_peer(process: &Process) -> Result<(), Errno> {
    let (own, other) = (credentials(), process.credentials());
    let same = |own: u32, ids: Ids| [ids.real, ids.effective, ids.saved] == [own; 3];
    if scheduler::is_running(process)
        || same(own.user.real, other.user) && same(own.group.real, other.group)
    {
        return Ok(());
    }
    own.demand(Capability::Resource)
}

fn by_id(id: u64) -> Result<alloc::sync::Arc<Process>, Errno> {
    match id as u32 {
        0 => Ok(scheduler::current().process.clone()),
        id => {
            find(id).or_else(|| Some(table::find_thread(id)?.process.clone())).ok_or(Errno::ESRCH)
        }
    }
}

/// Faults of a thread, or of several.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// Faults without a read of content (minor).
    pub minor: u64,
    /// Faults with a read of content (major).
    pub major: u64,
}

impl Add for Faults {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { minor: self.minor + other.minor, major: self.major + other.major }
    }
}

/// `struct rusage` with this time and peak of resident pages. All time counts as user time.
pub(super) fn usage(nanoseconds: u64, peak: u64, faults: Faults) -> [u64; 18] {
    let mut usage = [0; 18];
    usage[0] = nanoseconds / time::SECOND;
    usage[1] = nanoseconds % time::SECOND / 1000;
    // The peak in kilobytes.
    usage[4] = peak * 4;
    usage[8] = faults.minor;
    usage[9] = faults.major;
    usage
}

/// `getrusage(2)`.
pub(super) fn getrusage(who: u64, at: u64) -> Outcome {
    let thread = scheduler::current();
    let process = &thread.process;
    let used = match who as i32 {
        who if who == RUSAGE_CHILDREN => {
            usage(process.children_time(), process.children_peak(), process.children_faults())
        }
        who if who == RUSAGE_SELF as i32 => {
            usage(process.processor_time(), process.peak(), process.faults())
        }
        who if who == RUSAGE_THREAD as i32 => {
            usage(thread.processor_time(), process.peak(), thread.faults())
        }
        _ => return Err(Errno::EINVAL),
    };
    user::write(at, &used)?;
    Ok(0)
}

/// `times(2)`, in hundredths of a second.
pub(super) fn times(at: u64) -> Outcome {
    const TICK: u64 = time::SECOND / 100;
    let process = &scheduler::current().process;
    if at != 0 {
        let times = [process.processor_time() / TICK, 0, process.children_time() / TICK, 0];
        user::write(at, &times)?;
    }
    Ok(time::now() / TICK)
}
