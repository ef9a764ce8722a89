//! `mlock(2)`, `mlock2(2)`, `munlock(2)`, `mlockall(2)`, `munlockall(2)`.

use crate::arch::Arch;
use core::sync::atomic::{AtomicU64, Ordering};

use bitflags::bitflags;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;

use crate::vma::{MappingFlags, Vma};
use crate::vmas::VmaView;

use crate::space::AddressSpace;
use crate::space::call::populate::{Populate, Want, populated};
use crate::space::limits::Locking;
use crate::space::op::Op;

/// The time at which the pages of locked memory are populated.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, LockPages, Platform};
///
/// /// `mlock2(2)` with `MLOCK_ONFAULT`.
/// fn lock<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr, size: u64) -> Result<(), Error> {
///     space.mlock(at, size, LockPages::OnFault)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LockPages {
    /// Immediately.
    #[default]
    Now,
    /// Each page at its first access (`MLOCK_ONFAULT`).
    OnFault,
}

bitflags! {
    /// The mappings that `mlockall` locks.
    ///
    /// ```
    /// use bindery::{AddressSpace, Error, LockAll, Platform};
    ///
    /// /// The first call of a real-time program.
    /// fn lock<P: Platform>(space: &AddressSpace<'_, P>) -> Result<(), Error> {
    ///     space.mlockall(LockAll::CURRENT | LockAll::FUTURE)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct LockAll: u8 {
        /// All existing mappings (`MCL_CURRENT`).
        const CURRENT = 1 << 0;
        /// All future mappings (`MCL_FUTURE`).
        const FUTURE = 1 << 1;
        /// Pages are populated by their first access (`MCL_ONFAULT`).
        const ON_FAULT = 1 << 2;
    }
}

pub(in crate::space) const LOCKS: MappingFlags =
    MappingFlags::LOCKED.union(MappingFlags::LOCK_ON_FAULT);

/// The lock flags of future mappings (`mlockall`). They change only under the mutex.
#[derive(Default)]
pub(in crate::space) struct FutureLocks(AtomicU64);

impl FutureLocks {
    pub(in crate::space) fn get(&self) -> MappingFlags {
        MappingFlags::from_bits_truncate(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, locks: MappingFlags) {
        self.0.store(locks.bits(), Ordering::Relaxed);
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Locks the pages of the range into memory; the range is extended to whole pages. Locks do not
    /// nest: a second call changes nothing, and one `munlock` undoes both.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings and of allocated folios.
    ///
    /// # Errors
    /// [`Error::LockForbidden`] if the process may not lock memory; [`Error::LockLimit`];
    /// [`Error::OutOfRange`] if the range overflows; [`Error::NotMapped`], after the part before
    /// the hole is locked; [`Error::TooManyMappings`], [`Error::OutOfMemory`] if a mapping cannot
    /// be split; [`Error::Fault`] and [`Error::TryAgain`] if the range is locked, but a page is not
    /// available; [`Error::Interrupted`] if the range is locked, but a fatal signal came before all
    /// pages were populated.
    pub fn mlock(&self, start: VirtAddr, length: u64, pages: LockPages) -> Result<(), Error> {
        let begun = mlock(self, start, length, pages);
        populated(self, begun.map(|populate| ((), populate)))
    }

    /// As [`AddressSpace::mlock`], up to the waits: the call locks the range, and the steps of the
    /// [`Populate`] map its pages.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings.
    ///
    /// # Errors
    /// As [`AddressSpace::mlock`]; the steps return the errors about pages.
    pub fn begin_mlock(
        &self,
        start: VirtAddr,
        length: u64,
        pages: LockPages,
    ) -> Result<Populate, Error> {
        mlock(self, start, length, pages)
    }

    /// Unlocks the range.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings.
    ///
    /// # Errors
    /// As [`AddressSpace::mlock`], without the errors about limits and pages.
    pub fn munlock(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        let range = lock_range::<P>(start, length)?;
        self.operate_with_reclaim(|op| lock(op, range, MappingFlags::empty()))
    }

    /// Locks all existing mappings, all future mappings, or both.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mlock`] of the whole address space.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `what` selects neither; [`Error::LockForbidden`];
    /// [`Error::LockLimit`]. As on Linux, mappings that cannot be locked are skipped.
    /// [`Error::Interrupted`] as [`AddressSpace::mlock`] (on Linux the call then succeeds, in a
    /// thread that never sees the result).
    pub fn mlockall(&self, what: LockAll) -> Result<(), Error> {
        let begun = mlockall(self, what);
        populated(self, begun.map(|populate| ((), populate)))
    }

    /// As [`AddressSpace::mlockall`], up to the waits: the call locks the mappings, and the steps
    /// of the [`Populate`] map their pages. The steps fail only with [`Error::Interrupted`].
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings.
    ///
    /// # Errors
    /// As [`AddressSpace::mlockall`].
    pub fn begin_mlockall(&self, what: LockAll) -> Result<Populate, Error> {
        mlockall(self, what)
    }

    /// Unlocks all mappings and stops locking future ones.
    ///
    /// Context: may sleep.
    pub fn munlockall(&self) {
        lock_all(self, LockAll::empty());
    }
}

fn mlockall<P: Platform>(space: &AddressSpace<'_, P>, what: LockAll) -> Result<Populate, Error> {
    if !what.intersects(LockAll::CURRENT | LockAll::FUTURE) {
        return Err(Error::Invalid);
    }
    space.vmas.account().may_lock_at_all()?;
    let limits = space.limits();
    if what.contains(LockAll::CURRENT)
        && limits.locking == Locking::Limited
        && space.usage().total > limits.locked / PAGE_SIZE
    {
        return Err(Error::LockLimit);
    }
    lock_all(space, what);
    if what.contains(LockAll::CURRENT) {
        let all = VirtRange::raw(0, space.limit().0);
        return Ok(Populate::as_possible(all).until_signal());
    }
    Ok(Populate::default())
}

fn mlock<P: Platform>(
    space: &AddressSpace<'_, P>,
    start: VirtAddr,
    length: u64,
    pages: LockPages,
) -> Result<Populate, Error> {
    space.vmas.account().may_lock_at_all()?;
    let range = match lock_range::<P>(start, length) {
        Ok(range) => range,
        // Linux checks the limit first, so its error takes precedence.
        Err(error) => {
            space.vmas.account().may_lock(length >> PAGE_SHIFT)?;
            return Err(error);
        }
    };
    let flags = match pages {
        LockPages::Now => MappingFlags::LOCKED,
        LockPages::OnFault => LOCKS,
    };
    space.operate_with_reclaim(|op| {
        may_lock_range(*op.vmas, range)?;
        lock(op, range, flags)
    })?;
    Ok(Populate::all_of(range, Want::Usual).for_now())
}

fn lock_all<P: Platform>(space: &AddressSpace<'_, P>, what: LockAll) {
    let mut locks = MappingFlags::LOCKED;
    locks.set(MappingFlags::LOCK_ON_FAULT, what.contains(LockAll::ON_FAULT));
    space.operate(|op| {
        let future = if what.contains(LockAll::FUTURE) { locks } else { MappingFlags::empty() };
        space.future_locks.set(future);
        if what != LockAll::FUTURE && what != LockAll::FUTURE | LockAll::ON_FAULT {
            let current =
                if what.contains(LockAll::CURRENT) { locks } else { MappingFlags::empty() };
            op.vmas.set_all_flags(|vma| lock_flags(vma, current));
        }
    });
    crate::deferred::free_some(space.page_table.memory);
}

fn lock_range<P: Platform>(start: VirtAddr, length: u64) -> Result<VirtRange, Error> {
    let inside = start.0 & (PAGE_SIZE - 1);
    // A length that overflows when it is rounded up becomes zero, as on Linux.
    let length = length.wrapping_add(inside).wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1);
    let limit = VirtAddr(P::Arch::USER_END);
    VirtRange::from_len(start.align_down(PAGE_SIZE), length).ok_or(Error::OutOfRange { limit })
}

/// Fails if the unlocked pages of `range` would exceed the limit of the process.
fn may_lock_range<P: Platform>(vmas: VmaView<'_, P>, range: VirtRange) -> Result<(), Error> {
    if vmas.account().may_lock(range.pages()).is_ok() {
        return Ok(());
    }
    let already: u64 = vmas
        .overlapping(range)
        .filter(|vma| vma.has(MappingFlags::LOCKED))
        .map(|vma| vma.range().intersection(range).pages())
        .sum();
    vmas.account().may_lock(range.pages() - already)
}

/// Sets the lock flags of all mappings in the range to `locks`. Skips mappings that have these
/// flags already, so that a second attempt continues after them.
fn lock<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    locks: MappingFlags,
) -> Result<(), Failure> {
    op.vmas.set_flags_in(range, |vma| lock_flags(vma, locks))
}

/// The mapping's flags with `locks` as its lock flags. Droppable mappings and the embedder's own
/// mappings are never locked; secret mappings always are.
fn lock_flags(vma: &Vma, locks: MappingFlags) -> MappingFlags {
    let fixed = MappingFlags::DROPPABLE | MappingFlags::SECRET | MappingFlags::DONT_EXPAND;
    if vma.flags().intersects(fixed) {
        return vma.flags();
    }
    (vma.flags() - LOCKS) | locks
}
