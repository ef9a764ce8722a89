//! A machine with a few CPUs, an address space with registered memory, and its userfaultfd.

use std::thread::{Scope, ScopedJoinHandle};

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    AddressSpace, FaultError, FillMode, Memory, PartialFill, Userfault, UserfaultFault,
    UserfaultFeatures, UserfaultMessage, UserfaultModes, UserfaultScope,
};
use bindery_hosted::{Config, Machine, Program};

use crate::support::{GIB, MIB, audit, fixed, memory_with, options};

pub type A = X86_64<4>;
pub type Space<'m> = AddressSpace<'m, Machine<A>>;
pub type Fd<'m> = Userfault<'m, Machine<A>>;

pub const PAGE: u64 = 4096;
/// Mapped and registered pages from [`AT`] on.
pub const PAGES: u64 = 1024;
pub const AT: u64 = GIB;

/// The address of a registered page.
pub fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

/// The parts available to a test.
pub struct Fixture<'s, 'm> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    pub space: &'s Space<'m>,
    pub fd: &'s Fd<'m>,
}

/// The fixture's options for a test.
#[derive(Clone, Copy)]
pub struct Wish {
    pub features: UserfaultFeatures,
    pub scope: UserfaultScope,
    pub modes: UserfaultModes,
}

impl Default for Wish {
    fn default() -> Self {
        Self {
            features: UserfaultFeatures::empty(),
            scope: UserfaultScope::All,
            modes: UserfaultModes::MISSING,
        }
    }
}

/// Runs `scenario` with memory that is registered for missing pages.
pub fn with_fixture(scenario: impl FnOnce(&Fixture<'_, '_>)) {
    with_wish(Wish::default(), scenario);
}

/// As [`with_fixture`], with these features.
pub fn with_features(features: UserfaultFeatures, scenario: impl FnOnce(&Fixture<'_, '_>)) {
    with_wish(Wish { features, ..Wish::default() }, scenario);
}

/// Runs `scenario` with a fixture. No memory may be left in use afterwards.
pub fn with_wish(wish: Wish, scenario: impl FnOnce(&Fixture<'_, '_>)) {
    let (machine, memory) =
        memory_with::<A>(Config { memory: 64 * MIB, cpus: 4, ..Config::default() });
    let free = memory.free_frame_count();
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
        let fd = space.userfault(wish.features, wish.scope).unwrap();
        space.register_userfault(&fd, VirtAddr(AT), PAGES * PAGE, wish.modes).unwrap();
        scenario(&Fixture { machine: &machine, memory: &memory, space: &space, fd: &fd });
        audit(&machine, &memory, &[&space]);
        space.close_userfault(fd);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

impl Fixture<'_, '_> {
    /// Runs a program on another CPU.
    pub fn spawn<'t, T: Send + 't>(
        &'t self,
        scope: &'t Scope<'t, '_>,
        cpu: u16,
        run: impl FnOnce(&Program<'_, '_, A>) -> T + Send + 't,
    ) -> ScopedJoinHandle<'t, T> {
        scope.spawn(move || {
            self.machine.on_cpu(Cpu(cpu), || run(&Program::new(self.machine, self.space)))
        })
    }

    /// The next message, which is a fault.
    #[track_caller]
    pub fn fault(&self) -> UserfaultFault {
        match self.fd.read().unwrap() {
            UserfaultMessage::Fault(fault) => fault,
            other => panic!("{other:?} and no fault"),
        }
    }

    /// Fills `length` bytes at a page with `byte`.
    pub fn copy(&self, page: u64, length: u64, byte: u8) -> Result<(), PartialFill> {
        self.copy_as(page, length, byte, FillMode::empty())
    }

    pub fn copy_as(
        &self,
        page: u64,
        length: u64,
        byte: u8,
        mode: FillMode,
    ) -> Result<(), PartialFill> {
        let mut source = |_, piece: &mut [u8]| {
            piece.fill(byte);
            Ok::<(), FaultError>(())
        };
        self.space.handler(self.fd).fill_copy(at(page), length, mode, &mut source)
    }

    /// The first byte of a page, read by the program.
    pub fn byte(&self, page: u64) -> u8 {
        let mut byte = [0];
        Program::new(self.machine, self.space).read(at(page), &mut byte).unwrap();
        byte[0]
    }
}
