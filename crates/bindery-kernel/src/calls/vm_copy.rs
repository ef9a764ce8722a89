//! `process_vm_readv`, `process_vm_writev` and `process_mrelease`.

use bindery_linux::{self as linux, CopyDirection};
use linux_raw_sys::general as nr;

use crate::errno::{Errno, Outcome, from_raw};
use crate::{heap, process};

/// Makes one of the calls; `None` if the number belongs to another call.
pub fn call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    let direction = match number {
        nr::__NR_process_vm_readv => CopyDirection::Read,
        nr::__NR_process_vm_writev => CopyDirection::Write,
        nr::__NR_process_mrelease => {
            return Some(release(arguments[0] as i32, arguments[1] as u32));
        }
        _ => return None,
    };
    Some(copy(direction, arguments))
}

fn copy(direction: CopyDirection, arguments: [u64; 6]) -> Outcome {
    let count = linux::process_vm_ranges(arguments);
    heap::room(count * size_of::<linux::IoRange>())?;
    let mut ranges = alloc::vec![linux::IoRange::default(); count];
    let caller = process::current().process.space();
    loop {
        let copied = linux::process_vm(&caller, direction, arguments, &mut ranges, |id| {
            process::space_of(id as u32).map_err(linux_errno)
        });
        match from_raw(copied) {
            // Frees memory as for a fault of the program itself, unless the thread has to end.
            Err(Errno::ENOMEM) if !process::memory_ran_out() => {}
            outcome => return outcome,
        }
    }
}

fn release(descriptor: i32, flags: u32) -> Outcome {
    from_raw(linux::process_mrelease(flags, || {
        process::dying_space_behind(descriptor).map_err(linux_errno)
    }))
}

/// The core's error for an access to another process that is refused.
fn linux_errno(errno: Errno) -> bindery::Errno {
    match errno {
        Errno::EPERM => bindery::Errno::EPERM,
        Errno::EBADF => bindery::Errno::EBADF,
        Errno::EINVAL => bindery::Errno::EINVAL,
        _ => bindery::Errno::ESRCH,
    }
}
