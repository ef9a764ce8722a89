//! Takes the memory of a process that is about to end (`process_mrelease(2)`, Linux's OOM reaper).

use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;
use crate::vma::MappingFlags;

use super::madvise::drop_contents;
use crate::space::AddressSpace;
use crate::space::op::Op;

impl<P: Platform> AddressSpace<'_, P> {
    /// Drops the contents of all private mappings, locked ones too, while threads of the process
    /// may still run to their end. So the memory is freed now, and not when the last of them
    /// releases the address space. Shared memory stays. It is for a process that has been killed
    /// and never returns to its program.
    ///
    /// Each mapping is marked ([`MappingFlags::REAPED`]) before its contents are dropped and faults
    /// may run again. From then on nothing is mapped there: an access fails with
    /// [`FaultError::Bus`](crate::FaultError::Bus), and so does every copy to or from it. So no
    /// reader gets the zero page in place of what the program has written. (Linux: `MMF_UNSTABLE`.)
    /// The mappings themselves stay. A second call finds nothing to do.
    ///
    /// Context: may sleep. Complexity: in the mappings and whole tables, as
    /// [`AddressSpace::discard`] of everything.
    ///
    /// # Errors
    /// [`Error::Interrupted`] for a fatal signal of the caller, [`Error::OutOfMemory`]: work done
    /// stays done, and another call may go on.
    pub fn reap(&self) -> Result<(), Error> {
        self.page_table.memory.outermost(|| self.operate(|op| reap(op)))
    }
}

/// Drops the contents of all private mappings. Sets the flag under the VMA's write lock, before the
/// contents are unmapped:
///
/// 1. A fault on CPU A reads the flags under the VMA's read lock.
/// 2. CPU B waits for that lock to be released, then sets the flag.
/// 3. CPU B drops the contents, and with them the page that CPU A has mapped.
fn reap<P: Platform>(op: &mut Op<'_, '_, P>) -> Result<(), Failure> {
    for vma in op.vmas.iter() {
        if vma.has(MappingFlags::SHARED) || vma.has(MappingFlags::REAPED) {
            continue;
        }
        interrupt::check(op.platform())?;
        let locked = vma.lock_write(op.platform());
        op.vmas.change_flags(&locked, vma.flags() | MappingFlags::REAPED);
        drop(locked);
        if let Err(error) = drop_contents(op, vma, vma.range()) {
            let locked = vma.lock_write(op.platform());
            op.vmas.change_flags(&locked, vma.flags() - MappingFlags::REAPED);
            return Err(error.into());
        }
    }
    Ok(())
}
