//! Waits of faults for locks, polled by a task in place of a thread.
//!
//! A task takes no lock while it waits: when the holder leaves, all tasks that wait are woken and
//! compete, so a task that is dropped takes no wake-up away. Parked threads keep their places.
//!
//! | lock | the word of the task | kept alive by |
//! |---|---|---|
//! | a VMA | one for all VMAs of the address space, because a VMA may be removed and freed meanwhile: each poll looks the VMA up again | the address space |
//! | the mutex | the mutex's own ([`crate::sync::RawLock::parked_on`]) | the address space |
//! | an object's `invalidate_lock` | the lock's own | a handle to the object |

use core::fmt;

use crate::error::{Failure, FaultError};
use crate::object::{Object, ParkedOn, Polled};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::stack_growth::{try_grow_down, try_prepare_group};
use crate::sync::rw_lock::Readable;
use crate::vmas::{PolledVma, VmaSet};

use super::FaultRequest;

/// The lock that a fault has found taken, or that an attempt never takes.
pub(super) enum LockEvent<'m, P: Platform> {
    /// The lock of the VMA of the page. If no VMA has the page, the mutex, with which a VMA above
    /// may grow down to it.
    Vma,
    /// The mutex, with which the VMA gets an anon group.
    Group,
    /// The `invalidate_lock` of the VMA's object.
    Pages(Object<'m, P>),
}

/// Whether a task is counted among those that wait for the locks of VMAs of its address space: from
/// its first poll to its drop, which calls [`VmaLockWait::end`].
pub(in crate::space) struct VmaLockWait(bool);

impl VmaLockWait {
    pub(super) fn new() -> Self {
        Self(false)
    }

    /// The state of the VMA's lock. [`PolledVma::Written`] comes with the word that changes when the
    /// writer leaves.
    pub(in crate::space) fn poll<'s, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'_, P>,
        request: &FaultRequest,
    ) -> (PolledVma, ParkedOn<'s>) {
        let tasks = &space.page_table.lock_waits;
        if !core::mem::replace(&mut self.0, true) {
            tasks.enter();
        }
        // Read before the lock is marked: a writer that leaves afterwards changes the word.
        let (word, expected) = tasks.word();
        let found = space.vmas.poll_read(space.platform(), request.page);
        (found, ParkedOn::new(word, expected))
    }

    pub(super) fn end<P: Platform>(&mut self, space: &AddressSpace<'_, P>) {
        if core::mem::replace(&mut self.0, false) {
            space.page_table.lock_waits.leave();
        }
    }
}

impl<'m, P: Platform> LockEvent<'m, P> {
    /// Checks whether the lock is free. If the fault needs the mutex, does the work under the mutex.
    ///
    /// # Errors
    /// Those of the work.
    pub(super) fn poll<'w, 's: 'w>(
        &'w self,
        space: &'s AddressSpace<'m, P>,
        request: &FaultRequest,
        vma_lock: &mut VmaLockWait,
    ) -> Result<Polled<'w, 'm, P>, Failure<FaultError>> {
        match self {
            Self::Vma => match vma_lock.poll(space, request) {
                (PolledVma::Readable, _) => Ok(Polled::Ready(None)),
                (PolledVma::Written, parked) => Ok(Polled::Pending(parked)),
                (PolledVma::Absent, _) => {
                    with_mutex(space, |vmas| try_grow_down(vmas, request.page))
                }
            },
            Self::Group => with_mutex(space, |vmas| Ok(try_prepare_group(vmas, request.page)?)),
            Self::Pages(object) => Ok(match object.state().invalidate_lock.poll_read() {
                Readable::Now | Readable::Never => Polled::Ready(None),
                Readable::Later(word, expected) => Polled::Pending(ParkedOn::new(word, expected)),
            }),
        }
    }
}

impl<P: Platform> fmt::Debug for LockEvent<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vma => "Vma",
            Self::Group => "Group",
            Self::Pages(_) => "Pages",
        })
    }
}

/// Does `work` with the mutex held, if the mutex is free. `work` returns false if it needs a further
/// lock that is not free; such a lock is held only for a piece of a walk, so a thread waits for it.
///
/// # Errors
/// Those of `work`.
fn with_mutex<'s, 'm, P: Platform>(
    space: &'s AddressSpace<'m, P>,
    work: impl FnOnce(&mut VmaSet<'_, 'm, P>) -> Result<bool, Failure<FaultError>>,
) -> Result<Polled<'s, 'm, P>, Failure<FaultError>> {
    Ok(match space.try_change_vmas(work) {
        Some(done) if done? => Polled::Ready(None),
        Some(_) => Polled::NeedsThread,
        None => match space.vmas.mutex_parked_on() {
            Some((word, expected)) => Polled::Pending(ParkedOn::new(word, expected)),
            None => Polled::NeedsThread,
        },
    })
}
