//! A fixture for tests that break invariants or make calls that the core must refuse: one address
//! space with a program in it, on a strict machine that is audited after the scenario.

use bindery::addr::{Frame, VirtAddr};
use bindery::check::{self, Violation};
use bindery::{AddressSpace, Inspection, Mapping, Memory};
use bindery_hosted::{Machine, Program, Walk};

use crate::{MIB, audit, options, strict, use_order};

/// The parts available to a scenario.
pub struct Fixture<'s, 'm, A: Walk> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    pub space: &'s AddressSpace<'m, Machine<A>>,
    pub program: Program<'s, 'm, A>,
}

/// Runs `scenario` with a fixture whose faults may use folios of 2^`order` pages. Afterwards audits
/// the system, drops the address space, and verifies that nothing has leaked.
#[track_caller]
pub fn with_fixture<A: Walk>(order: u8, scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, order);
    let free = memory.free_frame_count();
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let program = Program::new(&machine, &space);
        let fixture = Fixture { machine: &machine, memory: &memory, space: &space, program };
        scenario(&fixture);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    bindery::testing::forget_areas(&memory);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

impl<'m, A: Walk> Fixture<'_, 'm, A> {
    /// Writes a distinct value to every page.
    pub fn fill(&self, at: u64, pages: u64) {
        for page in 0..pages {
            self.program.store(VirtAddr(at + page * 4096), at + page).unwrap();
        }
    }

    /// Asserts that pages at `at` have the values that [`Fixture::fill`] wrote at `from`.
    #[track_caller]
    pub fn assert_filled(&self, at: u64, pages: u64, from: u64) {
        for page in 0..pages {
            let there = self.program.load(VirtAddr(at + page * 4096));
            assert_eq!(there, Ok(from + page), "page {page} at {at:#x}");
        }
    }

    /// The frame that the page at `at` maps.
    #[track_caller]
    pub fn frame(&self, at: u64) -> Frame {
        match self.space.inspect(VirtAddr(at)) {
            Inspection::Page { frame, .. } => frame,
            other @ (Inspection::Empty | Inspection::Absent(_)) => panic!("{at:#x} is {other:?}"),
        }
    }

    /// The auditor's verdict on this address space and `others`.
    #[track_caller]
    pub fn broken(&self, others: &[&AddressSpace<'m, Machine<A>>]) -> Violation {
        let mut spaces = vec![self.space];
        spaces.extend(others);
        let mut scratch = vec![0; check::scratch_words(self.memory)];
        match check::check(self.memory, &spaces, &mut scratch) {
            Ok(_) => panic!("the auditor finds nothing wrong"),
            Err(violation) => {
                assert!(!violation.to_string().is_empty());
                violation
            }
        }
    }

    /// All mappings.
    pub fn layout(&self) -> Vec<Mapping> {
        layout(self.space)
    }
}

/// All mappings of an address space.
pub fn layout<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> Vec<Mapping> {
    let mut layout = Vec::new();
    space.for_each_mapping(|mapping| layout.push(mapping));
    layout
}
