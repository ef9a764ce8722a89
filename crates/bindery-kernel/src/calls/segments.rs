//! The system calls for System V shared memory; the core implements the segments.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use bindery_linux::{
    self as linux, IpcClock, IpcUser, LockAccount, SegmentLocking, SegmentSlot, Segments, proc,
};
use linux_raw_sys::general as nr;
use spin::Once;

use crate::errno::{Errno, Outcome, from_raw};
use crate::memory::memory;
use crate::platform::Machine;
use crate::process::{Capability, Credentials, credentials};
use crate::sync::Mutex;
use crate::{heap, process, time};

/// The maximum number of segments (`shmmni`), as on Linux.
const SEGMENTS_MAX: usize = 4096;

/// `shmctl(2)`: locks a segment in memory.
const SHM_LOCK: u32 = 11;

type All = Segments<'static, Machine>;

/// Made when a program first uses a segment.
static SEGMENTS: Once<All> = Once::new();

/// The accounts of locked segments, by user. One without pages may be reused for another user.
static ACCOUNTS: Mutex<Vec<(u32, &'static LockAccount)>> = Mutex::new(Vec::new());

/// Makes a call about segments; `None` if the number belongs to another call.
pub fn call(number: u32, [a, b, c, ..]: [u64; 6]) -> Option<Outcome> {
    match number {
        nr::__NR_shmdt => Some(from_raw(process::with_space(|space| linux::shmdt(space, a)))),
        nr::__NR_shmget | nr::__NR_shmat | nr::__NR_shmctl => {
            Some(all().and_then(|segments| one(segments, number, [a, b, c])))
        }
        _ => None,
    }
}

fn one(segments: &'static All, number: u32, arguments: [u64; 3]) -> Outcome {
    let who = credentials();
    let user = ipc_user(&who);
    from_raw(match number {
        nr::__NR_shmget => linux::shmget(segments, &user, arguments),
        nr::__NR_shmat => {
            process::with_space(|space| linux::shmat(segments, space, &user, arguments))
        }
        _ => {
            let locking = locking(arguments[1])?;
            let control = |space: &_| linux::shmctl(segments, space, &user, &locking, arguments);
            process::with_space(control)
        }
    })
}

/// The running thread's rights to lock segments with a command of `shmctl`.
fn locking(command: u64) -> Result<SegmentLocking<'static>, Errno> {
    /// For commands that charge no account.
    static NONE: LockAccount = LockAccount::new();
    let who = process::credentials();
    Ok(SegmentLocking {
        account: if command as u32 == SHM_LOCK { account(who.user.real)? } else { &NONE },
        limit: process::locked_memory_limit(),
        privileged: who.can(Capability::LockMemory),
    })
}

/// A user's account.
fn account(user: u32) -> Result<&'static LockAccount, Errno> {
    let mut accounts = ACCOUNTS.lock();
    if let Some((_, account)) = accounts.iter().find(|(owner, _)| *owner == user) {
        return Ok(account);
    }
    // Nothing sleeps until the caller has locked its segment, so no other call reuses the account.
    if let Some(entry) = accounts.iter_mut().find(|(_, account)| account.used() == 0) {
        entry.0 = user;
        return Ok(entry.1);
    }
    heap::room((2 * accounts.len() + 8) * size_of::<(u32, &LockAccount)>())?;
    let account = Box::leak(Box::new(LockAccount::new()));
    accounts.push((user, account));
    Ok(account)
}

fn all() -> Result<&'static All, Errno> {
    SEGMENTS.try_call_once(|| {
        heap::room(SEGMENTS_MAX * size_of::<SegmentSlot<'_, Machine>>())?;
        let slots: Vec<_> = (0..SEGMENTS_MAX).map(|_| SegmentSlot::new()).collect();
        let clock = IpcClock {
            now: || (time::real_time() / time::SECOND) as i64,
            process: || process::current().process.id as i32,
        };
        Ok(Segments::new(memory(), Box::leak(slots.into_boxed_slice()), clock))
    })
}

/// `/proc/sysvipc/shm`.
pub fn listing(out: &mut dyn fmt::Write) -> fmt::Result {
    match all() {
        Ok(segments) => proc::sysvipc_shm(segments, out),
        // There are none if there was no memory for them.
        Err(_) => Ok(()),
    }
}

/// Releases all segments when the machine ends.
pub fn end() {
    if let Some(segments) = SEGMENTS.get() {
        segments.clear();
    }
}

/// The running process, in the form that System V segments need.
fn ipc_user(who: &Credentials) -> IpcUser<'_> {
    IpcUser {
        user: who.user.effective,
        group: who.group.effective,
        groups: &who.groups,
        privileged: who.can(Capability::IpcOwner),
    }
}
