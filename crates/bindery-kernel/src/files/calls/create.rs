//! New descriptors without a path: pipes, sockets, event counters, memfds, pidfds.

use alloc::sync::{Arc, Weak};

use bindery_linux as linux;
use linux_raw_sys::general as nr;
use linux_raw_sys::general::{EFD_SEMAPHORE, MFD_CLOEXEC, O_CLOEXEC, O_NONBLOCK, O_RDWR};
use linux_raw_sys::net::{AF_UNIX, SOCK_SEQPACKET, SOCK_STREAM};

use crate::errno::{Errno, Outcome};
use crate::memory::memory;
use crate::process::Process;
use crate::{heap, user};

use super::super::attributes::Patience;
use super::super::descriptor::at_exec;
use super::super::descriptor::{AtExec, Description, Files};
use super::super::event::{EventCounter, ProcessHandle, Reading};
use super::super::huge_pages;
use super::super::memory::Regular;
use super::super::node::Place;
use super::super::pipe::both_ends;
use super::super::proc;
use super::super::socket::{Boundaries, pair};
use super::{get, insert};

/// `pipe2(2)`.
pub(super) fn pipe(at: u64, flags: u32) -> Outcome {
    if flags & !(O_CLOEXEC | O_NONBLOCK | nr::O_DIRECT) != 0 {
        return Err(Errno::EINVAL);
    }
    insert_both(both_ends(flags & O_NONBLOCK)?, at_exec(flags), at)
}

/// `socketpair(2)`.
pub(super) fn socket_pair(family: u32, kind: u32, protocol: u32, at: u64) -> Outcome {
    if family != AF_UNIX {
        return Err(Errno::EAFNOSUPPORT);
    }
    // The flags in a socket's type have the values of `open`.
    const TYPE: u32 = 0xf;
    let flags = kind & !TYPE;
    if flags & !(O_CLOEXEC | O_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    let boundaries = match kind & TYPE {
        SOCK_STREAM => Boundaries::Lost,
        SOCK_SEQPACKET => Boundaries::Kept,
        _ => return Err(Errno::ESOCKTNOSUPPORT),
    };
    if protocol != 0 && protocol != AF_UNIX {
        return Err(Errno::EPROTONOSUPPORT);
    }
    insert_both(pair(boundaries, flags & O_NONBLOCK)?, at_exec(flags), at)
}

/// Installs two descriptors in the running process and writes their numbers to `at`.
fn insert_both(both: [Arc<Description>; 2], at_exec: AtExec, at: u64) -> Outcome {
    let files = Files::current();
    let [first, second] = &both;
    let one = files.insert(first.clone(), at_exec)?;
    let other = files.insert(second.clone(), at_exec).and_then(|other| {
        user::write(at, &[one, other]).inspect_err(|_| files.withdraw(other, second))
    });
    other.inspect_err(|_| files.withdraw(one, first)).map(|()| 0)
}

/// `eventfd2(2)`.
pub(super) fn event_counter(count: u32, flags: u32) -> Outcome {
    if flags & !(O_CLOEXEC | O_NONBLOCK | EFD_SEMAPHORE) != 0 {
        return Err(Errno::EINVAL);
    }
    let reading = if flags & EFD_SEMAPHORE != 0 { Reading::ByOne } else { Reading::Whole };
    insert(EventCounter::describe(count, reading, flags & O_NONBLOCK)?, at_exec(flags))
}

/// The maximum length of a memfd's name (see memfd_create(2)).
const MEMFD_NAME_MAX: usize = 249;

/// `memfd_create(2)`.
pub(super) fn memfd(name: u64, flags: u32) -> Outcome {
    let at_exec = if flags & MFD_CLOEXEC != 0 { AtExec::Closed } else { AtExec::Kept };
    let huge = flags & nr::MFD_HUGETLB != 0;
    let of_pool = nr::MFD_HUGETLB | nr::MFD_HUGE_MASK << nr::MFD_HUGE_SHIFT;
    let object = linux::memfd_create(memory(), if huge { flags & !of_pool } else { flags })?;
    let name = user::text(name, MEMFD_NAME_MAX + 1);
    let name =
        name.map_err(|errno| if errno == Errno::ENAMETOOLONG { Errno::EINVAL } else { errno })?;
    let path = [&b"/memfd:"[..], &name, b" (deleted)"].concat();
    if huge {
        drop(object);
        heap::room(128)?;
        let file = huge_pages::file(flags >> nr::MFD_HUGE_SHIFT & nr::MFD_HUGE_MASK)?;
        let place = Place::alone(file.clone(), &path);
        return insert(Description::new(place, file, O_RDWR)?, at_exec);
    }
    let executable = flags & nr::MFD_NOEXEC_SEAL == 0;
    let file = Regular::of(object, if executable { 0o777 } else { 0o666 })?;
    let place = Place::alone(file.clone(), &path);
    proc::remember(&place);
    insert(Description::new(place, file, O_RDWR)?, at_exec)
}

/// `memfd_secret(2)`.
pub(super) fn secret(flags: u32) -> Outcome {
    let object = linux::memfd_secret(memory(), flags)?;
    let file = Regular::of(object, 0o600)?;
    let place = Place::alone(file.clone(), b"/secretmem (deleted)");
    insert(Description::new(place, file, O_RDWR)?, at_exec(flags))
}

/// A descriptor for a process (`pidfd_open`), and its description.
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub fn insert_process(
    process: &Arc<Process>,
    flags: u32,
) -> Result<(i32, Arc<Description>), Errno> {
    let description = ProcessHandle::describe(process, flags & O_NONBLOCK)?;
    let descriptor = Files::current().insert(description.clone(), AtExec::Closed)?;
    Ok((descriptor, description))
}

/// The process that a descriptor names, for [`find_behind`](crate::process::find_behind).
///
/// # Errors
/// `EBADF`.
pub fn process_behind(descriptor: i32) -> Result<Weak<Process>, Errno> {
    process_to_wait_for(descriptor).map(|(process, _)| process)
}

/// As [`process_behind`], and whether `waitid(2)` waits for that process.
///
/// # Errors
/// `EBADF`.
pub fn process_to_wait_for(descriptor: i32) -> Result<(Weak<Process>, Patience), Errno> {
    let description = get(descriptor)?;
    let process = description.node.process().cloned().ok_or(Errno::EBADF)?;
    Ok((process, description.patience()))
}
