//! A fixture with a source and a destination, and a swap area.

use bindery::addr::{Frame, VirtAddr};
use bindery::arch::Absent;
use bindery::testing::{self, PageMove, move_pages};
use bindery::{AddressSpace, Counts, Errno, Inspection, Memory};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::{GIB, MIB, audit, fixed, options, strict, use_order};

pub const PAGE: u64 = 4096;
/// The source and the destination of pages: congruent modulo 2 MiB.
pub const FROM: u64 = 4 * GIB;
pub const TO: u64 = 8 * GIB;
/// The mapped size at either address.
pub const LENGTH: u64 = 24 * MIB;

/// The parts of the fixture that a scenario uses.
pub struct Moving<'s, 'm, A: Walk> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    pub space: &'s AddressSpace<'m, Machine<A>>,
    pub program: Program<'s, 'm, A>,
}

/// Runs `scenario` with an address space with folios of 2^`order` pages. Afterwards audits
/// everything, drops the address space, and verifies that nothing has leaked.
#[track_caller]
pub fn with_moving<A: Walk>(order: u8, scenario: impl FnOnce(&Moving<'_, '_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, order);
    let free = memory.free_frame_count();
    let area = memory.swap_on(4096, 0).expect("a swap area");
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(FROM, LENGTH)).unwrap();
        space.mmap(&fixed(TO, LENGTH)).unwrap();
        let program = Program::new(&machine, &space);
        let moving = Moving { machine: &machine, memory: &memory, space: &space, program };
        scenario(&moving);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.stop_swapping_to(&area);
    testing::forget_areas(&memory);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

/// A move without `UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`.
pub fn from_to(source: u64, destination: u64, length: u64) -> PageMove {
    let (source, destination) = (VirtAddr(source), VirtAddr(destination));
    PageMove { source, destination, length, ..PageMove::default() }
}

impl<A: Walk> Moving<'_, '_, A> {
    /// Writes a distinct value to every page.
    pub fn fill(&self, at: u64, pages: u64) {
        for page in 0..pages {
            self.program.store(VirtAddr(at + page * PAGE), at + page).unwrap();
        }
    }

    /// Whether the pages hold what [`Moving::fill`] wrote at `from`.
    #[track_caller]
    pub fn assert_filled(&self, at: u64, pages: u64, from: u64) {
        for page in 0..pages {
            let there = self.program.load(VirtAddr(at + page * PAGE));
            assert_eq!(there, Ok(from + page), "page {page} at {at:#x}");
        }
    }

    /// Asserts that the pages are empty.
    #[track_caller]
    pub fn assert_empty(&self, at: u64, pages: u64) {
        for page in 0..pages {
            let found = self.space.inspect(VirtAddr(at + page * PAGE));
            assert!(matches!(found, Inspection::Empty), "page {page} at {at:#x}: {found:?}");
        }
    }

    /// Moves, audits, and returns the result of the move.
    #[track_caller]
    pub fn try_move(&self, what: &PageMove) -> (u64, Result<(), Errno>) {
        let result = move_pages(self.space, what);
        audit(self.machine, self.memory, &[self.space]);
        result
    }

    /// Moves everything and returns the cost.
    #[track_caller]
    pub fn move_all(&self, source: u64, destination: u64, length: u64) -> Counts {
        let before = self.space.counts();
        let moved = self.try_move(&from_to(source, destination, length));
        assert_eq!(moved, (length, Ok(())));
        self.space.counts() - before
    }

    /// The frame that the page of `at` is mapped to.
    #[track_caller]
    pub fn frame(&self, at: u64) -> Frame {
        match self.space.inspect(VirtAddr(at)) {
            Inspection::Page { frame, .. } => frame,
            other => panic!("{at:#x} is {other:?}"),
        }
    }

    /// The number of the pages that are in swap.
    pub fn swapped(&self, at: u64, pages: u64) -> u64 {
        let is_out = |page: &u64| {
            let at = VirtAddr(at + page * PAGE);
            matches!(self.space.inspect(at), Inspection::Absent(Absent::Swap { .. }))
        };
        (0..pages).filter(is_out).count() as u64
    }
}
