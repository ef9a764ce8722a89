//! Who may do what: the access that is made, and what an entry allows to either mode.

use bindery::addr::VirtAddr;
use bindery::arch::Permissions;

/// What is done with memory.
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
    /// The permission that it takes.
    #[inline]
    fn needs(self) -> Permissions {
        match self {
            Self::Read => Permissions::READ,
            Self::Write => Permissions::WRITE,
            Self::Execute => Permissions::EXECUTE,
        }
    }
}

/// Who does it. Pages of user mode are closed to the kernel, as kernels set their machines up
/// (x86-64: SMAP and SMEP, and CR0.WP; AArch64: PAN and PXN; RISC-V: `sstatus.SUM` clear).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Mode {
    /// A program: it may use what has [`Permissions::USER`].
    User,
    /// The kernel: it may use what has not.
    Kernel,
}

/// An access: what, and by whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    pub(crate) kind: AccessKind,
    pub(crate) mode: Mode,
}

impl Access {
    /// Whether a translation with these permissions serves it.
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

/// The MMU refused an access: the page fault that the kernel gets to see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmuFault {
    /// The address that was used.
    pub addr: VirtAddr,
    /// How.
    pub access: AccessKind,
    /// There is a translation, and it does not allow the access (or it is malformed). Otherwise
    /// there is none.
    pub present: bool,
}

/// What an entry allows to each mode. A leaf belongs to one of them, but some formats say
/// separately what each might execute, and a table above may take a leaf away from user mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    /// To user mode; [`Permissions::USER`] says whether anything at all.
    pub user: Permissions,
    /// To the kernel, where user mode may do nothing. Never with [`Permissions::USER`].
    pub kernel: Permissions,
}

impl Rights {
    /// Everything, to any access.
    pub(crate) fn all() -> Self {
        Self::same(Permissions::all())
    }

    /// Of formats in which only [`Permissions::USER`] tells the modes apart.
    pub(crate) fn same(permissions: Permissions) -> Self {
        Self { user: permissions, kernel: permissions - Permissions::USER }
    }

    /// What both allow.
    pub(crate) fn both(self, other: Self) -> Self {
        Self { user: self.user & other.user, kernel: self.kernel & other.kernel }
    }

    /// Whether this allows all that `other` does.
    pub(crate) fn contains(self, other: Self) -> bool {
        self.user.contains(other.user) && self.kernel.contains(other.kernel)
    }

    /// What a translation with these rights allows to the mode that it belongs to.
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
    fn a_table_that_is_not_the_users_makes_its_leaves_the_kernels() {
        let leaf = Rights { user: Permissions::all(), kernel: Permissions::READ };
        assert_eq!(leaf.permissions(), Permissions::all());
        let table = Rights::same(Permissions::all() - Permissions::USER);
        assert_eq!(leaf.both(table).permissions(), Permissions::READ);
        assert!(leaf.contains(leaf.both(table)) && !leaf.both(table).contains(leaf));
    }
}
