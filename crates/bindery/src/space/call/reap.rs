//! Frees the memory of a process that is about to exit (`process_mrelease(2)`, Linux's OOM reaper).

use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;
use crate::vma::MappingFlags;

use super::madvise::drop_contents;
use crate::space::AddressSpace;
use crate::space::op::Op;

impl<P: Platform> AddressSpace<'_, P> {
    /// Drops the contents of all private mappings, including locked ones. Threads of the process
    /// may still be exiting: the memory is freed now rather than when the last of the threads
    /// releases the address space. Shared memory stays. Call this only for a process that was
    /// killed and never returns to its program.
    ///
    /// Marks each mapping ([`MappingFlags::REAPED`]) before its contents are dropped. From then on
    /// no page is mapped there: accesses, and copies to or from the mapping, fail with
    /// [`FaultError::Bus`](crate::FaultError::Bus). No reader therefore gets the zero page instead
    /// of the program's data. (Linux: `MMF_UNSTABLE`.) The mappings themselves stay. A second call
    /// has no effect.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings and whole tables, as
    /// [`AddressSpace::discard`] of the whole address space.
    ///
    /// # Errors
    /// [`Error::Interrupted`] for a fatal signal of the caller; [`Error::OutOfMemory`]. Contents
    /// dropped before the error stay dropped, and another call continues.
    pub fn reap(&self) -> Result<(), Error> {
        self.operate_with_reclaim(|op| reap(op))
    }
}

/// Drops the contents of all private mappings. Sets the flag under the VMA's write lock, before the
/// contents are unmapped. A fault therefore either sees the flag or has its page dropped:
/// 1. A fault on CPU A reads the flags under the VMA's read lock.
/// 2. CPU B waits for the release of that lock, then sets the flag.
/// 3. CPU B drops the contents, including the page that CPU A has mapped.
fn reap<P: Platform>(op: &mut Op<'_, '_, P>) -> Result<(), Failure> {
    for vma in op.vmas.iter() {
        let kept = MappingFlags::SHARED | MappingFlags::REAPED | MappingFlags::FRAMES;
        if vma.flags().intersects(kept) {
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
