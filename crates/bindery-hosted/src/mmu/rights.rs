//! Rights: the kind of an access, and the accesses that an entry allows to either mode.

use bindery::addr::VirtAddr;
use bindery::arch::Permissions;

/// The kind of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum AccessKind {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

impl AccessKind {
    /// The permission that the access needs.
    #[inline]
    fn needs(self) -> Permissions {
        match self {
            Self::Read => Permissions::READ,
            Self::Write => Permissions::WRITE,
            Self::Execute => Permissions::EXECUTE,
        }
    }
}

/// The mode of an access. The kernel may not access user-mode pages, as kernels configure their
/// machines (x86-64: SMAP and SMEP, and CR0.WP; AArch64: PAN and PXN; RISC-V: `sstatus.SUM` clear).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Mode {
    /// A program, which may use pages with [`Permissions::USER`].
    User,
    /// The kernel, which may use all other pages.
    Kernel,
}

/// An access: its kind and its mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    pub(crate) kind: AccessKind,
    pub(crate) mode: Mode,
}

impl Access {
    /// Whether a translation with these permissions allows the access.
    #[inline]
    pub(crate) fn is_allowed(self, permissions: Permissions) -> bool {
        let needed = match self.mode {
            Mode::User => self.kind.needs() | Permissions::USER,
            Mode::Kernel => self.kind.needs(),
        };
        permissions & (needed | Permissions::USER) == needed
    }

    #[inline]
    pub(crate) fn is_write(self) -> bool {
        self.kind == AccessKind::Write
    }
}

/// A refused access: the page fault that the kernel receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmuFault {
    /// The address that was used.
    pub addr: VirtAddr,
    /// The kind of access.
    pub access: AccessKind,
    /// Whether a translation exists that does not allow the access or is malformed. If false, no
    /// translation exists.
    pub present: bool,
}

/// The accesses that an entry allows to each mode. A leaf belongs to one mode, but some formats
/// have separate execute bits for each mode, and a table above may revoke user-mode access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    /// For user mode; without [`Permissions::USER`], none.
    pub user: Permissions,
    /// For the kernel, if user mode has none. Never with [`Permissions::USER`].
    pub kernel: Permissions,
}

impl Rights {
    /// All rights, for any access.
    pub(crate) fn all() -> Self {
        Self::same(Permissions::all())
    }

    /// For formats in which only [`Permissions::USER`] distinguishes the modes.
    pub(crate) fn same(permissions: Permissions) -> Self {
        Self { user: permissions, kernel: permissions - Permissions::USER }
    }

    /// The rights that both operands allow.
    pub(crate) fn both(self, other: Self) -> Self {
        Self { user: self.user & other.user, kernel: self.kernel & other.kernel }
    }

    /// Whether `self` allows everything that `other` allows.
    pub(crate) fn contains(self, other: Self) -> bool {
        self.user.contains(other.user) && self.kernel.contains(other.kernel)
    }

    /// The permissions that a translation with these rights has for its mode.
    pub(crate) fn permissions(self) -> Permissions {
        if self.user.contains(Permissions::USER) { self.user } else { self.kernel }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_may_use_its_own_pages_alone() {
        let kernel = Permissions::READ | Permissions::WRITE;
        let user = kernel | Permissions::USER;
        for (kind, allowed) in
            [(AccessKind::Read, true), (AccessKind::Write, true), (AccessKind::Execute, false)]
        {
            let by = |mode| Access { kind, mode };
            assert_eq!(by(Mode::User).is_allowed(user), allowed);
            assert_eq!(by(Mode::Kernel).is_allowed(kernel), allowed);
            assert!(!by(Mode::User).is_allowed(kernel) && !by(Mode::Kernel).is_allowed(user));
        }
    }

    #[test]
    fn a_kernel_table_makes_its_leaves_the_kernels() {
        let leaf = Rights { user: Permissions::all(), kernel: Permissions::READ };
        assert_eq!(leaf.permissions(), Permissions::all());
        let table = Rights::same(Permissions::all() - Permissions::USER);
        assert_eq!(leaf.both(table).permissions(), Permissions::READ);
        assert!(leaf.contains(leaf.both(table)) && !leaf.both(table).contains(leaf));
    }
}
