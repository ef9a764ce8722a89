//! Waits for several descriptors: `poll`, `select`.
//!
//! Code that makes a descriptor readable or writable calls [`changed`]. That wakes every poller,
//! and each checks its descriptors again. Some of these checks are unnecessary, but there are no
//! lists to maintain.

use alloc::sync::Arc;
use alloc::vec::Vec;

use linux_raw_sys::general::{
    POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDNORM, POLLWRNORM, pollfd,
};

use crate::errno::{Errno, Outcome};
use crate::process::{self, Interrupted, WaitQueue};
use crate::{heap, time, user};

use super::descriptor::{Description, Files, HARD_LIMIT};
use super::node::{may_read, may_write};

static CHANGED: WaitQueue = WaitQueue::new();

/// Wakes all pollers, because a descriptor may have become ready.
pub fn changed() {
    CHANGED.wake_all();
}

/// Sleeps until `ready` returns a value. Calls `ready` after every [`changed`].
///
/// # Errors
/// As [`WaitQueue::wait`].
pub fn wait<T>(deadline: Option<u64>, ready: impl FnMut() -> Option<T>) -> Result<T, Interrupted> {
    CHANGED.wait(deadline, ready)
}

/// The errno of a wait that a signal has interrupted.
fn interrupted(deadline: Option<u64>) -> Errno {
    deadline.map_or(Errno::RESTART_WITHOUT_HANDLER, process::interrupted_until)
}

/// The operations on a description that would not wait.
pub fn ready(description: &Description) -> u32 {
    let flags = description.flags();
    if let Some(ready) = description.node.ready_as_opened(flags) {
        return ready;
    }
    let mut ready = description.node.ready();
    if ready & POLLHUP != 0 && description.is_early_reader() {
        ready &= !POLLHUP;
    }
    if !may_read(flags) {
        ready &= !(POLLIN | POLLHUP);
    }
    if !may_write(flags) {
        ready &= !(POLLOUT | POLLERR);
    }
    let also = |bit: u32, other: u32| if ready & bit != 0 { other } else { 0 };
    ready | also(POLLIN, POLLRDNORM) | also(POLLOUT, POLLWRNORM)
}

/// `poll(2)` until `deadline`.
pub fn poll(at: u64, count: u64, deadline: Option<u64>) -> Outcome {
    if count > HARD_LIMIT {
        return Err(Errno::EINVAL);
    }
    heap::room(count as usize * 32)?;
    let size = size_of::<pollfd>() as u64;
    let files = Files::current();
    let mut asked: Vec<pollfd> = Vec::with_capacity(count as usize);
    let mut descriptions: Vec<Option<Arc<Description>>> = Vec::with_capacity(count as usize);
    for index in 0..count {
        let one: pollfd = user::read(at.wrapping_add(index * size))?;
        descriptions.push(files.get(one.fd).ok());
        asked.push(one);
    }
    let look = |asked: &mut [pollfd]| {
        let mut found = 0;
        for (one, description) in asked.iter_mut().zip(&descriptions) {
            let wanted = u32::from(one.events as u16) | POLLERR | POLLHUP;
            let ready = match description {
                _ if one.fd < 0 => 0,
                None => POLLNVAL,
                Some(description) => ready(description) & wanted,
            };
            one.revents = ready as i16;
            found += u64::from(ready != 0);
        }
        found
    };
    let found = match wait(deadline, || Some(look(&mut asked)).filter(|found| *found > 0)) {
        Ok(found) => found,
        Err(Interrupted::Deadline) => 0,
        Err(Interrupted::Signal) => return Err(interrupted(deadline)),
    };
    for (index, one) in asked.iter().enumerate() {
        user::write(at.wrapping_add(index as u64 * size), one)?;
    }
    Ok(found)
}

/// The bits of `poll(2)` that each of `select(2)`'s three sets asks for.
const SETS: [u32; 3] = [POLLIN | POLLHUP | POLLERR, POLLOUT | POLLERR, POLLPRI];

/// `select(2)` until `deadline`.
pub fn select(count: u64, sets: [u64; 3], deadline: Option<u64>) -> Outcome {
    if count as i32 as i64 != count as i64 || (count as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let count = count.min(HARD_LIMIT);
    let words = count.div_ceil(64) as usize;
    let read = |at: u64| -> Result<Vec<u64>, Errno> {
        let word = |index| if at == 0 { Ok(0) } else { user::read(at.wrapping_add(index * 8)) };
        (0..words as u64).map(word).collect()
    };
    let asked = [read(sets[0])?, read(sets[1])?, read(sets[2])?];
    let files = Files::current();
    let mut descriptions = Vec::new();
    for descriptor in 0..count {
        let (word, bit) = ((descriptor / 64) as usize, 1 << (descriptor % 64));
        if asked.iter().any(|set| set[word] & bit != 0) {
            descriptions.push((descriptor, files.get(descriptor as i32)?));
        }
    }
    let mut found = [const { Vec::new() }; 3];
    let mut look = || {
        found = core::array::from_fn(|_| alloc::vec![0_u64; words]);
        let mut bits = 0;
        for (descriptor, description) in &descriptions {
            let (word, bit) = ((descriptor / 64) as usize, 1 << (descriptor % 64));
            let ready = ready(description);
            for ((asked, found), meaning) in asked.iter().zip(&mut found).zip(SETS) {
                if asked[word] & bit != 0 && ready & meaning != 0 {
                    found[word] |= bit;
                    bits += 1;
                }
            }
        }
        Some(bits).filter(|bits| *bits > 0)
    };
    let bits = match wait(deadline, &mut look) {
        Ok(bits) => bits,
        Err(Interrupted::Deadline) => 0,
        Err(Interrupted::Signal) => return Err(interrupted(deadline)),
    };
    for (at, set) in sets.into_iter().zip(&found) {
        for (index, word) in set.iter().enumerate() {
            if at != 0 {
                user::write(at.wrapping_add(index as u64 * 8), word)?;
            }
        }
    }
    Ok(bits)
}

/// Makes a call with the deadline of a timeout of the running program, if that is given. Then the
/// time that is left replaces the timeout, unless it was 0.
///
/// # Errors
/// `EFAULT`; `EINVAL` if the time is negative, or its fraction exceeds a second; those of `call`.
pub fn timed(at: u64, unit: Fraction, call: impl FnOnce(Option<u64>) -> Outcome) -> Outcome {
    if at == 0 {
        return call(None);
    }
    let wait = timeout(at, unit)?;
    let deadline = process::deadline_of_call(wait);
    let outcome = call(Some(deadline));
    if wait != 0 {
        let left = deadline.saturating_sub(time::now());
        let (_, scale) = unit.parts();
        // A program may keep the timeout in memory that it cannot write.
        let _ = user::write(at, &[left / time::SECOND, left % time::SECOND / scale]);
    }
    outcome
}

/// Reads a timeout, in nanoseconds.
fn timeout(at: u64, unit: Fraction) -> Result<u64, Errno> {
    let [seconds, fraction]: [i64; 2] = user::read(at)?;
    let (limit, scale) = unit.parts();
    // As on Linux, `select` accepts any number of microseconds; all others are strict.
    if seconds < 0 || fraction < 0 || unit == Fraction::Nanoseconds && fraction as u64 >= limit {
        return Err(Errno::EINVAL);
    }
    let wait = (seconds as u64).saturating_mul(time::SECOND);
    Ok(wait.saturating_add((fraction as u64).saturating_mul(scale)))
}

/// The unit of a timeout's second field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fraction {
    /// `struct timespec`.
    Nanoseconds,
    /// `struct timeval`.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only `select` has it"))]
    Microseconds,
}

impl Fraction {
    /// The number of units in a second, and the nanoseconds of one.
    fn parts(self) -> (u64, u64) {
        match self {
            Self::Nanoseconds => (1_000_000_000, 1),
            Self::Microseconds => (1_000_000, 1000),
        }
    }
}
