//! A fault waits for its handler.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use super::shared::object_has;
use crate::arch::{Absent, AbsentFormat, Arch, Kind, Marker};
use crate::error::{Failure, FaultError};
use crate::object::{HandlerWait, Wait};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::fault::{Access, Fault, FaultRequest, Origin, wait_for_known};
use crate::stats::Counts;
use crate::table::EntryAt;
use crate::userfault::{
    self, Interrupts, UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultScope,
    UserfaultState,
};
use crate::vma::{MappingFlags, VmaReadGuard};

/// The result of a fault in a registered VMA, if it does not fail.
pub(in crate::space) enum Served<'a, P: Platform> {
    /// No handler serves it: it is resolved like any other fault.
    Unserved(VmaReadGuard<'a, P>),
    /// It has waited, or something has changed: it begins again.
    Again,
    /// It has waited for a missing page, which is mapped now.
    Mapped,
}

/// Lets a fault in a registered VMA wait for its handler, if the userfaultfd serves it.
///
/// The message is queued with the VMA locked, so that no change of the registration comes between.
/// Then the VMA is unlocked, and the fault waits ([`Wait::Handler`]). The message lies in the frame of
/// this call, and so does the wait: its caller would get a value that has expired.
///
/// # Errors
/// [`FaultError::Bus`] if the userfaultfd asks for signals or does not serve the kernel;
/// [`FaultError::Interrupted`].
#[cold]
#[inline(never)]
pub(in crate::space) fn serve_by_userfault<'a, P: Platform>(
    space: &AddressSpace<'_, P>,
    locked: VmaReadGuard<'a, P>,
    request: &FaultRequest,
) -> Result<Served<'a, P>, Failure<FaultError>> {
    let vma = locked.vma();
    let fault = Fault::new(space, vma, request.page, request.access);
    let Some(kind) = userfault_kind(&fault) else { return Ok(Served::Unserved(locked)) };
    let (Some(pointer), Some(state)) = (vma.userfault_pointer(), vma.userfault()) else {
        return Ok(Served::Unserved(locked));
    };
    if state.is_closed() {
        return Ok(Served::Unserved(locked));
    }
    let unserved = request.origin == Origin::Kernel && state.scope() == UserfaultScope::UserMode;
    if unserved || state.has(UserfaultFeatures::SIGBUS) {
        return Err(FaultError::Bus.into());
    }
    let platform = space.platform();
    let message = message(platform, state, request, kind);
    let interrupts = match request.origin {
        Origin::Program => Interrupts::Signal,
        Origin::Kernel => Interrupts::FatalSignal,
    };
    state.hold();
    let held = Held { space, state: pointer };
    let waited = held.state().with_queued(platform, message, |queued| {
        // Checked again with the message queued: a thread that fills the page from here on finds it.
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

fn message<P: Platform>(
    platform: &P,
    state: &UserfaultState,
    request: &FaultRequest,
    kind: UserfaultKind,
) -> UserfaultFault {
    let exact = state.has(UserfaultFeatures::EXACT_ADDRESS);
    let named = state.has(UserfaultFeatures::THREAD_ID);
    UserfaultFault {
        address: if exact { request.addr } else { request.page },
        kind,
        is_write: request.access == Access::Write,
        thread: if named { platform.thread() } else { 0 },
    }
}

/// Whether the entry of a page that was missing allows the access, so that the access can be
/// repeated: the TLB has no older entry. False if the MMU may cache empty entries.
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

/// The reason why a fault in a registered VMA has to wait for a handler, if it has to.
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

/// Like [`userfault_kind`], for an access to a write-protected page.
fn kind_of_write<P: Platform>(fault: &Fault<'_, '_, P>) -> Option<UserfaultKind> {
    let notified = fault.vma.has(MappingFlags::USERFAULT_WRITE_PROTECT)
        && fault.vma.userfault().is_some_and(|state| !state.has(UserfaultFeatures::WP_ASYNC));
    (fault.access == Access::Write && notified).then_some(UserfaultKind::WriteProtected)
}

/// Like [`userfault_kind`], for a page that is not mapped.
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

/// A waiting thread's hold of a userfaultfd: the VMA may lose the userfaultfd during the wait.
struct Held<'s, 'm, P: Platform> {
    space: &'s AddressSpace<'m, P>,
    state: NonNull<UserfaultState>,
}

impl<P: Platform> Held<'_, '_, P> {
    #[inline(always)]
    fn state(&self) -> &UserfaultState {
        // SAFETY: held until this is dropped.
        unsafe { self.state.as_ref() }
    }
}

impl<P: Platform> Drop for Held<'_, '_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the hold was added when this was made, and this is its last use.
        unsafe { userfault::release(self.space.page_table.memory, self.state) };
    }
}
