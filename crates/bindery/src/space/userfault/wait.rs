//! The wait of a fault for its handler.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::ptr::NonNull;

use super::shared::object_has;
use crate::arch::{Absent, AbsentFormat, Arch, Kind, Marker};
use crate::error::{Failure, FaultError};
use crate::object::{HandlerWait, ParkedOn, Polled, Wait};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::fault::{
    Access, Fault, FaultRequest, Origin, VmaLockWait, check_access, wait_for_known,
};
use crate::stats::Counts;
use crate::table::EntryAt;
use crate::userfault::{
    self, Ending, PolledMessage, UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultScope,
    UserfaultState, WaitSignals,
};
use crate::vma::{MappingFlags, Vma, VmaReadGuard};
use crate::vmas::PolledVma;

/// The outcome of a fault in a registered VMA, if the fault does not fail.
pub(in crate::space) enum Served<'a, P: Platform> {
    /// No handler serves the fault, so it is resolved like any other.
    Unserved(VmaReadGuard<'a, P>),
    /// The fault has waited, or something has changed: it starts again.
    Again,
    /// The fault has waited for a missing page, which is now mapped.
    Mapped,
}

/// Makes a fault in a registered VMA wait for its handler, if the userfaultfd serves the fault.
///
/// The message is queued with the VMA locked, so that the registration cannot change in between.
/// The VMA is then unlocked, and the fault waits ([`Wait::Handler`]). Both the message and the wait
/// live in the stack frame of this call, because returning them would leave a dangling value.
///
/// # Errors
/// [`FaultError::Bus`] if the userfaultfd requests signals or does not serve the kernel;
/// [`FaultError::Interrupted`].
#[cold]
#[inline(never)]
pub(in crate::space) fn serve_by_userfault<'a, P: Platform>(
    space: &AddressSpace<'_, P>,
    locked: VmaReadGuard<'a, P>,
    request: &FaultRequest,
) -> Result<Served<'a, P>, Failure<FaultError>> {
    let Some(Awaited { kind, pointer, state }) = awaited(space, locked.vma(), request)? else {
        return Ok(Served::Unserved(locked));
    };
    let platform = space.platform();
    let message = message(state, request, kind, || platform.thread());
    let interrupts = interrupts(request);
    state.hold();
    let held = Held { space, state: pointer };
    let waited = held.state().with_queued(platform, message, |queued| {
        // Checked again with the message queued: a thread that fills the page after this check
        // finds the message.
        let fault = Fault::new(space, locked.vma(), request.page, request.access);
        if userfault_kind(&fault) != Some(kind) {
            return Ok(Served::Again);
        }
        wait_for_known(space, locked, Wait::Handler(HandlerWait(queued, interrupts)))?;
        let mapped = kind == UserfaultKind::Missing && is_mapped(space, request);
        Ok(if mapped { Served::Mapped } else { Served::Again })
    });
    waited.unwrap_or(Ok(Served::Again))
}

/// The handler that a fault has to wait for.
struct Awaited<'v> {
    kind: UserfaultKind,
    pointer: NonNull<UserfaultState>,
    state: &'v UserfaultState,
}

/// The handler that the fault has to wait for, if any.
///
/// # Errors
/// [`FaultError::Bus`].
#[inline(always)]
fn awaited<'v, P: Platform>(
    space: &AddressSpace<'_, P>,
    vma: &'v Vma,
    request: &FaultRequest,
) -> Result<Option<Awaited<'v>>, FaultError> {
    let fault = Fault::new(space, vma, request.page, request.access);
    let Some(kind) = userfault_kind(&fault) else { return Ok(None) };
    let (Some(pointer), Some(state)) = (vma.userfault_pointer(), vma.userfault()) else {
        return Ok(None);
    };
    if state.is_closed() {
        return Ok(None);
    }
    let unserved = request.origin != Origin::Program && state.scope() == UserfaultScope::UserMode;
    if unserved || state.has(UserfaultFeatures::SIGBUS) {
        return Err(FaultError::Bus);
    }
    Ok(Some(Awaited { kind, pointer, state }))
}

/// The signals that end the wait of a fault.
fn interrupts(request: &FaultRequest) -> WaitSignals {
    match request.origin {
        Origin::Program => WaitSignals::Signal,
        Origin::Kernel | Origin::Debugger => WaitSignals::FatalSignal,
    }
}

fn message(
    state: &UserfaultState,
    request: &FaultRequest,
    kind: UserfaultKind,
    thread: impl FnOnce() -> u32,
) -> UserfaultFault {
    let exact = state.has(UserfaultFeatures::EXACT_ADDRESS);
    let named = state.has(UserfaultFeatures::THREAD_ID);
    UserfaultFault {
        address: if exact { request.addr } else { request.page },
        kind,
        is_write: request.access == Access::Write,
        thread: if named { thread() } else { 0 },
    }
}

/// Whether an attempt to resolve the fault has to wait for a handler.
///
/// # Errors
/// [`FaultError::Bus`].
pub(in crate::space) fn awaits_handler<P: Platform>(
    space: &AddressSpace<'_, P>,
    locked: &VmaReadGuard<'_, P>,
    request: &FaultRequest,
) -> Result<bool, FaultError> {
    Ok(awaited(space, locked.vma(), request)?.is_some())
}

/// A polled wait for a handler. The value holds nothing before its first poll.
pub(in crate::space) struct PolledHandler<'m, P: Platform> {
    /// The number of the faulting thread; a different thread may poll.
    thread: u32,
    queued: Option<PolledMessage<'m, P>>,
    /// Whether the page no longer needed a handler once the message was queued. Then possibly no
    /// handler answers the message, so the wait is over.
    is_needless: bool,
}

impl<'m, P: Platform> PolledHandler<'m, P> {
    /// The wait for a fault of the running thread.
    pub(in crate::space) fn new(platform: &P) -> Self {
        Self { thread: platform.thread(), queued: None, is_needless: false }
    }

    /// Queues the message, unless it is already queued, and checks whether the handler has
    /// answered. Sleeps for no lock. After [`Polled::Ready`] the fault is tried again and may have
    /// to wait again.
    pub(in crate::space) fn poll<'w, 's: 'w>(
        &'w mut self,
        space: &'s AddressSpace<'m, P>,
        request: &FaultRequest,
        vma_lock: &mut VmaLockWait,
    ) -> Polled<'w, 'm, P> {
        if self.queued.is_none() {
            let locked = loop {
                if let Some(locked) = space.vmas.try_read(space.platform(), request.page) {
                    break locked;
                }
                match vma_lock.poll(space, request) {
                    // The writer has left since.
                    (PolledVma::Readable, _) => {}
                    (PolledVma::Written, parked) => return Polled::Pending(parked),
                    // The next attempt finds out why.
                    (PolledVma::Absent, _) => return Polled::Ready(None),
                }
            };
            let allowed = check_access::<P::Arch>(request, locked.vma().flags());
            let Ok(Some(awaited)) = allowed.and_then(|()| awaited(space, locked.vma(), request))
            else {
                // The next attempt reaches the same result.
                return Polled::Ready(None);
            };
            let message = message(awaited.state, request, awaited.kind, || self.thread);
            // SAFETY: 1. the VMA holds the userfaultfd and is locked.
            self.queued = unsafe {
                PolledMessage::queue_fault(space.page_table.memory, awaited.pointer, message)
            };
            if self.queued.is_none() {
                return Polled::NeedsThread;
            }
            // As in `serve_by_userfault`. If the page needs no handler, the drop withdraws the
            // message, which may sleep.
            let fault = Fault::new(space, locked.vma(), request.page, request.access);
            self.is_needless = userfault_kind(&fault) != Some(awaited.kind);
        }
        match &self.queued {
            Some(queued) if !self.is_needless && !queued.is_over() => {
                let (word, expected) = queued.parked();
                Polled::Pending(ParkedOn::new(word, expected))
            }
            _ => Polled::Ready(None),
        }
    }

    /// Waits in the calling thread, with the message of the faulting thread. Returns false if that
    /// message cannot be queued without sleeping.
    ///
    /// # Errors
    /// [`FaultError::Interrupted`].
    pub(in crate::space) fn wait(
        &mut self,
        space: &AddressSpace<'m, P>,
        request: &FaultRequest,
        vma_lock: &mut VmaLockWait,
    ) -> Result<bool, FaultError> {
        match self.poll(space, request, vma_lock) {
            Polled::Ready(_) => return Ok(true),
            Polled::NeedsThread => return Ok(false),
            Polled::Pending(_) => {}
        }
        let Some(queued) = &self.queued else { return Ok(false) };
        match queued.wait(interrupts(request)) {
            Ending::Woken | Ending::Closed => Ok(true),
            Ending::Interrupted => Err(FaultError::Interrupted),
        }
    }
}

impl<P: Platform> fmt::Debug for PolledHandler<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolledHandler").field("queued", &self.queued).finish_non_exhaustive()
    }
}

/// Whether the entry of a formerly missing page allows the access, so that the access can be
/// retried: the TLB has no older entry. False if the MMU may cache empty entries.
fn is_mapped<P: Platform>(space: &AddressSpace<'_, P>, request: &FaultRequest) -> bool {
    if P::Arch::INVALID_MAY_BE_CACHED {
        return false;
    }
    let section = space.page_table.read_section();
    let EntryAt { node, entry, .. } =
        space.page_table.peek(&section, request.page, &mut Counts::default());
    node.level.kind(entry) == Kind::Leaf
        && P::Arch::attributes(entry).permissions.contains(request.access.permission())
}

/// The reason why a fault in a registered VMA has to wait for a handler, if any.
fn userfault_kind<P: Platform>(fault: &Fault<'_, '_, P>) -> Option<UserfaultKind> {
    let (kind, entry) = {
        let section = fault.read_section();
        let EntryAt { node, entry, .. } =
            fault.space.page_table.peek(&section, fault.page, &mut Counts::default());
        (node.level.kind(entry), entry)
    };
    match kind {
        Kind::Empty | Kind::Table => kind_of_vacant(fault),
        Kind::Leaf => {
            let protected = P::Arch::attributes(entry).userfault;
            kind_of_write(fault).filter(|_| protected)
        }
        Kind::Absent => match P::Arch::decode_absent(entry) {
            Some(Absent::Marker(Marker::UserfaultWriteProtect)) => {
                kind_of_vacant(fault).or_else(|| kind_of_write(fault))
            }
            Some(
                Absent::Marker(Marker::Poison | Marker::Guard)
                | Absent::Swap { .. }
                | Absent::ProtNone { .. },
            )
            | None => None,
        },
    }
}

/// As [`userfault_kind`], for an access to a write-protected page.
fn kind_of_write<P: Platform>(fault: &Fault<'_, '_, P>) -> Option<UserfaultKind> {
    let notified = fault.vma.has(MappingFlags::USERFAULT_WRITE_PROTECT)
        && fault.vma.userfault().is_some_and(|state| !state.has(UserfaultFeatures::WP_ASYNC));
    (fault.access == Access::Write && notified).then_some(UserfaultKind::WriteProtected)
}

/// As [`userfault_kind`], for an unmapped page.
fn kind_of_vacant<P: Platform>(fault: &Fault<'_, '_, P>) -> Option<UserfaultKind> {
    let vma = fault.vma;
    let has = if vma.is_anonymous() { false } else { object_has(fault)? };
    let (mode, kind) = if has {
        (MappingFlags::USERFAULT_MINOR, UserfaultKind::Minor)
    } else {
        (MappingFlags::USERFAULT_MISSING, UserfaultKind::Missing)
    };
    vma.has(mode).then_some(kind)
}

/// A waiting thread's reference to a userfaultfd, since the VMA may lose the userfaultfd during the
/// wait.
struct Held<'s, 'm, P: Platform> {
    space: &'s AddressSpace<'m, P>,
    state: NonNull<UserfaultState>,
}

impl<P: Platform> Held<'_, '_, P> {
    #[inline(always)]
    fn state(&self) -> &UserfaultState {
        // SAFETY: the userfaultfd is held until this value is dropped.
        unsafe { self.state.as_ref() }
    }
}

impl<P: Platform> Drop for Held<'_, '_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the reference was added when this value was made, and this is its last use.
        unsafe { userfault::release(self.space.page_table.memory, self.state) };
    }
}
