//! System V shared memory: the core has the segments, this module the system calls.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use bindery::linux::{self, IpcClock, SegmentSlot, Segments, proc};
use linux_raw_sys::general as nr;
use spin::Once;

use crate::errno::{Outcome, from_raw};
use crate::memory::memory;
use crate::platform::Machine;
use crate::{heap, process, time};

/// The most segments that there may be (`shmmni`), as on Linux.
const SEGMENTS_MAX: usize = 4096;

type All = Segments<'static, Machine>;

/// Made when the first program asks for one.
static SEGMENTS: Once<All> = Once::new();

/// Makes a call about segments; `None` where the number is another call's.
pub fn call(number: u32, [a, b, c, ..]: [u64; 6]) -> Option<Outcome> {
    let outcome = match number {
        nr::__NR_shmdt => process::with_space(|space| linux::shmdt(space, a)),
        nr::__NR_shmget | nr::__NR_shmat | nr::__NR_shmctl => match all() {
            Ok(segments) => one(segments, number, [a, b, c]),
            Err(errno) => return Some(Err(errno)),
        },
        _ => return None,
    };
    Some(from_raw(outcome))
}

fn one(segments: &'static All, number: u32, arguments: [u64; 3]) -> i64 {
    let user = process::ipc_user();
    match number {
        nr::__NR_shmget => linux::shmget(segments, &user, arguments),
        nr::__NR_shmat => {
            process::with_space(|space| linux::shmat(segments, space, &user, arguments))
        }
        _ => process::with_space(|space| linux::shmctl(segments, space, &user, arguments)),
    }
}

fn all() -> Result<&'static All, crate::errno::Errno> {
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
        // Where there is no memory for segments, there are none.
        Err(_) => Ok(()),
    }
}

/// Lets go of all segments: the machine ends.
pub fn end() {
    if let Some(segments) = SEGMENTS.get() {
        segments.clear();
    }
}
