//! A user program on the hosted machine: it loads, stores and fetches through the MMU of its CPU,
//! and the core resolves its faults, as in a kernel.

use bindery::addr::VirtAddr;
use bindery::{Access, AddressSpace, FaultError};

use crate::machine::Machine;
use crate::mmu::{AccessKind, MmuFault, Walk};

/// A program in an address space, on the CPU of the calling thread.
pub struct Program<'a, 'm, A: Walk> {
    machine: &'a Machine<A>,
    space: &'a AddressSpace<'m, Machine<A>>,
}

impl<'a, 'm, A: Walk> Program<'a, 'm, A> {
    /// A program in `space`, whose memory lives on `machine`. Loads the address space, so the CPU
    /// receives its invalidations from here on.
    pub fn new(machine: &'a Machine<A>, space: &'a AddressSpace<'m, Machine<A>>) -> Self {
        space.enter();
        Self { machine, space }
    }

    fn resolve(&self, fault: MmuFault) -> Result<(), FaultError> {
        let access = match fault.access {
            AccessKind::Read => Access::Read,
            AccessKind::Write => Access::Write,
            AccessKind::Execute => Access::Execute,
        };
        self.space.fault(fault.addr, access).map(|_| ())
    }

    /// Loads bytes.
    ///
    /// # Errors
    /// The fault that was not resolved: the program's signal.
    pub fn read(&self, at: VirtAddr, into: &mut [u8]) -> Result<(), FaultError> {
        self.machine.read_user(self.space.root(), at, into, |fault| self.resolve(fault))
    }

    /// Stores bytes.
    ///
    /// # Errors
    /// The fault that was not resolved; the bytes before the faulting page are written.
    pub fn write(&self, at: VirtAddr, from: &[u8]) -> Result<(), FaultError> {
        self.machine.write_user(self.space.root(), at, from, |fault| self.resolve(fault))
    }

    /// Stores one byte repeatedly.
    ///
    /// # Errors
    /// As for [`Program::write`].
    pub fn fill(&self, at: VirtAddr, len: u64, byte: u8) -> Result<(), FaultError> {
        self.machine.fill_user(self.space.root(), at, len, byte, |fault| self.resolve(fault))
    }

    /// Loads eight bytes.
    ///
    /// # Errors
    /// As for [`Program::read`].
    pub fn load(&self, at: VirtAddr) -> Result<u64, FaultError> {
        self.machine.load_user(self.space.root(), at, |fault| self.resolve(fault))
    }

    /// Stores eight bytes.
    ///
    /// # Errors
    /// As for [`Program::write`].
    pub fn store(&self, at: VirtAddr, value: u64) -> Result<(), FaultError> {
        self.machine.store_user(self.space.root(), at, value, |fault| self.resolve(fault))
    }

    /// Fetches the instruction at an address.
    ///
    /// # Errors
    /// As for [`Program::read`].
    pub fn execute(&self, at: VirtAddr) -> Result<(), FaultError> {
        self.machine.execute_user(self.space.root(), at, |fault| self.resolve(fault))
    }
}
