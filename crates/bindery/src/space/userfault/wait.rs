//! A fault waits for its handler.

use crate::addr::VirtAddr;
use crate::arch::{Absent, AbsentFormat, Arch, Kind, Marker};
use crate::error::FaultError;
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::fault::{Access, FaultRequest, Origin};
use crate::stats::Counts;
use crate::table::{EntryAt, ReadSection};
use crate::userfault::{
    self, Content, Ending, UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultScope,
    UserfaultState, Waiter,
};
use crate::vma::{MappingFlags, Vma, VmaReadGuard};

/// The outcome of a fault in a registered VMA.
pub(in crate::space) enum Served<'a, P: Platform> {
    /// No handler serves it: it is resolved like any other fault.
    GoOn(VmaReadGuard<'a, P>),
    /// It has waited, or something has changed.
    LookAgain,
    /// It has waited for a page that was missing, and is there now.
    Mapped,
    /// It fails.
    Refused(FaultError),
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Lets a fault in a VMA that is registered wait for its handler, if that serves it. The VMA
    /// is not locked any more while it waits.
    #[cold]
    #[inline(never)]
    pub(in crate::space) fn serve_by_userfault<'a>(
        &self,
        locked: VmaReadGuard<'a, P>,
        fault: &FaultRequest,
    ) -> Served<'a, P> {
        let vma = locked.vma();
        let Some(kind) = self.userfault_kind(vma, fault.page, fault.access) else {
            return Served::GoOn(locked);
        };
        let (Some(pointer), Some(state)) = (vma.userfault_pointer(), vma.userfault()) else {
            return Served::GoOn(locked);
        };
        if state.is_closed() {
            return Served::GoOn(locked);
        }
        let unserved = fault.origin == Origin::Kernel && state.scope() == UserfaultScope::UserMode;
        if unserved || state.has(UserfaultFeatures::SIGBUS) {
            return Served::Refused(FaultError::Bus);
        }
        let waiter = Waiter::new(Content::Fault(self.message(state, fault, kind)));
        // The VMA may lose it while the fault waits.
        state.hold();
        let held = Held { space: self, state, pointer };
        // SAFETY: 1. the waiter stays in this frame until `wait` or `withdraw` has returned.
        if !unsafe { state.queue(self.platform(), &waiter) } {
            drop(held);
            return Served::LookAgain;
        }
        // With the message queued: whoever fills the page from here on finds it.
        if self.userfault_kind(vma, fault.page, fault.access) != Some(kind) {
            state.withdraw(self.platform(), &waiter);
            drop(held);
            return Served::LookAgain;
        }
        drop(locked);
        let platform = self.platform();
        let interrupted = || match fault.origin {
            Origin::Program => platform.signal(),
            Origin::Kernel => platform.fatal_signal(),
        };
        match held.state.wait(platform, &waiter, interrupted) {
            Ending::Interrupted => Served::Refused(FaultError::Interrupted),
            Ending::Woken if kind == UserfaultKind::Missing && self.is_mapped(fault) => {
                Served::Mapped
            }
            Ending::Woken | Ending::Closed => Served::LookAgain,
        }
    }

    fn message(
        &self,
        state: &UserfaultState,
        fault: &FaultRequest,
        kind: UserfaultKind,
    ) -> UserfaultFault {
        let exact = state.has(UserfaultFeatures::EXACT_ADDRESS);
        let named = state.has(UserfaultFeatures::THREAD_ID);
        UserfaultFault {
            address: if exact { fault.addr } else { fault.page },
            kind,
            is_write: fault.access == Access::Write,
            thread: if named { self.platform().thread() } else { 0 },
        }
    }

    /// Whether the entry of a page that was missing allows the access: the MMU remembers
    /// no older one. Where it may remember that nothing was there, the fault looks again.
    fn is_mapped(&self, fault: &FaultRequest) -> bool {
        if P::Arch::INVALID_MAY_BE_CACHED {
            return false;
        }
        let section = ReadSection::enter(self.platform());
        let EntryAt { node, entry, .. } =
            self.page_table.peek(&section, fault.page, &mut Counts::default());
        node.level.kind(entry) == Kind::Leaf
            && P::Arch::attributes(entry).permissions.contains(fault.access.permission())
    }

    /// Why the fault has to wait, in a VMA that is locked and registered.
    fn userfault_kind(&self, vma: &Vma, page: VirtAddr, access: Access) -> Option<UserfaultKind> {
        let EntryAt { node, entry, .. } = {
            let section = ReadSection::enter(self.platform());
            self.page_table.peek(&section, page, &mut Counts::default())
        };
        match node.level.kind(entry) {
            Kind::Empty | Kind::Table => self.kind_of_vacant(vma, page),
            Kind::Leaf => {
                let protected = P::Arch::attributes(entry).userfault;
                self.kind_of_write(vma, access).filter(|_| protected)
            }
            Kind::Absent => match P::Arch::decode_absent(entry) {
                Some(Absent::Marker(Marker::UserfaultWriteProtect)) => {
                    self.kind_of_vacant(vma, page).or_else(|| self.kind_of_write(vma, access))
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

    /// As [`AddressSpace::userfault_kind`], of an access to what is write-protected.
    fn kind_of_write(&self, vma: &Vma, access: Access) -> Option<UserfaultKind> {
        let told = vma.has(MappingFlags::USERFAULT_WRITE_PROTECT)
            && vma.userfault().is_some_and(|state| !state.has(UserfaultFeatures::WP_ASYNC));
        (access == Access::Write && told).then_some(UserfaultKind::WriteProtected)
    }

    /// As [`AddressSpace::userfault_kind`], where no page is mapped.
    fn kind_of_vacant(&self, vma: &Vma, page: VirtAddr) -> Option<UserfaultKind> {
        let has = if vma.is_anonymous() { false } else { self.object_has(vma, page)? };
        let (mode, kind) = if has {
            (MappingFlags::USERFAULT_MINOR, UserfaultKind::Minor)
        } else {
            (MappingFlags::USERFAULT_MISSING, UserfaultKind::Missing)
        };
        vma.has(mode).then_some(kind)
    }
}

/// A hold of a waiting thread.
struct Held<'s, 'm, P: Platform> {
    space: &'s AddressSpace<'m, P>,
    state: &'s UserfaultState,
    pointer: core::ptr::NonNull<UserfaultState>,
}

impl<P: Platform> Drop for Held<'_, '_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. taken when this was made.
        unsafe { userfault::release(self.space.page_table.memory, self.pointer) };
    }
}
