//! `process_vm_readv` and `process_vm_writev`.

use bindery::linux::{self, CopyDirection};
use linux_raw_sys::general as nr;

use crate::errno::{Errno, Outcome, from_raw};
use crate::{heap, process};

/// Makes one of the two calls; `None` where the number is another call's.
pub fn call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    let direction = match number {
        nr::__NR_process_vm_readv => CopyDirection::Read,
        nr::__NR_process_vm_writev => CopyDirection::Write,
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
            // As for a fault of the program itself: room is made, unless the thread has to end.
            Err(Errno::ENOMEM) if !process::memory_ran_out() => {}
            outcome => return outcome,
        }
    }
}

/// The core's name for what is refused about another process.
fn linux_errno(errno: Errno) -> bindery::Errno {
    if errno == Errno::EPERM { bindery::Errno::EPERM } else { bindery::Errno::ESRCH }
}
