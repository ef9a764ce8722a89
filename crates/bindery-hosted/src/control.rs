//! Control bits: the machine has them all as the core requires, except one that a test breaks
//! ([`Config::broken`](crate::Config::broken)), to verify that
//! [`check::machine`](bindery::check::machine) reports it.

use bindery::addr::VirtAddr;
use bindery::arch::{MemoryType, Permissions, Register};
use bindery::check::{AccessBy, AccessFault, Accesses};
use bindery::{AddressSpace, KernelMap};

use crate::machine::Machine;
use crate::mmu::{Access, AccessKind, Leaf, Mode, Translation, Walk};

/// A wrong setting of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum BrokenControl {
    /// x86-64 `EFER.NXE` is clear: bit 63 of an entry is reserved.
    NoExecute,
    /// x86-64 `CR0.WP` is clear: the kernel writes through read-only entries.
    WriteProtect,
    /// x86-64 `CR4.PGE` is clear; only the register shows it.
    GlobalPages,
    /// x86-64 `CR4.PCIDE` is clear; only the register shows it.
    ContextIdentifiers,
    /// x86-64 `CR4.SMEP` is clear: the kernel executes pages of user mode.
    UserExecution,
    /// x86-64 `CR4.SMAP` or AArch64 `PSTATE.PAN` is clear, RISC-V `sstatus.SUM` is set: the kernel
    /// reads and writes pages of user mode.
    UserAccess,
    /// `IA32_PAT` or `MAIR_EL1` has its reset value; only the register shows it.
    MemoryTypes,
    /// AArch64 `SCTLR_EL1.WXN` is set: writable pages are not executable.
    WriteExecuteNever,
    /// AArch64 `TCR_EL1.HA` or RISC-V `menvcfg.ADUE` is clear: the first use faults.
    HardwareAccessed,
    /// AArch64 `TCR_EL1.HD` is clear: the first write faults.
    HardwareDirty,
    /// RISC-V `sstatus.MXR` is set: executable pages are readable.
    ExecutableReadable,
    /// RISC-V without Svnapot: the N bit of an entry is reserved.
    Contiguous,
    /// RISC-V `menvcfg.PBMTE` is clear: the memory type of an entry is reserved.
    PageBasedTypes,
    /// Not a control bit: [`Platform::invalidate`](bindery::Platform::invalidate) and similar
    /// functions do nothing.
    Invalidation,
}

impl BrokenControl {
    /// The access to try instead of a refused kernel access, if only the broken control bit,
    /// correctly set, would cause the refusal.
    pub(crate) fn passes_for(self, access: Access) -> Option<Access> {
        let Access { kind, mode } = access;
        if mode == Mode::User {
            return None;
        }
        let (refused, other) = match self {
            Self::WriteProtect => {
                (kind == AccessKind::Write, Access { kind: AccessKind::Read, mode })
            }
            Self::ExecutableReadable => {
                (kind == AccessKind::Read, Access { kind: AccessKind::Execute, mode })
            }
            Self::UserExecution => (kind == AccessKind::Execute, Access { kind, mode: Mode::User }),
            Self::UserAccess => (kind != AccessKind::Execute, Access { kind, mode: Mode::User }),
            Self::NoExecute
            | Self::GlobalPages
            | Self::ContextIdentifiers
            | Self::MemoryTypes
            | Self::WriteExecuteNever
            | Self::HardwareAccessed
            | Self::HardwareDirty
            | Self::Contiguous
            | Self::PageBasedTypes
            | Self::Invalidation => return None,
        };
        refused.then_some(other)
    }

    /// Whether an entry has a reserved bit set.
    pub(crate) fn reserves(self, entry: u64, leaf: &Leaf) -> bool {
        match self {
            Self::NoExecute => entry >> 63 != 0,
            Self::Contiguous => leaf.block > 0,
            Self::PageBasedTypes => leaf.memory != MemoryType::Normal,
            Self::WriteProtect
            | Self::GlobalPages
            | Self::ContextIdentifiers
            | Self::UserExecution
            | Self::UserAccess
            | Self::MemoryTypes
            | Self::WriteExecuteNever
            | Self::HardwareAccessed
            | Self::HardwareDirty
            | Self::ExecutableReadable
            | Self::Invalidation => false,
        }
    }

    /// Removes from a translation the permissions that the MMU does not grant.
    pub(crate) fn narrow(self, found: &mut Translation) {
        if self == Self::WriteExecuteNever && found.permissions.contains(Permissions::WRITE) {
            found.permissions -= Permissions::EXECUTE;
        }
    }

    /// Whether the MMU leaves recording this use to software.
    pub(crate) fn refuses_to_record(self, found: &Translation, access: Access) -> bool {
        match self {
            Self::HardwareAccessed => !found.accessed,
            Self::HardwareDirty => access.is_write() && !found.dirty,
            Self::NoExecute
            | Self::WriteProtect
            | Self::GlobalPages
            | Self::ContextIdentifiers
            | Self::UserExecution
            | Self::UserAccess
            | Self::MemoryTypes
            | Self::WriteExecuteNever
            | Self::ExecutableReadable
            | Self::Contiguous
            | Self::PageBasedTypes
            | Self::Invalidation => false,
        }
    }
}

/// The hosted machine's accesses for [`check::machine`](bindery::check::machine).
pub struct SelfTest<'a, 'm, A: Walk> {
    machine: &'a Machine<A>,
    map: &'a KernelMap<'m, Machine<A>>,
    space: &'a AddressSpace<'m, Machine<A>>,
}

impl<'a, 'm, A: Walk> SelfTest<'a, 'm, A> {
    /// Accesses on the CPU of the calling thread, which has loaded both roots.
    pub fn new(
        machine: &'a Machine<A>,
        map: &'a KernelMap<'m, Machine<A>>,
        space: &'a AddressSpace<'m, Machine<A>>,
    ) -> Self {
        space.enter();
        Self { machine, map, space }
    }

    fn root(&self, at: VirtAddr) -> bindery::addr::Frame {
        if at.0 < A::USER_END { self.space.root() } else { self.map.root() }
    }
}

/// The fault as the architecture reports it.
fn access_fault(fault: crate::MmuFault) -> AccessFault {
    if fault.present { AccessFault::Denied } else { AccessFault::NotMapped }
}

impl<A: Walk> Accesses for SelfTest<'_, '_, A> {
    fn read(&mut self, at: VirtAddr, by: AccessBy) -> Result<u64, AccessFault> {
        let (machine, root) = (self.machine, self.root(at));
        let mut bytes = [0; 8];
        match by {
            AccessBy::Kernel => machine.read_kernel(root, at, &mut bytes),
            AccessBy::UserCopy => machine.read_user(root, at, &mut bytes, Err),
        }
        .map(|()| u64::from_ne_bytes(bytes))
        .map_err(access_fault)
    }

    fn write(&mut self, at: VirtAddr, value: u64, by: AccessBy) -> Result<(), AccessFault> {
        let (machine, root, bytes) = (self.machine, self.root(at), value.to_ne_bytes());
        match by {
            AccessBy::Kernel => machine.write_kernel(root, at, &bytes),
            AccessBy::UserCopy => machine.write_user(root, at, &bytes, Err),
        }
        .map_err(access_fault)
    }

    fn execute(&mut self, at: VirtAddr) -> Result<(), AccessFault> {
        self.machine.execute_kernel(self.root(at), at).map_err(access_fault)
    }

    fn code(&self) -> &[u8] {
        // The hosted machine neither fetches nor executes instructions.
        &[0xc3]
    }

    fn register(&mut self, register: Register) -> Option<u64> {
        Some(self.machine.register(register))
    }
}

impl<A: Walk> Machine<A> {
    /// A control register: with the bits of the manuals, except the broken one.
    pub fn register(&self, register: Register) -> u64 {
        let is_broken = |bit| self.broken() == Some(bit);
        let set = |broken, position: u32| u64::from(!is_broken(broken)) << position;
        let clear = |broken, position: u32| u64::from(is_broken(broken)) << position;
        match register {
            Register::Cr0 => set(BrokenControl::WriteProtect, 16),
            Register::Cr4 => {
                set(BrokenControl::GlobalPages, 7)
                    | set(BrokenControl::ContextIdentifiers, 17)
                    | set(BrokenControl::UserExecution, 20)
                    | set(BrokenControl::UserAccess, 21)
                    | 1 << 22
            }
            Register::Efer => set(BrokenControl::NoExecute, 11),
            Register::Pat if is_broken(BrokenControl::MemoryTypes) => 0x0007_0406_0007_0406,
            Register::Pat => 0x0004_0106_0004_0106,
            Register::SctlrEl1 => clear(BrokenControl::WriteExecuteNever, 19),
            Register::TcrEl1 => {
                set(BrokenControl::HardwareAccessed, 39) | set(BrokenControl::HardwareDirty, 40)
            }
            Register::MairEl1 if is_broken(BrokenControl::MemoryTypes) => 0,
            Register::MairEl1 => 0xbb_0044_04ff,
            Register::Sstatus => {
                clear(BrokenControl::UserAccess, 18) | clear(BrokenControl::ExecutableReadable, 19)
            }
            _ => 0,
        }
    }
}
