//! Faults that do not wait: [`AddressSpace::try_fault`], for a kernel whose fault handler must not
//! block.
//!
//! An attempt acquires locks only if they are free, uses no pager, device or handler, and does not
//! reclaim. If that is not sufficient, the attempt returns a value with which another thread waits.
//! The attempt leaves nothing behind: no lock, no record, no request, no message. Whatever other
//! threads do until the next attempt, that attempt therefore checks everything again, as a fault
//! does after a wait.
//!
//! The attempt abandons a read from a swap device, and the wait, or its first poll, starts the read
//! again. Otherwise queued waits would hold requests of the device and folio locks:
//! 1. 32 attempts find their pages on a device and use up all its requests. A thread queues their
//!    waits.
//! 2. The thread performs an earlier wait first, which reclaims. The reclaim needs a request and
//!    sleeps.

use core::fmt;

use crate::addr::{PAGE_SIZE, VirtAddr};
use crate::arch::KeyRights;
use crate::error::{Failure, FaultError};
use crate::folio::FolioRef;
use crate::object::{Object, ParkedOn, Polled, PolledWait, Wait};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::userfault::{PolledHandler, awaits_handler};
use crate::vma::MappingFlags;

use super::lock_wait::{LockEvent, VmaLockWait};
use super::slow::{Fault, Next, Tries};
use super::{Access, FaultRequest, Origin, Resolved, check_access, handle_fault, refused};

/// The result of [`AddressSpace::try_fault`].
#[derive(Debug)]
pub enum TriedFault<'s, 'm, P: Platform> {
    /// The access can be retried.
    Resolved(Resolved),
    /// The fault has to wait before the next attempt.
    Blocked(FaultWait<'s, 'm, P>),
}

/// The event that a fault has to wait for. The wait holds no lock and no request, so it may be
/// moved to another thread and may be queued. Waits may be performed in any order. After a poll it
/// may keep a reference to the page, which then stays in memory.
///
/// Dropping the value cancels the wait: nothing is read for the fault, unless a poll has started
/// the read. A message to the handler of a userfaultfd that a poll has sent is withdrawn; if a
/// handler has already read the message, its answer has no effect.
///
/// Context of the drop: may sleep, like the drop of an [`Object`].
#[must_use = "the next attempt would find the same"]
pub struct FaultWait<'s, 'm, P: Platform> {
    space: &'s AddressSpace<'m, P>,
    request: FaultRequest,
    /// The object whose pages the fault needs.
    object: Option<Object<'m, P>>,
    event: Event<'m, P>,
    is_for_storage: bool,
    vma_lock: VmaLockWait,
}

/// The event that ends a wait.
enum Event<'m, P: Platform> {
    /// A pager or a swap device has answered.
    Storage(PolledWait<'m, P>),
    /// The handler of a userfaultfd has answered.
    Handler(PolledHandler<'m, P>),
    /// A lock is free. The page of the wait before this one is kept.
    Lock(LockEvent<'m, P>, Option<FolioRef<'m, P>>),
    /// A thread has freed memory, or does the rest of the wait.
    Thread,
}

/// The progress of a wait ([`FaultWait::poll`]).
#[derive(Debug)]
pub enum FaultPoll<'w, 'm, P: Platform> {
    /// The wait is over, and the fault can be tried again. If memory is short, the page may have
    /// left memory again, in which case the next attempt also waits.
    Ready(FaultReady<'m, P>),
    /// Nothing can be done until this word changes.
    Pending(ParkedOn<'w>),
    /// Only a thread that may sleep can continue, by [`FaultWait::wait`]:
    /// - Memory is short, so reclaim has to run.
    /// - The device has failed, or reclaim has taken the page again.
    /// - The pager has to sleep before the pages become writable ([`crate::Pager::prepare_write`]).
    /// - At a [`crate::DirtyLimit`], pages of other files than the one that is written have to be
    ///   stored, or no record is free for a store.
    /// - Another thread has the mutex of the address space, and the mutex has no word for tasks
    ///   ([`RawLock::parked_on`](crate::sync::RawLock::parked_on)).
    /// - With the mutex held, the poll finds a further lock taken: that of a family of anon groups,
    ///   the `mapping_lock` of an object, or that of a mapping that is to grow down.
    /// - Another thread has the lock of the queues of a userfaultfd.
    NeedsThread,
}

/// The end of a wait. The value keeps the page that the fault has waited for; drop it after the
/// next attempt, so that reclaim cannot evict the page before it is mapped.
#[must_use = "reclaim could take the page before the fault maps it"]
pub struct FaultReady<'m, P: Platform> {
    _kept: Option<FolioRef<'m, P>>,
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Resolves a fault as [`AddressSpace::fault_with_keys`], if no wait is needed. A kernel whose
    /// fault handler must not block passes the [`FaultWait`] to a thread that may block, lets the
    /// program sleep, and tries again afterwards:
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::arch::KeyRights;
    /// use bindery::{Access, AddressSpace, FaultError, Platform, TriedFault};
    ///
    /// fn fault<P: Platform>(
    ///     space: &AddressSpace<'_, P>, at: VirtAddr, access: Access,
    /// ) -> Result<(), FaultError> {
    ///     let mut _ready = None;
    ///     loop {
    ///         match space.try_fault(at, access, KeyRights::ALL)? {
    ///             TriedFault::Resolved(_) => return Ok(()),
    ///             // On another thread, in a kernel that needs this call.
    ///             TriedFault::Blocked(wait) => _ready = Some(wait.wait()?),
    ///         }
    ///     }
    /// }
    /// ```
    ///
    /// A fault has to wait for a pager, a swap device, the handler of a userfaultfd, memory, a lock
    /// that another thread holds, and once per mapping for the mutex of the address space. A file
    /// page that triggers readahead blocks once; that wait only starts the readahead. An access to
    /// an unmapped address also waits, because the mutex is needed to decide whether a mapping
    /// grows down to the address.
    ///
    /// Context: spins. Complexity: as [`AddressSpace::fault`].
    ///
    /// # Errors
    /// The errors of [`FaultError`], except [`FaultError::OutOfMemory`]; an error changes nothing.
    pub fn try_fault(
        &self,
        addr: VirtAddr,
        access: Access,
        rights: KeyRights,
    ) -> Result<TriedFault<'_, 'm, P>, FaultError> {
        let page = addr.align_down(PAGE_SIZE);
        let request = FaultRequest { addr, page, access, rights, origin: Origin::Program };
        try_request(self, request, Tries::Last)
    }
}

/// A step of a call that stops where it would wait. The step resolves the fault of an access by the
/// kernel. It does what [`FaultWait::poll`] does for a lock that is free again, so it stops for a
/// lock only while another thread has the lock.
pub(in crate::space) fn step_fault<'s, 'm, P: Platform>(
    space: &'s AddressSpace<'m, P>,
    addr: VirtAddr,
    access: Access,
) -> Result<TriedFault<'s, 'm, P>, FaultError> {
    let (page, rights) = (addr.align_down(PAGE_SIZE), KeyRights::ALL);
    loop {
        let request = FaultRequest { addr, page, access, rights, origin: Origin::Kernel };
        match try_request(space, request, Tries::First)? {
            TriedFault::Blocked(mut wait) if matches!(wait.event, Event::Lock(..)) => {
                if !matches!(wait.poll()?, FaultPoll::Ready(_)) {
                    return Ok(TriedFault::Blocked(wait));
                }
            }
            tried @ (TriedFault::Resolved(_) | TriedFault::Blocked(_)) => return Ok(tried),
        }
    }
}

#[inline(always)]
fn try_request<'s, 'm, P: Platform>(
    space: &'s AddressSpace<'m, P>,
    request: FaultRequest,
    tries: Tries,
) -> Result<TriedFault<'s, 'm, P>, FaultError> {
    if request.addr >= space.limit() {
        return Err(FaultError::NotMapped);
    }
    let (mut object, mut is_for_storage) = (None, false);
    let event = match attempt(space, &request, tries) {
        Ok(FaultAttempt::Done(resolved)) => return Ok(TriedFault::Resolved(resolved)),
        Ok(FaultAttempt::Event(of, wait)) => {
            (object, is_for_storage) = (of, wait.is_major());
            Event::Storage(PolledWait::new(space.page_table.memory, wait))
        }
        Ok(FaultAttempt::Handler) => Event::Handler(PolledHandler::new(space.platform())),
        Ok(FaultAttempt::Locked(lock)) => Event::Lock(lock, None),
        Err(Failure::NoMemory) => Event::Thread,
        Err(Failure::Refused(error)) => return Err(error),
    };
    let vma_lock = VmaLockWait::new();
    Ok(TriedFault::Blocked(FaultWait { space, request, object, event, is_for_storage, vma_lock }))
}

/// The outcome of an attempt that has not failed.
enum FaultAttempt<'m, P: Platform> {
    Done(Resolved),
    /// The fault has to wait for this event; the object is that of the mapping.
    Event(Option<Object<'m, P>>, Wait),
    /// The fault has to wait for the handler of a userfaultfd.
    Handler,
    /// The fault has to wait for a lock.
    Locked(LockEvent<'m, P>),
}

/// One attempt, which acquires locks only if they are free. [`Tries::First`]: sleeps while memory is
/// collected for a large folio.
#[inline(always)]
fn attempt<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    request: &FaultRequest,
    tries: Tries,
) -> Result<FaultAttempt<'m, P>, Failure<FaultError>> {
    let &FaultRequest { page, access, .. } = request;
    let mut tries = tries;
    loop {
        let Some(locked) = space.vmas.try_read(space.platform(), page) else {
            return Ok(FaultAttempt::Locked(LockEvent::Vma));
        };
        let flags = locked.vma().flags();
        check_access::<P::Arch>(request, flags)?;
        if flags.intersects(MappingFlags::USERFAULT) && awaits_handler(space, &locked, request)? {
            return Ok(FaultAttempt::Handler);
        }
        let fault = Fault { space, vma: locked.vma(), page, access, tries };
        let makes_private = access == Access::Write && !flags.contains(MappingFlags::SHARED);
        if makes_private && fault.vma.group_pointer().is_none() {
            if flags.contains(MappingFlags::MAYBE_GUARDS) && fault.is_guarded() {
                return Err(FaultError::NotMapped.into());
            }
            return Ok(FaultAttempt::Locked(LockEvent::Group));
        }
        match fault.try_resolve()? {
            Some(Next::Done(resolved)) => return Ok(FaultAttempt::Done(resolved)),
            Some(Next::Again) => {}
            Some(Next::Wait(Wait::Memory)) if tries == Tries::First => {
                // No device is reading or writing the folio.
                drop(locked);
                space.page_table.memory.collect();
                tries = Tries::Last;
            }
            Some(Next::Wait(wait)) => {
                return Ok(FaultAttempt::Event(space.object_of(locked.vma()), wait));
            }
            None => {
                let object = space.object_of(locked.vma());
                return Ok(FaultAttempt::Locked(object.map_or(LockEvent::Vma, LockEvent::Pages)));
            }
        }
    }
}

impl<'m, P: Platform> FaultWait<'_, 'm, P> {
    /// The page of the fault.
    pub(in crate::space) fn page(&self) -> VirtAddr {
        self.request.page
    }

    /// Keeps the page of the wait before this one, if this one is for a lock.
    pub(in crate::space) fn keep(&mut self, ready: FaultReady<'m, P>) {
        if let Event::Lock(_, kept) = &mut self.event {
            *kept = ready._kept;
        }
    }

    /// Waits, and performs the work that the fault cannot perform without waiting: it has the pager
    /// read the pages, or, for any other event, resolves the whole fault. The caller then tries the
    /// fault again while holding the result; if the fault is already resolved, that attempt returns
    /// [`Resolved::Spurious`]. Another thread may have changed the mapping since, and the next
    /// attempt may have to wait again.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`FaultError`] says, if the fault fails.
    pub fn wait(mut self) -> Result<FaultReady<'m, P>, FaultError> {
        let event = match core::mem::replace(&mut self.event, Event::Thread) {
            Event::Storage(polled) => polled.into_wait(),
            Event::Handler(mut polled) => {
                if polled.wait(self.space, &self.request, &mut self.vma_lock)? {
                    return Ok(FaultReady { _kept: None });
                }
                None
            }
            Event::Lock(..) | Event::Thread => None,
        };
        let Some(event) = event else { return self.fault() };
        let memory = self.space.page_table.memory;
        let is_major = event.is_major();
        match event.wait(memory, self.object.as_ref()).map_err(refused) {
            Ok(kept) => {
                if is_major && kept.is_some() {
                    memory.note_major_fault();
                }
                Ok(FaultReady { _kept: kept })
            }
            // A blocking fault reclaims and tries again.
            Err(Failure::NoMemory) => self.fault(),
            Err(Failure::Refused(error)) => Err(error),
        }
    }

    /// Advances the wait as far as possible without sleeping, for a task that is a future: starts
    /// to read the pages, or sends the message to the handler of a userfaultfd, and processes the
    /// answer when it arrives. No thread therefore waits for a handler, for a swap device, or for a
    /// pager that keeps requests ([`crate::ReadRequest::keep`]); any other pager is called during
    /// the poll. For a lock, the poll checks whether its holder has left. If the mutex of the
    /// address space is free, the poll itself makes the change that a first write or a growing
    /// mapping needs. A task that gets [`FaultPoll::Pending`] is polled again when
    /// [`Platform::unpark`] was called for the word. Many waits may share the word, so a poll may
    /// find no progress.
    ///
    /// ```
    /// use bindery::{FaultError, FaultPoll, FaultReady, FaultWait, Platform};
    ///
    /// /// Waits like a task whose executor has nothing else to do.
    /// fn run<'m, P: Platform>(
    ///     mut wait: FaultWait<'_, 'm, P>, platform: &P,
    /// ) -> Result<FaultReady<'m, P>, FaultError> {
    ///     loop {
    ///         match wait.poll()? {
    ///             FaultPoll::Ready(ready) => return Ok(ready),
    ///             // A future returns `Poll::Pending` here, and leaves its waker before.
    ///             FaultPoll::Pending(on) => platform.park(on.word(), on.expected()),
    ///             FaultPoll::NeedsThread => break,
    ///         }
    ///     }
    ///     // On another thread, in a kernel that needs this call.
    ///     wait.wait()
    /// }
    /// ```
    ///
    /// Context: may sleep only if the pager sleeps in [`crate::Pager::begin_read`], or the device
    /// in [`crate::SwapDevice::submit`]; otherwise spins. Also tries [`Platform::Mutex`], so it is
    /// not called in an interrupt handler, in a read section or with a spin lock held. Complexity:
    /// linear in the number of pages of all completed requests and answers, and logarithmic in the
    /// number of mappings.
    ///
    /// # Errors
    /// As [`FaultError`] says, if the fault fails.
    pub fn poll(&mut self) -> Result<FaultPoll<'_, 'm, P>, FaultError> {
        let polled = match &mut self.event {
            Event::Storage(polled) => polled.poll(self.object.as_ref()).map_err(refused),
            Event::Handler(polled) => {
                Ok(polled.poll(self.space, &self.request, &mut self.vma_lock))
            }
            Event::Lock(lock, kept) => {
                match lock.poll(self.space, &self.request, &mut self.vma_lock) {
                    Ok(Polled::Ready(_)) => Ok(Polled::Ready(kept.take())),
                    other => other,
                }
            }
            Event::Thread => return Ok(FaultPoll::NeedsThread),
        };
        match polled {
            Ok(Polled::Ready(kept)) => Ok(FaultPoll::Ready(FaultReady { _kept: kept })),
            Ok(Polled::Pending(parked)) => Ok(FaultPoll::Pending(parked)),
            Ok(Polled::NeedsThread) | Err(Failure::NoMemory) => Ok(FaultPoll::NeedsThread),
            Err(Failure::Refused(error)) => Err(error),
        }
    }

    /// Whether the wait is for a pager or a swap device to read content, rather than for a lock,
    /// memory or a handler.
    ///
    /// Context: any.
    pub fn is_for_storage(&self) -> bool {
        self.is_for_storage
    }

    /// Resolves the fault and sleeps for everything that it needs.
    fn fault(&self) -> Result<FaultReady<'m, P>, FaultError> {
        let FaultRequest { addr, access, rights, origin, .. } = self.request;
        handle_fault(self.space, addr, access, rights, origin)?;
        Ok(FaultReady { _kept: None })
    }
}

impl<P: Platform> Drop for FaultWait<'_, '_, P> {
    fn drop(&mut self) {
        self.vma_lock.end(self.space);
    }
}

impl<P: Platform> fmt::Debug for FaultWait<'_, '_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("FaultWait");
        debug.field("page", &self.request.page);
        match &self.event {
            Event::Storage(polled) => debug.field("event", polled),
            Event::Handler(polled) => debug.field("event", polled),
            Event::Lock(lock, _) => debug.field("event", lock),
            Event::Thread => &mut debug,
        };
        debug.finish_non_exhaustive()
    }
}

impl<P: Platform> fmt::Debug for FaultReady<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultReady").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread other than the one that created the wait may perform it.
    fn _moves<P: Platform>(wait: FaultWait<'_, '_, P>, ready: FaultReady<'_, P>) {
        fn is_send(_: impl Send) {}
        is_send(wait);
        is_send(ready);
    }
}
